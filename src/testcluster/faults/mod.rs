//! Fault injection for the programs on the test cluster: one fault at the n-th request, watch event, disk step or
//! kubelet call of a program.
//!
//! A program runs as a sequence of processes ([`ProgramProcess`]). A killed process has no further effect: its requests do not
//! arrive, it receives no events, its disk steps are not executed, and kubelet receives no responses.

mod connection;
mod disk;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Operation that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// An API request, including the start of a watch.
    Request,
    /// A request for the leader election's Lease.
    Lease,
    /// A watch event.
    Event,
    /// A step of writing the program's records to disk.
    Disk,
    /// A kubelet call to the program.
    Call,
}

/// Kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// Kills the program before the operation.
    KilledBefore,
    /// Kills the program after the operation, before it sees the result.
    KilledAfter,
    /// Requests shutdown (SIGTERM) before the operation.
    Stopped,
    /// Drops the operation without an error for a long time. A watch that loses an event stays silent and open; this is
    /// not part of [`Operation::faults`], because it takes five minutes to detect.
    Lost,
    /// Executes the operation, but withholds the response for a long time.
    ReplyLost,
    /// Executes the operation, but breaks the connection before the response.
    Broken,
    /// Delays the operation; later operations may overtake it.
    Late,
    /// Executes the operation twice.
    Twice,
    /// Rejects the operation with an error.
    Refused,
    /// Rejects the operation as overload (429).
    Busy,
    /// Expires the history of a watch or list (410).
    Forgotten,
    /// Executes the operation, but returns an error.
    Failed,
}

impl Operation {
    /// All operations.
    pub const ALL: [Self; 5] = [Self::Request, Self::Lease, Self::Event, Self::Disk, Self::Call];

    /// Returns the faults that apply to the operation.
    pub fn faults(self) -> &'static [Fault] {
        use Fault::{
            Broken, Busy, Failed, Forgotten, KilledAfter, KilledBefore, Late, Lost, Refused, ReplyLost,
            Stopped, Twice,
        };
        match self {
            Self::Request | Self::Lease => &[
                KilledBefore,
                KilledAfter,
                Stopped,
                Lost,
                ReplyLost,
                Broken,
                Late,
                Twice,
                Refused,
                Busy,
                Forgotten,
            ],
            Self::Event => &[KilledBefore, KilledAfter, Stopped, Broken, Late, Twice, Forgotten],
            Self::Disk => &[KilledBefore, KilledAfter, Stopped, Refused, Failed],
            Self::Call => &[KilledBefore, KilledAfter, Stopped, Lost, ReplyLost, Late, Twice],
        }
    }
}

/// A planned fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PlannedFault {
    /// The affected program.
    pub program: &'static str,
    /// The affected operation.
    pub operation: Operation,
    /// Number of the operation, counted from 1 across all processes of the program.
    pub number: u64,
    /// The fault.
    pub fault: Fault,
}

impl fmt::Display for PlannedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            program,
            operation,
            number,
            fault,
        } = self;
        write!(f, "{program}:{operation:?}:{number}:{fault:?}")
    }
}

/// Planned and injected faults of one test. Clones share state.
#[derive(Clone, Debug)]
pub struct Faults(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: Mutex<FaultState>,
    /// Notifies when a process has been killed.
    kills: watch::Sender<u64>,
    ended: Condvar,
    start: Instant,
    observer: OperationObserver,
}

/// Observer of operations. Its arguments are the program, the operation and a description.
#[derive(Default)]
struct OperationObserver(OnceLock<Box<Observe>>);

type Observe = dyn Fn(&'static str, Operation, &str) + Send + Sync;

impl fmt::Debug for OperationObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OperationObserver")
    }
}

#[derive(Debug, Default)]
struct FaultState {
    planned: Vec<PlannedFault>,
    /// Operations are counted and faults injected only while set.
    counting: bool,
    counts: BTreeMap<(&'static str, Operation), u64>,
    hits: Vec<PlannedFault>,
    processes: BTreeMap<&'static str, ProcessState>,
    trace: Vec<String>,
}

/// Latest process of a program.
#[derive(Debug, Default)]
struct ProcessState {
    number: u64,
    killed: bool,
    /// Whether all its tasks and threads have ended.
    ended: bool,
    stop: CancellationToken,
}

/// One process of a program.
#[derive(Clone, Debug)]
pub struct ProgramProcess {
    faults: Faults,
    program: &'static str,
    number: u64,
    stop: CancellationToken,
}

/// The process has been killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Killed;

impl Faults {
    /// Creates a fault plan. Counting starts with [`Faults::count`].
    pub fn new(planned: Vec<PlannedFault>) -> Self {
        let state = FaultState {
            planned,
            ..FaultState::default()
        };
        Self(Arc::new(Inner {
            state: Mutex::new(state),
            kills: watch::Sender::new(0),
            ended: Condvar::new(),
            start: Instant::now(),
            observer: OperationObserver::default(),
        }))
    }

    /// Installs an observer for each request on arrival, each completed disk step, and each answered kubelet call. Only
    /// the first observer is used.
    pub fn observe(&self, observe: impl Fn(&'static str, Operation, &str) + Send + Sync + 'static) {
        // Further observers are ignored.
        let _ = self.0.observer.0.set(Box::new(observe));
    }

    fn state(&self) -> MutexGuard<'_, FaultState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts or stops counting and fault injection.
    pub fn count(&self, counting: bool) {
        self.state().counting = counting;
    }

    /// Returns the number of operations by program and operation.
    pub fn counts(&self) -> BTreeMap<(&'static str, Operation), u64> {
        self.state().counts.clone()
    }

    /// Returns the planned faults.
    pub fn planned(&self) -> Vec<PlannedFault> {
        self.state().planned.clone()
    }

    /// Returns the injected faults.
    pub fn hits(&self) -> Vec<PlannedFault> {
        self.state().hits.clone()
    }

    /// Returns a readable log of all operations.
    pub fn trace(&self) -> Vec<String> {
        self.state().trace.clone()
    }

    /// Adds a line to the log.
    pub fn note(&self, text: &str) {
        let line = format!("{:>7} ms  {text}", self.0.start.elapsed().as_millis());
        self.state().trace.push(line);
    }

    /// Starts the next process of a program.
    pub fn begin(&self, program: &'static str) -> ProgramProcess {
        let stop = CancellationToken::new();
        let number = {
            let mut state = self.state();
            let process = state.processes.entry(program).or_default();
            *process = ProcessState {
                number: process.number + 1,
                stop: stop.clone(),
                ..ProcessState::default()
            };
            process.number
        };
        self.note(&format!("{program} starts (process {number})"));
        ProgramProcess {
            faults: self.clone(),
            program,
            number,
            stop,
        }
    }

    /// Returns the current process of a program; `None` before its first.
    pub(crate) fn present(&self, program: &'static str) -> Option<ProgramProcess> {
        let state = self.state();
        let process_state = state.processes.get(program)?;
        Some(ProgramProcess {
            faults: self.clone(),
            program,
            number: process_state.number,
            stop: process_state.stop.clone(),
        })
    }
}

impl ProgramProcess {
    /// Cancelled when the program should shut down.
    pub fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Returns whether this process was killed.
    pub fn is_killed(&self) -> bool {
        let state = self.faults.state();
        state
            .processes
            .get(self.program)
            .is_none_or(|process_state| process_state.number != self.number || process_state.killed)
    }

    /// Kills the process. The caller must [mark it ended](ProgramProcess::mark_ended) after its tasks have ended.
    pub fn kill(&self) {
        let is_new = {
            let mut state = self.faults.state();
            // The next process of the program may have begun meanwhile.
            let process = state.processes.get_mut(self.program);
            let process = process.filter(|process| process.number == self.number);
            process.is_some_and(|process| !std::mem::replace(&mut process.killed, true))
        };
        if is_new {
            self.faults.note(&format!("{} is killed", self.program));
            self.faults.0.kills.send_modify(|count| *count += 1);
        }
    }

    /// Returns when the process has been killed.
    pub async fn killed(&self) {
        let mut kills = self.faults.0.kills.subscribe();
        // Cannot fail: `self` keeps the sender alive.
        let _ = kills.wait_for(|_| self.is_killed()).await;
    }

    /// Declares that the process has fully ended, so that threads blocked in a step may return.
    pub fn mark_ended(&self) {
        if let Some(process_state) = self.faults.state().processes.get_mut(self.program) {
            process_state.ended = true;
        }
        self.faults.0.ended.notify_all();
    }

    /// Blocks the thread until the process has ended.
    fn wait_until_ended(&self) {
        let mut state = self.faults.state();
        while state
            .processes
            .get(self.program)
            .is_some_and(|process_state| process_state.number == self.number && !process_state.ended)
        {
            state = self
                .faults
                .0
                .ended
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Calls the observer.
    pub(crate) fn notify(&self, operation: Operation, what: &str) {
        if let Some(observe) = self.faults.0.observer.0.get() {
            observe(self.program, operation, what);
        }
    }

    /// Counts an operation and returns its fault, if any. The caller implements the fault and, for
    /// [`Fault::KilledAfter`], calls [`ProgramProcess::kill`] after the operation.
    pub(crate) fn start_operation(&self, operation: Operation, what: &str) -> Result<Option<Fault>, Killed> {
        if self.is_killed() {
            return Err(Killed);
        }
        let (number, found) = {
            let mut state = self.faults.state();
            if !state.counting {
                return Ok(None);
            }
            let number = state.counts.entry((self.program, operation)).or_default();
            *number += 1;
            let number = *number;
            let here = |planned: &&PlannedFault| {
                planned.program == self.program && planned.operation == operation && planned.number == number
            };
            let found = state.planned.iter().find(here).copied();
            state.hits.extend(found);
            (number, found.map(|planned| planned.fault))
        };
        let happens = found.map_or_else(String::new, |fault| format!("  <-- {fault:?}"));
        self.faults.note(&format!(
            "{} {operation:?} {number}: {what}{happens}",
            self.program
        ));
        match found {
            Some(Fault::KilledBefore) => {
                self.kill();
                Err(Killed)
            }
            Some(Fault::Stopped) => {
                self.stop.cancel();
                Ok(None)
            }
            found => Ok(found),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLANNED: PlannedFault = PlannedFault {
        program: "p",
        operation: Operation::Disk,
        number: 2,
        fault: Fault::KilledBefore,
    };

    #[test]
    fn a_planned_fault_happens_once_and_only_while_counting() {
        let faults = Faults::new(vec![PLANNED]);
        let process = faults.begin("p");
        assert_eq!(process.start_operation(Operation::Disk, "uncounted"), Ok(None));
        faults.count(true);
        assert_eq!(process.start_operation(Operation::Disk, "first"), Ok(None));
        assert_eq!(
            process.start_operation(Operation::Request, "another sort"),
            Ok(None)
        );
        assert_eq!(process.start_operation(Operation::Disk, "second"), Err(Killed));
        assert_eq!(process.start_operation(Operation::Disk, "third"), Err(Killed));
        assert_eq!(faults.hits(), [PLANNED]);
        let next = faults.begin("p");
        assert!(process.is_killed() && !next.is_killed());
        assert_eq!(next.start_operation(Operation::Disk, "third"), Ok(None));
        assert_eq!(faults.counts()[&("p", Operation::Disk)], 3);
    }

    #[test]
    fn a_plan_is_shown_as_it_is_typed() {
        assert_eq!(PLANNED.to_string(), "p:Disk:2:KilledBefore");
    }

    #[tokio::test]
    async fn the_end_of_a_process_is_announced_to_all_waiters() {
        let faults = Faults::new(Vec::new());
        let process = faults.begin("p");
        let waiting = tokio::spawn({
            let process = process.clone();
            async move { process.killed().await }
        });
        process.kill();
        waiting.await.unwrap();
    }
}
