//! Classic mode: `v1alpha2.Node` and `v1alpha3.Node` of kubelet 1.27 to 1.30. The requests contain the resource handle.

use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::structured::{check_claims, check_count, no_uid, unprepare};
use crate::api::proto::MAX_REQUEST;
use crate::api::proto::dra_v1alpha2 as v1alpha2;
use crate::api::proto::dra_v1alpha3 as v1alpha3;
use crate::node::kubelet::{recoded, status, with_reason, wrong_number_of_answers};
use crate::node::service::{Allocation, ClaimToPrepare, ClaimToUnprepare, NodeService, ServiceError};

/// The version announced in the plugin registration. Kubelet up to 1.31 accepts any 1.x, but while a plugin of this name is
/// registered at another socket, only a higher version.
const SUPPORTED_VERSION: &str = "1.0.1";

/// Names of the services.
pub(super) const SERVICES: &[&str] = &[
    v1alpha2::node_server::SERVICE_NAME,
    v1alpha3::node_server::SERVICE_NAME,
];

/// The versions for the plugin registration.
pub(super) fn supported_versions() -> Vec<String> {
    vec![SUPPORTED_VERSION.to_owned()]
}

/// Routes of the services.
pub(super) fn routes(node: &NodeService) -> Routes {
    let old = v1alpha2::node_server::NodeServer::new(DraService(node.clone()));
    let new = v1alpha3::node_server::NodeServer::new(DraService(node.clone()));
    Routes::new(old.max_decoding_message_size(MAX_REQUEST))
        .add_service(new.max_decoding_message_size(MAX_REQUEST))
}

struct DraService(NodeService);

#[tonic::async_trait]
impl v1alpha3::node_server::Node for DraService {
    async fn node_prepare_resources(
        &self,
        request: Request<v1alpha3::NodePrepareResourcesRequest>,
    ) -> Result<Response<v1alpha3::NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        check_count(claims.len())?;
        check_claims(claims.iter().map(id))?;
        let asked = claims.len();
        let to_prepare = claims.iter().cloned().map(to_prepare).collect();
        let answers = self.0.prepare(to_prepare, self.0.list_containers().await).await;
        if answers.len() != asked {
            return Err(wrong_number_of_answers(asked, answers.len()));
        }
        let entries = claims.into_iter().zip(answers).map(|(claim, answer)| {
            let (cdi_devices, error) = match answer {
                Ok(cdi_devices) => (cdi_devices, String::new()),
                Err(error) => (Vec::new(), with_reason(error.reason(), &error)),
            };
            v1alpha3::NodePrepareResourcesEntry {
                key: claim.uid,
                value: Some(v1alpha3::NodePrepareResourceResponse { cdi_devices, error }),
            }
        });
        Ok(Response::new(v1alpha3::NodePrepareResourcesResponse {
            claims: entries.collect(),
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<v1alpha3::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1alpha3::NodeUnprepareResourcesResponse>, Status> {
        // The messages of `v1` lack the resource handles alone, which do not matter here.
        let response = unprepare(&self.0, recoded(request.get_ref())?).await?;
        Ok(Response::new(recoded(&response)?))
    }
}

#[tonic::async_trait]
impl v1alpha2::node_server::Node for DraService {
    async fn node_prepare_resource(
        &self,
        request: Request<v1alpha2::NodePrepareResourceRequest>,
    ) -> Result<Response<v1alpha2::NodePrepareResourceResponse>, Status> {
        let request = request.into_inner();
        if request.claim_uid.is_empty() {
            return Err(no_uid(&request.namespace, &request.claim_name));
        }
        let claim = ClaimToPrepare {
            namespace: request.namespace,
            name: request.claim_name,
            uid: request.claim_uid,
            allocation: allocation(
                request.structured_resource_handle.is_some(),
                request.resource_handle,
            ),
        };
        let cdi_devices = only(self.0.prepare(vec![claim], self.0.list_containers().await).await)?;
        Ok(Response::new(v1alpha2::NodePrepareResourceResponse {
            cdi_devices,
        }))
    }

    async fn node_unprepare_resource(
        &self,
        request: Request<v1alpha2::NodeUnprepareResourceRequest>,
    ) -> Result<Response<v1alpha2::NodeUnprepareResourceResponse>, Status> {
        let request = request.into_inner();
        if request.claim_uid.is_empty() {
            return Err(no_uid(&request.namespace, &request.claim_name));
        }
        let claim = ClaimToUnprepare {
            namespace: request.namespace,
            name: request.claim_name,
            uid: request.claim_uid,
        };
        only(self.0.unprepare(vec![claim]).await)?;
        Ok(Response::new(v1alpha2::NodeUnprepareResourceResponse {}))
    }
}

/// Returns the single answer of a call for one claim.
fn only<T>(answers: Vec<Result<T, ServiceError>>) -> Result<T, Status> {
    match <[_; 1]>::try_from(answers) {
        Ok([answer]) => answer.map_err(|error| status(&error)),
        Err(answers) => Err(wrong_number_of_answers(1, answers.len())),
    }
}

fn id(claim: &v1alpha3::Claim) -> (&str, &str, &str) {
    (&claim.namespace, &claim.name, &claim.uid)
}

fn to_prepare(claim: v1alpha3::Claim) -> ClaimToPrepare {
    ClaimToPrepare {
        namespace: claim.namespace,
        name: claim.name,
        uid: claim.uid,
        allocation: allocation(claim.structured_resource_handle.is_some(), claim.resource_handle),
    }
}

fn allocation(is_structured: bool, handle: String) -> Allocation {
    if is_structured {
        Allocation::StructuredParameters
    } else {
        Allocation::Handle(handle)
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    fn prepared(key: &str, value: v1alpha3::NodePrepareResourceResponse) -> Vec<u8> {
        let entry = v1alpha3::NodePrepareResourcesEntry {
            key: key.into(),
            value: Some(value),
        };
        v1alpha3::NodePrepareResourcesResponse { claims: vec![entry] }.encode_to_vec()
    }

    #[test]
    fn claims_without_devices_have_the_bytes_that_kubelet_reads() {
        assert_eq!(
            prepared("uid", v1alpha3::NodePrepareResourceResponse::default()),
            b"\x0a\x07\x0a\x03uid\x12\x00"
        );
        let value = v1alpha3::NodePrepareResourceResponse {
            cdi_devices: vec![],
            error: "no".into(),
        };
        assert_eq!(prepared("uid", value), b"\x0a\x0b\x0a\x03uid\x12\x04\x12\x02no");
    }

    #[test]
    fn the_old_version_lists_devices_as_kubelet_reads_them() {
        let prepared = v1alpha2::NodePrepareResourceResponse {
            cdi_devices: vec!["v/c=a".into(), "v/c=b".into()],
        };
        assert_eq!(prepared.encode_to_vec(), b"\x0a\x05v/c=a\x0a\x05v/c=b");
    }

    #[test]
    fn structured_parameters_are_detected_by_a_repeated_field() {
        let bytes = b"\x12\x01u\x2a\x03\x0a\x01x\x2a\x00";
        assert!(
            v1alpha3::Claim::decode(bytes.as_slice())
                .unwrap()
                .structured_resource_handle
                .is_some()
        );
        assert!(
            v1alpha3::Claim::decode(b"\x12\x01u".as_slice())
                .unwrap()
                .structured_resource_handle
                .is_none()
        );
    }
}
