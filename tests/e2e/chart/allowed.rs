//! The rights of the chart's accounts, as a real API server reports them.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context as _;
use serde_json::Value;

use crate::chart::helm::{objects, repository};
use crate::chart::setup::ChartSetup;
use crate::harness::Cluster;

/// Verbs by resource, such as `resourceclaims.resource.k8s.io/status`.
type Rights = BTreeMap<String, BTreeSet<String>>;

/// Rights of an account in a namespace, from a SelfSubjectRulesReview.
async fn rights(setup: &ChartSetup, account: &str, namespace: &str) -> anyhow::Result<Rights> {
    let user = format!("--as=system:serviceaccount:drayman:{account}");
    let message = setup
        .kubectl(&[
            "auth",
            "can-i",
            "--list",
            "--no-headers",
            "--namespace",
            namespace,
            &user,
            "--as-group=system:serviceaccounts",
            "--as-group=system:serviceaccounts:drayman",
            "--as-group=system:authenticated",
        ])
        .await?;
    let mut rights = Rights::new();
    for line in message.lines() {
        let (resource, rest) = line.split_once(' ').context("columns")?;
        let (_, verbs) = rest.rsplit_once('[').context("verbs")?;
        // Non-resource paths have no first column.
        let resource = if resource.is_empty() {
            // Column widths depend on the other rows.
            let path = rest.split_whitespace().next();
            path.context("a path")?
        } else {
            resource
        };
        let verbs = verbs
            .trim_end()
            .trim_end_matches(']')
            .split_whitespace()
            .map(str::to_owned);
        rights.entry(resource.to_owned()).or_default().extend(verbs);
    }
    Ok(rights)
}

/// Rules of a role in hack/rbac.yaml.
fn role(kind: &str, name: &str) -> anyhow::Result<Rights> {
    let text = std::fs::read_to_string(repository("hack/rbac.yaml"))?;
    let role = objects(&text)
        .into_iter()
        .find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
        .context("the role")?;
    let texts = |value: &Value| -> Vec<String> {
        let list = value.as_array().cloned().unwrap_or_default();
        list.iter().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let mut rights = Rights::new();
    for rule in role["rules"].as_array().context("rules")? {
        for group in texts(&rule["apiGroups"]) {
            for resource in texts(&rule["resources"]) {
                let (resource, part) = resource.split_once('/').unwrap_or((&resource, ""));
                let mut key = if group.is_empty() {
                    resource.to_owned()
                } else {
                    format!("{resource}.{group}")
                };
                if !part.is_empty() {
                    key = format!("{key}/{part}");
                }
                rights.entry(key).or_default().extend(texts(&rule["verbs"]));
            }
        }
    }
    Ok(rights)
}

#[tokio::test]
async fn each_account_has_exactly_the_rights_of_its_role() -> anyhow::Result<()> {
    let setup = ChartSetup::prepare(Cluster::builder().service_accounts().start().await?).await?;
    let arguments = [
        "--set=crds.upgrade=false",
        // With a kind of mode `both`, the companion's role has all rights that it can ever have.
        "--set=deviceKinds[0].name=camera",
        "--set=deviceKinds[0].mode=both",
        "--set=deviceKinds[0].resourceName=example.com/camera",
        "--set=deviceKinds[0].paths[0]=/dev/video0",
    ];
    setup.install(None, &arguments).await?;
    // Every user has the read rights of system:authenticated, once the server knows the role.
    setup
        .until("the rights of all users", async || {
            let rights = rights(&setup, "nobody", "default").await?;
            Ok(rights.contains_key("deviceclassparameters.drayman.dev"))
        })
        .await?;
    for (account, namespace, roles) in [
        (
            "drayman-controller",
            "default",
            vec![("ClusterRole", "drayman-controller")],
        ),
        (
            "drayman-controller",
            "drayman",
            vec![
                ("ClusterRole", "drayman-controller"),
                ("Role", "drayman-controller"),
            ],
        ),
        (
            "drayman-node",
            "default",
            vec![("ClusterRole", "drayman-node"), ("Role", "drayman-node")],
        ),
        ("drayman-node", "drayman", vec![("ClusterRole", "drayman-node")]),
    ] {
        let mut expected = rights(&setup, "nobody", namespace).await?;
        for (kind, name) in roles {
            for (resource, verbs) in role(kind, name)? {
                expected.entry(resource).or_default().extend(verbs);
            }
        }
        // The server learns of roles through its own watch.
        setup
            .until(&format!("the rights of {account}"), async || {
                Ok(rights(&setup, account, namespace).await?.len() >= expected.len())
            })
            .await?;
        let found = rights(&setup, account, namespace).await?;
        assert_eq!(found, expected, "{account} in {namespace}");
        let writes = ["create", "update", "patch", "delete", "deletecollection", "*"];
        let claims = found
            .iter()
            .filter(|(resource, _)| resource.starts_with("resourceclaims."));
        for (resource, verbs) in claims.filter(|_| account == "drayman-node") {
            assert!(
                verbs.iter().all(|verb| !writes.contains(&verb.as_str())),
                "{resource}: {verbs:?}"
            );
        }
        for resource in found.keys().filter(|key| !key.starts_with('[')) {
            assert!(
                !resource.starts_with("secrets") && !resource.contains('*'),
                "{resource}"
            );
        }
    }
    setup.cluster.stop().await
}
