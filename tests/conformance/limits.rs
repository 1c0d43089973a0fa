//! Objects that exceed the limits of the API.

use serde_json::json;

use crate::call::{Request, count};
use crate::fake_driver::Action;
use crate::fixture::{finalizers, is_allocated, names, unsuitable_nodes, with_fixture};
use crate::objects::{ClaimSource, patch_status};

fn nodes(from: usize, to: usize) -> Vec<String> {
    (from..to).map(|number| format!("node-{number:03}")).collect()
}

#[test]
fn unsuitable_nodes_are_cut_to_the_limit_of_the_scheduler() -> anyhow::Result<()> {
    with_fixture("many-nodes", async |fixture| {
        fixture.driver.nodes(Vec::<(String, usize)>::new());
        let controller = fixture.start().await?;
        fixture.claim("one").await?;
        let pod = fixture
            .pod("pod", &[("device", ClaimSource::Claim("one"))])
            .await?;
        // 128 potential nodes and a selected one: 129 unsuitable nodes.
        fixture.context(&pod, "selected", &nodes(0, 128)).await?;
        let context = fixture.wait_until_evaluated("pod").await?;
        let listed = &unsuitable_nodes(&context)["device"];
        assert_eq!(listed.len(), 128);
        assert!(listed.contains(&"selected".to_owned()));
        // The scheduler lists other nodes; earlier unsuitable nodes stay in the answer up to the limit.
        fixture
            .reschedule(
                "pod",
                json!({ "selectedNode": "", "potentialNodes": nodes(100, 200) }),
            )
            .await?;
        let all_listed = |context: &drayman::api::resource::PodSchedulingContext| {
            let listed = &unsuitable_nodes(context)["device"];
            nodes(100, 200).iter().all(|node| listed.contains(node))
        };
        let context = fixture
            .wait_for_context("pod", "evaluated again", all_listed)
            .await?;
        let listed = &unsuitable_nodes(&context)["device"];
        assert_eq!(listed.len(), 128);
        assert!(
            listed.iter().any(|node| !nodes(100, 200).contains(node)),
            "28 earlier nodes"
        );
        fixture.fence().await?;
        fixture.assert_none_failed(&controller).await?;
        let requests = fixture.requests(&controller).await?;
        let writes = requests
            .iter()
            .filter(|request| request.starts_with("patch"))
            .count();
        assert_eq!(writes, 2, "a truncated list is not a change: {requests:?}");
        controller.stop().await
    })
}

#[test]
fn the_api_server_rejects_an_entry_with_129_nodes() -> anyhow::Result<()> {
    with_fixture("entry-of-129", async |fixture| {
        fixture.waiting_pod("pod", &["one"], "", &[]).await?;
        let entry =
            |count| json!({ "resourceClaims": [{ "name": "one", "unsuitableNodes": nodes(0, count) }] });
        let patch = async |count| patch_status(&fixture.contexts(), "pod", entry(count)).await;
        let Err(kube::Error::Api(status)) = patch(129).await else {
            anyhow::bail!("129 nodes are accepted")
        };
        assert_eq!(status.code, 422);
        patch(128).await?;
        // The answer replaces a manually written entry of our claim.
        fixture.driver.nodes([("good", 1)]);
        let controller = fixture.start().await?;
        fixture
            .reschedule("pod", json!({ "potentialNodes": ["good", "bad"] }))
            .await?;
        fixture
            .wait_for_context("pod", "evaluated", |context| {
                unsuitable_nodes(context)["one"].contains(&"bad".to_owned())
            })
            .await?;
        controller.stop().await
    })
}

#[test]
fn a_pod_with_33_claims_gets_them_all_at_once() -> anyhow::Result<()> {
    with_fixture("many-claims", async |fixture| {
        fixture.driver.nodes([("large", 33), ("small", 32)]);
        let controller = fixture.start().await?;
        let claims: Vec<String> = (0..33).map(|number| format!("claim-{number:02}")).collect();
        for name in &claims {
            fixture.claim(name).await?;
        }
        let entries: Vec<(&str, ClaimSource<'_>)> = claims
            .iter()
            .map(|name| (name.as_str(), ClaimSource::Claim(name)))
            .collect();
        let pod = fixture.pod("pod", &entries).await?;
        fixture.context(&pod, "small", &names(["small", "large"])).await?;
        let context = fixture
            .wait_for_context("pod", "evaluated", |context| {
                context.status.resource_claims.len() == 33
            })
            .await?;
        assert!(
            unsuitable_nodes(&context)
                .values()
                .all(|nodes| nodes == &["small"])
        );
        fixture.select_node("pod", "large").await?;
        for name in &claims {
            fixture.wait_until_allocated(name).await?;
        }
        assert_eq!(fixture.driver.counts(), (33, 0));
        assert_eq!(count(&fixture.driver.calls(), Request::is_allocate), 1);
        fixture.assert_none_failed(&controller).await?;
        controller.stop().await
    })
}

#[test]
fn a_handle_over_the_limit_is_reported_before_any_write() -> anyhow::Result<()> {
    with_fixture("large-handle", async |fixture| {
        fixture.driver.on(
            Request::is_allocate,
            Action::HandleData("large", "x".repeat(16 * 1024 + 1)),
        );
        let controller = fixture.start().await?;
        fixture.claim("small").await?;
        fixture.claim("large").await?;
        let pod = fixture.pod_naming("pod", &["small", "large"]).await?;
        fixture.context(&pod, "node", &[]).await?;
        fixture
            .wait_for_event("pod", "NoSuitableDevice", "16385 bytes")
            .await?;
        fixture.wait_for_calls("deallocate", 2..).await?;
        // Another pod is served meanwhile; then an immediate claim exceeds the limit.
        fixture.waiting_pod("other", &["other"], "node", &[]).await?;
        fixture.wait_until_allocated("other").await?;
        for name in ["small", "large"] {
            assert!(
                !fixture.versions(name).await?.iter().any(is_allocated),
                "{name} is recorded although one of the two is invalid"
            );
        }
        fixture.driver.on(
            Request::is_allocate,
            Action::HandleData("at-once", "x".repeat(16 * 1024 + 1)),
        );
        fixture.immediate("at-once").await?;
        fixture
            .wait_for_event("at-once", "DriverMisbehaved", "16385 bytes")
            .await?;
        // A handle at the limit is accepted.
        fixture.driver.on(
            Request::is_allocate,
            Action::HandleData("at-once", "x".repeat(16 * 1024)),
        );
        for name in ["small", "large", "at-once"] {
            fixture.wait_until_allocated(name).await?;
        }
        controller.stop().await
    })
}

#[test]
fn a_driver_name_invalid_in_a_finalizer_is_refused_at_start() -> anyhow::Result<()> {
    with_fixture("refused-name", async |fixture| {
        let named = crate::fake_driver::FakeDriver::new("Refused.example.com");
        let Err(error) = fixture
            .start_as("", &named, &[], |builder| builder)
            .await
            .map(drop)
        else {
            anyhow::bail!("it starts")
        };
        assert!(error.to_string().contains("lower-case"), "{error}");
        // The reason: the server accepts the name in a class but rejects the finalizer derived from it.
        fixture
            .make_class(
                "refused-name-class",
                json!({ "driverName": "Refused.example.com" }),
            )
            .await?;
        fixture.claim("one").await?;
        let finalizers_of =
            |name: &str| json!({ "metadata": { "finalizers": [format!("{name}/deletion-protection")] } });
        assert!(
            fixture
                .patch_claim("one", finalizers_of("Refused.example.com"))
                .await
                .is_err()
        );
        let claim = fixture
            .patch_claim("one", finalizers_of("refused.example.com"))
            .await?;
        assert_eq!(finalizers(&claim).len(), 1);
        fixture
            .patch_claim("one", json!({ "metadata": { "finalizers": null } }))
            .await
            .map(drop)
    })
}

#[test]
fn names_of_253_characters_are_served_and_reported() -> anyhow::Result<()> {
    with_fixture("long-names", async |fixture| {
        // The hyphen is at the position where the name of an Event truncates the name of its object.
        let name = |start: &str| format!("{start}{}-{}", "x".repeat(235 - start.len()), "x".repeat(17));
        let (served, waits, class) = (name("served-"), name("waits-"), name("class-"));
        let node = format!("{}.example", "n".repeat(245));
        fixture.driver.nodes([(&node, 1)]);
        let controller = fixture.start().await?;
        fixture.make_class(&class, json!({})).await?;
        for pod_name in [&served, &waits] {
            fixture
                .claim_of(pod_name, json!({ "resourceClassName": class }))
                .await?;
            let pod = fixture
                .pod(pod_name, &[("device", ClaimSource::Claim(pod_name))])
                .await?;
            fixture.context(&pod, &node, std::slice::from_ref(&node)).await?;
            if pod_name == &served {
                fixture.wait_until_allocated(&served).await?;
            }
        }
        fixture.wait_for_event(&waits, "NoSuitableDevice", "").await?;
        fixture.remove_pod(&served).await?;
        fixture.delete_claim(&served).await?;
        fixture.wait_until_gone(&served).await?;
        fixture.wait_until_allocated(&waits).await?;
        controller.stop().await
    })
}
