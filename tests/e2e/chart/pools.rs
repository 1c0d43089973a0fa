//! Node pools with their own kinds in one release.

use std::collections::BTreeMap;

use anyhow::ensure;
use serde_json::{Value, json};

use crate::chart::helm::{chart, object, pod_spec, render, structured, variants_and_modes};
use crate::chart::rights::allowed;
use crate::chart::setup::ChartSetup;
use crate::chart::structured::{claim_template, claiming_pod};
use crate::harness::Cluster;

const POOLS: &str = "ci/node-pools-values.yaml";

/// Whether the labels match a node selector requirement.
fn meets(labels: &BTreeMap<&str, &str>, requirement: &Value) -> bool {
    let value = labels.get(requirement["key"].as_str().expect("a key"));
    let is_among = value.is_some_and(|value| {
        let mut values = requirement["values"].as_array().into_iter().flatten();
        values.any(|one| one == value)
    });
    match requirement["operator"].as_str() {
        Some("In") => is_among,
        Some("NotIn") => !is_among,
        other => unreachable!("{other:?}"),
    }
}

/// Whether the pods of a DaemonSet can run on a node with these labels.
fn runs_on(owner: &Value, labels: &BTreeMap<&str, &str>) -> bool {
    let spec = pod_spec(owner).expect("pods");
    let mut selector = spec["nodeSelector"].as_object().into_iter().flatten();
    let terms = &spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    selector.all(|(key, value)| labels.get(key.as_str()).is_some_and(|label| value == label))
        && terms.as_array().is_none_or(|terms| {
            terms.iter().any(|term| {
                let requirements = term["matchExpressions"].as_array().expect("requirements");
                requirements.iter().all(|requirement| meets(labels, requirement))
            })
        })
}

#[test]
fn each_node_has_the_companion_of_one_pool() {
    let rendered = structured(POOLS, &[]);
    let owners: Vec<&Value> = rendered
        .iter()
        .filter(|object| object["kind"] == "DaemonSet")
        .collect();
    assert_eq!(owners.len(), 4);
    for (pool, arch, expected) in [
        ("", "amd64", "drayman-node"),
        ("other", "arm64", "drayman-node"),
        ("cameras", "amd64", "drayman-node-cameras"),
        ("cameras", "arm64", "drayman-node-cameras"),
        // This node has one of the pool's two labels.
        ("radios", "amd64", "drayman-node"),
        ("radios", "arm64", "drayman-node-radios"),
        ("plain", "amd64", "drayman-node-plain"),
    ] {
        let mut labels = BTreeMap::from([("kubernetes.io/os", "linux"), ("kubernetes.io/arch", arch)]);
        if !pool.is_empty() {
            labels.insert("example.com/pool", pool);
        }
        let names: Vec<&Value> = owners
            .iter()
            .filter(|owner| runs_on(owner, &labels))
            .map(|owner| &owner["metadata"]["name"])
            .collect();
        assert_eq!(names, [expected], "{labels:?}");
    }
    // The operator's own affinity terms are kept.
    let affinity = "--set-json=node.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms=[{\"matchExpressions\":[{\"key\":\"a\",\"operator\":\"In\",\"values\":[\"b\"]}]}]";
    let rendered = structured(POOLS, &[affinity]);
    let owner = object(&rendered, "DaemonSet", "drayman-node");
    let linux = BTreeMap::from([("kubernetes.io/os", "linux")]);
    assert!(!runs_on(owner, &linux));
    let mut with_label = linux;
    with_label.insert("a", "b");
    assert!(runs_on(owner, &with_label));
    with_label.insert("example.com/pool", "cameras");
    assert!(!runs_on(owner, &with_label));
}

#[test]
fn a_pool_has_its_own_kinds_and_shares_the_rest() {
    let rendered = structured(POOLS, &[]);
    let kinds = |name: &str| -> Vec<String> {
        let text = object(&rendered, "ConfigMap", name)["data"]["node.yaml"].clone();
        let configuration: Value = serde_saphyr::from_str(text.as_str().expect("a text")).expect("YAML");
        let kinds = configuration["kinds"].as_array().expect("kinds").iter();
        kinds
            .map(|kind| {
                let name = kind["name"].as_str().or_else(|| kind["preset"].as_str());
                name.expect("a name").to_owned()
            })
            .collect()
    };
    assert_eq!(kinds("drayman-node"), ["kvm"]);
    assert_eq!(kinds("drayman-node-cameras"), ["kvm", "camera"]);
    assert_eq!(kinds("drayman-node-radios"), ["radio"]);
    assert_eq!(kinds("drayman-node-plain"), ["kvm"], "those of the release");
    let pool = object(&rendered, "DaemonSet", "drayman-node-cameras");
    let spec = pod_spec(pool).expect("pods");
    assert_eq!(spec["volumes"][0]["configMap"]["name"], "drayman-node-cameras");
    assert_eq!(spec["serviceAccountName"], "drayman-node");
    assert_eq!(
        spec["tolerations"],
        json!([{ "key": "example.com/pool", "operator": "Exists" }])
    );
    let resources = &spec["containers"][0]["resources"];
    assert_eq!(
        resources,
        &json!({ "requests": { "cpu": "10m", "memory": "16Mi" }, "limits": { "memory": "128Mi" } })
    );
    // One Service, policy and role cover all pools.
    let labels = &pool["spec"]["template"]["metadata"]["labels"];
    for (kind, name, selector) in [
        ("Service", "drayman-node-metrics", "/spec/selector"),
        ("NetworkPolicy", "drayman-node", "/spec/podSelector/matchLabels"),
    ] {
        let selector = object(&rendered, kind, name).pointer(selector);
        for (key, value) in selector.and_then(Value::as_object).expect("labels") {
            assert_eq!(&labels[key], value, "{kind}");
        }
    }
    let mounts =
        |name: &str| pod_spec(object(&rendered, "DaemonSet", name)).expect("pods")["volumes"].to_string();
    assert!(mounts("drayman-node-radios").contains("/pods\""), "mode both");
    assert!(!mounts("drayman-node").contains("/pods\""));
    let classic = render(Some(&chart(POOLS)), &[]);
    let role = object(&classic, "ClusterRole", "drayman-node.drayman");
    assert!(allowed(role).contains("watch resourceclaims.resource.k8s.io []"));
}

/// An upgrade cannot change the DaemonSet's immutable selector, and operators' tools depend on its name.
#[test]
fn pools_leave_the_first_daemon_set_as_it_is() {
    let of_first = |more: &[&str]| {
        let rendered = structured("ci/one-kind-values.yaml", more);
        let mut owner = object(&rendered, "DaemonSet", "drayman-node").clone();
        owner["spec"]["template"]["spec"]["affinity"] = Value::Null;
        owner
    };
    let pool = "--set-json=nodePools=[{\"name\":\"a\",\"nodeSelector\":{\"example.com/pool\":\"a\"}}]";
    assert_eq!(of_first(&[]), of_first(&[pool]));
}

#[test]
fn the_test_pods_tolerate_the_taints_of_every_pool() {
    let pool = "--set-json=nodePools=[{\"name\":\"a\",\"nodeSelector\":{\"example.com/pool\":\"a\"},\
                \"tolerations\":[{\"key\":\"example.com/a\",\"operator\":\"Exists\"}]}]";
    let rendered = structured("ci/one-kind-values.yaml", &[pool]);
    let tolerations = &object(&rendered, "Pod", "drayman-test")["spec"]["tolerations"];
    let expected = json!({ "key": "example.com/a", "operator": "Exists" });
    assert!(
        tolerations.as_array().is_some_and(|all| all.contains(&expected)),
        "{tolerations}"
    );
}

#[test]
fn a_namespace_and_a_registry_hold_for_all_objects() {
    let elsewhere = "--set=namespaceOverride=elsewhere,global.imageRegistry=mirror.example.com";
    for (variant, mode) in &variants_and_modes() {
        for object in render(Some(variant), &[*mode, &[elsewhere]].concat()) {
            let (kind, name) = (&object["kind"], &object["metadata"]["name"]);
            let namespace = &object["metadata"]["namespace"];
            let is_role = kind.as_str().is_some_and(|kind| kind.starts_with("Role"));
            assert!(
                namespace.is_null() || namespace == "elsewhere" || is_role,
                "{kind} {name}: {namespace}"
            );
            if let Some(spec) = pod_spec(&object) {
                let image = spec["containers"][0]["image"].as_str().expect("an image");
                assert!(image.starts_with("mirror.example.com/drayman"), "{image}");
            }
        }
    }
}

/// A pod with a claim of class `test` on a node.
fn pod(name: &str, node: &str) -> Value {
    let mut pod = claiming_pod(name);
    pod["spec"]["nodeSelector"] = json!({ "kubernetes.io/hostname": node });
    pod
}

/// Number of devices that a node publishes.
async fn offered(setup: &ChartSetup, node: &str) -> anyhow::Result<usize> {
    let of_node = format!("--field-selector=spec.nodeName={node}");
    let names = setup
        .field(&["resourceslices", &of_node], ".items[*].spec.devices[*].name")
        .await?;
    Ok(names.split_whitespace().count())
}

/// Number of ready companions of a pool.
async fn ready(setup: &ChartSetup, name: &str) -> anyhow::Result<String> {
    let pool = ["daemonset", name, "--namespace=drayman"];
    setup.field(&pool, ".status.numberReady").await
}

#[tokio::test]
async fn a_running_release_is_divided_into_pools() -> anyhow::Result<()> {
    let setup = ChartSetup::start_with(Cluster::structured(), 2).await?;
    let upgrade = async |more: &[&str]| {
        setup
            .release("upgrade", "drayman", Some("ci/one-kind-values.yaml"), more)
            .await
    };
    let rolled_out = async |name: &str| {
        let object = format!("daemonset/{name}");
        let status = ["rollout", "status", &object, "--namespace=drayman"];
        setup.kubectl(&status).await
    };
    setup.install(Some("ci/one-kind-values.yaml"), &[]).await?;
    rolled_out("drayman-node").await?;
    setup.apply(&claim_template()).await?;
    for (name, node) in [("first", "node-0"), ("second", "node-1")] {
        setup.apply(&pod(name, node)).await?;
        setup.running(name).await?;
        ensure!(setup.devices(name).await?.len() == 1, "{name}");
    }
    let runs = async || {
        anyhow::Ok((
            setup.run_of_pod("first").await?,
            setup.run_of_pod("second").await?,
        ))
    };
    let before = runs().await?;

    let label = ["label", "node", "node-1", "example.com/pool=special"];
    setup.kubectl(&label).await?;
    let pool = "--set-json=nodePools=[{\"name\":\"special\",\"nodeSelector\":{\"example.com/pool\":\"special\"},\
                \"deviceKinds\":[{\"name\":\"test\",\"paths\":[\"/dev/drayman-test-[01]\"]}]}]";
    upgrade(&[pool]).await?;
    for name in ["drayman-node", "drayman-node-special"] {
        rolled_out(name).await?;
        let pods = ready(&setup, name).await?;
        ensure!(pods == "1", "{name} has {pods} pods");
    }
    setup
        .until(
            "the node of the pool offers the devices of its kinds",
            async || Ok(offered(&setup, "node-1").await? == 2 && offered(&setup, "node-0").await? == 3),
        )
        .await?;
    setup.doctor().await?;
    let after = runs().await?;
    ensure!(before == after, "{before:?} {after:?}");

    // The pool's companion knows the devices that the first companion prepared.
    setup.apply(&pod("third", "node-1")).await?;
    let delete = ["delete", "pod", "second"];
    setup.kubectl(&delete).await?;
    setup.running("third").await?;
    ensure!(setup.devices("third").await?.len() == 1);

    // Back to one pool.
    upgrade(&[]).await?;
    rolled_out("drayman-node").await?;
    setup
        .until("the first companion serves both nodes", async || {
            let pods = ready(&setup, "drayman-node").await?;
            Ok(pods == "2" && offered(&setup, "node-1").await? == 3)
        })
        .await?;
    let delete = ["delete", "pod", "first", "third"];
    setup.kubectl(&delete).await?;
    setup.until_no_claims().await?;
    setup.cluster.stop().await
}
