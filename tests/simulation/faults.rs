//! What can go wrong, how often, and how often it did.

use std::collections::BTreeMap;

use crate::rng::Rng;

/// Something that goes wrong with one command of the controller, with a watch, or with the controller itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// The controller is killed when it is about to send the command.
    CrashBefore,
    /// The controller is killed when the command has had its effect; it never hears of it.
    CrashAfter,
    /// The request never reaches the server; the client gives up.
    RequestLost,
    /// The request is carried out; the client gives up waiting.
    ReplyLost,
    /// The client gives up, and only then the request is carried out.
    Late,
    /// The server answers 500 and has done nothing.
    ServerError,
    /// The server answers 409.
    Conflict,
    /// The server answers 422.
    Refused,
    /// The server refuses an allocation, after it has stored those that were sent with it.
    RefusedLast,
    /// Request and reply take seconds.
    Slow,
    /// The driver fails and says "try again".
    DriverRetry,
    /// The driver fails and says "a person must act".
    DriverInvalid,
    /// The driver has done it, but does not answer in time.
    DriverHungAfter,
    /// The driver does nothing and does not answer in time.
    DriverHungBefore,
    /// The driver answers for too few claims.
    DriverMiscounts,
    /// A watch shows an event twice.
    WatchDuplicate,
    /// A watch loses events and starts over with a list.
    WatchRelist,
    /// A watch stands still for up to a minute.
    WatchStall,
    /// Events queue up in the controller before it decides.
    Coalesced,
    /// The controller is killed at any time.
    CrashAnytime,
    /// The controller is paused when it is about to write, and writes when another one leads.
    PausedLeader,
    /// A device was in two claims for that.
    DoubleAllocation,
    /// Somebody else changes an object that the controller is about to write.
    SecondWriter,
    /// A companion is killed at a step of an operation, or before its answer.
    CompanionKilled,
    /// A node loses its power at a step of an operation, or before its answer.
    PowerLost,
    /// Steps on a node's disk fail.
    DiskFails,
    /// A checkpoint cannot be read any more.
    CheckpointDamaged,
    /// A kubelet is killed.
    KubeletKilled,
    /// A kubelet is killed after an answer of the companion, before it has noted that.
    KubeletForgets,
    /// An answer of the companion is lost, and kubelet asks again.
    KubeletAsksTwice,
    /// A pod is deleted without waiting for its kubelet.
    ForcedDeletion,
    /// The API server does not tell a companion of a claim that kubelet has forgotten.
    ApiSilent,
    /// Kubelet's list of prepared claims cannot be read.
    KubeletListUnreadable,
    /// Kubelet does not show what its containers have.
    PodResourcesSilent,
    /// Kubelet has just started, and shows its file before it knows its pods.
    PodResourcesEarly,
    /// A list of devices reaches kubelet late.
    OfferLate,
    /// A companion hears late of claims.
    AnnouncementLate,
    /// A kubelet is killed after an answer to Allocate, before it has noted that.
    GrantForgotten,
    /// Kubelet notes an answer to Allocate late: another plugin of the container takes its time.
    GrantLate,
    /// A claim wanted a device that a container has as an extended resource.
    ClaimOfContainer,
    /// Kubelet wanted a device for a container that a claim has.
    GrantOfClaim,
    /// A container got a device that was free for a companion which began after its predecessor's answer, and before kubelet's note.
    GrantMissed,
    /// The API server does not show a claim to a companion that prepares it.
    ClaimUnreadable,
    /// A claim loses its devices, is deleted or is replaced while a companion prepares it.
    ClaimChanges,
    /// The scheduler allocates devices that other claims have.
    ScheduledTwice,
    /// A container of a pod that was deleted by force still has a device that kubelet itself takes for free.
    LeftOver,
}

/// Faults of runs with nodes whose devices leave through both APIs.
pub(crate) const OF_APIS: [Fault; 6] = [
    Fault::PodResourcesSilent,
    Fault::PodResourcesEarly,
    Fault::OfferLate,
    Fault::AnnouncementLate,
    Fault::GrantForgotten,
    Fault::GrantLate,
];

/// Faults of runs in structured mode.
pub(crate) const OF_STRUCTURED: [Fault; 3] =
    [Fault::ClaimUnreadable, Fault::ClaimChanges, Fault::ScheduledTwice];

/// What comes of faults in such runs.
pub(crate) const BETWEEN_APIS: [Fault; 3] = [Fault::ClaimOfContainer, Fault::GrantOfClaim, Fault::LeftOver];

/// Faults of runs with nodes.
pub(crate) const OF_NODES: [Fault; 10] = [
    Fault::CompanionKilled,
    Fault::PowerLost,
    Fault::DiskFails,
    Fault::CheckpointDamaged,
    Fault::KubeletKilled,
    Fault::KubeletForgets,
    Fault::KubeletAsksTwice,
    Fault::ForcedDeletion,
    Fault::ApiSilent,
    Fault::KubeletListUnreadable,
];

pub(crate) const ALL: [Fault; 23] = [
    Fault::CrashBefore,
    Fault::CrashAfter,
    Fault::RequestLost,
    Fault::ReplyLost,
    Fault::Late,
    Fault::ServerError,
    Fault::Conflict,
    Fault::Refused,
    Fault::RefusedLast,
    Fault::Slow,
    Fault::DriverRetry,
    Fault::DriverInvalid,
    Fault::DriverHungAfter,
    Fault::DriverHungBefore,
    Fault::DriverMiscounts,
    Fault::WatchDuplicate,
    Fault::WatchRelist,
    Fault::WatchStall,
    Fault::Coalesced,
    Fault::CrashAnytime,
    Fault::PausedLeader,
    Fault::DoubleAllocation,
    Fault::SecondWriter,
];

/// Faults of a request to the server.
const OF_REQUESTS: [Fault; 11] = [
    Fault::CrashBefore,
    Fault::CrashAfter,
    Fault::RequestLost,
    Fault::ReplyLost,
    Fault::Late,
    Fault::ServerError,
    Fault::Conflict,
    Fault::Refused,
    Fault::RefusedLast,
    Fault::PausedLeader,
    Fault::Slow,
];

/// Faults of a call of the driver.
const OF_CALLS: [Fault; 8] = [
    Fault::CrashBefore,
    Fault::CrashAfter,
    Fault::Slow,
    Fault::DriverRetry,
    Fault::DriverInvalid,
    Fault::DriverHungAfter,
    Fault::DriverHungBefore,
    Fault::DriverMiscounts,
];

/// What a command is, as far as faults are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Read,
    Write,
    /// The write of an allocation.
    Record,
    Call,
}

impl Fault {
    pub(crate) fn applies_to(self, target: Target) -> bool {
        match target {
            Target::Record => OF_REQUESTS.contains(&self),
            Target::Write => OF_REQUESTS.contains(&self) && self != Self::RefusedLast,
            Target::Read => {
                let of_writes = [
                    Self::Conflict,
                    Self::Refused,
                    Self::RefusedLast,
                    Self::PausedLeader,
                    Self::Late,
                ];
                OF_REQUESTS.contains(&self) && !of_writes.contains(&self)
            }
            Target::Call => OF_CALLS.contains(&self),
        }
    }
}

/// Which faults a run has.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    /// At the n-th command, by plan.
    pub(crate) plan: BTreeMap<u64, Fault>,
    /// Per thousand commands, watch events or steps, by chance.
    pub(crate) rates: BTreeMap<Fault, u64>,
    /// How often each was hit.
    pub(crate) hits: BTreeMap<Fault, u64>,
}

impl Faults {
    /// Each seed has a temper of its own: some are calm, some storm, most have a few kinds of trouble.
    pub(crate) fn by_seed(rng: &mut Rng) -> Self {
        let mut rates = BTreeMap::new();
        let storm = rng.between(0, 3) * 25;
        for fault in ALL {
            if rng.chance(400) {
                let rate = match fault {
                    Fault::CrashAnytime => rng.between(0, 3),
                    Fault::CrashBefore | Fault::CrashAfter | Fault::WatchStall => rng.between(0, 15),
                    Fault::PausedLeader => rng.between(0, 100),
                    Fault::WatchDuplicate | Fault::Coalesced => rng.between(0, 300),
                    Fault::SecondWriter => rng.between(0, 400),
                    _ => rng.between(0, 20 + storm),
                };
                rates.insert(fault, rate);
            }
        }
        for fault in OF_NODES {
            if rng.chance(500) {
                let rate = match fault {
                    Fault::CompanionKilled | Fault::DiskFails | Fault::KubeletAsksTwice => {
                        rng.between(0, 200)
                    }
                    Fault::ForcedDeletion
                    | Fault::CheckpointDamaged
                    | Fault::ApiSilent
                    | Fault::KubeletListUnreadable => rng.between(0, 300),
                    _ => rng.between(0, 60),
                };
                rates.insert(fault, rate);
            }
        }
        for fault in OF_APIS {
            if rng.chance(500) {
                let most = if fault == Fault::OfferLate { 800 } else { 300 };
                rates.insert(fault, rng.between(0, most));
            }
        }
        for fault in OF_STRUCTURED {
            if rng.chance(500) {
                rates.insert(fault, rng.between(0, 300));
            }
        }
        Self {
            rates,
            ..Self::default()
        }
    }

    pub(crate) fn stop(&mut self) {
        self.plan.clear();
        self.rates.clear();
    }

    pub(crate) fn hit(&mut self, fault: Fault) {
        *self.hits.entry(fault).or_default() += 1;
    }

    /// Whether this fault happens now.
    pub(crate) fn strikes(&mut self, fault: Fault, rng: &mut Rng) -> bool {
        let rate = self.rates.get(&fault).copied().unwrap_or_default();
        let strikes = rng.chance(rate);
        if strikes {
            self.hit(fault);
        }
        strikes
    }

    /// What goes wrong with the `index`-th command.
    pub(crate) fn of_command(&mut self, index: u64, target: Target, rng: &mut Rng) -> Option<Fault> {
        if let Some(fault) = self
            .plan
            .get(&index)
            .copied()
            .filter(|fault| fault.applies_to(target))
        {
            self.hit(fault);
            return Some(fault);
        }
        let kinds: &[Fault] = if target == Target::Call {
            &OF_CALLS
        } else {
            &OF_REQUESTS
        };
        for fault in kinds {
            if fault.applies_to(target) && self.strikes(*fault, rng) {
                return Some(*fault);
            }
        }
        None
    }
}
