//! The registration state of the kubelet gRPC APIs, summarized for users.

use std::collections::BTreeMap;

use crate::core::discovery::device_events::DeviceEvent;

/// Maximum number of APIs named in one message; the others are counted.
const NAMED_MAX: usize = 8;

/// The registration state of one API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiState {
    /// Not served yet, or not at the moment.
    Starting,
    /// Served; kubelet may not have registered it yet.
    Waiting,
    /// Kubelet has registered it.
    Registered,
    /// Kubelet rejected it; the companion retries.
    Rejected(String),
    /// Serving failed; the companion retries.
    Failed(String),
}

/// The APIs that are down, with the reason, until they are served again. The first is for claims, the others for extended resources.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApisDown(BTreeMap<String, String>);

impl ApisDown {
    /// Updates the set from the current states. An API that is only being retried stays down.
    pub fn update(&mut self, states: &[(String, ApiState)]) {
        self.0.retain(|api, _| states.iter().any(|(name, _)| name == api));
        for (api, state) in states {
            match state {
                ApiState::Registered => {
                    self.0.remove(api);
                }
                ApiState::Rejected(why) => {
                    self.0.insert(api.clone(), format!("kubelet refuses it: {why}"));
                }
                ApiState::Failed(why) => {
                    self.0.insert(api.clone(), why.clone());
                }
                ApiState::Starting | ApiState::Waiting => {}
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
                note: format!("not offered to kubelet and tried again, the others go on: {note}"),
            });
        }
        if !up.is_empty() {
            let note = listed(up.into_iter().map(|(api, _)| api));
            events.push(DeviceEvent {
                reason: "KubeletApiUp",
                warning: false,
                note: format!("offered to kubelet again, or no longer wanted: {note}"),
            });
        }
        events
    }
}

/// Summarizes the problems, worst kind first, or returns `None` if there are none. `Starting` means that an API is not served yet.
pub fn problems(states: &[(String, ApiState)]) -> Option<(&'static str, String)> {
    let of = |reason: &'static str, why: &dyn Fn(&str, &ApiState) -> Option<String>| {
        let texts: Vec<String> = states.iter().filter_map(|(api, state)| why(api, state)).collect();
        (!texts.is_empty()).then(|| (reason, listed(texts.into_iter())))
    };
    of("Rejected", &|api, state| match state {
        ApiState::Rejected(why) => Some(format!("kubelet refuses the API for {api}: {why}")),
        _ => None,
    })
    .or_else(|| {
        of("Failed", &|api, state| match state {
            ApiState::Failed(why) => Some(format!("the API for {api} is down and is tried again: {why}")),
            _ => None,
        })
    })
    .or_else(|| {
        of("Starting", &|api, state| {
            (*state == ApiState::Starting).then(|| format!("the API for {api} is not served yet"))
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

    fn states(of: &[(&str, ApiState)]) -> Vec<(String, ApiState)> {
        of.iter()
            .map(|(api, state)| ((*api).to_owned(), state.clone()))
            .collect()
    }

    #[test]
    fn an_api_that_fails_is_told_once_and_again_when_it_is_up() {
        let failed = ApiState::Failed("read-only file system".into());
        let mut down = ApisDown::default();
        let mut told = Vec::new();
        for state in [
            ApiState::Starting,
            failed.clone(),
            ApiState::Starting,
            failed.clone(),
            ApiState::Waiting,
            ApiState::Registered,
        ] {
            let before = down.clone();
            down.update(&states(&[("claims", ApiState::Registered), ("a.dev/x", state)]));
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
            .map(|number| (format!("a.dev/{number}"), ApiState::Failed("full".into())))
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
    fn the_worst_problem_is_said_with_all_that_have_it() {
        assert_eq!(problems(&states(&[("claims", ApiState::Waiting)])), None);
        let all = states(&[
            ("claims", ApiState::Starting),
            ("a.dev/x", ApiState::Failed("full".into())),
            ("a.dev/y", ApiState::Failed("no directory".into())),
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
