//! The steps of plans, and their effect on the prepared claims.

use super::claim_uid::ClaimUid;
use super::container_edits::ContainerEdits;
use super::prepared_claims::{Change, PreparedClaims};

/// One idempotent action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Applies these changes together and stores the checkpoint durably. Without changes, stores the present state. Writes nothing if the
    /// checkpoint is up to date.
    Save(Vec<Change>),
    /// Calls the node's driver for the claim's container edits, which also checks that the devices exist, and records them.
    Prepare(ClaimUid),
    /// Updates the claim's CDI file from its record. Writes nothing if it is up to date.
    WriteCdi(ClaimUid),
    /// Removes the claim's CDI file, if it exists.
    RemoveCdi(ClaimUid),
    /// Calls the node's driver to undo its work for the claim, even if it may have done none.
    Unprepare(ClaimUid),
}

/// Storage for the checkpoint and the CDI files. Each call either completes durably, so that the result outlives this process, or fails.
pub trait Records {
    /// Why storing failed.
    type Error;

    /// Stores the prepared claims in the checkpoint.
    fn save(&self, prepared_claims: &PreparedClaims) -> Result<(), Self::Error>;

    /// Stores the container edits of a claim.
    fn write_cdi(&self, uid: &ClaimUid, container_edits: &ContainerEdits) -> Result<(), Self::Error>;

    /// Removes the file of [`Records::write_cdi`], if it exists.
    fn remove_cdi(&self, uid: &ClaimUid) -> Result<(), Self::Error>;
}

impl Step {
    /// Performs the step, unless it is one for the driver. Returns the new prepared claims if the step changes them. If storing fails,
    /// nothing changes.
    pub fn perform<R: Records>(
        &self,
        prepared_claims: &PreparedClaims,
        records: &R,
    ) -> Result<Option<PreparedClaims>, R::Error> {
        match self {
            Self::Save(changes) if changes.is_empty() => records.save(prepared_claims)?,
            Self::Save(changes) => {
                let mut next = prepared_claims.clone();
                for change in changes {
                    next.apply(change);
                }
                records.save(&next)?;
                return Ok(Some(next));
            }
            Self::WriteCdi(uid) => {
                if let Some(container_edits) = prepared_claims
                    .entry(uid)
                    .and_then(|entry| entry.container_edits())
                {
                    records.write_cdi(uid, container_edits)?;
                }
            }
            Self::RemoveCdi(uid) => records.remove_cdi(uid)?,
            Self::Prepare(_) | Self::Unprepare(_) => {}
        }
        Ok(None)
    }
}
