//! Detects a second controller with the same driver name.
//!
//! All controllers of a driver hold a Lease with the driver's name. Two releases use different namespaces, so neither prevents the other
//! from deciding, and both allocate the same devices. Helm rejects the second release; tools that only render the chart cannot.
//!
//! A rival is reported but not obeyed: otherwise anyone allowed to write Leases in some namespace could stop this controller. The
//! controller that starts later detects the earlier one, so one check after the start is enough.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams, PostParams};

use super::events::EventSource;
use super::leader::LeaderElection;

/// The reason in the log record and in the Event.
const REASON: &str = "DriverNameShared";
/// The longest pause between the two lists of foreign Leases. Leases with a longer duration are renewed more often than that.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// The shortest pause, for Leases with a short duration.
const MIN_PAUSE: Duration = Duration::from_secs(10);
/// Maximum number of Leases that are read. Users of a namespace may write such Leases.
const MAX_LEASES: u32 = 100;
/// Maximum number of rivals named in a note.
const MAX_NAMED: usize = 3;
/// Maximum number of characters of a holder's name in a note: with [`MAX_NAMED`] of them a note stays below the 1,024 bytes that
/// `events.k8s.io/v1` allows.
const MAX_HOLDER_CHARS: usize = 100;

/// A Lease of our name in another namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rival {
    holder: String,
    /// The resource version, which changes with each renewal.
    version: String,
    duration: Duration,
}

type Rivals = BTreeMap<String, Rival>;

/// Reports rivals once, in the log and as an Event on our own Lease. Never returns.
pub(super) async fn report(client: &kube::Client, election: &LeaderElection, limit: Duration) -> Infallible {
    if let Some(rivals) = renewed(client, election, limit).await {
        let message = message(&rivals, election);
        tracing::error!(reason = REASON, "{message}");
        write_event(client, election, &message, limit).await;
    }
    std::future::pending().await
}

/// Returns the rivals that renew their Leases; `None` if there are none, or if they cannot be listed.
async fn renewed(client: &kube::Client, election: &LeaderElection, limit: Duration) -> Option<Rivals> {
    let before = list(client, election, limit).await?;
    let pause = before.values().map(|rival| rival.duration).max()?;
    tokio::time::sleep(pause.clamp(MIN_PAUSE, MAX_PAUSE)).await;
    let mut after = list(client, election, limit).await?;
    after.retain(|namespace, rival| {
        before
            .get(namespace)
            .is_some_and(|earlier| earlier.version != rival.version)
    });
    (!after.is_empty()).then_some(after)
}

/// Lists the Leases of our name that are held in other namespaces.
async fn list(client: &kube::Client, election: &LeaderElection, limit: Duration) -> Option<Rivals> {
    let of_name = ListParams::default()
        .fields(&format!("metadata.name={}", election.name))
        .limit(MAX_LEASES);
    let leases = Api::<Lease>::all(client.clone());
    let found = match tokio::time::timeout(limit, leases.list(&of_name)).await {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => {
            tracing::warn!(
                %error,
                "Leases of other namespaces cannot be listed; another controller of the same driver name would not be detected"
            );
            return None;
        }
        Err(_) => return None,
    };
    let rival = |lease: Lease| {
        let namespace = lease.namespace()?;
        let version = lease.resource_version().unwrap_or_default();
        let spec = lease.spec?;
        let holder = spec.holder_identity.filter(|holder| !holder.is_empty())?;
        let seconds = u64::try_from(spec.lease_duration_seconds?).ok()?;
        let rival = Rival {
            holder,
            version,
            duration: Duration::from_secs(seconds),
        };
        (namespace != election.namespace).then_some((namespace, rival))
    };
    Some(found.items.into_iter().filter_map(rival).collect())
}

fn message(rivals: &Rivals, election: &LeaderElection) -> String {
    let named: Vec<String> = rivals
        .iter()
        .take(MAX_NAMED)
        .map(|(namespace, rival)| {
            let readable = rival.holder.chars().filter(char::is_ascii_graphic);
            let holder: String = readable.take(MAX_HOLDER_CHARS).collect();
            format!("{holder} in namespace {namespace}")
        })
        .collect();
    let more = match rivals.len().saturating_sub(MAX_NAMED) {
        0 => String::new(),
        number => format!(" and {number} more"),
    };
    format!(
        "another controller serves driver {} too: {}{more}. Both allocate the same devices; uninstall one of the releases, or give it \
         another driver name",
        election.name,
        named.join(", ")
    )
}

/// Writes the Event. The log record is already written.
async fn write_event(client: &kube::Client, election: &LeaderElection, note: &str, limit: Duration) {
    let source = EventSource {
        controller: election.name.clone(),
        instance: election.identity.chars().take(128).collect(),
    };
    let lease = ObjectReference {
        api_version: Some("coordination.k8s.io/v1".to_owned()),
        kind: Some("Lease".to_owned()),
        namespace: Some(election.namespace.clone()),
        name: Some(election.name.clone()),
        ..ObjectReference::default()
    };
    let event = source.warning(lease, "Lead", REASON, note, Timestamp::now());
    let events = Api::<Event>::namespaced(client.clone(), &election.namespace);
    match tokio::time::timeout(limit, events.create(&PostParams::default(), &event)).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::warn!(%error, reason = REASON, "event could not be written"),
        Err(_) => tracing::warn!(reason = REASON, "no answer to an event within {limit:?}"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    /// Serves Leases, given by namespace, holder and whether they are renewed, and returns the Events it received.
    async fn noticed(leases: &'static [(&str, &str, bool)]) -> Vec<Value> {
        let events = Arc::new(Mutex::new(Vec::new()));
        let (seen, version) = (events.clone(), Arc::new(Mutex::new(0)));
        let server = tower::service_fn(move |request: http::Request<Body>| {
            let (seen, version) = (seen.clone(), version.clone());
            async move {
                let answer = if request.method() == http::Method::POST {
                    let body = request.into_body().collect_bytes().await.unwrap();
                    let event: Value = serde_json::from_slice(&body).unwrap();
                    seen.lock().unwrap().push(event.clone());
                    event
                } else {
                    assert_eq!(request.uri().path(), "/apis/coordination.k8s.io/v1/leases");
                    let query = request.uri().query().unwrap();
                    assert!(
                        query.contains("fieldSelector=metadata.name%3Ddrayman.dev"),
                        "{query}"
                    );
                    let mut version = version.lock().unwrap();
                    *version += 1;
                    let items = leases.iter().map(|(namespace, holder, renewed)| {
                        let version = if *renewed { *version } else { 0 };
                        json!({
                            "metadata": { "namespace": namespace, "name": "drayman.dev", "resourceVersion": version.to_string() },
                            "spec": { "holderIdentity": holder, "leaseDurationSeconds": 15 },
                        })
                    });
                    json!({ "metadata": {}, "items": items.collect::<Vec<_>>() })
                };
                Ok::<_, std::convert::Infallible>(http::Response::new(Body::from(
                    answer.to_string().into_bytes(),
                )))
            }
        });
        let client = kube::Client::new(server, "default");
        let election = LeaderElection::new("ours", "drayman.dev", "pod");
        let limit = Duration::from_secs(5);
        let noticing = tokio::time::timeout(MAX_PAUSE * 2, report(&client, &election, limit));
        assert!(noticing.await.is_err(), "it never returns");
        let events = events.lock().unwrap();
        events.clone()
    }

    #[tokio::test(start_paused = true)]
    async fn a_controller_in_another_namespace_is_reported_once() {
        let events = noticed(&[("ours", "pod_1", true), ("theirs", "other_1", true)]).await;
        let [event] = events.try_into().unwrap();
        assert_eq!(event["reason"], REASON);
        assert_eq!(event["regarding"]["kind"], "Lease");
        let note = event["note"].as_str().unwrap();
        for word in ["drayman.dev", "other_1 in namespace theirs", "uninstall one"] {
            assert!(note.contains(word), "{word}: {note}");
        }
        assert!(!note.contains("pod_1"), "{note}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_without_renewals_is_not_a_rival() {
        for leases in [
            &[("ours", "pod_1", true)][..],
            &[("ours", "pod_1", true), ("theirs", "other_1", false)],
            &[("ours", "pod_1", true), ("theirs", "", true)],
        ] {
            assert_eq!(noticed(leases).await, Vec::<Value>::new(), "{leases:?}");
        }
    }

    #[test]
    fn a_crowd_of_rivals_fits_into_a_note() {
        let rival = |number: usize| {
            let rival = Rival {
                holder: "\u{1b}h".repeat(10_000),
                version: String::new(),
                duration: MIN_PAUSE,
            };
            (format!("{number:0>63}"), rival)
        };
        let election = LeaderElection::new("ours", "d".repeat(63), "pod");
        let message = message(&(0..100).map(rival).collect(), &election);
        assert!(message.contains("and 97 more"), "{message}");
        assert!(
            message.len() <= 1024 && !message.contains('\u{1b}'),
            "{}",
            message.len()
        );
    }
}
