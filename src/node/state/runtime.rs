//! Checks with the container runtime whether claims and containers still have requested devices.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, warn};

use super::NodeState;
use super::handle::Failure;
use crate::api::crd::DeviceNumber;
use crate::core::prepare::claim_uid::ClaimUid;
use crate::core::prepare::orphans::ApiView;
use crate::core::prepare::refusal::Refusal;
use crate::core::prepare::runtime_containers::RuntimeContainers;
use crate::core::prepare::step::Step;
use crate::node::driver::NodeDriver;

/// How long after the removal of a CDI file the runtime may not yet list a container created with it: the runtime reads the file during the
/// create call, shortly before it lists the container.
const SETTLE: Duration = Duration::from_secs(2);

impl<D: NodeDriver> NodeState<D> {
    /// Schedules a check of a device's holders, because another claim needs it: they are about to end, or kubelet has lost them.
    pub(super) fn contest_holders(&mut self, device: &str) {
        let Some(device) = self.inventory.get(device) else {
            return;
        };
        let holders = self.prepared_claims.holders_of(device);
        let holders: Vec<ClaimUid> = holders.map(|(uid, _)| uid.clone()).collect();
        let mut is_due = false;
        for uid in holders {
            let is_news = self.orphans.change().contest(&uid);
            is_due |= is_news || self.witness.is_some();
        }
        if is_due {
            self.look_due.notify_one();
        }
    }

    /// Adds the container that has the device to the error, if the runtime shows it.
    pub(super) async fn with_container(&self, refusal: Refusal) -> Refusal {
        let (Refusal::Held { device, .. } | Refusal::InContainer { device, .. }) = &refusal else {
            return refusal;
        };
        let Some(Ok(seen)) = self.witnessed().await else {
            return refusal;
        };
        let numbers = self.inventory.get(device).map(|device| &*device.device_numbers);
        let Some(user) = seen.user(numbers.unwrap_or_default(), None) else {
            return refusal;
        };
        match refusal {
            Refusal::Held { device, holder } => Refusal::Held {
                device,
                holder: format!("{holder}, and {user} has it,"),
            },
            Refusal::InContainer { device, .. } => Refusal::InContainer {
                device,
                holder: user.to_string(),
            },
            other => other,
        }
    }

    /// Queries the runtime for claims that hold nothing according to the API server and whose devices another claim needs. Returns the time
    /// until a retry if it is too early to decide.
    pub(super) async fn ask_witness(&mut self, answers: &BTreeMap<ClaimUid, ApiView>) -> Option<Duration> {
        let uids = self.orphans.to_witness(&self.prepared_claims, answers);
        self.withdrawn.retain(|uid, _| uids.contains(uid));
        if uids.is_empty() {
            return None;
        }
        for uid in &uids {
            if self.withdrawn.contains_key(uid) {
                continue;
            }
            match self.carry_out(&[Step::RemoveCdi(uid.clone())]).await {
                Ok(()) => {
                    self.withdrawn.insert(uid.clone(), Instant::now());
                }
                Err(failure) => {
                    warn!(claim_uid = %uid, reason = failure.reason(), "its CDI file cannot be removed, so it keeps its devices: {failure}");
                }
            }
        }
        if self.withdrawn.values().any(|since| since.elapsed() < SETTLE) {
            let undecided = uids.into_iter().collect();
            self.orphans.change().witnessed(BTreeSet::new(), undecided);
            return Some(SETTLE);
        }
        let seen = match self.witnessed().await? {
            Ok(seen) => seen,
            Err(problem) => {
                warn!(
                    reason = "ContainerRuntimeUnavailable",
                    "claims keep their devices: {problem}"
                );
                return None;
            }
        };
        let (unused, undecided) = uids
            .into_iter()
            .partition(|uid| self.withdrawn.contains_key(uid) && !self.is_used(uid, &seen));
        self.orphans.change().witnessed(unused, undecided);
        None
    }

    /// Whether a container uses a claim's devices. Without known device numbers, only the CDI device identifies it.
    fn is_used(&self, uid: &ClaimUid, seen: &RuntimeContainers) -> bool {
        let held = self
            .prepared_claims
            .entry(uid)
            .into_iter()
            .flat_map(|entry| &entry.devices);
        let numbers: Vec<DeviceNumber> = held.flat_map(|held| held.numbers.iter().copied()).collect();
        match seen.user(&numbers, Some(&self.driver_name.cdi_id(uid))) {
            Some(user) => {
                debug!(claim_uid = %uid, holder = %user, "a container has what the claim holds");
                true
            }
            None => false,
        }
    }

    /// Refuses a starting container or a claim a device that another container still has: kubelet forgets pods deleted by force while their
    /// containers are ending. A runtime failure does not block: kubelet needs the runtime to start the container, too.
    pub(super) async fn check_unwitnessed(&self, names: &BTreeSet<&str>) -> Result<(), Failure> {
        let seen = match self.witnessed().await {
            None => return Ok(()),
            Some(Ok(seen)) => seen,
            Some(Err(problem)) => {
                warn!(
                    reason = "ContainerRuntimeUnavailable",
                    "whether another container has a device is not checked: {problem}"
                );
                return Ok(());
            }
        };
        for name in names {
            let device = self.devices.get(*name).or_else(|| self.inventory.get(*name));
            let Some(device) = device.filter(|device| device.shares.is_none_or(|shares| shares <= 1)) else {
                continue;
            };
            let cdi_device = self.driver_name.cdi_device_id(name);
            if let Some(user) = seen.user(&device.device_numbers, Some(&cdi_device)) {
                return Err(Refusal::StillUsed {
                    device: device.name.clone(),
                    holder: user.to_string(),
                }
                .into());
            }
        }
        Ok(())
    }

    async fn witnessed(&self) -> Option<Result<RuntimeContainers, String>> {
        match &self.witness {
            Some(witness) => Some(witness.look().await),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use super::super::tests::fixture::*;
    use super::super::*;
    use super::*;
    use crate::api::crd::Mode;
    use crate::core::prepare::runtime_containers::{Given, RuntimeContainer, State};
    use crate::node::companion::Companion;

    fn container(minor: u32) -> RuntimeContainer {
        let number = format!("c120:{minor}").parse().unwrap();
        RuntimeContainer {
            namespace: "default".into(),
            pod: "forced".into(),
            container: "main".into(),
            state: State::Running,
            age: Duration::from_secs(60),
            given: Given {
                numbers: [number].into(),
                ..Given::default()
            },
        }
    }

    /// A companion that is queried for claims the API server no longer has.
    async fn life(
        root: &Path,
        driver: &Arc<FakeDriver>,
        runtime: &Arc<Runtime>,
    ) -> (Life, tokio::task::JoinHandle<()>) {
        let (owner, life) = begin_with(root, "boot", driver, None, Some(runtime.clone())).await;
        let life = Life {
            task: tokio::spawn(owner.run()),
            ..life
        };
        life.cluster.send_replace(ClusterFacts {
            node_uid: Some("n-1".into()),
            serves_claims: Some(true),
        });
        let records = life.handle.records();
        let caretaker = tokio::spawn(async move {
            let begin = Instant::now();
            loop {
                records.look_due().await;
                loop {
                    let Some(look) = records.look(begin.elapsed()).await else {
                        return;
                    };
                    let gone = look
                        .questions
                        .into_iter()
                        .map(|question| (question.uid, ApiView::Gone));
                    let Some(judged) = records.judge(begin.elapsed(), gone.collect()).await else {
                        return;
                    };
                    let Some(again) = judged.again else { break };
                    tokio::time::sleep(again).await;
                }
            }
        });
        (life, caretaker)
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_is_gone_gives_way_as_soon_as_its_container_has_ended() {
        let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
        driver.say_numbered(&[("x", 6)], "test", Mode::Claims);
        let runtime = Arc::new(Runtime::default());
        let (life, caretaker) = life(root.path(), &driver, &runtime).await;
        life.prepare(A, &["x"]).await.unwrap();
        *runtime.0.lock().unwrap() = RuntimeContainers(vec![container(6)]);
        let refused = life.prepare(B, &["x"]).await.unwrap_err();
        assert_eq!(refused.reason, "DeviceHeld");
        assert!(refused.message.contains("pod default/forced"), "{refused}");
        assert_eq!(
            files(root.path()),
            Vec::<String>::new(),
            "nothing starts with it any more"
        );
        *runtime.0.lock().unwrap() = RuntimeContainers(vec![container(7)]);
        // A check that began before the container ended may decide the first attempt; kubelet retries.
        if life.prepare(B, &["x"]).await.is_err() {
            life.prepare(B, &["x"]).await.unwrap();
        }
        assert_eq!(files(root.path()), [file(B)]);
        caretaker.abort();
        let _ = caretaker.await;
        life.end().await;
    }

    #[tokio::test]
    async fn a_container_waits_until_another_no_longer_has_its_device() {
        let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
        driver.say_numbered(&[("x", 6)], "camera", Mode::ExtendedResource);
        let runtime = Arc::new(Runtime::default());
        let (life, caretaker) = life(root.path(), &driver, &runtime).await;
        let resource = "example.com/camera";
        assert!(life.handle.checks_start(resource), "each start is asked for");
        *runtime.0.lock().unwrap() = RuntimeContainers(vec![container(6)]);
        life.handle
            .allocate(resource, vec![vec!["x".to_owned()]])
            .await
            .unwrap();
        let refused = life
            .handle
            .check_start(resource, vec!["x".to_owned()])
            .await
            .unwrap_err();
        assert_eq!((refused.reason, refused.invalid_request), ("DeviceHeld", false));
        assert!(refused.message.contains("pod default/forced"), "{refused}");
        *runtime.0.lock().unwrap() = RuntimeContainers::default();
        life.handle
            .check_start(resource, vec!["x".to_owned()])
            .await
            .unwrap();
        caretaker.abort();
        let _ = caretaker.await;
        life.end().await;
    }

    #[tokio::test]
    async fn a_claim_waits_until_no_container_has_its_device() {
        let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
        driver.say_numbered(&[("x", 6)], "test", Mode::Claims);
        let runtime = Arc::new(Runtime::default());
        let (life, caretaker) = life(root.path(), &driver, &runtime).await;
        *runtime.0.lock().unwrap() = RuntimeContainers(vec![container(6)]);
        let refused = life.prepare(A, &["x"]).await.unwrap_err();
        assert_eq!(refused.reason, "DeviceHeld");
        assert!(refused.message.contains("pod default/forced"), "{refused}");
        assert_eq!(files(root.path()), Vec::<String>::new());
        *runtime.0.lock().unwrap() = RuntimeContainers(vec![container(7)]);
        life.prepare(A, &["x"]).await.unwrap();
        caretaker.abort();
        let _ = caretaker.await;
        life.end().await;
    }

    #[tokio::test]
    async fn a_claim_of_an_earlier_boot_keeps_nothing_from_containers() {
        let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
        driver.say_numbered(&[("x", 6)], "test", Mode::Claims);
        let first = live_and_know(root.path(), "boot", &driver).await;
        first.prepare(A, &["x"]).await.unwrap();
        first.end().await;
        driver.say_numbered(&[("x", 6)], "camera", Mode::ExtendedResource);
        let next = live_and_know(root.path(), "the next boot", &driver).await;
        next.handle
            .allocate("example.com/camera", vec![vec!["x".to_owned()]])
            .await
            .unwrap();
        let left = files(root.path());
        assert!(!left.contains(&file(A)), "nothing starts with it any more");
        assert!(next.handle.records().holdings().await.unwrap().is_empty());
        next.end().await;
    }
}
