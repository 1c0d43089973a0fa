//! The disk of a node: what a process sees, and what is left of it after a kill or a power loss at any step.
//!
//! A kill leaves everything as it is between two steps. A power loss takes what was not flushed: content of files, and the latest
//! changes of names in a directory. CDI files are on a file system in memory, which a boot empties.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use drayman::api::cdi::Spec;
use drayman::core::prepare::checkpoint::{Checkpoint, ClusterFacts};
use drayman::core::prepare::container_edits::cdi_spec_of_entry;
use drayman::core::prepare::names::{ClaimUid, DriverName};
use drayman::core::prepare::plan::Records;
use drayman::core::prepare::prepared_claims::{Entry, PreparedClaims};

use crate::driver::DRIVER;
use crate::rng::Rng;

const CHECKPOINT: &str = "checkpoint.json";
const TEMPORARY: &str = "checkpoint.json.tmp";

/// Why an operation did not come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The process was killed, or the node lost its power.
    Killed,
    /// A step failed, and the process goes on.
    Failed,
}

/// What goes wrong with an operation, at which of its steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    Kill(u32),
    Fail {
        from: u32,
        steps: u32,
    },
    /// One step fails, and while that is made good, the process is killed.
    FailAndKill {
        fail: u32,
        kill: u32,
    },
}

impl Trouble {
    /// Whether the process does not live to answer.
    pub(super) fn kills(self) -> bool {
        !matches!(self, Self::Fail { .. })
    }
}

#[derive(Clone, Debug, Default)]
struct File {
    text: String,
    flushed: bool,
}

#[derive(Clone, Debug, Default)]
struct State {
    files: Vec<File>,
    /// The names that a process sees, each with the number of its file.
    names: BTreeMap<String, usize>,
    /// Those that outlive a power loss in any case.
    durable: BTreeMap<String, usize>,
    /// What has changed since, in order.
    changes: Vec<(String, Option<usize>)>,
    cdi: BTreeMap<ClaimUid, Spec>,
    /// The text that this process knows to be durable.
    written: Option<String>,
    trouble: Option<Trouble>,
    step: u32,
    /// Of the longest operation so far.
    longest: u32,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Disk(RefCell<State>);

pub(crate) fn driver_name() -> DriverName {
    DriverName::parse(DRIVER).unwrap()
}

impl State {
    fn step(&mut self) -> Result<(), Stop> {
        let now = self.step;
        self.step += 1;
        self.longest = self.longest.max(self.step);
        match self.trouble {
            Some(Trouble::Kill(at) | Trouble::FailAndKill { kill: at, .. }) if now >= at => Err(Stop::Killed),
            Some(Trouble::FailAndKill { fail, .. }) if now == fail => Err(Stop::Failed),
            Some(Trouble::Fail { from, steps }) if (from..from + steps).contains(&now) => Err(Stop::Failed),
            _ => Ok(()),
        }
    }

    fn rename(&mut self, name: &str, file: Option<usize>) {
        match file {
            Some(file) => self.names.insert(name.to_owned(), file),
            None => self.names.remove(name),
        };
        self.changes.push((name.to_owned(), file));
    }

    fn flush_directory(&mut self) {
        self.durable = self.names.clone();
        self.changes.clear();
    }

    /// Create, write, flush, rename: as `src/node/state/storage/files.rs` does it.
    fn replace(&mut self, text: &str) -> Result<(), Stop> {
        let written = self.write_temporary(text);
        let result = written.and_then(|file| {
            self.step()?;
            self.rename(CHECKPOINT, Some(file));
            self.rename(TEMPORARY, None);
            Ok(())
        });
        if result == Err(Stop::Failed) {
            self.rename(TEMPORARY, None);
        }
        result
    }

    fn write_temporary(&mut self, text: &str) -> Result<usize, Stop> {
        self.step()?;
        let file = self.files.len();
        self.files.push(File::default());
        self.rename(TEMPORARY, Some(file));
        self.step()?;
        text.clone_into(&mut self.files[file].text);
        self.step()?;
        self.files[file].flushed = true;
        Ok(file)
    }
}

impl Disk {
    /// From now on this goes wrong.
    pub(crate) fn begin(&self, trouble: Option<Trouble>) {
        let mut state = self.0.borrow_mut();
        state.trouble = trouble;
        state.step = 0;
    }

    /// A step that is not the disk's own, at which the process may be killed too.
    pub(crate) fn pass(&self) -> Result<(), Stop> {
        self.0.borrow_mut().step()
    }

    /// How many steps the longest operation had so far.
    pub(super) fn longest(&self) -> u32 {
        self.0.borrow().longest
    }

    /// The checkpoint as a process finds it when it starts; what cannot be read is put aside.
    pub(crate) fn load(&self) -> Option<BTreeMap<ClaimUid, Entry>> {
        let mut state = self.0.borrow_mut();
        state.written = None;
        let file = *state.names.get(CHECKPOINT)?;
        let text = state.files[file].text.clone();
        let Ok(checkpoint) = Checkpoint::decode(text.as_bytes()) else {
            state.rename(CHECKPOINT, None);
            state.flush_directory();
            return None;
        };
        // The process before may have been killed between its rename and its flush.
        state.flush_directory();
        state.written = Some(text);
        Some(checkpoint.entries)
    }

    /// Something has happened to the checkpoint while no process ran.
    pub(crate) fn damage(&self) {
        let mut state = self.0.borrow_mut();
        if let Some(file) = state.names.get(CHECKPOINT).copied() {
            state.files[file].text.insert(0, '#');
        }
    }

    pub(crate) fn cdi_names(&self) -> BTreeSet<ClaimUid> {
        self.0.borrow().cdi.keys().cloned().collect()
    }

    /// Somebody removes all files that the container runtime reads.
    pub(crate) fn lose_cdi(&self) {
        self.0.borrow_mut().cdi.clear();
    }

    /// What the container runtime reads.
    pub(crate) fn cdi(&self, uid: &ClaimUid) -> Option<Spec> {
        self.0.borrow().cdi.get(uid).cloned()
    }

    /// The checkpoint that the next process would find after a kill at this moment.
    pub(crate) fn entries(&self) -> Option<BTreeMap<ClaimUid, Entry>> {
        let state = self.0.borrow();
        let file = &state.files[*state.names.get(CHECKPOINT)?];
        Some(Checkpoint::decode(file.text.as_bytes()).ok()?.entries)
    }

    /// The power is gone: so is what was not flushed, and everything in memory.
    pub(crate) fn lose_power(&self, rng: &mut Rng) {
        let mut state = self.0.borrow_mut();
        let kept = rng.between(0, state.changes.len() as u64) as usize;
        let mut names = state.durable.clone();
        for (name, file) in state.changes.iter().take(kept) {
            match file {
                Some(file) => names.insert(name.clone(), *file),
                None => names.remove(name),
            };
        }
        for file in state.files.iter_mut().filter(|file| !file.flushed) {
            let length = rng.between(0, file.text.len() as u64) as usize;
            file.text.truncate(length);
        }
        state.durable = names.clone();
        state.names = names;
        state.changes.clear();
        state.cdi.clear();
        state.written = None;
    }
}

impl Records for Disk {
    type Error = Stop;

    fn save(&self, prepared_claims: &PreparedClaims) -> Result<(), Stop> {
        let mut state = self.0.borrow_mut();
        let text = Checkpoint::of(prepared_claims, &ClusterFacts::default())
            .encode()
            .unwrap();
        if state.written.as_ref() != Some(&text) {
            state.replace(&text)?;
            state.written = None;
            state.step()?;
            state.flush_directory();
            state.written = Some(text);
        }
        Ok(())
    }

    fn write_cdi(&self, uid: &ClaimUid, entry: &Entry) -> Result<(), Stop> {
        let Some(spec) = cdi_spec_of_entry(&driver_name(), uid, entry) else {
            return Ok(());
        };
        let mut state = self.0.borrow_mut();
        if state.cdi.get(uid) != Some(&spec) {
            // Under another name, and then renamed.
            state.step()?;
            state.step()?;
            state.cdi.insert(uid.clone(), spec);
        }
        Ok(())
    }

    fn remove_cdi(&self, uid: &ClaimUid) -> Result<(), Stop> {
        let mut state = self.0.borrow_mut();
        state.step()?;
        state.cdi.remove(uid);
        Ok(())
    }
}
