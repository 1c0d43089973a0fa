//! [`Driver`]: the trait that a device vendor implements; the [controller](crate::controller) then serves the claims of its classes.
//!
//! A driver tracks its devices and their holders. It does not talk to Kubernetes about claims: the controller watches claims,
//! classes and pods, calls the driver, writes the results and retries failures. It is the counterpart of
//! [`controller.Driver`][go] in Go's `k8s.io/dynamic-resource-allocation`, for classic DRA (`resource.k8s.io/v1alpha2`, Kubernetes
//! 1.27 to 1.30):
//!
//! | `Driver` | Go | difference |
//! |---|---|---|
//! | [`class_parameters`](Driver::class_parameters) | `GetClassParameters` | typed, instead of `interface{}` |
//! | [`claim_parameters`](Driver::claim_parameters) | `GetClaimParameters` | typed |
//! | [`unsuitable_nodes`](Driver::unsuitable_nodes) | `UnsuitableNodes` | returned with a reason per node; the input stays unchanged |
//! | [`allocate`](Driver::allocate) | `Allocate` | all claims of a pod or none |
//! | [`deallocate`](Driver::deallocate) | `Deallocate` | gets the allocation, even if it was never recorded |
//! | [`observe`](Driver::observe) | none | reports the allocations of all claims, so a driver needs no store of its own |
//! | [`capacity_changes`](Driver::capacity_changes) | none | wakes waiting pods, instead of a poll every 30 s |
//! | [`ready`](Driver::ready) | none | the driver fills its own caches before its first decision |
//!
//! [go]: https://pkg.go.dev/k8s.io/dynamic-resource-allocation@v0.30.14/controller#Driver
//!
//! # Call order
//!
//! ```text
//! start    observe(All) -> ready -> deallocate for each claim that has our finalizer and no allocation
//! a pod    class_parameters, claim_parameters -> unsuitable_nodes          as often as something changes
//!          finalizer stored in every claim of the pod
//!          class_parameters, claim_parameters -> allocate                  on the node that the scheduler has selected
//!          allocation written -> observe(Changed)
//! its end  deallocate -> allocation and finalizer removed -> observe(Changed or Gone)
//! ```
//!
//! * **One operation at a time per claim.** While a call or a write is pending for a claim, no other is started for it. Calls for
//!   different claims overlap, so a driver needs a lock around its allocation state. If it checks and holds a device in one step under
//!   that lock, it cannot allocate the device twice.
//! * **A time limit** ([`Builder::call_timeout`](crate::controller::Builder::call_timeout), 30 s) covers each call together with the
//!   two parameter calls before it. A call that takes longer is dropped at its next await point, reported as `DriverTimeout`, followed by
//!   `deallocate` if it was `allocate`, and retried. A panic in an `async` call is handled the same way (`DriverPanicked`) if the
//!   program unwinds. A call that hangs blocks its own claims only.
//! * **A crash loses nothing.** The claim is the only record. Our finalizer is stored in the claim before anything is allocated, so a
//!   claim with the finalizer and without an allocation may hold devices that a killed process allocated; it is deallocated before
//!   anything else happens to it. Each method must therefore be idempotent, and a driver that works on devices outside its own memory
//!   must find its earlier work by the claim's uid.
//! * **One process decides.** [`LeaderElection`](crate::controller::LeaderElection) ensures that. Without it, never run two controllers.
//!
//! # How capacity is held
//!
//! [`Driver::unsuitable_nodes`] reserves nothing. [`Driver::allocate`] holds the devices it returns until one of two events: `observe`
//! shows them in the claim (the claim then holds them until `observe` shows that it no longer does), or `deallocate` releases them
//! because the allocation could not be recorded. The controller always reaches one of the two; there is no timer.
//!
//! # Errors
//!
//! [`DriverError::invalid`] is for errors that only a person can fix, such as a parameter that makes no sense. It is reported once, on
//! the pod and on the object at fault. The driver is called again after the claim, the class, or something that `capacity_changes`
//! reports has changed. [`DriverError::retry`] is for everything else, and is retried after 100 ms, doubling up to 30 s. Both become
//! Warning events with the error's reason and message. A full node is no error in `unsuitable_nodes`: report it in the [`Verdict`].
//!
//! # Data for the node
//!
//! [`AllocationResult::resource_handles`] carry a text of at most 16 KiB each to the vendor's kubelet plugin (`NodePrepareResources`,
//! Kubernetes 1.27 to 1.30); nothing else reads it. Include everything that the plugin needs, and a version. `available_on_nodes`
//! names the nodes that can use the allocation: one node, a set of nodes, or any node (`None`).
//!
//! # Complete example
//!
//! Licences of a server that every node can reach. `examples/network_attached.rs` is larger and runs on a real cluster.
//! The conformance kit (`drayman::testkit`, feature `testcluster`) tests a driver against this contract with one line.
//!
//! ```
//! use std::collections::BTreeMap;
//! use std::sync::{Arc, Mutex};
//!
//! use drayman::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClass};
//! use drayman::controller::{Controller, ControllerError};
//! use drayman::driver::*;
//! use tokio_util::sync::CancellationToken;
//!
//! struct Licences {
//!     total: usize,
//!     /// The uid of each claim that holds one, and whether the claim says so already.
//!     held: Mutex<BTreeMap<String, bool>>,
//! }
//!
//! impl Driver for Licences {
//!     type ClassParameters = ();
//!     type ClaimParameters = ();
//!
//!     fn name(&self) -> &str {
//!         "licence.example.com"
//!     }
//!
//!     async fn class_parameters(&self, _: &ResourceClass) -> Result<(), DriverError> {
//!         Ok(())
//!     }
//!
//!     async fn claim_parameters(&self, claim: &ResourceClaim, _: &ResourceClass, _: &()) -> Result<(), DriverError> {
//!         match &claim.spec.parameters_ref {
//!             None => Ok(()),
//!             Some(_) => Err(DriverError::invalid("ParametersInvalid", "a licence has no parameters: remove parametersRef")),
//!         }
//!     }
//!
//!     async fn unsuitable_nodes(&self, _: &Pod, claims: &[ClaimRequest<Self>], nodes: &[String]) -> Result<Vec<Verdict>, DriverError> {
//!         let held = self.held.lock().unwrap().len();
//!         let full = held + claims.len() > self.total;
//!         let reasons = nodes.iter().filter(|_| full).map(|node| (node.clone(), format!("{held} of {} held", self.total)));
//!         let verdict = Verdict { unsuitable_nodes: reasons.collect() };
//!         Ok(vec![verdict; claims.len()])
//!     }
//!
//!     async fn allocate(
//!         &self,
//!         claims: &[ClaimRequest<Self>],
//!         _node: Option<&str>,
//!     ) -> Result<Vec<Result<AllocationResult, DriverError>>, DriverError> {
//!         let mut held = self.held.lock().unwrap();
//!         let one = |request: &ClaimRequest<Self>| {
//!             if !held.contains_key(request.uid()) && held.len() >= self.total {
//!                 return Err(DriverError::retry("LicencesExhausted", format!("all {} are held", self.total)));
//!             }
//!             held.entry(request.uid().to_owned()).or_insert(false);
//!             Ok(AllocationResult::new(self.name(), "version=1"))
//!         };
//!         Ok(claims.iter().map(one).collect())
//!     }
//!
//!     async fn deallocate(&self, deallocation: Deallocation<'_>) -> Result<(), DriverError> {
//!         let mut held = self.held.lock().unwrap();
//!         // What is recorded is free when the record is gone.
//!         if held.get(deallocation.uid()) == Some(&false) {
//!             held.remove(deallocation.uid());
//!         }
//!         Ok(())
//!     }
//!
//!     fn observe(&self, observation: &Observation) -> Vec<Finding> {
//!         let mut held = self.held.lock().unwrap();
//!         for holding in observation.holdings() {
//!             match holding.allocation(self.name()) {
//!                 Some(_) => drop(held.insert(holding.uid().to_owned(), true)),
//!                 None => held.retain(|uid, recorded| uid != holding.uid() || !*recorded),
//!             }
//!         }
//!         if let Observation::Gone { uid } = observation {
//!             held.remove(uid);
//!         }
//!         Vec::new()
//!     }
//! }
//!
//! async fn serve(client: kube::Client, shutdown: CancellationToken) -> Result<(), ControllerError> {
//!     let driver = Licences { total: 10, held: Mutex::default() };
//!     Controller::builder(driver).build(client)?.run(shutdown).await
//! }
//!
//! // A driver is tested by its calls; neither a cluster nor a controller is needed.
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), DriverError> {
//! let driver = Licences { total: 1, held: Mutex::default() };
//! let claim = |uid: &str| {
//!     let mut claim = ResourceClaim::default();
//!     claim.metadata.uid = Some(uid.to_owned());
//!     claim
//! };
//! let request = |uid: &str| ClaimRequest::<Licences> {
//!     pod_claim_name: "licence".to_owned(),
//!     claim: Arc::new(claim(uid)),
//!     class: Arc::default(),
//!     class_parameters: Arc::new(()),
//!     claim_parameters: (),
//! };
//! let (first, second) = (request("1"), request("2"));
//! assert!(driver.allocate(&[first], None).await?[0].is_ok());
//! let verdicts = driver.unsuitable_nodes(&Pod::default(), &[second], &["node-a".to_owned()]).await?;
//! assert_eq!(verdicts[0].unsuitable_nodes["node-a"], "1 of 1 held");
//! // It was not recorded, so it is free when this returns.
//! driver.deallocate(Deallocation { claim: &claim("1"), allocation: None }).await?;
//! assert!(driver.allocate(&[request("2")], None).await?[0].is_ok());
//! # Ok(())
//! # }
//! ```

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;

use futures::Stream;

use crate::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClass};

/// Decides on which nodes claims can be allocated, and allocates them. The [module](self) documents the call order, the rules for all
/// calls (time limits, idempotence, crashes, errors) and a complete driver.
pub trait Driver: Send + Sync + 'static {
    /// The checked parameters that a class's `parametersRef` refers to.
    type ClassParameters: Send + Sync + 'static;
    /// The checked parameters that a claim's `parametersRef` refers to.
    type ClaimParameters: Send + Sync + 'static;

    /// The driver's name: the `driverName` of its classes, and the prefix of its finalizer (`<name>/deletion-protection`). It must be a
    /// lower-case DNS subdomain of at most 63 characters; [`Builder::build`](crate::controller::Builder::build) rejects other names,
    /// because the API server would reject the finalizer. It must never change: after an upgrade, claims are found by it.
    fn name(&self) -> &str;

    /// Returns once the driver can decide, for instance when its own caches are filled.
    ///
    /// Called once, after the first [`Driver::observe`]. Until it returns, no other method is called and nothing is written. It has no
    /// time limit: a driver that never becomes ready never serves a claim, so it should log the reason for its wait.
    fn ready(&self) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Reads and checks the parameters of a class (Go: `GetClassParameters`). Classes without `parametersRef` are passed too, since
    /// only the driver knows whether it needs parameters.
    ///
    /// Called before each [`Driver::unsuitable_nodes`] and each [`Driver::allocate`], once per claim, within the time limit of that
    /// call. Read from a watched cache, or every call costs a request. An error is reported on the class and on the pod, and ends the
    /// evaluation of that pod. An allocation uses the parameters returned at that time; later changes do not affect it.
    fn class_parameters(
        &self,
        class: &ResourceClass,
    ) -> impl Future<Output = Result<Self::ClassParameters, DriverError>> + Send;

    /// Reads and checks the parameters of a claim (Go: `GetClaimParameters`). Claims without `parametersRef` are passed too.
    ///
    /// Called right after each [`Driver::class_parameters`]. The parameter object is in the claim's own namespace. An error is reported
    /// on the claim and on the pod.
    fn claim_parameters(
        &self,
        claim: &ResourceClaim,
        class: &ResourceClass,
        class_parameters: &Self::ClassParameters,
    ) -> impl Future<Output = Result<Self::ClaimParameters, DriverError>> + Send;

    /// Returns for each of `claims` the nodes among `nodes` that cannot hold it, with reasons (Go: `UnsuitableNodes`).
    ///
    /// `claims` are all claims of the pod that this driver has yet to allocate, in the pod's order; a node that cannot hold all of
    /// them together is unsuitable for at least one. `nodes` are the scheduler's potential nodes and the nodes found unsuitable
    /// before; some may no longer exist. The answer has one verdict per claim, in the order of `claims`; any other number is an error
    /// (`DriverMisbehaved`). Nodes outside `nodes` are ignored.
    ///
    /// Reserves nothing. Called when a pod starts to wait for a node, again when its nodes, its claims, a class or the capacity changes,
    /// and in a resync every few minutes. At most one call per pod is pending. The result is written to the PodSchedulingContext, at most
    /// 128 nodes per claim, and summarized in an event if no node is left. After an error nothing is written.
    fn unsuitable_nodes(
        &self,
        pod: &Pod,
        claims: &[ClaimRequest<Self>],
        nodes: &[String],
    ) -> impl Future<Output = Result<Vec<Verdict>, DriverError>> + Send;

    /// Allocates `claims` together on `node` (Go: `Allocate`).
    ///
    /// For a pod, `claims` are all that this driver has yet to allocate, and `node` is the scheduler's selected node, which
    /// [`Driver::unsuitable_nodes`] has not rejected. A claim with `allocationMode: Immediate` is passed alone with `None`, which means
    /// any node; the driver must then respect the class's `suitableNodes`. Every claim already has our finalizer.
    ///
    /// The answer has one result per claim, in the order of `claims`. [`Driver::deallocate`] follows for each allocated claim, and
    /// nothing is recorded, if any result is an error, the pod is deleted or moves to another node meanwhile, or the write is refused.
    /// The driver holds the returned devices until `observe` or `deallocate` (see the [module](self)). If called again for a claim that
    /// it still holds devices for, it returns the same allocation. An allocation that the API server would reject (more than 32 handles,
    /// a handle over 16 KiB) is not written, and reported.
    fn allocate(
        &self,
        claims: &[ClaimRequest<Self>],
        node: Option<&str>,
    ) -> impl Future<Output = Result<Vec<Result<AllocationResult, DriverError>>, DriverError>> + Send;

    /// Releases the allocation of a claim (Go: `Deallocate`).
    ///
    /// Called when an unused claim is deleted or marked for deallocation; when the result of `allocate` could not be recorded or is
    /// unknown; and after a start for each claim that has our finalizer and no allocation. It is therefore also called for claims that
    /// hold nothing, and again after an error, a crash or a failed write: then it does nothing and returns `Ok`.
    ///
    /// An allocation in `claim.status.allocation` stays recorded until the controller's next write; a driver of exclusive devices frees
    /// them when [`Driver::observe`] shows that the allocation is gone. An allocation that was never recorded is free when this returns.
    /// An error is reported on the claim, which keeps finalizer and allocation, and is retried with a growing delay, whatever its
    /// [kind](DriverErrorKind): a mistake must not leak a device.
    fn deallocate(
        &self,
        deallocation: Deallocation<'_>,
    ) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Reports the allocations of the claims: [all](Observation::All) of them once, before any other call, then each change in order,
    /// including our own writes. A driver rebuilds and maintains its allocation state from these calls.
    ///
    /// A claim is reported if it has our finalizer or an allocation recorded as ours, regardless of the writer. The method must return at
    /// once and must not panic: it runs in the task that decides. It returns the problems found (an unreadable handle, two claims with
    /// one device); each becomes an event on its claim. Return new problems only, or they are reported again with every change.
    fn observe(&self, observation: &Observation) -> Vec<Finding> {
        let _ = observation;
        Vec::new()
    }

    /// Yields whenever a pod that did not fit anywhere might fit now: a device was released, a node appeared, a parameter was fixed. As
    /// many waiting pods as the change can help are evaluated again, in turn by namespace, and then more if those do not use it.
    ///
    /// Called once, at the start. Without it, waiting pods are evaluated again only when their own objects change, and every few
    /// minutes. The stream must not end before the driver does; it may merge changes.
    fn capacity_changes(&self) -> impl Stream<Item = CapacityChange> + Send + 'static
    where
        Self: Sized,
    {
        futures::stream::pending()
    }

    /// Yields problems with existing allocations that turn up outside of `observe`, for instance when an inventory shows
    /// that a device may not be shared.
    fn findings(&self) -> impl Stream<Item = Finding> + Send + 'static
    where
        Self: Sized,
    {
        futures::stream::pending()
    }
}

/// A claim to evaluate or allocate, with its class and the parameters of both.
pub struct ClaimRequest<D: Driver + ?Sized> {
    /// The name of the entry in `pod.spec.resourceClaims`; empty for an immediate claim.
    pub pod_claim_name: String,
    /// The claim.
    pub claim: Arc<ResourceClaim>,
    /// The claim's class.
    pub class: Arc<ResourceClass>,
    /// The class's parameters.
    pub class_parameters: Arc<D::ClassParameters>,
    /// The claim's parameters.
    pub claim_parameters: D::ClaimParameters,
}

impl<D: Driver + ?Sized> ClaimRequest<D> {
    /// The claim's uid.
    pub fn uid(&self) -> &str {
        self.claim.metadata.uid.as_deref().unwrap_or_default()
    }
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

/// The nodes on which a claim cannot be allocated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// The reason for each unsuitable node, written for users ("3 of 3 held").
    pub unsuitable_nodes: BTreeMap<String, String>,
}

/// A claim whose allocation must be released.
#[derive(Clone, Copy, Debug)]
pub struct Deallocation<'a> {
    /// The claim, in its last observed state.
    pub claim: &'a ResourceClaim,
    /// The allocation as recorded in the claim, or as returned by [`Driver::allocate`] in this process if its write was refused or the
    /// write's answer was lost. After a restart, a driver finds its earlier work by the claim's uid.
    pub allocation: Option<&'a AllocationResult>,
}

impl Deallocation<'_> {
    /// The claim's uid.
    pub fn uid(&self) -> &str {
        self.claim.metadata.uid.as_deref().unwrap_or_default()
    }
}

/// The allocations of this driver's claims, as far as the controller knows.
#[derive(Clone, Debug, PartialEq)]
pub enum Observation {
    /// All claims; any claim not listed is gone. Sent once, before the first decision.
    All(Vec<Holding>),
    /// One claim has changed.
    Changed(Holding),
    /// One claim no longer exists.
    Gone {
        /// The claim's uid.
        uid: String,
    },
}

impl Observation {
    /// The reported claims; empty for [`Observation::Gone`].
    pub fn holdings(&self) -> &[Holding] {
        match self {
            Self::All(holdings) => holdings,
            Self::Changed(holding) => std::slice::from_ref(holding),
            Self::Gone { .. } => &[],
        }
    }
}

/// A problem with an allocation. Becomes a Warning event, once, on the claim and on the pods that it is reserved for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The claim's namespace.
    pub namespace: String,
    /// The claim's name.
    pub name: String,
    /// The claim's uid.
    pub uid: String,
    /// CamelCase, from a small fixed set: the reason of the event.
    pub reason: &'static str,
    /// The problem and its fix, written for users.
    pub message: String,
    /// Whether the claim must lose its allocation because another claim has the better right to the device. The controller
    /// deallocates it if no pod can be using it yet.
    pub take_back: bool,
}

/// A claim that holds, or may hold, something of this driver.
#[derive(Clone, Debug, PartialEq)]
pub struct Holding {
    /// The claim. Its `status.allocation` is the allocation; a claim with our finalizer but without an allocation may hold devices
    /// that an earlier process allocated before it was killed. See [`pod_claim_name`](ResourceClaim::pod_claim_name).
    pub claim: Arc<ResourceClaim>,
}

impl Holding {
    /// The recorded allocation, if it contains something of `driver`: [`ResourceClaimStatus::allocation_of`].
    ///
    /// [`ResourceClaimStatus::allocation_of`]: crate::api::resource::ResourceClaimStatus::allocation_of
    pub fn allocation(&self, driver: &str) -> Option<&AllocationResult> {
        self.claim.status.allocation_of(driver)
    }

    /// The claim's uid.
    pub fn uid(&self) -> &str {
        self.claim.metadata.uid.as_deref().unwrap_or_default()
    }
}

/// New capacity: a device was released, a node appeared, or a parameter was fixed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapacityChange {
    /// The cause of the change.
    pub cause: CapacityCause,
    /// How many waiting pods it may help, as far as the driver can tell; `None` if possibly all of them.
    pub pods: Option<usize>,
}

/// The cause of a [`CapacityChange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CapacityCause {
    /// A device was released.
    Freed,
    /// A node's inventory changed.
    Inventory,
    /// A parameter object changed.
    Parameters,
}

/// Why a call of a driver failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct DriverError {
    /// Whether a retry can help.
    pub kind: DriverErrorKind,
    /// CamelCase, from a small fixed set: the reason of the event, and a metric's label.
    pub reason: &'static str,
    /// The problem and its fix, written for users.
    pub message: String,
}

/// Whether a retry can help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverErrorKind {
    /// Only a change by a person helps. Not retried until the claim, the class, or something that
    /// [`Driver::capacity_changes`] reports has changed.
    Invalid,
    /// Retried with a growing delay.
    Retry,
}

impl DriverError {
    /// An error that only a person can fix.
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
