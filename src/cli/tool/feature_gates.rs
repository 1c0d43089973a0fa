//! Asks Kubernetes components about the feature gate, as far as the API server proxies them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::StreamExt as _;
use http::Request;
use jiff::Timestamp;
use kube::Client;
use tokio::time::{Instant, timeout_at};

use super::read;
use crate::api::crd::NodeInventory;
use crate::cli::diagnose::doctor::{DoctorFinding, api_server_minor};
use crate::cli::diagnose::gates::{GATE, GateState, api_server, by_symptoms, kubelets};
use crate::cli::diagnose::inventories_of;
use crate::cli::diagnose::structured::doctor::{GATES, Gate, gate, why_unused};
use crate::cli::error::Error;
use crate::core::names::is_dns_subdomain;

/// Limit for all components together; an unreachable node would block for long.
const LIMIT: Duration = Duration::from_secs(20);
/// Path of the API server's metrics.
const API_SERVER: &str = "/metrics";
/// Maximum number of concurrent kubelet requests.
const CONCURRENCY: usize = 16;
/// Maximum length of a node name in bytes.
const NODE_NAME_MAX: usize = 253;

/// Asks the API server and the kubelets of the driver's nodes for the gate of classic mode.
pub(super) async fn check_classic(
    client: &Client,
    driver: &str,
    inventories: Option<&[NodeInventory]>,
) -> Vec<DoctorFinding> {
    let deadline = Instant::now() + LIMIT;
    let of_server = state_of(&read_metrics(client, API_SERVER, deadline).await, GATE);
    let mut findings = vec![api_server(&of_server)];
    let nodes: BTreeSet<&str> = inventories_of(driver, inventories.unwrap_or_default())
        .map(|object| object.spec.node_name.as_str())
        // The name becomes part of a path, and companions write it.
        .filter(|name| is_dns_subdomain(name, NODE_NAME_MAX))
        .collect();
    let answers: BTreeMap<String, GateState> = futures::stream::iter(nodes)
        .map(|node| async move {
            let path = format!("/api/v1/nodes/{node}/proxy/metrics");
            (
                node.to_owned(),
                state_of(&read_metrics(client, &path, deadline).await, GATE),
            )
        })
        .buffer_unordered(CONCURRENCY)
        .collect()
        .await;
    findings.extend(kubelets(&answers));
    findings
}

/// Asks the API server for the gates of structured mode.
pub(super) async fn check_structured(client: &Client, minor: Option<u32>) -> Vec<DoctorFinding> {
    let metrics = read_metrics(client, API_SERVER, Instant::now() + LIMIT).await;
    let gates = GATES.into_iter();
    gates
        .map(|of| gate(of, &state_of(&metrics, of.name), minor))
        .collect()
}

/// Returns why companions do without gates of structured mode.
pub(super) async fn unused_gates(client: &Client) -> Result<Vec<String>, Error> {
    let version = client.apiserver_version().await.map_err(anyhow::Error::from)?;
    let minor = api_server_minor(&version.major, &version.minor);
    let metrics = read_metrics(client, API_SERVER, Instant::now() + LIMIT).await;
    let why = |gate: Gate| why_unused(gate, &state_of(&metrics, gate.name), minor);
    Ok(GATES.into_iter().filter_map(why).collect())
}

fn state_of(metrics: &Result<String, String>, gate: &str) -> GateState {
    match metrics {
        Ok(text) => GateState::of_metrics(text, gate),
        Err(why) => GateState::NotAsked(why.clone()),
    }
}

/// Reads a component's metrics, or returns why that is not possible.
async fn read_metrics(client: &Client, path: &str, deadline: Instant) -> Result<String, String> {
    let request = Request::get(path)
        .body(Vec::new())
        .map_err(|error| error.to_string())?;
    match timeout_at(deadline, client.request_text(request)).await {
        Ok(Ok(text)) => Ok(text),
        Ok(Err(kube::Error::Api(status))) => Err(status.message.clone()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {} s", LIMIT.as_secs())),
    }
}

/// Looks for symptoms of a disabled gate in components without accessible metrics.
pub(super) async fn check_symptoms(client: &Client) -> Result<Vec<DoctorFinding>, Error> {
    let (pods, claims) = (read::all(client).await?, read::all(client).await?);
    let contexts = read::all(client).await?;
    Ok(by_symptoms(&pods, &claims, &contexts, Timestamp::now()))
}
