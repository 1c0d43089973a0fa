//! Named scenarios. Seeds find unexpected cases; scenarios keep the known ones.

mod crashes;
mod deletion;
mod every_fault;
mod kubelet_apis;
mod leaders;
mod lifecycle;
mod nodes;
mod partial_allocations;
mod persistent_faults;
mod scale;
mod several;
mod structured;
mod wake_ups;

use drayman::core::claims::ObjectKey;

use crate::cluster::{Action, Cluster};
use crate::driver::{DRIVER, OTHER_DRIVER};
use crate::users::Use;

/// A cluster without faults and with a ready controller.
fn healthy_cluster(nodes: &[(&str, usize)]) -> Cluster {
    let mut cluster = Cluster::new(7);
    cluster.verbose = std::env::var("VERBOSE").is_ok();
    cluster.record = true;
    cluster.slow_scheduler = true;
    for (node, count) in nodes {
        cluster.set_devices(node, *count);
    }
    cluster.set_class("gpu", DRIVER);
    cluster.set_class("other", OTHER_DRIVER);
    cluster.set_parameters("pair", 2, true, false);
    cluster.set_parameters("shared", 1, true, true);
    cluster.after(0, Action::Start);
    cluster.run_until("the controller is ready", |cluster| {
        cluster
            .process
            .as_ref()
            .is_some_and(|process| process.state.is_ready())
    });
    cluster.run_for(crate::cluster::SECOND);
    cluster.command_log.clear();
    cluster
}

fn key(name: &str) -> ObjectKey {
    ObjectKey::new("default", name)
}

fn is_bound(cluster: &Cluster, name: &str) -> bool {
    let pod = cluster.store.pods.get(&key(name));
    pod.is_some_and(|pod| pod.spec.node_name.is_some())
}

/// Creates a pod with one template claim and waits until it is bound.
fn bound_pod(cluster: &mut Cluster, name: &str) {
    cluster.create_pod(&key(name), &[Use::Template("gpu")], None);
    until_bound(cluster, name);
}

fn until_bound(cluster: &mut Cluster, name: &str) {
    let text = format!("{name} is bound");
    cluster.run_until(&text, |cluster| is_bound(cluster, name));
}

fn is_allocated(cluster: &Cluster, name: &str) -> bool {
    let claim = cluster.claim(name);
    claim.is_some_and(|claim| claim.status.allocation.is_some())
}

fn until_allocated(cluster: &mut Cluster, name: &str) {
    let text = format!("claim {name} is allocated");
    cluster.run_until(&text, |cluster| is_allocated(cluster, name));
}

/// Waits until the controller has been killed or paused.
fn until_stopped(cluster: &mut Cluster) {
    cluster.run_until("the controller is stopped", |cluster| cluster.process.is_none());
}

/// Waits until a paused leader has written its allocation.
fn until_late_write(cluster: &mut Cluster) {
    cluster.run_until("the old leader has written", |cluster| {
        !cluster.late_allocations.is_empty()
    });
}

/// Waits until the last command of the controller begins so.
fn until_last(cluster: &mut Cluster, what: &str, start: &str) {
    cluster.run_until(what, |cluster| {
        let last = cluster.command_log.last();
        last.is_some_and(|line| line.starts_with(start))
    });
}

fn reasons(cluster: &Cluster) -> Vec<&str> {
    let reports = cluster.reports.iter();
    reports.map(|report| report.reason).collect()
}

fn messages(cluster: &Cluster) -> Vec<&str> {
    let reports = cluster.reports.iter();
    reports.map(|report| report.message.as_str()).collect()
}

/// Completes a pod.
fn end_pod(cluster: &mut Cluster, name: &str) {
    cluster
        .store
        .update_pod(&key(name), |pod| pod.status.phase = Some("Succeeded".to_owned()));
}

/// Checks all invariants to the end.
fn expect_no_violation(mut cluster: Cluster) -> Cluster {
    if cluster.violation.is_none() {
        cluster.conclude();
    }
    assert_eq!(cluster.violation, None);
    cluster
}

/// Removes the random suffix of template claim names.
fn without_suffixes(log: &[String]) -> Vec<String> {
    log.iter()
        .map(|line| {
            let words = line.split(' ').map(|word| {
                let names = word.split(',').map(|name| match name.rsplit_once('-') {
                    Some((front, number))
                        if number.len() == 5 && number.bytes().all(|byte| byte.is_ascii_digit()) =>
                    {
                        front.to_owned()
                    }
                    _ => name.to_owned(),
                });
                names.collect::<Vec<_>>().join(",")
            });
            words.collect::<Vec<_>>().join(" ")
        })
        .collect()
}
