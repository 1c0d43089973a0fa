//! Waits for objects, and reads of objects, versions and Events.

use std::fmt::Debug;
use std::pin::pin;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context as _, bail};
use drayman::api::resource::{Pod, PodSchedulingContext, ResourceClaim};
use futures::TryStreamExt as _;
use k8s_openapi::api::core::v1::Event;
use kube::api::{Api, DeleteParams, ListParams};
use kube::runtime::wait::{Condition, await_condition};
use kube::runtime::{WatchStreamExt as _, watcher};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{sleep, timeout};

use crate::fixture::{Fixture, is_allocated};
use crate::harness::TIMEOUT;
use crate::objects::{patch, patch_status};

impl Fixture {
    /// Waits for a condition; the error has the expected and the found object.
    pub(crate) async fn wait_for<K>(
        &self,
        api: Api<K>,
        name: &str,
        what: &str,
        condition: impl Condition<K>,
    ) -> anyhow::Result<Option<K>>
    where
        K: kube::Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        match timeout(TIMEOUT, await_condition(api.clone(), name, condition)).await {
            Ok(found) => Ok(found?),
            Err(_) => bail!(
                "{} {name} is not {what}: {:?}",
                K::kind(&()),
                api.get_opt(name).await
            ),
        }
    }

    pub(crate) async fn wait_for_claim(
        &self,
        name: &str,
        what: &str,
        met: impl Fn(&ResourceClaim) -> bool,
    ) -> anyhow::Result<ResourceClaim> {
        let met = |claim: Option<&ResourceClaim>| claim.is_some_and(&met);
        self.wait_for(self.claims(), name, what, met)
            .await?
            .context("the claim exists")
    }

    pub(crate) async fn wait_until_allocated(&self, name: &str) -> anyhow::Result<ResourceClaim> {
        self.wait_for_claim(name, "allocated", is_allocated).await
    }

    pub(crate) async fn wait_for_context(
        &self,
        name: &str,
        what: &str,
        met: impl Fn(&PodSchedulingContext) -> bool,
    ) -> anyhow::Result<PodSchedulingContext> {
        let met = |context: Option<&PodSchedulingContext>| context.is_some_and(&met);
        self.wait_for(self.contexts(), name, what, met)
            .await?
            .context("the context exists")
    }

    /// Waits until a context has an answer of ours.
    pub(crate) async fn wait_until_evaluated(&self, name: &str) -> anyhow::Result<PodSchedulingContext> {
        let has_answer = |context: &PodSchedulingContext| !context.status.resource_claims.is_empty();
        self.wait_for_context(name, "evaluated", has_answer).await
    }

    /// Waits until a pod is bound, and returns its node.
    pub(crate) async fn wait_until_bound(&self, name: &str) -> anyhow::Result<String> {
        let met = |pod: Option<&Pod>| pod.is_some_and(|pod| pod.spec.node_name.is_some());
        let pod = self.wait_for(self.pods(), name, "bound", met).await?;
        pod.and_then(|pod| pod.spec.node_name)
            .context("a bound pod has a node")
    }

    /// Waits until a pod with a single entry, `device`, has its generated claim, and returns the name of the claim.
    pub(crate) async fn wait_for_generated(&self, pod: &str) -> anyhow::Result<String> {
        if self.cluster.minor() < 28 {
            let name = format!("{pod}-device");
            self.wait_for_claim(&name, "made", |_| true).await?;
            return Ok(name);
        }
        let name = |pod: Option<&Pod>| {
            let status = pod?.status.resource_claim_statuses.first()?;
            status.resource_claim_name.clone()
        };
        let named = move |pod: Option<&Pod>| name(pod).is_some();
        let pod = self.wait_for(self.pods(), pod, "given a claim", named).await?;
        name(pod.as_ref()).context("the pod has a claim")
    }

    /// Waits until a claim is deleted.
    pub(crate) async fn wait_until_gone(&self, name: &str) -> anyhow::Result<()> {
        let met = |claim: Option<&ResourceClaim>| claim.is_none();
        self.wait_for(self.claims(), name, "gone", met).await.map(drop)
    }

    pub(crate) async fn delete_claim(&self, name: &str) -> anyhow::Result<()> {
        self.claims()
            .delete(name, &DeleteParams::default())
            .await
            .map(drop)?;
        Ok(())
    }

    /// Patches a claim as a user.
    pub(crate) async fn patch_claim(&self, name: &str, change: Value) -> anyhow::Result<ResourceClaim> {
        patch(&self.claims(), name, change).await
    }

    /// Patches the status of a claim as a user.
    pub(crate) async fn patch_claim_status(
        &self,
        name: &str,
        status: Value,
    ) -> anyhow::Result<ResourceClaim> {
        Ok(patch_status(&self.claims(), name, status).await?)
    }

    pub(crate) async fn versions(&self, name: &str) -> anyhow::Result<Vec<ResourceClaim>> {
        versions(&self.history.claims, self.claims(), name).await
    }

    /// Reason and message of the Events of the driver about objects of this name.
    pub(crate) async fn events(&self, name: &str) -> anyhow::Result<Vec<(String, String)>> {
        let events = Api::<Event>::all(self.cluster.client());
        let about = ListParams::default().fields(&format!("involvedObject.name={name}"));
        let events = events.list(&about).await?.items.into_iter();
        let ours = events.filter(|event| event.reporting_component.as_deref() == Some(&self.driver_name()));
        Ok(ours
            .map(|event| {
                (
                    event.reason.unwrap_or_default(),
                    event.message.unwrap_or_default(),
                )
            })
            .collect())
    }

    /// Waits for an Event about an object of this name with this reason and text.
    pub(crate) async fn wait_for_event(&self, name: &str, reason: &str, text: &str) -> anyhow::Result<Event> {
        let api = Api::<Event>::all(self.cluster.client());
        let about = watcher::Config::default().fields(&format!("involvedObject.name={name},reason={reason}"));
        let found = async {
            let mut events = pin!(watcher(api, about).applied_objects());
            while let Some(event) = events.try_next().await? {
                let message = event.message.as_deref().unwrap_or_default();
                let by_us = event
                    .reporting_component
                    .as_deref()
                    .is_some_and(|by| by.ends_with(&self.driver_name()) || by == "default-scheduler");
                if by_us && message.contains(text) {
                    return Ok(event);
                }
            }
            bail!("the watch of events ended")
        };
        match timeout(TIMEOUT, found).await {
            Ok(found) => found,
            Err(_) => bail!(
                "no event {reason} on {name} with {text:?}, found {:#?}",
                self.events(name).await?
            ),
        }
    }
}

async fn versions<K>(history: &Mutex<Vec<K>>, api: Api<K>, name: &str) -> anyhow::Result<Vec<K>>
where
    K: kube::Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let last = api.get_opt(name).await?;
    let seen = async {
        loop {
            let versions: Vec<K> = {
                let all = history.lock().expect("the lock is not poisoned");
                all.iter()
                    .filter(|object| object.meta().name.as_deref() == Some(name))
                    .cloned()
                    .collect()
            };
            let version = |object: &K| object.meta().resource_version.clone();
            if last
                .as_ref()
                .is_none_or(|last| versions.iter().any(|seen| version(seen) == version(last)))
            {
                return versions;
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(TIMEOUT, seen).await.context("waiting for every version")
}
