//! [`Driver`]: what a device vendor implements to have claims of its classes served by the [controller](crate::controller).
//!
//! A driver knows its devices and who holds them. It never talks to Kubernetes about claims: the controller watches claims,
//! classes and pods, asks the driver, writes what it answers, and repeats what failed. It is the counterpart of
//! [`controller.Driver`][go] in Go's `k8s.io/dynamic-resource-allocation`, for classic DRA (`resource.k8s.io/v1alpha2`, Kubernetes
//! 1.27 to 1.30):
//!
//! | here | there | other than there |
//! |---|---|---|
//! | [`class_parameters`](Driver::class_parameters) | `GetClassParameters` | typed, instead of `interface{}` |
//! | [`claim_parameters`](Driver::claim_parameters) | `GetClaimParameters` | typed |
//! | [`unsuitable_nodes`](Driver::unsuitable_nodes) | `UnsuitableNodes` | returned with a reason for each node, instead of written into the input |
//! | [`allocate`](Driver::allocate) | `Allocate` | all claims of a pod or none |
//! | [`deallocate`](Driver::deallocate) | `Deallocate` | gets what was allocated, even if that was never recorded |
//! | [`observe`](Driver::observe) | none | tells what the claims hold, so that a driver needs no store of its own |
//! | [`capacity_changes`](Driver::capacity_changes) | none | wakes the pods that wait, instead of a poll every 30 s |
//! | [`ready`](Driver::ready) | none | the driver's own caches are filled before it is asked anything |
//!
//! [go]: https://pkg.go.dev/k8s.io/dynamic-resource-allocation@v0.30.14/controller#Driver
//!
//! # In which order
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
//! * **One thing at a time for each claim.** While a call or a write is under way for a claim, no other is begun for it. Calls for
//!   different claims overlap, so a driver needs a lock around its books. Where it checks and holds in one step under that lock, it
//!   cannot give anything away twice.
//! * **A time limit** ([`Builder::call_timeout`](crate::controller::Builder::call_timeout), 30 s) for each call, with the two calls
//!   for parameters that go before it. What takes longer is dropped where it awaits, told as `DriverTimeout`, followed by `deallocate` if
//!   it was `allocate`, and tried again. A panic in a call that is `async` is treated the same way (`DriverPanicked`), if the program
//!   unwinds. A call that hangs holds up its own claims only.
//! * **Nothing is lost in a crash.** The claim is the only record. Before anything is allocated our finalizer is in the claim; so a
//!   claim that has it and no allocation may hold what a killed process allocated, and is given back before anything else happens to it.
//!   That is why each method must be idempotent, and a driver that works on devices outside of its own memory must find what it did
//!   by the claim's uid.
//! * **One process decides.** [`LeaderElection`](crate::controller::LeaderElection) sees to that; without it there must never be two.
//!
//! # How capacity is held
//!
//! [`Driver::unsuitable_nodes`] reserves nothing. [`Driver::allocate`] holds what it returns until one of two things: `observe` shows it
//! in the claim (from then on the claim holds it, until `observe` shows that the claim does not any more), or `deallocate` gives it back
//! because it could not be recorded. There is no third, and no timer: the controller always comes to one of them.
//!
//! # Errors
//!
//! [`DriverError::invalid`] is for what only a person can put right: a parameter that makes no sense. It is told once, on the pod and on
//! the object at fault, and the driver is asked again when the claim, the class, or something that `capacity_changes` reports has changed.
//! [`DriverError::retry`] is for everything else, and is tried again after 100 ms, doubling up to 30 s. Both become Warning events with
//! the error's reason and message. What is full is no error in `unsuitable_nodes`: it is a verdict.
//!
//! # What a node gets
//!
//! [`AllocationResult::resource_handles`] carry a text of at most 16 KiB each to the vendor's kubelet plugin, unread by anybody else
//! (`NodePrepareResources`, Kubernetes 1.27 to 1.30). Put everything into it that the plugin needs, and a version. `available_on_nodes`
//! says from where the allocation can be used: one node, a set of nodes, or any node (`None`).
//!
//! # A whole driver
//!
//! Licences of a server that each node reaches. `examples/network_attached.rs` is larger, and serves a real cluster.
//! Whether a driver keeps to all of this, the conformance kit tells in one line of its test: `drayman::testkit`, with feature `testcluster`.
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

/// Decides where claims can be allocated and what they get. The [module](self) says in which order it is asked, what holds for all
/// calls (time limits, idempotence, crashes, errors), and shows a whole driver.
pub trait Driver: Send + Sync + 'static {
    /// What a class's `parametersRef` stands for, read and checked.
    type ClassParameters: Send + Sync + 'static;
    /// What a claim's `parametersRef` stands for, read and checked.
    type ClaimParameters: Send + Sync + 'static;

    /// The driver's name: the `driverName` of its classes, and the prefix of its finalizer (`<name>/deletion-protection`). A
    /// lower-case DNS subdomain of at most 63 characters; [`Builder::build`](crate::controller::Builder::build) refuses another, because
    /// the API server refuses its finalizer. Must always be the same: claims are found by it after an upgrade.
    fn name(&self) -> &str;

    /// Returns once the driver knows enough to decide, for instance when its own caches are filled.
    ///
    /// Called once, after the first [`Driver::observe`]; nothing else is asked and nothing is written before it returns. Has no time
    /// limit: a driver that never gets ready never serves anything, so it should log what it waits for.
    fn ready(&self) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Reads and checks the parameters of a class (Go: `GetClassParameters`). A class without `parametersRef` is passed too, since
    /// only the driver knows whether it needs one.
    ///
    /// Called before each [`Driver::unsuitable_nodes`] and each [`Driver::allocate`], once for each claim in question, within the time
    /// limit of that call: keep what it reads in a watched cache, or every question costs a request. An error is told on the class and
    /// on the pod, and nothing else is asked for that pod. An allocation is made from what this returns at that time; what changes
    /// later does not change what a claim has got.
    fn class_parameters(
        &self,
        class: &ResourceClass,
    ) -> impl Future<Output = Result<Self::ClassParameters, DriverError>> + Send;

    /// Reads and checks the parameters of a claim (Go: `GetClaimParameters`). A claim without `parametersRef` is passed too.
    ///
    /// Called right after [`Driver::class_parameters`], as often as that. The object is in the claim's own namespace. An error is told on
    /// the claim and on the pod.
    fn claim_parameters(
        &self,
        claim: &ResourceClaim,
        class: &ResourceClass,
        class_parameters: &Self::ClassParameters,
    ) -> impl Future<Output = Result<Self::ClaimParameters, DriverError>> + Send;

    /// Says on which of `nodes` each of `claims` cannot be allocated, and why (Go: `UnsuitableNodes`).
    ///
    /// `claims` are all claims of the pod that this driver has still to allocate, in the pod's order; a node that cannot hold all of
    /// them together is unsuitable for at least one. `nodes` are names, those that the scheduler has in mind and those that were found bad
    /// before; some may not exist any more. The answer has one verdict per claim, in the order of `claims`; another number is an error
    /// (`DriverMisbehaved`). Nodes that were not asked about are ignored.
    ///
    /// Reserves nothing. Called when a pod begins to wait for a node, and again when its nodes, its claims, a class or the capacity
    /// changes; with a slow recheck after some minutes. One call per pod is under way at a time. What is answered is written to
    /// the PodSchedulingContext, at most 128 nodes per claim, and summed up in an event if no node is left. After an error nothing is written.
    fn unsuitable_nodes(
        &self,
        pod: &Pod,
        claims: &[ClaimRequest<Self>],
        nodes: &[String],
    ) -> impl Future<Output = Result<Vec<Verdict>, DriverError>> + Send;

    /// Allocates `claims` together, on `node` (Go: `Allocate`).
    ///
    /// For a pod, `claims` are all that this driver has still to allocate, and `node` is the one that the scheduler has selected and
    /// that [`Driver::unsuitable_nodes`] did not object to. For a claim with `allocationMode: Immediate` it is that claim alone and
    /// `None`: anywhere; the driver then heeds the class's `suitableNodes` itself. Every claim has our finalizer by now.
    ///
    /// The answer has one result per claim, in the order of `claims`. If one is an error, or the pod is gone or goes elsewhere meanwhile,
    /// or the write is refused, [`Driver::deallocate`] follows for each claim that was allocated, and nothing is recorded. What is
    /// returned is held until `observe` or `deallocate` says otherwise (see the [module](self)). Called again for a claim that it holds something
    /// for, a driver returns the same. An allocation that the API server would refuse (more than 32 handles, a handle over 16 KiB) is
    /// not written, and told.
    fn allocate(
        &self,
        claims: &[ClaimRequest<Self>],
        node: Option<&str>,
    ) -> impl Future<Output = Result<Vec<Result<AllocationResult, DriverError>>, DriverError>> + Send;

    /// Gives back what a claim holds (Go: `Deallocate`).
    ///
    /// Called when a claim that no pod uses is deleted or is to be deallocated; when what `allocate` returned could not be recorded, or
    /// nobody knows what it did; and after a start for each claim that has our finalizer and no allocation. So it is called also for
    /// claims that hold nothing, and again after an error, a crash or a write that failed: then it does nothing and returns `Ok`.
    ///
    /// What `claim.status.allocation` records stays recorded until the controller's next write; a driver that hands out
    /// exclusive devices frees them when [`Driver::observe`] shows that the allocation is gone. What was never recorded is
    /// free when this returns. An error is told on the claim, which keeps finalizer and allocation, and it is tried again with a growing
    /// delay, whichever [kind](DriverErrorKind) it has: a device must not be lost because somebody has erred.
    fn deallocate(
        &self,
        deallocation: Deallocation<'_>,
    ) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Tells what the claims hold: [all](Observation::All) of them once, before anything else is asked, then each change, in order, our
    /// own writes included. This is how a driver rebuilds and keeps its books.
    ///
    /// A claim is told of if it has our finalizer or an allocation that is recorded as ours, whoever wrote that. It must return at once and must
    /// not panic: it is called by the task that decides. The answer is what is wrong with what was shown (a handle that cannot be
    /// read, two claims with one device); each becomes an event on its claim. Answer what is new only, or it is told again with every change.
    fn observe(&self, observation: &Observation) -> Vec<Finding> {
        let _ = observation;
        Vec::new()
    }

    /// Yields whenever a pod that found no place might find one now: a device was given back, a node appeared, a parameter was
    /// put right. As many waiting pods as the change can help are judged again, in turn by namespace, then more if those do not take it.
    ///
    /// Called once, at the start. Without it, waiting pods are judged again only when their own objects change, and after some
    /// minutes. The stream must not end before the driver does; changes may be summed up.
    fn capacity_changes(&self) -> impl Stream<Item = CapacityChange> + Send + 'static
    where
        Self: Sized,
    {
        futures::stream::pending()
    }

    /// Yields what turns out to be wrong with what claims hold when nothing is observed, for instance when an inventory shows
    /// that a device may not be shared.
    fn findings(&self) -> impl Stream<Item = Finding> + Send + 'static
    where
        Self: Sized,
    {
        futures::stream::pending()
    }
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

impl Deallocation<'_> {
    /// The claim's uid.
    pub fn uid(&self) -> &str {
        self.claim.metadata.uid.as_deref().unwrap_or_default()
    }
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

impl Observation {
    /// The claims that it shows; none for one that is gone.
    pub fn holdings(&self) -> &[Holding] {
        match self {
            Self::All(holdings) => holdings,
            Self::Changed(holding) => std::slice::from_ref(holding),
            Self::Gone { .. } => &[],
        }
    }
}

/// Something that is wrong with what a claim holds. Becomes a Warning event on the claim and on the pods that it is reserved
/// for, once.
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
    /// What is wrong and what to do, as a user shall read it.
    pub message: String,
    /// Whether the claim must not keep what it holds, because another one has the better right to it. The controller takes it
    /// back if no pod can be using it yet.
    pub take_back: bool,
}

/// A claim that holds something of this driver's, or may do so.
#[derive(Clone, Debug, PartialEq)]
pub struct Holding {
    /// The claim. Its `status.allocation` is what it holds; a claim with our finalizer but without an allocation may hold what an
    /// earlier process allocated that was killed before it could write it down. See [`pod_claim_name`](ResourceClaim::pod_claim_name).
    pub claim: Arc<ResourceClaim>,
}

impl Holding {
    /// The allocation that is recorded, if `driver` holds something by it: [`ResourceClaimStatus::allocation_of`].
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
