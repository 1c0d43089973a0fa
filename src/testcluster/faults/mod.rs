//! What goes wrong with the programs on the stage, and where: one trouble at the n-th request, watch event, step on the disk or
//! call of kubelet, whichever program it belongs to.
//!
//! A program runs in lives, one after the other. A life that was killed changes nothing any more from that moment on: its requests
//! do not arrive, its events do not reach it, its steps on the disk are not done, and kubelet does not get its answers.

mod disk;
mod wire;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Where something can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// A request of the program to the API server. The beginning of a watch is one.
    Request,
    /// A request about the lease of a leader election.
    Lease,
    /// An event that a watch shows the program.
    Event,
    /// A step of the program's records on the disk.
    Disk,
    /// A call that kubelet makes to the program.
    Call,
}

/// What goes wrong there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Trouble {
    /// The program is killed before it happens.
    KilledBefore,
    /// The program is killed when it has happened, and does not learn of it.
    KilledAfter,
    /// The program is asked to end before it happens (SIGTERM).
    Stopped,
    /// It does not happen, and nobody says so for a long time. A watch that has lost an event shows nothing any more, without an
    /// end; that is not among [`Place::troubles`], since it takes five minutes to be noticed.
    Lost,
    /// It happens, and nobody says so for a long time.
    ReplyLost,
    /// It happens, and the connection breaks before the answer.
    Broken,
    /// It happens late; what comes after it may come before it.
    Late,
    /// It happens twice.
    Twice,
    /// It is refused with an error, and has not happened.
    Refused,
    /// It is refused because there is too much to do (429), and has not happened.
    Busy,
    /// The history that a watch or a list asks for is no longer known (410).
    Forgotten,
    /// It fails, though it has happened.
    Failed,
}

impl Place {
    /// Every place.
    pub const ALL: [Self; 5] = [Self::Request, Self::Lease, Self::Event, Self::Disk, Self::Call];

    /// What can go wrong at a place of this sort.
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

/// One trouble, at one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Planned {
    /// The program that it happens to.
    pub program: &'static str,
    /// Where.
    pub place: Place,
    /// At which of them, counted from 1 over all lives.
    pub number: u64,
    /// What.
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

/// The troubles of one run, and what has been met. Clones are the same.
#[derive(Clone, Debug)]
pub struct Faults(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    /// Told when a life has come to its end.
    ended: watch::Sender<u64>,
    buried: Condvar,
    start: Instant,
    look: Look,
}

/// Who looks at what programs do: the program, the place, and what it does there.
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
    /// Only then places are counted, and troubles happen.
    counting: bool,
    counts: BTreeMap<(&'static str, Place), u64>,
    hits: Vec<Planned>,
    lives: BTreeMap<&'static str, Lived>,
    trace: Vec<String>,
}

/// The last life of a program.
#[derive(Debug, Default)]
struct Lived {
    number: u64,
    killed: bool,
    /// Nothing of it runs any more.
    buried: bool,
    stop: CancellationToken,
}

/// One life of a program.
#[derive(Clone, Debug)]
pub struct Life {
    faults: Faults,
    program: &'static str,
    number: u64,
    stop: CancellationToken,
}

/// A life that was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Killed;

impl Faults {
    /// Nothing is counted before [`Faults::count`].
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

    /// Has a test look at every request as it arrives, every step on the disk when it is done, and every call of kubelet when it is
    /// answered. Only the first who wants to look does.
    pub fn look(&self, look: impl Fn(&'static str, Place, &str) + Send + Sync + 'static) {
        // A second one is not wanted.
        let _ = self.0.look.0.set(Box::new(look));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins or ends to count, and to let things go wrong.
    pub fn count(&self, counting: bool) {
        self.state().counting = counting;
    }

    /// How many places of each sort there were.
    pub fn counts(&self) -> BTreeMap<(&'static str, Place), u64> {
        self.state().counts.clone()
    }

    /// The troubles that are to happen.
    pub fn planned(&self) -> Vec<Planned> {
        self.state().planned.clone()
    }

    /// The troubles that have happened.
    pub fn hits(&self) -> Vec<Planned> {
        self.state().hits.clone()
    }

    /// Everything that was met, for a person to read.
    pub fn trace(&self) -> Vec<String> {
        self.state().trace.clone()
    }

    /// Adds a line to the trace.
    pub fn note(&self, text: &str) {
        let line = format!("{:>7} ms  {text}", self.0.start.elapsed().as_millis());
        self.state().trace.push(line);
    }

    /// Begins the next life of a program.
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

    /// The present life of a program; a program that has none has not been begun.
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
    /// Cancelled when the program is to end by itself.
    pub fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Whether the program was killed in this life.
    pub fn is_killed(&self) -> bool {
        let state = self.faults.state();
        state
            .lives
            .get(self.program)
            .is_none_or(|lived| lived.number != self.number || lived.killed)
    }

    /// Kills the program. What is left of it is to be [buried](Life::bury) by whoever runs it.
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

    /// Returns when the program has been killed.
    pub async fn killed(&self) {
        let mut ended = self.faults.0.ended.subscribe();
        // The sender lives as long as this.
        let _ = ended.wait_for(|_| self.is_killed()).await;
    }

    /// Says that nothing decides anything any more in this life, so that threads that were stopped in the midst of a step may end.
    pub fn bury(&self) {
        if let Some(lived) = self.faults.state().lives.get_mut(self.program) {
            lived.buried = true;
        }
        self.faults.0.buried.notify_all();
    }

    /// Waits on a thread of its own for the burial.
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

    /// Shows what happens to whoever looks.
    pub(crate) fn show(&self, place: Place, what: &str) {
        if let Some(look) = self.faults.0.look.0.get() {
            look(self.program, place, what);
        }
    }

    /// The program comes to a place. What goes wrong there, if anything does; whoever asks lets it happen, and calls
    /// [`Life::kill`] after the event for [`Trouble::KilledAfter`].
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
    fn the_planned_place_is_met_once_and_only_while_places_are_counted() {
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
    async fn whoever_waits_for_the_end_of_a_life_hears_of_it() {
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
