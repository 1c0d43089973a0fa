//! Publishes the ResourceSlices of this node and driver in structured mode: the runtime of [`crate::core::slices`].
//!
//! Writes are sent one at a time, each only if a stored slice differs from the desired one. An idle node reads and writes nothing besides
//! its watch, which reports deleted slices. Kubelet deletes them when it restarts, or when the companion is away for more than 30 seconds;
//! the garbage collector deletes them after the Node. A companion that stops deletes nothing, so a restart within that time keeps the pool.
//! If the API server drops a feature that a device needs, dry runs find out whether it still does. A kubelet that cannot prepare claims gets
//! an empty pool, because it would start pods without their devices.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use http::header::RETRY_AFTER;
use http::{Request, Response, StatusCode};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, DeleteParams, PostParams, Preconditions};
use kube::client::Body;
use kube::core::Status;
use kube::runtime::watcher::{self, Config, Event};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::calls::{PublishError, RETRY, call, spread};
use super::inventory::InventoryPublisher;
use crate::api::crd::Devices;
use crate::core::discovery::device_events::DeviceEvent;
use crate::core::prepare::checkpoint::ClusterFacts;
use crate::core::prepare::claims_api::{ClaimsApi, FIRST_STRUCTURED_MINOR, is_too_early};
use crate::core::slices::{Altered, Features, NodePool, Omission, Omitted, Slices, Write};
use crate::node::context::NodeContext;
use crate::node::metrics::SliceCounts;
use crate::node::rate_limit::RateLimit;
use crate::node::watch::watch_objects;

/// Writes in one go, at most: enough for an update of each slice of the largest pool, which has 16, and then for a new generation.
const BURST: u32 = 36;
/// Interval between writes once the burst is used up. Every scheduler receives every write of every node.
const REFILL: Duration = Duration::from_secs(1);
/// Longest pause that an API server can ask for, so that writes soon resume after a fault.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);
/// First and longest pause between dry runs with dropped features: soon after an upgrade, in which a request can meet an older API server;
/// rarely if a gate stays off.
const PROBE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));

/// The task that publishes the slices.
pub(super) struct SlicePublisher {
    pub(super) context: NodeContext,
    /// The devices of the node.
    pub(super) devices: watch::Receiver<Arc<Devices>>,
    pub(super) cluster: watch::Receiver<ClusterFacts>,
    /// Notified when the Node object was replaced.
    pub(super) node_in_doubt: Arc<Notify>,
}

/// Why a slice is not published.
#[derive(Debug, thiserror::Error)]
enum SliceError {
    #[error(
        "the ResourceSlice {name:?} belongs to driver {driver:?} and node {node:?}: delete it, or give one of the drivers another name"
    )]
    NameTaken {
        name: String,
        driver: String,
        node: String,
    },
    #[error(
        "the API server forbids to {verb} the ResourceSlice {name:?} ({said}): grant the companion's service account get, list, watch, \
         create, update and delete of resourceslices in resource.k8s.io, or exempt it from the admission policy"
    )]
    Forbidden {
        verb: &'static str,
        name: String,
        said: String,
    },
    #[error(
        "the API server rejects the content of the ResourceSlice {name:?} ({said}): correct the devices that the message names, or the \
         admission policy"
    )]
    Invalid { name: String, said: String },
    #[error(
        "an admission webhook prevents writes of the ResourceSlice {name:?} ({said}): repair the webhook, or exempt the slices of this \
         driver from it"
    )]
    Webhook { name: String, said: String },
    #[error(transparent)]
    Other(#[from] PublishError),
}

impl SliceError {
    /// Result of the write in the metrics.
    fn result(&self) -> &'static str {
        match self {
            Self::NameTaken { .. } => "NameTaken",
            Self::Forbidden { .. } => "Forbidden",
            Self::Invalid { .. } => "Invalid",
            Self::Webhook { .. } => "Webhook",
            Self::Other(PublishError::TooLarge { .. }) => "TooLarge",
            Self::Other(PublishError::Api(kube::Error::Api(status))) if status.code == 429 => "Throttled",
            Self::Other(_) => "Failed",
        }
    }

    /// Whether a person must act. Other errors pass.
    fn is_rejection(&self) -> bool {
        !matches!(self.result(), "Failed" | "Throttled")
    }

    /// Whether the write may have been executed.
    fn is_unknown(&self) -> bool {
        match self {
            Self::Other(PublishError::Api(kube::Error::Api(status))) => status.code >= 500,
            Self::Other(PublishError::Api(_) | PublishError::Timeout) => true,
            _ => false,
        }
    }

    fn of_write(write: &Write, error: PublishError) -> Self {
        let PublishError::Api(kube::Error::Api(status)) = &error else {
            return error.into();
        };
        let (name, said) = (write.name().to_owned(), status.message.clone());
        match (status.code, write) {
            _ if is_of_webhook(status) => Self::Webhook { name, said },
            (403, write) => Self::Forbidden {
                verb: match write {
                    Write::Create(_) => "create",
                    Write::Replace(_) => "update",
                    Write::Delete { .. } => "delete",
                },
                name,
                said,
            },
            (400 | 422, _) => Self::Invalid { name, said },
            (_, Write::Create(slice) | Write::Replace(slice)) => {
                error.of_write("ResourceSlice", slice).into()
            }
            (_, Write::Delete { .. }) => error.into(),
        }
    }
}

/// Whether an admission webhook refused the write, which can have any code, or cannot be called, which is an internal error.
fn is_of_webhook(status: &Status) -> bool {
    let says = |text| status.message.contains(text);
    says("failed calling webhook") || says("admission webhook") && says("denied the request")
}

/// The outcome of a write.
enum WriteOutcome {
    Done(BTreeSet<Altered>),
    /// Another writer was faster; its version is observed.
    Conflict,
}

impl SlicePublisher {
    /// Publishes the same devices as the publisher of the NodeInventory.
    pub(super) fn beside(publisher: &InventoryPublisher) -> Self {
        Self {
            context: publisher.context.clone(),
            devices: publisher.devices.clone(),
            cluster: publisher.cluster.subscribe(),
            node_in_doubt: publisher.node_in_doubt.clone(),
        }
    }

    /// Publishes while the cluster is in structured mode, until the token is cancelled.
    pub(super) async fn run(self, shutdown: CancellationToken) {
        let mut cluster = self.cluster.clone();
        loop {
            let begin =
                cluster.wait_for(|facts| facts.serves(ClaimsApi::Structured) && facts.node_uid.is_some());
            tokio::select! {
                () = shutdown.cancelled() => return,
                known = begin => if known.is_err() { return },
            }
            let end = cluster.wait_for(|facts| !facts.serves(ClaimsApi::Structured));
            let ended = tokio::select! {
                () = shutdown.cancelled() => return,
                ended = end => ended.is_ok(),
                () = self.publish() => false,
            };
            if !ended {
                return;
            }
            info!("the cluster no longer serves resource.k8s.io/v1: slices are not published");
            self.context.metrics.set_slices(SliceCounts::default());
        }
    }

    /// Publishes until the senders of the devices or the facts are gone.
    async fn publish(&self) {
        let (mut devices, mut cluster) = (self.devices.clone(), self.cluster.clone());
        let mut publication = Publication::new(self, cluster.borrow_and_update().clone());
        publication.set_devices(devices.borrow_and_update().clone());
        let selector = format!(
            "spec.driver={},spec.nodeName={}",
            self.context.driver_name, self.context.node_name
        );
        let config = Config::default().fields(&selector);
        let mut events = pin!(watch_objects(publication.api.clone(), config));
        let mut complained = false;
        loop {
            let write = publication.slices.next();
            // A rejected write may never be accepted.
            let is_idle = write
                .as_ref()
                .is_none_or(|write| publication.slices.is_rejected(write));
            let probe = publication.slices.probe().filter(|_| is_idle);
            publication.report(write.is_none() && !complained).await;
            tokio::select! {
                biased;
                changed = devices.changed() => match changed {
                    Ok(()) => publication.set_devices(devices.borrow_and_update().clone()),
                    Err(_) => return,
                },
                changed = cluster.changed() => match changed {
                    Ok(()) => {
                        publication.update_facts(cluster.borrow_and_update().clone());
                        publication.set_devices(devices.borrow_and_update().clone());
                    }
                    Err(_) => return,
                },
                event = events.next() => match event {
                    None => return,
                    Some(Ok(event)) => {
                        complained = false;
                        publication.observe(event);
                    }
                    Some(Err(error)) => {
                        if std::mem::replace(&mut complained, true) {
                            debug!("the slices still cannot be watched: {error}");
                        } else {
                            warn!(
                                reason = "SlicesUnwatched",
                                "the slices of this node cannot be watched; until they can, deleted slices are not restored: {error}"
                            );
                        }
                        let node_uid = &publication.node_uid;
                        publication.reports.unwatched(&error, node_uid).await;
                    }
                },
                () = sleep_until(publication.due(write.as_ref())), if write.is_some() => {
                    if let Some(write) = write {
                        publication.step(&write).await;
                    }
                }
                () = sleep_until(publication.probe_due), if probe.is_some() => {
                    if let Some(probe) = probe {
                        publication.probe(&probe).await;
                    }
                }
            }
        }
    }
}

/// The slices, while the cluster is in structured mode.
struct Publication<'a> {
    publisher: &'a SlicePublisher,
    client: kube::Client,
    api: Api<ResourceSlice>,
    throttled: Throttled,
    slices: Slices,
    /// The slices of a list that is not complete yet.
    listed: Vec<ResourceSlice>,
    node_uid: String,
    /// Whether kubelet cannot prepare claims.
    is_kubelet_too_old: bool,
    /// Whether the Node with this uid exists. The garbage collector deletes the slices of an earlier Node.
    is_node_confirmed: bool,
    /// Slices whose last write may have been executed, or that a list lacks. Until they are read, a device in one of them could be published
    /// in another slice, too.
    unknown: BTreeSet<String>,
    /// When the next dry run with dropped features may be sent, and the pause after it.
    probe_due: Instant,
    probe_pause: Duration,
    /// When the API server last dropped a feature.
    dropped_at: Option<Instant>,
    rate_limit: RateLimit,
    retry: WriteRetry<'a>,
    /// When a rejected write may be sent again. The others do not wait for it.
    rejection: WriteRetry<'a>,
    reports: SliceReports<'a>,
}

impl<'a> Publication<'a> {
    fn new(publisher: &'a SlicePublisher, facts: ClusterFacts) -> Self {
        let node_uid = facts.node_uid.unwrap_or_default();
        let context = &publisher.context;
        let pool = NodePool {
            driver: context.driver_name.to_string(),
            node_name: context.node_name.clone(),
            node_uid: node_uid.clone(),
        };
        let (client, throttled) = with_retry_after(&context.client, &context.node_name);
        Self {
            publisher,
            api: Api::all(client.clone()),
            client,
            throttled,
            slices: Slices::new(pool, features(facts.minor)),
            listed: Vec::new(),
            node_uid,
            is_kubelet_too_old: is_too_early(facts.minor),
            is_node_confirmed: false,
            unknown: BTreeSet::new(),
            probe_due: Instant::now(),
            probe_pause: PROBE.0,
            dropped_at: None,
            rate_limit: RateLimit::new(BURST, REFILL),
            retry: WriteRetry::new(&context.node_name),
            rejection: WriteRetry::new(&context.node_name),
            reports: SliceReports::new(context),
        }
    }

    /// When this write may be sent.
    fn due(&self, write: Option<&Write>) -> Instant {
        let due = self
            .retry
            .due
            .max(self.rate_limit.due())
            .max(self.throttled.until());
        if write.is_some_and(|write| self.slices.is_rejected(write)) {
            return due.max(self.rejection.due);
        }
        due
    }

    fn set_devices(&mut self, devices: Arc<Devices>) {
        let offered = if self.is_kubelet_too_old {
            Arc::default()
        } else {
            devices
        };
        self.slices.set_devices(offered);
    }

    fn update_facts(&mut self, facts: ClusterFacts) {
        self.is_kubelet_too_old = is_too_early(facts.minor);
        self.slices.set_features(features(facts.minor));
        if self.set_node_uid(facts.node_uid.unwrap_or_default()) {
            self.is_node_confirmed = false;
        }
    }

    /// Returns whether the uid differs.
    fn set_node_uid(&mut self, uid: String) -> bool {
        let differs = !uid.is_empty() && uid != self.node_uid;
        if differs {
            self.node_uid = uid;
            self.slices.set_node_uid(self.node_uid.clone());
        }
        differs
    }

    fn observe(&mut self, event: Event<ResourceSlice>) {
        let before = self.slices.stored().count();
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(slice) => self.listed.push(slice),
            Event::InitDone => {
                let missing = self.slices.listed(std::mem::take(&mut self.listed));
                self.unknown.extend(missing);
            }
            Event::Apply(slice) => self.slices.applied(slice),
            Event::Delete(slice) => self.slices.deleted(&slice),
        }
        // With the Node, the garbage collector deletes its slices.
        self.is_node_confirmed &= self.slices.stored().count() >= before;
    }

    /// Reports the present state; `is_settled` if all slices are published.
    async fn report(&mut self, is_settled: bool) {
        let counts = counts(&self.slices);
        if is_settled {
            self.rejection.reset();
            self.reports.settled(counts.devices);
        }
        self.publisher.context.metrics.set_slices(counts);
        self.reports
            .old_kubelet(self.is_kubelet_too_old, &self.node_uid)
            .await;
        self.reports.omitted(self.slices.omitted(), &self.node_uid).await;
    }

    /// Sends the write, or a read that must precede it.
    async fn step(&mut self, write: &Write) {
        let result = if !self.is_node_confirmed {
            self.confirm_node().await.map_err(SliceError::from)
        } else if let Some(name) = self.unknown.pop_first() {
            let result = read(&self.api, &mut self.slices, &name).await;
            if result.is_err() {
                self.unknown.insert(name);
            }
            result
        } else {
            self.write(write).await
        };
        if let Err(error) = result {
            self.retry.later();
            self.reports.failed(write.name(), &error, &self.node_uid).await;
        }
    }

    async fn confirm_node(&mut self) -> Result<(), PublishError> {
        let name = &self.publisher.context.node_name;
        let nodes: Api<Node> = Api::all(self.client.clone());
        let node = call(nodes.get_metadata_opt(name)).await?;
        let uid = node
            .and_then(|node| node.metadata.uid)
            .ok_or_else(|| PublishError::NoNode(name.clone()))?;
        if self.set_node_uid(uid) {
            self.publisher.node_in_doubt.notify_one();
        }
        self.is_node_confirmed = true;
        Ok(())
    }

    /// Finds out with a dry run whether the API server still drops features.
    async fn probe(&mut self, probe: &ResourceSlice) {
        self.delay_probe();
        let parameters = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        match call(self.api.create(&parameters, probe)).await {
            Ok(answer) => {
                if self.slices.probed(&answer) {
                    self.reports
                        .altered
                        .retain(|altered| *altered == Altered::Otherwise);
                }
            }
            Err(error) => debug!("whether the API server still drops features is not known: {error}"),
        }
    }

    fn delay_probe(&mut self) {
        self.probe_due = Instant::now() + spread(self.probe_pause, &self.publisher.context.node_name);
        self.probe_pause = PROBE.1.min(self.probe_pause * 2);
    }

    async fn write(&mut self, write: &Write) -> Result<(), SliceError> {
        self.rate_limit.take();
        let written = execute(&self.api, &mut self.slices, write).await;
        self.publisher.context.metrics.slice_written(match &written {
            Ok(WriteOutcome::Done(_)) => "Done",
            Ok(WriteOutcome::Conflict) => "Conflict",
            Err(error) => error.result(),
        });
        match written {
            Ok(WriteOutcome::Done(altered)) => {
                self.reports.has_written = true;
                // Limits the writes while a webhook reverts them. A changed pool makes all slices of the node differ.
                let is_reverted = altered.contains(&Altered::Otherwise)
                    && (self.slices.next().is_some_and(|next| next.name() == write.name())
                        || !self.slices.has_pool_of(write));
                if is_reverted {
                    self.retry.later();
                } else {
                    self.retry.reset();
                }
                if altered.iter().any(|altered| *altered != Altered::Otherwise) {
                    // Otherwise two API servers that disagree would cause a write each minute.
                    let now = Instant::now();
                    if self.dropped_at.is_none_or(|at| now > at + 2 * PROBE.1) {
                        self.probe_pause = PROBE.0;
                    }
                    self.dropped_at = Some(now);
                    self.delay_probe();
                }
                self.reports.altered(write, altered, &self.node_uid).await;
                Ok(())
            }
            Ok(WriteOutcome::Conflict) => Ok(()),
            Err(error) if error.is_rejection() => {
                self.slices.rejected(write);
                // All rejected writes have one pause, so that it does not grow with their number.
                if self.rejection.due <= Instant::now() {
                    self.rejection.later();
                }
                self.reports.failed(write.name(), &error, &self.node_uid).await;
                Ok(())
            }
            Err(error) => {
                if error.is_unknown() {
                    self.unknown.insert(write.name().to_owned());
                }
                Err(error)
            }
        }
    }
}

async fn execute(
    api: &Api<ResourceSlice>,
    slices: &mut Slices,
    write: &Write,
) -> Result<WriteOutcome, SliceError> {
    let parameters = PostParams::default();
    let answer = match write {
        Write::Create(slice) => call(api.create(&parameters, slice)).await.map(Some),
        Write::Replace(slice) => call(api.replace(write.name(), &parameters, slice))
            .await
            .map(Some),
        Write::Delete {
            name,
            uid,
            resource_version,
        } => {
            let parameters = DeleteParams::default().preconditions(Preconditions {
                uid: Some(uid.clone()),
                resource_version: Some(resource_version.clone()),
            });
            // The answer has the slice even if it is gone. A slice with finalizers stays, and only that one has a deletion timestamp.
            let answer = call(api.delete(name, &parameters)).await;
            let is_kept = |slice: &ResourceSlice| slice.metadata.deletion_timestamp.is_some();
            answer.map(|answer| answer.left().filter(is_kept))
        }
    };
    match answer {
        Ok(stored) => Ok(WriteOutcome::Done(slices.written(write, stored))),
        Err(PublishError::Api(kube::Error::Api(status))) if status.code == 409 && !is_of_webhook(&status) => {
            read(api, slices, write.name()).await?;
            Ok(WriteOutcome::Conflict)
        }
        Err(PublishError::Api(kube::Error::Api(status)))
            if status.code == 404 && !matches!(write, Write::Create(_)) && !is_of_webhook(&status) =>
        {
            slices.absent(write.name());
            Ok(WriteOutcome::Conflict)
        }
        Err(error) => Err(SliceError::of_write(write, error)),
    }
}

/// Reads and observes a slice.
async fn read(api: &Api<ResourceSlice>, slices: &mut Slices, name: &str) -> Result<(), SliceError> {
    match call(api.get_opt(name)).await? {
        None => slices.absent(name),
        Some(slice) if slices.owns(&slice) => slices.applied(slice),
        Some(slice) => {
            return Err(SliceError::NameTaken {
                name: name.to_owned(),
                driver: slice.spec.driver,
                node: slice.spec.node_name.unwrap_or_default(),
            });
        }
    }
    Ok(())
}

/// The features of an API server whose version is known; otherwise those that every version has.
fn features(minor: Option<u32>) -> Features {
    Features::of_minor(minor.unwrap_or_default())
}

fn counts(slices: &Slices) -> SliceCounts {
    let number = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    let devices = |slice: &ResourceSlice| slice.spec.devices.as_ref().map_or(0, Vec::len);
    let omitted = |why| {
        let count = slices
            .omitted()
            .iter()
            .filter(|omitted| omitted.why == why)
            .count();
        (why, number(count))
    };
    SliceCounts {
        slices: number(slices.stored().count()),
        devices: number(slices.stored().map(devices).sum()),
        omitted: Omission::ALL.map(omitted).into(),
    }
}

/// When to write again after a failure.
struct WriteRetry<'a> {
    node_name: &'a str,
    due: Instant,
    pause: Duration,
}

impl<'a> WriteRetry<'a> {
    fn new(node_name: &'a str) -> Self {
        Self {
            node_name,
            due: Instant::now(),
            pause: RETRY.0,
        }
    }

    fn reset(&mut self) {
        self.pause = RETRY.0;
    }

    /// Waits for a growing pause.
    fn later(&mut self) {
        self.due = Instant::now() + spread(self.pause, self.node_name);
        self.pause = (self.pause * 2).min(RETRY.1);
    }
}

/// When the next request may be sent, by the answers of the API server. API Priority and Fairness sends the pause only as a header.
#[derive(Clone)]
struct Throttled(Arc<Mutex<Instant>>);

impl Throttled {
    fn until(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn observe<B>(&self, response: &Response<B>, node_name: &str) {
        if response.status() == StatusCode::TOO_MANY_REQUESTS {
            let header = response.headers().get(RETRY_AFTER);
            let seconds = header.and_then(|value| value.to_str().ok()?.trim().parse().ok());
            let pause = Duration::from_secs(seconds.unwrap_or_default()).min(RETRY_AFTER_MAX);
            let mut until = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            *until = (*until).max(Instant::now() + spread(pause, node_name));
        }
    }
}

/// Wraps the client so that all its requests, those of watches included, wait for as long as the API server asks. Must be called within a
/// runtime.
fn with_retry_after(client: &kube::Client, node_name: &str) -> (kube::Client, Throttled) {
    let throttled = Throttled(Arc::new(Mutex::new(Instant::now())));
    let node_name: Arc<str> = node_name.into();
    let (namespace, client, seen) = (
        client.default_namespace().to_owned(),
        client.clone(),
        throttled.clone(),
    );
    let service = tower::service_fn(move |request: Request<Body>| {
        let (client, seen, node_name) = (client.clone(), seen.clone(), node_name.clone());
        async move {
            sleep_until(seen.until()).await;
            let response = client.send(request).await?;
            seen.observe(&response, &node_name);
            Ok::<_, kube::Error>(response)
        }
    });
    (kube::Client::new(service, namespace), throttled)
}

/// Events about the slices, each problem once.
struct SliceReports<'a> {
    context: &'a NodeContext,
    /// Whether a slice was written since all were last published.
    has_written: bool,
    /// The last rejection of each slice, and of the watch under an empty name, until all slices are published.
    rejected: BTreeMap<String, String>,
    altered: BTreeSet<Altered>,
    /// The omitted devices with shares.
    shares: Vec<String>,
    is_kubelet_too_old: bool,
}

impl<'a> SliceReports<'a> {
    fn new(context: &'a NodeContext) -> Self {
        Self {
            context,
            has_written: false,
            rejected: BTreeMap::new(),
            altered: BTreeSet::new(),
            shares: Vec::new(),
            is_kubelet_too_old: false,
        }
    }

    /// All slices are published.
    fn settled(&mut self, devices: u64) {
        if std::mem::take(&mut self.has_written) {
            info!(devices, "the slices are published");
        }
        self.rejected.clear();
    }

    async fn failed(&mut self, slice: &str, error: &SliceError, node_uid: &str) {
        if !error.is_rejection() {
            warn!(
                reason = error.result(),
                "the slices are not published; kubelet is still served: {error}"
            );
            return;
        }
        self.rejected(slice, error.to_string(), node_uid).await;
    }

    /// Reports a missing right to watch the slices.
    async fn unwatched(&mut self, error: &watcher::Error, node_uid: &str) {
        let (watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status)) = error
        else {
            return;
        };
        if status.code == 403 {
            let note = format!(
                "the API server forbids to watch the ResourceSlices of this node ({}): grant the companion's service account get, list, \
                 watch, create, update and delete of resourceslices in resource.k8s.io",
                status.message
            );
            self.rejected("", note, node_uid).await;
        }
    }

    async fn rejected(&mut self, slice: &str, note: String, node_uid: &str) {
        if self.rejected.get(slice) == Some(&note) {
            debug!("the slices are still not published: {note}");
            return;
        }
        self.write_event("ResourceSliceRejected", note.clone(), node_uid)
            .await;
        self.rejected.insert(slice.to_owned(), note);
    }

    async fn altered(&mut self, write: &Write, altered: BTreeSet<Altered>, node_uid: &str) {
        for altered in altered {
            if !self.altered.insert(altered) {
                continue;
            }
            let what = match altered {
                Altered::TaintsDropped => {
                    "the API server dropped device taints: unhealthy devices are withdrawn instead; upgrade every API server, \
                     or enable the feature gate DRADeviceTaints there"
                }
                Altered::SharesDropped => {
                    "the API server dropped allowMultipleAllocations: devices with shares are not published; upgrade every API \
                     server, enable the feature gate DRAConsumableCapacity there, or remove shares from the kind"
                }
                Altered::Otherwise => {
                    "it is stored in another form than written, which is kept: an admission webhook changes it, or the API server drops \
                     fields; exempt the slices of this driver from the webhook"
                }
            };
            let note = format!("ResourceSlice {:?}: {what}", write.name());
            self.write_event("ResourceSliceAltered", note, node_uid).await;
        }
    }

    /// Reports the devices with shares that are not published. Unhealthy devices have events of their own.
    async fn omitted(&mut self, omitted: &[Omitted], node_uid: &str) {
        let shares = omitted.iter().filter(|omitted| omitted.why == Omission::Shares);
        let shares: Vec<String> = shares.map(|omitted| omitted.device.clone()).collect();
        if shares == self.shares {
            return;
        }
        let are_new = shares.iter().any(|device| !self.shares.contains(device));
        if are_new {
            let note = format!(
                "devices with shares are not published, since that needs Kubernetes 1.36 (API server and kubelet) with the feature gate \
                 DRAConsumableCapacity; upgrade, or remove shares from the kind: {}",
                shares.join(", ")
            );
            self.write_event("DevicesNotPublished", note, node_uid).await;
        }
        self.shares = shares;
    }

    async fn old_kubelet(&mut self, is_too_old: bool, node_uid: &str) {
        if is_too_old && !self.is_kubelet_too_old {
            let note = format!(
                "the kubelet of this node does not prepare claims of resource.k8s.io/v1, and would start pods without their devices: none is \
                 offered before kubelet is upgraded to 1.{FIRST_STRUCTURED_MINOR}"
            );
            self.write_event("KubeletTooOld", note, node_uid).await;
        }
        self.is_kubelet_too_old = is_too_old;
    }

    async fn write_event(&self, reason: &'static str, note: String, node_uid: &str) {
        let event = DeviceEvent {
            reason,
            warning: true,
            note,
        };
        self.context.write_events(Some(node_uid), &[event]).await;
    }
}

#[cfg(test)]
mod tests;
