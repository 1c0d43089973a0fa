//! The steps that plans are made of, and what each of them does to the ledger.

use super::claim_uid::ClaimUid;
use super::injection::Injection;
use super::ledger::{Change, Ledger};

/// One thing to do. All of them are idempotent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make these changes to the ledger, all at once, and make the checkpoint that has them durable. Without a change:
    /// make the ledger durable as it stands. Nothing is written if the checkpoint has it already.
    Save(Vec<Change>),
    /// Ask the node's driver what containers get for the claim's devices, which checks that they are there, and note it
    /// in the ledger.
    Inject(ClaimUid),
    /// Make the claim's CDI file say what the ledger says. Nothing is written if it does so already.
    WriteCdi(ClaimUid),
    /// Make sure that the claim has no CDI file.
    RemoveCdi(ClaimUid),
    /// Have the node's driver undo what it did for the claim, whatever that was and also if it was nothing.
    Release(ClaimUid),
}

/// What keeps the ledger and the CDI files. Each call is complete when it returns: either all of it is there and outlives
/// this process, or it failed.
pub trait Records {
    /// Why something could not be kept.
    type Error;

    /// Stores the ledger.
    fn save(&self, ledger: &Ledger) -> Result<(), Self::Error>;

    /// Stores what the containers of a claim get.
    fn write_cdi(&self, uid: &ClaimUid, injection: &Injection) -> Result<(), Self::Error>;

    /// Removes what [`Records::write_cdi`] stored, if there is anything.
    fn remove_cdi(&self, uid: &ClaimUid) -> Result<(), Self::Error>;
}

impl Step {
    /// Carries out the step, unless it is one for the driver, and returns the ledger as it is afterwards if the step changes
    /// it. A ledger that could not be stored does not count.
    pub fn perform<R: Records>(&self, ledger: &Ledger, records: &R) -> Result<Option<Ledger>, R::Error> {
        match self {
            Self::Save(changes) if changes.is_empty() => records.save(ledger)?,
            Self::Save(changes) => {
                let mut next = ledger.clone();
                for change in changes {
                    next.apply(change);
                }
                records.save(&next)?;
                return Ok(Some(next));
            }
            Self::WriteCdi(uid) => {
                if let Some(injection) = ledger.entry(uid).and_then(|entry| entry.injection()) {
                    records.write_cdi(uid, injection)?;
                }
            }
            Self::RemoveCdi(uid) => records.remove_cdi(uid)?,
            Self::Inject(_) | Self::Release(_) => {}
        }
        Ok(None)
    }
}
