//! Claims: the DRA services `v1alpha2.Node` and `v1alpha3.Node` of kubelet 1.27 to 1.30, and their registration.

pub(crate) mod allocated_claims;

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::registration::RegistrationService;
use super::{
    KubeletApiError, KubeletApiState, KubeletPaths, health, is_served, refused, shown, status,
    wrong_number_of_answers,
};
use crate::api::proto::dra_v1alpha2 as v1alpha2;
use crate::api::proto::dra_v1alpha3 as v1alpha3;
use crate::api::proto::plugin_registration::PluginInfo;
use crate::api::proto::plugin_registration::registration_server::RegistrationServer;
use crate::api::proto::{MAX_CLAIMS, MAX_REQUEST};
use crate::core::prepare::names::check_driver;
use crate::node::kubelet::transport::listen;
use crate::node::service::{ClaimToPrepare, ClaimToUnprepare, NodeService, ServiceError};

/// The version announced in the plugin registration. Kubelet up to 1.31 accepts any 1.x, but while a plugin of this name is
/// registered at another socket, only a higher version. Releases that announced 1.0.0 had their registration socket outside the
/// driver's folder: if such a companion is killed, its socket stays and the next companion cannot remove it.
const SUPPORTED_VERSION: &str = "1.0.1";
/// First and longest delay before a rejected registration is offered again.
const RETRY: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(600));

/// Serves the DRA API until the shutdown.
///
/// The DRA service (`<root>/plugins/<driver>/dra.sock`) is served first, as `v1alpha2.Node` and `v1alpha3.Node` of kubelet 1.27 to
/// 1.30; then the registration service (`<root>/plugins_registry/<driver>/reg.sock`). Both sockets are recreated whenever they are
/// removed. A restarted kubelet walks its plugin directory and finds the registration again.
///
/// `state` follows the registration; it is [`KubeletApiState::Waiting`] once both sockets are served. Dropping the future stops the
/// endpoint like the shutdown does, without waiting for calls in flight. Errors are returned only before the endpoint is served.
pub async fn serve(
    node: NodeService,
    paths: KubeletPaths,
    driver_name: String,
    state: watch::Sender<KubeletApiState>,
    shutdown: CancellationToken,
) -> Result<(), KubeletApiError> {
    check_driver(&driver_name)?;
    let ours = shutdown.child_token();
    let _end_with_this = ours.clone().drop_guard();

    let service_place = paths.service_socket(&driver_name);
    let endpoint = service_place.path.display().to_string();
    let health = health::service(SERVICES, state.subscribe()).await;
    let service = listen(
        service_place,
        routes(&node).add_service(health),
        node.grpc_calls(),
        ours.clone(),
    )
    .await?;
    let mut verdicts = state.subscribe();
    let info = PluginInfo {
        r#type: "DRAPlugin".into(),
        name: driver_name.clone(),
        endpoint,
        supported_versions: vec![SUPPORTED_VERSION.into()],
    };
    let registration = RegistrationService {
        info,
        state: state.clone(),
    };
    let registration =
        Routes::new(RegistrationServer::new(registration).max_decoding_message_size(MAX_REQUEST));
    let registration = match listen(
        paths.registration_socket(&driver_name),
        registration,
        node.grpc_calls(),
        ours.clone(),
    )
    .await
    {
        Ok(registration) => registration,
        Err(error) => {
            ours.cancel();
            service.closed().await;
            state.send_replace(KubeletApiState::Closed);
            return Err(error.into());
        }
    };
    is_served(&state);
    tracing::info!(driver = driver_name, "the DRA service is ready");

    let mut published = registration.published.clone();
    published.mark_unchanged();
    let mut pause = RETRY.0;
    loop {
        let rejected = matches!(*verdicts.borrow_and_update(), KubeletApiState::Rejected { .. });
        tokio::select! {
            () = ours.cancelled() => break,
            Ok(()) = published.changed() => {
                // Kubelet registers the new socket.
                state.send_replace(KubeletApiState::Waiting);
            }
            Ok(()) = verdicts.changed() => {
                if *verdicts.borrow() == KubeletApiState::Registered {
                    pause = RETRY.0;
                }
            }
            () = sleep(pause), if rejected => {
                // Kubelet up to 1.35 asks again only for a new socket.
                registration.renew();
                pause = RETRY.1.min(pause * 2);
            }
        }
    }
    registration.closed().await;
    service.closed().await;
    state.send_replace(KubeletApiState::Closed);
    Ok(())
}

/// Error for a claim with structured parameters.
const STRUCTURED: &str = "the claim was allocated by structured parameters, which this driver does not have: use a ResourceClass \
                          without structuredParameters";

/// Names of the services on the DRA socket.
const SERVICES: &[&str] = &[
    v1alpha2::node_server::SERVICE_NAME,
    v1alpha3::node_server::SERVICE_NAME,
];

/// Routes of the services on the DRA socket.
fn routes(node: &NodeService) -> Routes {
    let old = v1alpha2::node_server::NodeServer::new(DraService(node.clone()));
    let new = v1alpha3::node_server::NodeServer::new(DraService(node.clone()));
    Routes::new(old.max_decoding_message_size(MAX_REQUEST))
        .add_service(new.max_decoding_message_size(MAX_REQUEST))
}

struct DraService(NodeService);

/// Returns the claims of a call. Rejects too many claims, a missing uid and a duplicate uid.
fn checked(claims: Vec<v1alpha3::Claim>) -> Result<Vec<v1alpha3::Claim>, Status> {
    let count = claims.len();
    if count > MAX_CLAIMS {
        return Err(refused(format!(
            "{count} claims in one call, {MAX_CLAIMS} are possible"
        )));
    }
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
        request: Request<v1alpha3::NodePrepareResourcesRequest>,
    ) -> Result<Response<v1alpha3::NodePrepareResourcesResponse>, Status> {
        let claims = checked(request.into_inner().claims)?;
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
        request: Request<v1alpha3::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1alpha3::NodeUnprepareResourcesResponse>, Status> {
        let claims = checked(request.into_inner().claims)?;
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
    fn an_unprepared_claim_has_an_entry_with_an_empty_value() {
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
