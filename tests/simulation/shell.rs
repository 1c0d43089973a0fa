//! The controller's process as it will be: watches in, commands out, with everything that can go wrong between.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drayman::api::resource::PodSchedulingContext;
use drayman::core::claims::{
    Answer, CallId, ClaimWrite, Command, ControllerState, Event, Moment, ObjectKey, Outcome, Settings,
};
use drayman::driver::{Holding, Observation};

use crate::describe::{describe_command, describe_event};
use crate::driver::{DRIVER, FINALIZER, MemoryDriver};
use crate::faults::{Fault, Target};
use crate::stage::{Action, MILLISECOND, SECOND, Stage, Way, add};
use crate::store::{KINDS, Kind};

/// A life of the controller.
pub(crate) struct Process {
    pub(crate) world: ControllerState,
    started: u64,
    /// How far each watch has come.
    cursors: [usize; 3],
    /// Whether something is on its way by a watch; a watch that is not listed yet counts.
    busy: [bool; 3],
    /// How often each watch has started over.
    rounds: [u32; 3],
    decide_at: Option<u64>,
    /// By claim uid: the write or call under way.
    pub(crate) in_flight: BTreeMap<String, CallId>,
    pub(crate) uids: BTreeMap<CallId, Vec<String>>,
    /// Uids of claims for which an earlier process may have allocated something, until the driver has given that back.
    pub(crate) inherited: BTreeSet<String>,
    /// The contexts as the controller has been shown them.
    pub(crate) seen: BTreeMap<ObjectKey, Arc<PodSchedulingContext>>,
}

impl Process {
    fn note_contexts(&mut self, event: &Event) {
        match event {
            Event::Contexts(all) => {
                self.seen
                    .retain(|key, _| all.iter().any(|context| ObjectKey::of(&context.metadata) == *key));
                for context in all {
                    self.note_context(context);
                }
            }
            Event::Context(context) => self.note_context(context),
            Event::ContextGone { key, uid } => {
                self.seen
                    .retain(|known, context| known != key || context.metadata.uid.as_ref() != Some(uid));
            }
            Event::Answer {
                answer: Answer::ContextWritten(Outcome::Done(context)),
                ..
            } => {
                let key = ObjectKey::of(&context.metadata);
                if self
                    .seen
                    .get(&key)
                    .is_some_and(|known| known.metadata.uid == context.metadata.uid)
                {
                    self.note_context(context);
                }
            }
            _ => {}
        }
    }

    fn note_context(&mut self, context: &Arc<PodSchedulingContext>) {
        let version = |context: &PodSchedulingContext| -> u64 {
            let text = context.metadata.resource_version.as_deref().unwrap_or_default();
            text.parse().unwrap_or_default()
        };
        let key = ObjectKey::of(&context.metadata);
        if self
            .seen
            .get(&key)
            .is_none_or(|known| version(context) > version(known))
        {
            self.seen.insert(key, context.clone());
        }
    }
}

impl Stage {
    /// Starts the controller, when nothing that its predecessor sent can still arrive.
    pub(crate) fn start(&mut self) {
        if !self.network.is_empty() {
            self.after(SECOND, Action::Start);
            return;
        }
        self.note(|| "the controller starts".to_owned());
        self.generation += 1;
        let generation = self.generation;
        self.process = Some(Process {
            world: ControllerState::new(Settings::new(DRIVER)),
            started: self.now,
            cursors: [0; 3],
            busy: [true; 3],
            rounds: [0; 3],
            decide_at: None,
            in_flight: BTreeMap::new(),
            uids: BTreeMap::new(),
            inherited: BTreeSet::new(),
            seen: BTreeMap::new(),
        });
        for kind in KINDS {
            let delay = self.delay();
            let way = Way { kind, round: 0 };
            self.after(delay, Action::List { generation, way });
        }
    }

    /// Kills the controller. What it has sent may still arrive, or not.
    pub(crate) fn crash(&mut self) {
        let Some(process) = self.process.take() else {
            return;
        };
        self.note(|| "the controller is killed".to_owned());
        add(&mut self.statistics, &process.world.statistics());
        self.generation += 1;
        let sent: Vec<u64> = self.network.keys().copied().collect();
        for number in sent {
            if self.rng.chance(500) {
                self.network.remove(&number);
            }
        }
        self.calls.clear();
        if self.lasting_driver {
            self.driver.observed_all = false;
            self.driver.recorded.clear();
        } else {
            self.driver = MemoryDriver::default();
        }
        let delay = self.rng.between(10 * MILLISECOND, 3 * SECOND);
        self.after(delay, Action::Start);
    }

    // === watches ===

    /// The process, if it still is the one that this watch belongs to.
    fn listener(&mut self, generation: u32, way: Way) -> Option<&mut Process> {
        let current = generation == self.generation;
        self.process
            .as_mut()
            .filter(|process| current && process.rounds[way.kind as usize] == way.round)
    }

    pub(crate) fn take_list(&mut self, generation: u32, way: Way) {
        let event = self.store.list(way.kind);
        let end = self.store.history(way.kind).len();
        let Some(process) = self.listener(generation, way) else {
            return;
        };
        process.cursors[way.kind as usize] = end;
        let delay = self.delay();
        let from = Some(way);
        self.after(
            delay,
            Action::Deliver {
                generation,
                event,
                from,
            },
        );
    }

    pub(crate) fn feed_watches(&mut self) {
        let generation = self.generation;
        for kind in KINDS {
            let Some(process) = self.process.as_mut() else {
                return;
            };
            let index = kind as usize;
            if !process.busy[index] && process.cursors[index] < self.store.history(kind).len() {
                process.busy[index] = true;
                let round = process.rounds[index];
                let mut delay = self.delay();
                if self.faults.strikes(Fault::WatchStall, &mut self.rng) {
                    delay = self.rng.between(SECOND, 60 * SECOND);
                }
                let way = Way { kind, round };
                self.after(delay, Action::Watch { generation, way });
            }
        }
    }

    pub(crate) fn show_next(&mut self, generation: u32, way: Way) {
        if self.listener(generation, way).is_none() {
            return;
        }
        if self.faults.strikes(Fault::WatchRelist, &mut self.rng) {
            let delay = self.delay();
            self.after(delay, Action::List { generation, way });
            return;
        }
        let Some(process) = self.process.as_mut() else {
            return;
        };
        let cursor = &mut process.cursors[way.kind as usize];
        let Some(event) = self.store.history(way.kind).get(*cursor).cloned() else {
            process.busy[way.kind as usize] = false;
            return;
        };
        *cursor += 1;
        if self.faults.strikes(Fault::WatchDuplicate, &mut self.rng) {
            self.deliver(generation, event.clone(), None);
        }
        self.deliver(generation, event, Some(way));
    }

    /// A watch stands still until it is let go. What is on its way by it waits too.
    pub(crate) fn hold_watch(&mut self, kind: Kind) {
        if let Some(process) = self.process.as_mut() {
            process.busy[kind as usize] = true;
            process.rounds[kind as usize] += 1;
        }
    }

    pub(crate) fn let_watch_go(&mut self, kind: Kind) {
        if let Some(process) = self.process.as_mut() {
            process.busy[kind as usize] = false;
        }
        self.feed_watches();
    }

    /// A watch starts over with a list.
    pub(crate) fn relist(&mut self, kind: Kind) {
        let generation = self.generation;
        if let Some(process) = self.process.as_mut() {
            let index = kind as usize;
            process.busy[index] = true;
            process.rounds[index] += 1;
            let round = process.rounds[index];
            let way = Way { kind, round };
            self.after(0, Action::List { generation, way });
        }
    }

    // === events and decisions ===

    fn moment(&self) -> Moment {
        let started = self.process.as_ref().map_or(0, |process| process.started);
        Moment::new(std::time::Duration::from_micros(self.now - started))
    }

    pub(crate) fn deliver(&mut self, generation: u32, event: Event, from: Option<Way>) {
        let dropped = from.is_some_and(|way| self.listener(generation, way).is_none());
        if dropped || generation != self.generation || self.process.is_none() {
            return;
        }
        self.note(|| format!("  -> {}", describe_event(&event)));
        let now = self.moment();
        let Some(process) = self.process.as_mut() else {
            return;
        };
        if let Some(way) = from {
            process.busy[way.kind as usize] = false;
        }
        if let Event::Answer { id, answer } = &event {
            for uid in process.uids.remove(id).unwrap_or_default() {
                process.in_flight.remove(&uid);
                if matches!(answer, Answer::Deallocated(Ok(()))) {
                    process.inherited.remove(&uid);
                }
            }
        }
        process.note_contexts(&event);
        process.world.apply(event, now);
        self.feed_watches();
        if self.faults.strikes(Fault::CrashAnytime, &mut self.rng) {
            self.crash();
        } else if self.faults.strikes(Fault::Coalesced, &mut self.rng) {
            let delay = self.rng.between(0, 20 * MILLISECOND);
            self.after(delay, Action::Decide { generation });
        } else {
            self.decide();
        }
    }

    pub(crate) fn decide(&mut self) {
        let now = self.moment();
        let generation = self.generation;
        let Some(process) = self.process.as_mut() else {
            return;
        };
        if process.decide_at.is_some_and(|at| at <= self.now) {
            process.decide_at = None;
        }
        let commands = process.world.decide(now);
        for command in commands {
            if generation != self.generation || self.violation.is_some() {
                return;
            }
            self.execute(command);
        }
        let Some(process) = self.process.as_mut().filter(|_| generation == self.generation) else {
            return;
        };
        if let Some(deadline) = process.world.next_deadline() {
            let nanos = deadline.since_start().as_nanos();
            let at = process.started + u64::try_from(nanos.div_ceil(1000)).unwrap();
            if at <= self.now {
                self.violate(|| "a deadline that has passed is still due after deciding".to_owned());
            } else if process.decide_at.is_none_or(|known| at < known) {
                process.decide_at = Some(at);
                self.at(at, Action::Decide { generation });
            }
        }
    }

    fn execute(&mut self, command: Command) {
        self.note(|| format!("  <- {}", describe_command(&command)));
        match &command {
            Command::Observe(observation) => {
                if let (Observation::All(holdings), Some(process)) = (observation, &mut self.process) {
                    let unrecorded = |holding: &&Holding| {
                        let finalizers = holding.claim.metadata.finalizers.iter().flatten();
                        holding.allocation(DRIVER).is_none()
                            && finalizers.into_iter().any(|name| name == FINALIZER)
                    };
                    let holdings = holdings.iter().filter(unrecorded);
                    process.inherited = holdings.map(|holding| holding.uid().to_owned()).collect();
                }
                let freed = self.driver.observe(observation);
                self.announce(freed);
                self.tell_problems();
                return;
            }
            Command::AwaitDriver => {
                let (delay, generation) = (self.delay(), self.generation);
                let event = Event::DriverReady;
                self.after(
                    delay,
                    Action::Deliver {
                        generation,
                        event,
                        from: None,
                    },
                );
                return;
            }
            Command::Report(report) => {
                self.reports.push(report.clone());
                return;
            }
            Command::ReadPod { .. }
            | Command::ReadClaim { .. }
            | Command::WriteClaim { .. }
            | Command::WriteContext { .. }
            | Command::CallDriver { .. } => {}
        }
        if self.record {
            let text = describe_command(&command);
            self.command_log.push(text);
        }
        self.commands += 1;
        self.check_command(&command);
        let target = match &command {
            Command::ReadPod { .. } | Command::ReadClaim { .. } => Target::Read,
            Command::CallDriver { .. } => Target::Call,
            Command::WriteClaim {
                write: ClaimWrite::Allocate { .. },
                ..
            } => Target::Record,
            _ => Target::Write,
        };
        let mut fault = self.faults.of_command(self.commands, target, &mut self.rng);
        if let (Some(refused), Command::WriteClaim { key, .. }) = (&self.refuse_allocations, &command)
            && target == Target::Record
            && key.name.starts_with(refused)
        {
            fault = Some(Fault::RefusedLast);
        }
        if let Some(fault) = fault {
            self.note(|| format!("     fault: {fault:?}"));
        }
        if fault == Some(Fault::CrashBefore) {
            self.crash();
            return;
        }
        if fault == Some(Fault::PausedLeader) {
            self.pause_before(command);
            return;
        }
        match command {
            Command::CallDriver { id, request } => self.call(id, request, fault),
            command => self.send(command, fault),
        }
    }

    /// Notes that a write or call for these claims is under way.
    pub(crate) fn take_off(&mut self, id: CallId, uids: Vec<String>) {
        let Some(process) = self.process.as_mut() else {
            return;
        };
        let mut doubled = None;
        for uid in &uids {
            if process.in_flight.insert(uid.clone(), id).is_some() {
                doubled = Some(uid.clone());
            }
        }
        process.uids.insert(id, uids);
        if let Some(uid) = doubled {
            self.violate(|| format!("two writes or calls at once for claim {uid}"));
        }
    }
}
