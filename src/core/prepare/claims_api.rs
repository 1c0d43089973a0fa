//! Whether the cluster serves `resource.k8s.io/v1alpha2`, from answers of API servers that may differ and change.
//!
//! Several API servers need not agree: one that is upgraded or configured first answers differently from the others. To serve claims
//! that nobody asks for costs nothing, and to stop serving those that somebody asks for leaves pods without their devices. So one
//! answer is enough to begin, and several in a row are needed to stop.

use std::time::Duration;

use crate::core::discovery::events::DeviceEvent;

/// Answers in a row by which served claims are served no more. Each may come from another API server.
const DENIALS: u32 = 3;
/// The pause before the question is put again after a denial that is not believed yet.
const DOUBT: Duration = Duration::from_secs(10);
/// The same while claims are not served: that long may it take until claims work that were switched on.
const NOT_SERVED: Duration = Duration::from_secs(60);
/// The same while claims are served. Only an upgrade of the cluster ends that.
const SERVED: Duration = Duration::from_secs(600);

/// What is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClaimsApi {
    served: Option<bool>,
    /// Denials in a row, while claims are served.
    denials: u32,
}

impl ClaimsApi {
    /// What an earlier process was told; `None` if nobody was.
    pub fn new(served: Option<bool>) -> Self {
        Self { served, denials: 0 }
    }

    /// Whether claims are served; `None` while no API server has answered.
    pub fn served(&self) -> Option<bool> {
        self.served
    }

    /// Takes an answer. A change of what was known is an event.
    pub fn answered(&mut self, served: bool) -> Option<DeviceEvent> {
        if self.served == Some(true) && !served {
            self.denials = self.denials.saturating_add(1);
            if self.denials < DENIALS {
                return None;
            }
        }
        self.denials = 0;
        let before = self.served.replace(served);
        match (before, served) {
            (Some(false), true) => Some(DeviceEvent {
                reason: "ClaimsServed",
                warning: false,
                note: "the API server serves resource.k8s.io/v1alpha2 now: claims are offered on this node".to_owned(),
            }),
            (Some(true), false) => Some(DeviceEvent {
                reason: "ClaimsNotServed",
                warning: true,
                note: "the API server no longer serves resource.k8s.io/v1alpha2: claims are not offered on this node, extended resources are; \
                       switch the API on with --runtime-config=resource.k8s.io/v1alpha2=true on every API server"
                    .to_owned(),
            }),
            _ => None,
        }
    }

    /// The pause before the question is put again.
    pub fn pause(&self) -> Duration {
        match self.served {
            Some(true) if self.denials > 0 => DOUBT,
            Some(true) => SERVED,
            Some(false) | None => NOT_SERVED,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_denial_of_several_api_servers_changes_nothing() {
        let mut api = ClaimsApi::new(Some(true));
        for _ in 0..10 {
            assert_eq!(api.answered(false), None);
            assert_eq!(api.pause(), DOUBT);
            assert_eq!(api.answered(false), None);
            assert_eq!(api.answered(true), None);
            assert_eq!((api.served(), api.pause()), (Some(true), SERVED));
        }
    }

    #[test]
    fn three_denials_in_a_row_are_believed_and_told_once() {
        let mut api = ClaimsApi::new(Some(true));
        let told: Vec<_> = (0..5).filter_map(|_| api.answered(false)).collect();
        assert_eq!(told.len(), 1);
        assert!(told[0].warning && told[0].reason == "ClaimsNotServed", "{told:?}");
        assert_eq!((api.served(), api.pause()), (Some(false), NOT_SERVED));
    }

    #[test]
    fn claims_that_are_switched_on_later_are_served_at_once() {
        let mut api = ClaimsApi::default();
        assert_eq!(api.served(), None);
        assert_eq!(api.answered(false), None, "nothing has changed");
        assert_eq!(api.served(), Some(false));
        let told = api.answered(true).unwrap();
        assert!(!told.warning && told.reason == "ClaimsServed", "{told:?}");
        assert_eq!(api.served(), Some(true));
    }
}
