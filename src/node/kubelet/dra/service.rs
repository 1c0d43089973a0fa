//! The DRA services `v1alpha2.Node` and `v1alpha3.Node` of kubelet 1.27 to 1.30: prepare and unprepare.

use std::collections::BTreeSet;

use tonic::service::Routes;
use tonic::{Request, Response, Status};

use crate::api::proto::dra_v1alpha2 as v1alpha2;
use crate::api::proto::dra_v1alpha3 as v1alpha3;
use crate::api::proto::{ClaimList, MAX_CLAIMS};
use crate::node::kubelet::transport::MAX_MESSAGE;
use crate::node::kubelet::{refused, shown, status, wrong_number_of_answers};
use crate::node::service::{ClaimToPrepare, ClaimToUnprepare, NodeService, ServiceError};

/// Error for a claim with structured parameters.
const STRUCTURED: &str = "the claim was allocated by structured parameters, which this driver does not have: use a ResourceClass \
                          without structuredParameters";

/// Names of the services on the DRA socket.
pub(super) const SERVICES: &[&str] = &[
    v1alpha2::node_server::SERVICE_NAME,
    v1alpha3::node_server::SERVICE_NAME,
];

/// Routes of the services on the DRA socket.
pub(super) fn routes(node: &NodeService) -> Routes {
    let old = v1alpha2::node_server::NodeServer::new(DraService(node.clone()));
    let new = v1alpha3::node_server::NodeServer::new(DraService(node.clone()));
    Routes::new(old.max_decoding_message_size(MAX_MESSAGE))
        .add_service(new.max_decoding_message_size(MAX_MESSAGE))
}

struct DraService(NodeService);

/// Returns the claims of a call. Rejects too many claims, a missing uid and a duplicate uid.
fn checked(request: Request<ClaimList>) -> Result<Vec<v1alpha3::Claim>, Status> {
    let claims = request
        .into_inner()
        .within_limit()
        .map_err(|count| refused(format!("{count} claims in one call, {MAX_CLAIMS} are possible")))?;
    let mut uids = BTreeSet::new();
    for claim in &claims {
        if claim.uid.is_empty() {
            return Err(no_uid(&claim.namespace, &claim.name));
        }
        if !uids.insert(claim.uid.as_str()) {
            return Err(refused(format!(
                "the claim uid {} comes twice in one call",
                shown(&claim.uid)
            )));
        }
    }
    Ok(claims)
}

fn no_uid(namespace: &str, name: &str) -> Status {
    refused(format!(
        "the claim {} in namespace {} has no uid",
        shown(name),
        shown(namespace)
    ))
}

#[tonic::async_trait]
impl v1alpha3::node_server::Node for DraService {
    async fn node_prepare_resources(
        &self,
        request: Request<ClaimList>,
    ) -> Result<Response<v1alpha3::NodePrepareResourcesResponse>, Status> {
        let claims = checked(request)?;
        let classic = claims
            .iter()
            .filter(|claim| claim.structured_resource_handle.is_none());
        let classic = classic.cloned().map(to_prepare).collect::<Vec<_>>();
        let asked = classic.len();
        let answers = if asked == 0 {
            Vec::new()
        } else {
            self.0.prepare(classic).await
        };
        if answers.len() != asked {
            return Err(wrong_number_of_answers(asked, answers.len()));
        }
        let mut answers = answers.into_iter();
        let entries = claims.into_iter().map(|claim| {
            let answer = if claim.structured_resource_handle.is_some() {
                None
            } else {
                answers.next()
            };
            let value = match answer {
                Some(Ok(cdi_devices)) => v1alpha3::NodePrepareResourceResponse {
                    cdi_devices,
                    error: String::new(),
                },
                Some(Err(error)) => v1alpha3::NodePrepareResourceResponse {
                    cdi_devices: Vec::new(),
                    error: error.to_string(),
                },
                None => v1alpha3::NodePrepareResourceResponse {
                    cdi_devices: Vec::new(),
                    error: STRUCTURED.into(),
                },
            };
            v1alpha3::NodePrepareResourcesEntry {
                key: claim.uid,
                value: Some(value),
            }
        });
        Ok(Response::new(v1alpha3::NodePrepareResourcesResponse {
            claims: entries.collect(),
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<ClaimList>,
    ) -> Result<Response<v1alpha3::NodeUnprepareResourcesResponse>, Status> {
        let claims = checked(request)?;
        let asked = claims.len();
        let answers = if asked == 0 {
            Vec::new()
        } else {
            self.0
                .unprepare(claims.iter().cloned().map(to_unprepare).collect())
                .await
        };
        if answers.len() != asked {
            return Err(wrong_number_of_answers(asked, answers.len()));
        }
        let entries = claims.into_iter().zip(answers).map(|(claim, answer)| {
            let error = answer.err().map(|error| error.to_string()).unwrap_or_default();
            v1alpha3::NodeUnprepareResourcesEntry {
                key: claim.uid,
                value: Some(v1alpha3::NodeUnprepareResourceResponse { error }),
            }
        });
        Ok(Response::new(v1alpha3::NodeUnprepareResourcesResponse {
            claims: entries.collect(),
        }))
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
        if request.structured_resource_handle.is_some() {
            return Err(Status::failed_precondition(STRUCTURED));
        }
        let claim = ClaimToPrepare {
            namespace: request.namespace,
            name: request.claim_name,
            uid: request.claim_uid,
            resource_handle: request.resource_handle,
        };
        let cdi_devices = only(self.0.prepare(vec![claim]).await)?;
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

fn to_prepare(claim: v1alpha3::Claim) -> ClaimToPrepare {
    ClaimToPrepare {
        namespace: claim.namespace,
        name: claim.name,
        uid: claim.uid,
        resource_handle: claim.resource_handle,
    }
}

fn to_unprepare(claim: v1alpha3::Claim) -> ClaimToUnprepare {
    ClaimToUnprepare {
        namespace: claim.namespace,
        name: claim.name,
        uid: claim.uid,
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
    fn an_unprepared_claim_has_an_entry_with_a_value_although_the_value_is_empty() {
        let entry = v1alpha3::NodeUnprepareResourcesEntry {
            key: "uid".into(),
            value: Some(v1alpha3::NodeUnprepareResourceResponse::default()),
        };
        let bytes = v1alpha3::NodeUnprepareResourcesResponse { claims: vec![entry] }.encode_to_vec();
        assert_eq!(bytes, [0x0a, 0x07, 0x0a, 0x03, b'u', b'i', b'd', 0x12, 0x00]);
    }

    #[test]
    fn prepared_claims_have_the_bytes_that_kubelet_reads() {
        let value = v1alpha3::NodePrepareResourceResponse {
            cdi_devices: vec!["v/c=a".into()],
            error: String::new(),
        };
        assert_eq!(
            prepared("uid", value),
            b"\x0a\x0e\x0a\x03uid\x12\x07\x0a\x05v/c=a"
        );
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
    fn the_old_version_has_the_bytes_that_kubelet_reads() {
        let prepared = v1alpha2::NodePrepareResourceResponse {
            cdi_devices: vec!["v/c=a".into(), "v/c=b".into()],
        };
        assert_eq!(prepared.encode_to_vec(), b"\x0a\x05v/c=a\x0a\x05v/c=b");
        assert!(
            v1alpha2::NodeUnprepareResourceResponse {}
                .encode_to_vec()
                .is_empty()
        );
    }

    #[test]
    fn a_claim_with_structured_parameters_is_known_by_a_field_that_may_be_repeated() {
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
