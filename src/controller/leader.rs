//! The lease in the API: a shell around [`crate::core::protocol::Lease`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease as LeaseObject, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Api, PostParams};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::core::protocol::{Lease, LeaseAnswer, LeaseRecord, LeaseSettings, LeaseStep, Moment};

/// Where the lease is, and its times. Lease, deadline and retry are those of the components of Kubernetes.
#[derive(Clone, Debug)]
pub struct LeaderElection {
    /// The namespace of the Lease object.
    pub namespace: String,
    /// The name of the Lease object.
    pub name: String,
    /// How long others must leave a lease alone that is not renewed.
    pub lease_duration: Duration,
    /// How long the leader goes on without a renewal.
    pub renew_deadline: Duration,
    /// How long between two attempts.
    pub retry_period: Duration,
    /// Tells this process from every other one.
    pub identity: String,
}

impl LeaderElection {
    /// A lease with the times of the components of Kubernetes: 15 s, given up after 10 s without a renewal, tried every 2 s.
    ///
    /// All controllers of one driver must name the same lease. `instance` is for people, a pod's name for instance: what makes
    /// the identity one of its own is when the process was started.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>, instance: &str) -> Self {
        let started = Timestamp::now().as_nanosecond();
        Self {
            namespace: namespace.into(),
            name: name.into(),
            lease_duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_period: Duration::from_secs(2),
            identity: format!("{instance}_{}_{started:x}", std::process::id()),
        }
    }
}

/// Whether this process may write, asked before each write.
#[derive(Clone)]
pub(super) struct Fence {
    /// Without leader election there is no lease, and nothing to lose.
    lease: Option<Arc<Mutex<Lease>>>,
    start: Instant,
}

impl Fence {
    /// The fence of a controller that is known to be alone.
    pub(super) fn open() -> Self {
        Self {
            lease: None,
            start: Instant::now(),
        }
    }

    /// Whether this process may write now.
    pub(super) fn holds(&self) -> bool {
        let now = self.now();
        self.lease.as_ref().is_none_or(|lease| lock(lease).holds(now))
    }

    fn now(&self) -> Moment {
        Moment::new(self.start.elapsed())
    }
}

fn lock(lease: &Mutex<Lease>) -> MutexGuard<'_, Lease> {
    lease.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes and keeps the lease.
pub(super) struct Leader {
    api: Api<LeaseObject>,
    election: LeaderElection,
    request_timeout: Duration,
    lease: Arc<Mutex<Lease>>,
    start: Instant,
    acquired: Option<Timestamp>,
}

impl Leader {
    pub(super) fn new(client: kube::Client, election: LeaderElection, settings: LeaseSettings) -> Self {
        Self {
            api: Api::namespaced(client, &election.namespace),
            request_timeout: settings.request_timeout,
            lease: Arc::new(Mutex::new(Lease::new(settings))),
            start: Instant::now(),
            acquired: None,
            election,
        }
    }

    pub(super) fn fence(&self) -> Fence {
        Fence {
            lease: Some(self.lease.clone()),
            start: self.start,
        }
    }

    /// Returns when this process leads, and may write; `false` if `shutdown` came first.
    pub(super) async fn lead(&mut self, shutdown: &CancellationToken) -> bool {
        tracing::info!(lease = %self.shown(), identity = self.election.identity, "waiting to lead");
        loop {
            let now = self.now();
            let usable = lock(&self.lease).usable_from();
            if usable.is_some_and(|usable| usable <= now) {
                tracing::info!(lease = %self.shown(), "leading");
                return true;
            }
            tokio::select! {
                () = shutdown.cancelled() => return false,
                // A lease that is lost before it was used is nothing lost.
                kept = self.turn(usable) => if !kept {
                    let settings = lock(&self.lease).settings().clone();
                    *lock(&self.lease) = Lease::new(settings);
                },
            }
        }
    }

    /// Keeps the lease; returns only when it is lost.
    pub(super) async fn keep(&mut self) {
        while self.turn(None).await {}
        tracing::error!(lease = %self.shown(), "the lease is lost");
    }

    /// Gives the lease up, so that another need not wait for its end.
    pub(super) async fn release(&mut self) {
        let Some(version) = lock(&self.lease).own_version() else {
            return;
        };
        let record = self.object(Some(version), 0, "");
        let parameters = PostParams::default();
        let request = self.api.replace(&self.election.name, &parameters, &record);
        match tokio::time::timeout(self.request_timeout, request).await {
            Ok(Ok(_)) => tracing::info!(lease = %self.shown(), "released"),
            Ok(Err(error)) => tracing::warn!(%error, "the lease could not be released"),
            Err(_) => tracing::warn!("the lease could not be released in time"),
        }
    }

    /// One step; the answer is whether the lease is not lost. Waits no longer than until `limit`.
    async fn turn(&mut self, limit: Option<Moment>) -> bool {
        let sent = self.now();
        let step = lock(&self.lease).step(sent);
        let answer = match &step {
            LeaseStep::Lost => return false,
            LeaseStep::Wait(until) => {
                let until = limit.map_or(*until, |limit| limit.min(*until));
                tokio::time::sleep_until(self.start + until.since_start()).await;
                return true;
            }
            LeaseStep::Read => {
                lock(&self.lease).sent(&step, sent);
                self.read().await
            }
            LeaseStep::Write {
                version,
                transitions,
                take,
            } => {
                lock(&self.lease).sent(&step, sent);
                self.write(version.clone(), *transitions, *take).await
            }
        };
        let now = self.now();
        lock(&self.lease).answered(answer, sent, now);
        true
    }

    async fn read(&self) -> LeaseAnswer {
        match tokio::time::timeout(self.request_timeout, self.api.get_opt(&self.election.name)).await {
            Ok(Ok(object)) => LeaseAnswer::Read(object.as_ref().map(record)),
            Ok(Err(error)) => {
                tracing::warn!(lease = %self.shown(), %error, "the lease cannot be read");
                LeaseAnswer::Unclear
            }
            Err(_) => LeaseAnswer::Unclear,
        }
    }

    async fn write(&mut self, version: Option<String>, transitions: i32, take: bool) -> LeaseAnswer {
        if take {
            self.acquired = Some(Timestamp::now());
        }
        let create = version.is_none();
        let identity = self.election.identity.clone();
        let object = self.object(version, transitions, &identity);
        let parameters = PostParams::default();
        let request = async {
            if create {
                self.api.create(&parameters, &object).await
            } else {
                self.api.replace(&self.election.name, &parameters, &object).await
            }
        };
        match tokio::time::timeout(self.request_timeout, request).await {
            Ok(Ok(object)) => LeaseAnswer::Written(record(&object)),
            Ok(Err(error)) => {
                tracing::warn!(lease = %self.shown(), %error, "the lease cannot be written");
                LeaseAnswer::Unclear
            }
            Err(_) => LeaseAnswer::Unclear,
        }
    }

    fn object(&self, version: Option<String>, transitions: i32, holder: &str) -> LeaseObject {
        let seconds = i32::try_from(self.election.lease_duration.as_secs()).unwrap_or(i32::MAX);
        LeaseObject {
            metadata: ObjectMeta {
                name: Some(self.election.name.clone()),
                namespace: Some(self.election.namespace.clone()),
                resource_version: version,
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.to_owned()),
                lease_duration_seconds: Some(seconds),
                acquire_time: self.acquired.map(MicroTime),
                renew_time: Some(MicroTime(Timestamp::now())),
                lease_transitions: Some(transitions),
                ..LeaseSpec::default()
            }),
        }
    }

    fn now(&self) -> Moment {
        Moment::new(self.start.elapsed())
    }

    fn shown(&self) -> String {
        format!("{}/{}", self.election.namespace, self.election.name)
    }
}

fn record(object: &LeaseObject) -> LeaseRecord {
    let spec = object.spec.clone().unwrap_or_default();
    let seconds = spec
        .lease_duration_seconds
        .and_then(|seconds| u64::try_from(seconds).ok())
        .unwrap_or_default();
    LeaseRecord {
        holder: spec.holder_identity.unwrap_or_default(),
        duration: Duration::from_secs(seconds),
        transitions: spec.lease_transitions.unwrap_or_default(),
        version: object.metadata.resource_version.clone().unwrap_or_default(),
    }
}

#[cfg(test)]
impl Fence {
    /// The fence of a leader that has just renewed its lease and does not do so again: it may write for so long.
    pub(super) fn held_for(time: Duration) -> Self {
        let settings = LeaseSettings {
            identity: "this".to_owned(),
            duration: time * 2,
            renew_deadline: time,
            retry_period: time / 4,
            request_timeout: time / 4,
        };
        let (start, now) = (Instant::now(), Moment::default());
        let record = LeaseRecord {
            holder: settings.identity.clone(),
            duration: settings.duration,
            ..LeaseRecord::default()
        };
        let mut lease = Lease::new(settings);
        for answer in [LeaseAnswer::Read(None), LeaseAnswer::Written(record)] {
            let step = lease.step(now);
            lease.sent(&step, now);
            lease.answered(answer, now, now);
        }
        Self {
            lease: Some(Arc::new(Mutex::new(lease))),
            start,
        }
    }
}
