//! The discovery task: triggers searches and publishes their results.

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use inotify::WatchMask;
use tokio::sync::watch as value;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::device::{Cause, FoundByName, FoundDevice, FoundDevices, HostPaths};
use super::probe::Prober;
use super::scan::{Candidate, Scan, scan};
use super::uevent::Uevents;
use crate::api::crd::{Device, Devices, TEXT_MAX};
use crate::core::discovery::health::HealthRecords;
use crate::core::prepare::container_edits::ContainerEdits;
use crate::node::config::NodeConfiguration;
use crate::node::directory_watch::DirectoryWatches;
use crate::node::rate_limit::RateLimit;
use crate::node::resync;

/// Interval at which unhealthy devices are probed, and an incomplete search is repeated.
const RECHECK: Duration = Duration::from_secs(5);
/// How long incomplete searches are repeated at this interval; afterwards, resyncs suffice.
const RECHECK_LIMIT: Duration = Duration::from_secs(60);
/// Maximum number of first searches, until one is complete: a device that is missing from the first list counts as gone.
const FIRST_SEARCHES: u32 = 5;
/// Interval between these searches.
const FIRST_INTERVAL: Duration = Duration::from_secs(1);
/// How long a search may take before it counts as hanging. It takes far less, unless the kernel holds the lock of a device: a read of its
/// attributes waits for that lock.
const SEARCH_LIMIT: Duration = Duration::from_secs(10);
/// How long to gather events before a search: plugging in one device causes several.
const GATHER: Duration = Duration::from_millis(100);
/// Number of searches that events cause without delay. A container can cause any number of events.
const EVENT_BURST: u32 = 10;
/// Minimum interval of the searches after the burst.
const EVENT_INTERVAL: Duration = Duration::from_secs(1);

/// The discovery task.
pub(super) struct DeviceSearch {
    devices: Arc<FoundDevices>,
    configuration: value::Receiver<Arc<NodeConfiguration>>,
    sender: value::Sender<Arc<Devices>>,
    prober: Prober,
    health: HealthRecords,
    began: Instant,
    /// Problems already logged: each is logged when it appears and when it is resolved, not at every search.
    reported: BTreeSet<Candidate>,
    /// The configuration of the last search.
    searched_by: Option<Arc<NodeConfiguration>>,
    /// A search past its deadline, with its configuration. No other runs beside it, or threads would pile up.
    hanging: Option<(Arc<NodeConfiguration>, JoinHandle<Scan>)>,
    /// The result of a search that hung. It counts if the next search is as slow.
    late: Option<(Arc<NodeConfiguration>, Scan)>,
    /// Since when no search could read everything; `None` if the last one could.
    incomplete_since: Option<Instant>,
    /// The directories that its result depends on.
    directories: BTreeSet<PathBuf>,
}

impl DeviceSearch {
    fn new(
        devices: Arc<FoundDevices>,
        configuration: value::Receiver<Arc<NodeConfiguration>>,
        sender: value::Sender<Arc<Devices>>,
    ) -> Self {
        Self {
            devices,
            configuration,
            sender,
            prober: Prober::default(),
            health: HealthRecords::default(),
            began: Instant::now(),
            reported: BTreeSet::new(),
            searched_by: None,
            hanging: None,
            late: None,
            incomplete_since: None,
            directories: BTreeSet::new(),
        }
    }

    pub(super) async fn start(
        devices: Arc<FoundDevices>,
        configuration: value::Receiver<Arc<NodeConfiguration>>,
        sender: value::Sender<Arc<Devices>>,
        shutdown: CancellationToken,
    ) {
        let mut search = Self::new(devices, configuration, sender);
        // Subscribe before the first search, so that no change is missed in between.
        let fallback = "kernel device events and periodic searches remain".to_owned();
        let watches = DirectoryWatches::new(WatchMask::empty(), fallback);
        let uevents = Uevents::new();
        search.once(None).await;
        tokio::spawn(search.go_on(watches, uevents, shutdown));
    }

    /// Searches, probes the devices and publishes changes. While a search hangs, the devices of the last one are probed.
    async fn once(&mut self, cause: Option<Cause>) {
        let configuration = self.configuration.borrow_and_update().clone();
        let is_another = self
            .searched_by
            .as_ref()
            .is_some_and(|before| !Arc::ptr_eq(before, &configuration));
        let cause = if is_another {
            Some(Cause::Configuration)
        } else {
            cause
        };
        // Reads only `/dev`, where no device's lock is waited for.
        let devices = self.devices.clone();
        let forget = spawn_blocking(move || devices.forget_changed());
        let forgotten = forget.await.unwrap_or_default();
        let found = if let Some(result) = self.search(&configuration).await {
            self.searched_by = Some(configuration);
            self.take(result)
        } else {
            self.incomplete_since.get_or_insert_with(Instant::now);
            self.devices.found()
        };
        let checks = self.prober.probe(&found, &self.devices.paths).await;
        self.health.observe(self.began.elapsed(), &checks);
        let devices = published(&found, &self.health);
        // Update the lookup table before publishing, so that published devices can be found.
        self.devices.remember(found, is_another);
        let has_changed = **self.sender.borrow() != devices;
        if has_changed {
            let unhealthy = devices
                .values()
                .filter(|device| device.unhealthy.is_some())
                .count();
            let noticed_by = cause.map_or("start", Cause::as_str);
            info!(
                devices = devices.len(),
                unhealthy, noticed_by, "the devices of this node have changed"
            );
            if let Some(cause) = cause {
                self.devices
                    .change_counts
                    .send_modify(|counts| *counts.entry(cause).or_default() += 1);
            }
        }
        // A claim may hold a forgotten device, which no list contains.
        if has_changed || forgotten {
            self.sender.send_replace(Arc::new(devices));
        }
    }

    /// Runs a search. The first is repeated until it is complete. `None` without a result, as while a search hangs.
    async fn search(&mut self, configuration: &Arc<NodeConfiguration>) -> Option<Scan> {
        if self.hanging.is_some() {
            return None;
        }
        // It is for this search alone: later it would be outdated.
        let late = self.late.take().filter(|(by, _)| Arc::ptr_eq(by, configuration));
        let until = Instant::now() + SEARCH_LIMIT;
        let mut searches = if self.searched_by.is_none() {
            FIRST_SEARCHES
        } else {
            1
        };
        let mut last = None;
        loop {
            let (devices, by) = (self.devices.clone(), configuration.clone());
            let mut search = spawn_blocking(move || scan(&by, &devices.paths, &devices.found()));
            let ended = if let Ok(ended) = timeout_at(until, &mut search).await {
                ended
            } else {
                warn!(
                    "a device search has taken more than {SEARCH_LIMIT:?}; until it ends, no device is added or removed: look for a device \
                     whose attributes in /sys do not answer, such as one that was unplugged while it is open"
                );
                // In a first list that lacks devices, those that claims hold would be gone.
                if self.searched_by.is_some() {
                    self.hanging = Some((configuration.clone(), search));
                    return late.map(|(_, scan)| scan);
                }
                search.await
            };
            let Ok(result) = ended else {
                warn!("a device search was aborted; the next one starts on schedule");
                return last;
            };
            searches -= 1;
            if searches == 0 || !result.is_incomplete {
                return Some(result);
            }
            last = Some(result);
            sleep(FIRST_INTERVAL).await;
        }
    }

    /// The devices of a search. Logs its problems.
    fn take(&mut self, result: Scan) -> Arc<FoundByName> {
        let Scan {
            mut found,
            is_incomplete,
            candidates,
            directories,
            ..
        } = result;
        self.incomplete_since = is_incomplete.then(|| self.incomplete_since.unwrap_or_else(Instant::now));
        self.directories = directories;
        self.share_attributes(&mut found);
        self.report(
            candidates
                .into_iter()
                .filter(|candidate| candidate.problem)
                .collect(),
        );
        Arc::new(found)
    }

    /// Shares attributes with the previous search if they are unchanged, to save memory.
    fn share_attributes(&self, found: &mut FoundByName) {
        let before = self.devices.found();
        for (name, found) in found {
            if let Some(before) = before.get(name)
                && before.attributes == found.attributes
            {
                found.attributes = before.attributes.clone();
            }
        }
    }

    fn report(&mut self, problems: BTreeSet<Candidate>) {
        for problem in problems.difference(&self.reported) {
            warn!(candidate = %problem.candidate, kind = %problem.kind, "not handed out: {}", problem.why);
        }
        for problem in self.reported.difference(&problems) {
            info!(candidate = %problem.candidate, kind = %problem.kind, "resolved: {}", problem.why);
        }
        self.reported = problems;
    }

    /// When the next search is due unless an event causes one. Resyncs probe healthy devices too.
    fn next_search(&self) -> (Instant, Cause) {
        let is_recent = |since: Instant| since.elapsed() < RECHECK_LIMIT;
        if self.incomplete_since.is_some_and(is_recent) || self.health.has_unhealthy() {
            (Instant::now() + RECHECK, Cause::Recheck)
        } else {
            (resync::next(), Cause::Rescan)
        }
    }

    async fn go_on(
        mut self,
        mut watches: DirectoryWatches,
        mut uevents: Uevents,
        shutdown: CancellationToken,
    ) {
        let mut reloads = true;
        let mut searches = EventSearches::new();
        loop {
            // A newly watched directory may have changed since the search, so search again.
            if watches.watch(&self.directories) {
                searches.plan(Cause::Directory, Duration::ZERO);
            }
            let timer = self.next_search();
            let cause = loop {
                // The planned search covers all events before it.
                let is_unplanned = searches.next.is_none();
                let (due, next_cause) = searches.next.filter(|next| next.0 <= timer.0).unwrap_or(timer);
                let event_cause = tokio::select! {
                    () = shutdown.cancelled() => return,
                    _ = uevents.changed(), if is_unplanned => Cause::Kernel,
                    is_complete = watches.changed(|_| true), if is_unplanned => {
                        if !is_complete {
                            warn!("directory events were lost; discovery searches again");
                        }
                        Cause::Directory
                    }
                    () = self.devices.rescan.notified() => break Cause::Request,
                    late = end_of(&mut self.hanging) => {
                        self.late = late;
                        break Cause::Recheck;
                    }
                    changed = self.configuration.changed(), if reloads => {
                        reloads = changed.is_ok();
                        break Cause::Configuration;
                    }
                    () = sleep_until(due) => break next_cause,
                };
                searches.plan(event_cause, GATHER);
            };
            if matches!(cause, Cause::Kernel | Cause::Directory) {
                searches.begin();
                uevents.drain();
                watches.drain();
            }
            self.once(Some(cause)).await;
            uevents.searched();
        }
    }
}

/// The searches that events cause, at a limited rate.
#[derive(Debug)]
struct EventSearches {
    limit: RateLimit,
    /// When the next one is due, and the cause; `None` without an event since the last one.
    next: Option<(Instant, Cause)>,
}

impl EventSearches {
    fn new() -> Self {
        Self {
            limit: RateLimit::new(EVENT_BURST, EVENT_INTERVAL),
            next: None,
        }
    }

    /// Plans a search after at least this pause, unless one is planned.
    fn plan(&mut self, cause: Cause, pause: Duration) {
        let due = self.limit.due().max(Instant::now() + pause);
        self.next.get_or_insert((due, cause));
    }

    /// Begins the planned search.
    fn begin(&mut self) {
        self.limit.take();
        self.next = None;
    }
}

/// Waits for the end of a search that hangs. Another search follows and sees later changes.
async fn end_of(
    hanging: &mut Option<(Arc<NodeConfiguration>, JoinHandle<Scan>)>,
) -> Option<(Arc<NodeConfiguration>, Scan)> {
    let ended = match hanging {
        Some((by, search)) => search.await.ok().map(|scan| (by.clone(), scan)),
        None => pending().await,
    };
    *hanging = None;
    info!("the device search that hung has ended");
    ended
}

/// The devices with their health.
pub(super) fn published(found: &FoundByName, health: &HealthRecords) -> Devices {
    let published = |(name, found): (&String, &FoundDevice)| {
        let device = Device {
            unhealthy: health
                .cause(name)
                .map(|cause| cause.chars().take(TEXT_MAX).collect()),
            ..found.device(name)
        };
        (name.clone(), device)
    };
    found.iter().map(published).collect()
}

/// Result of a single search, for display.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// The devices, sorted by name.
    pub devices: Vec<Device>,
    /// Container edits by device name.
    pub container_edits_of: BTreeMap<String, ContainerEdits>,
    /// All candidates, whether they became a device or not.
    pub candidates: Vec<Candidate>,
}

/// Searches once and probes the discovered devices, without a cluster.
pub async fn survey(configuration: NodeConfiguration, paths: HostPaths) -> Survey {
    let there = paths.clone();
    let search = spawn_blocking(move || scan(&configuration, &there, &FoundByName::new()));
    let Ok(scan) = search.await else {
        return Survey::default();
    };
    let checks = Prober::default().probe(&scan.found, &paths).await;
    let unhealthy = |name: &str| checks.get(name)?.result.clone().err().flatten();
    let device = |(name, found): (&String, &FoundDevice)| Device {
        unhealthy: unhealthy(name),
        ..found.device(name)
    };
    Survey {
        devices: scan.found.iter().map(device).collect(),
        container_edits_of: scan
            .found
            .iter()
            .map(|(name, found)| (name.clone(), found.container_edits(name)))
            .collect(),
        candidates: scan.candidates,
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn incomplete_searches_are_repeated_soon_for_a_minute() {
        let paths = HostPaths {
            // It cannot be read, because its name is too long.
            dev: format!("/{}", "x".repeat(300)).into(),
            ..HostPaths::default()
        };
        let mut search = DeviceSearch::new(
            Arc::new(FoundDevices::new(paths)),
            value::channel(Arc::default()).1,
            value::channel(Arc::default()).0,
        );
        assert_eq!(search.next_search().1, Cause::Rescan);
        search.once(None).await;
        assert_eq!(search.next_search().1, Cause::Recheck);
        advance(RECHECK_LIMIT).await;
        search.once(Some(Cause::Recheck)).await;
        assert_eq!(search.next_search().1, Cause::Rescan);
    }

    #[tokio::test(start_paused = true)]
    async fn events_cause_a_burst_of_searches_then_one_a_second() {
        let mut searches = EventSearches::new();
        let mut pauses = Vec::new();
        for _ in 0..13 {
            // Events that follow while a search is planned neither delay it nor cause another.
            for cause in [Cause::Kernel, Cause::Directory, Cause::Kernel] {
                searches.plan(cause, GATHER);
            }
            let (due, cause) = searches.next.unwrap();
            assert_eq!(cause, Cause::Kernel);
            let pause = due.saturating_duration_since(Instant::now());
            advance(pause).await;
            searches.begin();
            assert!(searches.next.is_none());
            pauses.push(pause.as_millis());
        }
        // During the burst of ten, one more has become due.
        let (burst, later) = pauses.split_at(11);
        assert_eq!(burst, [100; 11]);
        assert_eq!(later, [1000; 2]);
        advance(EVENT_INTERVAL * EVENT_BURST).await;
        searches.plan(Cause::Kernel, GATHER);
        let due = searches.next.unwrap().0;
        assert_eq!(due, Instant::now() + GATHER, "as on an idle node");
    }
}
