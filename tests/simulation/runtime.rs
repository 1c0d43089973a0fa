//! The runtime of the controller: watches in, commands out, with injected faults.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drayman::api::resource::PodSchedulingContext;
use drayman::core::claims::{
    Answer, CallId, ClaimWrite, Command, ControllerState, Event, Moment, ObjectKey, Outcome, Settings,
};
use drayman::driver::{Holding, Observation};

use crate::cluster::{Action, Cluster, MILLISECOND, SECOND, Watch, add};
use crate::describe::{describe_command, describe_event};
use crate::driver::{DRIVER, FINALIZER, MemoryDriver};
use crate::faults::{Fault, Target};
use crate::store::{KINDS, Kind};

/// A controller process.
pub(crate) struct Process {
    pub(crate) state: ControllerState,
    started: u64,
    /// Position of each watch in the history.
    cursors: [usize; 3],
    /// Whether a watch delivery is pending; true until the first list.
    busy: [bool; 3],
    /// Number of restarts of each watch.
    rounds: [u32; 3],
    decide_at: Option<u64>,
    /// The write or call in progress, by claim UID.
    pub(crate) in_flight: BTreeMap<String, CallId>,
    pub(crate) uids: BTreeMap<CallId, Vec<String>>,
    /// UIDs of claims that an earlier process may have allocated and the driver has not deallocated yet.
    pub(crate) inherited: BTreeSet<String>,
    /// The contexts as delivered to the controller.
    pub(crate) seen: BTreeMap<ObjectKey, Arc<PodSchedulingContext>>,
}

impl Process {
    fn track_contexts(&mut self, event: &Event) {
        match event {
            Event::Contexts(all) => {
                self.seen
                    .retain(|key, _| all.iter().any(|context| ObjectKey::of(&context.metadata) == *key));
                for context in all {
                    self.track_context(context);
                }
            }
            Event::Context(context) => self.track_context(context),
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
                    self.track_context(context);
                }
            }
            _ => {}
        }
    }

    fn track_context(&mut self, context: &Arc<PodSchedulingContext>) {
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

impl Cluster {
    /// Starts the controller after all requests of its predecessor have arrived.
    pub(crate) fn start(&mut self) {
        if !self.network.is_empty() {
            self.after(SECOND, Action::Start);
            return;
        }
        self.trace(|| "the controller starts".to_owned());
        self.generation += 1;
        let generation = self.generation;
        self.process = Some(Process {
            state: ControllerState::new(Settings::new(DRIVER)),
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
            let watch = Watch { kind, round: 0 };
            self.after(delay, Action::List { generation, watch });
        }
    }

    /// Kills the controller. Each of its requests in flight still arrives or is lost.
    pub(crate) fn crash(&mut self) {
        let Some(process) = self.process.take() else {
            return;
        };
        self.trace(|| "the controller is killed".to_owned());
        add(&mut self.statistics, &process.state.statistics());
        self.generation += 1;
        let sent: Vec<u64> = self.network.keys().copied().collect();
        for number in sent {
            if self.rng.chance(500) {
                self.network.remove(&number);
            }
        }
        self.calls.clear();
        if self.durable_driver {
            self.driver.observed_all = false;
            self.driver.recorded.clear();
        } else {
            self.driver = MemoryDriver::default();
        }
        let delay = self.rng.between(10 * MILLISECOND, 3 * SECOND);
        self.after(delay, Action::Start);
    }

    // === watches ===

    /// The process, if the watch belongs to it.
    fn listener(&mut self, generation: u32, watch: Watch) -> Option<&mut Process> {
        let current = generation == self.generation;
        self.process
            .as_mut()
            .filter(|process| current && process.rounds[watch.kind as usize] == watch.round)
    }

    pub(crate) fn take_list(&mut self, generation: u32, watch: Watch) {
        let event = self.store.list(watch.kind);
        let end = self.store.history(watch.kind).len();
        let Some(process) = self.listener(generation, watch) else {
            return;
        };
        process.cursors[watch.kind as usize] = end;
        let delay = self.delay();
        let from = Some(watch);
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
                if self.faults.occurs(Fault::WatchStall, &mut self.rng) {
                    delay = self.rng.between(SECOND, 60 * SECOND);
                }
                let watch = Watch { kind, round };
                self.after(delay, Action::Watch { generation, watch });
            }
        }
    }

    pub(crate) fn show_next(&mut self, generation: u32, watch: Watch) {
        if self.listener(generation, watch).is_none() {
            return;
        }
        if self.faults.occurs(Fault::WatchRelist, &mut self.rng) {
            let delay = self.delay();
            self.after(delay, Action::List { generation, watch });
            return;
        }
        let Some(process) = self.process.as_mut() else {
            return;
        };
        let cursor = &mut process.cursors[watch.kind as usize];
        let Some(event) = self.store.history(watch.kind).get(*cursor).cloned() else {
            process.busy[watch.kind as usize] = false;
            return;
        };
        *cursor += 1;
        if self.faults.occurs(Fault::WatchDuplicate, &mut self.rng) {
            self.deliver(generation, event.clone(), None);
        }
        self.deliver(generation, event, Some(watch));
    }

    /// Pauses a watch, including events in flight.
    pub(crate) fn pause_watch(&mut self, kind: Kind) {
        if let Some(process) = self.process.as_mut() {
            process.busy[kind as usize] = true;
            process.rounds[kind as usize] += 1;
        }
    }

    pub(crate) fn resume_watch(&mut self, kind: Kind) {
        if let Some(process) = self.process.as_mut() {
            process.busy[kind as usize] = false;
        }
        self.feed_watches();
    }

    /// Restarts a watch with a list.
    pub(crate) fn relist(&mut self, kind: Kind) {
        let generation = self.generation;
        if let Some(process) = self.process.as_mut() {
            let index = kind as usize;
            process.busy[index] = true;
            process.rounds[index] += 1;
            let round = process.rounds[index];
            let watch = Watch { kind, round };
            self.after(0, Action::List { generation, watch });
        }
    }

    // === events and decisions ===

    fn moment(&self) -> Moment {
        let started = self.process.as_ref().map_or(0, |process| process.started);
        Moment::new(std::time::Duration::from_micros(self.now - started))
    }

    pub(crate) fn deliver(&mut self, generation: u32, event: Event, from: Option<Watch>) {
        let dropped = from.is_some_and(|watch| self.listener(generation, watch).is_none());
        if dropped || generation != self.generation || self.process.is_none() {
            return;
        }
        self.trace(|| format!("  -> {}", describe_event(&event)));
        let now = self.moment();
        let Some(process) = self.process.as_mut() else {
            return;
        };
        if let Some(watch) = from {
            process.busy[watch.kind as usize] = false;
        }
        if let Event::Answer { id, answer } = &event {
            for uid in process.uids.remove(id).unwrap_or_default() {
                process.in_flight.remove(&uid);
                if matches!(answer, Answer::Deallocated(Ok(()))) {
                    process.inherited.remove(&uid);
                }
            }
        }
        process.track_contexts(&event);
        process.state.apply(event, now);
        self.feed_watches();
        if self.faults.occurs(Fault::CrashAnytime, &mut self.rng) {
            self.crash();
        } else if self.faults.occurs(Fault::Coalesced, &mut self.rng) {
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
        let commands = process.state.decide(now);
        for command in commands {
            if generation != self.generation || self.violation.is_some() {
                return;
            }
            self.execute(command);
        }
        let Some(process) = self.process.as_mut().filter(|_| generation == self.generation) else {
            return;
        };
        if let Some(deadline) = process.state.next_deadline() {
            let nanos = deadline.since_start().as_nanos();
            let at = process.started + u64::try_from(nanos.div_ceil(1000)).unwrap();
            if at <= self.now {
                self.violate(|| "the deadline after a decision is in the past".to_owned());
            } else if process.decide_at.is_none_or(|known| at < known) {
                process.decide_at = Some(at);
                self.at(at, Action::Decide { generation });
            }
        }
    }

    fn execute(&mut self, command: Command) {
        self.trace(|| format!("  <- {}", describe_command(&command)));
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
                self.report_freed(freed);
                self.report_problems();
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
            self.trace(|| format!("     fault: {fault:?}"));
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

    /// Marks a write or call for these claims as in progress.
    pub(crate) fn mark_in_flight(&mut self, id: CallId, uids: Vec<String>) {
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
            self.violate(|| format!("concurrent writes or calls for claim {uid}"));
        }
    }
}
