//! Real Kubernetes for the tests: a control plane of its own for each test, and nodes that run containers.
//!
//! ```ignore
//! mod harness;
//!
//! let cluster = harness::Cluster::builder().nodes(1).start().await?;
//! let kubeconfig = cluster.user("drayman-node", &[harness::rule(&["drayman.dev"], &["nodeinventories"], &["create"])]).await?;
//! let companion = cluster.node(0).command(env!("CARGO_BIN_EXE_drayman")).arg("node").spawn()?;
//! ```
//!
//! The work is done by the Go program in `tests/cluster`, whose standard input is tied to this process: when the
//! [`Cluster`] is dropped or the process dies, that program takes everything away. This is a typed client of it.
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

/// The image that every node has: a static busybox, whose default command waits and ends at once on SIGTERM.
pub const IMAGE: &str = "localhost/busybox:1";

/// The Kubernetes version of a cluster that asks for none.
pub const VERSION: &str = "1.30.14";

/// The Kubernetes version of [`Cluster::structured`]: the newest.
pub const STRUCTURED_VERSION: &str = "1.37.2";

/// How long anything may take that a test waits for. Generous: it only bounds how long a failure takes. kubelet tries a pod
/// again only after up to a minute and a half, for instance when the API server's node authorizer has not yet heard that the
/// pod's claim is the node's business (seen on 1.30).
pub const PATIENCE: std::time::Duration = std::time::Duration::from_secs(180);
