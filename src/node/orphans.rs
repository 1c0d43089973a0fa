//! Finds prepared claims that kubelet has forgotten: the runtime of [`crate::core::prepare::orphans`].
//!
//! Idle while no claim is prepared. The API server is queried only for claims that are missing from kubelet's list.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1;
use k8s_openapi::jiff::Timestamp;
use kube::Resource;
use kube::api::{Api, ListParams, PostParams};
use kube::core::NamespaceResourceScope;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::api::handle::DeviceHandle;
use crate::api::resource::ResourceClaim;
use crate::core::names::{ClaimUid, DriverName};
use crate::core::prepare::checkpoint::ClusterFacts;
use crate::core::prepare::claims_api::ClaimsApi;
use crate::core::prepare::orphans::{ApiView, Question};
use crate::core::prepare::plan::{of_results, pod_claim_name, results_of_driver};
use crate::core::prepare::prepared_claims::HeldDevice;
use crate::node::metrics::Metrics;
use crate::node::publish::node_events::{self, NodeEvent};
use crate::node::service::{NodeService, Quarantine};

/// Deadline of one API server call.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay before a check is repeated that the API server did not answer.
const RETRY: Duration = Duration::from_secs(30);
/// Page size of a search for a claim by uid.
const PAGE: u32 = 500;
/// Reason of the events.
const REASON: &str = "ClaimQuarantined";

/// A claim of either API.
trait ClaimObject:
    Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug + Send
{
}

impl ClaimObject for ResourceClaim {}
impl ClaimObject for v1::ResourceClaim {}

/// The task that checks for orphaned claims.
pub(super) struct OrphanCheck {
    pub(super) client: kube::Client,
    pub(super) driver_name: DriverName,
    pub(super) node_name: String,
    pub(super) node: NodeService,
    pub(super) cluster: watch::Receiver<ClusterFacts>,
    /// Publishes the claims in quarantine.
    pub(super) quarantine: watch::Sender<Quarantine>,
    /// Counts the events.
    pub(super) metrics: Arc<Metrics>,
}

impl OrphanCheck {
    /// Runs until the token is cancelled or the node's state task has ended.
    pub(super) async fn run(self, shutdown: CancellationToken) {
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = self.check_periodically() => {}
        }
    }

    async fn check_periodically(&self) {
        let begin = Instant::now();
        let mut held = self.node.prepared();
        let mut reported = Quarantine::new();
        loop {
            if held.wait_for(|count| *count > 0).await.is_err() {
                return;
            }
            let Some(suspects) = self.node.find_orphans(begin.elapsed()).await else {
                return;
            };
            let mut next = suspects.next;
            let mut answers = BTreeMap::new();
            for question in suspects.questions {
                let answer = self.ask(&question).await;
                if let ApiView::Unknown(why) = &answer {
                    next = next.min(RETRY);
                    info!(claim_uid = %question.uid, "whether the claim still exists is not known yet: {why}");
                }
                answers.insert(question.uid, answer);
            }
            // Evaluate even without an answer: a claim in quarantine may be in order again.
            let Some(report) = self.node.decide_orphans(begin.elapsed(), answers).await else {
                return;
            };
            next = report.again.map_or(next, |again| next.min(again));
            if !self.report(report.quarantine, &mut reported).await {
                next = next.min(RETRY);
            }
            // No need to wake for a new claim: it is suspected only after the grace period.
            tokio::select! {
                () = sleep(next) => {}
                () = self.node.check_due() => {}
            }
        }
    }

    async fn ask(&self, question: &Question) -> ApiView {
        let claims = self.cluster.borrow().claims;
        match claims {
            Some(ClaimsApi::Classic) => self.view(question, |claim| self.classic_devices(claim)).await,
            Some(ClaimsApi::Structured) => self.view(question, |claim| self.devices(claim)).await,
            Some(ClaimsApi::None) | None => {
                ApiView::Unknown("the API server does not serve claims, or has not said yet".to_owned())
            }
        }
    }

    /// Looks up a claim of either API. `devices` returns this driver's devices on this node.
    async fn view<K: ClaimObject>(
        &self,
        question: &Question,
        devices: impl Fn(&K) -> Option<Vec<HeldDevice>>,
    ) -> ApiView {
        let found = if question.name.is_empty() {
            timeout(CALL_TIMEOUT, self.find::<K>(&question.uid)).await
        } else {
            timeout(CALL_TIMEOUT, self.get::<K>(question)).await
        };
        match found {
            Ok(Ok(Some(claim))) => ApiView::Present {
                devices: devices(&claim),
            },
            Ok(Ok(None)) => ApiView::Gone,
            Ok(Err(error)) => ApiView::Unknown(error.to_string()),
            Err(_) => ApiView::Unknown(format!("no answer within {} s", CALL_TIMEOUT.as_secs())),
        }
    }

    async fn get<K: ClaimObject>(&self, question: &Question) -> Result<Option<K>, kube::Error> {
        let api = Api::<K>::namespaced(self.client.clone(), &question.namespace);
        match api.get(&question.name).await {
            Ok(claim) => {
                Ok(Some(claim).filter(|claim| claim.meta().uid.as_deref() == Some(question.uid.as_str())))
            }
            // Require the claim's own name: a server that does not know the path also returns "not found".
            Err(kube::Error::Api(status))
                if status.is_not_found()
                    && status
                        .details
                        .as_ref()
                        .is_some_and(|details| details.name == question.name) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Finds a claim by uid, for claims whose name was lost with the checkpoint.
    async fn find<K: ClaimObject>(&self, uid: &ClaimUid) -> Result<Option<K>, kube::Error> {
        let api = Api::<K>::all(self.client.clone());
        let mut parameters = ListParams::default().limit(PAGE);
        loop {
            let page = api.list(&parameters).await?;
            let found = page
                .items
                .into_iter()
                .find(|claim| claim.meta().uid.as_deref() == Some(uid.as_str()));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) if found.is_none() => parameters.continue_token = Some(token),
                _ => return Ok(found),
            }
        }
    }

    /// The devices in the scheduler's results.
    fn devices(&self, claim: &v1::ResourceClaim) -> Option<Vec<HeldDevice>> {
        let allocation = claim.status.as_ref()?.allocation.as_ref()?;
        let results = allocation.devices.as_ref()?.results.as_ref()?;
        let ours = results_of_driver(results, &self.driver_name, pod_claim_name(&claim.metadata));
        of_results(&ours, &self.node_name).ok()
    }

    /// The devices in our resource handle.
    fn classic_devices(&self, claim: &ResourceClaim) -> Option<Vec<HeldDevice>> {
        let allocation = claim.status.allocation.as_ref()?;
        let ours = allocation.resource_handles.iter().find(|handle| {
            let of = handle.driver_name.as_deref().filter(|name| !name.is_empty());
            of.or(claim.status.driver_name.as_deref()) == Some(self.driver_name.as_str())
        })?;
        let handle = DeviceHandle::parse(ours.data.as_deref()?).ok()?;
        (Some(handle.claim_uid.as_str()) == claim.metadata.uid.as_deref()
            && handle.node_name == self.node_name)
            .then(|| {
                let devices = handle.devices.into_iter();
                devices.map(|device| HeldDevice::named(device.device)).collect()
            })
    }

    /// Publishes the claims in quarantine and writes an event for each new one. Returns false if an event could not be written; the
    /// next check retries it.
    async fn report(&self, now: Quarantine, reported: &mut Quarantine) -> bool {
        let before = self.quarantine.send_replace(now.clone());
        reported.retain(|uid, quarantined| now.get(uid) == Some(quarantined));
        let mut all = true;
        for (uid, quarantined) in &now {
            if reported.contains_key(uid) {
                continue;
            }
            let note = format!(
                "The devices of {} are withheld on this node: {}. If no container uses them, run `drayman node release {uid}` on the node.",
                quarantined.claim, quarantined.why
            );
            if before.get(uid) != Some(quarantined) {
                error!(claim_uid = %uid, reason = REASON, "{note}");
                self.metrics.event(REASON);
            }
            let api = Api::<Event>::namespaced(self.client.clone(), node_events::NAMESPACE);
            let event = NodeEvent {
                driver_name: &self.driver_name,
                node_name: &self.node_name,
                node_uid: self.cluster.borrow().node_uid.clone(),
                action: "Withhold",
                reason: REASON,
                warning: true,
                note: &note,
            };
            let event = event.at(Timestamp::now());
            match timeout(CALL_TIMEOUT, api.create(&PostParams::default(), &event)).await {
                Ok(Ok(_)) => {
                    reported.insert(uid.clone(), quarantined.clone());
                    continue;
                }
                Ok(Err(error)) => warn!(%error, "the event is not written yet"),
                Err(_) => warn!("the event is not written yet: no answer"),
            }
            all = false;
        }
        for uid in before.keys().filter(|uid| !now.contains_key(uid)) {
            info!(claim_uid = %uid, "the claim is no longer in quarantine");
        }
        all
    }
}
