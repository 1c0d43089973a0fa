//! The controller: the runtime of [`crate::core::claims`], which serves any [`Driver`].
//!
//! One task owns the [`ControllerState`](crate::core::claims::ControllerState). It applies the events of watches and answers, and executes
//! the commands that the state returns; it makes no decisions itself. `watch` makes events of objects, `execute` runs commands, `write` sends
//! patches, `events` writes the Events that `core::claims` decides on, and `leader` holds the lease.
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
//!     // The controller has its own retries.
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
//! [`Controller::run`] returns when the token is cancelled (for example on SIGTERM), after awaiting pending calls and releasing the lease,
//! unless one of them may still take effect; with [`ControllerError::LeaseLost`] when another process may lead; and immediately if the API is
//! not served. In each case the process should exit and be restarted by its supervisor. It logs with [`tracing`] and needs no store: each
//! start lists everything again.
//!
//! The process must choose a TLS provider if several are linked: `rustls::crypto::ring::default_provider().install_default()`.
//!
//! # Required permissions
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
//! # Writes
//!
//! The finalizer `<driver>/deletion-protection`, before the driver allocates anything; allocation, driver name and the pod in one patch;
//! its own entries in the status of PodSchedulingContexts, by server-side apply; and finally the removal of allocation and finalizer. An
//! idle controller writes nothing. It never writes a whole object, so fields of a newer server and other drivers' entries and finalizers
//! stay. Every problem is reported once, as an Event on the pod, claim or class whose owner can fix it.

mod error;
mod events;
mod execute;
mod leader;
mod predecessors;
mod rivals;
mod watch;
mod write;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch as watch_value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::api::resource::{GROUP, VERSION};
use crate::core::claims::Settings;
use crate::core::names::check_driver;
use crate::driver::{Driver, DriverError};

pub use crate::core::claims::{Moment, QueueStatistics, Statistics};
pub use crate::core::distribution::Distribution;
pub use crate::core::lease::LeaseSettingsError;
pub use error::ControllerError;
pub use leader::{LeaderElection, LeaseConnection};
pub use predecessors::{Predecessors, PredecessorsError};

use leader::Election;
use watch::Standby;
use write::{Fence, with_retry_after};

/// Serves the claims of one driver. Created by [`Controller::builder`].
pub struct Controller<D> {
    client: kube::Client,
    options: Arc<Options<D>>,
}

/// The settings of a [`Builder`], and its driver.
#[derive(Debug)]
struct Options<D> {
    driver: Arc<D>,
    settings: Settings,
    call_timeout: Duration,
    request_timeout: Duration,
    instance: Option<String>,
    leader_election: Option<LeaderElection>,
    leading: watch_value::Sender<bool>,
    metrics: watch_value::Sender<Metrics>,
}

/// The controller's counters, and the start of the clock that they refer to.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Metrics {
    /// When the controller started to serve.
    pub since: Instant,
    /// The counters since then.
    pub statistics: Statistics,
    /// The last error of [`Driver::ready`], until it succeeds.
    pub not_ready: Option<DriverError>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            statistics: Statistics::default(),
            not_ready: None,
        }
    }
}

impl<D> std::fmt::Debug for Controller<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controller")
            .field("settings", &self.options.settings)
            .finish_non_exhaustive()
    }
}

/// Builds a [`Controller`].
#[derive(Debug)]
pub struct Builder<D>(Options<D>);

impl<D: Driver> Controller<D> {
    /// Default time limit of a driver call; see [`Builder::call_timeout`].
    pub const CALL_TIMEOUT: Duration = Duration::from_secs(30);
    /// Default time limit of an API server request; see [`Builder::request_timeout`].
    pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

    /// Returns a builder of a controller for `driver`.
    pub fn builder(driver: D) -> Builder<D> {
        Builder(Options {
            settings: Settings::new(driver.name()),
            driver: Arc::new(driver),
            call_timeout: Self::CALL_TIMEOUT,
            request_timeout: Self::REQUEST_TIMEOUT,
            instance: None,
            leader_election: None,
            leading: watch_value::Sender::new(false),
            metrics: watch_value::Sender::default(),
        })
    }

    /// Runs until `shutdown` is cancelled. It then starts nothing new, awaits pending calls and writes up to the request timeout, and
    /// releases the lease if none of them can have an effect any more.
    ///
    /// With leader election it returns [`ControllerError::LeaseLost`] when it may no longer lead. The process should then exit and be
    /// restarted, because only a start passes the start barrier.
    pub async fn run(mut self, shutdown: CancellationToken) -> Result<(), ControllerError> {
        // Lease requests do not honour Retry-After: if the lease expired meanwhile, the next leader would list everything again.
        let of_lease = self.client.clone();
        let options = Arc::clone(&self.options);
        let (client, pause) = with_retry_after(&self.client, options.request_timeout);
        self.client = client;
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            served = self.check_served() => served?,
        }
        let mut standby = Standby::new(&self.client);
        let Some(election) = options.leader_election.clone() else {
            options.leading.send_replace(true);
            let fence = Fence::new(None, None);
            let ended = self.serve(standby, &fence, pause, &shutdown).await;
            options.leading.send_replace(false);
            return ended.map(drop);
        };
        let settings = election.settings(options.request_timeout);
        settings.check()?;
        let terms = election.clone();
        let election = Election::start(of_lease, election, settings);
        let mut election = election.map_err(ControllerError::LeaseThread)?;
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            leads = election.leads() => leads?,
            // `keep` returns only if the watches end, which they never do.
            () = standby.keep() => return Ok(()),
        }
        let fence = election.fence();
        options.leading.send_replace(true);
        let ended = tokio::select! {
            ended = self.serve(standby, &fence, pause, &shutdown) => ended,
            () = election.lost() => Err(ControllerError::LeaseLost),
            never = rivals::report(&self.client, &terms, options.request_timeout) => match never {},
        };
        options.leading.send_replace(false);
        if ended? {
            election.release().await;
        } else {
            tracing::warn!("the lease is not released, since a call or a write may still be under way");
        }
        Ok(())
    }

    async fn check_served(&self) -> Result<(), ControllerError> {
        let version = format!("{GROUP}/{VERSION}");
        let asked = self.client.list_api_group_resources(&version);
        let timeout = self.options.request_timeout;
        match tokio::time::timeout(timeout, asked).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Err(ControllerError::NotServed),
            Ok(Err(error)) => Err(ControllerError::Unreachable(Box::new(error))),
            Err(_) => Err(ControllerError::Silent(timeout)),
        }
    }
}

impl<D: Driver> Builder<D> {
    /// Sets the time limit of a driver call. A call that takes longer is dropped, and blocks only its own claim.
    #[must_use]
    pub fn call_timeout(mut self, timeout: Duration) -> Self {
        self.0.call_timeout = timeout;
        self
    }

    /// Sets the time limit of a request to the API server.
    #[must_use]
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.0.request_timeout = timeout;
        self
    }

    /// Sets whether the pod is added to `reservedFor` together with the allocation (the default). Otherwise the scheduler adds it.
    #[must_use]
    pub fn reserve_for_pod(mut self, reserve: bool) -> Self {
        self.0.settings.reserve_for_pod = reserve;
        self
    }

    /// Sets how long another driver of the same pod may leave the PodSchedulingContext unanswered before an Event on the pod names it,
    /// once. Default: 60 s.
    #[must_use]
    pub fn other_driver_wait(mut self, wait: Duration) -> Self {
        self.0.settings.other_driver_wait = wait;
        self
    }

    /// Sets the name of this process in its Events, for instance the name of its pod.
    #[must_use]
    pub fn instance(mut self, instance: Option<String>) -> Self {
        self.0.instance = instance;
        self
    }

    /// Enables leader election, so that several controllers of one driver may run and one of them leads. Without it, never run two.
    #[must_use]
    pub fn leader_election(mut self, leader_election: Option<LeaderElection>) -> Self {
        self.0.leader_election = leader_election;
        self
    }

    /// Sets the channel that reports whether the controller leads. Without leader election it leads from the start until it ends.
    #[must_use]
    pub fn leading(mut self, leading: watch_value::Sender<bool>) -> Self {
        self.0.leading = leading;
        self
    }

    /// Sets the channel that receives the counters after each decision.
    #[must_use]
    pub fn metrics(mut self, metrics: watch_value::Sender<Metrics>) -> Self {
        self.0.metrics = metrics;
        self
    }

    /// Builds the controller. The client should not retry by itself (`Config::default_retry`), so that a write with a lost answer
    /// is not sent twice without the controller's knowledge.
    pub fn build(self, client: kube::Client) -> Result<Controller<D>, ControllerError> {
        let Self(options) = self;
        if check_driver(&options.settings.driver_name).is_err() {
            return Err(ControllerError::DriverName(options.settings.driver_name));
        }
        let options = Arc::new(options);
        Ok(Controller { client, options })
    }
}
