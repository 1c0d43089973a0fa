//! Log messages of an installed program whose account has lost a right.

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::chart::helm::chart;
use crate::chart::lifecycle::{COMPANION, CONTROLLER};
use crate::chart::setup::ChartSetup;

/// Removes a verb on NodeInventories from a role, and deletes the pods that use the role.
async fn remove_right(setup: &ChartSetup, role: &str, verb: &str, pods: &str) -> anyhow::Result<()> {
    let get = ["get", "clusterrole", role, "--output=json"];
    let mut object: Value = serde_json::from_str(&setup.kubectl(&get).await?)?;
    let mut split = Vec::new();
    for rule in object["rules"].as_array().context("rules")? {
        let of = |ours: bool| -> Value {
            let resources = rule["resources"].as_array().into_iter().flatten();
            resources
                .filter(|name| name.as_str().is_some_and(|name| name == "nodeinventories") == ours)
                .cloned()
                .collect()
        };
        let (ours, others) = (of(true), of(false));
        for (resources, taken) in [(others, ""), (ours, verb)] {
            let verbs = rule["verbs"].as_array().into_iter().flatten();
            let mut part = rule.clone();
            part["verbs"] = verbs.filter(|verb| *verb != taken).cloned().collect();
            part["resources"] = resources;
            // The API server rejects a rule without resources.
            if part["resources"] != json!([]) {
                split.push(part);
            }
        }
    }
    ensure!(object["rules"] != json!(split), "{role} has no such right");
    object["rules"] = json!(split);
    let file = setup.cluster.directory().join(format!("{role}.json"));
    std::fs::write(&file, object.to_string())?;
    let file = file.to_str().context("UTF-8")?;
    setup.kubectl(&["replace", "--filename", file]).await?;
    let selector = format!("--selector={pods}");
    let delete = ["delete", "pods", "--namespace=drayman", &selector];
    setup.kubectl(&delete).await.map(drop)
}

#[tokio::test]
async fn a_missing_right_is_named_in_the_log() -> anyhow::Result<()> {
    let setup = ChartSetup::start(1).await?;
    // Otherwise all authenticated users have the right.
    let own = ["--set=rbac.readByAuthenticated=false"];
    setup
        .deploy("install", &chart("ci/one-kind-values.yaml"), &own)
        .await?;
    setup.ready("node-0.drayman.dev").await?;
    for (role, verb, pods) in [
        ("drayman-controller.drayman", "list", CONTROLLER),
        ("drayman-node.drayman", "patch", COMPANION),
    ] {
        remove_right(&setup, role, verb, pods).await?;
        let selector = format!("--selector={pods}");
        let logs = ["logs", "--namespace=drayman", &selector, "--tail=-1"];
        let lacks = format!("cannot {verb} resource \"nodeinventories\" in API group \"drayman.dev\"");
        setup
            .until(&format!("{role} says that it {lacks}"), async || {
                // A pod that does not run yet has no log.
                let log = setup.kubectl(&logs).await.unwrap_or_default();
                // Quotes in the message may be escaped.
                let logged = log.replace('\\', "").contains(&lacks);
                if logged {
                    println!("{log}");
                }
                Ok(logged)
            })
            .await?;
    }
    setup.cluster.stop().await
}
