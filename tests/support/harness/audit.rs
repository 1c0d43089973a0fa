//! The API server's audit log: requests, their users and results.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, bail};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::Api;
use serde_json::Value;
use tokio::time::{Duration, Instant, sleep};

use super::{Cluster, TIMEOUT};

/// A completed request. A watch is included only after its end.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The user name, as given to [`Cluster::user`].
    pub user: String,
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, `deletecollection`.
    pub verb: String,
    pub group: String,
    pub resource: String,
    pub subresource: String,
    pub namespace: String,
    /// Empty for lists, and for creations if bodies are not recorded.
    pub name: String,
    pub uri: String,
    /// The HTTP status.
    pub code: u16,
    /// When the request was received and when its response was complete: RFC 3339 with microseconds, sortable as text.
    pub received: String,
    pub completed: String,
    /// Bodies, if recorded by [`super::Builder::audit_bodies`].
    pub request: Option<Value>,
    pub response: Option<Value>,
}

impl Entry {
    /// Whether the verb is a write.
    pub fn is_write(&self) -> bool {
        !matches!(self.verb.as_str(), "get" | "list" | "watch")
    }
}

/// The audit log of a cluster.
#[derive(Clone, Copy)]
#[allow(missing_debug_implementations, reason = "a kube::Client has none")]
pub struct Audit<'a> {
    cluster: &'a Cluster,
}

impl<'a> Audit<'a> {
    pub(super) fn new(cluster: &'a Cluster) -> Self {
        Self { cluster }
    }

    /// All requests that completed before this call, in the order of completion.
    pub async fn entries(&self) -> anyhow::Result<Vec<Entry>> {
        // The log is written just after the response. Once it contains our marker request, it contains all earlier ones.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let fence = format!(
            "harness-fence-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        Api::<Namespace>::all(self.cluster.client())
            .get_opt(&fence)
            .await?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let entries = self.read()?;
            if entries.iter().any(|entry| entry.name == fence) {
                return Ok(entries
                    .into_iter()
                    .filter(|entry| !entry.name.starts_with("harness-fence-"))
                    .collect());
            }
            if Instant::now() > deadline {
                bail!("the audit log does not record requests");
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// The entries of one user.
    pub async fn of_user(&self, user: &str) -> anyhow::Result<Vec<Entry>> {
        Ok(self
            .entries()
            .await?
            .into_iter()
            .filter(|entry| entry.user == user)
            .collect())
    }

    /// Number of a user's requests by `verb resource/subresource`.
    pub async fn counts(&self, user: &str) -> anyhow::Result<BTreeMap<String, usize>> {
        let mut counts = BTreeMap::new();
        for entry in self.of_user(user).await? {
            let slash = if entry.subresource.is_empty() { "" } else { "/" };
            let what = format!("{} {}{slash}{}", entry.verb, entry.resource, entry.subresource);
            *counts.entry(what).or_default() += 1;
        }
        Ok(counts)
    }

    fn read(self) -> anyhow::Result<Vec<Entry>> {
        let path = &self.cluster.description.audit;
        let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        // The last line may be incomplete.
        let complete = &bytes[..bytes
            .iter()
            .rposition(|&byte| byte == b'\n')
            .map_or(0, |end| end + 1)];
        let mut entries = Vec::new();
        for line in complete
            .split(|&byte| byte == b'\n')
            .filter(|line| !line.is_empty())
        {
            let event: Value = serde_json::from_slice(line).context("a line of the audit log")?;
            if event["stage"] == "ResponseComplete" {
                entries.push(entry(&event));
            }
        }
        Ok(entries)
    }
}

fn entry(event: &Value) -> Entry {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let object = &event["objectRef"];
    let acting = event.pointer("/impersonatedUser/username");
    let acting = acting.unwrap_or_else(|| &event["user"]["username"]);
    Entry {
        user: text(acting),
        verb: text(&event["verb"]),
        group: text(&object["apiGroup"]),
        resource: text(&object["resource"]),
        subresource: text(&object["subresource"]),
        namespace: text(&object["namespace"]),
        name: text(&object["name"]),
        uri: text(&event["requestURI"]),
        code: event["responseStatus"]["code"]
            .as_u64()
            .and_then(|code| u16::try_from(code).ok())
            .unwrap_or(0),
        received: text(&event["requestReceivedTimestamp"]),
        completed: text(&event["stageTimestamp"]),
        request: event.get("requestObject").cloned(),
        response: event.get("responseObject").cloned(),
    }
}
