//! The disk of a node, including its state after a kill or a power loss at any step.
//!
//! A kill preserves everything up to the current step. A power loss discards unflushed file content and the latest directory changes. CDI
//! files are on a tmpfs, which is empty after a boot.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use drayman::api::cdi::Spec;
use drayman::core::names::{ClaimUid, DriverName};
use drayman::core::prepare::checkpoint::{Checkpoint, ClusterFacts};
use drayman::core::prepare::plan::Storage;
use drayman::core::prepare::prepared_claims::{Entry, PreparedClaims};
use drayman::core::prepare::runtime_containers::UnknownContainers;

use crate::driver::DRIVER;
use crate::rng::Rng;

const CHECKPOINT: &str = "checkpoint.json";
const TEMPORARY: &str = "checkpoint.json.tmp";

/// Why an operation was incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The process was killed or the node lost power.
    Killed,
    /// A step failed; the process continues.
    Failed,
}

/// A fault of an operation, with its steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OperationFault {
    Kill(u32),
    Fail {
        from: u32,
        steps: u32,
    },
    /// One step fails, and the process is killed during the repair.
    FailAndKill {
        fail: u32,
        kill: u32,
    },
}

impl OperationFault {
    /// Whether the process is killed before its answer.
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
    /// The names that processes see, with their file numbers.
    names: BTreeMap<String, usize>,
    /// The names that survive a power loss.
    durable: BTreeMap<String, usize>,
    /// Name changes since the last flush, in order.
    changes: Vec<(String, Option<usize>)>,
    cdi: BTreeMap<ClaimUid, Spec>,
    /// The text that this process has durably written.
    written: Option<String>,
    fault: Option<OperationFault>,
    step: u32,
    /// Number of steps of the longest operation so far.
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
        match self.fault {
            Some(OperationFault::Kill(at) | OperationFault::FailAndKill { kill: at, .. }) if now >= at => {
                Err(Stop::Killed)
            }
            Some(OperationFault::FailAndKill { fail, .. }) if now == fail => Err(Stop::Failed),
            Some(OperationFault::Fail { from, steps }) if (from..from + steps).contains(&now) => {
                Err(Stop::Failed)
            }
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

    /// Create, write, flush, rename, like `src/node/state/storage/files.rs`.
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
    /// Starts an operation with this fault.
    pub(crate) fn begin(&self, fault: Option<OperationFault>) {
        let mut state = self.0.borrow_mut();
        state.fault = fault;
        state.step = 0;
    }

    /// A step outside of the disk at which the process may be killed.
    pub(crate) fn external_step(&self) -> Result<(), Stop> {
        self.0.borrow_mut().step()
    }

    /// The number of steps of the longest operation so far.
    pub(super) fn longest(&self) -> u32 {
        self.0.borrow().longest
    }

    /// Loads the checkpoint at process start; an unreadable one is moved away.
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
        // The previous process may have been killed between rename and flush.
        state.flush_directory();
        state.written = Some(text);
        Some(checkpoint.entries)
    }

    /// Damages the checkpoint while no process runs.
    pub(crate) fn damage(&self) {
        let mut state = self.0.borrow_mut();
        if let Some(file) = state.names.get(CHECKPOINT).copied() {
            state.files[file].text.insert(0, '#');
        }
    }

    pub(crate) fn cdi_names(&self) -> BTreeSet<ClaimUid> {
        self.0.borrow().cdi.keys().cloned().collect()
    }

    /// Removes all CDI files.
    pub(crate) fn remove_all_cdi(&self) {
        self.0.borrow_mut().cdi.clear();
    }

    /// The CDI file of a claim.
    pub(crate) fn cdi(&self, uid: &ClaimUid) -> Option<Spec> {
        self.0.borrow().cdi.get(uid).cloned()
    }

    /// The checkpoint that a process would find after a kill at this point.
    pub(crate) fn entries(&self) -> Option<BTreeMap<ClaimUid, Entry>> {
        let state = self.0.borrow();
        let file = &state.files[*state.names.get(CHECKPOINT)?];
        Some(Checkpoint::decode(file.text.as_bytes()).ok()?.entries)
    }

    /// Loses power: discards unflushed and in-memory data.
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

impl Storage for Disk {
    type Error = Stop;

    fn save(&self, prepared_claims: &PreparedClaims) -> Result<(), Stop> {
        let mut state = self.0.borrow_mut();
        let text = Checkpoint::of(
            prepared_claims,
            &ClusterFacts::default(),
            &UnknownContainers::default(),
        )
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
        let Some(spec) = entry.cdi_spec(&driver_name(), uid) else {
            return Ok(());
        };
        let mut state = self.0.borrow_mut();
        if state.cdi.get(uid) != Some(&spec) {
            // Written to a temporary name and renamed.
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
