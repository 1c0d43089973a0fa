//! Claims that kubelet has forgotten: when their devices are free again, and when a person has to say so.
//!
//! Kubelet notes a claim only after Prepare has been answered. Should it be restarted in between, it never asks for
//! Unprepare, and the entry would stay for ever. It is freed when nobody can know of it any more: kubelet's own list does
//! not have the claim, the API server does not have its uid, and both have been so for a while in which kubelet did not
//! ask for it either. In every other case it is put into quarantine: the devices stay with the claim, are shown as
//! unhealthy so that they are not allocated to others, and a person is told.
//!
//! A claim that kubelet does list is not looked into, with one exception: its device is asked for by somebody else.
//! A kubelet that was away while a pod was deleted by force can keep the pod's claim in its list for ever. The claim itself may be
//! there still, if a person made it, but is allocated no more.
//!
//! Such a claim is freed at once if the container runtime shows that no container has its devices, whatever kubelet lists: its CDI file
//! is removed first, so that no later container starts with them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::claim_uid::ClaimUid;
use super::kubelet_state::KubeletView;
use super::ledger::{Entry, Ledger};

/// How long a claim may be missing from kubelet's list before anything is concluded from it: more than twice the 45 s that
/// kubelet waits for Prepare.
pub const GRACE: Duration = Duration::from_secs(120);
/// How often kubelet's list is looked at while claims hold something, in grace periods: every five minutes if nobody says otherwise.
const EVERY: f64 = 2.5;

/// The claims that are looked into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orphans {
    grace: Duration,
    suspects: BTreeMap<ClaimUid, Suspect>,
    /// Claims whose device somebody else wants.
    contested: BTreeSet<ClaimUid>,
    /// Whether the container runtime shows what containers have.
    has_witness: bool,
    /// The claims whose devices no container has, as the runtime shows it now.
    unused: BTreeSet<ClaimUid>,
    /// Those of which a container has the devices, or may have.
    undecided: BTreeSet<ClaimUid>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Suspect {
    since: Duration,
    quarantine: Option<String>,
}

/// What the API server says of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiView {
    /// There is no claim of this uid.
    Gone,
    /// There is one. With the devices in our resource handle, if it has one that can be read.
    Present {
        /// The names of the devices.
        devices: Option<Vec<String>>,
    },
    /// It does not say, and why.
    Unknown(String),
}

impl ApiView {
    /// Whether the claim has nothing of ours any more: it is gone, or its allocation is.
    fn holds_nothing(&self) -> bool {
        match self {
            Self::Gone => true,
            Self::Present { devices } => devices.as_ref().is_none_or(Vec::is_empty),
            Self::Unknown(_) => false,
        }
    }

    /// Whether the claim has devices of ours, as far as its handle can be read.
    fn has_devices(&self) -> bool {
        matches!(self, Self::Present { devices: Some(devices) } if !devices.is_empty())
    }
}

/// A claim that the API server is to be asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// The claim.
    pub uid: ClaimUid,
    /// Its namespace; empty if that is not known.
    pub namespace: String,
    /// Its name; empty if that is not known.
    pub name: String,
}

/// What follows for a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nobody knows it any more: its devices are free.
    Free(ClaimUid),
    /// These are the devices that it has.
    Explain(ClaimUid, Vec<String>),
}

impl Orphans {
    /// The container runtime shows what containers have.
    #[must_use]
    pub fn with_witness(mut self) -> Self {
        self.has_witness = true;
        self
    }

    /// Nothing is suspected yet. `grace` is how long a claim may be missing.
    pub fn new(grace: Duration) -> Self {
        Self {
            has_witness: false,
            unused: BTreeSet::new(),
            undecided: BTreeSet::new(),
            grace,
            suspects: BTreeMap::new(),
            contested: BTreeSet::new(),
        }
    }

    /// Kubelet has asked for the claim: it is no orphan.
    pub fn forget(&mut self, uid: &ClaimUid) {
        self.suspects.remove(uid);
        self.contested.remove(uid);
    }

    /// Somebody wants what this claim holds. True if that is news, so that a look is due.
    pub fn contest(&mut self, uid: &ClaimUid) -> bool {
        self.contested.insert(uid.clone())
    }

    /// Compares the ledger with kubelet's list, and answers which claims the API server is to be asked for.
    ///
    /// `now` is the time since any fixed moment.
    pub fn look(&mut self, ledger: &Ledger, kubelet: &KubeletView, now: Duration) -> Vec<Question> {
        self.contested.retain(|uid| ledger.entry(uid).is_some());
        let contested = &self.contested;
        let missing = |uid: &ClaimUid, entry: &Entry| {
            let listed = kubelet.lists(uid) == Some(true);
            entry.is_done() && (entry.is_unaccounted() || !listed || contested.contains(uid))
        };
        self.suspects
            .retain(|uid, _| ledger.entry(uid).is_some_and(|entry| missing(uid, entry)));
        let mut questions = Vec::new();
        for (uid, entry) in ledger.entries() {
            if !missing(uid, entry) {
                continue;
            }
            let suspect = self.suspects.entry(uid.clone()).or_insert_with(|| Suspect {
                since: now,
                quarantine: None,
            });
            let at_once = entry.is_unaccounted() || (self.has_witness && contested.contains(uid));
            if now.saturating_sub(suspect.since) < self.grace && !at_once {
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

    /// The claims that somebody wants the devices of and that hold nothing any more for the API server: those for which the container
    /// runtime is asked.
    pub fn to_witness(&self, ledger: &Ledger, answers: &BTreeMap<ClaimUid, ApiView>) -> Vec<ClaimUid> {
        let gone = answers.iter().filter(|(uid, answer)| {
            self.has_witness
                && self.contested.contains(*uid)
                && answer.holds_nothing()
                && ledger.entry(uid).is_some_and(Entry::is_done)
        });
        gone.map(|(uid, _)| uid.clone()).collect()
    }

    /// What the container runtime shows of the claims of [`Self::to_witness`]: of which no container has the devices, and of which one has,
    /// or it is too early to tell. Counts for the next [`Self::judge`].
    pub fn witnessed(&mut self, unused: BTreeSet<ClaimUid>, undecided: BTreeSet<ClaimUid>) {
        self.unused = unused;
        self.undecided = undecided;
    }

    /// Concludes from the answers. Claims that kubelet has asked for since they were asked for are left alone.
    pub fn judge(
        &mut self,
        ledger: &Ledger,
        kubelet: &KubeletView,
        answers: &BTreeMap<ClaimUid, ApiView>,
        now: Duration,
    ) -> Vec<Verdict> {
        let mut verdicts = Vec::new();
        let (unused, undecided) = (
            std::mem::take(&mut self.unused),
            std::mem::take(&mut self.undecided),
        );
        for (uid, answer) in answers {
            if answer.has_devices() {
                // Two claims were given one device, and both are there: the one that has it keeps it.
                self.contested.remove(uid);
            }
            let (Some(suspect), Some(entry)) = (self.suspects.get_mut(uid), ledger.entry(uid)) else {
                continue;
            };
            let due = now.saturating_sub(suspect.since) >= self.grace;
            match (kubelet, answer) {
                (
                    _,
                    ApiView::Present {
                        devices: Some(devices),
                    },
                ) if entry.is_unaccounted() && !devices.is_empty() => {
                    verdicts.push(Verdict::Explain(uid.clone(), devices.clone()));
                    // What follows is for the next look.
                    suspect.quarantine = None;
                }
                (KubeletView::Lists(listed), ApiView::Gone) if due && !listed.contains_key(uid) => {
                    verdicts.push(Verdict::Free(uid.clone()));
                }
                _ if unused.contains(uid) && answer.holds_nothing() => {
                    verdicts.push(Verdict::Free(uid.clone()));
                }
                // Whoever wants the device is told who has it, and nobody has to do anything.
                _ if undecided.contains(uid) => suspect.quarantine = None,
                _ => {
                    let no_news = matches!(answer, ApiView::Unknown(_));
                    let before = suspect.quarantine.take().filter(|_| no_news);
                    // What was prepared before a boot is in nobody's way.
                    let doubt = (ledger.may_be_in_use(entry) && (due || entry.is_unaccounted()))
                        .then(|| doubt(entry, kubelet, uid, answer));
                    suspect.quarantine = doubt.flatten().or(before);
                }
            }
        }
        for verdict in &verdicts {
            if let Verdict::Free(uid) = verdict {
                self.suspects.remove(uid);
                self.contested.remove(uid);
            }
        }
        verdicts
    }

    /// The claims in quarantine, each with the reason.
    pub fn quarantine(&self) -> BTreeMap<ClaimUid, String> {
        let with_reason =
            |(uid, suspect): (&ClaimUid, &Suspect)| Some((uid.clone(), suspect.quarantine.clone()?));
        self.suspects.iter().filter_map(with_reason).collect()
    }

    /// How soon the next look is due: at once for nothing, soon for what is suspected, else after a long while.
    pub fn next_look(&self, now: Duration) -> Duration {
        let every = self.grace.mul_f64(EVERY);
        let due = |suspect: &Suspect| (suspect.since + self.grace).saturating_sub(now);
        let soonest = self.suspects.values().map(due).filter(|due| !due.is_zero()).min();
        soonest.unwrap_or(every).min(every)
    }
}

/// Why a claim that is missing is not simply freed; `None` if there is no reason to say anything yet.
fn doubt(entry: &Entry, kubelet: &KubeletView, uid: &ClaimUid, answer: &ApiView) -> Option<String> {
    if entry.is_unaccounted() {
        return Some(
            "which devices it has was lost with the checkpoint, and no other claim is prepared until that is known"
                .to_owned(),
        );
    }
    match (kubelet, answer) {
        (KubeletView::Lists(listed), ApiView::Present { .. }) if !listed.contains_key(uid) => {
            Some("kubelet no longer lists it, but the API server still has it".to_owned())
        }
        (KubeletView::Lists(_), ApiView::Gone) => Some(
            "kubelet still lists it, but the API server no longer has it and has given its device to another claim (say --force if no container uses it)"
                .to_owned(),
        ),
        (KubeletView::Lists(_), ApiView::Present { .. }) if !answer.has_devices() => Some(
            "kubelet still lists it, but for the API server it is not allocated any more, and its device was given to another claim (say --force if no container uses it)"
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
