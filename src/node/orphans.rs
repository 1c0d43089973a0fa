//! Looks after claims that kubelet has forgotten: a shell around [`crate::core::prepare::orphans`].
//!
//! Nothing runs while no claim holds anything. The API server is asked only for claims that kubelet's own list misses.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::events::v1::Event;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ListParams, PostParams};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::api::handle::DeviceHandle;
use crate::api::resource::ResourceClaim;
use crate::core::prepare::checkpoint::ClusterFacts;
use crate::core::prepare::claim_uid::ClaimUid;
use crate::core::prepare::driver_name::DriverName;
use crate::core::prepare::orphans::{ApiView, Question};
use crate::node::metrics::Figures;
use crate::node::publish::events::{self, NodeEvent};
use crate::node::state::{Quarantine, RecordsHandle};

/// How long one call of the API server may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How soon a look is repeated for which the API server gave no answer.
const RETRY: Duration = Duration::from_secs(30);
/// Claims per page, when a claim has to be found by its uid.
const PAGE: u32 = 500;
/// The reason of the events.
const REASON: &str = "ClaimQuarantined";

/// The task that looks after them.
pub(super) struct Caretaker {
    pub(super) client: kube::Client,
    pub(super) driver_name: DriverName,
    pub(super) node_name: String,
    pub(super) records: RecordsHandle,
    pub(super) cluster: watch::Receiver<ClusterFacts>,
    /// Where what is in quarantine is shown.
    pub(super) quarantine: watch::Sender<Quarantine>,
    /// Where events are counted.
    pub(super) figures: Arc<Figures>,
}

impl Caretaker {
    /// Runs until the token is cancelled or the owner has ended.
    pub(super) async fn run(self, shutdown: CancellationToken) {
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = self.look_after() => {}
        }
    }

    async fn look_after(&self) {
        let begin = Instant::now();
        let mut held = self.records.held();
        let mut told = Quarantine::new();
        loop {
            if held.wait_for(|count| *count > 0).await.is_err() {
                return;
            }
            let Some(look) = self.records.look(begin.elapsed()).await else {
                return;
            };
            let mut next = look.next;
            let mut answers = BTreeMap::new();
            for question in look.questions {
                let answer = self.ask(&question).await;
                if let ApiView::Unknown(why) = &answer {
                    next = next.min(RETRY);
                    info!(claim_uid = %question.uid, "whether the claim still exists is not known yet: {why}");
                }
                answers.insert(question.uid, answer);
            }
            // Also without an answer: what was in quarantine may be in order again.
            let Some(judged) = self.records.judge(begin.elapsed(), answers).await else {
                return;
            };
            next = judged.again.map_or(next, |again| next.min(again));
            if !self.show(judged.quarantine, &mut told).await {
                next = next.min(RETRY);
            }
            // A claim that comes meanwhile has time: it is suspected after the grace period at the earliest.
            tokio::select! {
                () = sleep(next) => {}
                () = self.records.look_due() => {}
            }
        }
    }

    async fn ask(&self, question: &Question) -> ApiView {
        if self.cluster.borrow().serves_claims != Some(true) {
            return ApiView::Unknown(
                "the API server does not serve claims of this version, or has not said yet".to_owned(),
            );
        }
        let found = if question.name.is_empty() {
            timeout(CALL_TIMEOUT, self.find(&question.uid)).await
        } else {
            timeout(CALL_TIMEOUT, self.get(question)).await
        };
        match found {
            Ok(Ok(Some(claim))) => ApiView::Present {
                devices: self.devices(&claim),
            },
            Ok(Ok(None)) => ApiView::Gone,
            Ok(Err(error)) => ApiView::Unknown(error.to_string()),
            Err(_) => ApiView::Unknown(format!("no answer within {} s", CALL_TIMEOUT.as_secs())),
        }
    }

    async fn get(&self, question: &Question) -> Result<Option<ResourceClaim>, kube::Error> {
        let api = Api::<ResourceClaim>::namespaced(self.client.clone(), &question.namespace);
        match api.get(&question.name).await {
            Ok(claim) => {
                Ok(Some(claim).filter(|claim| claim.metadata.uid.as_deref() == Some(question.uid.as_str())))
            }
            // Of the claim itself: a server that does not know the path says "not found" as well.
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

    /// Only the uid is known, because the checkpoint was lost.
    async fn find(&self, uid: &ClaimUid) -> Result<Option<ResourceClaim>, kube::Error> {
        let api = Api::<ResourceClaim>::all(self.client.clone());
        let mut parameters = ListParams::default().limit(PAGE);
        loop {
            let page = api.list(&parameters).await?;
            let found = page
                .items
                .into_iter()
                .find(|claim| claim.metadata.uid.as_deref() == Some(uid.as_str()));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) if found.is_none() => parameters.continue_token = Some(token),
                _ => return Ok(found),
            }
        }
    }

    /// The devices in our resource handle.
    fn devices(&self, claim: &ResourceClaim) -> Option<Vec<String>> {
        let allocation = claim.status.allocation.as_ref()?;
        let ours = allocation.resource_handles.iter().find(|handle| {
            let of = handle.driver_name.as_deref().filter(|name| !name.is_empty());
            of.or(claim.status.driver_name.as_deref()) == Some(self.driver_name.as_str())
        })?;
        let handle = DeviceHandle::parse(ours.data.as_deref()?).ok()?;
        (Some(handle.claim_uid.as_str()) == claim.metadata.uid.as_deref()
            && handle.node_name == self.node_name)
            .then(|| handle.devices.into_iter().map(|device| device.device).collect())
    }

    /// Publishes what is in quarantine, and writes an event for whatever nobody was told of yet. False if one could not be
    /// written: it is tried again with the next look, so that an API server that is away costs nobody the word.
    async fn show(&self, now: Quarantine, told: &mut Quarantine) -> bool {
        let before = self.quarantine.send_replace(now.clone());
        told.retain(|uid, quarantined| now.get(uid) == Some(quarantined));
        let mut all = true;
        for (uid, quarantined) in &now {
            if told.contains_key(uid) {
                continue;
            }
            let note = format!(
                "The devices of {} are withheld on this node: {}. If no container uses them, run `drayman node release {uid}` on the node.",
                quarantined.claim, quarantined.why
            );
            if before.get(uid) != Some(quarantined) {
                error!(claim_uid = %uid, reason = REASON, "{note}");
                self.figures.told(REASON);
            }
            let api = Api::<Event>::namespaced(self.client.clone(), events::NAMESPACE);
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
                    told.insert(uid.clone(), quarantined.clone());
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
