//! Follows the devices of a cluster.

use std::fmt::Debug;

use futures::{FutureExt as _, Stream, StreamExt as _};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::resource::v1;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;

use super::read::{self, ClaimScope};
use crate::api::crd::NodeInventory;
use crate::api::resource::ResourceClaim;
use crate::cli::diagnose::devices::{DeviceTable, devices as of_inventories};
use crate::cli::diagnose::structured;
use crate::cli::error::Error;

/// Calls `changed` with all devices of the driver after each change, until it returns false or fails.
pub(super) async fn devices(
    client: &Client,
    driver: &str,
    scope: &ClaimScope,
    mut changed: impl FnMut(DeviceTable) -> Result<bool, Error>,
) -> Result<(), Error> {
    match read::api(client).await? {
        read::ServedApi::Structured => {
            let slices = Api::<v1::ResourceSlice>::all(client.clone());
            both(slices, claims(client, scope), |slices, claims| {
                changed(scope.limit(structured::devices::devices(driver, &slices, &claims)))
            })
            .await
        }
        read::ServedApi::Classic => {
            let inventories = Api::<NodeInventory>::all(client.clone());
            let claims = claims::<ResourceClaim>(client, scope);
            both(inventories, claims, |inventories, claims| {
                changed(scope.limit(of_inventories(driver, &inventories, &claims)))
            })
            .await
        }
    }
}

/// The claims to follow; none if their API is not served.
fn claims<K>(client: &Client, scope: &ClaimScope) -> Option<Api<K>>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    match scope {
        ClaimScope::All => Some(Api::all(client.clone())),
        ClaimScope::Namespace(namespace) => Some(Api::namespaced(client.clone(), namespace)),
        ClaimScope::NotServed => None,
    }
}

/// Calls `changed` with the objects of two kinds, once both have been listed, and after each change, until it returns false. Without an API
/// of the second kind, there are none of it.
async fn both<A, B>(
    of_a: Api<A>,
    of_b: Option<Api<B>>,
    mut changed: impl FnMut(Vec<A>, Vec<B>) -> Result<bool, Error>,
) -> Result<(), Error>
where
    A: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    B: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let (a, a_changes) = followed(of_a);
    let (b, b_changes) = of_b.map(followed).unzip();
    let b_changes = futures::stream::iter(b_changes).flatten();
    // Events that arrive together are one change.
    let mut events = std::pin::pin!(futures::stream::select(a_changes, b_changes).ready_chunks(1000));
    while let Some(chunk) = events.next().await {
        for error in chunk.into_iter().filter_map(Result::err) {
            eprintln!("note: {error}; trying again");
        }
        let all_of_b = b.as_ref().map_or_else(|| Some(Vec::new()), listed);
        if let (Some(a), Some(b)) = (listed(&a), all_of_b)
            && !changed(a, b)?
        {
            break;
        }
    }
    Ok(())
}

/// Returns the objects of a kind, and a stream that keeps them current.
fn followed<K>(api: Api<K>) -> (Store<K>, impl Stream<Item = Result<(), watcher::Error>>)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let (store, writer) = reflector::store();
    let changes = watcher(api, watcher::Config::default())
        .default_backoff()
        .reflect(writer);
    (store, changes.map(|change| change.map(drop)))
}

/// Returns all objects, or none before they have been listed.
fn listed<K>(store: &Store<K>) -> Option<Vec<K>>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    store.wait_until_ready().now_or_never()?.ok()?;
    Some(store.state().iter().map(|object| (**object).clone()).collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::cli::diagnose::structured::tests::{DRIVER, camera, slice};
    use crate::cli::tool::tests::Server;

    #[tokio::test]
    async fn a_watch_ends_when_its_output_is_closed() {
        let slices = [slice("node-a", json!([camera("a")]))];
        let server = Server::structured().with("/apis/resource.k8s.io/v1/resourceslices", &slices);
        let mut tables = Vec::new();
        let client = server.client();
        let watched = devices(&client, DRIVER, &ClaimScope::All, |table| {
            tables.push(table);
            Ok(false)
        });
        let ended = tokio::time::timeout(Duration::from_secs(10), watched).await;
        ended.unwrap().unwrap();
        assert_eq!(tables.len(), 1);
        assert_eq!(tables[0].devices.len(), 1);
    }
}
