//! Reports become Events on the objects that they are about.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Api, PostParams};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::api::resource::{GROUP, VERSION};
use crate::core::protocol::{Regarding, Report};

/// Reports that wait to be written, at most. Beyond that they are logged only: decisions never wait for them.
const QUEUE: usize = 256;
/// Bytes of a note, at most (`events.k8s.io/v1`: 1,024).
const NOTE_MAX: usize = 1024;

/// Writes Events, one after the other, beside everything else.
pub(super) struct Reports {
    queue: mpsc::Sender<Report>,
    task: JoinHandle<()>,
}

impl Reports {
    /// `limit` is how long one of them may take: the next must not wait for ever for one that is not answered.
    pub(super) fn start(
        client: kube::Client,
        driver_name: &str,
        instance: Option<String>,
        limit: Duration,
    ) -> Self {
        let (queue, mut reports) = mpsc::channel::<Report>(QUEUE);
        let reporter = Reporter {
            controller: driver_name.to_owned(),
            instance: instance.unwrap_or_else(|| driver_name.to_owned()),
        };
        let task = tokio::spawn(async move {
            while let Some(report) = reports.recv().await {
                let event = reporter.event(&report);
                let namespace = event.metadata.namespace.as_deref().unwrap_or("default");
                let api = Api::<Event>::namespaced(client.clone(), namespace);
                let parameters = PostParams::default();
                match tokio::time::timeout(limit, api.create(&parameters, &event)).await {
                    Ok(Ok(_)) => {}
                    Ok(Err(error)) => {
                        tracing::warn!(%error, reason = report.reason, "event could not be written");
                    }
                    Err(_) => {
                        tracing::warn!(reason = report.reason, "no answer to an event within {limit:?}");
                    }
                }
            }
        });
        Self { queue, task }
    }

    pub(super) fn send(&self, report: Report) {
        tracing::info!(regarding = ?report.regarding, reason = report.reason, note = report.message, "report");
        if self.queue.try_send(report).is_err() {
            tracing::warn!("too many events at once, this one is only logged");
        }
    }

    /// Writes what waits, for at most `limit`.
    pub(super) async fn finish(self, limit: Duration) {
        drop(self.queue);
        if tokio::time::timeout(limit, self.task).await.is_err() {
            tracing::warn!("events were left unwritten at the end");
        }
    }
}

/// Who says it.
struct Reporter {
    controller: String,
    instance: String,
}

impl Reporter {
    /// An Event with a text of its own. kube's recorder would fold it into an earlier one of the same reason and keep that one's
    /// text, but here the counts in the text are the message; and the core never says the same twice in a row.
    fn event(&self, report: &Report) -> Event {
        let regarding = reference(&report.regarding);
        let now = jiff::Timestamp::now();
        let name = regarding.name.clone().unwrap_or_default();
        Event {
            metadata: ObjectMeta {
                // Events about cluster-scoped objects are kept where kubectl describe looks for them.
                namespace: Some(
                    regarding
                        .namespace
                        .clone()
                        .unwrap_or_else(|| "default".to_owned()),
                ),
                // As client-go names them; 17 characters are left for the time.
                name: Some(format!(
                    "{}.{:x}",
                    name.get(..236).unwrap_or(&name),
                    now.as_nanosecond()
                )),
                ..ObjectMeta::default()
            },
            action: Some("Allocate".to_owned()),
            event_time: Some(MicroTime(now)),
            note: Some(shortened(&report.message)),
            reason: Some(report.reason.clone()),
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

/// Cuts a note to what the server takes, at the boundary of a character.
fn shortened(message: &str) -> String {
    const ELLIPSIS: &str = "…";
    if message.len() <= NOTE_MAX {
        return message.to_owned();
    }
    let mut end = NOTE_MAX - ELLIPSIS.len();
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{ELLIPSIS}", message.get(..end).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use kube::client::Body;

    use super::*;
    use crate::core::protocol::ObjectKey;

    #[tokio::test(start_paused = true)]
    async fn an_event_that_is_not_answered_holds_up_none_of_the_others() {
        let asked = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&asked);
        let server = tower::service_fn(move |_: http::Request<Body>| {
            let hangs = seen.fetch_add(1, Ordering::Relaxed) == 0;
            async move {
                if hangs {
                    std::future::pending::<()>().await;
                }
                let event = br#"{"metadata":{"name":"e","namespace":"ns"},"eventTime":null}"#;
                Ok::<_, Infallible>(http::Response::new(Body::from(event.to_vec())))
            }
        });
        let client = kube::Client::new(server, "default");
        let limit = Duration::from_secs(5);
        let reports = Reports::start(client, "d.example", None, limit);
        for number in 0..3 {
            reports.send(Report {
                regarding: Regarding::Pod {
                    key: ObjectKey::new("ns", "pod"),
                    uid: "1".to_owned(),
                },
                reason: "Test".to_owned(),
                message: format!("{number}"),
            });
        }
        reports.finish(2 * limit).await;
        assert_eq!(asked.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn a_long_note_is_cut_at_the_boundary_of_a_character() {
        let short = shortened(&"ü".repeat(1000));
        assert!(
            short.len() <= NOTE_MAX && short.ends_with("ü…"),
            "{} bytes",
            short.len()
        );
        assert_eq!(shortened("short"), "short");
    }
}
