//! Decides which API for claims the cluster serves, although API servers may disagree and their answers change.
//!
//! During an upgrade or a configuration change, API servers answer differently. Offering claims that no user can create costs nothing;
//! withdrawing them too early leaves pods without their devices. So a single positive answer starts a mode, and several deviating answers
//! in a row end it.

use std::time::Duration;

use super::prepared_claims::{Entry, PreparedClaims};
use crate::core::discovery::device_events::DeviceEvent;

/// Deviating answers in a row before the mode ends. Each may come from another API server.
const DEVIATIONS: u32 = 3;
/// Pause before the next check after an unconfirmed deviating answer.
const DOUBT: Duration = Duration::from_secs(10);
/// First minor version of kubelet that prepares claims of `v1` by default. Earlier ones start a pod without its devices.
pub const FIRST_STRUCTURED_MINOR: u32 = 34;
/// Pause between checks while claims are not served. It bounds the delay after the API has been enabled, or kubelet upgraded.
const NOT_SERVED: Duration = Duration::from_secs(60);
/// Pause between checks while claims are served. Only a cluster upgrade changes the API.
const SERVED: Duration = Duration::from_secs(600);

/// The API for claims of a cluster, by the versions of `resource.k8s.io` that its API servers serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClaimsApi {
    /// Neither version: devices are offered as extended resources only.
    #[default]
    None,
    /// `v1alpha2` (Kubernetes 1.27 to 1.30): the controller allocates.
    Classic,
    /// `v1` (Kubernetes 1.34 and later): the scheduler allocates.
    Structured,
}

impl ClaimsApi {
    /// The API of a cluster that serves these versions of `resource.k8s.io`.
    pub fn of_versions<'a>(versions: impl IntoIterator<Item = &'a str>) -> Self {
        let mut api = Self::None;
        for version in versions {
            match version {
                "v1" => return Self::Structured,
                "v1alpha2" => api = Self::Classic,
                _ => {}
            }
        }
        api
    }

    /// The API by which claims were prepared. `None` if none is prepared, or if the devices of all are unknown.
    pub fn of_prepared(prepared_claims: &PreparedClaims) -> Option<Self> {
        let known = prepared_claims
            .entries()
            .values()
            .filter(|entry| !entry.devices.is_empty());
        let is_structured = known
            .map(Entry::is_structured)
            .reduce(|one, other| one || other)?;
        Some(if is_structured {
            Self::Structured
        } else {
            Self::Classic
        })
    }

    fn event(self, before: Self) -> Option<DeviceEvent> {
        let served = |version: &str| DeviceEvent {
            reason: "ClaimsServed",
            warning: false,
            note: format!(
                "the API server serves resource.k8s.io/{version} now; this node uses it for claims"
            ),
        };
        match self {
            _ if self == before => None,
            Self::Classic => Some(served("v1alpha2")),
            Self::Structured => Some(served("v1")),
            Self::None => Some(DeviceEvent {
                reason: "ClaimsNotServed",
                warning: true,
                note: format!(
                    "the API server no longer serves resource.k8s.io/{}: claims are not offered on this node, extended resources are",
                    match before {
                        Self::Structured => "v1",
                        Self::Classic | Self::None => {
                            "v1alpha2 (enable it with --runtime-config=resource.k8s.io/v1alpha2=true on every API server)"
                        }
                    }
                ),
            }),
        }
    }
}

/// The minor version by which features are chosen: that of the API server, or of this node's kubelet if that is older. During an upgrade
/// the scheduler may be older than the API server, but rarely older than a kubelet, which is upgraded last.
pub fn usable_minor(api_server: Option<u32>, kubelet: Option<u32>) -> Option<u32> {
    match api_server {
        Some(minor) => Some(kubelet.map_or(minor, |kubelet| minor.min(kubelet))),
        None => kubelet.filter(|kubelet| is_too_early(Some(*kubelet))),
    }
}

/// Whether a node of this minor version ([`usable_minor`]) cannot prepare claims of `v1`.
pub fn is_too_early(minor: Option<u32>) -> bool {
    minor.is_some_and(|minor| minor < FIRST_STRUCTURED_MINOR)
}

/// The minor version in text such as `v1.34.2+k3s1`.
pub fn minor_of(version: &str) -> Option<u32> {
    let minor = version.strip_prefix("v1.")?;
    let end = minor.find(|c: char| !c.is_ascii_digit()).unwrap_or(minor.len());
    minor[..end].parse().ok()
}

/// The current knowledge about the API for claims.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Discovery {
    served: Option<ClaimsApi>,
    /// The minor version of API servers that serve `v1`.
    minor: Option<u32>,
    /// Answers in a row with another API, while claims are served.
    deviations: u32,
    /// Answers in a row with another minor version, while claims are served.
    minor_deviations: u32,
}

impl Discovery {
    /// Starts with the stored answer of an earlier process, or `None` if there is none.
    pub fn new(served: Option<ClaimsApi>, minor: Option<u32>) -> Self {
        Self {
            served,
            minor,
            ..Self::default()
        }
    }

    /// The API that is served; `None` until an API server has answered.
    pub fn served(&self) -> Option<ClaimsApi> {
        self.served
    }

    /// The minor version of the API servers; `None` until one that serves `v1` has answered.
    pub fn minor(&self) -> Option<u32> {
        self.minor
    }

    /// Records an answer: the API, and the minor version with `v1`. Returns an event if the decision changes.
    pub fn answered(&mut self, served: ClaimsApi, minor: Option<u32>) -> Option<DeviceEvent> {
        let offered = self.served.filter(|api| *api != ClaimsApi::None);
        let is_other_api = offered.is_some_and(|api| api != served);
        let minors = self.minor.zip(minor);
        let is_other_minor = offered == Some(served) && minors.is_some_and(|(known, minor)| known != minor);
        self.deviations = if is_other_api { self.deviations + 1 } else { 0 };
        self.minor_deviations = if is_other_minor {
            self.minor_deviations + 1
        } else {
            0
        };
        let is_unconfirmed = |deviations| (1..DEVIATIONS).contains(&deviations);
        if is_unconfirmed(self.deviations) || is_unconfirmed(self.minor_deviations) {
            return None;
        }
        (self.deviations, self.minor_deviations) = (0, 0);
        self.minor = minor.or(self.minor);
        let before = self.served.replace(served)?;
        served.event(before)
    }

    /// The pause before the next check. `usable` is the minor version by which features are chosen.
    pub fn pause(&self, usable: Option<u32>) -> Duration {
        match self.served {
            Some(ClaimsApi::None) | None => NOT_SERVED,
            Some(_) if self.deviations > 0 || self.minor_deviations > 0 => DOUBT,
            Some(ClaimsApi::Structured) if is_too_early(usable) => NOT_SERVED,
            Some(_) => SERVED,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::prepared_claims::{HeldDevice, Progress, Structured};
    use super::*;
    use crate::core::names::ClaimUid;

    #[test]
    fn prepared_claims_show_the_mode() {
        let of = |claims: &[&[HeldDevice]]| {
            let entry = |(number, devices): (usize, &&[HeldDevice])| {
                let uid = ClaimUid::parse(&format!("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a1{number}")).unwrap();
                let entry = Entry {
                    namespace: "default".into(),
                    name: "camera".into(),
                    boot_id: "boot".into(),
                    devices: devices.to_vec(),
                    progress: Progress::Started {
                        container_edits: None,
                    },
                };
                (uid, entry)
            };
            let entries: BTreeMap<_, _> = claims.iter().enumerate().map(entry).collect();
            ClaimsApi::of_prepared(&PreparedClaims::new("boot", entries))
        };
        let classic = [HeldDevice::named("x")];
        let structured = [HeldDevice {
            structured: Some(Structured::default()),
            ..HeldDevice::named("y")
        }];
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[&[]]), None, "nothing shows who allocated its devices");
        assert_eq!(of(&[&[], &classic]), Some(ClaimsApi::Classic));
        assert_eq!(of(&[&classic, &structured]), Some(ClaimsApi::Structured));
    }

    #[test]
    fn one_denial_of_several_api_servers_changes_nothing() {
        for api in [ClaimsApi::Classic, ClaimsApi::Structured] {
            let mut discovery = Discovery::new(Some(api), None);
            for _ in 0..10 {
                assert_eq!(discovery.answered(ClaimsApi::None, None), None);
                assert_eq!(discovery.pause(None), DOUBT);
                assert_eq!(discovery.answered(ClaimsApi::None, None), None);
                assert_eq!(discovery.answered(api, None), None);
                assert_eq!((discovery.served(), discovery.pause(None)), (Some(api), SERVED));
            }
        }
    }

    #[test]
    fn features_follow_the_minor_of_three_answers_in_a_row() {
        let mut api = Discovery::new(None, None);
        assert_eq!(api.answered(ClaimsApi::Structured, Some(35)), None);
        assert_eq!(api.minor(), Some(35), "the first answer counts");
        for _ in 0..10 {
            api.answered(ClaimsApi::Structured, Some(36));
            assert_eq!((api.minor(), api.pause(None)), (Some(35), DOUBT));
            api.answered(ClaimsApi::Structured, Some(36));
            api.answered(ClaimsApi::Structured, Some(35));
            assert_eq!((api.minor(), api.pause(None)), (Some(35), SERVED));
        }
        // Deviations of one sort do not confirm the other.
        for _ in 0..2 {
            api.answered(ClaimsApi::Structured, Some(36));
            api.answered(ClaimsApi::Structured, Some(36));
            assert_eq!(api.answered(ClaimsApi::None, None), None);
            assert_eq!(api.answered(ClaimsApi::None, None), None);
            assert_eq!(
                (api.served(), api.minor()),
                (Some(ClaimsApi::Structured), Some(35))
            );
        }
        for expected in [35, 35, 36] {
            assert_eq!(api.answered(ClaimsApi::Structured, Some(36)), None);
            assert_eq!(api.minor(), Some(expected));
        }
        api.answered(ClaimsApi::Structured, None);
        assert_eq!((api.minor(), api.pause(None)), (Some(36), SERVED));
    }

    #[test]
    fn an_older_kubelet_limits_the_features() {
        for (api_server, kubelet, usable) in [
            (Some(37), Some("v1.37.2"), Some(37)),
            (Some(36), Some("v1.35.4-eks-113cf36"), Some(35)),
            (Some(34), Some("v1.33.13+k3s1"), Some(33)),
            (Some(36), Some("v1.37.0-alpha.1"), Some(36)),
            (Some(36), Some("unknown"), Some(36)),
            (Some(36), Some("v1."), Some(36)),
            (Some(36), Some("v1.99999999999"), Some(36)),
            (Some(36), None, Some(36)),
            (None, Some("v1.37.2"), None),
            (None, Some("v1.33.13"), Some(33)),
        ] {
            assert_eq!(
                usable_minor(api_server, kubelet.and_then(minor_of)),
                usable,
                "{kubelet:?}"
            );
        }
    }

    #[test]
    fn a_kubelet_that_is_too_early_is_checked_each_minute() {
        let mut api = Discovery::default();
        api.answered(ClaimsApi::Structured, Some(36));
        assert!(is_too_early(Some(33)) && !is_too_early(Some(34)) && !is_too_early(None));
        assert_eq!((api.pause(Some(33)), api.pause(Some(34))), (NOT_SERVED, SERVED));
        api.answered(ClaimsApi::Structured, Some(37));
        assert_eq!(api.pause(Some(33)), DOUBT);
    }

    #[test]
    fn three_denials_in_a_row_count_and_are_reported_once() {
        let mut api = Discovery::new(Some(ClaimsApi::Structured), None);
        let told: Vec<_> = (0..5)
            .filter_map(|_| api.answered(ClaimsApi::None, None))
            .collect();
        assert_eq!(told.len(), 1);
        assert!(told[0].warning && told[0].reason == "ClaimsNotServed", "{told:?}");
        assert_eq!(
            (api.served(), api.pause(None)),
            (Some(ClaimsApi::None), NOT_SERVED)
        );
    }

    #[test]
    fn claims_enabled_later_are_served_at_once() {
        for served in [ClaimsApi::Classic, ClaimsApi::Structured] {
            let mut api = Discovery::default();
            assert_eq!(api.served(), None);
            assert_eq!(api.answered(ClaimsApi::None, None), None, "nothing has changed");
            assert_eq!(api.served(), Some(ClaimsApi::None));
            let told = api.answered(served, None).unwrap();
            assert!(!told.warning && told.reason == "ClaimsServed", "{told:?}");
            assert_eq!(api.served(), Some(served));
        }
    }

    #[test]
    fn the_mode_follows_the_served_versions() {
        for (versions, api) in [
            (&["v1"][..], ClaimsApi::Structured),
            (&["v1", "v1beta1"], ClaimsApi::Structured),
            (&["v1alpha2"], ClaimsApi::Classic),
            (&["v1alpha3", "v1beta1"], ClaimsApi::None),
            (&[], ClaimsApi::None),
        ] {
            assert_eq!(
                ClaimsApi::of_versions(versions.iter().copied()),
                api,
                "{versions:?}"
            );
        }
    }
}
