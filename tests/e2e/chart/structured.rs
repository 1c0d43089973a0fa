//! The chart on a cluster that serves `resource.k8s.io/v1`.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};
use drayman::core::allocation::inventory::{Attribute, AttributeSet, Match};
use drayman::host::selectors::{CelEnvironment, Compiled, STACK};
use drayman::node::config::{PRESETS, Preset};
use k8s_openapi::api::resource::v1::{ResourcePool, ResourceSlice, ResourceSliceSpec};
use kube::api::{Api, DeleteParams, ListParams, ObjectMeta, PostParams};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::chart::admitted::{FOREIGN_OWNERS, companion_of_node_a, owner, token_client, validate_variants};
use crate::chart::helm::{
    STRUCTURED, chart, helm, object, objects, one_kind, refusal, render, repository, structured, template,
    variants, yaml,
};
use crate::chart::rights::allowed;
use crate::chart::setup::ChartSetup;
use crate::harness::{Cluster, IMAGE, TIMEOUT};
use crate::structured::rolling_update::no_call_failed;

/// Whether an object is rendered.
fn has(rendered: &[Value], kind: &str) -> bool {
    rendered.iter().any(|object| object["kind"] == kind)
}

#[test]
fn the_version_and_the_served_apis_choose_the_mode() {
    let v1 = "--api-versions=resource.k8s.io/v1";
    for (version, apis, expected) in [
        ("1.30.14", &[][..], "ResourceClass"),
        // Without a cluster, Helm lists the APIs of its own version.
        ("1.30.14", &[v1], "ResourceClass"),
        ("1.33.1", &[v1], "ResourceClass"),
        ("1.34.0", &[v1], "DeviceClass"),
        ("1.37.2-gke.1348000", &[v1], "DeviceClass"),
        (
            "1.37.2",
            &["--api-versions=resource.k8s.io/v1/DeviceClass", v1],
            "DeviceClass",
        ),
    ] {
        let version = format!("--kube-version={version}");
        let arguments = [&[version.as_str()], apis].concat();
        let rendered = one_kind(&arguments);
        for class in ["ResourceClass", "DeviceClass"] {
            assert_eq!(has(&rendered, class), class == expected, "{arguments:?}: {class}");
        }
    }
    let message = refusal(
        Some(&chart("ci/one-kind-values.yaml")),
        &["--kube-version=1.37.2"],
    );
    assert!(
        message.contains("add --api-versions=resource.k8s.io/v1"),
        "{message}"
    );
    // Extended resources do not require a claims API.
    let extended = template(
        Some(&chart("ci/extended-resources-values.yaml")),
        &["--kube-version=1.37.2"],
    );
    assert!(extended.status.success());
}

#[test]
fn nothing_of_classic_mode_is_rendered() {
    for variant in variants() {
        for object in render(Some(&variant), &STRUCTURED) {
            let what = format!("{} {} of {variant:?}", object["kind"], object["metadata"]["name"]);
            let component = &object["metadata"]["labels"]["app.kubernetes.io/component"];
            for classic in ["controller", "crds"] {
                assert_ne!(component, classic, "{what}");
            }
            assert_ne!(object["kind"], "Deployment", "{what}");
            let version = object["apiVersion"].as_str().expect("a version");
            assert!(!version.starts_with("drayman.dev/"), "{what}");
            assert_ne!(version, "resource.k8s.io/v1alpha2", "{what}");
            if object["kind"] == "ClusterRole" {
                for right in allowed(&object) {
                    let classic = ["drayman.dev", "resourceclasses", "podschedulingcontexts"];
                    assert!(
                        !classic.iter().any(|word| right.contains(word)),
                        "{what}: {right}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_uninstall_is_checked_with_the_account_of_the_companion() {
    let job = |more: &[&str]| {
        let rendered = structured("ci/one-kind-values.yaml", more);
        let mut jobs = rendered.into_iter().filter(|object| object["kind"] == "Job");
        jobs.find(|job| job["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete")
    };
    let account = job(&[]).expect("a Job")["spec"]["template"]["spec"]["serviceAccountName"].clone();
    assert_eq!(account, "drayman-node");
    assert!(job(&["--set=uninstallCheck=false"]).is_none());
    assert!(job(&["--set=node.enabled=false,deviceKinds=null"]).is_none());
}

#[test]
fn the_values_of_the_controller_have_no_effect() {
    for values in ["ci/one-kind-values.yaml", "ci/everything-values.yaml"] {
        let usual = structured(values, &[]);
        for value in [
            "controller.enabled=false",
            "controller.metricsPort=0",
            "controller.leaderElection.enabled=false",
            "controller.nodeSelector.disk=fast",
            "controller.tolerations[0].operator=Exists",
            "crds.upgrade=true",
        ] {
            assert_eq!(structured(values, &[&format!("--set={value}")]), usual, "{value}");
        }
    }
}

/// The selectors of a rendered class, each as a map with its expression.
fn selectors(rendered: &[Value], class: &str) -> Vec<String> {
    let class = object(rendered, "DeviceClass", class);
    assert_eq!(class["apiVersion"], "resource.k8s.io/v1");
    let fields: Vec<&String> = class["spec"].as_object().expect("a spec").keys().collect();
    assert_eq!(fields, ["selectors"]);
    let selectors = class["spec"]["selectors"].as_array().expect("selectors");
    selectors
        .iter()
        .map(|selector| selector["cel"]["expression"].as_str().expect("a text").to_owned())
        .collect()
}

#[test]
fn a_device_class_has_driver_kind_and_own_selectors() {
    let rendered = structured("ci/one-kind-values.yaml", &[]);
    assert_eq!(
        selectors(&rendered, "test"),
        [r#"device.driver == "drayman.dev" && device.attributes["drayman.dev"].kind == "test""#]
    );
    let rendered = structured("ci/everything-values.yaml", &[]);
    let found = selectors(&rendered, "serial");
    assert_eq!(
        found,
        [
            r#"device.driver == "devices.example.com" && device.attributes["drayman.dev"].kind == "serial""#,
            r#"device.attributes["drayman.dev"].major == 188"#,
        ]
    );
    let classic = render(Some(&chart("ci/everything-values.yaml")), &[]);
    let classic = object(&classic, "DeviceClassParameters", "serial");
    assert_eq!(
        classic["spec"]["selectors"][0]["cel"]["expression"],
        found[1].as_str()
    );
}

#[test]
fn a_device_class_matches_its_driver_and_kind_only() {
    let [expression] = selectors(&structured("ci/one-kind-values.yaml", &[]), "test")
        .try_into()
        .expect("one selector");
    // The parser needs a large stack.
    let evaluated = std::thread::Builder::new().stack_size(STACK).spawn(move || {
        let compiled = Compiled::new(&expression).expect("an expression");
        let attributes = |kind: &str| {
            let kind = Attribute::String(kind.into());
            AttributeSet::from_iter([("drayman.dev/kind".into(), kind)])
        };
        let matched = |driver: &str, attributes: &AttributeSet| {
            matches!(
                compiled.evaluate(&CelEnvironment::new(driver), attributes),
                Match::Yes
            )
        };
        assert!(matched("drayman.dev", &attributes("test")));
        assert!(!matched("drayman.dev", &attributes("other")));
        assert!(!matched("other.example.com", &attributes("test")));
        // A device of another driver lacks the attribute; the expression must not fail on it.
        let none = AttributeSet::from_iter([]);
        let other = compiled.evaluate(&CelEnvironment::new("other.example.com"), &none);
        assert!(matches!(other, Match::No), "{other:?}");
    });
    evaluated.expect("a thread").join().expect("no panic");
}

#[test]
fn the_companion_reads_claims_and_writes_slices() {
    let expected: BTreeSet<String> = [
        "get nodes. []",
        "get resourceclaims.resource.k8s.io []",
        "list resourceclaims.resource.k8s.io []",
        "get resourceslices.resource.k8s.io []",
        "list resourceslices.resource.k8s.io []",
        "watch resourceslices.resource.k8s.io []",
        "create resourceslices.resource.k8s.io []",
        "update resourceslices.resource.k8s.io []",
        "delete resourceslices.resource.k8s.io []",
    ]
    .map(str::to_owned)
    .into();
    let tested = std::fs::read_to_string(repository("hack/rbac.yaml")).expect("hack/rbac.yaml");
    let tested = objects(&tested);
    assert_eq!(
        allowed(object(&tested, "ClusterRole", "drayman-node-structured")),
        expected
    );
    let both = [
        "--set=deviceKinds[0].mode=both",
        "--set=deviceKinds[0].resourceName=example.com/camera",
    ];
    for more in [&[][..], &both] {
        let rendered = structured("ci/one-kind-values.yaml", more);
        let role = object(&rendered, "ClusterRole", "drayman-node.drayman");
        assert_eq!(allowed(role), expected, "{more:?}");
        let events = object(&rendered, "Role", "drayman-node.drayman");
        assert_eq!(
            allowed(events),
            BTreeSet::from(["create events.events.k8s.io []".to_owned()])
        );
    }
}

#[test]
fn users_read_classes_and_viewers_read_slices() {
    let rendered = structured("ci/one-kind-values.yaml", &[]);
    let rights = |name: &str| {
        allowed(object(
            &rendered,
            "ClusterRole",
            &format!("drayman-{name}.drayman"),
        ))
    };
    let reads =
        |resource: &str| ["get", "list", "watch"].map(|verb| format!("{verb} {resource}.resource.k8s.io []"));
    assert_eq!(rights("read"), reads("deviceclasses").into());
    let viewed = [
        "resourceclaims",
        "resourceclaimtemplates",
        "deviceclasses",
        "resourceslices",
        "devicetaintrules",
    ];
    assert_eq!(
        rights("view"),
        viewed.iter().flat_map(|resource| reads(resource)).collect()
    );
    assert!(
        rights("edit")
            .iter()
            .all(|right| right.contains(" resourceclaim"))
    );
    let open = structured(
        "ci/one-kind-values.yaml",
        &["--set=rbac.readInventoriesByAuthenticated=true"],
    );
    let open = allowed(object(&open, "ClusterRole", "drayman-read.drayman"));
    let more: BTreeSet<String> = open.difference(&rights("read")).cloned().collect();
    let expected = ["resourceslices", "devicetaintrules"];
    assert_eq!(
        more,
        expected.iter().flat_map(|resource| reads(resource)).collect()
    );
}

#[test]
fn classes_of_shared_presets_need_kubernetes_1_36() {
    let rendered = |preset: &Preset, more: &[&str]| {
        let name = preset.name;
        let kind =
            format!("--set=deviceKinds[0].preset={name},classes[0].name={name},classes[0].kind={name}");
        let arguments = [&STRUCTURED[1..], &[kind.as_str()], more].concat();
        template(None, &arguments).status.success()
    };
    for preset in &PRESETS {
        let is_exclusive = preset.shares.is_none();
        let old = "--kube-version=1.35.4";
        assert_eq!(rendered(preset, &[old]), is_exclusive, "{}", preset.name);
        assert!(
            rendered(preset, &[old, "--set=deviceKinds[0].shares=1"]),
            "{}",
            preset.name
        );
        assert!(rendered(preset, &["--kube-version=1.36.0"]), "{}", preset.name);
    }
}

#[test]
fn the_policy_covers_every_write_of_a_slice() {
    let rendered = structured("ci/one-kind-values.yaml", &[]);
    let policy = &object(&rendered, "ValidatingAdmissionPolicy", "drayman-node.drayman")["spec"];
    assert_eq!(policy["failurePolicy"], "Fail");
    assert_eq!(
        policy["matchConstraints"],
        json!({ "resourceRules": [{
            "apiGroups": ["resource.k8s.io"], "apiVersions": ["v1"],
            "operations": ["CREATE", "UPDATE", "DELETE"], "resources": ["resourceslices"],
        }] })
    );
    assert_eq!(
        policy["matchConditions"][0]["expression"],
        r#"request.userInfo.username == "system:serviceaccount:drayman:drayman-node""#
    );
    let binding = &object(
        &rendered,
        "ValidatingAdmissionPolicyBinding",
        "drayman-node.drayman",
    )["spec"];
    assert_eq!(binding["policyName"], "drayman-node.drayman");
    assert_eq!(binding["validationActions"], json!(["Deny"]));
    // With another driver name and account.
    let other = structured(
        "ci/everything-values.yaml",
        &["--set=admissionPolicy.enabled=auto"],
    );
    let policy = object(&other, "ValidatingAdmissionPolicy", "devices-node.drayman").to_string();
    assert!(
        policy.contains("system:serviceaccount:drayman:devices-node-account"),
        "{policy}"
    );
    assert!(
        policy.contains("devices.example.com") && !policy.contains("drayman.dev\\\""),
        "{policy}"
    );
    assert!(!has(
        &structured(
            "ci/one-kind-values.yaml",
            &["--set=admissionPolicy.enabled=never"]
        ),
        "ValidatingAdmissionPolicy"
    ));
}

#[test]
fn an_update_surges_only_if_configured() {
    let strategy = |more: &[&str]| {
        let rendered = structured("ci/one-kind-values.yaml", more);
        object(&rendered, "DaemonSet", "drayman-node")["spec"]["updateStrategy"].clone()
    };
    let usual = json!({ "type": "RollingUpdate", "rollingUpdate": { "maxUnavailable": 1 } });
    assert_eq!(strategy(&[]), usual);
    let classic = one_kind(&[]);
    assert_eq!(
        object(&classic, "DaemonSet", "drayman-node")["spec"]["updateStrategy"],
        usual
    );
    let surge = [
        "--set=node.updateStrategy.maxSurge=25%",
        "--set=node.updateStrategy.maxUnavailable=0",
    ];
    assert_eq!(
        strategy(&surge),
        json!({ "type": "RollingUpdate", "rollingUpdate": { "maxUnavailable": 0, "maxSurge": "25%" } })
    );
    assert_eq!(
        strategy(&["--set=node.updateStrategy.type=OnDelete"]),
        json!({ "type": "OnDelete" })
    );
}

/// The notes of a release. Helm prints them only with a cluster, so a copy of the chart renders them into an object.
fn notes(values: &str, mode: &[&str]) -> String {
    let copy = tempfile::tempdir().expect("a directory");
    let ours = Command::new("cp")
        .arg("--recursive")
        .arg(chart("."))
        .arg(copy.path())
        .status();
    assert!(ours.expect("cp").success());
    std::fs::copy(copy.path().join("templates/NOTES.txt"), copy.path().join("notes")).expect("copied");
    let object = "notes: {{ tpl (.Files.Get \"notes\") . | toJson }}\n";
    std::fs::write(copy.path().join("templates/notes.yaml"), object).expect("written");
    let home = tempfile::tempdir().expect("a directory");
    let output = helm(home.path())
        .args(["template", "drayman"])
        .arg(copy.path())
        .args([
            "--namespace=drayman",
            "--show-only=templates/notes.yaml",
            "--values",
        ])
        .arg(chart(values))
        .args(mode)
        .output()
        .expect("Helm runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let file = home.path().join("notes.yaml");
    std::fs::write(&file, output.stdout).expect("written");
    yaml(Path::new(&file))["notes"]
        .as_str()
        .expect("a text")
        .to_owned()
}

#[test]
fn the_notes_name_the_mode_and_show_its_claim() {
    let classic = ["--kube-version=1.30.14"];
    for (values, mode, expected) in [
        ("ci/one-kind-values.yaml", &classic[..], "in classic mode"),
        ("ci/one-kind-values.yaml", &STRUCTURED, "in structured mode"),
        (
            "ci/one-kind-values.yaml",
            &STRUCTURED,
            "controller.enabled has no effect",
        ),
        (
            "ci/one-kind-values.yaml",
            &STRUCTURED,
            "kubectl get resourceslices",
        ),
        (
            "ci/everything-values.yaml",
            &STRUCTURED,
            "The class serial has policy and suitableNodes",
        ),
        ("ci/extended-resources-values.yaml", &classic, "without claims"),
        (
            "ci/extended-resources-values.yaml",
            &STRUCTURED,
            "in structured mode",
        ),
        ("ci/defaults-values.yaml", &STRUCTURED, "deviceKinds is empty"),
    ] {
        let message = notes(values, mode);
        assert!(message.contains(expected), "{values} {mode:?}: {message}");
    }
    assert!(!notes("ci/one-kind-values.yaml", &classic).contains("has no effect"));
    for (mode, version, claim) in [
        (&classic[..], "v1alpha2", json!({ "resourceClassName": "test" })),
        (
            &STRUCTURED,
            "v1",
            json!({ "devices": { "requests": [{ "name": "device", "exactly": { "deviceClassName": "test" } }] } }),
        ),
    ] {
        let message = notes("ci/one-kind-values.yaml", mode);
        let example = message.split_once("class test:\n").expect("an example").1;
        let example = example.split("\nBefore").next().unwrap_or_default();
        let objects = objects(example);
        assert_eq!(objects[0]["apiVersion"], format!("resource.k8s.io/{version}"));
        assert_eq!(objects[0]["spec"]["spec"], claim);
        let reference = &objects[1]["spec"]["resourceClaims"][0];
        let name = match version {
            "v1" => &reference["resourceClaimTemplateName"],
            _ => &reference["source"]["resourceClaimTemplateName"],
        };
        assert_eq!(*name, objects[0]["metadata"]["name"]);
    }
}

#[test]
fn helm_test_claims_a_device_in_both_modes() {
    let name = json!("drayman-test");
    for (rendered, version, reference) in [
        (
            one_kind(&[]),
            "v1alpha2",
            json!({ "name": "device", "source": { "resourceClaimTemplateName": name } }),
        ),
        (
            structured("ci/one-kind-values.yaml", &[]),
            "v1",
            json!({ "name": "device", "resourceClaimTemplateName": name }),
        ),
    ] {
        let template = object(&rendered, "ResourceClaimTemplate", "drayman-test");
        assert_eq!(template["apiVersion"], format!("resource.k8s.io/{version}"));
        let pod = object(&rendered, "Pod", "drayman-test");
        assert_eq!(pod["spec"]["resourceClaims"], json!([reference]));
    }
}

fn slice(name: &str, node: &str, driver: &str, pool: &str) -> ResourceSlice {
    ResourceSlice {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        },
        spec: ResourceSliceSpec {
            driver: driver.to_owned(),
            node_name: Some(node.to_owned()),
            pool: ResourcePool {
                name: pool.to_owned(),
                generation: 1,
                resource_slice_count: 1,
            },
            ..ResourceSliceSpec::default()
        },
    }
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one policy, case by case")]
async fn the_token_of_a_node_writes_only_its_own_slices() -> anyhow::Result<()> {
    let builder = Cluster::structured().service_accounts();
    let setup = ChartSetup::prepare(builder.start().await?).await?;
    let notes = setup.install(Some("ci/one-kind-values.yaml"), &[]).await?;
    ensure!(notes.contains("in structured mode"), "{notes}");
    setup.field(&["deviceclass", "test"], ".spec.selectors").await?;

    let admin = Api::<ResourceSlice>::all(setup.cluster.client());
    let ours = companion_of_node_a(&setup, "resourceslices.resource.k8s.io").await?;
    let ours = Api::<ResourceSlice>::all(ours);
    let post = PostParams::default();
    let create = |name: &'static str, node: &'static str, driver: &'static str, pool: &'static str| {
        let (ours, post) = (ours.clone(), post.clone());
        async move {
            let slice = slice(name, node, driver, pool);
            let created = ours.create(&post, &slice).await;
            created.map_err(|error| error.to_string())
        }
    };
    // The API server learns of policies and roles through its own watches.
    let of_node = "the companion of node node-a may write ResourceSlices of this node and of the driver drayman.dev only";
    setup
        .until("the policy is in force", async || {
            let foreign = create("node-b.drayman.dev-99", "node-b", "drayman.dev", "node-b").await;
            Ok(foreign.is_err_and(|error| error.contains(of_node)))
        })
        .await?;
    // A slice that was created before the policy was in force.
    let _ = admin
        .delete("node-b.drayman.dev-99", &DeleteParams::default())
        .await;

    // Its own slice: create, replace, delete.
    let mut own = create("node-a.drayman.dev-00", "node-a", "drayman.dev", "node-a")
        .await
        .map_err(anyhow::Error::msg)?;
    own.spec.pool.generation = 2;
    own.metadata.owner_references = Some(vec![owner(&setup, "Node", "node-a").await?]);
    let mut own = ours.replace("node-a.drayman.dev-00", &post, &own).await?;
    // An owner other than its Node.
    for (kind, name) in FOREIGN_OWNERS {
        own.metadata.owner_references = Some(vec![owner(&setup, kind, name).await?]);
        let replaced = ours.replace("node-a.drayman.dev-00", &post, &own).await;
        let mut new = slice("node-a.drayman.dev-01", "node-a", "drayman.dev", "node-a");
        new.metadata
            .owner_references
            .clone_from(&own.metadata.owner_references);
        let created = ours.create(&post, &new).await;
        for answer in [replaced, created] {
            let error = answer.expect_err("a foreign owner").to_string();
            ensure!(
                error.contains("the Node node-a is the only owner"),
                "{kind} {name}: {error}"
            );
        }
    }
    ours.delete("node-a.drayman.dev-00", &DeleteParams::default())
        .await?;

    // Slices of another node or driver.
    for (name, node, driver, pool) in [
        ("node-b.drayman.dev-00", "node-b", "drayman.dev", "node-b"),
        ("node-a.drayman.dev-00", "node-b", "drayman.dev", "node-a"),
        (
            "node-a.other.example.com-00",
            "node-a",
            "other.example.com",
            "node-a",
        ),
    ] {
        let error = create(name, node, driver, pool).await.expect_err("create");
        ensure!(error.contains(of_node), "{name}: {error}");
        let mut stored = admin.create(&post, &slice(name, node, driver, pool)).await?;
        stored.spec.pool.generation = 2;
        let error = ours.replace(name, &post, &stored).await.expect_err("replace");
        ensure!(error.to_string().contains(of_node), "{name}: {error}");
        let delete = DeleteParams::default();
        let error = ours.delete(name, &delete).await.expect_err("delete");
        ensure!(error.to_string().contains(of_node), "{name}: {error}");
        let all = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let error = ours
            .delete_collection(&delete, &all)
            .await
            .expect_err("delete all");
        ensure!(error.to_string().contains(of_node), "{name}: {error}");
        admin.delete(name, &delete).await?;
    }
    // A slice for all nodes.
    let mut of_all = slice("node-a.drayman.dev-00", "", "drayman.dev", "node-a");
    (of_all.spec.node_name, of_all.spec.all_nodes) = (None, Some(true));
    let error = ours
        .create(&post, &of_all)
        .await
        .expect_err("all nodes")
        .to_string();
    ensure!(error.contains(of_node), "{error}");
    // The name or the pool of another node's slice, with its own node.
    let of_pool = "the companion of node node-a may create ResourceSlices of the pool node-a with names such as \
                   node-a.drayman.dev-00 only";
    for (name, pool) in [
        ("node-b.drayman.dev-00", "node-a"),
        ("node-a.drayman.dev-x.drayman.dev-00", "node-a"),
        ("node-a.drayman.dev-", "node-a"),
        ("a", "node-a"),
        ("node-a.drayman.dev-00", "node-b"),
    ] {
        let error = create(name, "node-a", "drayman.dev", pool)
            .await
            .expect_err("create");
        // The server refuses an invalid name by itself.
        ensure!(
            error.contains(of_pool) || name.ends_with('-'),
            "{name} {pool}: {error}"
        );
    }
    // A stored slice of its node that has another name or pool can be deleted.
    admin
        .create(&post, &slice("old", "node-a", "drayman.dev", "old"))
        .await?;
    ours.delete("old", &DeleteParams::default()).await?;

    // A token that is not bound to a pod.
    let unbound = Api::<ResourceSlice>::all(token_client(&setup, "drayman-node", None).await?);
    let own = slice("node-a.drayman.dev-00", "node-a", "drayman.dev", "node-a");
    let error = unbound
        .create(&post, &own)
        .await
        .expect_err("no node")
        .to_string();
    ensure!(
        error.contains("this token is not that of a pod on a node"),
        "{error}"
    );
    // Other accounts are not restricted.
    admin
        .create(&post, &slice("other", "node-b", "other.example.com", "node-b"))
        .await?;
    setup.cluster.stop().await
}

#[tokio::test]
async fn the_api_server_accepts_every_variant_in_structured_mode() -> anyhow::Result<()> {
    let setup = ChartSetup::prepare(Cluster::structured().start().await?).await?;
    validate_variants(&setup, &STRUCTURED.map(str::to_owned)).await?;
    setup.cluster.stop().await
}

/// A template for claims of one device of the class `test`.
pub(crate) fn claim_template() -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
        "metadata": { "name": "test", "namespace": "default" },
        "spec": { "spec": { "devices": { "requests": [
            { "name": "device", "exactly": { "deviceClassName": "test" } },
        ] } } },
    })
}

/// A pod with a claim from that template.
pub(crate) fn claiming_pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "automountServiceAccountToken": false,
            "resourceClaims": [{ "name": "device", "resourceClaimTemplateName": "test" }],
            "containers": [{
                "name": "main", "image": IMAGE, "imagePullPolicy": "Never",
                "resources": { "claims": [{ "name": "device" }] },
            }],
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 1,
        },
    })
}

/// Creates pods one after the other, and counts those that ran.
async fn pods(setup: &ChartSetup, name: &str, ran: &watch::Sender<usize>) -> anyhow::Result<Infallible> {
    for number in 0.. {
        let pod = format!("{name}-{number}");
        setup.apply(&claiming_pod(&pod)).await?;
        setup.running(&pod).await?;
        ensure!(setup.devices(&pod).await?.len() == 1);
        ran.send_modify(|ran| *ran += 1);
        setup.kubectl(&["delete", "pod", &pod]).await?;
    }
    unreachable!("the numbers end");
}

#[tokio::test]
async fn pods_start_while_a_daemon_set_with_surge_rolls_out() -> anyhow::Result<()> {
    let setup = ChartSetup::start_with(Cluster::structured(), 1).await?;
    let surge = [
        "--set=node.updateStrategy.maxSurge=1",
        "--set=node.updateStrategy.maxUnavailable=0",
    ];
    setup.install(Some("ci/one-kind-values.yaml"), &surge).await?;
    let rollout = |verb| ["rollout", verb, "daemonset/drayman-node", "--namespace=drayman"];
    setup.kubectl(&rollout("status")).await?;
    setup.apply(&claim_template()).await?;
    setup.apply(&claiming_pod("before")).await?;
    setup.running("before").await?;
    let device = setup.devices("before").await?;
    ensure!(device.len() == 1);
    setup.doctor().await?;

    let slice = || setup.field(&["resourceslices"], ".items[*].metadata.uid");
    let (published, run) = (slice().await?, setup.run_of_pod("before").await?);
    let ran = watch::Sender::new(0);
    let mut counted = ran.subscribe();
    let updates = async {
        // An even number, so that the last companion uses the same sockets as the first.
        for _ in 0..2 {
            setup.kubectl(&rollout("restart")).await?;
            setup.kubectl(&rollout("status")).await?;
            // At most two pods have been started before.
            let before = *counted.borrow_and_update();
            let more = counted.wait_for(|ran| *ran > before + 2);
            timeout(TIMEOUT, more).await.context("pods run")??;
        }
        anyhow::Ok(())
    };
    tokio::select! {
        ended = updates => ended?,
        ended = pods(&setup, "first", &ran) => match ended? {},
        ended = pods(&setup, "second", &ran) => match ended? {},
    }
    no_call_failed(&setup.cluster).await?;
    ensure!(slice().await? == published, "the slices were not deleted");
    ensure!(setup.run_of_pod("before").await? == run);
    ensure!(setup.devices("before").await? == device);

    let uninstall = ["uninstall", "drayman", "--namespace", "drayman", "--wait"];
    let refused = setup.helm(&uninstall).await.expect_err("a claim is in use");
    ensure!(
        refused.to_string().contains("job drayman-uninstall failed"),
        "{refused}"
    );
    let log = ["logs", "job/drayman-uninstall", "--namespace=drayman"];
    let message = setup.kubectl(&log).await?;
    ensure!(message.contains("used by pod before"), "{message}");
    for objects in ["pods", "resourceclaims"] {
        setup
            .kubectl(&["delete", objects, "--all", "--namespace=default"])
            .await?;
    }
    setup.helm(&uninstall).await?;
    setup.cluster.stop().await
}
