//! Reading what the questions are about.

use std::fmt::Debug;

use anyhow::Context as _;
use kube::api::{Api, ListParams};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;

use super::super::Error;
use crate::api::resource::{ResourceClaim, ResourceClass};

/// Objects in one page of a list.
const PAGE: u32 = 500;

/// All objects of a kind, in all namespaces.
pub(super) async fn all<K>(client: &Client) -> Result<Vec<K>, Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    list(&Api::<K>::all(client.clone()), ListParams::default()).await
}

/// All objects that `parameters` select.
pub(super) async fn list<K>(api: &Api<K>, parameters: ListParams) -> Result<Vec<K>, Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let kind = K::plural(&()).into_owned();
    let mut parameters = parameters.limit(PAGE);
    let mut objects = Vec::new();
    loop {
        let page = api
            .list(&parameters)
            .await
            .map_err(explained)
            .with_context(|| format!("cannot list {kind}"))?;
        objects.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(objects),
        }
    }
}

/// Claims, as far as a person may read them.
#[derive(Clone, Debug)]
pub(super) struct Claims {
    /// The claims.
    pub(super) items: Vec<ResourceClaim>,
    /// The only namespace that they are of, for who may not read those of all.
    pub(super) namespace: Option<String>,
}

/// All claims; for who may not list these, the claims of `namespace`, and none where the API server has no such kind: stderr is told both.
pub(super) async fn claims(client: &Client, namespace: &str) -> Result<Claims, Error> {
    match all(client).await {
        Err(error) if is_forbidden(&error) => {
            let api = Api::<ResourceClaim>::namespaced(client.clone(), namespace);
            let items = list(&api, ListParams::default()).await?;
            eprintln!(
                "note: you may not list resourceclaims.resource.k8s.io in all namespaces; those of namespace {namespace} are read, and \
                 what claims of others hold is not known"
            );
            Ok(Claims {
                items,
                namespace: Some(namespace.to_owned()),
            })
        }
        Err(error) if is_not_served(&error) => {
            eprintln!(
                "note: this API server has no claims of classic Dynamic Resource Allocation (drayman doctor says more); devices leave their \
                 nodes as extended resources only"
            );
            Ok(Claims {
                items: Vec::new(),
                namespace: None,
            })
        }
        items => Ok(Claims {
            items: items?,
            namespace: None,
        }),
    }
}

/// All classes; none where the API server has no such kind.
pub(super) async fn classes(client: &Client) -> Result<Vec<ResourceClass>, Error> {
    match all(client).await {
        Err(error) if is_not_served(&error) => Ok(Vec::new()),
        classes => classes,
    }
}

/// Whether the objects of a kind that belongs to no namespace can be listed; the error says which right is missing.
pub(super) async fn can_list<K>(client: &Client) -> Result<(), Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let kind = K::plural(&());
    let one = ListParams::default().limit(1);
    Api::<K>::all(client.clone())
        .list_metadata(&one)
        .await
        .map_err(explained)
        .with_context(|| format!("cannot list {kind}"))?;
    Ok(())
}

/// The API server has no such kind.
#[derive(Debug, thiserror::Error)]
#[error("the API server does not serve it: `drayman doctor` says what is missing")]
struct NotServed;

/// What the API server answered, in its own words; of a path that it does not serve it says only "not found".
fn explained(error: kube::Error) -> anyhow::Error {
    match &error {
        kube::Error::Api(status) if status.code == 404 => NotServed.into(),
        _ => error.into(),
    }
}

/// Whether the API server has no such kind.
pub(super) fn is_not_served(error: &Error) -> bool {
    matches!(error, Error::Runtime(error) if error.chain().any(<dyn std::error::Error>::is::<NotServed>))
}

/// Whether the API server refused because the person may not do this.
pub(super) fn is_forbidden(error: &Error) -> bool {
    let Error::Runtime(error) = error else {
        return false;
    };
    error.chain().any(|cause| {
        matches!(cause.downcast_ref::<kube::Error>(), Some(kube::Error::Api(status)) if status.code == 403)
    })
}
