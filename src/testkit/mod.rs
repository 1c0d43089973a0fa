//! The conformance kit: whether a [`Driver`] or a [`NodeDriver`] keeps to its contract, with one line in its vendor's test.
//!
//! Every exercise has a cluster of its own in this process ([`crate::testcluster`]) and needs neither Kubernetes nor root. A driver is
//! called as the controller and the companion call it, in every order that the contract allows; then the real controller and the
//! real companion serve pods with it, killed before and after each of their steps, with calls that hang and calls that fail.
//! What a rule is and why it is one, the documentation of the two traits says; [`Rule`] lists them all.
//!
//! It comes with the feature `testcluster`, which is on by default:
//!
//! ```toml
//! [dev-dependencies]
//! drayman = { path = "../drayman", features = ["testcluster"] }
//! ```
//!
//! # A driver
//!
//! ```
//! # use std::collections::BTreeMap;
//! # use std::sync::Mutex;
//! # use drayman::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClass};
//! # use drayman::driver::{ClaimRequest, Deallocation, DriverError, Verdict};
//! use drayman::driver::Driver;
//! use drayman::testkit::{Broken, conformance};
//!
//! # struct Antenna { name: &'static str }
//! # impl Driver for Antenna {
//! #     type ClassParameters = ();
//! #     type ClaimParameters = ();
//! #     fn name(&self) -> &str { self.name }
//! #     async fn class_parameters(&self, _: &ResourceClass) -> Result<(), DriverError> { Ok(()) }
//! #     async fn claim_parameters(&self, _: &ResourceClaim, _: &ResourceClass, _: &()) -> Result<(), DriverError> { Ok(()) }
//! #     async fn unsuitable_nodes(&self, _: &Pod, claims: &[ClaimRequest<Self>], _: &[String]) -> Result<Vec<Verdict>, DriverError> {
//! #         Ok(vec![Verdict::default(); claims.len()])
//! #     }
//! #     async fn allocate(
//! #         &self,
//! #         claims: &[ClaimRequest<Self>],
//! #         _: Option<&str>,
//! #     ) -> Result<Vec<Result<AllocationResult, DriverError>>, DriverError> {
//! #         Ok(claims.iter().map(|_| Ok(AllocationResult::new(self.name, "version=1"))).collect())
//! #     }
//! #     async fn deallocate(&self, _: Deallocation<'_>) -> Result<(), DriverError> { Ok(()) }
//! # }
//! # #[tokio::main]
//! # async fn main() -> Result<(), Broken> {
//! // Any number of pods may listen to the antenna.
//! let report = conformance(|_| Antenna { name: "antenna.example.com" }).run().await?;
//! println!("{report}");
//! # assert!(report.not_tried.contains_key(&drayman::testkit::Rule::FullIsAVerdict));
//! # Ok(())
//! # }
//! ```
//!
//! Give it a class and what the class needs with [`Conformance::objects`], and two nodes or more on which a few claims fit, so that
//! what is full can be tried; the kit finds out how many fit by asking.
//!
//! The closure is called for each instance: at the start of an exercise, and again after the instance before was killed. Its
//! tasks are killed with it. What the driver keeps elsewhere outlives it, in [`Place::directory`], which is new for each exercise.
//!
//! # A node's driver
//!
//! ```no_run
//! # use drayman::node::driver::NodeDriver;
//! use drayman::testkit::{Broken, node_conformance};
//!
//! # async fn example<D: NodeDriver>(my_driver: fn(std::path::PathBuf) -> D) -> Result<(), Broken> {
//! node_conformance(move |place| async move { my_driver(place.directory().to_owned()) })
//!     .left_over(|directory| std::fs::read_dir(directory.join("prepared")).map_or(Vec::new(), |entries| {
//!         entries.flatten().map(|entry| entry.path().display().to_string()).collect()
//!     }))
//!     .run()
//!     .await?;
//! # Ok(())
//! # }
//! ```
//!
//! # When a rule is broken
//!
//! [`Broken`] says for each rule what was tried, what was expected, what came, and what was called up to then. `unwrap` prints it
//! as it is. Look for the cause with [`Conformance::only`].
//!
//! ```text
//! RecordedIsHeld: what a claim records stays held, also after `deallocate`, until `observe` shows that it does not any more
//!   tried:    what claims record: deallocate what is recorded, whose record stands until the controller's next write
//!   expected: 3 more claims fit, of 4 in all
//!   found:    4 more claims fit
//!   called:
//!     (a new instance)
//!     observe(All([])) -> 0 findings
//!     ready()
//!     ...
//! ```
//!
//! # What it does not show
//!
//! That the devices work; that a node gets what the handle says, since the handle is the vendor's own; what a driver does with
//! two controllers at once, which [`LeaderElection`](crate::controller::LeaderElection) rules out. A killed instance ends where
//! its tasks await; a thread that blocks goes on to its end, for five seconds at most.

mod conformance;
mod exercises;
mod instance;
mod measure;
mod node_conformance;
mod node_exercises;
mod node_instance;
mod node_story;
mod process;
mod report;
mod rule;
mod scene;
mod story;
mod wrapped;

use std::future::Future;

pub use conformance::Conformance;
pub use node_conformance::NodeConformance;
pub use report::{Broken, Finding, Report};
pub use rule::Rule;
pub use scene::Place;

use crate::driver::Driver;
use crate::node::driver::NodeDriver;

/// The conformance test of a driver, of which `make` makes an instance. Runs in the runtime of the instance's process, so that it may
/// start tasks.
pub fn conformance<D: Driver>(make: impl Fn(Place) -> D + Send + Sync + 'static) -> Conformance<D> {
    Conformance::new(make)
}

/// The conformance test of a node's driver, of which `make` makes an instance.
///
/// At least one of its devices must be well and open to claims. With two more can be tried.
pub fn node_conformance<D, F>(make: impl Fn(Place) -> F + Send + Sync + 'static) -> NodeConformance<D>
where
    D: NodeDriver,
    F: Future<Output = D> + Send + 'static,
{
    NodeConformance::new(make)
}
