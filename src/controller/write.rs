//! Requests to the API server: when one may be sent, and its outcome.
//!
//! A write waits for its turn and for the end of a pause that the server has requested (`Retry-After`); then the fence is checked.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::header::RETRY_AFTER;
use http::{Method, Request, Response, StatusCode, Uri};
use kube::api::{Api, Patch, PatchParams};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::{AcquireError, Semaphore, SemaphorePermit, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::api::resource::{PodSchedulingContext, ResourceClaim, ResourceClaimSchedulingStatus};
use crate::core::claims::{ClaimPatch, ClaimWrite, Moment, ObjectKey, Outcome, context_patch};

use super::predecessors::Predecessors;

/// Maximum number of concurrent requests to the API server.
pub(super) const MAX_REQUESTS: usize = 64;

/// The message of an operation that was not started.
pub(super) const ENDS: &str = "the controller is stopping";

/// The message of a write that was not sent.
const LEASE_LOST: &str = "the lease is lost";

/// Upper limit of a pause, even if the server requests a longer one, so that requests soon resume after a fault.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// The longest `time.Duration` of Go: the API server parses the parameter `timeout` as one.
const MAX_LIMIT: Duration = Duration::from_nanos(i64::MAX.unsigned_abs());

/// Whether this process may write. Checked before each write.
#[derive(Clone)]
pub(super) struct Fence {
    /// When the lease permits writes. `None` without leader election.
    term: Option<watch::Receiver<Option<Range<Moment>>>>,
    /// The start of the clock that the term refers to.
    pub(super) start: Instant,
    /// Cancelled once nothing new may start.
    closed: CancellationToken,
    /// Keeps the directory locked: this process does not count as ended while any part of it can write.
    _predecessors: Option<Arc<Predecessors>>,
}

impl Fence {
    /// `term` is `None` for a controller without leader election.
    pub(super) fn new(
        term: Option<watch::Receiver<Option<Range<Moment>>>>,
        predecessors: Option<Arc<Predecessors>>,
    ) -> Self {
        Self {
            term,
            start: Instant::now(),
            closed: CancellationToken::new(),
            _predecessors: predecessors,
        }
    }

    pub(super) fn holds(&self) -> bool {
        let now = Moment::new(self.start.elapsed());
        !self.closed.is_cancelled()
            && self.term.as_ref().is_none_or(|term| {
                let term = term.borrow();
                term.as_ref().is_some_and(|term| term.contains(&now))
            })
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

/// The time of a moment; `None` if it is too far away to come.
pub(super) fn instant_of(start: Instant, moment: Moment) -> Option<Instant> {
    start.checked_add(moment.since_start())
}

/// Waits until a deadline, or forever without one.
pub(super) async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
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
        tracing::debug!("the API server is overloaded: nothing is sent to it for {pause:?}");
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
    let millis = (timeout.min(MAX_LIMIT) * 9 / 10).as_millis();
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

/// Waits for a turn and for the end of a pause; returns `None` if the fence is closed first.
pub(super) async fn turn<'r>(
    requests: &'r Semaphore,
    pause: &Pause,
    fence: &Fence,
) -> Option<Result<SemaphorePermit<'r>, AcquireError>> {
    let turn = async {
        let permit = requests.acquire().await;
        pause.over().await;
        permit
    };
    fence.unless_closed(turn).await
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
    let Some(_permit) = turn(requests, pause, fence).await else {
        return Outcome::Unknown(ENDS.to_owned());
    };
    if !fence.holds() {
        return Outcome::Unknown(LEASE_LOST.to_owned());
    }
    match tokio::time::timeout(timeout, request).await {
        Ok(outcome) => outcome,
        Err(_) => Outcome::Unknown(format!("no answer within {timeout:?}")),
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
    let result = match write.patch(uid, driver_name) {
        ClaimPatch::Main(patch) => api.patch(&key.name, &parameters, &Patch::Strategic(patch)).await,
        ClaimPatch::StatusJson(operations) => match serde_json::from_value(operations) {
            Ok(patch) => {
                api.patch_status(&key.name, &parameters, &Patch::Json::<()>(patch))
                    .await
            }
            Err(error) => return Outcome::Refused(format!("the patch cannot be serialized: {error}")),
        },
    };
    match result {
        Err(kube::Error::Api(status)) => write.rejected(&status),
        result => outcome(result),
    }
}

/// Applies `entries` as our entries in a context's status, within [`fenced`]. A second write, if one is needed, is fenced here.
pub(super) async fn context(
    client: &kube::Client,
    pause: &Pause,
    fence: &Fence,
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
    if leftovers.is_some() && fence.unless_closed(pause.over()).await.is_none() {
        return Outcome::Unknown(ENDS.to_owned());
    }
    match leftovers.map(serde_json::from_value) {
        None => outcome(applied),
        Some(_) if !fence.holds() => Outcome::Unknown(LEASE_LOST.to_owned()),
        Some(Ok(patch)) => {
            let parameters = PatchParams {
                field_manager: Some(driver_name.to_owned()),
                ..PatchParams::default()
            };
            let patch = Patch::Json::<()>(patch);
            match api.patch_status(&key.name, &parameters, &patch).await {
                Err(kube::Error::Api(status)) => Outcome::rejected_patch(&status),
                result => outcome(result),
            }
        }
        Some(Err(error)) => Outcome::Refused(format!("the patch cannot be serialized: {error}")),
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
    let entry_of = |name: &str| entries.iter().find(|entry| entry.name == name);
    let mut operations = vec![json!({
        "op": "test", "path": "/metadata/resourceVersion", "value": object.metadata.resource_version })];
    for (number, stored) in object.status.resource_claims.iter().enumerate() {
        if let Some(entry) = entry_of(&stored.name)
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

/// Maps the server's answer, or its absence, to the outcome of a write.
fn outcome<T>(result: Result<T, kube::Error>) -> Outcome<T> {
    match result {
        Ok(object) => Outcome::Done(object),
        Err(kube::Error::Api(status)) => Outcome::rejected(&status),
        Err(error) => Outcome::Unknown(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_deadline_that_never_comes_is_none() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        assert_eq!(instant_of(start, Moment::new(second)), Some(start + second));
        assert_eq!(instant_of(start, Moment::new(Duration::MAX)), None);
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

    /// Writes a context that has a node of another writer. The server answers after `delay` and rejects the second write. Returns the
    /// outcome and the number of writes.
    async fn write_twice(
        delay: Duration,
        pause: &Pause,
        fence: &Fence,
    ) -> (Outcome<PodSchedulingContext>, usize) {
        let writes = Arc::<AtomicUsize>::default();
        let received = writes.clone();
        let serve = move |_: Request<Body>| {
            let number = received.fetch_add(1, Ordering::Relaxed);
            let (code, answer) = if number == 0 {
                let stored = json!({ "name": "device", "unsuitableNodes": ["theirs"] });
                (
                    200,
                    json!({ "metadata": { "name": "p" }, "spec": {}, "status": { "resourceClaims": [stored] } }),
                )
            } else {
                let status =
                    json!({ "kind": "Status", "status": "Failure", "code": 422, "reason": "Invalid" });
                (422, status)
            };
            let answer = Response::builder()
                .status(code)
                .body(Body::from(answer.to_string().into_bytes()));
            async move {
                tokio::time::sleep(delay).await;
                answer
            }
        };
        let client = kube::Client::new(tower::service_fn(serve), "default");
        let entry = ResourceClaimSchedulingStatus {
            name: "device".to_owned(),
            unsuitable_nodes: Vec::new(),
        };
        let key = ObjectKey::new("shop", "p");
        let outcome = context(&client, pause, fence, &key, "u", "drayman.dev", &[entry]).await;
        (outcome, writes.load(Ordering::Relaxed))
    }

    #[tokio::test]
    async fn a_context_that_changes_between_two_writes_is_a_conflict() {
        let (pause, fence) = (Pause::default(), Fence::new(None, None));
        let (outcome, _) = write_twice(Duration::ZERO, &pause, &fence).await;
        assert!(matches!(outcome, Outcome::Conflict(_)), "{outcome:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_second_write_of_a_context_requires_the_lease() {
        let lease = Duration::from_secs(10);
        for (delay, wait) in [(lease, Duration::ZERO), (Duration::ZERO, lease)] {
            let pause = Pause::default();
            pause.begin(wait);
            let (outcome, writes) = write_twice(delay, &pause, &Fence::held_for(lease)).await;
            assert_eq!(outcome, Outcome::Unknown("the lease is lost".to_owned()));
            assert_eq!(writes, 1);
        }
    }

    impl Fence {
        /// The fence of a leader that renewed its lease just now and does not renew it again: it may write for `time`.
        fn held_for(time: Duration) -> Self {
            let (_, term) = watch::channel(Some(Moment::default()..Moment::new(time)));
            Self::new(Some(term), None)
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

    #[tokio::test(start_paused = true)]
    async fn a_turn_comes_after_a_pause() {
        let (requests, fence, pause) = (Semaphore::new(1), Fence::new(None, None), Pause::default());
        let start = tokio::time::Instant::now();
        pause.begin(Duration::from_secs(20));
        assert!(matches!(turn(&requests, &pause, &fence).await, Some(Ok(_))));
        assert_eq!(start.elapsed(), Duration::from_secs(20));
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
        let limited_by = |timeout: Duration, method: Method, uri: &str| {
            let request = Request::builder().method(method).uri(uri);
            let mut request = request.body(Body::empty()).unwrap();
            limit(&mut request, timeout).unwrap();
            request.uri().to_string()
        };
        let limited = |method: Method, uri: &str| limited_by(Duration::from_secs(5), method, uri);
        let claim = "/apis/resource.k8s.io/v1alpha2/namespaces/a/resourceclaims/b/status";
        assert_eq!(limited(Method::PATCH, claim), format!("{claim}?timeout=4500ms"));
        let apply = format!("{claim}?fieldManager=c");
        assert_eq!(limited(Method::PATCH, &apply), format!("{apply}&timeout=4500ms"));
        assert_eq!(limited(Method::GET, claim), claim);
        let longest = format!("{claim}?timeout=8301034833169ms");
        assert_eq!(limited_by(Duration::MAX, Method::PATCH, claim), longest);
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
