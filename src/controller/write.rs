//! Requests to the API server: when one may be sent, and writes as patches.
//!
//! A write waits for its turn and for the end of a pause that the server has requested (`Retry-After`); then the fence is checked. Each patch
//! changes only our own fields, and only the object that was observed. There are no full updates: fields that a newer server adds, other
//! drivers' finalizers and entries, and concurrent writers are left alone.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::header::RETRY_AFTER;
use http::{Method, Request, Response, StatusCode, Uri};
use kube::api::{Api, Patch, PatchParams};
use kube::client::Body;
use kube::core::Status;
use kube::core::response::StatusDetails;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::api::resource::{
    GROUP, NODE_LABEL, PodSchedulingContext, ResourceClaim, ResourceClaimSchedulingStatus, VERSION,
    finalizer_of,
};
use crate::core::claims::{ClaimWrite, Moment, ObjectKey, Outcome};
use crate::core::lease::Lease;

use super::predecessors::Predecessors;

/// Maximum number of concurrent requests to the API server.
pub(super) const MAX_REQUESTS: usize = 64;

/// The message of an operation that was not started.
pub(super) const ENDS: &str = "the controller ends";

/// Upper limit of a pause, even if the server requests a longer one, so that requests soon resume after a fault.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Whether this process may write. Checked before each write.
#[derive(Clone)]
pub(super) struct Fence {
    /// `None` without leader election.
    pub(super) lease: Option<Arc<Mutex<Lease>>>,
    /// The start of the clock that the lease refers to.
    pub(super) start: Instant,
    /// Cancelled once nothing new may start.
    closed: CancellationToken,
    /// Keeps the directory locked: this process does not count as ended while any part of it can write.
    _predecessors: Option<Arc<Predecessors>>,
}

impl Fence {
    /// `lease` is `None` for a controller without leader election.
    pub(super) fn new(lease: Option<Arc<Mutex<Lease>>>, predecessors: Option<Arc<Predecessors>>) -> Self {
        Self {
            lease,
            start: Instant::now(),
            closed: CancellationToken::new(),
            _predecessors: predecessors,
        }
    }

    pub(super) fn holds(&self) -> bool {
        let now = Moment::new(self.start.elapsed());
        let holds = |lease: &Mutex<Lease>| {
            let lease = lease.lock().unwrap_or_else(PoisonError::into_inner);
            lease.holds(now)
        };
        !self.closed.is_cancelled() && self.lease.as_deref().is_none_or(holds)
    }

    /// From now on nothing new starts, and operations that wait for their turn are abandoned.
    pub(super) fn close(&self) {
        self.closed.cancel();
    }

    /// Waits for a turn; returns `None` if the fence is closed first.
    pub(super) async fn unless_closed<T>(&self, turn: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.closed.cancelled() => None,
            turn = turn => Some(turn),
        }
    }
}

/// The time until which nothing is sent. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Pause(Arc<Mutex<Option<Instant>>>);

impl Pause {
    fn until(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when requests may be sent.
    pub(super) async fn over(&self) {
        // The pause may be extended meanwhile.
        while let Some(until) = self.until().filter(|until| *until > Instant::now()) {
            tokio::time::sleep_until(until).await;
        }
    }

    fn observe<B>(&self, response: &Response<B>) {
        if let Some(pause) = requested_pause(response) {
            self.begin(pause);
        }
    }

    /// Sends nothing for `pause`.
    pub(super) fn begin(&self, pause: Duration) {
        let until = Instant::now() + pause;
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *known = Some(known.map_or(until, |known| known.max(until)));
        tracing::debug!("the API server has too much to do: nothing is sent to it for {pause:?}");
    }
}

/// The delay that the server requests. API Priority and Fairness sends it only in this header, with a body that is not a Status
/// (`tooManyRequests` in apiserver's `priority-and-fairness.go`), so it is read from the response.
fn requested_pause<B>(response: &Response<B>) -> Option<Duration> {
    if response.status() != StatusCode::TOO_MANY_REQUESTS {
        return None;
    }
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    let seconds = seconds.trim().parse().ok()?;
    Some(Duration::from_secs(seconds).min(MAX_PAUSE))
}

/// Limits the time in which the server may store a write to less than our own limit (`timeout` in apiserver's `request_deadline.go`).
///
/// Without it the server's own limit applies: a write could still be stored one minute after its sender has ended.
fn limit(request: &mut Request<Body>, timeout: Duration) -> Result<(), http::Error> {
    if request.method() != Method::PATCH {
        return Ok(());
    }
    let millis = (timeout * 9 / 10).as_millis();
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    let path = parts.path_and_query.as_ref().map_or("/", |path| path.as_str());
    let separator = if path.contains('?') { '&' } else { '?' };
    parts.path_and_query = Some(format!("{path}{separator}timeout={millis}ms").parse()?);
    *request.uri_mut() = Uri::from_parts(parts)?;
    Ok(())
}

/// Wraps the client so that it respects pauses and the server abandons writes before `timeout`. Returns the client and its pause. Must
/// be called within a runtime.
pub(super) fn with_retry_after(client: &kube::Client, timeout: Duration) -> (kube::Client, Pause) {
    let namespace = client.default_namespace().to_owned();
    let (client, pauses) = (client.clone(), Pause::default());
    let pause = pauses.clone();
    let service = tower::service_fn(move |mut request: Request<Body>| {
        let (client, pause) = (client.clone(), pause.clone());
        async move {
            limit(&mut request, timeout).map_err(kube::Error::HttpError)?;
            pause.over().await;
            let response = client.send(request).await?;
            pause.observe(&response);
            Ok::<_, kube::Error>(response)
        }
    });
    (kube::Client::new(service, namespace), pauses)
}

/// Sends a write when its turn comes, if this process may then write. The fence is checked as late as possible: a write that has waited,
/// or a process that was paused, may have outlived the lease.
pub(super) async fn fenced<T>(
    requests: &Semaphore,
    pause: &Pause,
    fence: &Fence,
    timeout: Duration,
    request: impl Future<Output = Outcome<T>>,
) -> Outcome<T> {
    let turn = async {
        let permit = requests.acquire().await;
        pause.over().await;
        permit
    };
    let Some(_permit) = fence.unless_closed(turn).await else {
        return Outcome::Unknown(ENDS.to_owned());
    };
    if !fence.holds() {
        return Outcome::Unknown("the lease is lost".to_owned());
    }
    match tokio::time::timeout(timeout, request).await {
        Ok(outcome) => outcome,
        Err(_) => Outcome::Unknown(format!("no answer within {timeout:?}")),
    }
}

/// The wire format of a claim write.
#[derive(Debug, PartialEq)]
enum ClaimPatch {
    /// A strategic merge patch of the object itself.
    Main(Value),
    /// A JSON patch of its status.
    StatusJson(Value),
}

fn claim_patch(uid: &str, driver_name: &str, write: &ClaimWrite) -> ClaimPatch {
    let finalizer = finalizer_of(driver_name);
    match write {
        // A strategic merge patch adds to and removes from the set of finalizers by value: other finalizers stay, and no index can
        // have moved.
        ClaimWrite::AddFinalizer { node } => ClaimPatch::Main(json!({ "metadata": {
            "uid": uid,
            "finalizers": [finalizer],
            "labels": { format!("{driver_name}/{NODE_LABEL}"): node },
        } })),
        ClaimWrite::RemoveFinalizer { version } => {
            let mut metadata = json!({ "uid": uid, "$deleteFromPrimitiveList/finalizers": [finalizer] });
            if let Some(version) = version {
                metadata["resourceVersion"] = json!(version);
            }
            ClaimPatch::Main(json!({ "metadata": metadata }))
        }
        // An unallocated claim is reserved for nobody, so the replaced list is empty. Concurrent writes of other fields cause no
        // conflict. The API server compares a missing field as null.
        ClaimWrite::Allocate {
            allocation,
            reserved_for,
            version,
        } => {
            let mut operations = vec![
                json!({ "op": "test", "path": "/metadata/uid", "value": uid }),
                json!({ "op": "test", "path": "/metadata/deletionTimestamp", "value": null }),
                json!({ "op": "test", "path": "/status/allocation", "value": null }),
            ];
            if let Some(version) = version {
                operations
                    .push(json!({ "op": "test", "path": "/metadata/resourceVersion", "value": version }));
            }
            operations.push(json!({ "op": "add", "path": "/status/allocation", "value": allocation }));
            operations.push(json!({ "op": "add", "path": "/status/driverName", "value": driver_name }));
            if let Some(consumer) = reserved_for {
                operations.push(json!({ "op": "add", "path": "/status/reservedFor", "value": [consumer] }));
            }
            ClaimPatch::StatusJson(Value::Array(operations))
        }
        ClaimWrite::ClearAllocation {
            deallocation_requested,
            driver_name,
        } => {
            let mut operations = vec![json!({ "op": "test", "path": "/metadata/uid", "value": uid })];
            if *deallocation_requested {
                operations
                    .push(json!({ "op": "test", "path": "/status/deallocationRequested", "value": true }));
                operations.push(json!({ "op": "remove", "path": "/status/deallocationRequested" }));
            }
            if let Some(name) = driver_name {
                operations.push(json!({ "op": "test", "path": "/status/driverName", "value": name }));
                operations.push(json!({ "op": "remove", "path": "/status/driverName" }));
            }
            operations.push(json!({ "op": "remove", "path": "/status/allocation" }));
            ClaimPatch::StatusJson(Value::Array(operations))
        }
        ClaimWrite::RollBackAllocation { version, reserved } => {
            let mut operations = vec![
                json!({ "op": "test", "path": "/metadata/uid", "value": uid }),
                json!({ "op": "test", "path": "/metadata/resourceVersion", "value": version }),
            ];
            if *reserved {
                operations.push(json!({ "op": "remove", "path": "/status/reservedFor" }));
            }
            operations.push(json!({ "op": "remove", "path": "/status/driverName" }));
            operations.push(json!({ "op": "remove", "path": "/status/allocation" }));
            ClaimPatch::StatusJson(Value::Array(operations))
        }
    }
}

pub(super) async fn claim(
    client: &kube::Client,
    key: &ObjectKey,
    uid: &str,
    driver_name: &str,
    write: &ClaimWrite,
) -> Outcome<ResourceClaim> {
    let api = Api::<ResourceClaim>::namespaced(client.clone(), &key.namespace);
    let parameters = PatchParams::default();
    let result = match claim_patch(uid, driver_name, write) {
        ClaimPatch::Main(patch) => api.patch(&key.name, &parameters, &Patch::Strategic(patch)).await,
        ClaimPatch::StatusJson(operations) => match serde_json::from_value(operations) {
            Ok(patch) => {
                api.patch_status(&key.name, &parameters, &Patch::Json::<()>(patch))
                    .await
            }
            Err(error) => return Outcome::Refused(format!("the patch cannot be written: {error}")),
        },
    };
    let is_conditional = matches!(
        write,
        ClaimWrite::Allocate { .. }
            | ClaimWrite::ClearAllocation { .. }
            | ClaimWrite::RollBackAllocation { .. }
    );
    match result {
        Err(kube::Error::Api(status)) if is_conditional && is_failed_test(&status) => {
            Outcome::Conflict("it is not what was seen".to_owned())
        }
        result => outcome(result),
    }
}

/// Whether a JSON patch was rejected because one of its `test` operations failed, or because a removed field does not exist. The server
/// answers 422, as for an invalid object, but without a kind and without causes (`applyJSPatch` in apiserver's `patch.go`). A webhook
/// that denies a request chooses the code and sets neither; the server prefixes its message (`ToStatusErr` in apiserver's
/// `statuserror.go`).
fn is_failed_test(status: &Status) -> bool {
    let names_nothing = |details: &StatusDetails| details.kind.is_empty() && details.causes.is_empty();
    status.code == 422
        && !status.message.starts_with("admission webhook ")
        && status.details.as_ref().is_none_or(names_nothing)
}

/// Applies `entries` as our entries in a context's status.
pub(super) async fn context(
    client: &kube::Client,
    key: &ObjectKey,
    uid: &str,
    driver_name: &str,
    entries: &[ResourceClaimSchedulingStatus],
) -> Outcome<PodSchedulingContext> {
    let api = Api::<PodSchedulingContext>::namespaced(client.clone(), &key.namespace);
    let parameters = PatchParams::apply(driver_name).force();
    let patch = context_patch(key, uid, entries);
    let applied = api
        .patch_status(&key.name, &parameters, &Patch::Apply(patch))
        .await;
    let leftovers = match &applied {
        Ok(object) => leftovers(object, entries),
        // Merged with another writer's nodes, an entry would exceed its limit.
        Err(kube::Error::Api(status)) if is_too_long(status) => {
            let found = api.get_opt(&key.name).await.ok().flatten();
            found
                .filter(|object| object.metadata.uid.as_deref() == Some(uid))
                .and_then(|object| leftovers(&object, entries))
        }
        Err(_) => None,
    };
    match leftovers.map(serde_json::from_value) {
        None => outcome(applied),
        Some(Ok(patch)) => {
            let parameters = PatchParams {
                field_manager: Some(driver_name.to_owned()),
                ..PatchParams::default()
            };
            let patch = Patch::Json::<()>(patch);
            outcome(api.patch_status(&key.name, &parameters, &patch).await)
        }
        Some(Err(error)) => Outcome::Refused(format!("the patch cannot be written: {error}")),
    }
}

/// Whether the server rejects a list because of its length.
fn is_too_long(status: &kube::core::Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes
        .into_iter()
        .any(|cause| matches!(&*cause.reason, "FieldValueTooLong" | "FieldValueTooMany"))
}

/// A patch that removes other writers' nodes from our entries; `None` if there are none.
///
/// Up to 1.28 `unsuitableNodes` is a set for server-side apply, so the nodes of another writer stay, for instance those of the driver
/// that served these claims before; applying again would change nothing. From 1.29 on the whole list is replaced.
fn leftovers(object: &PodSchedulingContext, entries: &[ResourceClaimSchedulingStatus]) -> Option<Value> {
    let wanted = |name: &str| entries.iter().find(|entry| entry.name == name);
    let mut operations = vec![json!({
        "op": "test", "path": "/metadata/resourceVersion", "value": object.metadata.resource_version })];
    for (number, stored) in object.status.resource_claims.iter().enumerate() {
        if let Some(entry) = wanted(&stored.name)
            && stored
                .unsuitable_nodes
                .iter()
                .any(|node| !entry.unsuitable_nodes.contains(node))
        {
            let path = format!("/status/resourceClaims/{number}/unsuitableNodes");
            operations.push(json!({ "op": "replace", "path": path, "value": entry.unsuitable_nodes }));
        }
    }
    (operations.len() > 1).then_some(Value::Array(operations))
}

fn context_patch(key: &ObjectKey, uid: &str, entries: &[ResourceClaimSchedulingStatus]) -> Value {
    // An empty list is written too: the scheduler waits for the entry, not for its contents.
    let entries: Vec<Value> = entries
        .iter()
        .map(|entry| json!({ "name": entry.name, "unsuitableNodes": entry.unsuitable_nodes }))
        .collect();
    json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": "PodSchedulingContext",
        "metadata": { "name": key.name, "namespace": key.namespace, "uid": uid },
        "status": { "resourceClaims": entries },
    })
}

/// Maps the server's answer, or its absence, to the outcome of a write.
fn outcome<T>(result: Result<T, kube::Error>) -> Outcome<T> {
    match result {
        Ok(object) => Outcome::Done(object),
        Err(kube::Error::Api(status)) => match status.code {
            409 => Outcome::Conflict(status.message.clone()),
            400 | 401 | 403 | 404 | 405 | 413 | 422 => Outcome::Refused(status.message.clone()),
            _ => Outcome::Unknown(status.message.clone()),
        },
        Err(error) => Outcome::Unknown(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::api::resource::{AllocationResult, ResourceClaimConsumerReference};
    use crate::core::lease::{LeaseAnswer, LeaseRecord, LeaseSettings};

    const UID: &str = "7d0a";

    fn patch(write: &ClaimWrite) -> ClaimPatch {
        claim_patch(UID, "drayman.dev", write)
    }

    #[test]
    fn finalizers_are_patched_by_value_on_the_object_with_this_uid() {
        assert_eq!(
            patch(&ClaimWrite::AddFinalizer {
                node: "node-a".to_owned()
            }),
            ClaimPatch::Main(json!({ "metadata": {
                "uid": UID,
                "finalizers": ["drayman.dev/deletion-protection"],
                "labels": { "drayman.dev/node": "node-a" },
            } }))
        );
        assert_eq!(
            patch(&ClaimWrite::RemoveFinalizer { version: None }),
            ClaimPatch::Main(json!({
                "metadata": { "uid": UID, "$deleteFromPrimitiveList/finalizers": ["drayman.dev/deletion-protection"] }
            }))
        );
        let seen = Some("12".to_owned());
        assert_eq!(
            patch(&ClaimWrite::RemoveFinalizer { version: seen }),
            ClaimPatch::Main(json!({ "metadata": {
                "uid": UID,
                "$deleteFromPrimitiveList/finalizers": ["drayman.dev/deletion-protection"],
                "resourceVersion": "12",
            } }))
        );
    }

    #[test]
    fn an_allocation_goes_only_into_an_unallocated_claim() {
        for version in [None, Some("7")] {
            let write = ClaimWrite::Allocate {
                allocation: AllocationResult::default(),
                reserved_for: Some(ResourceClaimConsumerReference::pod("pod", "11")),
                version: version.map(str::to_owned),
            };
            let consumer = json!({ "resource": "pods", "name": "pod", "uid": "11" });
            let mut operations = vec![
                json!({ "op": "test", "path": "/metadata/uid", "value": UID }),
                json!({ "op": "test", "path": "/metadata/deletionTimestamp", "value": null }),
                json!({ "op": "test", "path": "/status/allocation", "value": null }),
                json!({ "op": "add", "path": "/status/allocation", "value": {} }),
                json!({ "op": "add", "path": "/status/driverName", "value": "drayman.dev" }),
                json!({ "op": "add", "path": "/status/reservedFor", "value": [consumer] }),
            ];
            if let Some(version) = version {
                let test = json!({ "op": "test", "path": "/metadata/resourceVersion", "value": version });
                operations.insert(3, test);
            }
            assert_eq!(patch(&write), ClaimPatch::StatusJson(Value::Array(operations)));
        }
    }

    #[test]
    fn clearing_tests_what_was_seen_before_it_removes_anything() {
        let write = ClaimWrite::ClearAllocation {
            deallocation_requested: true,
            driver_name: Some("drayman.dev".to_owned()),
        };
        let ClaimPatch::StatusJson(Value::Array(operations)) = patch(&write) else {
            panic!("not a JSON patch")
        };
        let paths: Vec<(&str, &str)> = operations
            .iter()
            .map(|operation| {
                (
                    operation["op"].as_str().unwrap(),
                    operation["path"].as_str().unwrap(),
                )
            })
            .collect();
        assert_eq!(
            paths,
            [
                ("test", "/metadata/uid"),
                ("test", "/status/deallocationRequested"),
                ("remove", "/status/deallocationRequested"),
                ("test", "/status/driverName"),
                ("remove", "/status/driverName"),
                ("remove", "/status/allocation"),
            ]
        );
    }

    #[test]
    fn a_rollback_removes_the_reservation_at_the_seen_version() {
        let write = ClaimWrite::RollBackAllocation {
            version: "7".to_owned(),
            reserved: true,
        };
        assert_eq!(
            patch(&write),
            ClaimPatch::StatusJson(json!([
                { "op": "test", "path": "/metadata/uid", "value": UID },
                { "op": "test", "path": "/metadata/resourceVersion", "value": "7" },
                { "op": "remove", "path": "/status/reservedFor" },
                { "op": "remove", "path": "/status/driverName" },
                { "op": "remove", "path": "/status/allocation" },
            ]))
        );
    }

    #[test]
    fn a_failed_patch_test_differs_from_an_invalid_object() {
        let status = |details: Value| -> Status {
            serde_json::from_value(
                json!({ "status": "Failure", "code": 422, "reason": "Invalid", "details": details }),
            )
            .unwrap()
        };
        assert!(is_failed_test(&status(json!({}))));
        let causes = json!([{ "reason": "FieldValueInvalid", "field": "status.allocation" }]);
        let details = json!({ "name": "c", "group": GROUP, "kind": "ResourceClaim", "causes": causes });
        assert!(!is_failed_test(&status(details)));
        // A webhook may deny with any code.
        let denied = Status {
            message: "admission webhook \"policy.example.com\" denied the request: not today".to_owned(),
            ..status(Value::Null)
        };
        assert!(!is_failed_test(&denied));
    }

    #[test]
    fn an_entry_without_unsuitable_nodes_is_still_written() {
        let entry = ResourceClaimSchedulingStatus {
            name: "device".to_owned(),
            unsuitable_nodes: vec![],
        };
        let patch = context_patch(&ObjectKey::new("default", "pod"), UID, &[entry]);
        assert_eq!(
            patch["status"],
            json!({ "resourceClaims": [{ "name": "device", "unsuitableNodes": [] }] })
        );
    }

    #[test]
    fn other_writers_nodes_leave_our_entries_only() {
        let context: PodSchedulingContext = serde_json::from_value(json!({
            "metadata": { "resourceVersion": "7" },
            "status": { "resourceClaims": [
                { "name": "theirs", "unsuitableNodes": ["x"] }, { "name": "same", "unsuitableNodes": ["b", "a"] },
                { "name": "more", "unsuitableNodes": ["a", "x"] }, { "name": "none", "unsuitableNodes": ["x"] }] },
        }))
        .unwrap();
        let entry = |name: &str, nodes: &[&str]| ResourceClaimSchedulingStatus {
            name: name.to_owned(),
            unsuitable_nodes: nodes.iter().map(|&node| node.to_owned()).collect(),
        };
        let entries = [
            entry("same", &["a", "b"]),
            entry("more", &["a"]),
            entry("none", &[]),
        ];
        assert_eq!(
            leftovers(&context, &entries),
            Some(json!([
                { "op": "test", "path": "/metadata/resourceVersion", "value": "7" },
                { "op": "replace", "path": "/status/resourceClaims/2/unsuitableNodes", "value": ["a"] },
                { "op": "replace", "path": "/status/resourceClaims/3/unsuitableNodes", "value": [] },
            ]))
        );
        assert_eq!(leftovers(&context, &entries[..1]), None);
    }

    impl Fence {
        /// The fence of a leader that renewed its lease just now and does not renew it again: it may write for `time`.
        pub(super) fn held_for(time: Duration) -> Self {
            let settings = LeaseSettings {
                identity: "this".to_owned(),
                ended: std::collections::BTreeSet::new(),
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
                start,
                ..Self::new(Some(Arc::new(Mutex::new(lease))), None)
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_that_waits_longer_than_the_lease_is_never_sent() {
        let lease = Duration::from_secs(10);
        let (requests, fence, sent) = (Semaphore::new(1), Fence::held_for(lease), AtomicUsize::new(0));
        let pause = Pause::default();
        let write = |timeout: Duration| {
            let request = async {
                sent.fetch_add(1, Ordering::Relaxed);
                std::future::pending::<Outcome<()>>().await
            };
            fenced(&requests, &pause, &fence, timeout, request)
        };
        // The first write takes the only permit and gets no answer; the second gets it while the lease is held, the third does not.
        let (first, second) = (lease / 4, lease);
        let outcomes = tokio::join!(write(first), write(second), write(lease));
        assert_eq!(sent.load(Ordering::Relaxed), 2);
        let unknown = |text: &str| Outcome::Unknown(text.to_owned());
        assert_eq!(outcomes.0, unknown("no answer within 2.5s"));
        assert_eq!(outcomes.1, unknown("no answer within 10s"));
        assert_eq!(outcomes.2, unknown("the lease is lost"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_paused_longer_than_the_lease_is_never_sent() {
        let lease = Duration::from_secs(10);
        let (requests, fence, pause) = (Semaphore::new(1), Fence::held_for(lease), Pause::default());
        pause.begin(lease);
        let request = async { panic!("sent") };
        let outcome: Outcome<()> = fenced(&requests, &pause, &fence, lease * 2, request).await;
        assert_eq!(outcome, Outcome::Unknown("the lease is lost".to_owned()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_that_waits_at_shutdown_is_never_sent() {
        let minute = Duration::from_secs(60);
        let (requests, fence, pause) = (Semaphore::new(1), Fence::held_for(minute), Pause::default());
        let under_way = async {
            tokio::time::sleep(minute / 60).await;
            Outcome::Done(())
        };
        // One write has the permit, one waits for it, and one waits for the end of a pause.
        let first = fenced(&requests, &pause, &fence, minute, under_way);
        let second = fenced(&requests, &pause, &fence, minute, async { panic!("sent") });
        let (free, busy) = (Semaphore::new(1), Pause::default());
        busy.begin(minute / 2);
        let third = fenced(&free, &busy, &fence, minute, async { panic!("sent") });
        let start = tokio::time::Instant::now();
        let (first, second, third, ()) = tokio::join!(first, second, third, async { fence.close() });
        assert_eq!(first, Outcome::Done(()));
        let unknown: Outcome<()> = Outcome::Unknown(ENDS.to_owned());
        assert_eq!((second, third), (unknown.clone(), unknown));
        assert_eq!(
            start.elapsed(),
            minute / 60,
            "nothing waits for its turn any more"
        );
        let calm = Pause::default();
        let late: Outcome<()> = fenced(&free, &calm, &fence, minute, async { panic!("sent") }).await;
        assert_eq!(late, Outcome::Unknown(ENDS.to_owned()));
    }

    fn answer(code: u16, header: Option<&str>) -> Response<()> {
        let mut response = Response::builder().status(code);
        if let Some(value) = header {
            response = response.header(RETRY_AFTER, value);
        }
        response.body(()).unwrap()
    }

    #[test]
    fn only_a_429_with_seconds_pauses_and_never_for_long() {
        assert_eq!(
            requested_pause(&answer(429, Some("2"))),
            Some(Duration::from_secs(2))
        );
        assert_eq!(requested_pause(&answer(429, Some("86400"))), Some(MAX_PAUSE));
        for (code, header) in [
            (429, None),
            (429, Some("Wed, 21 Oct 2026 07:28:00 GMT")),
            (429, Some("-1")),
            (503, Some("2")),
            (200, Some("2")),
        ] {
            assert_eq!(requested_pause(&answer(code, header)), None, "{code} {header:?}");
        }
    }

    #[test]
    fn the_server_gives_a_write_up_before_we_do() {
        let limited = |method: Method, uri: &str| {
            let request = Request::builder().method(method).uri(uri);
            let mut request = request.body(Body::empty()).unwrap();
            limit(&mut request, Duration::from_secs(5)).unwrap();
            request.uri().to_string()
        };
        let claim = "/apis/resource.k8s.io/v1alpha2/namespaces/a/resourceclaims/b/status";
        assert_eq!(limited(Method::PATCH, claim), format!("{claim}?timeout=4500ms"));
        let apply = format!("{claim}?fieldManager=c");
        assert_eq!(limited(Method::PATCH, &apply), format!("{apply}&timeout=4500ms"));
        assert_eq!(limited(Method::GET, claim), claim);
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_pause_counts_and_ends() {
        let (pause, start) = (Pause::default(), Instant::now());
        pause.over().await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        pause.observe(&answer(429, Some("3")));
        pause.observe(&answer(429, Some("1")));
        pause.over().await;
        assert_eq!(start.elapsed(), Duration::from_secs(3));
        pause.over().await;
        assert_eq!(start.elapsed(), Duration::from_secs(3));
    }
}
