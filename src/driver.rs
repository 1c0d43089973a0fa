//! [`Driver`]: what a device vendor implements to have claims of its classes served by the [controller](crate::controller).
//!
//! The counterpart of `controller.Driver` in Go's `k8s.io/dynamic-resource-allocation`, with four differences: parameters are typed,
//! results are returned instead of written into the input, errors say whether the user must act, and a driver is told what the claims
//! hold ([`Driver::observe`]), so that it needs no store of its own.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;

use futures::Stream;

use crate::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClass};

/// Decides where claims can be allocated and what they get.
///
/// Every call has a time limit set by the controller. At most one call or write is under way for a claim at any time; calls
/// for different claims run side by side. Every method must be idempotent: the controller may be killed between any call and
/// the write of its result, and will then call again.
pub trait Driver: Send + Sync + 'static {
    /// What a class's `parametersRef` stands for, read and checked.
    type ClassParameters: Send + Sync + 'static;
    /// What a claim's `parametersRef` stands for, read and checked.
    type ClaimParameters: Send + Sync + 'static;

    /// The driver's name: the `driverName` of its classes. A lower-case DNS subdomain of at most 63 characters.
    fn name(&self) -> &str;

    /// Returns once the driver knows enough to decide, for instance when its own caches are filled. Called after the first
    /// [`Driver::observe`]; nothing else is asked before it returns.
    fn ready(&self) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Reads and checks the parameters of a class. A class without `parametersRef` is passed too.
    fn class_parameters(
        &self,
        class: &ResourceClass,
    ) -> impl Future<Output = Result<Self::ClassParameters, DriverError>> + Send;

    /// Reads and checks the parameters of a claim. A claim without `parametersRef` is passed too.
    fn claim_parameters(
        &self,
        claim: &ResourceClaim,
        class: &ResourceClass,
        class_parameters: &Self::ClassParameters,
    ) -> impl Future<Output = Result<Self::ClaimParameters, DriverError>> + Send;

    /// Says on which of `nodes` each of `claims` cannot be allocated, and why. `claims` are all claims of the pod that this
    /// driver has still to allocate; a node that cannot hold all of them together is unsuitable for at least one.
    ///
    /// Reserves nothing. The answer has one verdict per claim, in the order of `claims`.
    fn unsuitable_nodes(
        &self,
        pod: &Pod,
        claims: &[ClaimRequest<Self>],
        nodes: &[String],
    ) -> impl Future<Output = Result<Vec<Verdict>, DriverError>> + Send;

    /// Allocates `claims` together, on `node` or, for an immediate claim, anywhere (`None`).
    ///
    /// What is returned is held until [`Driver::observe`] shows it in the claim or [`Driver::deallocate`] gives it back; the
    /// driver runs no timer. Called again for a claim that it holds something for, a driver returns the same. The answer has
    /// one result per claim, in the order of `claims`; if one is an error, the controller gives the others back.
    fn allocate(
        &self,
        claims: &[ClaimRequest<Self>],
        node: Option<&str>,
    ) -> impl Future<Output = Result<Vec<Result<AllocationResult, DriverError>>, DriverError>> + Send;

    /// Gives back what a claim holds. Called also for claims that were never allocated, and again after an error or a restart.
    ///
    /// What `claim.status.allocation` records stays recorded until the controller's next write; a driver that hands out
    /// exclusive devices frees them when [`Driver::observe`] shows that the allocation is gone. What was never recorded is
    /// free when this returns.
    fn deallocate(
        &self,
        deallocation: Deallocation<'_>,
    ) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Tells what the claims hold: all of them once before anything is asked, then each change, in order, our own writes
    /// included. This is how a driver rebuilds and keeps its books. Must return at once.
    fn observe(&self, observation: &Observation) {
        let _ = observation;
    }

    /// Yields whenever a pod that found no place might find one now. The controller then judges the waiting pods again.
    fn capacity_changes(&self) -> impl Stream<Item = CapacityChange> + Send + 'static
    where
        Self: Sized,
    {
        futures::stream::pending()
    }

    /// Yields whatever [`Driver::observe`] or a change of the devices shows to be wrong with what a claim holds, once. The
    /// controller tells the users of the claim.
    fn holding_problems(&self) -> impl Stream<Item = HoldingProblem> + Send + 'static
    where
        Self: Sized,
    {
        futures::stream::pending()
    }
}

/// Something is wrong with what a claim holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldingProblem {
    /// The claim's namespace.
    pub namespace: String,
    /// The claim's name.
    pub name: String,
    /// The claim's uid.
    pub uid: String,
    /// CamelCase, from a small fixed set: the reason of the event.
    pub reason: &'static str,
    /// What is wrong and what to do, as a user shall read it.
    pub message: String,
    /// Whether the claim must not keep what it holds, because another one has the better right to it. The controller takes it
    /// back if no pod can be using it yet.
    pub take_back: bool,
}

/// A claim to be judged or allocated, with everything that was read for it.
pub struct ClaimRequest<D: Driver + ?Sized> {
    /// The entry of `pod.spec.resourceClaims`; empty for an immediate claim.
    pub pod_claim_name: String,
    /// The claim.
    pub claim: Arc<ResourceClaim>,
    /// Its class.
    pub class: Arc<ResourceClass>,
    /// The class's parameters.
    pub class_parameters: Arc<D::ClassParameters>,
    /// The claim's parameters.
    pub claim_parameters: D::ClaimParameters,
}

impl<D: Driver + ?Sized> std::fmt::Debug for ClaimRequest<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClaimRequest")
            .field("pod_claim_name", &self.pod_claim_name)
            .field("claim", &self.claim)
            .field("class", &self.class)
            .finish_non_exhaustive()
    }
}

/// Where a claim cannot be allocated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// The reason for each unsuitable node, as a user shall read it ("3 of 3 held").
    pub unsuitable_nodes: BTreeMap<String, String>,
}

/// A claim that shall hold nothing any more.
#[derive(Clone, Copy, Debug)]
pub struct Deallocation<'a> {
    /// The claim as last seen.
    pub claim: &'a ResourceClaim,
    /// What was allocated: as recorded in the claim, or as returned by [`Driver::allocate`] in this process although the
    /// write of it was refused or its answer lost. After a restart a driver finds what it did by the claim's uid.
    pub allocation: Option<&'a AllocationResult>,
}

/// What the claims of this driver hold, as the controller knows it.
#[derive(Clone, Debug, PartialEq)]
pub enum Observation {
    /// Everything: whatever is not in it is gone. Sent once, before the first decision.
    All(Vec<Holding>),
    /// One claim has changed.
    Changed(Holding),
    /// One claim no longer exists.
    Gone {
        /// The claim's uid.
        uid: String,
    },
}

/// A claim that holds something of this driver's, or may do so.
#[derive(Clone, Debug, PartialEq)]
pub struct Holding {
    /// The claim. Its `status.allocation` is what it holds; a claim with our finalizer but without an allocation may
    /// hold what was allocated by an earlier process that was killed before it could write it down.
    pub claim: Arc<ResourceClaim>,
}

impl Holding {
    /// The allocation that is recorded, if it is recorded as `driver`'s.
    pub fn allocation(&self, driver: &str) -> Option<&AllocationResult> {
        let status = &self.claim.status;
        status
            .allocation
            .as_ref()
            .filter(|_| status.driver_name.as_deref() == Some(driver))
    }

    /// The claim's uid.
    pub fn uid(&self) -> &str {
        self.claim.metadata.uid.as_deref().unwrap_or_default()
    }
}

/// Something has become free, has appeared or has been put right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapacityChange {
    /// What happened.
    pub cause: CapacityCause,
    /// How many waiting pods could be helped by it, as far as the driver can tell; `None` for "all of them, perhaps".
    pub pods: Option<usize>,
}

/// What may help a waiting pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CapacityCause {
    /// A device was given back.
    Freed,
    /// A node's inventory changed.
    Inventory,
    /// A parameter object changed.
    Parameters,
}

/// Why a driver could not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct DriverError {
    /// Whether trying again can help.
    pub kind: DriverErrorKind,
    /// CamelCase, from a small fixed set: the reason of the event, and a metric's label.
    pub reason: &'static str,
    /// What is wrong and what to do, as a user shall read it.
    pub message: String,
}

/// Whether trying again can help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverErrorKind {
    /// Only a change by a person helps. Not tried again until the claim, the class, or something that
    /// [`Driver::capacity_changes`] reports has changed.
    Invalid,
    /// Tried again with a growing delay.
    Retry,
}

impl DriverError {
    /// An error that only a person can put right.
    pub fn invalid(reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            kind: DriverErrorKind::Invalid,
            reason,
            message: message.into(),
        }
    }

    /// An error that may go away by itself.
    pub fn retry(reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            kind: DriverErrorKind::Retry,
            reason,
            message: message.into(),
        }
    }
}
