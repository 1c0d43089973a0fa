//! Reads objects for the diagnostic commands.

use std::fmt::Debug;

use anyhow::Context as _;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::resource::v1::{self, ResourceSlice};
use kube::api::ListParams;
use kube::{Client, Resource};
use serde::de::DeserializeOwned;

use crate::api::claim::StructuredClaim;
use crate::api::resource::{GROUP, ResourceClaim, ResourceClass};
use crate::cli::diagnose::devices::DeviceTable;
use crate::cli::diagnose::structured::add_taints;
use crate::cli::error::Error;
use crate::cli::objects::DeviceTaintRule;

/// Page size of lists.
const PAGE: u32 = 500;

/// Lists all objects of a kind in all namespaces.
pub(super) async fn all<K>(client: &Client) -> Result<Vec<K>, Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    list(&kube::Api::<K>::all(client.clone()), ListParams::default()).await
}

/// Lists all objects that match `parameters`, in pages. If a page expires, lists all at once, as client-go does.
pub(super) async fn list<K>(api: &kube::Api<K>, parameters: ListParams) -> Result<Vec<K>, Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let kind = K::plural(&()).into_owned();
    let mut parameters = parameters.limit(PAGE);
    let mut objects = Vec::new();
    loop {
        let page = match api.list(&parameters).await {
            // At most once, since the new list has no limit.
            Err(kube::Error::Api(status)) if status.code == 410 && parameters.limit.is_some() => {
                objects.clear();
                (parameters.limit, parameters.continue_token) = (None, None);
                continue;
            }
            page => page
                .map_err(explained)
                .with_context(|| format!("cannot list {kind}"))?,
        };
        objects.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(objects),
        }
    }
}

/// Lists all ResourceSlices, with the taints of DeviceTaintRules.
pub(super) async fn slices(client: &Client) -> Result<Vec<ResourceSlice>, Error> {
    let mut slices = all(client).await?;
    match all::<DeviceTaintRule>(client).await {
        Ok(rules) => add_taints(&mut slices, &rules),
        // `v1` has them from 1.37 on.
        Err(error) if is_not_served(&error) => {}
        Err(error) if is_forbidden(&error) => {
            eprintln!(
                "note: you may not list devicetaintrules.resource.k8s.io: their taints, if there are any, are unknown"
            );
        }
        Err(error) => return Err(error),
    }
    Ok(slices)
}

/// The API of claims that the cluster serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServedApi {
    /// `resource.k8s.io/v1alpha2`, or none.
    Classic,
    /// `resource.k8s.io/v1`.
    Structured,
}

/// Finds out which API of claims the cluster serves.
pub(super) async fn api(client: &Client) -> Result<ServedApi, Error> {
    Ok(if is_served(client, "v1").await? {
        ServedApi::Structured
    } else {
        ServedApi::Classic
    })
}

/// Finds out whether the cluster serves a version of the API of claims.
pub(super) async fn is_served(client: &Client, version: &str) -> Result<bool, Error> {
    let version = format!("{GROUP}/{version}");
    match client.list_api_group_resources(&version).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => {
            let unknown = format!("it is not known whether {version} is served");
            Err(anyhow::Error::from(error).context(unknown).into())
        }
    }
}

/// Namespaces whose claims are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Namespaces {
    /// All of them.
    All,
    /// All of them, or this one if the user may not list cluster-wide, which is noted on stderr.
    AllOr(String),
    /// This one.
    One(String),
}

/// Whose claims were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ClaimScope {
    /// Those of all namespaces.
    All,
    /// Those of one namespace.
    Namespace(String),
    /// None: the API is not served.
    NotServed,
}

impl ClaimScope {
    /// Adjusts the states of devices that claims of other namespaces may hold.
    pub(super) fn limit(&self, table: DeviceTable) -> DeviceTable {
        match self {
            Self::Namespace(namespace) => table.of_namespace(namespace),
            Self::All | Self::NotServed => table,
        }
    }
}

/// The claims that the user may read.
#[derive(Clone, Debug)]
pub(super) struct ClaimList<K = ResourceClaim> {
    /// The claims.
    pub(super) items: Vec<K>,
    /// Whose claims they are.
    pub(super) scope: ClaimScope,
}

impl<K: Resource> ClaimList<K> {
    /// Returns the claim of this name.
    pub(super) fn named(&self, namespace: &str, name: &str) -> Option<&K> {
        self.items.iter().find(|claim| {
            let metadata = claim.meta();
            metadata.namespace.as_deref() == Some(namespace) && metadata.name.as_deref() == Some(name)
        })
    }
}

/// Lists claims, none if the API is not served, which is noted on stderr.
pub(super) async fn claims(client: &Client, namespaces: &Namespaces) -> Result<ClaimList, Error> {
    match served_claims(client, namespaces).await {
        Err(error) if is_not_served(&error) => {
            eprintln!(
                "note: this API server has no claims of classic Dynamic Resource Allocation (drayman doctor says more); devices leave their \
                 nodes as extended resources only"
            );
            Ok(ClaimList {
                items: Vec::new(),
                scope: ClaimScope::NotServed,
            })
        }
        claims => claims,
    }
}

/// Lists claims of structured mode.
pub(super) async fn structured_claims(
    client: &Client,
    namespaces: &Namespaces,
) -> Result<ClaimList<v1::ResourceClaim>, Error> {
    let ClaimList { items, scope } = served_claims(client, namespaces).await?;
    Ok(ClaimList {
        items: items.into_iter().map(|StructuredClaim(claim)| claim).collect(),
        scope,
    })
}

/// Lists claims of an API that is served.
async fn served_claims<K>(client: &Client, namespaces: &Namespaces) -> Result<ClaimList<K>, Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
{
    let namespace = match namespaces {
        Namespaces::One(namespace) => namespace,
        Namespaces::All | Namespaces::AllOr(_) => match (all(client).await, namespaces) {
            (Err(error), Namespaces::AllOr(namespace)) if is_forbidden(&error) => {
                eprintln!(
                    "note: you may not list resourceclaims.resource.k8s.io in all namespaces; those of namespace {namespace} are read, and \
                     devices held by claims in other namespaces are unknown"
                );
                namespace
            }
            (items, _) => {
                return Ok(ClaimList {
                    items: items?,
                    scope: ClaimScope::All,
                });
            }
        },
    };
    let api = kube::Api::<K>::namespaced(client.clone(), namespace);
    Ok(ClaimList {
        items: list(&api, ListParams::default()).await?,
        scope: ClaimScope::Namespace(namespace.clone()),
    })
}

/// Lists all classes; none if the API is not served.
pub(super) async fn classes(client: &Client) -> Result<Vec<ResourceClass>, Error> {
    match all(client).await {
        Err(error) if is_not_served(&error) => Ok(Vec::new()),
        classes => classes,
    }
}

/// Checks whether a kind can be listed; the error names the missing permission.
pub(super) async fn can_list<K>(api: &kube::Api<K>) -> Result<(), Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let kind = K::plural(&());
    let one = ListParams::default().limit(1);
    api.list_metadata(&one)
        .await
        .map_err(explained)
        .with_context(|| format!("cannot list {kind}"))?;
    Ok(())
}

/// Reads an object; `None` if it does not exist, or if its API is not served. For the latter, [`kube::Api::get_opt`] fails.
pub(super) async fn get<K>(api: &kube::Api<K>, name: &str) -> Result<Option<K>, kube::Error>
where
    K: Clone + DeserializeOwned + Debug,
{
    match api.get(name).await {
        Ok(object) => Ok(Some(object)),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        Err(error) => Err(error),
    }
}

/// The API server does not serve the kind.
#[derive(Debug, thiserror::Error)]
#[error("the API server does not serve it; `drayman doctor` shows the cause")]
struct NotServed;

/// Converts an API error. For a path that is not served, the API server's own message is only "not found".
fn explained(error: kube::Error) -> anyhow::Error {
    match &error {
        kube::Error::Api(status) if status.code == 404 => NotServed.into(),
        _ => error.into(),
    }
}

/// Returns whether the API server does not serve the kind.
pub(super) fn is_not_served(error: &Error) -> bool {
    matches!(error, Error::Runtime(error) if error.chain().any(<dyn std::error::Error>::is::<NotServed>))
}

/// Returns whether the API server rejected the request as forbidden.
pub(super) fn is_forbidden(error: &Error) -> bool {
    let Error::Runtime(error) = error else {
        return false;
    };
    error.chain().any(|cause| {
        matches!(cause.downcast_ref::<kube::Error>(), Some(kube::Error::Api(status)) if status.code == 403)
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;
    use serde_json::json;

    use super::*;
    use crate::cli::tool::tests::Server;

    #[tokio::test]
    async fn a_list_with_an_expired_page_starts_again_once() {
        const NODES: &str = "/api/v1/nodes";
        let node = |name: &str| json!({ "metadata": { "name": name } });
        let first = json!({
            "kind": "List", "apiVersion": "v1", "metadata": { "continue": "next" }, "items": [node("a")],
        });
        let server = Server::default()
            .with_object(&format!("{NODES}?&limit={PAGE}"), first)
            .failing(&format!("{NODES}?&limit={PAGE}&continue=next"), 410);
        let whole = server.clone().with(NODES, &[node("a"), node("b")]);
        let found: Vec<Node> = all(&whole.client()).await.unwrap();
        let names: Vec<_> = found
            .iter()
            .filter_map(|node| node.metadata.name.as_deref())
            .collect();
        assert_eq!(names, ["a", "b"]);
        let expires_again = server.failing(NODES, 410);
        assert!(all::<Node>(&expires_again.client()).await.is_err());
    }

    #[tokio::test]
    async fn only_404_means_that_an_api_is_not_served() {
        let served = async |server: Server| is_served(&server.client(), "v1").await.ok();
        assert_eq!(served(Server::structured()).await, Some(true));
        for (code, expected) in [
            (404, Some(false)),
            (401, None),
            (403, None),
            (429, None),
            (500, None),
            (503, None),
        ] {
            let unready = Server::structured().failing("/apis/resource.k8s.io/v1", code);
            assert_eq!(served(unready).await, expected, "{code}");
        }
    }
}
