//! Invalid objects of users and administrators: one clear event each, and no effect on others.

use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::harness::Entry;
use crate::setup::{DRIVER, Setup, is_allocated};
use crate::stored_claims::{CONTROLLER, kind, open_schemas, write};

/// Creates a claim with these parameters, and a pod that uses it.
async fn make_pod(setup: &Setup, name: &str) -> anyhow::Result<()> {
    let reference = json!({ "apiGroup": DRIVER, "kind": "DeviceClaimParameters", "name": name });
    setup
        .apply(&json!({ "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaim", "metadata": { "name": name },
            "spec": { "resourceClassName": "test", "parametersRef": reference } }))
        .await?;
    setup.make_pod_with(name, name).await
}

fn parameters(name: &str, request: &Value) -> Value {
    json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClaimParameters", "metadata": { "name": name },
        "spec": { "requests": [request] } })
}

/// Asserts that the controller has finished with these objects: after it has served one more pod, it has sent only a few requests for each,
/// including events.
async fn assert_at_rest(setup: &Setup, names: &[&str], reason: &str) -> anyhow::Result<()> {
    for name in names {
        // On the pod and on its claim, which have the same name here.
        assert_eq!(setup.event_count(name, reason).await?, 2, "{name}: {reason}");
    }
    let entries: Vec<Entry> = setup.cluster.audit().of_user(CONTROLLER).await?;
    for name in names {
        let about = entries
            .iter()
            .filter(|entry| entry.name.starts_with(name) && !matches!(entry.verb.as_str(), "list" | "watch"));
        let about: Vec<String> = about
            .map(|entry| format!("{} {}/{}", entry.verb, entry.resource, entry.subresource))
            .collect();
        assert!(about.len() <= 6, "{name}: {about:?}");
    }
    Ok(())
}

#[tokio::test]
async fn hostile_selectors_are_reported_once_and_delay_no_pod() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 2).await?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let list = vec!["1"; 100].join(",");
    let hostile = [
        ("deep", format!("{}1{} == 1", "(".repeat(1000), ")".repeat(1000))),
        (
            "deep-list",
            format!("{}1{} == 1", "[".repeat(1000), "]".repeat(1000)),
        ),
        (
            "endless",
            format!("[{list}].all(a, [{list}].all(b, [{list}].all(c, a + b + c > 0)))"),
        ),
        (
            "growing",
            "'a'".to_owned() + &".replace('','aaaaaaaaa')".repeat(12) + " == ''",
        ),
        (
            "doubling",
            format!("[{list}].map(a, [{list}]).map(a, [a, a]) == []"),
        ),
    ];
    for (name, expression) in &hostile {
        let request = json!({ "name": "bad", "selectors": [{ "cel": { "expression": expression } }] });
        setup.apply(&parameters(name, &request)).await?;
        make_pod(&setup, name).await?;
    }
    // Served during and after the evaluation of the others.
    assert_eq!(setup.serve("first").await?, ["node-a/drayman-test-0"]);
    for (name, _) in &hostile {
        let event = setup
            .wait_for_event(name, "SelectorInvalid", "selector 1 of request bad")
            .await?;
        let message = event.message.unwrap_or_default();
        assert!(
            message.contains(&format!("DeviceClaimParameters default/{name}")),
            "{message}"
        );
    }
    assert_eq!(setup.serve("second").await?, ["node-a/drayman-test-1"]);
    let names: Vec<&str> = hostile.iter().map(|(name, _)| *name).collect();
    assert_at_rest(&setup, &names, "SelectorInvalid").await?;
    // After the fix, the pod is served.
    setup
        .apply(&parameters("endless", &json!({ "name": "good" })))
        .await?;
    setup.remove_pod("first").await?;
    setup.until_bound("endless").await?;
    setup.end([controller]).await
}

#[tokio::test]
async fn impossible_counts_are_refused_by_server_and_controller() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 2).await?;
    setup.make_template(None).await?;
    let counts: [(&str, Value); 4] = [
        ("nothing", json!(0)),
        ("negative", json!(-1)),
        ("largest", json!(i64::MAX)),
        ("more-than-fits", json!(1_u64 << 63)),
    ];
    for (name, count) in &counts {
        let request = json!({ "name": "device", "count": count });
        assert!(
            setup.apply(&parameters(name, &request)).await.is_err(),
            "{count} is accepted"
        );
    }
    open_schemas(&setup).await?;
    let controller = setup.controller()?;
    let claim_parameters = kind(&setup, "DeviceClaimParameters", true);
    for (name, count) in &counts {
        let mut parameters = parameters(name, &json!({ "name": "device", "count": count }));
        parameters["spec"]["requests"][0]["name"] = json!("device");
        // Kept by the open schema, but unknown to the controller.
        parameters["kept"] = json!(true);
        write(&claim_parameters, name, &parameters, "/kept").await?;
        make_pod(&setup, name).await?;
    }
    for (name, _) in &counts {
        let event = setup
            .wait_for_event(name, "ParametersInvalid", "default/")
            .await?;
        let message = event.message.unwrap_or_default();
        assert!(
            message.contains(&format!("DeviceClaimParameters default/{name}")),
            "{message}"
        );
    }
    assert_eq!(setup.serve("first").await?, ["node-a/drayman-test-0"]);
    let names: Vec<&str> = counts.iter().map(|(name, _)| *name).collect();
    assert_at_rest(&setup, &names, "ParametersInvalid").await?;
    setup.end([controller]).await
}

#[tokio::test]
async fn parameters_deleted_after_the_allocation_are_not_missed() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 3).await?;
    setup.make_template(None).await?;
    let mut controller = setup.controller()?;
    setup
        .apply(&parameters("two", &json!({ "name": "device", "count": 2 })))
        .await?;
    make_pod(&setup, "two").await?;
    setup.until_bound("two").await?;
    let before = setup.claims().get("two").await?;
    let claim_parameters = kind(&setup, "DeviceClaimParameters", true);
    claim_parameters.delete("two", &DeleteParams::default()).await?;
    // Nor after a restart.
    controller.kill().await?;
    let controller = setup.controller()?;
    assert_eq!(setup.serve("next").await?, ["node-a/drayman-test-2"]);
    let after = setup.claims().get("two").await?;
    assert!(is_allocated(&after));
    assert_eq!(after.status, before.status);
    assert_eq!(setup.event_count("two", "ParametersNotFound").await?, 0);
    setup.remove_pod("two").await?;
    setup.delete_claim("two").await?;
    // Both devices are free, and a new claim with missing parameters gets one event.
    assert_eq!(setup.serve("later").await?, ["node-a/drayman-test-0"]);
    make_pod(&setup, "missing").await?;
    setup
        .wait_for_event("missing", "ParametersNotFound", "does not exist; create it")
        .await?;
    assert_eq!(setup.serve("last").await?, ["node-a/drayman-test-1"]);
    assert_at_rest(&setup, &["missing"], "ParametersNotFound").await?;
    setup.end([controller]).await
}

#[tokio::test]
async fn invalid_inventories_and_classes_affect_no_other_object() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    for node in ["node-a", "node-b"] {
        setup.make_fake_devices(node, 2).await?;
    }
    setup.make_template(None).await?;
    open_schemas(&setup).await?;
    let inventories = kind(&setup, "NodeInventory", false);
    let controller = setup.controller()?;
    assert!(setup.serve("before").await?[0].starts_with("node-"));
    let name = |node: &str| format!("{node}.{DRIVER}");
    // An invalid inventory, and three that never were valid: without a node, with the node of another inventory, and with invalid devices.
    let broken = Patch::Merge(json!({ "spec": { "devices": "many", "kept": true } }));
    inventories
        .patch(&name("node-b"), &PatchParams::default(), &broken)
        .await?;
    let device = json!({ "name": "drayman-test-9", "kind": "test" });
    for (object, spec) in [
        ("empty", json!({ "kept": 1 })),
        (
            "second",
            json!({ "kept": 1, "driverName": DRIVER, "nodeName": "node-a", "nodeUid": "1", "devices": [device] }),
        ),
        (
            "strange",
            json!({ "kept": 1, "driverName": DRIVER, "nodeName": "../..", "nodeUid": "", "devices": [{ "name": "" }] }),
        ),
    ] {
        let inventory = json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": "NodeInventory",
            "metadata": { "name": object }, "spec": spec });
        write(&inventories, object, &inventory, "/spec/kept").await?;
    }
    // Two of our classes: the parameters of one are of another kind, those of the other are missing.
    for (class, reference) in [
        (
            "wrong-kind",
            json!({ "kind": "Secret", "namespace": "kube-system", "name": "x" }),
        ),
        ("no-name", Value::Null),
    ] {
        setup
            .apply(&json!({ "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClass", "metadata": { "name": class },
                "driverName": DRIVER, "parametersRef": reference }))
            .await?;
        setup
            .apply(&json!({ "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaim", "metadata": { "name": class },
                "spec": { "resourceClassName": class } }))
            .await?;
        setup.make_pod_with(class, class).await?;
        setup
            .wait_for_event(class, "ParametersReferenceInvalid", class)
            .await?;
    }
    // The two devices of node-a are left; the first pod may hold one.
    let mut got = setup.serve("after").await?;
    setup.make_pod("last").await?;
    setup.remove_pod("before").await?;
    setup.until_bound("last").await?;
    let claim = setup.claim_of("last", "allocated", is_allocated).await?;
    got.extend(crate::stored_claims::devices(&claim)?);
    got.sort();
    assert_eq!(got, ["node-a/drayman-test-0", "node-a/drayman-test-1"]);
    let status = controller.end().await?;
    assert!(status.success());
    setup.cluster.stop().await
}
