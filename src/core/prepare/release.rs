//! The user's view of the prepared claims, and their manual release.

use super::claim_uid::{ClaimUid, ClaimUidError};
use super::kubelet_state::KubeletView;
use super::prepared_claims::{Change, Entry, PreparedClaims};
use super::step::Step;

/// A prepared claim, as shown to users.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// Uid of the claim.
    pub uid: String,
    /// Namespace of the claim; empty if it was lost with the checkpoint.
    pub namespace: String,
    /// Name of the claim; empty if it was lost with the checkpoint.
    pub name: String,
    /// The devices; empty if unknown.
    pub devices: Vec<String>,
    /// The progress of Prepare.
    pub state: HoldingState,
    /// The reason for quarantine; empty if it is not quarantined.
    pub quarantine: String,
}

/// The progress of a claim, as shown to users.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HoldingState {
    /// Prepare has begun and has not been answered yet.
    #[default]
    Preparing,
    /// Containers may use it.
    Prepared,
    /// Prepared before the node booted: none of its containers runs, unless kubelet prepares it again.
    EarlierBoot,
}

impl HoldingState {
    /// The name of the state, as shown to users.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Preparing => "Preparing",
            Self::Prepared => "Prepared",
            Self::EarlierBoot => "EarlierBoot",
        }
    }
}

/// Why a claim is not released manually.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReleaseRefusal {
    /// The uid is invalid.
    #[error(transparent)]
    ClaimUid(#[from] ClaimUidError),
    /// The claim holds nothing.
    #[error("the claim of uid {0} holds nothing on this node")]
    NotHeld(ClaimUid),
    /// Kubelet may still use the claim.
    #[error(
        "kubelet lists {0} as prepared: delete its pod, and kubelet will give it back. If kubelet cannot and no container uses the claim, say --force"
    )]
    Listed(String),
    /// Whether kubelet still uses the claim is unknown.
    #[error(
        "whether kubelet still uses {claim} cannot be told ({why}). If no container uses it, say --force"
    )]
    KubeletUnknown {
        /// The claim.
        claim: String,
        /// Why it is unknown.
        why: String,
    },
}

impl ReleaseRefusal {
    /// CamelCase reason from a small fixed set.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::ClaimUid(_) => "InvalidClaim",
            Self::NotHeld(_) => "NotHeld",
            Self::Listed(_) => "InUse",
            Self::KubeletUnknown { .. } => "KubeletUnknown",
        }
    }
}

/// Plans a manual release. Without `force`, only a claim that kubelet does not list is released.
pub fn plan_release(
    prepared_claims: &PreparedClaims,
    kubelet: &KubeletView,
    uid: &str,
    force: bool,
) -> Result<(ClaimUid, Vec<Step>), ReleaseRefusal> {
    let uid = may_release(prepared_claims, kubelet, uid, force)?;
    let steps = plan_free(&uid);
    Ok((uid, steps))
}

/// Plans a manual release while the node's driver is not running to undo its work. No further container gets the claim's devices; the next
/// start of the companion cleans up the rest, as for any unfinished claim.
pub fn plan_release_without_driver(
    prepared_claims: &PreparedClaims,
    kubelet: &KubeletView,
    uid: &str,
    force: bool,
) -> Result<(ClaimUid, Vec<Step>), ReleaseRefusal> {
    let uid = may_release(prepared_claims, kubelet, uid, force)?;
    let steps = vec![
        Step::RemoveCdi(uid.clone()),
        Step::Save(vec![Change::Abandon(uid.clone())]),
    ];
    Ok((uid, steps))
}

fn may_release(
    prepared_claims: &PreparedClaims,
    kubelet: &KubeletView,
    uid: &str,
    force: bool,
) -> Result<ClaimUid, ReleaseRefusal> {
    let uid = ClaimUid::parse(uid)?;
    let entry = prepared_claims
        .entry(&uid)
        .ok_or_else(|| ReleaseRefusal::NotHeld(uid.clone()))?;
    if !force {
        match kubelet {
            KubeletView::Lists(listed) if listed.contains_key(&uid) => {
                return Err(ReleaseRefusal::Listed(entry.describe(&uid)));
            }
            KubeletView::Lists(_) => {}
            KubeletView::Unknown(why) => {
                return Err(ReleaseRefusal::KubeletUnknown {
                    claim: entry.describe(&uid),
                    why: why.clone(),
                });
            }
        }
    }
    Ok(uid)
}

/// The steps that release a claim. The file goes first: after a kill in between, the claim is still recorded.
pub fn plan_free(uid: &ClaimUid) -> Vec<Step> {
    vec![
        Step::RemoveCdi(uid.clone()),
        Step::Unprepare(uid.clone()),
        Step::Save(vec![Change::Remove(uid.clone())]),
    ]
}

/// All prepared claims, in order of their uids.
pub fn holdings(
    prepared_claims: &PreparedClaims,
    quarantine: &std::collections::BTreeMap<ClaimUid, String>,
) -> Vec<Holding> {
    let holding = |(uid, entry): (&ClaimUid, &Entry)| Holding {
        uid: uid.to_string(),
        namespace: entry.namespace.clone(),
        name: entry.name.clone(),
        devices: entry.devices.iter().map(|held| held.device.clone()).collect(),
        state: match (entry.is_done(), prepared_claims.may_be_in_use(entry)) {
            (false, _) => HoldingState::Preparing,
            (true, true) => HoldingState::Prepared,
            (true, false) => HoldingState::EarlierBoot,
        },
        quarantine: quarantine.get(uid).cloned().unwrap_or_default(),
    };
    prepared_claims.entries().iter().map(holding).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::super::container_edits::ContainerEdits;
    use super::super::kubelet_state::{KubeletClaim, KubeletClaims};
    use super::super::prepared_claims::{HeldDevice, Progress};
    use super::super::recovery::plan_clearing;
    use super::*;

    const UID: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10";

    fn uid() -> ClaimUid {
        ClaimUid::parse(UID).unwrap()
    }

    fn prepared_claims(boot_id: &str) -> PreparedClaims {
        let entry = Entry {
            namespace: "default".into(),
            name: "camera".into(),
            boot_id: boot_id.into(),
            devices: vec![HeldDevice {
                device: "kvm".into(),
                kind: "test".into(),
                ..HeldDevice::default()
            }],
            progress: Progress::Done {
                container_edits: ContainerEdits::default(),
            },
        };
        PreparedClaims::new("boot", BTreeMap::from([(uid(), entry)]))
    }

    #[test]
    fn what_kubelet_does_not_list_is_released_and_the_file_goes_first() {
        let (_, steps) = plan_release(
            &prepared_claims("boot"),
            &KubeletView::Lists(KubeletClaims::new()),
            UID,
            false,
        )
        .unwrap();
        assert_eq!(
            steps,
            [
                Step::RemoveCdi(uid()),
                Step::Unprepare(uid()),
                Step::Save(vec![Change::Remove(uid())])
            ]
        );
    }

    #[test]
    fn what_is_released_without_the_driver_is_begun_so_that_the_next_start_has_the_driver_undo_it() {
        let nothing = KubeletView::Lists(KubeletClaims::new());
        let before = prepared_claims("boot");
        let (released, steps) = plan_release_without_driver(&before, &nothing, UID, false).unwrap();
        let [Step::RemoveCdi(_), Step::Save(changes)] = steps.as_slice() else {
            panic!("{steps:?}")
        };
        let mut after = before.clone();
        for change in changes {
            after.apply(change);
            after.apply(change);
        }
        let entry = after.entry(&released).unwrap();
        assert!(!after.may_be_in_use(entry) && after.holder("kvm").is_some());
        assert_eq!(
            plan_clearing(&after, &BTreeSet::new()),
            [plan_free(&released)],
            "the driver, and then the entry"
        );
        let listed = KubeletView::Lists(KubeletClaims::from([(uid(), KubeletClaim::default())]));
        let refusal = plan_release_without_driver(&before, &listed, UID, false).unwrap_err();
        assert_eq!(refusal.reason(), "InUse");
    }

    #[test]
    fn what_kubelet_lists_or_may_list_is_released_by_force_only() {
        let listed = KubeletView::Lists(KubeletClaims::from([(uid(), KubeletClaim::default())]));
        for (kubelet, reason) in [
            (listed, "InUse"),
            (KubeletView::Unknown("no such file".into()), "KubeletUnknown"),
        ] {
            let refusal = plan_release(&prepared_claims("boot"), &kubelet, UID, false).unwrap_err();
            assert_eq!(refusal.reason(), reason);
            assert!(refusal.to_string().contains("--force"), "{refusal}");
            plan_release(&prepared_claims("boot"), &kubelet, UID, true).unwrap();
        }
    }

    #[test]
    fn what_is_not_held_and_what_is_no_uid_is_refused_by_name_even_by_force() {
        let kubelet = KubeletView::Lists(KubeletClaims::new());
        let other = UID.replace('7', "8");
        for (uid, reason) in [(other.as_str(), "NotHeld"), ("../../etc", "InvalidClaim")] {
            let refusal = plan_release(&prepared_claims("boot"), &kubelet, uid, true).unwrap_err();
            assert_eq!(refusal.reason(), reason);
            assert!(refusal.to_string().contains(uid), "{refusal}");
        }
    }

    #[test]
    fn a_person_sees_who_holds_what_and_why_it_is_in_quarantine() {
        let quarantine = BTreeMap::from([(uid(), "forgotten".to_owned())]);
        let shown = &holdings(&prepared_claims("boot"), &quarantine)[0];
        assert_eq!(
            (shown.devices.as_slice(), shown.state),
            (&["kvm".to_owned()][..], HoldingState::Prepared)
        );
        assert_eq!(shown.quarantine, "forgotten");
        let earlier = &holdings(&prepared_claims("before"), &BTreeMap::new())[0];
        assert_eq!(
            (earlier.state, earlier.quarantine.as_str()),
            (HoldingState::EarlierBoot, "")
        );
    }
}
