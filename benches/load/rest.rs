//! Cost of an idle cluster.

use std::time::Duration;

use kube::api::PostParams;
use serde_json::json;
use tokio::time::sleep;

use crate::Options;
use crate::common::{self, Controller, USER};
use crate::figures::{Goal, figure};
use crate::requests::{self, Count};
use crate::setup::DRIVER;

const CLAIMS: usize = 1000;
const CONTEXTS: usize = 1000;
const REST: Duration = Duration::from_secs(60);

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let setup = common::start(&[], false).await?;
    let nodes: Vec<String> = (0..128).map(common::node_name).collect();
    common::each(&nodes, |node| {
        let setup = &setup;
        async move { setup.write_inventory(node, &format!("uid-of-{node}"), 8).await }
    })
    .await?;
    setup
        .apply(&json!({
            "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClass", "metadata": { "name": "foreign" },
            "driverName": "foreign.example.com",
        }))
        .await?;
    // Pods with claims of another driver, each with its scheduling context.
    common::each(0..CONTEXTS, |number| {
        let (setup, nodes) = (&setup, &nodes);
        async move {
            let name = format!("foreign-{number:04}");
            let claim = serde_json::from_value(json!({
                "metadata": { "name": name }, "spec": { "resourceClassName": "foreign" },
            }))?;
            setup.claims().create(&PostParams::default(), &claim).await?;
            let pod = setup
                .pods()
                .create(&PostParams::default(), &common::held_pod(&name, &name)?)
                .await?;
            let context = common::context_of(&pod, nodes.first().map(String::as_str), nodes)?;
            setup.contexts().create(&PostParams::default(), &context).await?;
            Ok(())
        }
    })
    .await?;
    common::each(0..CLAIMS, |number| {
        let setup = &setup;
        async move {
            let pod = setup
                .pods()
                .create(
                    &PostParams::default(),
                    &common::held_pod(&format!("ours-{number:04}"), &format!("bound-{number:05}-device"))?,
                )
                .await?;
            let node = common::node_name(number / 8);
            let device = format!("drayman-test-{}", number % 8);
            common::make_allocated(setup, number, &pod, (&node, &format!("uid-of-{node}"), &device)).await
        }
    })
    .await?;
    let controller = Controller::start(&setup, options).await?;
    sleep(Duration::from_secs(5)).await;
    let start = requests::of(&setup, USER).await?;
    let used = controller.processor_time();
    sleep(REST).await;
    let entries = requests::of(&setup, USER).await?;
    let count = Count::new(entries.iter().skip(start.len()));
    figure(
        &format!(
            "requests in {REST:?} at rest, {CLAIMS} claims allocated by {DRIVER}, {CONTEXTS} contexts of another driver"
        ),
        &format!(
            "{}, lists and ended watches included, and {} of the lease (and {} at the start)",
            count.all(),
            count.lease,
            start.len()
        ),
        Goal::is(count.all() == 0),
    );
    let (resident, most) = controller.resident_kib();
    figure(
        "the controller then",
        &format!(
            "{resident} KiB resident, {most} KiB at most, {:?} of processor time in these {REST:?}",
            controller.processor_time().saturating_sub(used)
        ),
        Goal::none(),
    );
    controller.end().await?;
    setup.cluster.stop().await
}
