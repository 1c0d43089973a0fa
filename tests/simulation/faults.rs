//! Faults, their rates, and their hits.

use std::collections::BTreeMap;

use crate::rng::Rng;

/// A fault of a controller command, a watch, the controller process or a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// The controller is killed before it sends the command.
    CrashBefore,
    /// The controller is killed after the command took effect, before the reply.
    CrashAfter,
    /// The request never reaches the server; the client times out.
    RequestLost,
    /// The request is served; the client times out.
    ReplyLost,
    /// The request is served after the client timed out.
    Late,
    /// The server answers 500 without effect.
    ServerError,
    /// The server answers 409.
    Conflict,
    /// The server answers 429.
    Busy,
    /// The server answers 422.
    Refused,
    /// The server refuses an allocation after it stored those sent with it.
    RefusedLast,
    /// Request and reply take seconds.
    Slow,
    /// The driver fails with a retriable error.
    DriverRetry,
    /// The driver fails with an error that a user must fix.
    DriverInvalid,
    /// The driver executes the call but does not answer in time.
    DriverHungAfter,
    /// The driver neither executes the call nor answers in time.
    DriverHungBefore,
    /// The driver returns too few results.
    DriverMiscounts,
    /// A watch delivers an event twice.
    WatchDuplicate,
    /// A watch loses events and restarts with a list.
    WatchRelist,
    /// A watch stalls for up to a minute.
    WatchStall,
    /// Several events arrive before the controller decides.
    Coalesced,
    /// The controller is killed at any time.
    CrashAnytime,
    /// The controller is paused before a write and sends it after another leader took over.
    PausedLeader,
    /// Effect of a paused leader: two claims had the same device.
    DoubleAllocation,
    /// Another client changes an object just before a write of the controller.
    SecondWriter,
    /// A companion is killed at a step of an operation or before its answer.
    CompanionKilled,
    /// A node loses power at a step of an operation or before the answer.
    PowerLost,
    /// Disk operations of a node fail.
    DiskFails,
    /// A checkpoint becomes unreadable.
    CheckpointDamaged,
    /// A kubelet is killed.
    KubeletKilled,
    /// A kubelet is killed before it records an answer of the companion.
    KubeletForgets,
    /// An answer of the companion is lost, and kubelet retries.
    KubeletRetries,
    /// A pod is force-deleted.
    ForcedDeletion,
    /// The API server does not answer a companion about a claim that kubelet no longer lists.
    ApiSilent,
    /// The claim checkpoint of kubelet cannot be read.
    KubeletListUnreadable,
    /// The PodResources API does not answer.
    PodResourcesSilent,
    /// Kubelet has just started and serves its checkpoint before it knows its pods.
    PodResourcesEarly,
    /// A device list reaches kubelet late.
    DeviceListLate,
    /// The claim watch of a companion is delayed.
    ClaimWatchLate,
    /// A kubelet is killed before it records an answer to Allocate.
    GrantForgotten,
    /// Kubelet records an answer to Allocate late because another plugin of the container is slow.
    GrantLate,
    /// Effect: a claim requested a device that a container has as an extended resource.
    ClaimOfContainer,
    /// Effect: kubelet requested a device for a container that a claim has.
    GrantOfClaim,
    /// Effect: a container got a device that a new companion considered free because kubelet had not recorded the answer of the previous
    /// one.
    GrantMissed,
    /// A companion cannot read the claim that it prepares.
    ClaimUnreadable,
    /// A claim is deallocated, deleted or replaced while a companion prepares it.
    ClaimChanges,
    /// The scheduler allocates devices of other claims.
    ScheduledTwice,
    /// Effect: a container of a force-deleted pod still has a device that kubelet considers free.
    LeftOver,
}

/// Faults of runs with devices in mode `both`.
pub(crate) const OF_APIS: [Fault; 6] = [
    Fault::PodResourcesSilent,
    Fault::PodResourcesEarly,
    Fault::DeviceListLate,
    Fault::ClaimWatchLate,
    Fault::GrantForgotten,
    Fault::GrantLate,
];

/// Faults of runs in structured mode.
pub(crate) const OF_STRUCTURED: [Fault; 3] =
    [Fault::ClaimUnreadable, Fault::ClaimChanges, Fault::ScheduledTwice];

/// Effects of faults in such runs.
pub(crate) const BETWEEN_APIS: [Fault; 3] = [Fault::ClaimOfContainer, Fault::GrantOfClaim, Fault::LeftOver];

/// Faults of runs with nodes.
pub(crate) const OF_NODES: [Fault; 10] = [
    Fault::CompanionKilled,
    Fault::PowerLost,
    Fault::DiskFails,
    Fault::CheckpointDamaged,
    Fault::KubeletKilled,
    Fault::KubeletForgets,
    Fault::KubeletRetries,
    Fault::ForcedDeletion,
    Fault::ApiSilent,
    Fault::KubeletListUnreadable,
];

pub(crate) const ALL: [Fault; 24] = [
    Fault::CrashBefore,
    Fault::CrashAfter,
    Fault::RequestLost,
    Fault::ReplyLost,
    Fault::Late,
    Fault::ServerError,
    Fault::Conflict,
    Fault::Busy,
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
const OF_REQUESTS: [Fault; 12] = [
    Fault::CrashBefore,
    Fault::CrashAfter,
    Fault::RequestLost,
    Fault::ReplyLost,
    Fault::Late,
    Fault::ServerError,
    Fault::Conflict,
    Fault::Busy,
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

/// The category of a command, which determines its possible faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Read,
    Write,
    /// A write of an allocation.
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
                    Self::Busy,
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

/// The faults of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    /// Planned faults by command number.
    pub(crate) plan: BTreeMap<u64, Fault>,
    /// Random faults per thousand commands, watch events or steps.
    pub(crate) rates: BTreeMap<Fault, u64>,
    /// Occurrences of each fault.
    pub(crate) hits: BTreeMap<Fault, u64>,
}

impl Faults {
    /// Random rates: some seeds have hardly any faults, some very many, most a few kinds.
    pub(crate) fn by_seed(rng: &mut Rng) -> Self {
        let mut rates = BTreeMap::new();
        let extra = rng.between(0, 3) * 25;
        for fault in ALL {
            if rng.chance(400) {
                let rate = match fault {
                    Fault::CrashAnytime => rng.between(0, 3),
                    Fault::CrashBefore | Fault::CrashAfter | Fault::WatchStall => rng.between(0, 15),
                    Fault::PausedLeader => rng.between(0, 100),
                    Fault::WatchDuplicate | Fault::Coalesced => rng.between(0, 300),
                    Fault::SecondWriter => rng.between(0, 400),
                    _ => rng.between(0, 20 + extra),
                };
                rates.insert(fault, rate);
            }
        }
        for fault in OF_NODES {
            if rng.chance(500) {
                let rate = match fault {
                    Fault::CompanionKilled | Fault::DiskFails | Fault::KubeletRetries => rng.between(0, 200),
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
                let most = if fault == Fault::DeviceListLate { 800 } else { 300 };
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

    /// Whether this random fault occurs now.
    pub(crate) fn occurs(&mut self, fault: Fault, rng: &mut Rng) -> bool {
        let rate = self.rates.get(&fault).copied().unwrap_or_default();
        let occurs = rng.chance(rate);
        if occurs {
            self.hit(fault);
        }
        occurs
    }

    /// The fault of the `index`-th command.
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
            if fault.applies_to(target) && self.occurs(*fault, rng) {
                return Some(*fault);
            }
        }
        None
    }
}
