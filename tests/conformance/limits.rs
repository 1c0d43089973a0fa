//! More than the API takes.

use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::call::{What, count};
use crate::objects::From;
use crate::script::Act;
use crate::stage::{finalizers, is_allocated, names, on_stage, verdicts};

fn nodes(from: usize, to: usize) -> Vec<String> {
    (from..to).map(|number| format!("node-{number:03}")).collect()
}

#[test]
fn unsuitable_nodes_are_cut_to_the_limit_of_the_scheduler() -> anyhow::Result<()> {
    on_stage("many-nodes", async |stage| {
        stage.driver.nodes(Vec::<(String, usize)>::new());
        let controller = stage.start().await?;
        stage.claim("one").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("one"))]).await?;
        // 128 potential nodes and another one that is selected: 129 that do not suit.
        stage.context(&pod, "selected", &nodes(0, 128)).await?;
        let context = stage
            .until_context("pod", "judged", |context| {
                !context.status.resource_claims.is_empty()
            })
            .await?;
        let listed = &verdicts(&context)["device"];
        assert_eq!(listed.len(), 128);
        assert!(listed.contains(&"selected".to_owned()));
        // The scheduler lists what is left; what was found bad before stays known as far as there is room.
        stage
            .reschedule(
                "pod",
                json!({ "selectedNode": "", "potentialNodes": nodes(100, 200) }),
            )
            .await?;
        let all_listed = |context: &drayman::api::resource::PodSchedulingContext| {
            let listed = &verdicts(context)["device"];
            nodes(100, 200).iter().all(|node| listed.contains(node))
        };
        let context = stage.until_context("pod", "judged again", all_listed).await?;
        let listed = &verdicts(&context)["device"];
        assert_eq!(listed.len(), 128);
        assert!(
            listed.iter().any(|node| !nodes(100, 200).contains(node)),
            "28 earlier ones"
        );
        stage.fence().await?;
        let failed: Vec<_> = stage
            .entries(&controller)
            .await?
            .into_iter()
            .filter(|entry| entry.code >= 400)
            .collect();
        assert_eq!(failed, []);
        let requests = stage.requests(&controller).await?;
        let writes = requests
            .iter()
            .filter(|request| request.starts_with("patch"))
            .count();
        assert_eq!(writes, 2, "a cut list is no change: {requests:?}");
        controller.end().await
    })
}

#[test]
fn an_entry_with_129_nodes_can_be_made_by_nobody() -> anyhow::Result<()> {
    on_stage("entry-of-129", async |stage| {
        stage.claim("one").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("one"))]).await?;
        stage.context(&pod, "", &[]).await?;
        let entry = |count| json!({ "status": { "resourceClaims": [{ "name": "device", "unsuitableNodes": nodes(0, count) }] } });
        let patch = async |count| {
            let patch = Patch::Merge(entry(count));
            stage
                .contexts()
                .patch_status("pod", &PatchParams::default(), &patch)
                .await
        };
        let Err(kube::Error::Api(status)) = patch(129).await else {
            anyhow::bail!("129 nodes are accepted")
        };
        assert_eq!(status.code, 422);
        patch(128).await?;
        // A driver that finds everything unsuitable replaces what somebody has written in our entry.
        stage.driver.nodes([("good", 1)]);
        let controller = stage.start().await?;
        stage
            .reschedule("pod", json!({ "potentialNodes": ["good", "bad"] }))
            .await?;
        stage
            .until_context("pod", "judged", |context| {
                verdicts(context)["device"].contains(&"bad".to_owned())
            })
            .await?;
        controller.end().await
    })
}

#[test]
fn a_pod_with_33_claims_gets_them_all_at_once() -> anyhow::Result<()> {
    on_stage("many-claims", async |stage| {
        stage.driver.nodes([("large", 33), ("small", 32)]);
        let controller = stage.start().await?;
        let claims: Vec<String> = (0..33).map(|number| format!("claim-{number:02}")).collect();
        for name in &claims {
            stage.claim(name).await?;
        }
        let entries: Vec<(&str, From<'_>)> = claims
            .iter()
            .map(|name| (name.as_str(), From::Claim(name)))
            .collect();
        let pod = stage.pod("pod", &entries).await?;
        stage.context(&pod, "small", &names(["small", "large"])).await?;
        let context = stage
            .until_context("pod", "judged", |context| {
                context.status.resource_claims.len() == 33
            })
            .await?;
        assert!(verdicts(&context).values().all(|nodes| nodes == &["small"]));
        stage
            .reschedule("pod", json!({ "selectedNode": "large" }))
            .await?;
        for name in &claims {
            stage.until_claim(name, "allocated", is_allocated).await?;
        }
        assert_eq!(stage.driver.counts(), (33, 0));
        assert_eq!(count(&stage.driver.calls(), What::is_allocate), 1);
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

#[test]
fn a_handle_over_the_limit_is_reported_before_any_write() -> anyhow::Result<()> {
    on_stage("large-handle", async |stage| {
        stage.driver.rule(|what| match what {
            What::Allocate { .. } => Act::Data("large", "x".repeat(16 * 1024 + 1)),
            _ => Act::Go,
        });
        let controller = stage.start().await?;
        stage.claim("small").await?;
        stage.claim("large").await?;
        let pod = stage
            .pod(
                "pod",
                &[("small", From::Claim("small")), ("large", From::Claim("large"))],
            )
            .await?;
        stage.context(&pod, "node", &[]).await?;
        stage.event("pod", "NoSuitableDevice", "16385 bytes").await?;
        stage
            .driver
            .until("give both back", |calls| count(calls, What::is_deallocate) >= 2)
            .await?;
        // Another pod's claim, and an immediate one that is too large itself.
        stage.claim("other").await?;
        let other = stage.pod("other", &[("device", From::Claim("other"))]).await?;
        stage.context(&other, "node", &[]).await?;
        stage.until_claim("other", "allocated", is_allocated).await?;
        for name in ["small", "large"] {
            assert!(
                !stage.versions(name).await?.iter().any(is_allocated),
                "{name} is recorded though not both can be"
            );
        }
        stage.driver.rule(|what| match what {
            What::Allocate { .. } => Act::Data("at-once", "x".repeat(16 * 1024 + 1)),
            _ => Act::Go,
        });
        stage.immediate("at-once").await?;
        stage.event("at-once", "DriverMisbehaved", "16385 bytes").await?;
        // At the limit it is fine.
        stage.driver.rule(|what| match what {
            What::Allocate { .. } => Act::Data("at-once", "x".repeat(16 * 1024)),
            _ => Act::Go,
        });
        for name in ["small", "large", "at-once"] {
            stage.until_claim(name, "allocated", is_allocated).await?;
        }
        controller.end().await
    })
}

#[test]
fn a_driver_name_invalid_in_a_finalizer_is_refused_at_start() -> anyhow::Result<()> {
    on_stage("refused-name", async |stage| {
        let named = crate::script::Script::new("Refused.example.com");
        let Err(error) = stage.start_as("", &named, &[], |builder| builder).await.map(drop) else {
            anyhow::bail!("it starts")
        };
        assert!(error.to_string().contains("lower-case"), "{error}");
        // The reason: the server takes it in a class, and refuses the finalizer that it leads to.
        stage
            .make_class(
                "refused-name-class",
                json!({ "driverName": "Refused.example.com" }),
            )
            .await?;
        stage.claim("one").await?;
        let finalizers_of =
            |name: &str| json!({ "metadata": { "finalizers": [format!("{name}/deletion-protection")] } });
        assert!(
            stage
                .patch_claim("one", finalizers_of("Refused.example.com"))
                .await
                .is_err()
        );
        let claim = stage
            .patch_claim("one", finalizers_of("refused.example.com"))
            .await?;
        assert_eq!(finalizers(&claim).len(), 1);
        stage
            .patch_claim("one", json!({ "metadata": { "finalizers": null } }))
            .await
            .map(drop)
    })
}

#[test]
fn names_of_253_characters_are_served_and_told() -> anyhow::Result<()> {
    on_stage("long-names", async |stage| {
        // The hyphen is where the name of an Event takes no more of the name of its object.
        let name = |start: &str| format!("{start}{}-{}", "x".repeat(235 - start.len()), "x".repeat(17));
        let (served, waits, class) = (name("served-"), name("waits-"), name("class-"));
        let node = format!("{}.example", "n".repeat(245));
        stage.driver.nodes([(&node, 1)]);
        let controller = stage.start().await?;
        stage.make_class(&class, json!({})).await?;
        for pod_name in [&served, &waits] {
            stage
                .claim_of(pod_name, json!({ "resourceClassName": class }))
                .await?;
            let pod = stage.pod(pod_name, &[("device", From::Claim(pod_name))]).await?;
            stage.context(&pod, &node, std::slice::from_ref(&node)).await?;
            if pod_name == &served {
                stage.until_claim(&served, "allocated", is_allocated).await?;
            }
        }
        stage.event(&waits, "NoSuitableDevice", "").await?;
        stage.remove_pod(&served).await?;
        stage.delete_claim(&served).await?;
        stage.until_gone(&served).await?;
        stage.until_claim(&waits, "allocated", is_allocated).await?;
        controller.end().await
    })
}
