//! The controller: the shell around [`crate::core::claims`] that serves any [`Driver`].
//!
//! One task owns the [`World`]. It turns watch events and answers into [`Event`]s, asks for [`Command`]s and has them carried
//! out; it decides nothing itself.
//!
//! # Running a driver
//!
//! ```no_run
//! use drayman::controller::{Controller, LeaderElection};
//! use drayman::driver::Driver;
//! use tokio_util::sync::CancellationToken;
//!
//! async fn serve(driver: impl Driver, shutdown: CancellationToken) -> Result<(), Box<dyn std::error::Error>> {
//!     let mut config = kube::Config::infer().await?;
//!     // The controller decides what is sent again, and when.
//!     config.default_retry = false;
//!     let pod_name = std::env::var("HOSTNAME").ok();
//!     let election = LeaderElection::new("kube-system", driver.name(), pod_name.as_deref().unwrap_or("driver"));
//!     let controller = Controller::builder(driver)
//!         .instance(pod_name)
//!         .leader_election(Some(election))
//!         .build(kube::Client::try_from(config)?)?;
//!     Ok(controller.run(shutdown).await?)
//! }
//! ```
//!
//! [`Controller::run`] ends when the token is cancelled (on SIGTERM, say), with what is under way awaited and the lease given up; with
//! [`ControllerError::LeaseLost`] when another may lead; and before it has done anything if the API is not served. In each case the process
//! should end, and its supervisor start it again. It logs with [`tracing`], and needs no store: after a start it lists everything anew.
//!
//! The process must choose a TLS provider if several are linked: `rustls::crypto::ring::default_provider().install_default()`.
//!
//! # What it needs to be allowed
//!
//! | group | resources | verbs |
//! |---|---|---|
//! | `resource.k8s.io` | `resourceclasses`, `resourceclaims`, `podschedulingcontexts` | get, list, watch |
//! | `resource.k8s.io` | `resourceclaims`, `resourceclaims/status`, `podschedulingcontexts/status` | patch |
//! | | `pods` | get |
//! | `coordination.k8s.io` | `leases` of the driver's name, in all namespaces | list, with leader election |
//! | `events.k8s.io` | `events` | create |
//! | `coordination.k8s.io` | `leases` (with leader election, in their namespace) | get, create, update |
//!
//! # What it writes, and when
//!
//! The finalizer `<driver>/deletion-protection`, before the driver allocates anything; allocation, driver name and the pod in one patch;
//! its own entries in the status of PodSchedulingContexts, by server-side apply; and at the end the allocation away and the finalizer away. Nothing
//! at rest. It never writes a whole object, so a newer server's fields and other drivers' entries and finalizers stay. Every problem is an
//! Event on the pod, claim or class that somebody can put right, once.

mod calls;
mod considerate;
mod execute;
mod leader;
mod predecessors;
mod report;
mod rivals;
mod trim;
mod watch;
mod write;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::future::FutureExt as _;
use tokio::sync::{mpsc, watch as watch_value};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::api::resource::{GROUP, VERSION};
use crate::core::claims::{Command, Event, Moment, Settings, Statistics, World};
use crate::core::lease::LeaseSettingsError;
use crate::driver::Driver;

pub use leader::{LeaderElection, LeaseConnection};
pub use predecessors::{Predecessors, PredecessorsError};

use considerate::{Pause, considerate};
use execute::Executor;
use leader::{Election, Fence};
use report::Reports;
use watch::Standby;

/// Why the controller cannot run.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    /// The driver's name would be refused by the API server as soon as it is part of a finalizer.
    #[error(
        "driver name {0:?} is not a lower-case DNS subdomain of at most 63 characters: the API server refuses its finalizer"
    )]
    DriverName(String),
    /// The API is alpha, and off by default.
    #[error(
        "the API server does not serve {GROUP}/{VERSION}: start it with --runtime-config={GROUP}/{VERSION}=true and the feature gate DynamicResourceAllocation (Kubernetes 1.27 to 1.30); without it, and on later versions, the companions alone can serve the devices as extended resources (controller.enabled=false in the chart)"
    )]
    NotServed,
    /// Two controllers could write at once, or one lost request would end the lease.
    #[error("leader election: {0}")]
    LeaderElection(#[from] LeaseSettingsError),
    /// The thread that renews the lease cannot be started.
    #[error("leader election: no thread for the lease: {0}")]
    LeaseThread(#[source] std::io::Error),
    /// The lease has no client of its own.
    #[error("leader election: no client for the lease: {0}")]
    LeaseConnection(String),
    /// Another controller may lead by now.
    #[error("the lease could not be renewed in time, so another controller may lead by now: start again")]
    LeaseLost,
    /// The API server took the connection and said nothing.
    #[error("the API server has not answered for {} s", .0.as_secs())]
    Silent(Duration),
    /// The API server could not be asked.
    #[error("the API server does not answer: {0}")]
    Unreachable(#[source] Box<kube::Error>),
}

/// Serves the claims of one driver. Made by [`Controller::builder`].
pub struct Controller<D> {
    driver: Arc<D>,
    client: kube::Client,
    settings: Settings,
    call_timeout: Duration,
    request_timeout: Duration,
    instance: Option<String>,
    leader_election: Option<LeaderElection>,
    leading: watch_value::Sender<bool>,
    figures: watch_value::Sender<Figures>,
}

/// What the controller has counted, and the clock by which it did.
#[derive(Clone, Debug)]
pub struct Figures {
    /// When the controller began to serve.
    pub since: Instant,
    /// What has been counted since.
    pub statistics: Statistics,
}

impl Default for Figures {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            statistics: Statistics::default(),
        }
    }
}

impl<D> std::fmt::Debug for Controller<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controller")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// Builds a [`Controller`].
#[derive(Debug)]
pub struct Builder<D> {
    driver: D,
    call_timeout: Duration,
    request_timeout: Duration,
    reserve_for_pod: bool,
    other_driver_wait: Duration,
    instance: Option<String>,
    leader_election: Option<LeaderElection>,
    leading: watch_value::Sender<bool>,
    figures: watch_value::Sender<Figures>,
}

impl<D: Driver> Controller<D> {
    /// How long a call of the driver may take, unless [`Builder::call_timeout`] says otherwise.
    pub const CALL_TIMEOUT: Duration = Duration::from_secs(30);
    /// How long a request to the API server may take, unless [`Builder::request_timeout`] says otherwise.
    pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

    /// Begins to build a controller for a driver.
    pub fn builder(driver: D) -> Builder<D> {
        Builder {
            driver,
            call_timeout: Self::CALL_TIMEOUT,
            request_timeout: Self::REQUEST_TIMEOUT,
            reserve_for_pod: true,
            other_driver_wait: Settings::OTHER_DRIVER_WAIT,
            instance: None,
            leader_election: None,
            leading: watch_value::Sender::new(false),
            figures: watch_value::Sender::default(),
        }
    }

    /// Runs until `shutdown` is cancelled. Nothing is begun then any more. Calls and writes that are under way are awaited, up to the
    /// request timeout, and the lease is given up if all of them have ended.
    ///
    /// With leader election it returns [`ControllerError::LeaseLost`] when it can lead no longer; the process should end then and
    /// be started again, because only a start passes the start barrier.
    pub async fn run(mut self, shutdown: CancellationToken) -> Result<(), ControllerError> {
        // But not for the lease: another one would lead soon, and ask for everything anew.
        let of_lease = self.client.clone();
        let (client, pause) = considerate(&self.client, self.request_timeout);
        self.client = client;
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            served = self.check_served() => served?,
        }
        let mut standby = Standby::new(&self.client);
        let Some(election) = self.leader_election.clone() else {
            self.leading.send_replace(true);
            self.serve(standby, &Fence::open(), pause, &shutdown).await;
            return Ok(());
        };
        let settings = election.settings(self.request_timeout);
        settings.check()?;
        let terms = election.clone();
        let election = Election::start(of_lease, election, settings);
        let mut election = election.map_err(ControllerError::LeaseThread)?;
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            leads = election.leads() => leads?,
            // Watches do not end.
            () = standby.keep() => return Ok(()),
        }
        let fence = election.fence();
        self.leading.send_replace(true);
        let ended = tokio::select! {
            ended = self.serve(standby, &fence, pause, &shutdown) => ended,
            () = election.lost() => return Err(ControllerError::LeaseLost),
            never = rivals::notice(&self.client, &terms, self.request_timeout) => match never {},
        };
        self.leading.send_replace(false);
        if ended {
            election.release().await;
        } else {
            tracing::warn!("the lease is not released, since a call or a write may still be under way");
        }
        Ok(())
    }

    /// Serves until `shutdown` is cancelled, from a list of all claims on: of them nothing that was seen before is trusted. The answer is
    /// whether every call and every write has ended.
    async fn serve(
        &self,
        standby: Standby,
        fence: &Fence,
        pause: Pause,
        shutdown: &CancellationToken,
    ) -> bool {
        let (mut watches, seen) = standby.begin();
        watches.push(watch::claims(&self.client));
        let mut capacity_changes = pin!(self.driver.capacity_changes());
        let mut findings = pin!(self.driver.findings());
        let (answers, mut answered) = mpsc::unbounded_channel();
        let reports = Reports::start(
            self.client.clone(),
            &self.settings.driver_name,
            self.instance.clone(),
            self.request_timeout,
            answers.clone(),
        );
        let executor = Executor::new(self, fence.clone(), pause, answers);
        let mut world = World::new(self.settings.clone());
        let start = Instant::now();
        let now = || Moment::new(start.elapsed());
        for event in seen {
            world.apply(event, now());
        }
        loop {
            let deadline = world.next_deadline().map(|moment| start + moment.since_start());
            let event = tokio::select! {
                () = shutdown.cancelled() => break,
                Some(event) = watches.next() => Some(event),
                Some(event) = answered.recv() => Some(event),
                Some(change) = capacity_changes.next() => Some(Event::Capacity(change)),
                Some(finding) = findings.next() => Some(Event::Found(vec![finding])),
                () = sleep_until(deadline) => None,
            };
            if let Some(event) = event {
                world.apply(event, now());
            }
            // Everything that is there already is taken in before anything is decided.
            while let Ok(event) = answered.try_recv() {
                world.apply(event, now());
            }
            while let Some(Some(event)) = watches.next().now_or_never() {
                world.apply(event, now());
            }
            for command in world.decide(now()) {
                tracing::trace!(?command, "decided");
                match command {
                    Command::Report(report) => reports.send(report),
                    command => executor.execute(command),
                }
            }
            // Nobody looks, most often in a vendor's tests: then nothing is put together.
            if self.figures.receiver_count() > 0 {
                let statistics = world.statistics();
                self.figures.send_replace(Figures {
                    since: start,
                    statistics,
                });
            }
        }
        let ended = executor.finish(self.request_timeout).await;
        reports.finish(self.request_timeout).await;
        ended
    }

    async fn check_served(&self) -> Result<(), ControllerError> {
        let version = format!("{GROUP}/{VERSION}");
        let asked = self.client.list_api_group_resources(&version);
        match tokio::time::timeout(self.request_timeout, asked).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Err(ControllerError::NotServed),
            Ok(Err(error)) => Err(ControllerError::Unreachable(Box::new(error))),
            Err(_) => Err(ControllerError::Silent(self.request_timeout)),
        }
    }
}

impl<D: Driver> Builder<D> {
    /// How long a call of the driver may take. One that takes longer is dropped, and holds up only its own claim.
    #[must_use]
    pub fn call_timeout(mut self, timeout: Duration) -> Self {
        self.call_timeout = timeout;
        self
    }

    /// How long a request to the API server may take.
    #[must_use]
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = timeout;
        self
    }

    /// Whether the pod is entered into `reservedFor` together with the allocation (the default). If not, the scheduler does it.
    #[must_use]
    pub fn reserve_for_pod(mut self, reserve: bool) -> Self {
        self.reserve_for_pod = reserve;
        self
    }

    /// After which time another driver of a pod that says nothing to the scheduler is named in an Event on the pod, once; by
    /// default after [`Settings::OTHER_DRIVER_WAIT`].
    #[must_use]
    pub fn other_driver_wait(mut self, wait: Duration) -> Self {
        self.other_driver_wait = wait;
        self
    }

    /// The name of this process in the events that it writes, for instance its pod's.
    #[must_use]
    pub fn instance(mut self, instance: Option<String>) -> Self {
        self.instance = instance;
        self
    }

    /// Lets several controllers of one driver run, of which one leads. Without it there must never be two.
    #[must_use]
    pub fn leader_election(mut self, leader_election: Option<LeaderElection>) -> Self {
        self.leader_election = leader_election;
        self
    }

    /// Where the controller says whether it leads. One that is known to be alone leads from the start.
    #[must_use]
    pub fn leading(mut self, leading: watch_value::Sender<bool>) -> Self {
        self.leading = leading;
        self
    }

    /// Where the controller says what it has counted, after each decision.
    #[must_use]
    pub fn figures(mut self, figures: watch_value::Sender<Figures>) -> Self {
        self.figures = figures;
        self
    }

    /// The controller. The client should have its own retries off (`Config::default_retry`), so that a write whose answer is
    /// lost is not sent a second time behind the controller's back.
    pub fn build(self, client: kube::Client) -> Result<Controller<D>, ControllerError> {
        let driver_name = self.driver.name().to_owned();
        if !is_driver_name(&driver_name) {
            return Err(ControllerError::DriverName(driver_name));
        }
        let mut settings = Settings::new(driver_name);
        settings.reserve_for_pod = self.reserve_for_pod;
        settings.other_driver_wait = self.other_driver_wait;
        Ok(Controller {
            driver: Arc::new(self.driver),
            client,
            settings,
            call_timeout: self.call_timeout,
            request_timeout: self.request_timeout,
            instance: self.instance,
            leader_election: self.leader_election,
            leading: self.leading,
            figures: self.figures,
        })
    }
}

/// Whether a name can be a driver's: it becomes the prefix of a finalizer, where upper case is refused.
pub fn is_driver_name(name: &str) -> bool {
    let is_label = |label: &str| {
        let is_inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !label.is_empty() && label.chars().all(is_inner) && !label.starts_with('-') && !label.ends_with('-')
    };
    name.len() <= 63 && name.split('.').all(is_label)
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::is_driver_name;

    #[test]
    fn a_driver_name_is_a_lower_case_dns_subdomain_of_at_most_63_characters() {
        for name in ["drayman.dev", "a", "1.2-3.x"] {
            assert!(is_driver_name(name), "{name}");
        }
        for name in [
            "",
            "Drayman.dev",
            "a..b",
            "-a",
            "a-",
            "a_b",
            "a/b",
            &"x".repeat(64),
        ] {
            assert!(!is_driver_name(name), "{name}");
        }
    }
}
