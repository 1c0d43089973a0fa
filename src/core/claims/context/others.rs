//! Other drivers of the pod: one that does not answer is named, since the pod waits for it and nobody else says so.

use crate::api::resource::PodSchedulingContext;
use crate::core::claims::event::{Moment, ObjectKey, Regarding};
use crate::core::claims::world::{Work, World};

/// The reason of the report on a driver that says nothing.
pub(super) const SILENT_DRIVER_REASON: &str = "OtherDriverSilent";

/// A claim of the pod that is for another driver to allocate.
pub(super) struct Other {
    /// The entry of `pod.spec.resourceClaims`.
    pub(super) entry: String,
    /// The claim's class.
    pub(super) class: String,
    /// The class's driver.
    pub(super) driver: String,
}

impl World {
    /// Takes note of what the scheduler has asked of other drivers, and tells the pod's user once of one that says nothing. The
    /// answer is whether there is one that the user was told of.
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
