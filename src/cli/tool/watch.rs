//! Follows the devices of a cluster.

use std::fmt::Debug;

use futures::{FutureExt as _, Stream, StreamExt as _, stream};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::resource::v1;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;

use super::read::{self, ClaimScope};
use crate::api::claim::StructuredClaim;
use crate::api::crd::NodeInventory;
use crate::api::resource::ResourceClaim;
use crate::cli::diagnose::devices::{DeviceTable, devices as of_inventories};
use crate::cli::diagnose::structured;
use crate::cli::error::Error;
use crate::cli::objects::DeviceTaintRule;

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
            let rules = Api::<DeviceTaintRule>::all(client.clone());
            let listed = read::can_list(&rules).await;
            let rules = match listed {
                Ok(()) => Some(rules),
                // The first table has come with a note.
                Err(error) if read::is_not_served(&error) || read::is_forbidden(&error) => None,
                Err(error) => return Err(error),
            };
            let of_claims = claims::<StructuredClaim>(client, scope);
            follow(slices, of_claims, rules, |mut slices, claims, rules| {
                structured::add_taints(&mut slices, &rules);
                let claims: Vec<_> = claims.into_iter().map(|StructuredClaim(claim)| claim).collect();
                changed(scope.limit(structured::devices::devices(driver, &slices, &claims)))
            })
            .await
        }
        read::ServedApi::Classic => {
            let inventories = Api::<NodeInventory>::all(client.clone());
            let claims = claims::<ResourceClaim>(client, scope);
            let rules = None::<Api<DeviceTaintRule>>;
            follow(inventories, claims, rules, |inventories, claims, _| {
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

/// Calls `changed` with the objects of three kinds, once all have been listed, and after each change, until it returns false. Without an API
/// of the second or third kind, there are none of it.
async fn follow<A, B, C>(
    of_a: Api<A>,
    of_b: Option<Api<B>>,
    of_c: Option<Api<C>>,
    mut changed: impl FnMut(Vec<A>, Vec<B>, Vec<C>) -> Result<bool, Error>,
) -> Result<(), Error>
where
    A: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    B: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    C: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let (a, a_changes) = followed(of_a);
    let (b, b_changes) = of_b.map(followed).unzip();
    let (c, c_changes) = of_c.map(followed).unzip();
    let other_changes = stream::select(
        stream::iter(b_changes).flatten(),
        stream::iter(c_changes).flatten(),
    );
    // Events that arrive together are one change.
    let mut events = std::pin::pin!(stream::select(a_changes, other_changes).ready_chunks(1000));
    while let Some(chunk) = events.next().await {
        for error in chunk.into_iter().filter_map(Result::err) {
            eprintln!("note: {error}; trying again");
        }
        let all_of_b = b.as_ref().map_or_else(|| Some(Vec::new()), listed);
        let all_of_c = c.as_ref().map_or_else(|| Some(Vec::new()), listed);
        if let (Some(a), Some(b), Some(c)) = (listed(&a), all_of_b, all_of_c)
            && !changed(a, b, c)?
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
    async fn a_watch_without_an_answer_about_taint_rules_fails() {
        let rules = "/apis/resource.k8s.io/v1/devicetaintrules";
        for (code, fails) in [(404, false), (403, false), (500, true)] {
            let client = Server::structured().failing(rules, code).client();
            let watched = devices(&client, DRIVER, &ClaimScope::All, |_| Ok(false));
            let ended = tokio::time::timeout(Duration::from_secs(10), watched).await;
            assert_eq!(ended.unwrap().is_err(), fails, "{code}");
        }
    }

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
