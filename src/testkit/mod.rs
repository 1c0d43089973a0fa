//! Conformance kit: tests a [`Driver`] or a [`NodeDriver`] against its contract with one line in the vendor's test.
//!
//! Each check runs on its own in-process cluster ([`crate::testcluster`]) and needs neither Kubernetes nor root. The kit
//! calls a driver as the controller and the companion do, in every order that the contract allows. Then the real
//! controller and the real companion serve pods with the driver; the kit kills them before and after each step and makes
//! calls hang or fail. The two traits document the rules and their reasons; [`Rule`] lists all of them.
//!
//! The kit requires the feature `testcluster`, which is on by default:
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
//! # use drayman::driver::{ClaimRequest, Deallocation, Result, UnsuitableNodes};
//! use drayman::driver::Driver;
//! use drayman::testkit::{Broken, conformance};
//!
//! # struct Antenna { name: &'static str }
//! # impl Driver for Antenna {
//! #     type ClassParameters = ();
//! #     type ClaimParameters = ();
//! #     fn name(&self) -> &str { self.name }
//! #     async fn class_parameters(&self, _: &ResourceClass) -> Result<()> { Ok(()) }
//! #     async fn claim_parameters(&self, _: &ResourceClaim, _: &ResourceClass, _: &()) -> Result<()> { Ok(()) }
//! #     async fn unsuitable_nodes(&self, _: &Pod, claims: &[ClaimRequest<Self>], _: &[String]) -> Result<Vec<UnsuitableNodes>> {
//! #         Ok(vec![UnsuitableNodes::new(); claims.len()])
//! #     }
//! #     async fn allocate(&self, claims: &[ClaimRequest<Self>], _: Option<&str>) -> Result<Vec<AllocationResult>> {
//! #         Ok(vec![AllocationResult::new(self.name, "version=1"); claims.len()])
//! #     }
//! #     async fn deallocate(&self, _: Deallocation<'_>) -> Result<()> { Ok(()) }
//! # }
//! # #[tokio::main]
//! # async fn main() -> Result<(), Broken> {
//! // Any number of pods may listen to the antenna.
//! let report = conformance(|_| Antenna { name: "antenna.example.com" }).run().await?;
//! println!("{report}");
//! # assert!(report.not_tried.contains_key(&drayman::testkit::Rule::FullIsUnsuitable));
//! # Ok(())
//! # }
//! ```
//!
//! Add a class and the objects it refers to with [`Conformance::objects`], and at least two nodes on which a few claims fit,
//! so that the kit can exhaust them; it determines the capacity through the driver.
//!
//! The kit calls the closure for each instance: at the start of a check, and again after it has killed an instance with its
//! tasks. Durable state of the driver belongs in [`Environment::directory`], which is new for each check.
//!
//! # A node driver
//!
//! ```no_run
//! # use drayman::node::driver::NodeDriver;
//! use drayman::testkit::{Broken, node_conformance};
//!
//! # async fn example<D: NodeDriver>(my_driver: fn(std::path::PathBuf) -> D) -> Result<(), Broken> {
//! node_conformance(move |environment| async move { my_driver(environment.directory().to_owned()) })
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
//! [`Broken`] contains for each broken rule the check, the expected and the observed behaviour, and all calls so far;
//! `unwrap` prints it. Narrow down the cause with [`Conformance::only`].
//!
//! ```text
//! RecordedIsHeld: a recorded allocation stays held, also after `deallocate`, until `observe` shows that it is gone
//!   tried:    recorded allocations: deallocate a recorded allocation, whose record remains until the controller's next write
//!   expected: 3 more claims fit, of 4 in all
//!   found:    4 more claims fit
//!   called:
//!     (a new instance)
//!     observe(All([])) -> 0 findings
//!     ready()
//!     ...
//! ```
//!
//! # Limits
//!
//! The kit does not check that the devices work, nor that a node follows the handle, whose format is the vendor's. It does
//! not run two controllers at once, which [`LeaderElection`](crate::controller::LeaderElection) rules out. The tasks of a
//! killed instance end at an await point; the kit waits up to five seconds for a blocking thread.

mod checks;
mod conformance;
mod fixture;
mod instance;
mod lifecycle;
mod measure;
mod node_checks;
mod node_conformance;
mod node_instance;
mod node_lifecycle;
mod process;
mod report;
mod rule;
mod run;

use std::future::Future;

pub use conformance::Conformance;
pub use fixture::Environment;
pub use node_conformance::NodeConformance;
pub use report::{Broken, BrokenRule, ConformanceReport};
pub use rule::Rule;

pub use crate::testcluster::api::ClusterMode;

use crate::driver::Driver;
use crate::node::driver::NodeDriver;

/// Creates the conformance test of a driver. `make` creates an instance within the runtime of its simulated process, so
/// it may spawn tasks.
pub fn conformance<D: Driver>(make: impl Fn(Environment) -> D + Send + Sync + 'static) -> Conformance<D> {
    Conformance::new(make)
}

/// Creates the conformance test of a node driver. `make` creates an instance.
///
/// At least one device must be healthy and available to claims; two allow more checks.
pub fn node_conformance<D, F>(make: impl Fn(Environment) -> F + Send + Sync + 'static) -> NodeConformance<D>
where
    D: NodeDriver,
    F: Future<Output = D> + Send + 'static,
{
    NodeConformance::new(make)
}
