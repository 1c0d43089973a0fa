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

use super::kubectl_flags::{KubectlFlags, fitting};
use super::read;
use super::read::ServedApi;
use crate::cli::diagnose::devices::{self, DeviceTable};
use crate::cli::diagnose::structured;
use crate::cli::error::Error;
use crate::cli::objects::PartialPod;
use crate::cli::runtime::{block_on, choose_tls_provider};

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
    let names = ask(async |cluster: &KubectlFlags| {
        let (client, namespace) = cluster.connect().await?;
        let all = ListParams::default();
        let mut names = BTreeSet::new();
        let pods = kube::Api::<PartialPod>::namespaced(client.clone(), &namespace)
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

fn of_devices(names: impl Fn(&DeviceTable) -> BTreeSet<String>) -> BTreeSet<String> {
    ask(async |cluster: &KubectlFlags| {
        let (client, _) = cluster.connect().await?;
        let driver = &cluster.driver.name;
        Ok(names(&match read::api(&client).await? {
            ServedApi::Structured => structured::devices::devices(driver, &read::all(&client).await?, &[]),
            ServedApi::Classic => devices::devices(driver, &read::all(&client).await?, &[]),
        }))
    })
}

/// The defaults of all flags: the engine does not tell the values of others.
#[derive(Parser)]
struct Defaults {
    #[command(flatten)]
    cluster: KubectlFlags,
}

/// Asks the cluster of the current context.
fn ask(names: impl AsyncFnOnce(&KubectlFlags) -> Result<BTreeSet<String>, Error>) -> BTreeSet<String> {
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
