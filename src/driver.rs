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
//! * **Observations come first.** `observe` runs in a task of its own, one observation at a time. Every other call starts after the
//!   observations that precede it, so it finds them in the driver's state.
//! * **A time limit** ([`Builder::call_timeout`](crate::controller::Builder::call_timeout), 30 s) covers each call together with the
//!   two parameter calls before it. A call that takes longer is dropped at its next await point, reported as `DriverTimeout`, followed by
//!   `deallocate` if it was `allocate`, and retried. A panic is handled the same way (`DriverPanicked`) if the program unwinds. A call
//!   that hangs blocks its own claims only. If `observe` panics or takes longer than the limit (30 s at least), its state is unknown: the
//!   controller ends with [`ControllerError::Observe`](crate::controller::ControllerError::Observe), and a new process starts over.
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
//! Warning events with the error's reason and message, of which 1,024 bytes are shown; a [source](DriverError::with_source) is logged. For
//! a full node, `unsuitable_nodes` returns an entry of [`UnsuitableNodes`], not an error; 640 bytes of its reason are kept.
//!
//! # Choosing a driver at run time
//!
//! There is no `dyn Driver`, because the associated types would become `dyn Any`. Match on the choice where the controller is built:
//! [`Controller::run`](crate::controller::Controller::run) has the same output for every driver.
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
//! use std::sync::Mutex;
//!
//! use drayman::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClass};
//! use drayman::controller::{Controller, ControllerError};
//! use drayman::driver::*;
//! use tokio_util::sync::CancellationToken;
//!
//! struct Licences {
//!     total: usize,
//!     /// The uid of each claim that holds a licence, and whether the claim records it.
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
//!     async fn class_parameters(&self, _: &ResourceClass) -> Result<()> {
//!         Ok(())
//!     }
//!
//!     async fn claim_parameters(&self, claim: &ResourceClaim, _: &ResourceClass, _: &()) -> Result<()> {
//!         match &claim.spec.parameters_ref {
//!             None => Ok(()),
//!             Some(_) => Err(DriverError::invalid("ParametersInvalid", "a licence has no parameters: remove parametersRef")),
//!         }
//!     }
//!
//!     async fn unsuitable_nodes(&self, _: &Pod, claims: &[ClaimRequest<Self>], nodes: &[String]) -> Result<Vec<UnsuitableNodes>> {
//!         let held = self.held.lock().unwrap().len();
//!         let full = held + claims.len() > self.total;
//!         let reasons = nodes.iter().filter(|_| full).map(|node| (node.clone(), format!("{held} of {} held", self.total)));
//!         Ok(vec![reasons.collect(); claims.len()])
//!     }
//!
//!     async fn allocate(&self, claims: &[ClaimRequest<Self>], _node: Option<&str>) -> Result<Vec<AllocationResult>> {
//!         let mut held = self.held.lock().unwrap();
//!         for request in claims {
//!             if !held.contains_key(request.uid()) && held.len() >= self.total {
//!                 let error = DriverError::retry("LicencesExhausted", format!("all {} are held", self.total));
//!                 return Err(error.for_claim(request.uid()));
//!             }
//!             held.entry(request.uid().to_owned()).or_insert(false);
//!         }
//!         Ok(vec![AllocationResult::new(self.name(), "version=1"); claims.len()])
//!     }
//!
//!     async fn deallocate(&self, deallocation: Deallocation<'_>) -> Result<()> {
//!         let mut held = self.held.lock().unwrap();
//!         // A recorded licence is free when the record is gone.
//!         if held.get(deallocation.uid()) == Some(&false) {
//!             held.remove(deallocation.uid());
//!         }
//!         Ok(())
//!     }
//!
//!     async fn observe(&self, observation: &Observation) -> Vec<Finding> {
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
//! # async fn main() -> Result<()> {
//! let driver = Licences { total: 1, held: Mutex::default() };
//! let claim = |uid: &str| {
//!     let mut claim = ResourceClaim::default();
//!     claim.metadata.uid = Some(uid.to_owned());
//!     claim
//! };
//! let request = |uid: &str| ClaimRequest::<Licences>::new(claim(uid), ResourceClass::default(), (), ());
//! driver.allocate(&[request("1")], None).await?;
//! let unsuitable = driver.unsuitable_nodes(&Pod::default(), &[request("2")], &["node-a".to_owned()]).await?;
//! assert_eq!(unsuitable[0]["node-a"], "1 of 1 held");
//! assert_eq!(driver.allocate(&[request("2")], None).await.unwrap_err().claim.as_deref(), Some("2"));
//! // The allocation was not recorded, so the licence is free when this returns.
//! driver.deallocate(Deallocation::new(&claim("1"))).await?;
//! driver.allocate(&[request("2")], None).await?;
//! # Ok(())
//! # }
//! ```

pub(crate) mod keyed_locks;

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::sync::Arc;

use futures::Stream;

use crate::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClass};

/// The result of a driver's call.
pub type Result<T, E = DriverError> = std::result::Result<T, E>;

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
    /// Called after the first [`Driver::observe`]. Until it succeeds, only `observe` is called and nothing is written. It has no time
    /// limit. An error is logged and reported in [`Metrics::not_ready`](crate::controller::Metrics::not_ready); `ready` is then called
    /// again after 100 ms, doubling up to 30 s.
    fn ready(&self) -> impl Future<Output = Result<()>> + Send {
        async { Ok(()) }
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
    ) -> impl Future<Output = Result<Self::ClassParameters>> + Send;

    /// Reads and checks the parameters of a claim (Go: `GetClaimParameters`). Claims without `parametersRef` are passed too.
    ///
    /// Called right after each [`Driver::class_parameters`]. The parameter object is in the claim's own namespace. An error is reported
    /// on the claim and on the pod.
    fn claim_parameters(
        &self,
        claim: &ResourceClaim,
        class: &ResourceClass,
        class_parameters: &Self::ClassParameters,
    ) -> impl Future<Output = Result<Self::ClaimParameters>> + Send;

    /// Returns for each of `claims` the nodes among `nodes` that cannot hold it, with reasons (Go: `UnsuitableNodes`).
    ///
    /// `claims` are all claims of the pod that this driver has yet to allocate, in the pod's order; a node that cannot hold all of
    /// them together is unsuitable for at least one. `nodes` are the scheduler's potential nodes and the nodes found unsuitable
    /// before; some may no longer exist. The answer has one entry per claim, in the order of `claims`; any other number is an error
    /// (`DriverMisbehaved`). Nodes outside `nodes` are ignored. Of a pod, `spec.other` is empty if the spec takes more than 256 KiB of
    /// memory, and the metadata is limited as that of a [claim](ClaimRequest::claim).
    ///
    /// Reserves nothing. Called when a pod starts to wait for a node, again when its nodes, its claims, a class or the capacity changes,
    /// and in a resync every few minutes. At most one call per pod is pending. The result is written to the PodSchedulingContext, at most
    /// 128 nodes per claim, and summarized in an event if no node is left. After an error nothing is written.
    fn unsuitable_nodes(
        &self,
        pod: &Pod,
        claims: &[ClaimRequest<Self>],
        nodes: &[String],
    ) -> impl Future<Output = Result<Vec<UnsuitableNodes>>> + Send;

    /// Allocates `claims` together on `node` (Go: `Allocate`).
    ///
    /// For a pod, `claims` are all that this driver has yet to allocate, and `node` is the scheduler's selected node, which
    /// [`Driver::unsuitable_nodes`] has not rejected. A claim with `allocationMode: Immediate` is passed alone with `None`, which means
    /// any node; the driver must then respect the class's `suitableNodes`. Every claim already has our finalizer.
    ///
    /// All claims are allocated or none: the answer has one allocation per claim, in the order of `claims`, or is an error that names
    /// the claim at fault ([`DriverError::for_claim`]). Nothing is recorded, and [`Driver::deallocate`] follows for each claim, after an
    /// error, if the pod is deleted or moves to another node meanwhile, or if the write is refused. So a driver need not roll back
    /// its partial work.
    ///
    /// The driver holds the returned devices until `observe` or `deallocate` (see the [module](self)). If called again for a claim that
    /// it still holds devices for, it returns the same allocation. An allocation that the API server would reject (more than 32 handles,
    /// a handle over 16 KiB) is not written, and reported.
    fn allocate(
        &self,
        claims: &[ClaimRequest<Self>],
        node: Option<&str>,
    ) -> impl Future<Output = Result<Vec<AllocationResult>>> + Send;

    /// Releases the allocation of a claim (Go: `Deallocate`).
    ///
    /// Called when an unused claim is deleted or marked for deallocation; when the result of `allocate` could not be recorded or is
    /// unknown; and after a start for each claim that has our finalizer and no allocation. It is therefore also called for claims that
    /// hold nothing, and again after an error, a crash or a failed write: then it does nothing and returns `Ok`.
    ///
    /// An allocation in `claim.status.allocation` stays recorded until the controller's next write; a driver of exclusive devices frees
    /// them when [`Driver::observe`] shows that the allocation is gone. An allocation that was never recorded is free when this returns.
    /// An error is reported on the claim, which keeps finalizer and allocation, and is retried with a growing delay, regardless of
    /// its [kind](DriverErrorKind): a mistake must not leak a device.
    fn deallocate(&self, deallocation: Deallocation<'_>) -> impl Future<Output = Result<()>> + Send;

    /// Reports the allocations of the claims: [all](Observation::All) of them once, before any other call, then each change in order,
    /// including our own writes. A driver rebuilds and maintains its allocation state from these calls.
    ///
    /// A claim is reported if it has our finalizer or an allocation recorded as ours, regardless of the writer. Later calls wait until
    /// the method has returned. Its body must not block the thread, because the program's runtime may have only one: use
    /// [`spawn_blocking`](tokio::task::spawn_blocking) for blocking work. It returns the problems found (an unreadable handle, two claims
    /// with one device); each becomes an event on its claim. Return new problems only, or they are reported again with every change.
    fn observe(&self, observation: &Observation) -> impl Future<Output = Vec<Finding>> + Send {
        let _ = observation;
        async { Vec::new() }
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
#[non_exhaustive]
pub struct ClaimRequest<D: Driver + ?Sized> {
    /// The name of the entry in `pod.spec.resourceClaims`; empty for an immediate claim.
    pub pod_claim_name: String,
    /// The claim. Labels that together take more than 16 KiB of memory are left out; the same holds for annotations, and for owner
    /// references except the controller. At most 32 finalizers are kept, and at most 256 characters of each text in `parametersRef`.
    pub claim: Arc<ResourceClaim>,
    /// The claim's class.
    pub class: Arc<ResourceClass>,
    /// The class's parameters.
    pub class_parameters: Arc<D::ClassParameters>,
    /// The claim's parameters.
    pub claim_parameters: D::ClaimParameters,
}

impl<D: Driver + ?Sized> ClaimRequest<D> {
    /// A request for `claim`, without the name of a pod's entry.
    pub fn new(
        claim: impl Into<Arc<ResourceClaim>>,
        class: impl Into<Arc<ResourceClass>>,
        class_parameters: impl Into<Arc<D::ClassParameters>>,
        claim_parameters: D::ClaimParameters,
    ) -> Self {
        Self {
            pod_claim_name: String::new(),
            claim: claim.into(),
            class: class.into(),
            class_parameters: class_parameters.into(),
            claim_parameters,
        }
    }

    /// Sets the name of the entry in `pod.spec.resourceClaims`.
    #[must_use]
    pub fn pod_claim_name(mut self, name: impl Into<String>) -> Self {
        self.pod_claim_name = name.into();
        self
    }

    /// The claim's uid.
    pub fn uid(&self) -> &str {
        uid(&self.claim)
    }
}

impl<D: Driver + ?Sized> fmt::Debug for ClaimRequest<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClaimRequest")
            .field("pod_claim_name", &self.pod_claim_name)
            .field("claim", &self.claim)
            .field("class", &self.class)
            .finish_non_exhaustive()
    }
}

/// The nodes on which a claim cannot be allocated, each with the reason, written for users ("3 of 3 held").
pub type UnsuitableNodes = BTreeMap<String, String>;

/// A claim whose allocation must be released.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Deallocation<'a> {
    /// The claim, in its last observed state.
    pub claim: &'a ResourceClaim,
    /// The allocation as recorded in the claim, or as returned by [`Driver::allocate`] in this process if its write was refused or the
    /// write's answer was lost. After an error of `allocate` or a restart, a driver finds its earlier work by the claim's uid.
    pub allocation: Option<&'a AllocationResult>,
}

impl<'a> Deallocation<'a> {
    /// The deallocation of a claim whose allocation is unknown, if it has any.
    pub fn new(claim: &'a ResourceClaim) -> Self {
        let allocation = None;
        Self { claim, allocation }
    }

    /// Sets the allocation.
    #[must_use]
    pub fn allocation(mut self, allocation: Option<&'a AllocationResult>) -> Self {
        self.allocation = allocation;
        self
    }

    /// The claim's uid.
    pub fn uid(&self) -> &str {
        uid(self.claim)
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

/// A claim that holds, or may hold, devices of this driver.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Holding {
    /// The claim. Its `status.allocation` is the allocation; a claim with our finalizer but without an allocation may hold devices
    /// that an earlier process allocated before it was killed. See [`pod_claim_name`](ResourceClaim::pod_claim_name).
    pub claim: Arc<ResourceClaim>,
}

impl Holding {
    /// The observation of a claim.
    pub fn new(claim: impl Into<Arc<ResourceClaim>>) -> Self {
        let claim = claim.into();
        Self { claim }
    }

    /// The recorded allocation, if it contains something of `driver`: [`ResourceClaimStatus::allocation_of`].
    ///
    /// [`ResourceClaimStatus::allocation_of`]: crate::api::resource::ResourceClaimStatus::allocation_of
    pub fn allocation(&self, driver: &str) -> Option<&AllocationResult> {
        self.claim.status.allocation_of(driver)
    }

    /// The claim's uid.
    pub fn uid(&self) -> &str {
        uid(&self.claim)
    }
}

/// A problem with an allocation. Becomes a Warning event, once, on the claim and on the pods that it is reserved for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
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
    pub roll_back: bool,
}

impl Finding {
    /// A problem that leaves the claim its allocation.
    pub fn new(claim: &ResourceClaim, reason: &'static str, message: impl Into<String>) -> Self {
        let metadata = &claim.metadata;
        Self {
            namespace: metadata.namespace.clone().unwrap_or_default(),
            name: metadata.name.clone().unwrap_or_default(),
            uid: uid(claim).to_owned(),
            reason,
            message: message.into(),
            roll_back: false,
        }
    }

    /// Sets [`Finding::roll_back`].
    #[must_use]
    pub fn roll_back(mut self, roll_back: bool) -> Self {
        self.roll_back = roll_back;
        self
    }
}

/// New capacity: a device was released, a node appeared, or a parameter was fixed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CapacityChange {
    /// The cause of the change.
    pub cause: CapacityCause,
    /// How many waiting pods it can help at most; `None` if the driver does not know, which wakes all of them.
    pub pods: Option<usize>,
    /// The only namespace whose claims it can help; `None` if it can help claims of all namespaces.
    pub namespace: Option<String>,
}

impl CapacityChange {
    /// A change that can help an unknown number of pods in all namespaces.
    pub fn new(cause: CapacityCause) -> Self {
        Self {
            cause,
            pods: None,
            namespace: None,
        }
    }

    /// Sets the number of waiting pods that the change can help at most.
    #[must_use]
    pub fn for_pods(mut self, pods: usize) -> Self {
        self.pods = Some(pods);
        self
    }

    /// Restricts the change to the claims of one namespace.
    #[must_use]
    pub fn in_namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// Whether it can help claims of this namespace.
    pub(crate) fn concerns(&self, namespace: &str) -> bool {
        self.namespace.as_deref().is_none_or(|only| only == namespace)
    }
}

/// The cause of a [`CapacityChange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum CapacityCause {
    /// A device was released.
    Freed,
    /// A node's inventory changed.
    Inventory,
    /// A parameter object changed.
    Parameters,
}

/// Why a call of a driver failed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
#[non_exhaustive]
pub struct DriverError {
    /// Whether a retry can help.
    pub kind: DriverErrorKind,
    /// CamelCase, from a small fixed set: the reason of the event, and a metric's label.
    pub reason: &'static str,
    /// The problem and its fix, written for users.
    pub message: String,
    /// The uid of the claim at fault, if a call for several claims fails because of one.
    pub claim: Option<String>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

/// Whether a retry can help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DriverErrorKind {
    /// Only a change by a person helps. Not retried until the claim has been replaced, or the nodes, the class or something that
    /// [`Driver::capacity_changes`] reports has changed.
    Invalid,
    /// Retried with a growing delay.
    Retry,
}

impl DriverError {
    /// An error that only a person can fix.
    pub fn invalid(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(DriverErrorKind::Invalid, reason, message.into())
    }

    /// An error that may go away by itself.
    pub fn retry(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(DriverErrorKind::Retry, reason, message.into())
    }

    fn new(kind: DriverErrorKind, reason: &'static str, message: String) -> Self {
        Self {
            kind,
            reason,
            message,
            claim: None,
            source: None,
        }
    }

    /// Names the claim at fault by its uid. The error is then reported on that claim, too.
    #[must_use]
    pub fn for_claim(mut self, uid: impl Into<String>) -> Self {
        self.claim = Some(uid.into());
        self
    }

    /// Adds the cause. It is logged; users see the message only.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.source = Some(Arc::from(source.into()));
        self
    }
}

fn uid(claim: &ResourceClaim) -> &str {
    claim.metadata.uid.as_deref().unwrap_or_default()
}
