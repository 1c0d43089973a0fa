//! Selectors of several claims at once.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::FutureExt as _;

use super::*;
use crate::api::crd::{
    AttributeValue, DeviceClaimParametersSpec, DeviceClassParametersSpec, DeviceConstraint, DeviceSelector,
};
use crate::core::allocation::index;
use crate::core::allocation::inventory::Match;
use crate::core::allocation::tests::fixture::{self, DRIVER};

mod state;

/// A node with this number of devices of a kind, no two of them equal.
fn node(name: &str, kind: &str, devices: usize) -> (String, NodeInfo) {
    let names: Vec<String> = (0..devices).map(|number| format!("d{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut inventory = fixture::inventory(name, name, &names);
    for (number, device) in inventory.spec.devices.iter_mut().enumerate() {
        device.kind = kind.to_owned();
        let number = i64::try_from(number).unwrap();
        device
            .attributes
            .insert("d/number".into(), AttributeValue::int(number));
    }
    (name.to_owned(), NodeInfo::read(&inventory))
}

fn class(kind: &str, expression: &str) -> ClassParameters {
    let spec = DeviceClassParametersSpec {
        kind: kind.to_owned(),
        selectors: vec![DeviceSelector::cel(expression)],
        ..DeviceClassParametersSpec::default()
    };
    ClassParameters::check("class", Ok(spec)).unwrap()
}

/// Adds a class parameters object that contains the selector, so that it may be used.
fn write(driver: &HostDriver, name: &str, kind: &str, expression: &str) {
    let change = WatchUpdate::Set(name.to_owned(), Ok(class(kind, expression)));
    driver.shared.state().apply_classes(change);
}

async fn evaluate(driver: HostDriver, class: ClassParameters) -> Result<(), DriverError> {
    driver.shared.evaluate_all(class.kind(), class.selectors()).await
}

/// The number of evaluated devices.
fn results(driver: &HostDriver) -> usize {
    driver.shared.state().allocator.matches().len()
}

async fn until(met: impl Fn() -> bool) {
    while !met() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn an_expensive_selector_does_not_delay_other_claims() {
    const DEVICES: usize = 5_000;
    let driver = HostDriver::unwatched(DRIVER);
    let nodes = vec![node("large", "large", DEVICES), node("small", "small", 1)];
    driver.shared.inventories(WatchUpdate::All(nodes));
    // Some milliseconds per device: nearly the maximum cost of an expression.
    let dear = format!("[{}].all(a, a + a + a > 0)", vec!["1"; 400].join(","));
    write(&driver, "dear", "large", &dear);
    let dear = class("large", &dear);
    let claims: Vec<_> = (0..8)
        .map(|_| tokio::spawn(evaluate(driver.clone(), dear.clone())))
        .collect();
    until(|| results(&driver) > 0).await;

    write(&driver, "cheap", "small", "device.attributes['d'].number == 0");
    let cheap = class("small", "device.attributes['d'].number == 0");
    evaluate(driver.clone(), cheap.clone()).await.unwrap();
    let state = driver.shared.state();
    let expression = dear.selectors()[0].expression();
    let left = state.allocator.pending("large", expression).count();
    assert!(
        left > DEVICES / 2,
        "the expensive selector is not finished: {left} devices left"
    );
    let attributes = [(
        "d/number".into(),
        crate::core::allocation::inventory::Attribute::Int(0),
    )];
    let attributes = attributes.into_iter().collect();
    let expression = cheap.selectors()[0].expression();
    assert_eq!(
        state.allocator.matches().get(expression, &attributes),
        Some(Match::Yes)
    );
    drop(state);
    for claim in claims {
        claim.abort();
    }
}

#[tokio::test]
async fn only_new_devices_of_an_inventory_are_evaluated_in_advance() {
    let driver = HostDriver::unwatched(DRIVER);
    let mut changes = std::pin::pin!(driver.capacity_changes());
    let nodes = vec![node("a", "test", 3)];
    driver.shared.inventories(WatchUpdate::All(nodes));
    write(&driver, "class", "test", "device.attributes['d'].number > 1");
    let class = class("test", "device.attributes['d'].number > 1");
    evaluate(driver.clone(), class.clone()).await.unwrap();
    assert_eq!(results(&driver), 3);
    // Devices with equal attributes, and devices of another kind.
    let (name, same) = node("b", "test", 2);
    driver.shared.inventories(WatchUpdate::Set(name, same));
    let (name, other) = node("c", "other", 9);
    driver.shared.inventories(WatchUpdate::Set(name, other));
    driver.shared.evaluate_due();
    assert!(driver.shared.state().due().is_none());
    while changes.next().now_or_never().is_some() {}

    let (name, more) = node("a", "test", 5);
    driver.shared.inventories(WatchUpdate::Set(name, more));
    let new = changes.next().await.unwrap();
    assert_eq!((new.cause, new.pods), (CapacityCause::Inventory, Some(2)));
    driver.shared.evaluate_due();
    let evaluated = changes.next().await.unwrap();
    assert_eq!(
        (evaluated.cause, evaluated.pods),
        (CapacityCause::Inventory, Some(2)),
        "pods that were refused before the evaluation are woken"
    );
    assert_eq!(results(&driver), 5);
}

#[tokio::test]
async fn one_task_evaluates_the_changes_of_many_inventories() {
    let driver = HostDriver::unwatched(DRIVER);
    let mut changes = std::pin::pin!(driver.capacity_changes());
    let nodes = vec![node("a", "test", 3), node("b", "other", 3)];
    driver.shared.inventories(WatchUpdate::All(nodes));
    let held = "device.attributes['d'].number > 1";
    let other = "device.attributes['d'].number > 2";
    for (kind, expression) in [("test", held), ("other", other)] {
        write(&driver, kind, kind, expression);
        evaluate(driver.clone(), class(kind, expression)).await.unwrap();
    }
    assert_eq!(results(&driver), 6);
    while changes.next().now_or_never().is_some() {}

    let line = driver.shared.turns.line(&"".into(), &held.into()).await;
    let tasks = Arc::strong_count(&driver.shared);
    for number in 1..=100 {
        let (name, more) = node("a", "test", 3 + number);
        driver.shared.inventories(WatchUpdate::Set(name, more));
        driver.shared.evaluate_due();
        tokio::task::yield_now().await;
    }
    // Another expression becomes due while the task waits.
    let (name, more) = node("b", "other", 5);
    driver.shared.inventories(WatchUpdate::Set(name, more));
    driver.shared.evaluate_due();
    tokio::task::yield_now().await;
    assert_eq!(Arc::strong_count(&driver.shared), tasks + 1);
    while changes.next().now_or_never().is_some() {}
    drop(line);
    let evaluated = changes.next().await.unwrap();
    assert_eq!(evaluated.pods, Some(102));
    assert_eq!(results(&driver), 108);

    // The task has ended, and the next change starts another one.
    let (name, more) = node("a", "test", 104);
    driver.shared.inventories(WatchUpdate::Set(name, more));
    assert_eq!(changes.next().await.unwrap().pods, Some(1));
    driver.shared.evaluate_due();
    assert_eq!(changes.next().await.unwrap().pods, Some(1));
    assert_eq!(results(&driver), 109);
}

#[tokio::test]
async fn calls_with_known_selectors_let_other_tasks_run() {
    let driver = HostDriver::unwatched(DRIVER);
    write(&driver, "class", "test", "true");
    let class = class("test", "true");
    evaluate(driver.clone(), class.clone()).await.unwrap();
    let look_up = || driver.shared.evaluate_all(class.kind(), class.selectors());
    assert!(look_up().now_or_never().is_some(), "it has its result");
    let many = async {
        for _ in 0..LOOKUPS_MAX {
            look_up().await.unwrap();
        }
    };
    assert!(many.now_or_never().is_none());
}

#[tokio::test]
async fn claim_parameters_are_reported_for_their_namespace() {
    let driver = HostDriver::unwatched(DRIVER);
    let mut changes = std::pin::pin!(driver.capacity_changes());
    let mut next = || Some(changes.next().now_or_never()??.namespace);
    let key = |namespace: &str| (namespace.to_owned(), "p".to_owned());
    let parameters = || Ok(ClaimParameters::default());
    let set = |namespace: &str| WatchUpdate::Set(key(namespace), parameters());
    driver
        .shared
        .claims(WatchUpdate::All(vec![(key("a"), parameters())]));
    assert_eq!(next(), Some(None));
    driver.shared.claims(set("b"));
    assert_eq!(next(), Some(Some("b".to_owned())));
    driver.shared.claims(set("b"));
    driver.shared.claims(WatchUpdate::Gone(key("b")));
    assert_eq!(next(), None, "nothing that helps");
    let class = fixture::class("test");
    driver
        .shared
        .classes(WatchUpdate::Set("class".to_owned(), Ok(class)));
    assert_eq!(next(), Some(None));
}

/// The claims of one pod, each with one request per count, and with the constraint if given.
fn claims(pod: &str, number: usize, counts: &[u32], equal: Option<&str>) -> Vec<ClaimRequest<HostDriver>> {
    let class_parameters = fixture::class("test");
    let request = |(index, &count): (usize, &u32)| crate::api::crd::DeviceRequest {
        name: format!("r{index}"),
        count: Some(count),
        ..crate::api::crd::DeviceRequest::default()
    };
    let constraint = |attribute: &str| DeviceConstraint {
        match_attribute: attribute.to_owned(),
        ..DeviceConstraint::default()
    };
    let spec = DeviceClaimParametersSpec {
        requests: counts.iter().enumerate().map(request).collect(),
        constraints: equal.map(constraint).into_iter().collect(),
    };
    let claim_parameters = ClaimParameters::check("ns", "p", Ok(spec)).unwrap();
    let claim = |index| {
        let claim = fixture::claim(&format!("{pod}-{index}"), None);
        ClaimRequest::new(
            claim,
            ResourceClass::default(),
            class_parameters.clone(),
            DeviceRequests::new(&class_parameters, claim_parameters.clone()),
        )
    };
    (0..number).map(claim).collect()
}

/// Ten groups of six devices. If eleven claims each request four devices of one group, no count shows that they do not fit.
fn grouped(name: &str) -> (String, NodeInfo) {
    let names: Vec<String> = (0..60).map(|number| format!("d{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut inventory = fixture::inventory(name, name, &names);
    for (number, device) in inventory.spec.devices.iter_mut().enumerate() {
        device.kind = "test".to_owned();
        let group = AttributeValue::int(i64::try_from(number / 6).unwrap());
        device.attributes.insert("d/group".into(), group);
    }
    (name.to_owned(), NodeInfo::read(&inventory))
}

#[tokio::test]
async fn a_hard_search_leaves_the_thread_to_other_pods() {
    let driver = HostDriver::unwatched(DRIVER);
    let names: Vec<String> = (0..64).map(|number| format!("n{number}")).collect();
    let mut nodes: Vec<_> = names.iter().map(|name| grouped(name)).collect();
    nodes.push(node("easy", "test", 1));
    driver.shared.inventories(WatchUpdate::All(nodes));
    let hard = tokio::spawn({
        let (driver, names) = (driver.clone(), names.clone());
        async move {
            let claims = claims("hard", 11, &[4], Some("d/group"));
            driver.unsuitable_nodes(&Pod::default(), &claims, &names).await
        }
    });
    while driver.shared.searches.try_lock().is_ok() {
        assert!(!hard.is_finished(), "it was done in one piece");
        tokio::task::yield_now().await;
    }
    let easy = driver
        .allocate(&claims("easy", 1, &[1], None), Some("easy"))
        .await;
    assert!(easy.is_ok() && !hard.is_finished());
    let unsuitable = hard.await.unwrap().unwrap();
    let reason = &unsuitable[10]["n63"];
    assert!(
        reason.contains("steps on one node") && reason.contains("ask for fewer"),
        "{reason}"
    );
}

#[tokio::test]
async fn searches_of_a_crowded_namespace_do_not_delay_another() {
    const CROWD: usize = 20;
    let driver = HostDriver::unwatched(DRIVER);
    let log: Arc<Mutex<Vec<&str>>> = Arc::default();
    let search = |namespace: &'static str| {
        let (driver, log) = (driver.clone(), Arc::clone(&log));
        let mut claims = claims("p", 1, &[1], None);
        Arc::make_mut(&mut claims[0].claim).metadata.namespace = Some(namespace.to_owned());
        tokio::spawn(async move {
            let search = move || log.lock().unwrap().push(namespace);
            driver.search(&claims, search).await;
        })
    };
    let running = driver.shared.searches.lock().await;
    let mut searches: Vec<_> = (0..CROWD).map(|_| search("crowd")).collect();
    for _ in 0..CROWD {
        tokio::task::yield_now().await;
    }
    searches.push(search("small"));
    tokio::task::yield_now().await;
    drop(running);
    for search in searches {
        search.await.unwrap();
    }
    let log = log.lock().unwrap();
    assert_eq!(log.len(), CROWD + 1);
    assert_eq!(log[..2], ["crowd", "small"], "{log:?}");
}

#[tokio::test]
async fn many_calls_at_once_are_answered_one_at_a_time() {
    let driver = HostDriver::unwatched(DRIVER);
    let nodes = (0..64).map(|number| node(&format!("n{number}"), "test", 8));
    driver.shared.inventories(WatchUpdate::All(nodes.collect()));
    let calls: Vec<_> = (0..8)
        .map(|call| {
            let driver = driver.clone();
            let claims = claims(&format!("p{call}"), 1, &[9], None);
            tokio::spawn(async move { driver.allocate(&claims, None).await.unwrap_err() })
        })
        .collect();
    let answered = || calls.iter().filter(|call| call.is_finished()).count();
    while answered() < calls.len() {
        let before = answered();
        tokio::task::yield_now().await;
        assert!(answered() <= before + 1, "I/O and timers had no turn in between");
    }
}

#[tokio::test]
async fn two_searches_at_once_get_different_devices() {
    let driver = HostDriver::unwatched(DRIVER);
    driver
        .shared
        .inventories(WatchUpdate::All(vec![node("a", "test", 600)]));
    let (first, second) = (claims("p", 16, &[1; 16], None), claims("q", 16, &[1; 16], None));
    let mut quick = WorkBudget::new(QUICK_WORK_MAX);
    let requested = requested(&first);
    let decided = driver
        .shared
        .state()
        .allocator
        .allocate_within(&requested, Some("a"), &mut quick);
    assert_eq!(decided, None, "too much for the controller's thread");
    let (first, second) = tokio::join!(driver.allocate(&first, Some("a")), driver.allocate(&second, None));
    let answers = first.unwrap().into_iter().chain(second.unwrap());
    let mut devices = BTreeSet::new();
    for answer in answers {
        let record = index::read(DRIVER, "", &answer);
        for device in &record.state.grant().unwrap().devices {
            assert!(devices.insert(device.device.clone()), "{} twice", device.device);
        }
    }
    assert_eq!(devices.len(), 512);
    // The third pod finds too few devices, and holds none.
    let third = claims("r", 16, &[1; 16], None);
    for target in [Some("a"), None] {
        let error = driver.allocate(&third, target).await.unwrap_err();
        assert_eq!(error.reason, "ResourcesExhausted");
        assert!(error.claim.is_some_and(|uid| uid.starts_with("r-")));
    }
    assert_eq!(driver.shared.state().allocator.holdings().uids().count(), 32);
}
