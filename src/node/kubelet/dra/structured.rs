//! Structured mode: `v1.DRAPlugin` and `v1beta1.DRAPlugin` of kubelet 1.32 and later. The requests name claims; their allocation is read
//! from the API server.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::AsyncReadExt as _;
use futures::future::join_all;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::GetParams;
use kube::{Client, Resource as _};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tracing::warn;

use super::device_health;
use crate::api::claim::DecodedClaim;
use crate::api::proto::{MAX_CLAIMS, MAX_REQUEST};
use crate::api::proto::{dra_v1 as v1, dra_v1beta1 as v1beta1};
use crate::core::names::{DriverName, is_dns_label, is_dns_subdomain};
use crate::core::prepare::device_metadata::base_request;
use crate::core::prepare::plan::{ResultsError, results_of_claim};
use crate::node::kubelet::{recoded, refused, shown, with_reason, wrong_number_of_answers};
use crate::node::service::{Allocation, ClaimToPrepare, ClaimToUnprepare, DeviceResult, NodeService};

/// Maximum number of claims read at once, so that pods with many claims neither flood the API server nor fill the memory.
const READS: usize = 16;

/// Maximum size of a claim as JSON. Users can store megabytes in the finalizers, owner references, labels and annotations of a claim.
const CLAIM_MAX: u64 = 2 * 1024 * 1024;

/// Deadline of all reads of one call. Kubelet waits 45 s, and Prepare needs some of them.
const READS_TIMEOUT: Duration = Duration::from_secs(10);

/// Names of the services, with those for the health of devices.
pub(super) const SERVICES: &[&str] = &[
    v1::dra_plugin_server::SERVICE_NAME,
    v1beta1::dra_plugin_server::SERVICE_NAME,
    device_health::SERVICES[0],
    device_health::SERVICES[1],
];

/// The versions for the plugin registration. Kubelet takes the first `DRAPlugin` that it supports (`validateSupportedServices`), and the newest
/// `DRAResourceHealth`.
pub(super) fn supported_versions() -> Vec<String> {
    [
        "v1.DRAPlugin",
        "v1beta1.DRAPlugin",
        "v1.DRAResourceHealth",
        "v1alpha1.DRAResourceHealth",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// Routes of the services.
pub(super) fn routes(node: &NodeService, claims: &ClaimReader) -> Routes {
    let service = DraPlugin {
        node: node.clone(),
        claims: claims.clone(),
    };
    let new = v1::dra_plugin_server::DraPluginServer::new(service.clone());
    let old = v1beta1::dra_plugin_server::DraPluginServer::new(service);
    Routes::new(new.max_decoding_message_size(MAX_REQUEST))
        .add_service(old.max_decoding_message_size(MAX_REQUEST))
}

#[derive(Clone)]
struct DraPlugin {
    node: NodeService,
    claims: ClaimReader,
}

impl DraPlugin {
    /// Prepares claims; one answer each, in order. A claim that fails does not affect the others.
    async fn prepare(&self, claims: Vec<v1::Claim>) -> Result<Vec<v1::NodePrepareResourcesEntry>, Status> {
        check_count(claims.len())?;
        check_claims(claims.iter().map(id))?;
        let deadline = Instant::now() + READS_TIMEOUT;
        let reads = claims.iter().cloned().map(|claim| {
            let reader = self.claims.clone();
            async move {
                let read = reader.read(&claim.namespace, &claim.name, &claim.uid);
                timeout_at(deadline, read)
                    .await
                    .unwrap_or(Err(ClaimError::Timeout))
            }
        });
        let (read, containers) = tokio::join!(join_all(reads), self.node.list_containers());
        let mut to_prepare = Vec::new();
        for (claim, read) in claims.iter().zip(&read) {
            match read {
                Ok(results) => to_prepare.push(ClaimToPrepare {
                    namespace: claim.namespace.clone(),
                    name: claim.name.clone(),
                    uid: claim.uid.clone(),
                    allocation: Allocation::Results(results.clone()),
                }),
                Err(error) => {
                    self.node.refused_prepare(error.reason());
                    warn!(
                        namespace = shown(&claim.namespace),
                        name = shown(&claim.name),
                        claim_uid = shown(&claim.uid),
                        reason = error.reason(),
                        "prepare refused: {error}"
                    );
                }
            }
        }
        let asked = to_prepare.len();
        let answers = self.node.prepare(to_prepare, containers).await;
        if answers.len() != asked {
            return Err(wrong_number_of_answers(asked, answers.len()));
        }
        let mut answers = answers.into_iter();
        let mut prepared = |read: Result<Vec<DeviceResult>, ClaimError>| -> Result<Vec<v1::Device>, String> {
            let results = read.map_err(|error| with_reason(error.reason(), &error))?;
            let ids = answers
                .next()
                .unwrap_or_else(|| Ok(Vec::new()))
                .map_err(|error| with_reason(error.reason(), &error))?;
            Ok(results.into_iter().zip(ids).map(device).collect())
        };
        let entries = claims.into_iter().zip(read).map(|(claim, read)| {
            let (devices, error) = match prepared(read) {
                Ok(devices) => (devices, String::new()),
                Err(error) => (Vec::new(), error),
            };
            v1::NodePrepareResourcesEntry {
                key: claim.uid,
                value: Some(v1::NodePrepareResourceResponse { devices, error }),
            }
        });
        Ok(entries.collect())
    }
}

/// Unprepares claims; one answer each, in order, whose error is empty if it succeeded.
pub(super) async fn unprepare(
    node: &NodeService,
    request: v1::NodeUnprepareResourcesRequest,
) -> Result<v1::NodeUnprepareResourcesResponse, Status> {
    let claims = request.claims;
    check_claims(claims.iter().map(id))?;
    let to_unprepare = claims.iter().map(|claim| ClaimToUnprepare {
        namespace: claim.namespace.clone(),
        name: claim.name.clone(),
        uid: claim.uid.clone(),
    });
    let answers = node.unprepare(to_unprepare.collect()).await;
    if answers.len() != claims.len() {
        return Err(wrong_number_of_answers(claims.len(), answers.len()));
    }
    let entries = claims.into_iter().zip(answers).map(|(claim, answer)| {
        let error = answer
            .err()
            .map(|error| with_reason(error.reason(), &error))
            .unwrap_or_default();
        v1::NodeUnprepareResourcesEntry {
            key: claim.uid,
            value: Some(v1::NodeUnprepareResourceResponse { error }),
        }
    });
    Ok(v1::NodeUnprepareResourcesResponse {
        claims: entries.collect(),
    })
}

/// Rejects a Prepare of too many claims. An Unprepare may name more: the claims of a rejected Prepare, or of several.
pub(super) fn check_count(claims: usize) -> Result<(), Status> {
    if claims > MAX_CLAIMS {
        return Err(refused(format!(
            "{claims} claims in one call, at most {MAX_CLAIMS} are allowed"
        )));
    }
    Ok(())
}

/// Rejects a call with a missing uid or a duplicate uid. `claims` are namespace, name and uid of each.
pub(super) fn check_claims<'a>(
    claims: impl Iterator<Item = (&'a str, &'a str, &'a str)>,
) -> Result<(), Status> {
    let mut uids = BTreeSet::new();
    for (namespace, name, uid) in claims {
        if uid.is_empty() {
            return Err(no_uid(namespace, name));
        }
        if !uids.insert(uid) {
            return Err(refused(format!(
                "the claim uid {} is listed twice in one call",
                shown(uid)
            )));
        }
    }
    Ok(())
}

pub(super) fn no_uid(namespace: &str, name: &str) -> Status {
    refused(format!(
        "the claim {} in namespace {} has no uid",
        shown(name),
        shown(namespace)
    ))
}

fn id(claim: &v1::Claim) -> (&str, &str, &str) {
    (&claim.namespace, &claim.name, &claim.uid)
}

fn device((result, cdi_id): (DeviceResult, String)) -> v1::Device {
    // A container names the request, not the subrequest that the scheduler chose.
    let request = base_request(&result.request).unwrap_or(&result.request);
    v1::Device {
        request_names: vec![request.to_owned()],
        pool_name: result.pool,
        device_name: result.device,
        cdi_device_ids: vec![cdi_id],
        share_id: result.share_id,
    }
}

#[tonic::async_trait]
impl v1::dra_plugin_server::DraPlugin for DraPlugin {
    async fn node_prepare_resources(
        &self,
        request: Request<v1::NodePrepareResourcesRequest>,
    ) -> Result<Response<v1::NodePrepareResourcesResponse>, Status> {
        let claims = self.prepare(request.into_inner().claims).await?;
        Ok(Response::new(v1::NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<v1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1::NodeUnprepareResourcesResponse>, Status> {
        let response = unprepare(&self.node, request.into_inner()).await?;
        Ok(Response::new(response))
    }
}

/// `v1beta1` is `v1` without share ids, in another package.
#[tonic::async_trait]
impl v1beta1::dra_plugin_server::DraPlugin for DraPlugin {
    async fn node_prepare_resources(
        &self,
        request: Request<v1beta1::NodePrepareResourcesRequest>,
    ) -> Result<Response<v1beta1::NodePrepareResourcesResponse>, Status> {
        let request: v1::NodePrepareResourcesRequest = recoded(request.get_ref())?;
        let claims = self.prepare(request.claims).await?;
        let response = v1::NodePrepareResourcesResponse { claims };
        Ok(Response::new(recoded(&response)?))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<v1beta1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1beta1::NodeUnprepareResourcesResponse>, Status> {
        let response = unprepare(&self.node, recoded(request.get_ref())?).await?;
        Ok(Response::new(recoded(&response)?))
    }
}

/// A client of the API server, with a limit of reads at once.
#[derive(Clone)]
pub struct ClaimReader {
    client: Client,
    driver_name: DriverName,
    reads: Arc<Semaphore>,
}

/// Why the allocation of a claim is not known. The message is for the pod's event.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum ClaimError {
    #[error("namespace {namespace} or name {name} of the claim is not a valid Kubernetes name")]
    Name {
        /// The namespace, quoted and truncated.
        namespace: String,
        /// The name, quoted and truncated.
        name: String,
    },
    #[error("the API server does not show the claim; kubelet asks again: {0}")]
    Unreadable(kube::Error),
    #[error("the claim is larger than {} MiB: remove finalizers, owner references, labels or annotations from it", CLAIM_MAX >> 20)]
    TooLarge,
    #[error("the API server does not show the claim in time; kubelet asks again")]
    Timeout,
    #[error("the claim does not exist (any more): delete the pod, or create the claim again")]
    Gone,
    #[error(transparent)]
    Results(#[from] ResultsError),
}

impl ClaimError {
    /// CamelCase, from a small fixed set: a metric label.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Name { .. } | Self::TooLarge => "InvalidClaim",
            Self::Unreadable(_) | Self::Timeout => "ClaimUnreadable",
            Self::Gone => "ClaimGone",
            Self::Results(error) => error.reason(),
        }
    }
}

impl From<kube::Error> for ClaimError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) if status.is_not_found() => Self::Gone,
            error => Self::Unreadable(error),
        }
    }
}

impl fmt::Debug for ClaimReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClaimReader").finish_non_exhaustive()
    }
}

impl ClaimReader {
    /// A reader of the allocations of a driver.
    pub fn new(client: Client, driver_name: DriverName) -> Self {
        let reads = Arc::new(Semaphore::new(READS));
        Self {
            client,
            driver_name,
            reads,
        }
    }

    /// Reads the claim once, and returns the driver's results in its allocation. The caller sets the deadline.
    pub async fn read(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> Result<Vec<DeviceResult>, ClaimError> {
        if !is_dns_label(namespace) || !is_dns_subdomain(name, 253) {
            return Err(ClaimError::Name {
                namespace: shown(namespace),
                name: shown(name),
            });
        }
        let _read = self.reads.acquire().await;
        let path = ResourceClaim::url_path(&(), Some(namespace));
        let mut request = kube::core::Request::new(path)
            .get(name, &GetParams::default())
            .map_err(kube::Error::BuildRequest)?;
        request.extensions_mut().insert("get"); // The name of the trace span, as in `Api::get`.
        let answer = self.client.request_stream(request).await?;
        let mut text = Vec::new();
        // One byte more shows that there is more.
        let read = answer.take(CLAIM_MAX + 1).read_to_end(&mut text).await;
        read.map_err(|error| kube::Error::Service(error.into()))?;
        if text.len() as u64 > CLAIM_MAX {
            return Err(ClaimError::TooLarge);
        }
        let DecodedClaim(claim) = serde_json::from_slice(&text).map_err(kube::Error::SerdeError)?;
        Ok(results_of_claim(claim, uid, &self.driver_name)?)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::SeqCst;

    use kube::client::Body;
    use prost::Message;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_prepared_device_has_the_bytes_that_kubelet_reads() {
        let result = DeviceResult {
            request: "r/subrequest".into(),
            pool: "p".into(),
            device: "d".into(),
            share_id: Some("s".into()),
            ..DeviceResult::default()
        };
        let entry = v1::NodePrepareResourcesEntry {
            key: "u".into(),
            value: Some(v1::NodePrepareResourceResponse {
                devices: vec![device((result, "v/c=a".into()))],
                error: String::new(),
            }),
        };
        let bytes = v1::NodePrepareResourcesResponse { claims: vec![entry] }.encode_to_vec();
        assert_eq!(
            bytes,
            b"\x0a\x1a\x0a\x01u\x12\x15\x0a\x13\x0a\x01r\x12\x01p\x1a\x01d\x22\x05v/c=a\x2a\x01s"
        );
    }

    /// A reader of claims whose server answers each request with this claim after a second, and the maximum number of requests at once.
    fn reader(claim: &Value) -> (ClaimReader, Arc<AtomicUsize>) {
        let (current, most) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let (text, seen) = (claim.to_string(), most.clone());
        let serve = move |_: http::Request<Body>| {
            let (text, current, seen) = (text.clone(), current.clone(), seen.clone());
            async move {
                seen.fetch_max(current.fetch_add(1, SeqCst) + 1, SeqCst);
                tokio::time::sleep(Duration::from_secs(1)).await;
                current.fetch_sub(1, SeqCst);
                Ok::<_, Infallible>(http::Response::new(Body::from(text.into_bytes())))
            }
        };
        let client = kube::Client::new(tower::service_fn(serve), "default");
        (
            ClaimReader::new(client, DriverName::parse("drayman.dev").unwrap()),
            most,
        )
    }

    fn allocated_claim(finalizers: usize) -> Value {
        let result = json!({ "driver": "drayman.dev", "pool": "node-a", "device": "d", "request": "r" });
        json!({
            "metadata": { "name": "c", "namespace": "n", "uid": "u", "finalizers": vec!["example.com/a"; finalizers] },
            "spec": {},
            "status": {
                "reservedFor": [{ "resource": "pods", "name": "p", "uid": "p" }],
                "allocation": { "devices": { "results": [result] } },
            },
        })
    }

    #[tokio::test(start_paused = true)]
    async fn claims_that_are_too_large_are_refused() {
        let (reader, _) = reader(&allocated_claim(120_000));
        assert_eq!(reader.read("n", "c", "u").await.unwrap().len(), 1);
        let (reader, _) = self::reader(&allocated_claim(140_000));
        let refused = reader.read("n", "c", "u").await;
        assert!(matches!(refused, Err(ClaimError::TooLarge)), "{refused:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn few_claims_are_read_at_once() {
        let (reader, most) = reader(&allocated_claim(0));
        let reads = (0..40).map(|_| reader.read("n", "c", "u"));
        for read in join_all(reads).await {
            read.unwrap();
        }
        assert_eq!(most.load(SeqCst), READS);
    }

    #[test]
    fn the_earlier_version_has_no_share_ids() {
        let result = DeviceResult {
            request: "r".into(),
            pool: "p".into(),
            device: "d".into(),
            share_id: Some("s".into()),
            ..DeviceResult::default()
        };
        let earlier: v1beta1::Device = recoded(&device((result, "v/c=a".into()))).unwrap();
        let expected = v1beta1::Device {
            request_names: vec!["r".into()],
            pool_name: "p".into(),
            device_name: "d".into(),
            cdi_device_ids: vec!["v/c=a".into()],
        };
        assert_eq!(earlier, expected);
    }

    #[test]
    fn an_unprepared_claim_has_an_entry_with_an_empty_value() {
        let entry = v1::NodeUnprepareResourcesEntry {
            key: "u".into(),
            value: Some(v1::NodeUnprepareResourceResponse::default()),
        };
        let bytes = v1::NodeUnprepareResourcesResponse { claims: vec![entry] }.encode_to_vec();
        assert_eq!(bytes, b"\x0a\x05\x0a\x01u\x12\x00");
    }
}
