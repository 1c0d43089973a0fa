//! End-to-end tests on real Kubernetes: the programs run as released, each as its own user with exactly its rights.
//!
//! Most tests start their own cluster: a control plane, with nodes that run containers if the test needs kubelet (requires root).

#[path = "../support/harness/mod.rs"]
mod harness;
#[path = "../integration/discovery/host.rs"]
#[allow(
    dead_code,
    clippy::unwrap_used,
    clippy::panic,
    reason = "shared with another target, which uses more of it and may panic"
)]
mod host;
#[path = "../docs/page.rs"]
mod page;
#[path = "../../examples/sensors.rs"]
#[allow(dead_code, reason = "its main is called by one test")]
mod sensors;
#[path = "../docs/shell.rs"]
mod shell;

mod apiserver_failover;
mod apiserver_outage;
mod apiserver_refusals;
mod chart;
mod cluster_removal;
mod cluster_smoke;
mod cluster_upgrade;
mod commands;
mod controller;
mod crash_during_call;
mod deleted_objects;
mod device_removal;
mod devices;
mod docs;
mod doctor;
mod examples;
mod hostile_objects;
mod interrupted_calls;
mod inventory_limits;
mod kubelet_faults;
mod kubelet_plugin;
mod kubelet_types;
mod leader_election;
mod leader_takeover;
mod monitoring;
mod namespace_user;
mod network_driver;
mod newer_kubelets;
#[cfg(feature = "testcluster")]
mod parity;
mod pods;
mod reboot;
mod round_trip;
mod selectors;
mod setup;
mod stored_claims;
mod structured;
mod upgrade;

use harness::not_run;
