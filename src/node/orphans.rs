//! Finds prepared claims that kubelet has forgotten: the runtime of [`crate::core::prepare::orphans`].
//!
//! Idle while no claim is prepared. The API server is queried only for claims that are missing from kubelet's list, and rarely for the
//! others if the list cannot be read.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::resource::v1;
use kube::api::{Api, ListParams};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::api::claim::{ClaimObject, DecodedClaim};
use crate::api::handle::DeviceHandle;
use crate::api::resource::ResourceClaim;
use crate::core::discovery::device_events::DeviceEvent;
use crate::core::names::ClaimUid;
use crate::core::prepare::checkpoint::ClusterFacts;
use crate::core::prepare::claims_api::ClaimsApi;
use crate::core::prepare::orphans::{ApiView, Question};
use crate::core::prepare::plan::{of_results, pod_claim_name, results_of_driver};
use crate::core::prepare::prepared_claims::HeldDevice;
use crate::node::claim_watch::PAGE;
use crate::node::context::NodeContext;
use crate::node::publish::calls::{PublishError, call};
use crate::node::service::{NodeService, Quarantine};

/// Delay before a check is repeated that the API server did not answer.
const RETRY: Duration = Duration::from_secs(30);
/// Reason of the events.
const REASON: &str = "ClaimQuarantined";

/// The task that checks for orphaned claims.
pub(super) struct OrphanCheck {
    pub(super) context: NodeContext,
    pub(super) node: NodeService,
    pub(super) cluster: watch::Receiver<ClusterFacts>,
    /// Publishes the claims in quarantine.
    pub(super) quarantine: watch::Sender<Quarantine>,
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
            if *held.borrow() == 0 && !self.quarantine.borrow().is_empty() {
                // The last claim was released.
                self.report(Quarantine::new(), &mut reported).await;
            }
            if held.wait_for(|count| *count > 0).await.is_err() {
                return;
            }
            let Some(questions) = self.node.find_orphans(begin.elapsed()).await else {
                return;
            };
            let mut next = Duration::MAX;
            let mut answers = BTreeMap::new();
            for question in questions {
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
            next = next.min(report.next).min(report.again.unwrap_or(Duration::MAX));
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
                ApiView::Unknown("the API server does not serve claims, or has not answered yet".to_owned())
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
            self.find::<K>(&question.uid).await
        } else {
            call(self.get::<K>(question)).await
        };
        match found {
            Ok(Some(claim)) => ApiView::Present {
                devices: devices(&claim),
            },
            Ok(None) => ApiView::Gone,
            Err(error) => ApiView::Unknown(error.to_string()),
        }
    }

    async fn get<K: ClaimObject>(&self, question: &Question) -> Result<Option<K>, kube::Error> {
        let api = Api::<DecodedClaim<K>>::namespaced(self.context.client.clone(), &question.namespace);
        match api.get(&question.name).await {
            Ok(DecodedClaim(claim)) => {
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
    async fn find<K: ClaimObject>(&self, uid: &ClaimUid) -> Result<Option<K>, PublishError> {
        let api = Api::<DecodedClaim<K>>::all(self.context.client.clone());
        let mut parameters = ListParams::default().limit(PAGE);
        loop {
            let page = call(api.list(&parameters)).await?;
            let found = page
                .items
                .into_iter()
                .map(|DecodedClaim(claim)| claim)
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
        let ours = results_of_driver(
            results,
            &self.context.driver_name,
            pod_claim_name(&claim.metadata),
        );
        of_results(&ours, &self.context.node_name).ok()
    }

    /// The devices in our resource handle.
    fn classic_devices(&self, claim: &ResourceClaim) -> Option<Vec<HeldDevice>> {
        let allocation = claim.status.allocation.as_ref()?;
        let ours = allocation.resource_handles.iter().find(|handle| {
            let of = handle.driver_name.as_deref().filter(|name| !name.is_empty());
            of.or(claim.status.driver_name.as_deref()) == Some(self.context.driver_name.as_str())
        })?;
        let handle = DeviceHandle::parse(ours.data.as_deref()?).ok()?;
        (Some(handle.claim_uid.as_str()) == claim.metadata.uid.as_deref()
            && handle.node_name == self.context.node_name)
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
            let event = DeviceEvent {
                reason: REASON,
                warning: true,
                note,
            };
            if before.get(uid) != Some(quarantined) {
                error!(claim_uid = %uid, reason = REASON, "{}", event.note);
                self.context.metrics.event(REASON);
            }
            let node_uid = self.cluster.borrow().node_uid.clone();
            let written = self.context.create_event(node_uid.as_deref(), "Withhold", &event);
            if let Err(error) = written.await {
                warn!(%error, "the event is not written yet");
                all = false;
            } else {
                reported.insert(uid.clone(), quarantined.clone());
            }
        }
        for uid in before.keys().filter(|uid| !now.contains_key(uid)) {
            info!(claim_uid = %uid, "the claim is no longer in quarantine");
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;

    use kube::client::Body;
    use tokio::time::timeout;

    use super::*;
    use crate::node::service::{Backend, NodeRequest, OrphanReport, Quarantined};

    /// The check on a node with a prepared claim, while the API server is busy.
    fn check() -> (OrphanCheck, Backend, watch::Receiver<Quarantine>) {
        let (node, backend) = NodeService::new(None, Arc::default());
        let (quarantine, published) = watch::channel(Quarantine::new());
        let server = tower::service_fn(|_: http::Request<Body>| async {
            let busy = http::Response::builder().status(503).body(Body::empty());
            Ok::<_, Infallible>(busy.unwrap())
        });
        let check = OrphanCheck {
            context: NodeContext::for_tests(kube::Client::new(server, "default")),
            node,
            cluster: watch::channel(ClusterFacts::default()).1,
            quarantine,
        };
        backend.prepared.send_replace(1);
        (check, backend, published)
    }

    /// Answers the requests of a check.
    async fn answer(backend: &mut Backend, report: OrphanReport) {
        let Some(NodeRequest::FindOrphans(_, answer)) = backend.requests.recv().await else {
            panic!("a check");
        };
        answer.send(Vec::new()).unwrap();
        let Some(NodeRequest::DecideOrphans(_, _, _, answer)) = backend.requests.recv().await else {
            panic!("the end of the check");
        };
        answer.send(report).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn the_decision_says_when_the_next_check_is() {
        let (check, mut backend, _published) = check();
        let check = tokio::spawn(check.run(CancellationToken::new()));
        let report = |next, again| OrphanReport {
            next: Duration::from_secs(next),
            again,
            ..OrphanReport::default()
        };
        answer(&mut backend, report(120, None)).await;
        let begin = Instant::now();
        answer(&mut backend, report(120, Some(Duration::from_secs(2)))).await;
        assert_eq!(begin.elapsed().as_secs(), 120);
        answer(&mut backend, report(300, None)).await;
        assert_eq!(begin.elapsed().as_secs(), 122);
        check.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_released_claim_is_no_longer_in_quarantine() {
        let (check, mut backend, mut published) = check();
        let check = tokio::spawn(check.run(CancellationToken::new()));
        let quarantined = Quarantined {
            claim: "claim default/camera".into(),
            why: "kubelet no longer lists it".into(),
        };
        let uid = ClaimUid::parse("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a").unwrap();
        let report = OrphanReport {
            quarantine: [(uid, quarantined)].into(),
            next: Duration::from_secs(300),
            again: None,
        };
        answer(&mut backend, report).await;
        published.wait_for(|all| !all.is_empty()).await.unwrap();
        backend.prepared.send_replace(0);
        backend.check_due.notify_one();
        let empty = timeout(Duration::from_secs(60), published.wait_for(BTreeMap::is_empty));
        assert!(empty.await.unwrap().unwrap().is_empty());
        check.abort();
    }
}
