//! Decides whether the cluster serves `resource.k8s.io/v1alpha2`, although API servers may disagree and their answers change.
//!
//! During an upgrade or a configuration change, API servers answer differently. Offering the claims API without any claims costs nothing;
//! withdrawing it too early leaves pods without their devices. So a single positive answer starts it, and several negative answers in a row
//! stop it.

use std::time::Duration;

use crate::core::discovery::events::DeviceEvent;

/// Negative answers in a row before claims are no longer served. Each may come from another API server.
const DENIALS: u32 = 3;
/// Pause before the next check after an unconfirmed negative answer.
const DOUBT: Duration = Duration::from_secs(10);
/// Pause between checks while claims are not served. It bounds the delay after the API has been enabled.
const NOT_SERVED: Duration = Duration::from_secs(60);
/// Pause between checks while claims are served. Only a cluster upgrade disables the API.
const SERVED: Duration = Duration::from_secs(600);

/// The current knowledge about the claims API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClaimsApi {
    served: Option<bool>,
    /// Negative answers in a row while claims are served.
    denials: u32,
}

impl ClaimsApi {
    /// Starts with the stored answer of an earlier process, or `None` if there is none.
    pub fn new(served: Option<bool>) -> Self {
        Self { served, denials: 0 }
    }

    /// Whether claims are served; `None` until an API server has answered.
    pub fn served(&self) -> Option<bool> {
        self.served
    }

    /// Records an answer. Returns an event if the decision changes.
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

    /// The pause before the next check.
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
