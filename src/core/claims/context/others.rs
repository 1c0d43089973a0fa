//! Reports other drivers of a pod that do not answer: the pod waits for them, and no other component reports that.

use crate::api::resource::PodSchedulingContext;
use crate::core::claims::event::{Moment, ObjectKey, Regarding};
use crate::core::claims::state::{ControllerState, Work};

pub(super) const SILENT_DRIVER_REASON: &str = "OtherDriverSilent";

/// A claim of the pod that another driver allocates.
pub(super) struct Other {
    /// The name in `pod.spec.resourceClaims`.
    pub(super) entry: String,
    pub(super) class: String,
    pub(super) driver: String,
}

impl ControllerState {
    /// Tracks the answers that other drivers owe the scheduler, and reports each silent driver once. Returns whether one of the drivers
    /// still silent has been reported.
    pub(super) fn await_others(&mut self, key: &ObjectKey, others: &[Other], now: Moment) -> bool {
        let wait = self.settings.other_driver_wait;
        let Some(context) = self.contexts.get_mut(key) else {
            return false;
        };
        let object = context.object.clone();
        let silent: Vec<&Other> = others
            .iter()
            .filter(|other| !has_answered(&object, &other.entry))
            .collect();
        context
            .silent
            .retain(|driver, silence| silence.told || silent.iter().any(|other| other.driver == *driver));
        let mut due: Vec<&Other> = Vec::new();
        let mut next: Option<Moment> = None;
        let mut any_told = false;
        for other in silent {
            let silence = context.silent.entry(other.driver.clone()).or_insert(Silence {
                since: now,
                told: false,
            });
            let end = silence.since.after(wait);
            if silence.told {
                any_told = true;
                continue;
            }
            if end <= now {
                silence.told = true;
                any_told = true;
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
            let Other { entry, class, driver } = other;
            let message = format!(
                "the pod waits for driver \"{driver}\" of resource class \"{class}\" (claim \"{entry}\"): no answer for {} s; is its controller running?",
                wait.as_secs_f64()
            );
            let regarding = Regarding::Pod {
                key: key.clone(),
                uid: uid.clone(),
            };
            self.report(regarding, SILENT_DRIVER_REASON, message);
        }
        any_told
    }
}

/// Since when another driver has owed an answer, and whether that was reported.
#[derive(Clone, Copy, Debug)]
pub(super) struct Silence {
    since: Moment,
    told: bool,
}

/// Whether no further answer is due for an unallocated claim of another driver: it has an entry, and if a node is selected, the entry lists
/// that node.
fn has_answered(context: &PodSchedulingContext, pod_claim_name: &str) -> bool {
    let selected = &context.spec.selected_node;
    let mut entries = context.status.resource_claims.iter();
    entries.any(|entry| {
        entry.name == pod_claim_name && (selected.is_empty() || entry.unsuitable_nodes.contains(selected))
    })
}
