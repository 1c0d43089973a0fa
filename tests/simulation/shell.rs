//! The controller's process as it will be: watches in, commands out, with everything that can go wrong between.

use std::collections::BTreeMap;
use std::sync::Arc;

use drayman::api::resource::PodSchedulingContext;
use drayman::core::protocol::{
    Answer, CallError, CallErrorKind, CallId, ClaimWrite, Command, DriverRequest, Event, Moment, ObjectKey,
    Outcome, Settings, Subject, World,
};
use drayman::driver::{CapacityCause, CapacityChange};

use crate::describe::{describe_command, describe_event};
use crate::driver::{DRIVER, MemoryDriver};
use crate::faults::{Fault, Target};
use crate::stage::{Action, MILLISECOND, SECOND, Stage, Way, add};
use crate::store::{KINDS, Kind};

/// A life of the controller.
pub(crate) struct Process {
    pub(crate) world: World,
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
    uids: BTreeMap<CallId, Vec<String>>,
    /// The contexts as the controller has been shown them.
    pub(crate) seen: BTreeMap<ObjectKey, Arc<PodSchedulingContext>>,
}

/// A request on its way.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) generation: u32,
    pub(crate) id: CallId,
    pub(crate) command: Command,
    pub(crate) fault: Option<Fault>,
}

/// A call of the driver.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) id: CallId,
    pub(crate) request: DriverRequest,
    pub(crate) fault: Option<Fault>,
    /// It is done at once, and takes long to be told.
    pub(crate) slow_answer: bool,
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
            world: World::new(Settings::new(DRIVER)),
            started: self.now,
            cursors: [0; 3],
            busy: [true; 3],
            rounds: [0; 3],
            decide_at: None,
            in_flight: BTreeMap::new(),
            uids: BTreeMap::new(),
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
        add(&mut self.statistics, process.world.statistics());
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
        if let Event::Answer { id, .. } = &event {
            for uid in process.uids.remove(id).unwrap_or_default() {
                process.in_flight.remove(&uid);
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
                let freed = self.driver.observe(observation);
                self.announce(freed);
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
            _ => Target::Write,
        };
        let mut fault = self.faults.of_command(self.commands, target, &mut self.rng);
        if self.refuse_allocations
            && let Command::WriteClaim {
                write: ClaimWrite::Allocate { .. },
                ..
            } = &command
        {
            fault = Some(Fault::Refused);
        }
        if let Some(fault) = fault {
            self.note(|| format!("     fault: {fault:?}"));
        }
        if fault == Some(Fault::CrashBefore) {
            self.crash();
            return;
        }
        match command {
            Command::CallDriver { id, request } => self.call(id, request, fault),
            command => self.send(command, fault),
        }
    }

    /// Notes that a write or call for these claims is under way.
    fn take_off(&mut self, id: CallId, uids: Vec<String>) {
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

    // === requests ===

    fn send(&mut self, command: Command, fault: Option<Fault>) {
        let id = match &command {
            Command::ReadPod { id, .. }
            | Command::ReadClaim { id, .. }
            | Command::WriteContext { id, .. } => *id,
            Command::WriteClaim { id, uid, .. } => {
                let (id, uid) = (*id, uid.clone());
                self.take_off(id, vec![uid]);
                id
            }
            _ => return,
        };
        let generation = self.generation;
        // What is refused now would have been refused before: no write that is late can still be taken.
        let fault = fault.filter(|fault| *fault != Fault::Refused || !self.is_late(&command));
        let timeout = self.rng.between(2 * SECOND, 10 * SECOND);
        let mut way = self.delay();
        match fault {
            Some(Fault::RequestLost) => {
                self.answer_later(generation, timeout, id, unknown(&command, "no answer in time"));
                return;
            }
            Some(Fault::ServerError) => {
                self.answer_later(generation, way, id, unknown(&command, "500"));
                return;
            }
            Some(Fault::Conflict) => {
                self.answer_later(generation, way, id, failed(&command, Fault::Conflict));
                return;
            }
            Some(Fault::Refused) => {
                self.answer_later(generation, way, id, failed(&command, Fault::Refused));
                return;
            }
            Some(Fault::ReplyLost) => {
                self.answer_later(generation, timeout, id, unknown(&command, "no answer in time"));
            }
            Some(Fault::Late) => {
                self.answer_later(generation, timeout, id, unknown(&command, "no answer in time"));
                way = timeout + self.rng.between(0, 2 * SECOND);
            }
            Some(Fault::Slow) => way = self.rng.between(SECOND, 8 * SECOND),
            _ => {}
        }
        if matches!(command, Command::WriteClaim { .. } | Command::WriteContext { .. })
            && self.faults.strikes(Fault::SecondWriter, &mut self.rng)
        {
            self.bump(&command);
        }
        self.requests_sent += 1;
        let number = self.requests_sent;
        self.network.insert(
            number,
            Request {
                generation,
                id,
                command,
                fault,
            },
        );
        self.after(way, Action::Arrive(number));
    }

    /// Whether an earlier write to the same claim is still on its way.
    fn is_late(&self, command: &Command) -> bool {
        let Command::WriteClaim { uid, .. } = command else {
            return false;
        };
        self.network
            .values()
            .any(|request| matches!(&request.command, Command::WriteClaim { uid: other, .. } if other == uid))
    }

    pub(crate) fn arrive(&mut self, number: u64) {
        let Some(request) = self.network.remove(&number) else {
            return;
        };
        self.note(|| format!("     carried out: {}", describe_command(&request.command)));
        let answer = self.carry_out(&request.command);
        match request.fault {
            Some(Fault::CrashAfter) if request.generation == self.generation => self.crash(),
            Some(Fault::ReplyLost | Fault::Late) => {}
            fault => {
                let mut delay = self.delay();
                if fault == Some(Fault::Slow) {
                    delay = self.rng.between(SECOND, 8 * SECOND);
                }
                self.answer_later(request.generation, delay, request.id, answer);
            }
        }
    }

    // === driver ===

    fn call(&mut self, id: CallId, request: DriverRequest, fault: Option<Fault>) {
        let generation = self.generation;
        let uids = match &request {
            DriverRequest::UnsuitableNodes { .. } => {
                self.judgements += 1;
                Vec::new()
            }
            DriverRequest::Allocate { claims, .. } => claims
                .iter()
                .map(|claim| crate::driver::uid_of(&claim.claim))
                .collect(),
            DriverRequest::Deallocate { claim, .. } => vec![crate::driver::uid_of(claim)],
        };
        self.take_off(id, uids);
        let error = |kind, reason| CallError {
            kind,
            subject: Subject::Call,
            reason,
            message: "the driver failed, since a fault was asked for".to_owned(),
        };
        let delay = self.delay();
        let timed_out = driver_failed(&request, error(CallErrorKind::TimedOut, "DriverTimedOut"));
        match fault {
            Some(Fault::DriverRetry) => {
                let answer = driver_failed(&request, error(CallErrorKind::Retry, "DriverBusy"));
                self.answer_later(generation, delay, id, answer);
                return;
            }
            Some(Fault::DriverInvalid) => {
                let answer = driver_failed(&request, error(CallErrorKind::Invalid, "DriverRefused"));
                self.answer_later(generation, delay, id, answer);
                // A person acts, in the end.
                let later = self.rng.between(SECOND, 20 * SECOND);
                self.announce_change(CapacityCause::Parameters, None, later);
                return;
            }
            Some(Fault::DriverHungBefore) => {
                self.answer_later(generation, 30 * SECOND, id, timed_out);
                return;
            }
            Some(Fault::DriverHungAfter) => self.answer_later(generation, 30 * SECOND, id, timed_out),
            _ => {}
        }
        // What a slow driver says may be old or new.
        let says_what_was = self.rng.chance(500);
        let way = if fault == Some(Fault::Slow) && !says_what_was {
            self.rng.between(SECOND, 25 * SECOND)
        } else {
            delay
        };
        let call = id.0;
        let slow_answer = fault == Some(Fault::Slow) && says_what_was;
        let state = Call {
            id,
            request,
            fault,
            slow_answer,
        };
        self.calls.insert(call, state);
        self.after(way, Action::Work { generation, call });
    }

    pub(crate) fn work(&mut self, generation: u32, call: u64) {
        if generation != self.generation {
            return;
        }
        let Some(call) = self.calls.remove(&call) else {
            return;
        };
        let mut answer = match &call.request {
            DriverRequest::UnsuitableNodes { claims, nodes, .. } => {
                Answer::Judged(self.driver.unsuitable_nodes(&self.facts, claims, nodes))
            }
            DriverRequest::Allocate { claims, node } => {
                Answer::Allocated(Ok(self.driver.allocate(&self.facts, claims, node.as_deref())))
            }
            DriverRequest::Deallocate { claim, .. } => {
                let freed = self.driver.deallocate(&crate::driver::uid_of(claim));
                self.announce(freed);
                Answer::Deallocated(Ok(()))
            }
        };
        if call.fault == Some(Fault::DriverMiscounts) {
            match &mut answer {
                Answer::Judged(Ok(all)) => drop(all.pop()),
                Answer::Allocated(Ok(all)) => drop(all.pop()),
                _ => {}
            }
        }
        match call.fault {
            Some(Fault::CrashAfter) => self.crash(),
            Some(Fault::DriverHungAfter) => {}
            _ => {
                let mut delay = self.delay();
                if call.slow_answer {
                    delay = self.rng.between(SECOND, 25 * SECOND);
                }
                self.answer_later(generation, delay, call.id, answer);
            }
        }
    }

    /// The driver says that devices became free.
    pub(crate) fn announce(&mut self, freed: usize) {
        if freed > 0 {
            let delay = self.delay();
            self.announce_change(CapacityCause::Freed, Some(freed), delay);
        }
    }

    pub(crate) fn announce_change(&mut self, cause: CapacityCause, pods: Option<usize>, delay: u64) {
        let event = Event::Capacity(CapacityChange { cause, pods });
        let generation = self.generation;
        self.after(
            delay,
            Action::Deliver {
                generation,
                event,
                from: None,
            },
        );
    }
}

fn unknown(command: &Command, text: &str) -> Answer {
    let text = text.to_owned();
    match command {
        Command::ReadPod { .. } => Answer::PodRead(Err(text)),
        Command::ReadClaim { .. } => Answer::ClaimRead(Err(text)),
        Command::WriteContext { .. } => Answer::ContextWritten(Outcome::Unknown(text)),
        _ => Answer::ClaimWritten(Outcome::Unknown(text)),
    }
}

fn failed(command: &Command, fault: Fault) -> Answer {
    let refused = fault == Fault::Refused;
    let text = "a fault was asked for".to_owned();
    match command {
        Command::WriteContext { .. } if refused => Answer::ContextWritten(Outcome::Refused(text)),
        Command::WriteContext { .. } => Answer::ContextWritten(Outcome::Conflict(text)),
        _ if refused => Answer::ClaimWritten(Outcome::Refused(text)),
        _ => Answer::ClaimWritten(Outcome::Conflict(text)),
    }
}

fn driver_failed(request: &DriverRequest, error: CallError) -> Answer {
    match request {
        DriverRequest::UnsuitableNodes { .. } => Answer::Judged(Err(error)),
        DriverRequest::Allocate { .. } => Answer::Allocated(Err(error)),
        DriverRequest::Deallocate { .. } => Answer::Deallocated(Err(error)),
    }
}
