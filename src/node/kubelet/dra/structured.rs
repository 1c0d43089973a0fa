//! Structured mode: `v1.DRAPlugin` and `v1beta1.DRAPlugin` of kubelet 1.32 and later. The requests name claims; their allocation is read
//! from the API server.

use std::time::Duration;

use futures::{StreamExt as _, stream};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use tokio::time::{Instant, timeout_at};
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tracing::warn;

use super::device_health;
use crate::api::proto::MAX_REQUEST;
use crate::api::proto::{dra_v1 as v1, dra_v1beta1 as v1beta1};
use crate::core::names::{DriverName, is_dns_label, is_dns_subdomain};
use crate::core::prepare::device_metadata::base_request;
use crate::core::prepare::plan::{ResultsError, results_of_claim};
use crate::node::kubelet::{check_claims, shown, with_reason, wrong_number_of_answers};
use crate::node::service::{Allocation, ClaimToPrepare, ClaimToUnprepare, DeviceResult, NodeService};

/// Reads in flight at once for one call, so that a pod with many claims does not flood the API server.
const READS: usize = 8;

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

/// The answer for one claim: each result with its CDI id, or an error.
type PreparedDevices = Result<Vec<(DeviceResult, String)>, String>;

impl DraPlugin {
    /// Prepares claims; one answer each, in order. A claim that fails does not affect the others.
    async fn prepare(&self, claims: &[v1::Claim]) -> Result<Vec<PreparedDevices>, Status> {
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
        let read = stream::iter(reads).buffered(READS).collect::<Vec<_>>();
        let (read, containers) = tokio::join!(read, self.node.list_containers());
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
        let prepared = read.into_iter().map(|read| {
            let results = read.map_err(|error| with_reason(error.reason(), &error))?;
            let ids = answers
                .next()
                .unwrap_or_else(|| Ok(Vec::new()))
                .map_err(|error| with_reason(error.reason(), &error))?;
            Ok(results.into_iter().zip(ids).collect())
        });
        Ok(prepared.collect())
    }

    /// Unprepares claims; the error of each, empty if it succeeded.
    async fn unprepare(&self, claims: &[v1::Claim]) -> Result<Vec<String>, Status> {
        check_claims(claims.iter().map(id))?;
        let to_unprepare: Vec<ClaimToUnprepare> = claims
            .iter()
            .map(|claim| ClaimToUnprepare {
                namespace: claim.namespace.clone(),
                name: claim.name.clone(),
                uid: claim.uid.clone(),
            })
            .collect();
        let asked = to_unprepare.len();
        let answers = self.node.unprepare(to_unprepare).await;
        if answers.len() != asked {
            return Err(wrong_number_of_answers(asked, answers.len()));
        }
        let errors = answers.into_iter().map(|answer| {
            answer
                .err()
                .map(|error| with_reason(error.reason(), &error))
                .unwrap_or_default()
        });
        Ok(errors.collect())
    }
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
        let claims = request.into_inner().claims;
        let answers = self.prepare(&claims).await?;
        let entries = claims.into_iter().zip(answers).map(|(claim, answer)| {
            let (devices, error) = match answer {
                Ok(devices) => (devices.into_iter().map(device).collect(), String::new()),
                Err(error) => (Vec::new(), error),
            };
            v1::NodePrepareResourcesEntry {
                key: claim.uid,
                value: Some(v1::NodePrepareResourceResponse { devices, error }),
            }
        });
        Ok(Response::new(v1::NodePrepareResourcesResponse {
            claims: entries.collect(),
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<v1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1::NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        let errors = self.unprepare(&claims).await?;
        let entries = claims
            .into_iter()
            .zip(errors)
            .map(|(claim, error)| v1::NodeUnprepareResourcesEntry {
                key: claim.uid,
                value: Some(v1::NodeUnprepareResourceResponse { error }),
            });
        Ok(Response::new(v1::NodeUnprepareResourcesResponse {
            claims: entries.collect(),
        }))
    }
}

/// `v1beta1` is `v1` without share ids, in another package.
#[tonic::async_trait]
impl v1beta1::dra_plugin_server::DraPlugin for DraPlugin {
    async fn node_prepare_resources(
        &self,
        request: Request<v1beta1::NodePrepareResourcesRequest>,
    ) -> Result<Response<v1beta1::NodePrepareResourcesResponse>, Status> {
        let claims: Vec<v1::Claim> = request.into_inner().claims.into_iter().map(newer).collect();
        let answers = self.prepare(&claims).await?;
        let older = |one| {
            let v1::Device {
                request_names,
                pool_name,
                device_name,
                cdi_device_ids,
                share_id: _,
            } = device(one);
            v1beta1::Device {
                request_names,
                pool_name,
                device_name,
                cdi_device_ids,
            }
        };
        let entries = claims.into_iter().zip(answers).map(|(claim, answer)| {
            let (devices, error) = match answer {
                Ok(devices) => (devices.into_iter().map(older).collect(), String::new()),
                Err(error) => (Vec::new(), error),
            };
            v1beta1::NodePrepareResourcesEntry {
                key: claim.uid,
                value: Some(v1beta1::NodePrepareResourceResponse { devices, error }),
            }
        });
        Ok(Response::new(v1beta1::NodePrepareResourcesResponse {
            claims: entries.collect(),
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<v1beta1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1beta1::NodeUnprepareResourcesResponse>, Status> {
        let claims: Vec<v1::Claim> = request.into_inner().claims.into_iter().map(newer).collect();
        let errors = self.unprepare(&claims).await?;
        let entries =
            claims
                .into_iter()
                .zip(errors)
                .map(|(claim, error)| v1beta1::NodeUnprepareResourcesEntry {
                    key: claim.uid,
                    value: Some(v1beta1::NodeUnprepareResourceResponse { error }),
                });
        Ok(Response::new(v1beta1::NodeUnprepareResourcesResponse {
            claims: entries.collect(),
        }))
    }
}

fn newer(claim: v1beta1::Claim) -> v1::Claim {
    v1::Claim {
        namespace: claim.namespace,
        uid: claim.uid,
        name: claim.name,
    }
}

/// Reads claims.
#[derive(Clone)]
pub struct ClaimReader {
    client: kube::Client,
    driver: DriverName,
}

/// Why the allocation of a claim is not known. The message is for the pod's event.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The namespace or the name is invalid.
    #[error("namespace {namespace} or name {name} of the claim is not a valid Kubernetes name")]
    Name {
        /// The namespace, quoted and truncated.
        namespace: String,
        /// The name, quoted and truncated.
        name: String,
    },
    /// The API server cannot be asked, or it refuses.
    #[error("the API server does not show the claim; kubelet asks again: {0}")]
    Unreadable(kube::Error),
    /// The API server does not answer.
    #[error("the API server does not show the claim in time; kubelet asks again")]
    Timeout,
    /// The claim does not exist.
    #[error("the claim does not exist (any more): delete the pod, or create the claim again")]
    Gone,
    /// It gives no devices.
    #[error(transparent)]
    Results(#[from] ResultsError),
}

impl ClaimError {
    /// CamelCase, from a small fixed set: a metric label.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Name { .. } => "InvalidClaim",
            Self::Unreadable(_) | Self::Timeout => "ClaimUnreadable",
            Self::Gone => "ClaimGone",
            Self::Results(error) => error.reason(),
        }
    }
}

impl std::fmt::Debug for ClaimReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClaimReader")
            .field("driver", &self.driver)
            .finish_non_exhaustive()
    }
}

impl ClaimReader {
    /// A reader of the allocations of a driver.
    pub fn new(client: kube::Client, driver: DriverName) -> Self {
        Self { client, driver }
    }

    /// The driver's results in the allocation of a claim: one read of the claim, without a deadline.
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
        let api = Api::<ResourceClaim>::namespaced(self.client.clone(), namespace);
        match api.get_opt(name).await {
            Ok(Some(claim)) => Ok(results_of_claim(claim, uid, &self.driver)?),
            Ok(None) => Err(ClaimError::Gone),
            Err(error) => Err(ClaimError::Unreadable(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

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
