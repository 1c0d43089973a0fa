//! Named stories. The seeds find what nobody thought of; these keep what was thought of.

mod deletion;
mod every_fault;
mod halves;
mod kubelet_apis;
mod leaders;
mod life;
mod moments;
mod nodes;
mod scale;
mod several;
mod structured;
mod trouble;
mod waking;

use drayman::core::claims::ObjectKey;

use crate::driver::{DRIVER, OTHER_DRIVER};
use crate::stage::{Action, Stage};
use crate::users::Use;

/// A cluster in which nothing goes wrong, with a controller that is ready.
fn calm(nodes: &[(&str, usize)]) -> Stage {
    let mut stage = Stage::new(7);
    stage.verbose = std::env::var("VERBOSE").is_ok();
    stage.record = true;
    stage.patient_scheduler = true;
    for (node, count) in nodes {
        stage.set_devices(node, *count);
    }
    stage.set_class("gpu", DRIVER);
    stage.set_class("other", OTHER_DRIVER);
    stage.set_parameters("pair", 2, true, false);
    stage.set_parameters("shared", 1, true, true);
    stage.after(0, Action::Start);
    stage.run_until("the controller is ready", |stage| {
        stage
            .process
            .as_ref()
            .is_some_and(|process| process.world.is_ready())
    });
    stage.run_for(crate::stage::SECOND);
    stage.command_log.clear();
    stage
}

fn key(name: &str) -> ObjectKey {
    ObjectKey::new("default", name)
}

fn is_bound(stage: &Stage, name: &str) -> bool {
    let pod = stage.store.pods.get(&key(name));
    pod.is_some_and(|pod| pod.spec.node_name.is_some())
}

/// Makes a pod with one claim from a template and waits until it is bound.
fn bound_pod(stage: &mut Stage, name: &str) {
    stage.create_pod(&key(name), &[Use::Template("gpu")], None);
    until_bound(stage, name);
}

fn until_bound(stage: &mut Stage, name: &str) {
    let text = format!("{name} is bound");
    stage.run_until(&text, |stage| is_bound(stage, name));
}

/// The pod's containers have ended.
fn end_pod(stage: &mut Stage, name: &str) {
    stage
        .store
        .update_pod(&key(name), |pod| pod.status.phase = Some("Succeeded".to_owned()));
}

/// All promises are kept to the end.
fn expect_well(mut stage: Stage) -> Stage {
    if stage.violation.is_none() {
        stage.conclude();
    }
    assert_eq!(stage.violation, None);
    stage
}

/// The names of generated claims end in a number; the stories do not care.
fn plain(log: &[String]) -> Vec<String> {
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
