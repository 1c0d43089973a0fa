//! A node whose API server is down, and ioctls on a device inside a container.

use std::time::Duration;

use anyhow::Context as _;
use kube::api::PostParams;
use serde_json::json;
use tokio::time::{sleep, timeout};

use crate::harness::{IMAGE, TIMEOUT, build_go};
use crate::interrupted_calls::until_claim_files;
use crate::pods::{PLUGGED, assert_prepared, assert_unprepared, look_inside, start_node, wait_for_inventory};
use crate::setup::{REGISTERED, Setup, pod_from};

#[tokio::test]
async fn a_pod_ending_without_an_api_server_frees_its_device() -> anyhow::Result<()> {
    let (setup, controller, companion) = start_node(1).await?;
    let node = setup.cluster.node(0);
    let pod = pod_from(json!({
        "metadata": { "name": "first" },
        "spec": {
            "resourceClaims": [{ "name": "device", "source": { "resourceClaimTemplateName": "test" } }],
            "containers": [{ "name": "main", "image": IMAGE, "imagePullPolicy": "Never",
                "command": ["sh", "-c", "until test -e /tmp/end; do sleep 0.2; done"],
                "resources": { "claims": [{ "name": "device" }] } }],
            "restartPolicy": "Never",
            "dnsPolicy": "Default",
        },
    }))?;
    setup.pods().create(&PostParams::default(), &pod).await?;
    let first = look_inside(&setup, "first").await?;
    let (uid, _) = setup.claim_ids("first").await?;
    assert_prepared(node, &uid)?;
    // The container exits five seconds later, after the API server has stopped.
    let end = [
        "exec",
        "first",
        "--",
        "sh",
        "-c",
        "(sleep 5; touch /tmp/end) >/dev/null 2>&1 &",
    ];
    setup.cluster.kubectl(&end).await?;
    setup.cluster.stop_component("apiserver", 9).await?;
    if setup.cluster.minor() >= 28 {
        until_claim_files(node, &uid, 0).await?;
        setup.cluster.start_component("apiserver").await?;
        // The next pod gets the device without any intervention.
        setup.make_pod("second").await?;
        let second = look_inside(&setup, "second").await?;
        assert_eq!(second.only_device(), first.only_device());
        assert_unprepared(node, &uid)?;
    } else {
        // Kubelet 1.27 reads the claim from the API server before it calls Unprepare, so it calls once the server is back.
        let asked_in_vain = async {
            while !setup
                .cluster
                .log("node-0-kubelet")?
                .contains("failed to fetch ResourceClaim")
            {
                sleep(Duration::from_millis(100)).await;
            }
            anyhow::Ok(())
        };
        timeout(TIMEOUT, asked_in_vain)
            .await
            .context("kubelet has not asked")??;
        assert_prepared(node, &uid)?;
        setup.cluster.start_component("apiserver").await?;
        until_claim_files(node, &uid, 0).await?;
    }
    setup.end([companion, controller]).await
}

#[tokio::test]
async fn kvm_answers_containers_as_it_answers_the_node() -> anyhow::Result<()> {
    let asks = tokio::task::spawn_blocking(|| build_go("tests/e2e/kvm", "kvm")).await??;
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    // The node has /dev/kvm only if the machine has it. If the kernel lacks KVM, node and container get the same error.
    if !node.path("/dev/kvm").exists() {
        node.make_device("/dev/kvm", 10, 232)?;
    }
    let output = node.command(&asks).output().await?;
    let answer = String::from_utf8(output.stdout)?;
    println!("the answer on the node is {}", answer.trim());
    let configuration = format!(
        "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n- name: test\n  mode: both\n  \
         resourceName: drayman.dev/plugged\n  paths: [/dev/kvm]\n  mounts:\n  \
         - {{hostPath: {}, containerPath: /asks}}\n",
        asks.display()
    );
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let companion = setup.companion(0, &configuration)?;
    wait_for_inventory(&setup, 1).await?;
    companion.logged(REGISTERED).await?;
    setup.until_allocatable(PLUGGED, "1").await?;
    setup.make_pod("by-claim").await?;
    look_inside(&setup, "by-claim").await?;
    let by_claim = setup
        .cluster
        .kubectl(&["exec", "by-claim", "--", "/asks"])
        .await?;
    setup.until_allocatable(PLUGGED, "0").await?;
    setup.cluster.kubectl(&["delete", "pod", "by-claim"]).await?;
    setup.until_allocatable(PLUGGED, "1").await?;
    setup.make_limit_pod("by-limit", PLUGGED).await?;
    look_inside(&setup, "by-limit").await?;
    let by_limit = setup
        .cluster
        .kubectl(&["exec", "by-limit", "--", "/asks"])
        .await?;
    assert_eq!(
        (by_claim.as_str(), by_limit.as_str()),
        (answer.as_str(), answer.as_str())
    );
    setup.end([companion, controller]).await
}
