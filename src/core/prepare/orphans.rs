//! Orphaned claims, which kubelet has forgotten: decides when their devices become free and when a user must intervene.
//!
//! Kubelet records a claim only after Prepare has answered. If it restarts in between, it never calls Unprepare, and the entry would stay
//! forever. The entry is freed once kubelet's list and the API server have both lacked the claim for a grace period in which kubelet did
//! not prepare it either. Otherwise the claim is quarantined: it keeps its devices, which are published as unhealthy so that they are not
//! allocated again, and the user is notified.
//!
//! A claim that kubelet lists is not examined, unless another claim needs its device. A kubelet that was down while a pod was deleted by
//! force may list the pod's claim forever. A claim that a user created may still exist then, but is no longer allocated.
//!
//! Such a claim is freed immediately if the container runtime shows that no container has its devices, regardless of kubelet's list. Its
//! CDI file is removed first, so that no later container starts with them. If the runtime shows a container with the devices of a claim,
//! the claim is never freed, even if kubelet's list and the API server lack it. While kubelet's runtime does not answer, a missing claim is
//! quarantined.
//!
//! If kubelet's list cannot be read, which is the chart's default, only the API server shows that a claim is over. It is asked less and less
//! often as long as nothing changes. Once it has lacked the claim for the grace period, the claim is quarantined; kubelet needs some of that
//! time to end the containers and call Unprepare.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::kubelet_state::KubeletView;
use super::prepared_claims::{Entry, HeldDevice, PreparedClaims};
use crate::core::names::ClaimUid;

/// How long a claim must be missing from kubelet's list before it counts as an orphan: more than twice the 45 s that kubelet waits for
/// Prepare.
pub const GRACE: Duration = Duration::from_secs(120);
/// Interval between checks of kubelet's list while claims hold devices, in grace periods: five minutes by default.
const EVERY: f64 = 2.5;
/// Longest pause between questions about a claim while kubelet's list cannot be read. Nobody waits for the answer: once another claim needs
/// the device, there is no pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(60 * 60);

/// The claims under examination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orphans {
    grace: Duration,
    suspects: BTreeMap<ClaimUid, Suspect>,
    /// Claims whose device another claim needs.
    conflicting: BTreeSet<ClaimUid>,
    /// Whether the container runtime reports the devices of its containers.
    has_runtime: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Suspect {
    since: Duration,
    /// Since when kubelet's list has lacked the claim; `None` while it is listed or the list cannot be read. Not before `since`.
    missing: Option<Duration>,
    /// Since when the API server has lacked the claim; `None` while it has the claim or has not answered yet.
    gone: Option<Duration>,
    /// The last pause between questions.
    pause: Duration,
    /// When that pause ends.
    ask_again: Duration,
    quarantine: Option<String>,
}

impl Suspect {
    fn new(grace: Duration, now: Duration) -> Self {
        Self {
            since: now,
            missing: None,
            gone: None,
            pause: grace,
            ask_again: Duration::ZERO,
            quarantine: None,
        }
    }

    /// Whether kubelet's list has lacked the claim for the grace period.
    fn is_missing(&self, grace: Duration, now: Duration) -> bool {
        has_lasted(self.missing, grace, now)
    }

    /// Whether the API server has lacked the claim for the grace period.
    fn is_gone(&self, grace: Duration, now: Duration) -> bool {
        has_lasted(self.gone, grace, now)
    }

    /// Whether the last answer needs no other one yet. The end of a quarantine must not wait.
    fn rests(&self, now: Duration) -> bool {
        self.quarantine.is_none() && now < self.ask_again
    }

    /// Records an answer of the API server. Each doubles the pause before the next question, except while the grace period of a claim that
    /// is gone runs.
    fn record(&mut self, answer: &ApiView, grace: Duration, now: Duration) {
        self.gone = match answer {
            ApiView::Gone => self.gone.or(Some(now)),
            ApiView::Present { .. } => None,
            // The next check asks again.
            ApiView::Unknown(_) => return,
        };
        self.ask_again = now;
        if self.gone.is_none() || self.is_gone(grace, now) {
            self.pause = self.pause.saturating_mul(2).min(LONGEST_PAUSE);
            self.ask_again += self.pause;
        }
    }
}

/// Whether something began at least a grace period ago.
fn has_lasted(since: Option<Duration>, grace: Duration, now: Duration) -> bool {
    since.is_some_and(|since| now.saturating_sub(since) >= grace)
}

/// The API server's view of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiView {
    /// The API server has no claim with this uid.
    Gone,
    /// The claim exists.
    Present {
        /// The devices that this driver has in the allocation, if it can be read.
        devices: Option<Vec<HeldDevice>>,
    },
    /// The API server gave no answer, for this reason.
    Unknown(String),
}

impl ApiView {
    /// Whether the claim no longer holds a device that was prepared for it: it is gone, deallocated, or was allocated other devices since.
    fn holds_nothing_of(&self, entry: &Entry) -> bool {
        !matches!(self, Self::Unknown(_)) && !self.holds_one_of(entry)
    }

    /// Whether the claim is allocated a device that was prepared for it, as far as its allocation is readable. If the prepared devices are
    /// unknown, any device may be one of them.
    fn holds_one_of(&self, entry: &Entry) -> bool {
        let Self::Present {
            devices: Some(devices),
        } = self
        else {
            return false;
        };
        let is_prepared = |device: &HeldDevice| entry.devices.iter().any(|held| held.device == device.device);
        devices
            .iter()
            .any(|device| entry.devices.is_empty() || is_prepared(device))
    }
}

/// The container runtime's view of the claims of [`Orphans::claims_to_check`]. The decision for other claims ignores the runtime.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeView {
    /// The claims whose devices no container has.
    pub unused: BTreeSet<ClaimUid>,
    /// The claims whose devices a container has or that still have a CDI file, and those about which it is too early to decide.
    pub undecided: BTreeSet<ClaimUid>,
    /// The claims about which the runtime did not answer, or that a container of unknown status may use.
    pub unanswered: BTreeSet<ClaimUid>,
}

/// A claim to look up at the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Uid of the claim.
    pub uid: ClaimUid,
    /// Namespace of the claim; empty if unknown.
    pub namespace: String,
    /// Name of the claim; empty if unknown.
    pub name: String,
}

/// The decision about a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The claim is an orphan: its devices are free.
    Free(ClaimUid),
    /// The devices of the claim have become known.
    Explain(ClaimUid, Vec<HeldDevice>),
}

impl Orphans {
    /// Starts without suspects. `grace` is how long a claim may be missing; `has_runtime` enables the check with the container runtime.
    pub fn new(grace: Duration, has_runtime: bool) -> Self {
        Self {
            grace,
            suspects: BTreeMap::new(),
            conflicting: BTreeSet::new(),
            has_runtime,
        }
    }

    /// Clears a claim that is not an orphan: kubelet has just prepared it, or it holds nothing any more.
    pub fn forget(&mut self, uid: &ClaimUid) {
        self.suspects.remove(uid);
        self.conflicting.remove(uid);
    }

    /// Records that another claim needs a device of this one. Returns true if that is new and a check is due.
    pub fn mark_conflicting(&mut self, uid: &ClaimUid) -> bool {
        self.conflicting.insert(uid.clone())
    }

    /// Compares the prepared claims with kubelet's list and returns the claims to look up at the API server.
    ///
    /// `now` is the time since any fixed moment.
    pub fn find(
        &mut self,
        prepared_claims: &PreparedClaims,
        kubelet: &KubeletView,
        now: Duration,
    ) -> Vec<Question> {
        self.conflicting
            .retain(|uid| prepared_claims.entry(uid).is_some());
        let conflicting = &self.conflicting;
        let is_suspect = |uid: &ClaimUid, entry: &Entry| {
            let listed = kubelet.lists(uid) == Some(true);
            entry.is_done() && (entry.has_unknown_devices() || !listed || conflicting.contains(uid))
        };
        self.suspects.retain(|uid, _| {
            prepared_claims
                .entry(uid)
                .is_some_and(|entry| is_suspect(uid, entry))
        });
        let mut questions = Vec::new();
        for (uid, entry) in prepared_claims.entries() {
            if !is_suspect(uid, entry) {
                continue;
            }
            let suspect = self
                .suspects
                .entry(uid.clone())
                .or_insert_with(|| Suspect::new(self.grace, now));
            suspect.missing = match kubelet.lists(uid) {
                Some(false) => suspect.missing.or(Some(now)),
                _ => None,
            };
            let (unknown, needed) = (entry.has_unknown_devices(), conflicting.contains(uid));
            let at_once = unknown || (self.has_runtime && needed);
            let is_early = now.saturating_sub(suspect.since) < self.grace && !at_once;
            let rests = kubelet.lists(uid).is_none() && !unknown && !needed && suspect.rests(now);
            if is_early || rests {
                continue;
            }
            let listed = kubelet.claim(uid);
            let known = |own: &str, theirs: Option<&String>| match theirs {
                Some(theirs) if own.is_empty() => theirs.clone(),
                _ => own.to_owned(),
            };
            questions.push(Question {
                uid: uid.clone(),
                namespace: known(&entry.namespace, listed.map(|claim| &claim.namespace)),
                name: known(&entry.name, listed.map(|claim| &claim.name)),
            });
        }
        questions
    }

    /// The claims to check with the container runtime: they hold nothing according to the API server, and another claim needs their
    /// devices or kubelet's list lacks them for the grace period. The check matters in both cases: kubelet forgets claims of pods that were
    /// deleted by force, and the device numbers of a privileged container do not show which of the host's devices it was given, so that
    /// its claim is recognized only for as long as it is recorded.
    pub fn claims_to_check(
        &self,
        prepared_claims: &PreparedClaims,
        kubelet: &KubeletView,
        answers: &BTreeMap<ClaimUid, ApiView>,
        now: Duration,
    ) -> Vec<ClaimUid> {
        let is_missing = |uid: &ClaimUid| {
            let suspect = self.suspects.get(uid);
            kubelet.lists(uid) == Some(false)
                && suspect.is_some_and(|suspect| suspect.is_missing(self.grace, now))
        };
        let gone = answers.iter().filter(|(uid, answer)| {
            let is_gone = |entry: &Entry| entry.is_done() && answer.holds_nothing_of(entry);
            self.has_runtime
                && (self.conflicting.contains(*uid) || is_missing(uid))
                && prepared_claims.entry(uid).is_some_and(is_gone)
        });
        gone.map(|(uid, _)| uid.clone()).collect()
    }

    /// Decides from the answers. Claims that kubelet has prepared since the lookup are left alone.
    pub fn decide(
        &mut self,
        prepared_claims: &PreparedClaims,
        kubelet: &KubeletView,
        answers: &BTreeMap<ClaimUid, ApiView>,
        runtime: &RuntimeView,
        now: Duration,
    ) -> Vec<Decision> {
        let mut decisions = Vec::new();
        for (uid, answer) in answers {
            let entry = prepared_claims.entry(uid);
            if entry.is_none_or(|entry| answer.holds_one_of(entry)) {
                // Two existing claims were allocated one device: its holder keeps it.
                self.conflicting.remove(uid);
            }
            let (Some(suspect), Some(entry)) = (self.suspects.get_mut(uid), entry) else {
                continue;
            };
            suspect.record(answer, self.grace, now);
            let due = now.saturating_sub(suspect.since) >= self.grace;
            match (kubelet, answer) {
                (
                    _,
                    ApiView::Present {
                        devices: Some(devices),
                    },
                ) if entry.has_unknown_devices() && !devices.is_empty() => {
                    decisions.push(Decision::Explain(uid.clone(), devices.clone()));
                    // The next check decides anything further.
                    suspect.quarantine = None;
                }
                // The error names the holder to the other claim's pod; no intervention is needed.
                _ if runtime.undecided.contains(uid) => suspect.quarantine = None,
                _ if runtime.unused.contains(uid) && answer.holds_nothing_of(entry) => {
                    decisions.push(Decision::Free(uid.clone()));
                }
                (KubeletView::Lists(listed), ApiView::Gone) if due && !listed.contains_key(uid) => {
                    // Otherwise kubelet has listed it until now, and may have forgotten it before its containers ended.
                    if suspect.is_missing(self.grace, now) {
                        if runtime.unanswered.contains(uid) && prepared_claims.may_be_in_use(entry) {
                            suspect.quarantine = Some(NO_ANSWER.to_owned());
                        } else {
                            decisions.push(Decision::Free(uid.clone()));
                        }
                    }
                }
                // Kubelet may be about to unprepare it, and its list does not show that. A reason from before stays.
                (KubeletView::Unknown(_), ApiView::Gone)
                    if !entry.has_unknown_devices() && !suspect.is_gone(self.grace, now) => {}
                _ => {
                    let no_news = matches!(answer, ApiView::Unknown(_));
                    let before = suspect.quarantine.take().filter(|_| no_news);
                    // A claim prepared before the boot blocks no device.
                    let doubt = (prepared_claims.may_be_in_use(entry)
                        && (due || entry.has_unknown_devices()))
                    .then(|| doubt(entry, kubelet, uid, answer));
                    suspect.quarantine = doubt.flatten().or(before);
                }
            }
        }
        for decision in &decisions {
            if let Decision::Free(uid) = decision {
                self.suspects.remove(uid);
                self.conflicting.remove(uid);
            }
        }
        decisions
    }

    /// The claims in quarantine, each with the reason.
    pub fn quarantine(&self) -> BTreeMap<ClaimUid, String> {
        let with_reason =
            |(uid, suspect): (&ClaimUid, &Suspect)| Some((uid.clone(), suspect.quarantine.clone()?));
        self.suspects.iter().filter_map(with_reason).collect()
    }

    /// Time until the next check: when the next suspect's grace period ends, at most the regular interval.
    pub fn next_check(&self, now: Duration) -> Duration {
        let every = self.grace.mul_f64(EVERY);
        // A claim that kubelet's list lacks is decided by the list.
        let since = |suspect: &Suspect| [Some(suspect.since), suspect.missing.or(suspect.gone)];
        let due = |since: Duration| (since + self.grace).saturating_sub(now);
        let moments = self.suspects.values().flat_map(since).flatten().map(due);
        let soonest = moments.filter(|due| !due.is_zero()).min();
        soonest.unwrap_or(every).min(every)
    }
}

/// The reason to quarantine a claim that would be freed without a container runtime.
const NO_ANSWER: &str = "kubelet and the API server no longer have it, but the container runtime does not \
                         answer, or cannot send the status of a container, which may still use its devices";

/// The reason to quarantine a missing claim instead of freeing it; `None` if there is none yet.
fn doubt(entry: &Entry, kubelet: &KubeletView, uid: &ClaimUid, answer: &ApiView) -> Option<String> {
    if entry.has_unknown_devices() {
        return Some(
            "the record of its devices was lost with the checkpoint, and no other claim is prepared until they are known"
                .to_owned(),
        );
    }
    match (kubelet, answer) {
        (KubeletView::Lists(listed), ApiView::Present { .. }) if !listed.contains_key(uid) => {
            Some("kubelet no longer lists it, but the API server still has it".to_owned())
        }
        (KubeletView::Lists(_), ApiView::Gone) => Some(
            "kubelet still lists it, but the API server no longer has it and has given its device to another claim (use --force if no container uses it)"
                .to_owned(),
        ),
        (KubeletView::Lists(_), ApiView::Present { .. }) if !answer.holds_one_of(entry) => Some(
            "kubelet still lists it, but in the API server it is not allocated any more, and its device was given to another claim (use --force if no container uses it)"
                .to_owned(),
        ),
        (KubeletView::Unknown(why), ApiView::Gone) => Some(format!(
            "the API server no longer has it, but kubelet's own list cannot be read: {why}"
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
