//! Names from the cluster where Tab is pressed. Without an answer in time there are none: the shell must not hang, and it
//! cannot show an error.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::time::Duration;

use clap::Parser;
use clap_complete::CompletionCandidate;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt as _;
use kube::api::ListParams;
use tokio::time::timeout;

use super::read::Api;
use super::{Cluster, read};
use crate::cli::diagnose::devices::{self, DeviceTable};
use crate::cli::diagnose::structured;
use crate::cli::objects::Pod;
use crate::cli::{Error, block_on, choose_tls_provider, client};

/// Limit for all requests of a completion.
const LIMIT: Duration = Duration::from_secs(2);

/// Names of the devices, alone and after their node.
pub(super) fn devices(typed: &OsStr) -> Vec<CompletionCandidate> {
    let names = of_devices(|table| {
        let rows = table.devices.iter();
        rows.flat_map(|row| [row.device.clone(), format!("{}/{}", row.node, row.device)])
            .collect()
    });
    fitting(typed, names)
}

/// Names of the nodes with devices.
pub(super) fn nodes(typed: &OsStr) -> Vec<CompletionCandidate> {
    let names = of_devices(|table| table.devices.iter().map(|row| row.node.clone()).collect());
    fitting(typed, names)
}

/// Kinds of the devices.
pub(super) fn kinds(typed: &OsStr) -> Vec<CompletionCandidate> {
    let names = of_devices(|table| table.devices.iter().map(|row| row.kind.clone()).collect());
    fitting(typed, names)
}

/// Pods and claims in the context's namespace.
pub(super) fn pods_and_claims(typed: &OsStr) -> Vec<CompletionCandidate> {
    let names = ask(async |cluster: &Cluster| {
        let (client, namespace) = cluster.connect().await?;
        let all = ListParams::default();
        let mut names = BTreeSet::new();
        let pods = kube::Api::<Pod>::namespaced(client.clone(), &namespace)
            .list_metadata(&all)
            .await;
        let pods = pods.map_err(anyhow::Error::from)?;
        names.extend(pods.iter().map(|pod| format!("pod/{}", pod.name_any())));
        // A cluster in classic mode has no claims of v1.
        if let Ok(claims) = kube::Api::<ResourceClaim>::namespaced(client, &namespace)
            .list_metadata(&all)
            .await
        {
            names.extend(claims.iter().map(|claim| format!("claim/{}", claim.name_any())));
        }
        Ok(names)
    });
    fitting(typed, names)
}

/// Contexts of the kubeconfig.
pub(super) fn contexts(typed: &OsStr) -> Vec<CompletionCandidate> {
    let content = client::kubeconfig_of_person().ok().flatten();
    let contexts = content.map(|content| content.contexts).unwrap_or_default();
    fitting(typed, contexts.into_iter().map(|context| context.name).collect())
}

fn of_devices(names: impl Fn(&DeviceTable) -> BTreeSet<String>) -> BTreeSet<String> {
    ask(async |cluster: &Cluster| {
        let (client, _) = cluster.connect().await?;
        let driver = &cluster.driver.name;
        Ok(names(&match read::api(&client).await? {
            Api::Structured => structured::devices::devices(driver, &read::all(&client).await?, &[]),
            Api::Classic => devices::devices(driver, &read::all(&client).await?, &[]),
        }))
    })
}

/// The defaults of all flags: the engine does not tell the values of others.
#[derive(Parser)]
struct Defaults {
    #[command(flatten)]
    cluster: Cluster,
}

/// Asks the cluster of the current context.
fn ask(names: impl AsyncFnOnce(&Cluster) -> Result<BTreeSet<String>, Error>) -> BTreeSet<String> {
    choose_tls_provider();
    let Ok(Defaults { cluster }) = Defaults::try_parse_from(["drayman"]) else {
        return BTreeSet::new();
    };
    let asked = block_on(async {
        let answer = timeout(LIMIT, names(&cluster)).await;
        answer.unwrap_or_else(|_| Ok(BTreeSet::new()))
    });
    asked.unwrap_or_default()
}

fn fitting(typed: &OsStr, names: BTreeSet<String>) -> Vec<CompletionCandidate> {
    let typed = typed.to_string_lossy();
    names
        .into_iter()
        .filter(|name| !name.is_empty() && name.starts_with(&*typed))
        .map(CompletionCandidate::new)
        .collect()
}
