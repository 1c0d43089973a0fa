//! Reading what the questions are about.

use std::fmt::Debug;

use anyhow::Context as _;
use kube::api::{Api, ListParams};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;

use super::super::Error;

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
