//! Pods that the real scheduler places on nodes that exist in the API only.

use std::time::Duration;

use drayman::driver::DriverError;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::json;

use crate::call::{What, count};
use crate::objects::From;
use crate::script::{Act, Script};
use crate::stage::{Stage, is_allocated, names, on_stage, rules};

/// A second driver, of the class `other-<stage>`.
async fn other_driver(stage: &Stage) -> anyhow::Result<Script> {
    let driver = Script::new(&format!("other.{}", stage.driver_name()));
    let fields = json!({ "driverName": format!("other.{}", stage.driver_name()) });
    stage.make_class(&format!("other-{}", stage.name), fields).await?;
    Ok(driver)
}

#[test]
fn two_drivers_with_two_claims_each_make_progress_in_a_pod() -> anyhow::Result<()> {
    on_stage("two-drivers", async |stage| {
        let other = other_driver(stage).await?;
        let [a, b, c] = [
            stage.node("a").await?,
            stage.node("b").await?,
            stage.node("c").await?,
        ];
        // Only b suits both.
        stage.driver.nodes([(a, 2), (b.clone(), 2)]);
        other.nodes([(b.clone(), 2), (c, 2)]);
        let first = stage.start().await?;
        let second = stage
            .start_as("-other", &other, &rules(), |builder| builder)
            .await?;
        let class = format!("other-{}", stage.name);
        stage.template("ours", &stage.name).await?;
        stage.template("theirs", &class).await?;
        let entries = [
            ("one", "ours"),
            ("two", "theirs"),
            ("three", "ours"),
            ("four", "theirs"),
        ];
        let entries = entries.map(|(entry, template)| (entry, From::Template(template)));
        stage.scheduled_pod("pod", &entries).await?;
        assert_eq!(stage.until_bound("pod").await?, b);
        for driver in [&stage.driver, &other] {
            assert_eq!(driver.counts(), (2, 0), "nothing was allocated in vain");
        }
        // Each answers for its own claims only.
        let judged_other = |what: &What| matches!(what, What::Judge { claims, .. } if claims.iter().any(|asked| ["two", "four"].contains(&asked.entry.as_str())));
        assert_eq!(count(&stage.driver.calls(), judged_other), 0);
        for controller in [&first, &second] {
            let failed: Vec<_> = stage
                .entries(controller)
                .await?
                .into_iter()
                .filter(|entry| entry.code >= 400)
                .collect();
            assert_eq!(failed, []);
        }
        stage.remove_pod("pod").await?;
        stage.driver.until_counts((2, 2)).await?;
        other.until_counts((2, 2)).await?;
        first.end().await?;
        second.end().await
    })
}

#[test]
fn a_silent_driver_is_named_once_and_an_active_one_is_not() -> anyhow::Result<()> {
    on_stage("silent-driver", async |stage| {
        let other = other_driver(stage).await?;
        stage.node("a").await?;
        let controller = stage
            .start_as("", &stage.driver, &rules(), |builder| {
                builder.other_driver_wait(Duration::from_secs(8))
            })
            .await?;
        stage.template("ours", &stage.name).await?;
        stage.template("theirs", &format!("other-{}", stage.name)).await?;
        let entries = [("one", From::Template("ours")), ("two", From::Template("theirs"))];
        stage.scheduled_pod("pod", &entries).await?;
        let event = stage
            .event("pod", "OtherDriverSilent", "no answer for 8 s")
            .await?;
        let text = event.message.unwrap_or_default();
        for word in [
            format!("driver \"other.{}\"", stage.driver_name()),
            format!("resource class \"other-{}\"", stage.name),
            "claim \"two\"".to_owned(),
        ] {
            assert!(text.contains(&word), "{word} is not in {text}");
        }
        // When it comes, the pod runs, and of another pod nothing is said.
        let second = stage
            .start_as("-other", &other, &rules(), |builder| {
                builder.other_driver_wait(Duration::from_secs(8))
            })
            .await?;
        stage.until_bound("pod").await?;
        stage.scheduled_pod("next", &entries).await?;
        stage.until_bound("next").await?;
        assert_eq!(stage.events("pod").await?.len(), 1);
        assert_eq!(stage.events("next").await?, []);
        controller.end().await?;
        second.end().await
    })
}

#[test]
fn a_pod_whose_second_driver_lost_its_node_moves() -> anyhow::Result<()> {
    on_stage("reallocation", async |stage| {
        let other = other_driver(stage).await?;
        let [a, b] = [stage.node("a").await?, stage.node("b").await?];
        // The other driver finds nothing against a node and then fails there, wherever that is first.
        let failed: std::sync::Arc<std::sync::Mutex<Option<String>>> = std::sync::Arc::default();
        let on = failed.clone();
        stage.driver.rule(|_| Act::Go);
        let ours = stage.driver.clone();
        other.rule(move |what| match what {
            What::Allocate { node: Some(node), .. } => {
                let mut on = on.lock().expect("no panic with it");
                // Not before the first driver has allocated, and on that very node.
                let held =
                    |call: &What| matches!(call, What::Allocate { node: Some(held), .. } if held == node);
                if on.is_none() && count(&ours.calls(), held) > 0 {
                    *on = Some(node.clone());
                }
                if on.as_ref().is_none_or(|on| on == node) {
                    return Act::Fail(DriverError::retry("Lost", "somebody was faster"));
                }
                Act::Go
            }
            What::Judge { claims, .. } => {
                let on = on.lock().expect("no panic with it").clone();
                on.map_or(Act::Go, |on| {
                    let entry: &'static str = if claims.is_empty() { "" } else { "theirs" };
                    Act::Unsuitable(vec![(entry, vec![on])])
                })
            }
            _ => Act::Go,
        });
        let first = stage.start().await?;
        let second = stage
            .start_as("-other", &other, &rules(), |builder| builder)
            .await?;
        stage.claim("ours").await?;
        stage
            .claim_of(
                "theirs",
                json!({ "resourceClassName": format!("other-{}", stage.name) }),
            )
            .await?;
        stage
            .scheduled_pod(
                "pod",
                &[("ours", From::Claim("ours")), ("theirs", From::Claim("theirs"))],
            )
            .await?;
        let node = stage.until_bound("pod").await?;
        let lost = failed.lock().expect("no panic with it").clone();
        assert!(
            lost.as_ref()
                .is_some_and(|lost| *lost != node && [&a, &b].contains(&lost)),
            "{lost:?} {node}"
        );
        assert_eq!(
            stage.driver.counts(),
            (2, 1),
            "on the node that was lost, and on the other"
        );
        assert_eq!(other.counts(), (1, 0));
        first.end().await?;
        second.end().await
    })
}

#[test]
fn a_shareable_claim_serves_32_pods_with_one_allocation() -> anyhow::Result<()> {
    on_stage("shared", async |stage| {
        stage.driver.shareable();
        let node = stage.node("a").await?;
        stage.driver.nodes([(node, 1)]);
        let controller = stage.start().await?;
        stage.claim("one").await?;
        let pods: Vec<String> = (0..33).map(|number| format!("pod-{number:02}")).collect();
        for name in &pods {
            stage
                .scheduled_pod(name, &[("device", From::Claim("one"))])
                .await?;
        }
        let claim = stage
            .until_claim("one", "full", |claim| claim.status.reserved_for.len() == 32)
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
            stage.until_bound(name).await?;
        }
        assert_eq!(stage.driver.counts(), (1, 0));
        // The one that is left comes in when another ends.
        let left: Vec<&String> = pods.iter().filter(|name| !users.contains(name)).collect();
        let [left] = left.as_slice() else {
            anyhow::bail!("{left:?}")
        };
        stage.remove_pod(&users[0]).await?;
        stage.until_bound(left).await?;
        assert_eq!(stage.driver.counts(), (1, 0));
        assert_eq!(count(&stage.driver.calls(), What::is_allocate), 1);
        controller.end().await
    })
}

#[test]
fn an_immediate_claim_serves_successive_pods_unchanged() -> anyhow::Result<()> {
    on_stage("reused", async |stage| {
        let node = stage.node("a").await?;
        stage.driver.nodes([(node.clone(), 1)]);
        let controller = stage.start().await?;
        stage.immediate("one").await?;
        for name in ["first", "second", "third"] {
            stage
                .scheduled_pod(name, &[("device", From::Claim("one"))])
                .await?;
            assert_eq!(stage.until_bound(name).await?, node);
            stage.remove_pod(name).await?;
        }
        stage.fence().await?;
        assert_eq!(stage.driver.story(), ["allocate one"]);
        controller.end().await
    })
}

#[test]
fn reserved_for_is_left_to_the_scheduler_if_so_chosen() -> anyhow::Result<()> {
    on_stage("unreserved", async |stage| {
        stage.node("a").await?;
        let controller = stage
            .start_as("", &stage.driver, &rules(), |builder| {
                builder.reserve_for_pod(false)
            })
            .await?;
        stage.claim("one").await?;
        stage
            .scheduled_pod("pod", &[("device", From::Claim("one"))])
            .await?;
        stage.until_bound("pod").await?;
        let seen: Vec<(bool, usize)> = stage
            .versions("one")
            .await?
            .iter()
            .map(|claim| (is_allocated(claim), claim.status.reserved_for.len()))
            .collect();
        assert_eq!(seen, [(false, 0), (false, 0), (true, 0), (true, 1)]);
        stage.remove_pod("pod").await?;
        stage.give_up("one").await?;
        stage
            .until_claim("one", "released", |claim| !is_allocated(claim))
            .await?;
        controller.end().await
    })
}

#[test]
fn a_pod_that_has_a_node_already_is_served_there() -> anyhow::Result<()> {
    on_stage("has-a-node", async |stage| {
        if stage.cluster.is_before(
            28,
            "the claim controller makes no context for a pod that has a node",
        ) {
            return Ok(());
        }
        let [good, bad] = [stage.node("good").await?, stage.node("bad").await?];
        stage.driver.nodes([(good.clone(), 1)]);
        let controller = stage.start().await?;
        stage.template("template", &stage.name).await?;
        // The claim controller makes the context, with a selected node and no potential ones.
        for (name, node) in [("fits", &good), ("does-not", &bad)] {
            let spec = json!({ "nodeName": node });
            stage
                .pod_with(name, &[("device", From::Template("template"))], spec)
                .await?;
        }
        stage.event("does-not", "NoSuitableDevice", "full").await?;
        let pod = stage.pods().get("fits").await?;
        let status = stage
            .until(
                stage.pods(),
                "fits",
                "given a claim",
                |pod: Option<&drayman::api::resource::Pod>| {
                    pod.is_some_and(|pod| !pod.status.resource_claim_statuses.is_empty())
                },
            )
            .await?;
        let name = status.and_then(|pod| pod.status.resource_claim_statuses[0].resource_claim_name.clone());
        let claim = stage
            .until_claim(&name.unwrap_or_default(), "allocated", is_allocated)
            .await?;
        assert_eq!(Some(&claim.status.reserved_for[0].uid), pod.metadata.uid.as_ref());
        let context = stage.contexts().get("fits").await?;
        assert_eq!(
            (context.spec.selected_node, context.spec.potential_nodes),
            (good, vec![])
        );
        assert_eq!(stage.driver.counts(), (1, 0));
        controller.end().await
    })
}

#[test]
fn suitable_nodes_of_a_class_are_honoured_and_watched() -> anyhow::Result<()> {
    on_stage("suitable-nodes", async |stage| {
        let [a, b] = [stage.node("a").await?, stage.node("b").await?];
        let controller = stage.start().await?;
        let only = |value: &str| {
            json!({ "suitableNodes": { "nodeSelectorTerms": [
            { "matchExpressions": [{ "key": "special", "operator": "In", "values": [value] }] }] } })
        };
        stage.patch_class(&stage.name, only("yes")).await?;
        stage.template("template", &stage.name).await?;
        stage
            .scheduled_pod("pod", &[("device", From::Template("template"))])
            .await?;
        stage
            .event(
                "pod",
                "FailedScheduling",
                "excluded by resource class node filter",
            )
            .await?;
        assert_eq!(
            stage.driver.story(),
            Vec::<String>::new(),
            "no node is in question"
        );
        let label = Patch::Merge(json!({ "metadata": { "labels": { "special": "other" } } }));
        Api::<Node>::all(stage.cluster.client())
            .patch(&b, &PatchParams::default(), &label)
            .await?;
        stage.patch_class(&stage.name, only("other")).await?;
        assert_eq!(stage.until_bound("pod").await?, b);
        let asked_for = |node: &str| {
            count(
                &stage.driver.calls(),
                |what| matches!(what, What::Judge { nodes, .. } if nodes.iter().any(|one| one == node)),
            )
        };
        assert_eq!(asked_for(&a), 0);
        controller.end().await
    })
}

#[test]
fn nodes_are_filled_exactly_and_freed_devices_are_reused() -> anyhow::Result<()> {
    on_stage("filled", async |stage| {
        let [a, b] = [stage.node("a").await?, stage.node("b").await?];
        stage.driver.nodes([(a, 2), (b, 2)]);
        let controller = stage.start().await?;
        stage.template("template", &stage.name).await?;
        let mut pods: Vec<String> = (0..6).map(|number| format!("pod-{number}")).collect();
        for name in &pods {
            stage
                .scheduled_pod(name, &[("device", From::Template("template"))])
                .await?;
        }
        for expected in [4, 5, 6] {
            stage
                .driver
                .until(&format!("allocate {expected}"), |_| {
                    stage.driver.counts().0 == expected
                })
                .await?;
            let allocated = stage.claims().list(&ListParams::default()).await?;
            let allocated = allocated
                .iter()
                .filter(|claim| is_allocated(claim) && claim.metadata.deletion_timestamp.is_none());
            assert!(allocated.count() <= 4);
            if expected < 6 {
                let bound = pods
                    .iter()
                    .map(|name| Box::pin(async { stage.until_bound(name).await.map(|_| name.clone()) }));
                let (name, _, _) = futures::future::select_all(bound).await;
                let name = name?;
                stage.remove_pod(&name).await?;
                pods.retain(|pod| *pod != name);
            }
        }
        for name in &pods {
            stage.until_bound(name).await?;
        }
        controller.end().await
    })
}

#[test]
fn pods_find_the_free_ones_among_140_nodes() -> anyhow::Result<()> {
    on_stage("many-real-nodes", async |stage| {
        let mut places = Vec::new();
        for number in 0..140 {
            let node = stage.node(&format!("{number:03}")).await?;
            places.push((node, usize::from(number % 7 == 0)));
        }
        stage.driver.nodes(places.clone());
        let controller = stage.start().await?;
        stage.template("template", &stage.name).await?;
        let pods = names(["pod-0", "pod-1", "pod-2", "pod-3"]);
        for name in &pods {
            stage
                .scheduled_pod(name, &[("device", From::Template("template"))])
                .await?;
        }
        for name in &pods {
            let node = stage.until_bound(name).await?;
            assert!(places.contains(&(node.clone(), 1)), "{node}");
        }
        assert_eq!(stage.driver.counts(), (4, 0));
        let failed: Vec<_> = stage
            .entries(&controller)
            .await?
            .into_iter()
            .filter(|entry| entry.code >= 400)
            .collect();
        assert_eq!(failed, []);
        controller.end().await
    })
}
