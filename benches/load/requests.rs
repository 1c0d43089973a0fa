//! A controller's requests, from the API server's audit log.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;

use crate::figures::Times;
use crate::harness::Entry;
use crate::setup::Setup;

/// All requests of a user, including lists, ended watches and lease renewals.
pub(crate) async fn of(setup: &Setup, user: &str) -> anyhow::Result<Vec<Entry>> {
    setup.cluster.audit().of_user(user).await
}

/// Requests by type.
#[derive(Clone, Debug, Default)]
pub(crate) struct Count {
    pub(crate) writes: usize,
    pub(crate) reads: usize,
    pub(crate) conflicts: usize,
    pub(crate) failures: usize,
    /// Events written by the controller.
    pub(crate) events: usize,
    /// Lists, ended watches, and API discovery. A watch is logged when it ends.
    pub(crate) watching: usize,
    /// Requests for the leader election lease.
    pub(crate) lease: usize,
    kinds: BTreeMap<String, usize>,
}

impl Count {
    pub(crate) fn new<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> Self {
        let mut count = Self::default();
        for entry in entries {
            if entry.resource == "leases" {
                count.lease += 1;
            } else if matches!(entry.verb.as_str(), "list" | "watch") || entry.resource.is_empty() {
                count.watching += 1;
            } else if entry.resource == "events" {
                count.events += 1;
            } else if entry.is_write() {
                count.writes += 1;
            } else {
                count.reads += 1;
            }
            count.conflicts += usize::from(entry.code == 409);
            count.failures += usize::from(entry.code >= 400);
            let slash = if entry.subresource.is_empty() { "" } else { "/" };
            let kind = format!("{} {}{slash}{}", entry.verb, entry.resource, entry.subresource);
            *count.kinds.entry(kind).or_default() += 1;
        }
        count
    }

    /// All requests except those for the lease, which depend on time.
    pub(crate) fn all(&self) -> usize {
        self.writes + self.reads + self.events + self.watching
    }

    /// Requests per pod.
    pub(crate) fn per(&self, pods: usize) -> String {
        #[expect(clippy::cast_precision_loss, reason = "counts of requests are small")]
        let per = |number: usize| number as f64 / pods.max(1) as f64;
        let kinds: Vec<String> = self
            .kinds
            .iter()
            .map(|(kind, number)| format!("{kind} {:.2}", per(*number)))
            .collect();
        format!(
            "{:.2} writes, {:.2} reads, {} lists and watches, {} of the lease, {} 409s, {} failures, {} events ({})",
            per(self.writes),
            per(self.reads),
            self.watching,
            self.lease,
            self.conflicts,
            self.failures,
            self.events,
            kinds.join(", ")
        )
    }
}

/// A timestamp of the audit log.
pub(crate) fn moment(text: &str) -> Timestamp {
    text.parse().unwrap_or(Timestamp::UNIX_EPOCH)
}

/// The duration between two timestamps; zero if negative.
pub(crate) fn between(from: Timestamp, to: Timestamp) -> Duration {
    Duration::try_from(to.duration_since(from)).unwrap_or_default()
}

/// For each claim, the duration from the scheduler's selection of a node to the stored allocation.
///
/// `claim_pod` returns the pod of a claim by name. The selection is the last write to the context by another client before the allocation.
/// Without bodies, the audit log does not name created objects, so pods must be created one by one.
pub(crate) fn allocation_times(
    all: &[Entry],
    user: &str,
    claim_pod: impl Fn(&str) -> Option<String>,
) -> Times {
    let mut chosen: BTreeMap<(String, String), Timestamp> = BTreeMap::new();
    let mut times = Times::default();
    let mut sorted: Vec<&Entry> = all
        .iter()
        .filter(|entry| entry.is_write() && entry.code < 300)
        .collect();
    sorted.sort_by(|left, right| left.completed.cmp(&right.completed));
    for entry in sorted {
        let foreign = entry.user != user && entry.verb != "delete";
        if entry.resource == "podschedulingcontexts" && foreign {
            let key = (entry.namespace.clone(), entry.name.clone());
            chosen.insert(key, moment(&entry.completed));
        } else if entry.resource == "resourceclaims"
            && entry.subresource == "status"
            && entry.user == user
            && let Some(pod) = claim_pod(&entry.name)
            && let Some(chosen) = chosen
                .remove(&(entry.namespace.clone(), pod))
                .or_else(|| chosen.remove(&(entry.namespace.clone(), String::new())))
        {
            times.push(between(chosen, moment(&entry.completed)));
        }
    }
    times
}

/// The API server's share of each allocation: the read of the pod and the two writes to the claim.
pub(crate) fn server_times(entries: &[Entry], user: &str, pods: impl Fn(&str) -> bool) -> Times {
    let mut sums: BTreeMap<String, (Duration, bool)> = BTreeMap::new();
    for entry in entries.iter().filter(|entry| entry.user == user) {
        let pod = match entry.resource.as_str() {
            "pods" => entry.name.as_str(),
            "resourceclaims" => entry.name.rsplit_once("-device-").map_or("", |(pod, _)| pod),
            _ => continue,
        };
        if !pods(pod) {
            continue;
        }
        let (sum, complete) = sums.entry(pod.to_owned()).or_default();
        if !*complete {
            *sum += between(moment(&entry.received), moment(&entry.completed));
            // Later requests belong to the release.
            *complete = entry.subresource == "status";
        }
    }
    sums.into_values().map(|(sum, _)| sum).collect()
}
