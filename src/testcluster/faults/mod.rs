//! Fault injection for the programs on the test cluster: one fault at the n-th request, watch event, disk step or
//! kubelet call of a program.
//!
//! A program runs as a sequence of processes ([`Life`]). A killed process has no further effect: its requests do not
//! arrive, it receives no events, its disk steps are not executed, and kubelet receives no responses.

mod disk;
mod wire;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Operation that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
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
pub enum Trouble {
    /// Kills the program before the operation.
    KilledBefore,
    /// Kills the program after the operation, before it sees the result.
    KilledAfter,
    /// Requests shutdown (SIGTERM) before the operation.
    Stopped,
    /// Drops the operation without an error for a long time. A watch that loses an event stays silent and open; this is
    /// not part of [`Place::troubles`], because it takes five minutes to detect.
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

impl Place {
    /// All operations.
    pub const ALL: [Self; 5] = [Self::Request, Self::Lease, Self::Event, Self::Disk, Self::Call];

    /// Returns the faults that apply to the operation.
    pub fn troubles(self) -> &'static [Trouble] {
        use Trouble::{
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
pub struct Planned {
    /// The affected program.
    pub program: &'static str,
    /// The affected operation.
    pub place: Place,
    /// Number of the operation, counted from 1 across all processes of the program.
    pub number: u64,
    /// The fault.
    pub trouble: Trouble,
}

impl fmt::Display for Planned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            program,
            place,
            number,
            trouble,
        } = self;
        write!(f, "{program}:{place:?}:{number}:{trouble:?}")
    }
}

/// Planned and injected faults of one test. Clones share state.
#[derive(Clone, Debug)]
pub struct Faults(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    /// Notifies when a process has been killed.
    ended: watch::Sender<u64>,
    buried: Condvar,
    start: Instant,
    look: Look,
}

/// Observer of operations. Its arguments are the program, the place and a description.
#[derive(Default)]
struct Look(OnceLock<Box<Looker>>);

type Looker = dyn Fn(&'static str, Place, &str) + Send + Sync;

impl fmt::Debug for Look {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Look")
    }
}

#[derive(Debug, Default)]
struct State {
    planned: Vec<Planned>,
    /// Operations are counted and faults injected only while set.
    counting: bool,
    counts: BTreeMap<(&'static str, Place), u64>,
    hits: Vec<Planned>,
    lives: BTreeMap<&'static str, Lived>,
    trace: Vec<String>,
}

/// Latest process of a program.
#[derive(Debug, Default)]
struct Lived {
    number: u64,
    killed: bool,
    /// Whether all its tasks and threads have ended.
    buried: bool,
    stop: CancellationToken,
}

/// One process of a program.
#[derive(Clone, Debug)]
pub struct Life {
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
    pub fn new(planned: Vec<Planned>) -> Self {
        let state = State {
            planned,
            ..State::default()
        };
        Self(Arc::new(Inner {
            state: Mutex::new(state),
            ended: watch::Sender::new(0),
            buried: Condvar::new(),
            start: Instant::now(),
            look: Look::default(),
        }))
    }

    /// Installs an observer for each request on arrival, each completed disk step, and each answered kubelet call. Only
    /// the first observer is used.
    pub fn look(&self, look: impl Fn(&'static str, Place, &str) + Send + Sync + 'static) {
        // Further observers are ignored.
        let _ = self.0.look.0.set(Box::new(look));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts or stops counting and fault injection.
    pub fn count(&self, counting: bool) {
        self.state().counting = counting;
    }

    /// Returns the number of operations by program and place.
    pub fn counts(&self) -> BTreeMap<(&'static str, Place), u64> {
        self.state().counts.clone()
    }

    /// Returns the planned faults.
    pub fn planned(&self) -> Vec<Planned> {
        self.state().planned.clone()
    }

    /// Returns the injected faults.
    pub fn hits(&self) -> Vec<Planned> {
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
    pub fn begin(&self, program: &'static str) -> Life {
        let stop = CancellationToken::new();
        let number = {
            let mut state = self.state();
            let number = state.lives.get(program).map_or(0, |lived| lived.number) + 1;
            let lived = Lived {
                number,
                stop: stop.clone(),
                ..Lived::default()
            };
            state.lives.insert(program, lived);
            number
        };
        self.note(&format!("{program} starts (life {number})"));
        Life {
            faults: self.clone(),
            program,
            number,
            stop,
        }
    }

    /// Returns the current process of a program; `None` before its first.
    pub(crate) fn present(&self, program: &'static str) -> Option<Life> {
        let state = self.state();
        let lived = state.lives.get(program)?;
        Some(Life {
            faults: self.clone(),
            program,
            number: lived.number,
            stop: lived.stop.clone(),
        })
    }
}

impl Life {
    /// Cancelled when the program should shut down.
    pub fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Returns whether this process was killed.
    pub fn is_killed(&self) -> bool {
        let state = self.faults.state();
        state
            .lives
            .get(self.program)
            .is_none_or(|lived| lived.number != self.number || lived.killed)
    }

    /// Kills the process. The caller must [bury](Life::bury) it after its tasks have ended.
    pub fn kill(&self) {
        if self.is_killed() {
            return;
        }
        if let Some(lived) = self.faults.state().lives.get_mut(self.program) {
            lived.killed = true;
        }
        self.faults.note(&format!("{} is killed", self.program));
        self.faults.0.ended.send_modify(|count| *count += 1);
    }

    /// Returns when the process has been killed.
    pub async fn killed(&self) {
        let mut ended = self.faults.0.ended.subscribe();
        // Cannot fail: `self` keeps the sender alive.
        let _ = ended.wait_for(|_| self.is_killed()).await;
    }

    /// Declares that the process has fully ended, so that threads blocked in a step may return.
    pub fn bury(&self) {
        if let Some(lived) = self.faults.state().lives.get_mut(self.program) {
            lived.buried = true;
        }
        self.faults.0.buried.notify_all();
    }

    /// Blocks the thread until the process is buried.
    fn rest(&self) {
        let mut state = self.faults.state();
        while state
            .lives
            .get(self.program)
            .is_some_and(|lived| lived.number == self.number && !lived.buried)
        {
            state = self
                .faults
                .0
                .buried
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Calls the observer.
    pub(crate) fn show(&self, place: Place, what: &str) {
        if let Some(look) = self.faults.0.look.0.get() {
            look(self.program, place, what);
        }
    }

    /// Counts an operation and returns its fault, if any. The caller implements the fault and, for
    /// [`Trouble::KilledAfter`], calls [`Life::kill`] after the operation.
    pub(crate) fn meet(&self, place: Place, what: &str) -> Result<Option<Trouble>, Killed> {
        if self.is_killed() {
            return Err(Killed);
        }
        let (number, found) = {
            let mut state = self.faults.state();
            if !state.counting {
                return Ok(None);
            }
            let number = state.counts.entry((self.program, place)).or_default();
            *number += 1;
            let number = *number;
            let here = |planned: &&Planned| {
                planned.program == self.program && planned.place == place && planned.number == number
            };
            let found = state.planned.iter().find(here).copied();
            state.hits.extend(found);
            (number, found.map(|planned| planned.trouble))
        };
        let happens = found.map_or_else(String::new, |trouble| format!("  <-- {trouble:?}"));
        self.faults
            .note(&format!("{} {place:?} {number}: {what}{happens}", self.program));
        match found {
            Some(Trouble::KilledBefore) => {
                self.kill();
                Err(Killed)
            }
            Some(Trouble::Stopped) => {
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

    const PLANNED: Planned = Planned {
        program: "p",
        place: Place::Disk,
        number: 2,
        trouble: Trouble::KilledBefore,
    };

    #[test]
    fn a_planned_fault_happens_once_and_only_while_counting() {
        let faults = Faults::new(vec![PLANNED]);
        let life = faults.begin("p");
        assert_eq!(life.meet(Place::Disk, "uncounted"), Ok(None));
        faults.count(true);
        assert_eq!(life.meet(Place::Disk, "first"), Ok(None));
        assert_eq!(life.meet(Place::Request, "another sort"), Ok(None));
        assert_eq!(life.meet(Place::Disk, "second"), Err(Killed));
        assert_eq!(life.meet(Place::Disk, "third"), Err(Killed));
        assert_eq!(faults.hits(), [PLANNED]);
        let next = faults.begin("p");
        assert!(life.is_killed() && !next.is_killed());
        assert_eq!(next.meet(Place::Disk, "third"), Ok(None));
        assert_eq!(faults.counts()[&("p", Place::Disk)], 3);
    }

    #[test]
    fn a_plan_is_shown_as_it_is_typed() {
        assert_eq!(PLANNED.to_string(), "p:Disk:2:KilledBefore");
    }

    #[tokio::test]
    async fn the_end_of_a_process_is_announced_to_all_waiters() {
        let faults = Faults::new(Vec::new());
        let life = faults.begin("p");
        let waiting = tokio::spawn({
            let life = life.clone();
            async move { life.killed().await }
        });
        life.kill();
        waiting.await.unwrap();
    }
}
