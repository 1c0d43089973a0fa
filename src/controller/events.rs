//! Writes reports as Events on the objects that they concern, with the driver as reporting controller. [`crate::core::claims`] makes them:
//! `context` on pods, and on the claim or class at fault; `claim` and `transaction` on claims; `state` if a driver finds a recorded
//! allocation wrong (`found`) or cannot deallocate a claim of a transaction (`item_answered`), if writes stay without a clear answer
//! (`report_unclear`), or if a class names the driver in upper case (`see_class`). A driver's error brings its own reason and text;
//! `cli::observe::reasons` lists those of the built-in driver.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Api, PostParams};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::api::resource::{GROUP, VERSION};
use crate::core::claims::{Event as ControllerEvent, EventReport, MESSAGE_MAX, Regarding};
use crate::core::names::truncated;

use super::write::Pause;

/// Maximum number of pending reports, one per object and reason. With the longest notes and names they take some 7 MB.
const MAX_PENDING: usize = 4096;
/// The pause after a failed write of a report, doubled with each consecutive failure up to [`MAX_PAUSE`]. Only the report's namespace
/// pauses, because a webhook there may be the cause; if the server does not answer, or answers nobody, all pause first.
const MIN_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause, so that the next report soon follows the end of a fault.
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// The namespace of Events on cluster-scoped objects: kubectl describe looks for them here.
const DEFAULT_NAMESPACE: &str = "default";

/// Writes Events one after the other, independently of the controller's other work.
///
/// A report is pending until the server has stored it; a newer report with the same object and reason replaces it. A report that finds
/// the queue full, or that the server refuses, returns to the [`ControllerState`](crate::core::claims::ControllerState), which then
/// knows that it was not delivered.
pub(super) struct EventWriter {
    queue: Arc<ReportQueue>,
    answers: mpsc::UnboundedSender<ControllerEvent>,
    task: AbortOnDropHandle<()>,
}

#[derive(Debug, Default)]
struct ReportQueue {
    state: Mutex<ReportQueueState>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct ReportQueueState {
    reports: BTreeMap<About, PendingReport>,
    order: VecDeque<About>,
    /// The namespaces in which the last write failed. Each has a pending report.
    pauses: BTreeMap<String, NamespacePause>,
    ended: bool,
    /// The time of the last report. Names are made from these times, so each is unique.
    last: Timestamp,
}

/// Object and reason.
type About = (Regarding, &'static str);

/// A message, and the time from which it is pending.
#[derive(Debug)]
struct PendingReport {
    message: String,
    at: Timestamp,
}

/// The time until which nothing is written to a namespace.
#[derive(Debug)]
struct NamespacePause {
    until: Instant,
    /// The length of the next pause.
    next: Duration,
}

impl ReportQueue {
    fn state(&self) -> MutexGuard<'_, ReportQueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a report, or returns it if the queue is full.
    fn add(&self, report: EventReport) -> Result<(), EventReport> {
        let mut state = self.state();
        let next = state
            .last
            .saturating_add(SignedDuration::from_nanos(1))
            .unwrap_or(state.last);
        let at = Timestamp::now().max(next);
        let about = (report.regarding.clone(), report.reason);
        if state.reports.len() >= MAX_PENDING && !state.reports.contains_key(&about) {
            return Err(report);
        }
        let message = report.message;
        let before = state.reports.insert(about.clone(), PendingReport { message, at });
        if before.is_none() {
            state.order.push_back(about);
        }
        state.last = at;
        self.changed.notify_one();
        Ok(())
    }

    /// The next report of a namespace without a pause; `None` at the end.
    async fn next(&self) -> Option<(About, PendingReport)> {
        loop {
            let resumed = {
                let mut state = self.state();
                let now = Instant::now();
                let is_due = |about: &About| {
                    let pause = state.pauses.get(namespace_of(&about.0));
                    pause.is_none_or(|pause| pause.until <= now)
                };
                // A namespace that takes Events does not wait for one that failed.
                let has_failed = |about: &About| state.pauses.contains_key(namespace_of(&about.0));
                let healthy = state.order.iter().position(|about| !has_failed(about));
                let place = healthy.or_else(|| state.order.iter().position(is_due));
                if let Some(about) = place.and_then(|place| state.order.remove(place)) {
                    return state.reports.remove_entry(&about);
                }
                if state.ended && state.order.is_empty() {
                    return None;
                }
                let ends = state.pauses.values().map(|pause| pause.until);
                ends.filter(|end| *end > now).min()
            };
            let changed = self.changed.notified();
            match resumed {
                Some(resumed) => drop(tokio::time::timeout_at(resumed, changed).await),
                None => changed.await,
            }
        }
    }

    /// Requeues a report, unless a newer one has arrived. All reports of its namespace come behind the others, because they may fail too.
    fn put_back(&self, about: About, pending: PendingReport) {
        let mut state = self.state();
        let namespace = namespace_of(&about.0).to_owned();
        if let Entry::Vacant(free) = state.reports.entry(about) {
            let about = free.key().clone();
            free.insert(pending);
            state.order.push_back(about);
        }
        let order = std::mem::take(&mut state.order).into_iter();
        let (same, others): (VecDeque<About>, VecDeque<About>) =
            order.partition(|about| namespace_of(&about.0) == namespace);
        state.order = others;
        state.order.extend(same);
    }

    /// Begins the next pause of a namespace.
    fn pause(&self, namespace: &str) {
        let mut state = self.state();
        let now = Instant::now();
        let pause = state.pauses.entry(namespace.to_owned());
        let pause = pause.or_insert(NamespacePause {
            until: now,
            next: MIN_PAUSE,
        });
        pause.until = now + pause.next;
        pause.next = longer(pause.next);
    }

    /// Ends the pauses of a namespace.
    fn resume(&self, namespace: &str) {
        self.state().pauses.remove(namespace);
    }

    fn end(&self) {
        self.state().ended = true;
        self.changed.notify_one();
    }
}

/// The result of an attempt to write an Event.
enum Attempt {
    /// The Event is stored.
    Written,
    /// The server could not store it now.
    Failed(String),
    /// The server gave no answer, or one that does not depend on the namespace.
    Unavailable(String),
    /// The server will never store it.
    Refused(String),
}

impl Attempt {
    fn of(result: Result<Event, kube::Error>) -> Self {
        match result {
            Ok(_) => Self::Written,
            Err(kube::Error::Api(status)) => match status.code {
                // An earlier attempt succeeded, and its answer was lost.
                409 => Self::Written,
                400..=499 if !matches!(status.code, 401 | 408 | 429) => Self::Refused(status.message),
                401 | 408 | 429 | 503 | 504 => Self::Unavailable(status.message),
                _ => Self::Failed(status.message),
            },
            Err(error) => Self::Unavailable(error.to_string()),
        }
    }
}

impl EventWriter {
    /// `retry_after` is the pause that the server has requested. `limit` is the time limit of one request, so that an unanswered request
    /// does not block the next.
    pub(super) fn start(
        client: kube::Client,
        retry_after: Pause,
        driver_name: &str,
        instance: Option<String>,
        limit: Duration,
        answers: mpsc::UnboundedSender<ControllerEvent>,
    ) -> Self {
        let queue = Arc::new(ReportQueue::default());
        let source = EventSource {
            controller: driver_name.to_owned(),
            instance: instance.unwrap_or_else(|| driver_name.to_owned()),
        };
        let (reports, back) = (queue.clone(), answers.clone());
        let task = tokio::spawn(async move {
            let mut pause = MIN_PAUSE;
            while let Some((about, pending)) = reports.next().await {
                let (regarding, reason) = (reference(&about.0), about.1);
                let event = source.warning(regarding, "Allocate", reason, &pending.message, pending.at);
                let namespace = namespace_of(&about.0).to_owned();
                let api = Api::<Event>::namespaced(client.clone(), &namespace);
                let parameters = PostParams::default();
                // The time limit begins when the request is sent.
                retry_after.over().await;
                let attempt = match tokio::time::timeout(limit, api.create(&parameters, &event)).await {
                    Ok(result) => Attempt::of(result),
                    Err(_) => Attempt::Unavailable(format!("no answer within {limit:?}")),
                };
                let is_unavailable = matches!(attempt, Attempt::Unavailable(_));
                if !is_unavailable {
                    pause = MIN_PAUSE;
                }
                match attempt {
                    Attempt::Written => reports.resume(&namespace),
                    Attempt::Failed(error) | Attempt::Unavailable(error) => {
                        tracing::warn!(
                            error,
                            reason = about.1,
                            "event could not be written; it is retried"
                        );
                        reports.put_back(about, pending);
                        if is_unavailable {
                            tokio::time::sleep(pause).await;
                            pause = longer(pause);
                        }
                        // This pause ends after that of all namespaces, so that another namespace is next.
                        reports.pause(&namespace);
                    }
                    Attempt::Refused(error) => {
                        tracing::warn!(error, reason = about.1, "event refused");
                        reports.resume(&namespace);
                        let (regarding, reason) = about;
                        let report = EventReport {
                            regarding,
                            reason,
                            message: pending.message,
                        };
                        let _ = back.send(ControllerEvent::ReportFailed(report));
                    }
                }
            }
        });
        Self {
            queue,
            answers,
            task: AbortOnDropHandle::new(task),
        }
    }

    pub(super) fn send(&self, report: EventReport) {
        tracing::info!(regarding = ?report.regarding, reason = report.reason, note = report.message, "report");
        if let Err(report) = self.queue.add(report) {
            tracing::warn!(
                reason = report.reason,
                "{MAX_PENDING} events wait to be written: this one is retried later"
            );
            let _ = self.answers.send(ControllerEvent::ReportFailed(report));
        }
    }

    /// Writes the pending reports, for at most `limit`.
    pub(super) async fn finish(self, limit: Duration) {
        self.queue.end();
        if tokio::time::timeout(limit, self.task).await.is_err() {
            tracing::warn!("the controller stops with unwritten events");
        }
    }
}

/// The reporting controller and instance of an Event.
pub(super) struct EventSource {
    pub(super) controller: String,
    pub(super) instance: String,
}

impl EventSource {
    /// Builds a Warning with its own text. kube's recorder would merge it into an earlier one of the same reason and keep that one's
    /// text, but here the counts in the text are the message, and the core never reports the same text twice in a row.
    pub(super) fn warning(
        &self,
        regarding: ObjectReference,
        action: &str,
        reason: &str,
        note: &str,
        at: Timestamp,
    ) -> Event {
        let (namespace, name) = (regarding.namespace.clone(), regarding.name.as_deref());
        let name = name.unwrap_or_default();
        Event {
            metadata: ObjectMeta {
                namespace: Some(namespace.unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned())),
                // Named as by client-go; 17 characters are left for the time. No label may end with a hyphen or be empty.
                name: Some(format!(
                    "{}.{:x}",
                    name.get(..236).unwrap_or(name).trim_end_matches(['-', '.']),
                    at.as_nanosecond()
                )),
                ..ObjectMeta::default()
            },
            action: Some(action.to_owned()),
            event_time: Some(MicroTime(at)),
            note: Some(truncated(note.to_owned(), MESSAGE_MAX)),
            reason: Some(reason.to_owned()),
            regarding: Some(regarding),
            reporting_controller: Some(self.controller.clone()),
            reporting_instance: Some(self.instance.clone()),
            type_: Some("Warning".to_owned()),
            ..Event::default()
        }
    }
}

fn reference(regarding: &Regarding) -> ObjectReference {
    let (api_version, kind, namespace, name, uid) = match regarding {
        Regarding::Pod { key, uid } => ("v1".to_owned(), "Pod", Some(&key.namespace), &key.name, uid),
        Regarding::Claim { key, uid } => (
            format!("{GROUP}/{VERSION}"),
            "ResourceClaim",
            Some(&key.namespace),
            &key.name,
            uid,
        ),
        Regarding::Class { name, uid } => (format!("{GROUP}/{VERSION}"), "ResourceClass", None, name, uid),
    };
    ObjectReference {
        api_version: Some(api_version),
        kind: Some(kind.to_owned()),
        namespace: namespace.cloned(),
        name: Some(name.clone()),
        uid: Some(uid.clone()),
        ..ObjectReference::default()
    }
}

/// The namespace of an Event on this object.
fn namespace_of(regarding: &Regarding) -> &str {
    match regarding {
        Regarding::Pod { key, .. } | Regarding::Claim { key, .. } => &key.namespace,
        Regarding::Class { .. } => DEFAULT_NAMESPACE,
    }
}

/// The pause after this one.
fn longer(pause: Duration) -> Duration {
    pause.saturating_mul(2).min(MAX_PAUSE)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use kube::client::Body;

    use super::super::write::with_retry_after;
    use super::*;
    use crate::core::claims::ObjectKey;

    const LIMIT: Duration = Duration::from_secs(5);

    fn report(pod: usize, message: &str) -> EventReport {
        report_in("ns", pod, message)
    }

    fn report_in(namespace: &str, pod: usize, message: &str) -> EventReport {
        EventReport {
            regarding: Regarding::Pod {
                key: ObjectKey::new(namespace, format!("pod-{pod}")),
                uid: "1".to_owned(),
            },
            reason: "Test",
            message: message.to_owned(),
        }
    }

    /// The answer to the n-th request, which has this path: a status, or none at all.
    type AnswerRule = fn(usize, &str) -> Option<u16>;

    /// A server that answers so. It records the notes.
    fn server(answers: AnswerRule) -> (kube::Client, Arc<Mutex<Vec<String>>>) {
        let notes = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&notes);
        let asked = Arc::new(AtomicUsize::new(0));
        let server = tower::service_fn(move |request: http::Request<Body>| {
            let code = answers(asked.fetch_add(1, Ordering::Relaxed), request.uri().path());
            let seen = Arc::clone(&seen);
            async move {
                let Some(code) = code else {
                    return std::future::pending().await;
                };
                let body = request.into_body().collect_bytes().await.unwrap();
                let event: Event = serde_json::from_slice(&body).unwrap();
                if code < 300 {
                    seen.lock().unwrap().push(event.note.unwrap());
                }
                let answer = match code {
                    201 => body.to_vec(),
                    _ => format!(r#"{{"kind":"Status","status":"Failure","reason":"Test","code":{code}}}"#)
                        .into(),
                };
                let answer = http::Response::builder().status(code).body(Body::from(answer));
                Ok::<_, Infallible>(answer.unwrap())
            }
        });
        (kube::Client::new(server, "default"), notes)
    }

    fn started(
        answers: AnswerRule,
    ) -> (
        EventWriter,
        Arc<Mutex<Vec<String>>>,
        mpsc::UnboundedReceiver<ControllerEvent>,
    ) {
        let (client, notes) = server(answers);
        let (sender, failed) = mpsc::unbounded_channel();
        (
            EventWriter::start(client, Pause::default(), "d.example", None, LIMIT, sender),
            notes,
            failed,
        )
    }

    #[tokio::test(start_paused = true)]
    async fn an_unanswered_event_delays_no_other() {
        let (reports, notes, _untold) = started(|asked, _| (asked > 0).then_some(201));
        for pod in 0..3 {
            reports.send(report(pod, &pod.to_string()));
        }
        reports.finish(2 * LIMIT).await;
        assert_eq!(*notes.lock().unwrap(), ["1", "2", "0"]);
    }

    /// Waits until an Event is written, for this time at most.
    async fn until_written_within(time: Duration, notes: &Mutex<Vec<String>>) {
        let written = async {
            while notes.lock().unwrap().is_empty() {
                tokio::time::sleep(MIN_PAUSE).await;
            }
        };
        let written = tokio::time::timeout(time, written).await;
        written.expect("an Event is written in time");
    }

    #[tokio::test(start_paused = true)]
    async fn a_namespace_that_takes_no_events_delays_no_other() {
        let failing: AnswerRule = |_, path| Some(if path.contains("/a/") { 500 } else { 201 });
        let hanging: AnswerRule = |_, path| (!path.contains("/a/")).then_some(201);
        for (answers, limit) in [(failing, Duration::ZERO), (hanging, LIMIT)] {
            let (reports, notes, _untold) = started(answers);
            for pod in 0..100 {
                reports.send(report_in("a", pod, "a"));
            }
            reports.send(report_in("b", 0, "b"));
            until_written_within(limit + Duration::from_secs(1), &notes).await;
            assert_eq!(*notes.lock().unwrap(), ["b"]);
            assert!(reports.queue.state().pauses.keys().eq(["a"]));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_report_waits_for_at_most_one_failing_namespace() {
        let (reports, notes, _untold) = started(|_, path| path.contains("/b/").then_some(201));
        for namespace in 0..20 {
            reports.send(report_in(&format!("a{namespace}"), 0, "a"));
        }
        // Each of them has failed, and is due again.
        tokio::time::sleep(40 * (LIMIT + MAX_PAUSE)).await;
        reports.send(report_in("b", 0, "b"));
        until_written_within(LIMIT + MAX_PAUSE + 2 * MIN_PAUSE, &notes).await;
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_that_waits_for_a_pause_keeps_its_place() {
        let (client, notes) = server(|_, _| Some(201));
        let (client, pause) = with_retry_after(&client, LIMIT);
        pause.begin(2 * LIMIT);
        let (sender, _untold) = mpsc::unbounded_channel();
        let reports = EventWriter::start(client, pause, "d.example", None, LIMIT, sender);
        for pod in 0..2 {
            reports.send(report(pod, &pod.to_string()));
        }
        reports.finish(3 * LIMIT).await;
        assert_eq!(*notes.lock().unwrap(), ["0", "1"]);
    }

    #[tokio::test(start_paused = true)]
    async fn all_reports_of_a_thousand_pods_are_written() {
        let (reports, notes, mut failed) = started(|asked, _| Some(if asked < 5 { 503 } else { 201 }));
        for pod in 0..1000 {
            reports.send(report(pod, &format!("{pod:04}")));
        }
        reports.finish(Duration::from_secs(60)).await;
        let mut notes = std::mem::take(&mut *notes.lock().unwrap());
        notes.sort_unstable();
        assert_eq!(
            notes,
            (0..1000).map(|pod| format!("{pod:04}")).collect::<Vec<_>>()
        );
        assert!(failed.try_recv().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn of_two_texts_about_one_object_the_newer_is_written() {
        let (reports, notes, _untold) = started(|_, _| Some(201));
        for message in ["3 of 3 held", "2 of 3 held"] {
            reports.send(report(0, message));
        }
        reports.finish(LIMIT).await;
        assert_eq!(*notes.lock().unwrap(), ["2 of 3 held"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_report_without_room_or_refused_is_returned() {
        let (reports, notes, mut failed) = started(|asked, _| Some(if asked == 0 { 403 } else { 201 }));
        for pod in 0..=MAX_PENDING {
            reports.send(report(pod, &pod.to_string()));
        }
        assert_eq!(
            failed.try_recv(),
            Ok(ControllerEvent::ReportFailed(report(
                MAX_PENDING,
                &MAX_PENDING.to_string()
            )))
        );
        reports.finish(Duration::from_secs(60)).await;
        assert_eq!(
            failed.try_recv(),
            Ok(ControllerEvent::ReportFailed(report(0, "0")))
        );
        assert_eq!(notes.lock().unwrap().len(), MAX_PENDING - 1);
    }

    #[test]
    fn a_long_note_is_cut_at_the_boundary_of_a_character() {
        let short = truncated("ü".repeat(1000), MESSAGE_MAX);
        assert!(
            short.len() <= MESSAGE_MAX && short.ends_with("ü…"),
            "{} bytes",
            short.len()
        );
        assert_eq!(truncated("short".to_owned(), MESSAGE_MAX), "short");
    }
}
