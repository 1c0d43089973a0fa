//! Requests to the server and driver calls in flight, with their faults.

use drayman::core::claims::{
    Answer, CallError, CallErrorKind, CallErrorSubject, CallId, Command, DriverRequest, Event, Outcome,
};
use drayman::driver::{CapacityCause, CapacityChange};

use crate::cluster::{Action, Cluster, MILLISECOND, SECOND};
use crate::describe::describe_command;
use crate::faults::Fault;

/// Maximum duration of a request in the API server, even if the client has timed out.
const SERVER_LIMIT: u64 = 60 * SECOND;

/// A request in flight.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) generation: u32,
    pub(crate) id: CallId,
    pub(crate) command: Command,
    pub(crate) fault: Option<Fault>,
}

/// A driver call in progress.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) id: CallId,
    pub(crate) request: DriverRequest,
    pub(crate) fault: Option<Fault>,
    /// The call is executed immediately and answered late.
    pub(crate) slow_answer: bool,
}

impl Cluster {
    // === requests ===

    pub(crate) fn send(&mut self, command: Command, fault: Option<Fault>) {
        let id = match &command {
            Command::ReadPod { id, .. }
            | Command::ReadClaim { id, .. }
            | Command::WriteContext { id, .. } => *id,
            Command::WriteClaim { id, uid, .. } => {
                let (id, uid) = (*id, uid.clone());
                self.mark_in_flight(id, vec![uid]);
                id
            }
            _ => return,
        };
        let generation = self.generation;
        let timeout = self.rng.between(2 * SECOND, 10 * SECOND);
        let mut latency = self.delay();
        match fault {
            Some(Fault::RequestLost) => {
                self.answer_later(generation, timeout, id, unknown(&command, "no answer in time"));
                return;
            }
            Some(Fault::ServerError) => {
                self.answer_later(generation, latency, id, unknown(&command, "500"));
                return;
            }
            Some(fault @ (Fault::Conflict | Fault::Busy | Fault::Refused)) => {
                self.answer_later(generation, latency, id, failed(&command, fault));
                return;
            }
            Some(Fault::RefusedLast) => {
                latency = self.rng.between(10 * MILLISECOND, 200 * MILLISECOND);
                self.answer_later(generation, latency, id, failed(&command, Fault::Refused));
                return;
            }
            Some(Fault::ReplyLost) => {
                self.answer_later(generation, timeout, id, unknown(&command, "no answer in time"));
            }
            Some(Fault::Late) => {
                self.answer_later(generation, timeout, id, unknown(&command, "no answer in time"));
                latency = self.rng.between(timeout, SERVER_LIMIT);
            }
            Some(Fault::Slow) => latency = self.rng.between(SECOND, 8 * SECOND),
            _ => {}
        }
        if matches!(command, Command::WriteClaim { .. } | Command::WriteContext { .. })
            && self.faults.occurs(Fault::SecondWriter, &mut self.rng)
        {
            self.write_concurrently(&command);
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
        self.after(latency, Action::Arrive(number));
    }

    pub(crate) fn arrive(&mut self, number: u64) {
        let Some(request) = self.network.remove(&number) else {
            return;
        };
        self.trace(|| format!("     served: {}", describe_command(&request.command)));
        let answer = if request.fault == Some(Fault::Late) {
            self.serve_late(&request.command)
        } else {
            self.serve(&request.command)
        };
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

    pub(crate) fn call(&mut self, id: CallId, request: DriverRequest, fault: Option<Fault>) {
        let generation = self.generation;
        let uids = match &request {
            DriverRequest::UnsuitableNodes { claims, .. } | DriverRequest::Allocate { claims, .. } => claims
                .iter()
                .map(|claim| crate::driver::uid_of(&claim.claim))
                .collect(),
            DriverRequest::Deallocate { claim, .. } => vec![crate::driver::uid_of(claim)],
        };
        self.evaluations += u64::from(matches!(request, DriverRequest::UnsuitableNodes { .. }));
        self.mark_in_flight(id, uids);
        let error = |kind, reason| CallError {
            kind,
            subject: CallErrorSubject::Call,
            reason,
            message: "the driver failed: injected fault".to_owned(),
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
                // A user fixes the parameters later.
                let later = self.rng.between(SECOND, 20 * SECOND);
                self.report_capacity(CapacityCause::Parameters, None, later);
                return;
            }
            Some(Fault::DriverHungBefore) => {
                self.answer_later(generation, 30 * SECOND, id, timed_out);
                return;
            }
            Some(Fault::DriverHungAfter) => self.answer_later(generation, 30 * SECOND, id, timed_out),
            _ => {}
        }
        // A slow driver reads its state either early or late.
        let reads_early = self.rng.chance(500);
        let latency = if fault == Some(Fault::Slow) && !reads_early {
            self.rng.between(SECOND, 25 * SECOND)
        } else {
            delay
        };
        let call = id.0;
        let slow_answer = fault == Some(Fault::Slow) && reads_early;
        let state = Call {
            id,
            request,
            fault,
            slow_answer,
        };
        self.calls.insert(call, state);
        self.after(latency, Action::Work { generation, call });
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
                Answer::Evaluated(self.driver.unsuitable_nodes(&self.environment, claims, nodes))
            }
            DriverRequest::Allocate { claims, node } => {
                Answer::Allocated(self.driver.allocate(&self.environment, claims, node.as_deref()))
            }
            DriverRequest::Deallocate { claim, .. } => {
                let freed = self.driver.deallocate(&crate::driver::uid_of(claim));
                self.report_freed(freed);
                Answer::Deallocated(Ok(()))
            }
        };
        if call.fault == Some(Fault::DriverMiscounts) {
            match &mut answer {
                Answer::Evaluated(Ok(all)) => drop(all.pop()),
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

    /// Sends a capacity change for freed devices.
    pub(crate) fn report_freed(&mut self, freed: usize) {
        if freed > 0 {
            let delay = self.delay();
            self.report_capacity(CapacityCause::Freed, Some(freed), delay);
        }
    }

    pub(crate) fn report_capacity(&mut self, cause: CapacityCause, pods: Option<usize>, delay: u64) {
        let mut change = CapacityChange::new(cause);
        change.pods = pods;
        let event = Event::Capacity(change);
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
    match command {
        Command::WriteContext { .. } => Answer::ContextWritten(rejected(fault)),
        _ => Answer::ClaimWritten(rejected(fault)),
    }
}

fn rejected<T>(fault: Fault) -> Outcome<T> {
    let text = "injected fault".to_owned();
    match fault {
        Fault::Refused => Outcome::Refused(text),
        Fault::Busy => Outcome::Busy(text),
        _ => Outcome::Conflict(text),
    }
}

fn driver_failed(request: &DriverRequest, error: CallError) -> Answer {
    match request {
        DriverRequest::UnsuitableNodes { .. } => Answer::Evaluated(Err(error)),
        DriverRequest::Allocate { .. } => Answer::Allocated(Err(error)),
        DriverRequest::Deallocate { .. } => Answer::Deallocated(Err(error)),
    }
}
