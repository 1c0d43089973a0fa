//! Tests of the parameter caches and the selectors in use.

use std::time::Duration;

use super::super::*;
use crate::api::crd::{
    DeviceClaimParametersSpec, DeviceClassParametersSpec, DeviceRequest, GROUP, REQUESTS_MAX, SELECTORS_MAX,
};
use crate::api::resource::{ResourceClaimParametersReference, ResourceClassParametersReference};
use crate::core::allocation::inventory::Match;
use crate::core::allocation::tests::fixture;
use crate::driver::DriverErrorKind;

impl<K: Ord, V: PartialEq> ObjectCache<K, V> {
    fn apply(&mut self, change: WatchUpdate<K, Result<V, ParametersError>>) -> usize {
        self.apply_with(change, |_, _| ())
    }
}

fn class() -> ResourceClass {
    let reference = ResourceClassParametersReference {
        api_group: Some(GROUP.into()),
        kind: CLASS_PARAMETERS_KIND.into(),
        name: "p".into(),
        namespace: None,
    };
    ResourceClass {
        parameters_ref: Some(reference),
        ..ResourceClass::default()
    }
}

fn claim() -> ResourceClaim {
    let mut claim = fixture::claim("u", None);
    claim.spec.parameters_ref = Some(ResourceClaimParametersReference {
        api_group: Some(GROUP.into()),
        kind: CLAIM_PARAMETERS_KIND.into(),
        name: "p".into(),
    });
    claim
}

fn spec(kind: &str) -> DeviceClassParametersSpec {
    DeviceClassParametersSpec {
        kind: kind.into(),
        ..DeviceClassParametersSpec::default()
    }
}

/// Adds a class with these selectors.
fn write(state: &mut HostState, name: &str, expressions: &[&str]) {
    let mut with = spec("test");
    let selector = |expression: &&str| crate::api::crd::DeviceSelector::cel(*expression);
    with.selectors = expressions.iter().map(selector).collect();
    state.apply_classes(WatchUpdate::Set(
        name.into(),
        ClassParameters::check(name, Ok(with)),
    ));
}

#[test]
fn expressions_in_use_are_bounded_per_namespace_and_in_total() {
    let mut state = HostState::new(fixture::DRIVER);
    // An object of a namespace: 16 requests with 16 selectors each.
    let object = |from: usize| {
        let selector = |number: usize| crate::api::crd::DeviceSelector::cel(format!("{number} > 0"));
        let request = |place: usize| DeviceRequest {
            name: format!("r{place}"),
            selectors: (0..SELECTORS_MAX)
                .map(|number| selector(from + place * SELECTORS_MAX + number))
                .collect(),
            ..DeviceRequest::default()
        };
        DeviceClaimParametersSpec {
            requests: (0..REQUESTS_MAX).map(request).collect(),
            constraints: Vec::new(),
        }
    };
    let use_all = |state: &mut HostState, namespace: &str, name: &str, from: usize| {
        let key = (namespace.to_owned(), name.to_owned());
        let parameters = ClaimParameters::check(namespace, name, Ok(object(from))).unwrap();
        state.apply_claims(WatchUpdate::Set(key, Ok(parameters.clone())));
        parameters
            .selectors()
            .map(|selector| state.expressions.request(selector))
            .collect::<Result<Vec<()>, _>>()
    };
    assert!(use_all(&mut state, "n0", "p", 0).is_ok());
    let error = use_all(&mut state, "n0", "q", 1).unwrap_err();
    assert_eq!(error.reason, "TooManySelectors");
    assert_eq!(
        error.message,
        "DeviceClaimParameters n0/q: selector 16 of request r15 is beyond the limit of 256 different expressions in \
         use in namespace n0; write the same expression in several objects, or delete DeviceClaimParameters that no \
         claim uses"
    );
    for number in 1..8 {
        assert!(use_all(&mut state, &format!("n{number}"), "p", number * 1000).is_ok());
    }
    let error = use_all(&mut state, "n8", "p", 9000).unwrap_err();
    assert!(error.message.contains("the limit of 2048"), "{}", error.message);
    // Each deletion makes room, and a class is not rejected.
    write(&mut state, "class", &["true"]);
    let class = state.classes.get(&"class".to_owned(), String::new).unwrap();
    assert!(state.expressions.request(&class.selectors()[0]).is_ok());
    state.apply_claims(WatchUpdate::Gone(("n1".into(), "p".into())));
    assert!(use_all(&mut state, "n8", "p", 9000).is_ok());
}

#[test]
fn missing_parameters_are_reported_once_the_watch_is_synced() {
    let mut state = HostState::new(fixture::DRIVER);
    let error = state.class_parameters(&class()).unwrap_err();
    assert_eq!((error.kind, error.reason), (DriverErrorKind::Retry, "NotSynced"));
    state.classes.apply(WatchUpdate::All(vec![]));
    state.claims.apply(WatchUpdate::All(vec![]));
    let error = state.class_parameters(&class()).unwrap_err();
    assert_eq!(
        (error.kind, error.reason),
        (DriverErrorKind::Invalid, "ParametersNotFound")
    );
    assert_eq!(error.message, "DeviceClassParameters p does not exist; create it");
    let error = state
        .claim_parameters(&claim(), &fixture::class("test"))
        .unwrap_err();
    assert_eq!(
        error.message,
        "DeviceClaimParameters ns/p does not exist; create it"
    );
}

#[test]
fn an_unreadable_object_does_not_end_the_watch() {
    let mut state = HostState::new(fixture::DRIVER);
    let mut see = |spec| {
        let parameters = ClassParameters::check("p", spec);
        state.classes.apply(WatchUpdate::Set("p".into(), parameters));
        state.class_parameters(&class())
    };
    assert_eq!(
        see(Err("unknown field `knid`".into())).unwrap_err().message,
        "DeviceClassParameters p cannot be read: unknown field `knid`; correct it"
    );
    assert_eq!(
        see(Ok(spec("Not A Label"))).unwrap_err().reason,
        "ParametersInvalid"
    );
    assert_eq!(see(Ok(spec("test"))).unwrap().kind(), "test");
}

#[test]
fn a_claim_uses_the_parameters_of_its_own_namespace() {
    let mut state = HostState::new(fixture::DRIVER);
    let entry = |namespace: &str, count| {
        let spec = DeviceClaimParametersSpec {
            requests: vec![DeviceRequest {
                name: "r".into(),
                count: Some(count),
                ..DeviceRequest::default()
            }],
            constraints: Vec::new(),
        };
        let key = (namespace.to_owned(), "p".to_owned());
        (key, ClaimParameters::check(namespace, "p", Ok(spec)))
    };
    state
        .claims
        .apply(WatchUpdate::All(vec![entry("another", 1), entry("ns", 3)]));
    assert_eq!(
        state
            .claim_parameters(&claim(), &fixture::class("test"))
            .unwrap()
            .total(),
        3
    );
    let plain = fixture::claim("u", None);
    assert_eq!(
        state
            .claim_parameters(&plain, &fixture::class("test"))
            .unwrap()
            .total(),
        1
    );
}

#[test]
fn only_new_and_changed_objects_are_counted() {
    let mut cache: ObjectCache<String, u8> = ObjectCache::default();
    assert_eq!(
        cache.apply(WatchUpdate::All(vec![("a".into(), Ok(1)), ("b".into(), Ok(1))])),
        2
    );
    assert_eq!(cache.apply(WatchUpdate::Set("a".into(), Ok(1))), 0);
    assert_eq!(cache.apply(WatchUpdate::Set("a".into(), Ok(2))), 1);
    assert_eq!(cache.apply(WatchUpdate::Gone("b".into())), 0);
    assert_eq!(
        cache.apply(WatchUpdate::All(vec![("a".into(), Ok(2)), ("b".into(), Ok(1))])),
        1
    );
}

#[test]
fn a_selector_is_evaluated_once_and_dropped_with_its_object() {
    let now = Instant::now();
    let mut state = HostState::new(fixture::DRIVER);
    let expression: Arc<str> = "true".into();
    write(&mut state, "p", &["true"]);
    state.apply_inventories(WatchUpdate::Set("a".into(), fixture::node("a", "1", &["d"])));
    let pending = state.pending("test", &expression, now).unwrap().unwrap();
    assert_eq!(pending.devices.len(), 1);
    let results = pending
        .devices
        .into_iter()
        .map(|attributes| (attributes, Match::Yes))
        .collect();
    assert_eq!(state.evaluated(&expression, Ok(results), now), 1);
    assert!(state.pending("test", &expression, now).unwrap().is_none());
    assert!(state.due().is_none());
    // A device with equal attributes needs no evaluation of its own.
    state.apply_inventories(WatchUpdate::Set("b".into(), fixture::node("b", "2", &["e"])));
    assert!(state.due().is_none());

    write(&mut state, "q", &["true", "false"]);
    state.apply_classes(WatchUpdate::Gone("p".into()));
    assert_eq!(state.allocator.matches().len(), 1);
    write(&mut state, "q", &["true"]);
    assert_eq!(state.allocator.matches().len(), 1);
    state.apply_classes(WatchUpdate::All(vec![]));
    assert_eq!(state.allocator.matches().len(), 0);
    assert!(state.expressions.is_empty() && state.kinds("true").is_empty());
}

#[test]
fn a_result_counts_even_if_the_device_does_not_match() {
    let now = Instant::now();
    let mut state = HostState::new(fixture::DRIVER);
    let expression: Arc<str> = "false".into();
    write(&mut state, "p", &["false"]);
    state.apply_inventories(WatchUpdate::Set("a".into(), fixture::node("a", "1", &["d"])));
    let pending = state.pending("test", &expression, now).unwrap().unwrap();
    let results = pending
        .devices
        .into_iter()
        .map(|attributes| (attributes, Match::No))
        .collect();
    // A request for all matching devices waits no longer for this one.
    assert_eq!(state.evaluated(&expression, Ok(results), now), 1);
}

#[test]
fn a_refused_selector_is_retried_only_after_a_change() {
    let now = Instant::now();
    let mut state = HostState::new(fixture::DRIVER);
    let expression: Arc<str> = "no".into();
    write(&mut state, "p", &["no"]);
    assert!(
        state.pending("test", &expression, now).unwrap().is_some(),
        "unknown, even without devices"
    );
    state.evaluated(&expression, Err(SelectorError::Wrong("nonsense".into())), now);
    assert_eq!(
        state.pending("test", &expression, now).unwrap_err(),
        SelectorError::Wrong("nonsense".into())
    );
    write(&mut state, "p", &["yes"]);
    let gone = state.pending("test", &expression, now).unwrap_err();
    assert_eq!(
        gone,
        SelectorError::Unfinished("no object contains it any more".into())
    );
    write(&mut state, "p", &["no"]);
    assert!(state.pending("test", &expression, now).unwrap().is_some());
}

#[test]
fn a_selector_that_timed_out_is_retried_with_backoff() {
    let start = Instant::now();
    let mut state = HostState::new(fixture::DRIVER);
    let expression: Arc<str> = "slow".into();
    write(&mut state, "p", &["slow"]);
    state.apply_inventories(WatchUpdate::Set("a".into(), fixture::node("a", "1", &["d"])));
    assert!(state.pending("test", &expression, start).unwrap().is_some());
    let slow = || Err(SelectorError::Unfinished("slow".into()));
    state.evaluated(&expression, slow(), start);
    let second = Duration::from_secs(1);
    assert_eq!(state.expressions.retry_at(&expression), Some(start + 5 * second));
    assert!(state.pending("test", &expression, start + 4 * second).is_err());
    assert!(
        state.due().is_none(),
        "another change of inventories does not bring it forward"
    );
    let later = start + 5 * second;
    let retry_at = state.pending("test", &expression, later).unwrap().unwrap();
    assert_eq!(retry_at.devices.len(), 1);
    assert_eq!(state.kinds(&expression), ["test"]);
    state.evaluated(&expression, slow(), later);
    assert_eq!(state.expressions.retry_at(&expression), Some(later + 10 * second));
    for _ in 0..20 {
        state.evaluated(&expression, slow(), later);
    }
    assert_eq!(
        state.expressions.retry_at(&expression),
        Some(later + 300 * second)
    );
    let pending = state
        .pending("test", &expression, later + 300 * second)
        .unwrap()
        .unwrap();
    let results = pending
        .devices
        .into_iter()
        .map(|attributes| (attributes, Match::Yes))
        .collect();
    assert_eq!(state.evaluated(&expression, Ok(results), later), 1);
    assert_eq!(
        (
            state.expressions.retry_at(&expression),
            state.pending("test", &expression, later).unwrap().is_none()
        ),
        (None, true)
    );
}
