//! The registration state of the kubelet gRPC APIs, summarized for users.

use std::collections::BTreeMap;

use crate::core::discovery::device_events::DeviceEvent;

/// Maximum number of APIs named in one message; the others are counted.
const NAMED_MAX: usize = 8;

/// Registration state of an endpoint, as last reported by kubelet. Kubelet does not announce that it stops.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum KubeletApiState {
    /// Not serving yet.
    #[default]
    Starting,
    /// Serving; kubelet has not registered this socket yet.
    Waiting,
    /// Kubelet has registered it.
    Registered,
    /// Kubelet rejected the registration. It is retried with increasing delay.
    Rejected {
        /// Kubelet's error message.
        message: String,
    },
    /// The endpoint cannot be served. It is retried with increasing delay.
    Failed {
        /// The cause.
        message: String,
    },
    /// The endpoint has shut down.
    Closed,
}

/// The APIs that are down, with the reason, until they are served again. The first is for claims, the others for extended resources.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApisDown(BTreeMap<String, String>);

impl ApisDown {
    /// Updates the set from the current states. An API that is only being retried stays down.
    pub fn update(&mut self, states: &[(String, KubeletApiState)]) {
        self.0.retain(|api, _| states.iter().any(|(name, _)| name == api));
        for (api, state) in states {
            match state {
                KubeletApiState::Registered => {
                    self.0.remove(api);
                }
                KubeletApiState::Rejected { message } => {
                    self.0
                        .insert(api.clone(), format!("kubelet refuses it: {message}"));
                }
                KubeletApiState::Failed { message } => {
                    self.0.insert(api.clone(), message.clone());
                }
                KubeletApiState::Starting | KubeletApiState::Waiting | KubeletApiState::Closed => {}
            }
        }
    }

    /// The events for changes since the last report: at most two, regardless of the number of APIs.
    pub fn events_since(&self, reported: &Self) -> Vec<DeviceEvent> {
        let news = |one: &Self, other: &Self, is_news: fn(Option<&String>, &String) -> bool| {
            let news = one.0.iter().filter(|(api, why)| is_news(other.0.get(*api), why));
            news.map(|(api, why)| (api.clone(), why.clone()))
                .collect::<Vec<_>>()
        };
        let down = news(self, reported, |before, why| before != Some(why));
        let up = news(reported, self, |after, _| after.is_none());
        let mut events = Vec::new();
        if !down.is_empty() {
            let note = listed(down.iter().map(|(api, why)| format!("{api}: {why}")));
            events.push(DeviceEvent {
                reason: "KubeletApiDown",
                warning: true,
                note: format!("not offered to kubelet and retried, the others continue: {note}"),
            });
        }
        if !up.is_empty() {
            let note = listed(up.into_iter().map(|(api, _)| api));
            events.push(DeviceEvent {
                reason: "KubeletApiUp",
                warning: false,
                note: format!("offered to kubelet again, or no longer configured: {note}"),
            });
        }
        events
    }
}

/// Summarizes the problems, worst kind first, or returns `None` if there are none. `Starting` means that an API is not served yet, or not at
/// the moment.
pub fn problems(states: &[(String, KubeletApiState)]) -> Option<(&'static str, String)> {
    let of = |reason: &'static str, why: &dyn Fn(&str, &KubeletApiState) -> Option<String>| {
        let texts: Vec<String> = states.iter().filter_map(|(api, state)| why(api, state)).collect();
        (!texts.is_empty()).then(|| (reason, listed(texts.into_iter())))
    };
    of("Rejected", &|api, state| match state {
        KubeletApiState::Rejected { message } => {
            Some(format!("kubelet refuses the API for {api}: {message}"))
        }
        _ => None,
    })
    .or_else(|| {
        of("Failed", &|api, state| match state {
            KubeletApiState::Failed { message } => {
                Some(format!("the API for {api} is down and is retried: {message}"))
            }
            _ => None,
        })
    })
    .or_else(|| {
        of("Starting", &|api, state| {
            matches!(state, KubeletApiState::Starting | KubeletApiState::Closed)
                .then(|| format!("the API for {api} is not served yet"))
        })
    })
}

fn listed(texts: impl ExactSizeIterator<Item = String>) -> String {
    let others = texts.len().saturating_sub(NAMED_MAX);
    let named: Vec<String> = texts.take(NAMED_MAX).collect();
    let named = named.join("; ");
    if others == 0 {
        named
    } else {
        format!("{named}; and {others} more")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(message: &str) -> KubeletApiState {
        KubeletApiState::Failed {
            message: message.to_owned(),
        }
    }

    fn states(of: &[(&str, KubeletApiState)]) -> Vec<(String, KubeletApiState)> {
        of.iter()
            .map(|(api, state)| ((*api).to_owned(), state.clone()))
            .collect()
    }

    #[test]
    fn an_api_failure_is_reported_once_and_its_end_once() {
        let failed = failed("read-only file system");
        let mut down = ApisDown::default();
        let mut told = Vec::new();
        for state in [
            KubeletApiState::Starting,
            failed.clone(),
            KubeletApiState::Starting,
            failed.clone(),
            KubeletApiState::Waiting,
            KubeletApiState::Registered,
        ] {
            let before = down.clone();
            down.update(&states(&[
                ("claims", KubeletApiState::Registered),
                ("a.dev/x", state),
            ]));
            told.extend(down.events_since(&before));
        }
        let reasons: Vec<_> = told.iter().map(|event| event.reason).collect();
        assert_eq!(reasons, ["KubeletApiDown", "KubeletApiUp"]);
        assert!(
            told[0].note.contains("a.dev/x: read-only file system") && !told[0].note.contains("claims"),
            "{told:?}"
        );
    }

    #[test]
    fn many_apis_that_fail_are_one_event() {
        let mut down = ApisDown::default();
        let all: Vec<_> = (0..100)
            .map(|number| (format!("a.dev/{number}"), failed("full")))
            .collect();
        down.update(&all);
        let told = down.events_since(&ApisDown::default());
        assert_eq!(told.len(), 1);
        assert!(told[0].note.ends_with("and 92 more"), "{told:?}");
        let before = down.clone();
        down.update(&[]);
        assert_eq!(down.events_since(&before).len(), 1);
    }

    #[test]
    fn the_worst_problem_is_reported_with_its_apis() {
        assert_eq!(problems(&states(&[("claims", KubeletApiState::Waiting)])), None);
        let all = states(&[
            ("claims", KubeletApiState::Starting),
            ("a.dev/x", failed("full")),
            ("a.dev/y", failed("no directory")),
        ]);
        let (reason, message) = problems(&all).unwrap();
        assert_eq!(reason, "Failed");
        assert!(
            message.contains("a.dev/x") && message.contains("no directory"),
            "{message}"
        );
        assert_eq!(problems(&all[..1]).map(|(reason, _)| reason), Some("Starting"));
    }
}
