//! Tests of the harness itself.

use std::collections::BTreeSet;

use crate::harness::{Cluster, pod, rule};
use anyhow::Context;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams,
    PostParams,
};
use serde_json::json;

fn resource_classes() -> ApiResource {
    ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk("resource.k8s.io", "v1alpha2", "ResourceClass"),
        "resourceclasses",
    )
}

fn resource_class(name: &str) -> anyhow::Result<DynamicObject> {
    Ok(serde_json::from_value(json!({
        "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClass",
        "metadata": {"name": name}, "driverName": "test.drayman.dev",
    }))?)
}

#[tokio::test]
async fn a_control_plane_serves_classic_dra_and_audits_requests() -> anyhow::Result<()> {
    let cluster = Cluster::builder().start().await?;
    let rules = [rule(
        &["resource.k8s.io"],
        &["resourceclasses"],
        &["create", "get", "patch", "delete"],
    )];
    let kubeconfig = cluster.user("the-tester", &rules).await?;
    let client = cluster.client_of(&kubeconfig).await?;
    let classes = Api::<DynamicObject>::all_with(client.clone(), &resource_classes());

    classes
        .create(&PostParams::default(), &resource_class("first")?)
        .await?;
    assert_eq!(classes.get("first").await?.data["driverName"], "test.drayman.dev");
    let patch = Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    classes.patch("first", &PatchParams::default(), &patch).await?;
    classes.delete("first", &DeleteParams::default()).await?;
    assert!(classes.get_opt("first").await?.is_none());
    // Other requests are denied.
    let Err(kube::Error::Api(status)) = classes.list(&ListParams::default()).await else {
        anyhow::bail!("a list without the right to list");
    };
    assert_eq!(status.code, 403);

    let entries = cluster.audit().of_user("the-tester").await?;
    let seen: Vec<_> = entries
        .iter()
        .map(|entry| (entry.verb.as_str(), entry.code))
        .collect();
    assert_eq!(
        seen,
        [
            ("create", 201),
            ("get", 200),
            ("patch", 200),
            ("delete", 200),
            ("get", 404),
            ("list", 403)
        ]
    );
    assert!(
        entries
            .iter()
            .all(|entry| entry.resource == "resourceclasses" && entry.group == "resource.k8s.io")
    );
    assert_eq!(entries.iter().filter(|entry| entry.is_write()).count(), 3);
    cluster.stop().await
}

#[tokio::test]
async fn pods_run_on_real_nodes_and_each_node_has_its_own_devices() -> anyhow::Result<()> {
    let cluster = Cluster::builder().nodes(2).start().await?;
    for (number, minor) in [(0, 5), (1, 7)] {
        cluster
            .node(number)
            .make_device(format!("/dev/drayman-test-{number}"), 1, minor)?;
    }
    let devices = |names: Vec<String>| -> BTreeSet<String> {
        names
            .into_iter()
            .filter(|name| name.starts_with("drayman-test"))
            .collect()
    };
    assert_eq!(
        devices(cluster.node(0).list("/dev")?),
        BTreeSet::from(["drayman-test-0".to_owned()])
    );
    assert_eq!(
        devices(cluster.node(1).list("/dev")?),
        BTreeSet::from(["drayman-test-1".to_owned()])
    );
    assert!(
        !std::path::Path::new("/dev/drayman-test-0").exists(),
        "the machine's own /dev is unchanged"
    );

    for number in 0..2 {
        let mut manifest = pod(&format!("pod-{number}"));
        manifest.spec.as_mut().context("a spec")?.node_name = Some(cluster.node(number).name().to_owned());
        let running = cluster.run_pod(&manifest).await?;
        assert_eq!(
            cluster.exec(&running, &["echo", "inside"]).await?.trim(),
            "inside"
        );
        cluster.delete_pod(&running).await?;
    }
    cluster.stop().await
}

#[tokio::test]
async fn a_command_in_a_node_sees_the_sockets_of_its_kubelet() -> anyhow::Result<()> {
    let cluster = Cluster::builder().nodes(1).start().await?;
    let node = cluster.node(0);
    let running = cluster.run_pod(&pod("stays")).await?;
    node.restart_kubelet().await?;
    let socket = "/var/lib/kubelet/device-plugins/kubelet.sock";
    let status = node.command("test").args(["-S", socket]).status().await?;
    assert!(
        status.success(),
        "the device plugin socket of kubelet is seen in the node"
    );
    assert!(
        !std::path::Path::new(socket).exists(),
        "and not outside of the node"
    );
    // The container keeps running across the kubelet restart, and the new kubelet starts others.
    assert_eq!(cluster.exec(&running, &["echo", "alive"]).await?.trim(), "alive");
    cluster.run_pod(&pod("new")).await?;
    cluster.stop().await
}

#[tokio::test]
async fn a_control_plane_needs_no_root_and_a_node_says_that_it_does() -> anyhow::Result<()> {
    const NOBODY: u32 = 65534;
    let cluster = Cluster::builder().run_as(NOBODY).start().await?;
    assert_eq!(cluster.kubectl(&["get", "--raw", "/readyz"]).await?, "ok");
    cluster.stop().await?;
    let Err(error) = Cluster::builder().nodes(1).run_as(NOBODY).start().await else {
        anyhow::bail!("a node without root");
    };
    assert!(
        format!("{error:#}").contains("a test node needs root"),
        "{error:#}"
    );
    Ok(())
}
