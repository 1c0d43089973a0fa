//! Real Kubernetes for the tests: a control plane for each test, and nodes that run containers.
//!
//! ```ignore
//! mod harness;
//!
//! let cluster = harness::Cluster::builder().nodes(1).start().await?;
//! let kubeconfig = cluster.user("drayman-node", &[harness::rule(&["drayman.dev"], &["nodeinventories"], &["create"])]).await?;
//! let companion = cluster.node(0).command(env!("CARGO_BIN_EXE_drayman")).arg("node").spawn()?;
//! ```
//!
//! The Go program in `tests/cluster` runs the cluster; this is a typed client of it. The program's standard input is tied to this process:
//! when the [`Cluster`] is dropped or the process dies, it removes everything.
#![allow(
    dead_code,
    unused_imports,
    reason = "each test target uses another part of the harness"
)]
#![allow(unreachable_pub, reason = "a module of tests has no outside")]

mod audit;
mod cluster;
mod node;
#[path = "../not_run.rs"]
pub mod not_run;
mod pods;
mod program;
mod shared;
mod supervisor;
mod users;

pub use audit::{Audit, Entry};
pub use cluster::{Builder, Cluster};
pub use node::Node;
pub use pods::pod;
pub use program::{build_go, helm, prometheus, prometheus_operator, registry, target};
pub use shared::lock;
pub use users::rule;

/// The image on every node: a static busybox whose default command waits for SIGTERM.
pub const IMAGE: &str = "localhost/busybox:1";

/// The default Kubernetes version.
pub const VERSION: &str = "1.30.14";

/// The Kubernetes version of [`Cluster::structured`]: the latest.
pub const STRUCTURED_VERSION: &str = "1.37.2";

/// Timeout of all waits in tests. It only limits how long a failure takes. Kubelet may retry a pod only after 90 seconds, for instance if
/// the API server's node authorizer does not know yet that the pod's claim is on the node (seen on 1.30).
pub const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(180);
