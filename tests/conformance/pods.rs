//! Pods that the real scheduler places on fake nodes.

use std::time::Duration;

use drayman::driver::DriverError;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, ListParams};
use serde_json::json;

use crate::call::{Request, count};
use crate::fake_driver::{Action, FakeDriver};
use crate::fixture::{Fixture, is_allocated, names, rules, with_fixture};
use crate::objects::{ClaimSource, patch};

/// A second driver with the class `other-<fixture>`.
async fn other_driver(fixture: &Fixture) -> anyhow::Result<FakeDriver> {
    let driver = FakeDriver::new(&format!("other.{}", fixture.driver_name()));
    let fields = json!({ "driverName": format!("other.{}", fixture.driver_name()) });
    fixture
        .make_class(&format!("other-{}", fixture.name), fields)
        .await?;
    Ok(driver)
}

#[test]
fn two_drivers_with_two_claims_each_make_progress_in_a_pod() -> anyhow::Result<()> {
    with_fixture("two-drivers", async |fixture| {
        let other = other_driver(fixture).await?;
        let [a, b, c] = [
            fixture.node("a").await?,
            fixture.node("b").await?,
            fixture.node("c").await?,
        ];
        // Only b is suitable for both.
        fixture.driver.nodes([(a, 2), (b.clone(), 2)]);
        other.nodes([(b.clone(), 2), (c, 2)]);
        let first = fixture.start().await?;
        let second = fixture
            .start_as("-other", &other, &rules(), |builder| builder)
            .await?;
        let class = format!("other-{}", fixture.name);
        fixture.template("ours", &fixture.name).await?;
        fixture.template("theirs", &class).await?;
        let entries = [
            ("one", "ours"),
            ("two", "theirs"),
            ("three", "ours"),
            ("four", "theirs"),
        ];
        let entries = entries.map(|(entry, template)| (entry, ClaimSource::Template(template)));
        fixture.scheduled_pod("pod", &entries).await?;
        assert_eq!(fixture.wait_until_bound("pod").await?, b);
        for driver in [&fixture.driver, &other] {
            assert_eq!(driver.counts(), (2, 0), "no allocation was rolled back");
        }
        // Each driver evaluates its own claims only.
        let evaluated_other = |request: &Request| matches!(request, Request::Evaluate { claims, .. } if claims.iter().any(|requested| ["two", "four"].contains(&requested.entry.as_str())));
        assert_eq!(count(&fixture.driver.calls(), evaluated_other), 0);
        for controller in [&first, &second] {
            fixture.assert_none_failed(controller).await?;
        }
        fixture.remove_pod("pod").await?;
        fixture.driver.wait_for_counts((2, 2)).await?;
        other.wait_for_counts((2, 2)).await?;
        first.stop().await?;
        second.stop().await
    })
}

#[test]
fn a_silent_driver_is_named_once_and_an_active_one_is_not() -> anyhow::Result<()> {
    with_fixture("silent-driver", async |fixture| {
        let other = other_driver(fixture).await?;
        fixture.node("a").await?;
        let controller = fixture
            .start_as("", &fixture.driver, &rules(), |builder| {
                builder.other_driver_wait(Duration::from_secs(20))
            })
            .await?;
        fixture.template("ours", &fixture.name).await?;
        fixture
            .template("theirs", &format!("other-{}", fixture.name))
            .await?;
        let entries = [
            ("one", ClaimSource::Template("ours")),
            ("two", ClaimSource::Template("theirs")),
        ];
        fixture.scheduled_pod("pod", &entries).await?;
        let event = fixture
            .wait_for_event("pod", "OtherDriverSilent", "no answer for 20 s")
            .await?;
        let text = event.message.unwrap_or_default();
        for word in [
            format!("driver \"other.{}\"", fixture.driver_name()),
            format!("resource class \"other-{}\"", fixture.name),
            "claim \"two\"".to_owned(),
        ] {
            assert!(text.contains(&word), "{word} is not in {text}");
        }
        // When the other driver starts, the pod runs, and a second pod causes no report.
        let second = fixture
            .start_as("-other", &other, &rules(), |builder| {
                builder.other_driver_wait(Duration::from_secs(20))
            })
            .await?;
        fixture.wait_until_bound("pod").await?;
        fixture.scheduled_pod("next", &entries).await?;
        fixture.wait_until_bound("next").await?;
        assert_eq!(fixture.events("pod").await?.len(), 1);
        assert_eq!(fixture.events("next").await?, []);
        controller.stop().await?;
        second.stop().await
    })
}

#[test]
fn a_pod_whose_second_driver_lost_its_node_moves() -> anyhow::Result<()> {
    with_fixture("reallocation", async |fixture| {
        let other = other_driver(fixture).await?;
        let [a, b] = [fixture.node("a").await?, fixture.node("b").await?];
        // The other driver accepts every node in its evaluation, then fails on the first node it allocates on.
        let failed: std::sync::Arc<std::sync::Mutex<Option<String>>> = std::sync::Arc::default();
        let on = failed.clone();
        fixture.driver.rule(|_| Action::Proceed);
        let ours = fixture.driver.clone();
        other.rule(move |request| match request {
            Request::Allocate { node: Some(node), .. } => {
                let mut on = on.lock().expect("the lock is not poisoned");
                // Only after the first driver has allocated on that node.
                let held =
                    |call: &Request| matches!(call, Request::Allocate { node: Some(held), .. } if held == node);
                if on.is_none() && count(&ours.calls(), held) > 0 {
                    *on = Some(node.clone());
                }
                if on.as_ref().is_none_or(|on| on == node) {
                    return Action::Fail(DriverError::retry("Lost", "the device is taken"));
                }
                Action::Proceed
            }
            Request::Evaluate { claims, .. } => {
                let on = on.lock().expect("the lock is not poisoned").clone();
                on.map_or(Action::Proceed, |on| {
                    let entry: &'static str = if claims.is_empty() { "" } else { "theirs" };
                    Action::Unsuitable(vec![(entry, vec![on])])
                })
            }
            _ => Action::Proceed,
        });
        let first = fixture.start().await?;
        let second = fixture
            .start_as("-other", &other, &rules(), |builder| builder)
            .await?;
        fixture.claim("ours").await?;
        fixture
            .claim_of(
                "theirs",
                json!({ "resourceClassName": format!("other-{}", fixture.name) }),
            )
            .await?;
        fixture
            .scheduled_pod(
                "pod",
                &[
                    ("ours", ClaimSource::Claim("ours")),
                    ("theirs", ClaimSource::Claim("theirs")),
                ],
            )
            .await?;
        let node = fixture.wait_until_bound("pod").await?;
        let lost = failed.lock().expect("the lock is not poisoned").clone();
        assert!(
            lost.as_ref()
                .is_some_and(|lost| *lost != node && [&a, &b].contains(&lost)),
            "{lost:?} {node}"
        );
        assert_eq!(
            fixture.driver.counts(),
            (2, 1),
            "one allocation on the lost node, one on the other"
        );
        assert_eq!(other.counts(), (1, 0));
        first.stop().await?;
        second.stop().await
    })
}

#[test]
fn a_shareable_claim_serves_32_pods_with_one_allocation() -> anyhow::Result<()> {
    with_fixture("shared", async |fixture| {
        fixture.driver.shareable();
        let node = fixture.node("a").await?;
        fixture.driver.nodes([(node, 1)]);
        let controller = fixture.start().await?;
        fixture.claim("one").await?;
        let pods: Vec<String> = (0..33).map(|number| format!("pod-{number:02}")).collect();
        for name in &pods {
            fixture
                .scheduled_pod(name, &[("device", ClaimSource::Claim("one"))])
                .await?;
        }
        let claim = fixture
            .wait_for_claim("one", "full", |claim| claim.status.reserved_for.len() == 32)
            .await?;
        assert!(
            claim
                .status
                .allocation
                .is_some_and(|allocation| allocation.shareable)
        );
        let users: Vec<String> = claim
            .status
            .reserved_for
            .into_iter()
            .map(|user| user.name)
            .collect();
        for name in &users {
            fixture.wait_until_bound(name).await?;
        }
        assert_eq!(fixture.driver.counts(), (1, 0));
        // The remaining pod is served when another pod ends.
        let left: Vec<&String> = pods.iter().filter(|name| !users.contains(name)).collect();
        let [left] = left.as_slice() else {
            anyhow::bail!("{left:?}")
        };
        fixture.remove_pod(&users[0]).await?;
        fixture.wait_until_bound(left).await?;
        assert_eq!(fixture.driver.counts(), (1, 0));
        assert_eq!(count(&fixture.driver.calls(), Request::is_allocate), 1);
        controller.stop().await
    })
}

#[test]
fn an_immediate_claim_serves_successive_pods_unchanged() -> anyhow::Result<()> {
    with_fixture("reused", async |fixture| {
        let node = fixture.node("a").await?;
        fixture.driver.nodes([(node.clone(), 1)]);
        let controller = fixture.start().await?;
        fixture.immediate("one").await?;
        for name in ["first", "second", "third"] {
            fixture
                .scheduled_pod(name, &[("device", ClaimSource::Claim("one"))])
                .await?;
            assert_eq!(fixture.wait_until_bound(name).await?, node);
            fixture.remove_pod(name).await?;
        }
        fixture.fence().await?;
        assert_eq!(fixture.driver.call_summaries(), ["allocate one"]);
        controller.stop().await
    })
}

#[test]
fn reserved_for_is_left_to_the_scheduler_if_so_chosen() -> anyhow::Result<()> {
    with_fixture("unreserved", async |fixture| {
        fixture.node("a").await?;
        let controller = fixture
            .start_as("", &fixture.driver, &rules(), |builder| {
                builder.reserve_for_pod(false)
            })
            .await?;
        fixture.claim("one").await?;
        fixture
            .scheduled_pod("pod", &[("device", ClaimSource::Claim("one"))])
            .await?;
        fixture.wait_until_bound("pod").await?;
        let seen: Vec<(bool, usize)> = fixture
            .versions("one")
            .await?
            .iter()
            .map(|claim| (is_allocated(claim), claim.status.reserved_for.len()))
            .collect();
        assert_eq!(seen, [(false, 0), (false, 0), (true, 0), (true, 1)]);
        fixture.remove_pod("pod").await?;
        fixture.request_deallocation("one").await?;
        fixture
            .wait_for_claim("one", "released", |claim| !is_allocated(claim))
            .await?;
        controller.stop().await
    })
}

#[test]
fn a_pod_that_has_a_node_already_is_served_there() -> anyhow::Result<()> {
    with_fixture("has-a-node", async |fixture| {
        if fixture.cluster.is_before(
            28,
            "the claim controller makes no context for a pod that has a node",
        ) {
            return Ok(());
        }
        let [good, bad] = [fixture.node("good").await?, fixture.node("bad").await?];
        fixture.driver.nodes([(good.clone(), 1)]);
        let controller = fixture.start().await?;
        fixture.template("template", &fixture.name).await?;
        // The claim controller creates a context with a selected node and no potential nodes.
        for (name, node) in [("fits", &good), ("does-not", &bad)] {
            let spec = json!({ "nodeName": node });
            fixture
                .pod_with(name, &[("device", ClaimSource::Template("template"))], spec)
                .await?;
        }
        fixture
            .wait_for_event("does-not", "NoSuitableDevice", "full")
            .await?;
        let pod = fixture.pods().get("fits").await?;
        let name = fixture.wait_for_generated("fits").await?;
        let claim = fixture.wait_until_allocated(&name).await?;
        assert_eq!(Some(&claim.status.reserved_for[0].uid), pod.metadata.uid.as_ref());
        let context = fixture.contexts().get("fits").await?;
        assert_eq!(
            (context.spec.selected_node, context.spec.potential_nodes),
            (good, vec![])
        );
        assert_eq!(fixture.driver.counts(), (1, 0));
        controller.stop().await
    })
}

#[test]
fn suitable_nodes_of_a_class_are_honoured_and_watched() -> anyhow::Result<()> {
    with_fixture("suitable-nodes", async |fixture| {
        let [a, b] = [fixture.node("a").await?, fixture.node("b").await?];
        let controller = fixture.start().await?;
        let only = |value: &str| {
            json!({ "suitableNodes": { "nodeSelectorTerms": [
            { "matchExpressions": [{ "key": "special", "operator": "In", "values": [value] }] }] } })
        };
        fixture.patch_class(&fixture.name, only("yes")).await?;
        fixture.template("template", &fixture.name).await?;
        fixture
            .scheduled_pod("pod", &[("device", ClaimSource::Template("template"))])
            .await?;
        fixture
            .wait_for_event(
                "pod",
                "FailedScheduling",
                "excluded by resource class node filter",
            )
            .await?;
        assert_eq!(
            fixture.driver.call_summaries(),
            Vec::<String>::new(),
            "no node is suitable"
        );
        let nodes = Api::<Node>::all(fixture.cluster.client());
        let label = json!({ "metadata": { "labels": { "special": "other" } } });
        patch(&nodes, &b, label).await?;
        fixture.patch_class(&fixture.name, only("other")).await?;
        assert_eq!(fixture.wait_until_bound("pod").await?, b);
        let evaluations = |node: &str| {
            count(
                &fixture.driver.calls(),
                |request| matches!(request, Request::Evaluate { nodes, .. } if nodes.iter().any(|one| one == node)),
            )
        };
        assert_eq!(evaluations(&a), 0);
        controller.stop().await
    })
}

#[test]
fn nodes_are_filled_exactly_and_freed_devices_are_reused() -> anyhow::Result<()> {
    with_fixture("filled", async |fixture| {
        let [a, b] = [fixture.node("a").await?, fixture.node("b").await?];
        fixture.driver.nodes([(a, 2), (b, 2)]);
        let controller = fixture.start().await?;
        fixture.template("template", &fixture.name).await?;
        let mut pods: Vec<String> = (0..6).map(|number| format!("pod-{number}")).collect();
        for name in &pods {
            fixture
                .scheduled_pod(name, &[("device", ClaimSource::Template("template"))])
                .await?;
        }
        for expected in [4, 5, 6] {
            fixture
                .driver
                .wait_for(&format!("allocate {expected}"), |_| {
                    fixture.driver.counts().0 == expected
                })
                .await?;
            let allocated = fixture.claims().list(&ListParams::default()).await?;
            let allocated = allocated
                .iter()
                .filter(|claim| is_allocated(claim) && claim.metadata.deletion_timestamp.is_none());
            assert!(allocated.count() <= 4);
            if expected < 6 {
                let bound = pods.iter().map(|name| {
                    Box::pin(async { fixture.wait_until_bound(name).await.map(|_| name.clone()) })
                });
                let (name, _, _) = futures::future::select_all(bound).await;
                let name = name?;
                fixture.remove_pod(&name).await?;
                pods.retain(|pod| *pod != name);
            }
        }
        for name in &pods {
            fixture.wait_until_bound(name).await?;
        }
        controller.stop().await
    })
}

#[test]
fn pods_find_the_free_ones_among_140_nodes() -> anyhow::Result<()> {
    with_fixture("many-real-nodes", async |fixture| {
        let mut capacities = Vec::new();
        for number in 0..140 {
            let node = fixture.node(&format!("{number:03}")).await?;
            capacities.push((node, usize::from(number % 7 == 0)));
        }
        fixture.driver.nodes(capacities.clone());
        let controller = fixture.start().await?;
        fixture.template("template", &fixture.name).await?;
        let pods = names(["pod-0", "pod-1", "pod-2", "pod-3"]);
        for name in &pods {
            fixture
                .scheduled_pod(name, &[("device", ClaimSource::Template("template"))])
                .await?;
        }
        for name in &pods {
            let node = fixture.wait_until_bound(name).await?;
            assert!(capacities.contains(&(node.clone(), 1)), "{node}");
        }
        assert_eq!(fixture.driver.counts(), (4, 0));
        fixture.assert_none_failed(&controller).await?;
        controller.stop().await
    })
}
