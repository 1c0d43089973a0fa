//! Other drivers of the pod: one that does not answer is named, since the pod waits for it and nobody else says so.

use crate::api::resource::PodSchedulingContext;
use crate::core::protocol::event::{Moment, ObjectKey, Regarding};
use crate::core::protocol::world::{Work, World};

/// A claim of the pod that is for another driver to allocate.
pub(super) struct Other {
    /// The entry of `pod.spec.resourceClaims`.
    pub(super) pod_claim_name: String,
    /// The claim's class.
    pub(super) class_name: String,
    /// The class's driver.
    pub(super) driver_name: String,
}

impl World {
    /// Takes note of what the scheduler has asked of other drivers, and tells the pod's user once of one that says nothing.
    pub(super) fn await_others(&mut self, key: &ObjectKey, others: &[Other], now: Moment) {
        let wait = self.settings.other_driver_wait;
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        let object = context.object.clone();
        let silent: Vec<&Other> = others
            .iter()
            .filter(|other| !has_answered(&object, &other.pod_claim_name))
            .collect();
        context.silent.retain(|driver, silence| {
            silence.told || silent.iter().any(|other| other.driver_name == *driver)
        });
        let mut due: Vec<&Other> = Vec::new();
        let mut next: Option<Moment> = None;
        for other in silent {
            let silence = context
                .silent
                .entry(other.driver_name.clone())
                .or_insert(Silence {
                    since: now,
                    told: false,
                });
            let end = silence.since.after(wait);
            if silence.told {
                continue;
            }
            if end <= now {
                silence.told = true;
                due.push(other);
            } else {
                next = Some(next.map_or(end, |next| next.min(end)));
            }
        }
        let uid = context.owner_uid().map(str::to_owned).unwrap_or_default();
        if let Some(moment) = next {
            self.wake_at(moment, Work::Context(key.clone()));
        }
        for other in due {
            let Other {
                pod_claim_name,
                class_name,
                driver_name,
            } = other;
            let message = format!(
                "the pod waits for driver \"{driver_name}\" of resource class \"{class_name}\" (claim \"{pod_claim_name}\"): no answer for {} s; is its controller running?",
                wait.as_secs_f64()
            );
            let regarding = Regarding::Pod {
                key: key.clone(),
                uid: uid.clone(),
            };
            self.report(regarding, "OtherDriverSilent", message);
        }
    }
}

/// How long another driver has said nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Silence {
    since: Moment,
    told: bool,
}

/// Whether nothing more is to be expected from the driver of a claim that is not allocated: it has an entry, and if a node is
/// selected, that node is in it.
fn has_answered(context: &PodSchedulingContext, pod_claim_name: &str) -> bool {
    let selected = &context.spec.selected_node;
    let mut entries = context.status.resource_claims.iter();
    entries.any(|entry| {
        entry.name == pod_claim_name && (selected.is_empty() || entry.unsuitable_nodes.contains(selected))
    })
}
