//! The lifecycle of a release on real nodes: install, use, upgrade, rollback, node drain, uninstall.

use std::collections::BTreeSet;

use anyhow::ensure;
use serde_json::{Value, json};

use crate::chart::helm::{chart, repository, yaml};
use crate::chart::setup::{ChartSetup, Run};
use crate::harness::IMAGE;

pub(crate) const CONTROLLER: &str =
    "app.kubernetes.io/instance=drayman,app.kubernetes.io/component=controller";
pub(crate) const COMPANION: &str = "app.kubernetes.io/instance=drayman,app.kubernetes.io/component=node";

/// A pod with one container and a claim for each template.
pub(crate) fn pod(name: &str, templates: &[&str]) -> Value {
    let claims: Vec<Value> = templates.iter().map(|name| json!({ "name": name })).collect();
    let sources: Vec<Value> = templates
        .iter()
        .map(|name| json!({ "name": name, "source": { "resourceClaimTemplateName": name } }))
        .collect();
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "automountServiceAccountToken": false,
            "resourceClaims": sources,
            "containers": [{
                "name": "main", "image": IMAGE, "imagePullPolicy": "Never", "resources": { "claims": claims },
            }],
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 1,
        },
    })
}

pub(crate) fn template(name: &str, class: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaimTemplate",
        "metadata": { "name": name, "namespace": "default" },
        "spec": { "spec": { "resourceClassName": class } },
    })
}

/// The existing claims with their allocation.
pub(crate) async fn claims(setup: &ChartSetup) -> anyhow::Result<String> {
    setup
        .field(
            &["resourceclaims", "--all-namespaces"],
            "range .items[*]}{.metadata.name}={.status.allocation}{\"\\n\"}{end",
        )
        .await
}

/// Files of drayman on a node.
fn files(setup: &ChartSetup, number: usize) -> anyhow::Result<Vec<String>> {
    let node = setup.cluster.node(number);
    let mut files = Vec::new();
    for directory in [
        "/run/cdi",
        "/var/lib/kubelet/plugins_registry/drayman.dev",
        "/var/lib/kubelet/plugins/drayman.dev",
    ] {
        files.extend(
            node.list(directory)?
                .into_iter()
                .map(|name| format!("{directory}/{name}")),
        );
    }
    Ok(files)
}

#[tokio::test]
async fn a_release_is_upgraded_rolled_back_and_removed_safely() -> anyhow::Result<()> {
    let setup = ChartSetup::start(1).await?;
    let values = chart("ci/one-kind-values.yaml");
    setup.deploy("install", &values, &[]).await?;
    setup.ready("node-0.drayman.dev").await?;
    println!(
        "{}",
        setup.helm(&["test", "drayman", "--namespace", "drayman"]).await?
    );

    // The example of the documentation, with the installed classes.
    setup
        .apply(&yaml(&repository("examples/basic/claim-template.yaml")))
        .await?;
    setup.apply(&yaml(&repository("examples/basic/pod.yaml"))).await?;
    setup.running("basic").await?;
    let devices = setup.devices("basic").await?;
    assert_eq!(devices.len(), 1, "{devices:?}");
    let before = (setup.run_of_pod("basic").await?, claims(&setup).await?);
    let first = setup.run_of("drayman", COMPANION).await?;

    look_from_outside(&setup).await?;
    ask_the_doctor(&setup).await?;
    ask_in_the_companion_s_pod(&setup).await?;

    // An upgrade that replaces both programs while the claim is in use.
    setup
        .deploy("upgrade", &values, &["--set=logging.verbosity=4"])
        .await?;
    let second = setup.run_of("drayman", COMPANION).await?;
    assert_ne!(first.uid, second.uid, "the companion was replaced");
    assert_eq!((setup.run_of_pod("basic").await?, claims(&setup).await?), before);
    assert_eq!(setup.devices("basic").await?, devices);
    setup.ready("node-0.drayman.dev").await?;
    // The new programs know the allocated devices.
    setup.apply(&pod("after-upgrade", &["test"])).await?;
    setup.running("after-upgrade").await?;
    let other = setup.devices("after-upgrade").await?;
    assert_eq!(other.len(), 1);
    assert_ne!(other, devices, "one holder");
    setup.kubectl(&["delete", "pod", "after-upgrade"]).await?;

    follow_the_configuration(&setup, &second).await?;

    setup
        .helm(&["rollback", "drayman", "1", "--namespace", "drayman"])
        .await?;
    setup.rolled_out("drayman", "drayman").await?;
    let third = setup.run_of("drayman", COMPANION).await?;
    assert_ne!(second.uid, third.uid);
    assert_eq!(setup.run_of_pod("basic").await?, before.0);
    assert_eq!(setup.devices("basic").await?, devices);
    assert_eq!(
        (first.restarts, second.restarts, third.restarts),
        (0, 0, 0),
        "no container was restarted"
    );

    leave_in_the_right_order(&setup).await?;
    setup.cluster.stop().await
}

/// Deletes first the pods and claims, then the release. Nothing is left.
async fn leave_in_the_right_order(setup: &ChartSetup) -> anyhow::Result<()> {
    setup.kubectl(&["delete", "pod", "basic"]).await?;
    setup.until_no_claims().await?;
    setup
        .helm(&["uninstall", "drayman", "--namespace", "drayman", "--wait"])
        .await?;
    setup
        .until("the pods have ended", async || {
            let pods = ["get", "pods", "--namespace=drayman", "--output=name"];
            Ok(setup.kubectl(&pods).await?.is_empty())
        })
        .await?;
    let kinds = "deployments,daemonsets,pods,configmaps,serviceaccounts,roles,rolebindings,jobs";
    for (kinds, scope) in [
        (kinds, "--namespace=drayman"),
        (
            "clusterroles,clusterrolebindings,resourceclasses,deviceclassparameters",
            "--all-namespaces",
        ),
        (
            "validatingadmissionpolicies,validatingadmissionpolicybindings",
            "--all-namespaces",
        ),
    ] {
        // API servers before 1.30 do not serve this kind.
        if kinds.starts_with("validating") && setup.cluster.minor() < 30 {
            continue;
        }
        let left = setup
            .kubectl(&[
                "get",
                kinds,
                scope,
                "--output=name",
                "--selector=app.kubernetes.io/instance=drayman",
            ])
            .await?;
        assert_eq!(left, "", "nothing of the release is left");
    }
    let crds = setup
        .kubectl(&["get", "customresourcedefinitions", "--output=name"])
        .await?;
    assert_eq!(
        crds.lines().count(),
        3,
        "the CRDs and their objects are kept: {crds}"
    );
    let left = files(setup, 0)?;
    let sockets: Vec<_> = left
        .iter()
        .filter(|file| file.contains(".sock") || file.contains("cdi/"))
        .collect();
    assert!(sockets.is_empty(), "{left:?}");
    Ok(())
}

/// A changed path of a kind reaches the running companion.
async fn follow_the_configuration(setup: &ChartSetup, companion: &Run) -> anyhow::Result<()> {
    setup.cluster.node(0).make_device("/dev/drayman-more-0", 1, 7)?;
    let more = [
        "--set=logging.verbosity=4",
        "--set=deviceKinds[0].paths={/dev/drayman-test-*,/dev/drayman-more-*}",
    ];
    let kind = ["--set=deviceKinds[0].name=test"];
    setup
        .deploy(
            "upgrade",
            &chart("ci/one-kind-values.yaml"),
            &[&more[..], &kind].concat(),
        )
        .await?;
    // Kubelet syncs a changed pod and its volumes at once; otherwise within 90 seconds.
    let selector = format!("--selector={COMPANION}");
    setup
        .kubectl(&[
            "annotate",
            "pods",
            "--namespace=drayman",
            &selector,
            "example.com/look=now",
        ])
        .await?;
    setup
        .until("the new device is in the inventory", async || {
            let devices = setup
                .field(&["nodeinventory", "node-0.drayman.dev"], ".spec.devices[*].name")
                .await?;
            Ok(devices.contains("drayman-more-0"))
        })
        .await?;
    assert_eq!(&setup.run_of("drayman", COMPANION).await?, companion);
    Ok(())
}

/// Runs commands in the companion's pod without flags, as in docs/operator/troubleshoot.md.
async fn ask_in_the_companion_s_pod(setup: &ChartSetup) -> anyhow::Result<()> {
    let ask = async |words: &[&str]| {
        let exec = [
            "--namespace=drayman",
            "exec",
            "daemonset/drayman-node",
            "--",
            "/drayman",
            "node",
        ];
        setup.kubectl(&[&exec[..], words].concat()).await
    };
    let holdings = ask(&["holdings"]).await?;
    println!("{holdings}");
    ensure!(
        holdings.lines().count() == 2 && holdings.contains("basic") && holdings.contains("drayman-test-"),
        "{holdings}"
    );
    // The devices of the node, from the companion's own configuration.
    let found = ask(&["discover"]).await?;
    println!("{found}");
    let devices = found.lines().filter(|line| line.starts_with("test "));
    assert_eq!(devices.count(), 3, "{found}");
    let uid = holdings
        .lines()
        .last()
        .and_then(|line| line.split_whitespace().next());
    let refused = ask(&["release", uid.unwrap_or_default()])
        .await
        .expect_err("kubelet lists the claim")
        .to_string();
    ensure!(refused.contains("kubelet"), "{refused}");
    Ok(())
}

/// `drayman doctor` finds no problem on a working release, and all rights of both accounts.
async fn ask_the_doctor(setup: &ChartSetup) -> anyhow::Result<()> {
    let message = setup.doctor().await?;
    for account in ["drayman-controller", "drayman-node"] {
        let fine = format!("system:serviceaccount:drayman:{account} has all permissions that the");
        ensure!(message.contains(&fine), "{account}: {message}");
    }
    Ok(())
}

/// Reads metrics and probes of both programs from outside the pods.
async fn look_from_outside(setup: &ChartSetup) -> anyhow::Result<()> {
    for (labels, lines) in [
        (
            CONTROLLER,
            [
                "leader_election_master_status{name=\"drayman.dev\"} 1",
                "component=\"controller\"",
                "rest_client_requests_total{code=\"200\",method=\"PATCH\"}",
            ],
        ),
        (
            COMPANION,
            [
                "drayman_node_ready 1",
                "component=\"node\"",
                "rest_client_requests_total{code=\"200\",method=\"PATCH\"}",
            ],
        ),
    ] {
        let selector = format!("--selector={labels}");
        let address = setup
            .field(
                &["pods", "--namespace=drayman", &selector],
                ".items[0].status.podIP",
            )
            .await?;
        let ask = async |port: u16, path: &str| {
            let url = format!("http://{address}:{port}{path}");
            setup
                .kubectl(&["exec", "basic", "--", "wget", "-qO-", &url])
                .await
        };
        let metrics = ask(8080, "/metrics").await?;
        for line in lines {
            ensure!(metrics.contains(line), "{line} is not in {metrics}");
        }
        for path in ["/livez", "/readyz", "/healthz"] {
            assert_eq!(ask(8081, path).await?, "ok", "{path} of {labels}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_release_removed_too_early_is_installed_again() -> anyhow::Result<()> {
    let setup = ChartSetup::start(1).await?;
    let values = chart("ci/one-kind-values.yaml");
    setup.deploy("install", &values, &[]).await?;
    setup.apply(&template("test", "test")).await?;
    setup.apply(&pod("left", &["test"])).await?;
    setup.running("left").await?;
    let devices = setup.devices("left").await?;

    // The pre-delete hook refuses because of the claim and the pod; Helm deletes nothing.
    let uninstall = ["uninstall", "drayman", "--namespace", "drayman", "--wait"];
    let refusal = setup
        .helm(&uninstall)
        .await
        .expect_err("a claim is in use")
        .to_string();
    ensure!(refusal.contains("job drayman-uninstall failed"), "{refusal}");
    let log = ["logs", "job/drayman-uninstall", "--namespace=drayman"];
    let message = setup.kubectl(&log).await?;
    println!("{message}");
    ensure!(
        message.contains("default/left-test") && message.contains("allocated, used by pod left"),
        "{message}"
    );
    ensure!(message.contains("Then uninstall driver drayman.dev"), "{message}");
    // The release now has the status "uninstalling". A rollback to the deployed revision keeps it.
    let companion = setup.run_of("drayman", COMPANION).await?;
    setup
        .helm(&["rollback", "drayman", "1", "--namespace", "drayman"])
        .await?;
    let status = setup
        .helm(&["status", "drayman", "--namespace", "drayman"])
        .await?;
    ensure!(status.contains("STATUS: deployed"), "{status}");
    assert_eq!(setup.run_of("drayman", COMPANION).await?, companion);

    // `--no-hooks` skips the check.
    setup.helm(&[&uninstall[..], &["--no-hooks"]].concat()).await?;
    // The pod keeps running with its device, but cannot terminate.
    assert_eq!(setup.devices("left").await?, devices);
    setup.kubectl(&["delete", "pod", "left", "--wait=false"]).await?;
    setup
        .until("kubelet says why the pod does not end", async || {
            let message = "plugin name drayman.dev not found in the list of registered DRA plugins";
            let log = setup.cluster.log("node-0-kubelet")?;
            Ok(log
                .lines()
                .any(|line| line.contains(message) && line.contains("default/left")))
        })
        .await?;
    let finalizers = setup
        .field(&["resourceclaims"], ".items[0].metadata.finalizers")
        .await?;
    ensure!(
        finalizers.contains("drayman.dev/deletion-protection"),
        "{finalizers}"
    );

    // The fix: install the release again.
    setup.deploy("install", &values, &[]).await?;
    setup
        .until("the pod has ended", async || {
            Ok(setup.kubectl(&["get", "pods", "--output=name"]).await?.is_empty())
        })
        .await?;
    setup.until_no_claims().await?;
    ensure!(
        files(&setup, 0)?.iter().all(|file| !file.contains("claim_")),
        "{:?}",
        files(&setup, 0)?
    );
    // The device is free: three pods get three devices.
    for name in ["a", "b", "c"] {
        setup.apply(&pod(name, &["test"])).await?;
    }
    let mut seen = BTreeSet::new();
    for name in ["a", "b", "c"] {
        setup.running(name).await?;
        seen.extend(setup.devices(name).await?.into_values());
    }
    assert_eq!(seen.len(), 3);
    setup.cluster.stop().await
}

#[tokio::test]
async fn a_drained_node_returns_its_devices_and_serves_again() -> anyhow::Result<()> {
    let setup = ChartSetup::start(2).await?;
    // Three controllers on two nodes; at most one may be unavailable.
    let ha = chart("values-ha.yaml");
    let more = ["--values", ha.to_str().unwrap_or_default()];
    setup
        .deploy("install", &chart("ci/one-kind-values.yaml"), &more)
        .await?;
    for node in ["node-0", "node-1"] {
        setup.ready(&format!("{node}.drayman.dev")).await?;
    }
    setup.apply(&template("test", "test")).await?;
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "app", "namespace": "default" },
        "spec": { "replicas": 1, "selector": { "matchLabels": { "app": "app" } }, "template": {
            "metadata": { "labels": { "app": "app" } }, "spec": pod("app", &["test"])["spec"] } },
    });
    setup.apply(&deployment).await?;
    let wait = ["rollout", "status", "deployment/app", "--timeout=180s"];
    setup.kubectl(&wait).await?;
    let place = |setup: &ChartSetup| {
        let cluster = setup.cluster.client();
        async move {
            use k8s_openapi::api::core::v1::Pod;
            use kube::api::{Api, ListParams};
            let pods = Api::<Pod>::namespaced(cluster, "default")
                .list(&ListParams::default().labels("app=app"))
                .await?;
            let living = pods.items.into_iter().find(|pod| {
                pod.metadata.deletion_timestamp.is_none()
                    && pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
            });
            anyhow::Ok(living.and_then(|pod| Some((pod.metadata.name?, pod.spec?.node_name?))))
        }
    };
    let (_, drained) = place(&setup).await?.unwrap_or_default();
    ensure!(!drained.is_empty());

    let drain = [
        "drain",
        &drained,
        "--ignore-daemonsets",
        "--delete-emptydir-data",
        "--timeout=180s",
    ];
    println!("{}", setup.kubectl(&drain).await?);
    setup
        .until("the pod runs on the other node", async || {
            Ok(place(&setup).await?.is_some_and(|(_, node)| node != drained))
        })
        .await?;
    let (name, _) = place(&setup).await?.unwrap_or_default();
    setup.running(&name).await?;
    assert_eq!(setup.devices(&name).await?.len(), 1);
    setup
        .until("one claim is left, that of the new pod", async || {
            Ok(claims(&setup).await?.lines().count() == 1)
        })
        .await?;
    // The companion was not evicted: it had to unprepare the claims of the evicted pods.
    setup.ready(&format!("{drained}.drayman.dev")).await?;
    let number = usize::from(drained == "node-1");
    ensure!(files(&setup, number)?.iter().all(|file| !file.contains("claim_")));

    setup.kubectl(&["uncordon", &drained]).await?;
    let mut pinned = pod("pinned", &["test"]);
    pinned["spec"]["nodeSelector"] = json!({ "kubernetes.io/hostname": drained });
    setup.apply(&pinned).await?;
    setup.running("pinned").await?;
    assert_eq!(setup.devices("pinned").await?.len(), 1);
    setup.rolled_out("drayman", "drayman").await?;
    setup.cluster.stop().await
}
