//! Claims in the state task: Prepare, Unprepare, recovery and the check for orphans.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::spawn_blocking;
use tracing::{debug, error, info, warn};

use super::NodeState;
use super::kubelet_query::PrepareAnswer;
use super::runtime_check::ClaimUse;
use crate::api::crd::Mode;
use crate::core::prepare::kubelet_state::KubeletView;
use crate::core::prepare::names::{ClaimDevice, ClaimUid};
use crate::core::prepare::orphans::{ApiView, Decision};
use crate::core::prepare::plan::{
    Allocation, ClaimToPrepare, ClaimToUnprepare, DeviceResult, Refusal, Step, plan_prepare, plan_unprepare,
    taken, takes_from_both,
};
use crate::core::prepare::prepared_claims::{Entry, HeldDevice};
use crate::core::prepare::recovery::{
    Holding, Missing, holdings, plan_clearing, plan_explained, plan_free, plan_refresh, plan_release,
    plan_restoring, plan_restoring_one, plan_undo,
};
use crate::node::driver::{NodeDriver, PreparedClaim};
use crate::node::service::{
    ListedContainers, OrphanReport, Quarantine, Quarantined, ReleaseError, ServiceError, Suspects,
};

/// Maximum length of a logged name, in characters: valid Kubernetes names are no longer.
const SHOWN_MAX: usize = 253;

impl<D: NodeDriver> NodeState<D> {
    /// Prepares claims and answers for each. `updated` is the result of the query that they waited for, `containers` those listed before.
    pub(super) async fn prepare_all(
        &mut self,
        claims: &[ClaimToPrepare],
        withdrawn: &BTreeSet<String>,
        updated: Option<&Result<(), String>>,
        containers: Option<&ListedContainers>,
        answer: PrepareAnswer,
    ) {
        let mut answers = Vec::with_capacity(claims.len());
        for claim in claims {
            let result = if withdrawn.contains(&claim.uid) {
                Err(ServiceError::Refused(Refusal::ContainersUnknown {
                    device: claim.name.clone(),
                    problem: "the claim was to be unprepared before kubelet had answered".to_owned(),
                }))
            } else {
                self.prepare(claim, updated, containers).await
            };
            self.count("prepare", result.as_ref().err());
            log(
                "prepare",
                [&claim.namespace, &claim.name, &claim.uid],
                result.as_ref().err(),
            );
            answers.push(result);
        }
        // If the caller is gone, the work is still done; only the response is dropped.
        let _ = answer.send(answers);
    }

    pub(super) async fn prepare(
        &mut self,
        claim: &ClaimToPrepare,
        updated: Option<&Result<(), String>>,
        containers: Option<&ListedContainers>,
    ) -> Result<Vec<String>, ServiceError> {
        let planned = self.plan(claim, updated);
        match &planned {
            // Either the request or the known Node object is outdated.
            Err(Refusal::EarlierNode { .. }) => self.inputs.node_in_doubt.notify_one(),
            // Either the holder is about to end, or kubelet has lost it.
            Err(Refusal::Held { device, .. } | Refusal::AllShares { device, .. }) => {
                let device = device.clone();
                self.check_holders(&device);
            }
            // Kubelet may have lost the claim before it was allocated again.
            Err(Refusal::Changed { .. }) => {
                if let Ok(uid) = ClaimUid::parse(&claim.uid) {
                    self.orphans.change().contest(&uid);
                    self.backend.check_due.notify_one();
                }
            }
            _ => {}
        }
        let (uid, steps) = match planned {
            Ok(planned) => planned,
            Err(refusal) => {
                let inventory = self.publisher.inventory();
                return Err(self.runtime.name_container(refusal, inventory).await.into());
            }
        };
        self.orphans.change().forget(&uid);
        let released = *self.backend.released.borrow();
        let containers = containers.filter(|listed| listed.is_current(released));
        self.check_containers_lack(taken(&steps), containers).await?;
        for device in taken(&steps) {
            self.driver.check_unused(device).await?;
        }
        if let Err(failure) = self.perform(&steps).await {
            self.undo(&uid).await;
            return Err(failure);
        }
        self.retries.done(&Missing::OfClaim(uid.clone()));
        Ok(self.cdi_ids(&uid, &claim.allocation))
    }

    /// The CDI ids of a prepared claim: one in classic mode, one for each result in structured mode.
    fn cdi_ids(&self, uid: &ClaimUid, allocation: &Allocation) -> Vec<String> {
        let driver = &self.paths.driver;
        let Allocation::Results(results) = allocation else {
            return vec![driver.cdi_id(uid)];
        };
        let entry = self.prepared_claims.entry(uid);
        let id = |result: &DeviceResult| {
            let mut devices = entry.into_iter().flat_map(|entry| &entry.devices);
            let held = devices.find(|held| held.device == result.device);
            driver.cdi_id_of_claim_device(&ClaimDevice {
                uid: uid.clone(),
                device: result.device.clone(),
                admin_access: held.is_some_and(HeldDevice::has_admin_access),
            })
        };
        results.iter().map(id).collect()
    }

    /// Plans a Prepare. `updated` is the result of the query that the claim waited for.
    fn plan(
        &mut self,
        claim: &ClaimToPrepare,
        updated: Option<&Result<(), String>>,
    ) -> Result<(ClaimUid, Vec<Step>), Refusal> {
        let planned = self.plan_now(claim);
        if !self.query.is_possible() {
            return planned;
        }
        let Some(device) = self.device_of_both(&planned) else {
            return planned;
        };
        let problem = match updated {
            Some(Ok(())) => None,
            Some(Err(problem)) => Some(problem.clone()),
            // Another claim of the same call has changed which devices this claim takes.
            None => Some("it is asked when the claim is prepared again".to_owned()),
        };
        if let Some(problem) = problem {
            return Err(Refusal::ContainersUnknown { device, problem });
        }
        if let Err(Refusal::InContainer { device, .. }) = &planned {
            self.resources.record_conflict(device);
        }
        planned
    }

    fn plan_now(&self, claim: &ClaimToPrepare) -> Result<(ClaimUid, Vec<Step>), Refusal> {
        plan_prepare(
            &self.prepared_claims,
            self.resources.containers(),
            self.publisher.inventory(),
            &self.node,
            claim,
        )
    }

    fn device_of_both(&self, planned: &Result<(ClaimUid, Vec<Step>), Refusal>) -> Option<String> {
        match planned {
            Ok((_, steps)) => takes_from_both(steps, self.publisher.inventory()),
            Err(Refusal::InContainer { device, .. } | Refusal::ContainersUnknown { device, .. }) => {
                Some(device.clone())
            }
            Err(_) => None,
        }
    }

    /// Whether kubelet must be queried before this claim is prepared. True if the claim takes a device that containers could hold, so that
    /// the decision uses current data.
    pub(super) fn needs_query(&self, claim: &ClaimToPrepare) -> bool {
        self.query.is_possible() && self.device_of_both(&self.plan_now(claim)).is_some()
    }

    pub(super) async fn unprepare_all(
        &mut self,
        claims: Vec<ClaimToUnprepare>,
    ) -> Vec<Result<(), ServiceError>> {
        for claim in &claims {
            self.query.withdraw(&claim.uid);
        }
        let mut answers = Vec::with_capacity(claims.len());
        for claim in claims {
            let result = match plan_unprepare(&self.prepared_claims, &claim) {
                Ok(steps) => self.perform(&steps).await,
                Err(refusal) => Err(refusal.into()),
            };
            self.count("unprepare", result.as_ref().err());
            log(
                "unprepare",
                [&claim.namespace, &claim.name, &claim.uid],
                result.as_ref().err(),
            );
            answers.push(result);
        }
        answers
    }

    /// Performs the steps of a plan, and stops at the first that fails.
    pub(super) async fn perform(&mut self, steps: &[Step]) -> Result<(), ServiceError> {
        for step in steps {
            match step {
                Step::Prepare(uid) => {
                    let entry = self.prepared_claims.entry(uid);
                    let structured = entry.is_some_and(Entry::is_structured);
                    let container_edits = self.driver.prepare(&self.prepared_claim(uid), structured).await?;
                    let found = self.inputs.found.borrow().clone();
                    Arc::make_mut(self.prepared_claims.change()).set_container_edits(
                        uid,
                        container_edits,
                        &found,
                    );
                    continue;
                }
                Step::Unprepare(uid) => {
                    self.driver.unprepare(&self.prepared_claim(uid)).await?;
                    continue;
                }
                Step::Save(_) | Step::WriteCdi(_) | Step::RemoveCdi(_) => {}
            }
            let (step, prepared_claims, store) =
                (step.clone(), self.prepared_claims.clone(), self.store.clone());
            let performed = spawn_blocking(move || step.perform(&prepared_claims, &*store)).await;
            if let Some(changed) = performed.map_err(|_| ServiceError::Stopping)?? {
                let mut before = self.prepared_claims.entries().keys();
                if before.any(|uid| changed.entry(uid).is_none()) {
                    let released = &self.backend.released;
                    released.send_modify(|count| *count = count.wrapping_add(1));
                }
                *self.prepared_claims.change() = Arc::new(changed);
            }
        }
        Ok(())
    }

    fn prepared_claim(&self, uid: &ClaimUid) -> PreparedClaim {
        let entry = self.prepared_claims.entry(uid);
        PreparedClaim {
            uid: uid.to_string(),
            namespace: entry.map(|entry| entry.namespace.clone()).unwrap_or_default(),
            name: entry.map(|entry| entry.name.clone()).unwrap_or_default(),
            devices: entry
                .iter()
                .flat_map(|entry| &entry.devices)
                .map(|held| held.device.clone())
                .collect(),
        }
    }

    async fn undo(&mut self, uid: &ClaimUid) {
        self.retry_later(uid);
        let steps = plan_undo(&self.prepared_claims, uid);
        if let Err(failure) = self.perform(&steps).await {
            warn!(claim_uid = %uid, reason = failure.reason(), "cannot be undone now, and is later: {failure}");
        }
    }

    /// Restores the state after a start. `files` are the claims with a CDI file.
    pub(super) async fn recover(&mut self, files: &BTreeSet<ClaimUid>) {
        self.clear(files).await;
        let plans = plan_restoring(&self.prepared_claims);
        self.perform_each(plans).await;
        if let Err(failure) = self.perform(&[Step::Save(Vec::new())]).await {
            error!(
                reason = failure.reason(),
                "the restored claims cannot be stored now: {failure}"
            );
        }
        info!(
            claims = self.prepared_claims.entries().len(),
            "the prepared claims are restored"
        );
    }

    /// Cleans up after failed attempts of this or an earlier process.
    async fn clear(&mut self, files: &BTreeSet<ClaimUid>) {
        for steps in plan_clearing(&self.prepared_claims, files) {
            if let Err(failure) = self.perform(&steps).await {
                error!(
                    reason = failure.reason(),
                    "an earlier attempt cannot be cleaned up now: {failure}"
                );
            }
        }
    }

    /// Processes a change of the found devices. No CDI file may refer to a node that now belongs to another device.
    pub(super) async fn refresh(&mut self) {
        let before = self.publisher.inventory().clone();
        let found = self.inputs.found.borrow_and_update().clone();
        self.resources.lose_devices(&self.devices, &found);
        self.devices = found;
        self.query_after_change().await;
        self.rebuild_inventory();
        let plans = plan_refresh(&self.prepared_claims, &before, self.publisher.inventory());
        self.perform_each(plans).await;
        self.refresh_named_devices().await;
    }

    async fn perform_each(&mut self, plans: Vec<(ClaimUid, Vec<Step>)>) {
        for (uid, steps) in plans {
            if let Err(failure) = self.perform(&steps).await {
                let reason = failure.reason();
                warn!(claim_uid = %uid, reason, "containers of this claim cannot be started now, it is tried again: {failure}");
                self.undo(&uid).await;
            } else {
                self.retries.done(&Missing::OfClaim(uid));
            }
        }
    }

    /// Schedules the CDI file of a claim for a retry, if containers use the claim: kubelet may not call Prepare again.
    fn retry_later(&mut self, uid: &ClaimUid) {
        if plan_restoring_one(&self.prepared_claims, uid).is_some() {
            self.retries
                .failed(Missing::OfClaim(uid.clone()), self.started.elapsed());
        }
    }

    /// Retries the CDI files whose writing failed.
    pub(super) async fn retry(&mut self) {
        for missing in self.retries.due(self.started.elapsed()) {
            let uid = match &missing {
                Missing::OfDevices => {
                    self.refresh_named_devices().await;
                    continue;
                }
                Missing::OfClaim(uid) => uid.clone(),
            };
            let Some(steps) = plan_restoring_one(&self.prepared_claims, &uid) else {
                self.retries.done(&missing);
                continue;
            };
            match self.perform(&steps).await {
                Ok(()) => {
                    self.retries.done(&missing);
                    info!(claim_uid = %uid, "containers of this claim can be started again");
                }
                Err(failure) => {
                    let reason = failure.reason();
                    debug!(claim_uid = %uid, reason, "containers of this claim still cannot be started: {failure}");
                    self.undo(&uid).await;
                }
            }
        }
    }

    /// Refuses devices that containers still have. `listed` are the containers, if the caller has listed them.
    pub(super) async fn check_containers_lack<'a>(
        &self,
        names: impl Iterator<Item = &'a str>,
        listed: Option<&ListedContainers>,
    ) -> Result<(), ServiceError> {
        let devices: Vec<_> = names.filter_map(|name| self.device(name)).collect();
        let listed = listed.map(|listed| listed.containers.clone());
        Ok(self.runtime.check_unused(&devices, listed).await?)
    }

    /// Schedules a check of a device's holders, because another claim needs it: they are about to end, or kubelet has lost them.
    fn check_holders(&mut self, device: &str) {
        let Some(device) = self.publisher.inventory().get(device) else {
            return;
        };
        let holders = self.prepared_claims.holders_of(device);
        let holders: Vec<ClaimUid> = holders.map(|(uid, _)| uid.clone()).collect();
        let mut is_due = false;
        for uid in holders {
            let is_news = self.orphans.change().contest(&uid);
            is_due |= is_news || self.runtime.is_possible();
        }
        if is_due {
            self.backend.check_due.notify_one();
        }
    }

    /// Processes a change of the claims' allocations.
    pub(super) fn update_allocated(&mut self) {
        let allocated = self.inputs.allocated.borrow_and_update().clone();
        let is_conflict = self.resources.set_allocated(&allocated);
        self.check_deallocated();
        if is_conflict {
            // The known holders may be outdated: kubelet does not report the end of a container.
            self.query_kubelet();
        }
    }

    /// Checks holders of `both` devices that the API server no longer shows, as if another claim needed their device: while a claim holds
    /// such a device, kubelet requests it for no container, so nothing else triggers the check.
    fn check_deallocated(&mut self) {
        let allocated = self.resources.allocated();
        if !self.runtime.is_possible() || !allocated.known() {
            return;
        }
        let is_both = |device: &str| {
            let device = self.publisher.inventory().get(device);
            device.is_some_and(|device| device.mode == Mode::Both)
        };
        let lost = self.prepared_claims.entries().iter().filter(|(uid, entry)| {
            !entry.is_structured()
                && !allocated.has(uid.as_str())
                && entry.devices.iter().any(|held| is_both(&held.device))
        });
        let lost: Vec<ClaimUid> = lost.map(|(uid, _)| uid.clone()).collect();
        for uid in lost {
            if self.orphans.change().contest(&uid) {
                self.backend.check_due.notify_one();
            }
        }
    }

    /// Compares the prepared claims with kubelet's list.
    pub(super) async fn find_orphans(&mut self, now: Duration) -> Suspects {
        // No Prepare is running, so every unfinished attempt has failed, and its rollback as well.
        self.clear(&BTreeSet::new()).await;
        let kubelet = self.kubelet_claims().await;
        let questions = self.orphans.change().find(&self.prepared_claims, &kubelet, now);
        Suspects {
            questions,
            next: self.orphans.next_check(now),
        }
    }

    /// Frees claims, or puts them into quarantine, from the API server's answers.
    pub(super) async fn decide_orphans(
        &mut self,
        now: Duration,
        answers: &BTreeMap<ClaimUid, ApiView>,
    ) -> OrphanReport {
        let again = self.check_claim_use(now, answers).await;
        // The list is read again after the API server's answers: a freed claim must still be missing at the end of the wait.
        let kubelet = self.kubelet_claims().await;
        let decisions = self
            .orphans
            .change()
            .decide(&self.prepared_claims, &kubelet, answers, now);
        for decision in decisions {
            let (uid, steps) = match decision {
                Decision::Free(uid) => {
                    info!(claim_uid = %uid, reason = "OrphanFreed", "the API server no longer knows the claim as a holder, and kubelet or the container runtime shows that no container has its devices: they are free");
                    let steps = plan_free(&uid);
                    (uid, steps)
                }
                Decision::Explain(uid, devices) => {
                    info!(claim_uid = %uid, ?devices, reason = "HoldingExplained", "the API server shows the devices of the claim");
                    let inventory = self.publisher.inventory();
                    let steps = plan_explained(&self.prepared_claims, inventory, &uid, &devices);
                    (uid, steps)
                }
            };
            if let Err(failure) = self.perform(&steps).await {
                warn!(claim_uid = %uid, reason = failure.reason(), "not done yet, it is tried again: {failure}");
                self.retry_later(&uid);
            }
        }
        if again.is_none() {
            self.backend
                .checks
                .send_modify(|count| *count = count.wrapping_add(1));
        }
        OrphanReport {
            quarantine: self.quarantine(),
            again,
        }
    }

    /// Asks the container runtime whether containers use the devices of claims that could be freed. Returns the time until a retry if it
    /// is too early to decide.
    async fn check_claim_use(
        &mut self,
        now: Duration,
        answers: &BTreeMap<ClaimUid, ApiView>,
    ) -> Option<Duration> {
        let kubelet = self.kubelet_claims().await;
        let uids = self
            .orphans
            .claims_to_check(&self.prepared_claims, &kubelet, answers, now);
        for uid in self.runtime.begin(&uids) {
            match self.perform(&[Step::RemoveCdi(uid.clone())]).await {
                Ok(()) => self.runtime.cdi_removed(uid),
                Err(failure) => {
                    warn!(claim_uid = %uid, reason = failure.reason(), "its CDI file cannot be removed, so it keeps its devices: {failure}");
                }
            }
        }
        match self.runtime.claim_use(uids.clone(), &self.prepared_claims).await {
            ClaimUse::Unknown => None,
            ClaimUse::TooEarly(pause) => {
                let undecided = uids.into_iter().collect();
                self.orphans.change().set_use(BTreeSet::new(), undecided);
                Some(pause)
            }
            ClaimUse::Known { unused, in_use } => {
                self.orphans.change().set_use(unused, in_use);
                None
            }
        }
    }

    pub(super) async fn release(&mut self, uid: &str, force: bool) -> Result<Holding, ReleaseError> {
        let kubelet = self.kubelet_claims().await;
        let before = self.holdings();
        let (uid, steps) = plan_release(&self.prepared_claims, &kubelet, uid, force)?;
        if let Err(failure) = self.perform(&steps).await {
            warn!(claim_uid = %uid, reason = failure.reason(), force, "the manual release failed: {failure}");
            // The claim is still held, so containers can still use it.
            self.retry_later(&uid);
            return Err(failure.into());
        }
        self.orphans.change().forget(&uid);
        let held = before.into_iter().find(|holding| holding.uid == uid.as_str());
        let held = held.unwrap_or_default();
        warn!(claim_uid = %uid, devices = ?held.devices, force, reason = "Released", "the claim was released manually");
        Ok(held)
    }

    pub(super) fn holdings(&self) -> Vec<Holding> {
        holdings(&self.prepared_claims, &self.orphans.quarantine())
    }

    fn quarantine(&self) -> Quarantine {
        let describe = |(uid, why): (ClaimUid, String)| {
            let claim = self.prepared_claims.entry(&uid)?.describe(&uid);
            Some((uid, Quarantined { claim, why }))
        };
        self.orphans
            .quarantine()
            .into_iter()
            .filter_map(describe)
            .collect()
    }

    async fn kubelet_claims(&self) -> KubeletView {
        let paths = self.paths.clone();
        spawn_blocking(move || paths.kubelet())
            .await
            .unwrap_or_else(|error| KubeletView::Unknown(error.to_string()))
    }

    pub(super) fn count(&self, operation: &'static str, failure: Option<&ServiceError>) {
        self.metrics.handled(operation, failure.map(ServiceError::reason));
    }
}

/// Logs a request for a claim, given by namespace, name and uid.
fn log(what: &str, claim: [&str; 3], failure: Option<&ServiceError>) {
    // A refused request may be unvalidated, with names of any length.
    let [namespace, name, uid] = claim.map(|text| text.chars().take(SHOWN_MAX).collect::<String>());
    match failure {
        None => info!(namespace, name, claim_uid = uid, "{what} done"),
        Some(failure) => warn!(
            namespace,
            name,
            claim_uid = uid,
            reason = failure.reason(),
            "{what} refused: {failure}"
        ),
    }
}
