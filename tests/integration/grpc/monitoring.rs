//! Health service and call counts of a DRA endpoint.

use drayman::api::proto::dra_v1alpha3::node_client::NodeClient;
use drayman::api::proto::dra_v1alpha3::{Claim, NodePrepareResourcesRequest};
use drayman::api::proto::plugin_registration::RegistrationStatus;
use drayman::api::proto::plugin_registration::registration_client::RegistrationClient;
use drayman::node::kubelet::KubeletApiState;
use drayman::node::kubelet::transport::GrpcCalls;
use tonic::Code;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::grpc::fixture::{DraEndpoint, channel, soon, until_state};

async fn health(client: &mut HealthClient<Channel>, service: &str) -> Result<ServingStatus, Code> {
    let request = HealthCheckRequest {
        service: service.to_owned(),
    };
    let answer = client.check(request).await.map_err(|status| status.code())?;
    Ok(answer.into_inner().status())
}

#[tokio::test]
async fn the_health_service_of_a_socket_follows_its_registration() {
    let mut dra = DraEndpoint::open().await;
    let mut client = HealthClient::new(channel(&dra.service()).await);
    for service in ["", "v1alpha2.Node", "v1alpha3.Node"] {
        let health = health(&mut client, service).await;
        assert_eq!(health, Ok(ServingStatus::Serving), "{service:?}");
    }
    assert_eq!(health(&mut client, "v1.Node").await, Err(Code::NotFound));

    let mut registration = RegistrationClient::new(channel(&dra.registration()).await);
    let mut changes = client
        .watch(HealthCheckRequest::default())
        .await
        .unwrap()
        .into_inner();
    let first = soon(changes.message()).await.unwrap().unwrap();
    assert_eq!(first.status(), ServingStatus::Serving);
    let status = |plugin_registered| RegistrationStatus {
        plugin_registered,
        error: "no handler registered".to_owned(),
    };
    registration
        .notify_registration_status(status(false))
        .await
        .unwrap();
    let refused = soon(changes.message()).await.unwrap().unwrap();
    assert_eq!(refused.status(), ServingStatus::NotServing);
    registration
        .notify_registration_status(status(true))
        .await
        .unwrap();
    until_state(&mut dra.state, &KubeletApiState::Registered).await;
    let accepted = soon(changes.message()).await.unwrap().unwrap();
    assert_eq!(accepted.status(), ServingStatus::Serving);
    drop(changes);
    dra.close().await;
}

/// Completed calls of a method, by code.
fn handled(calls: &GrpcCalls, method: &str) -> Vec<(&'static str, u64)> {
    let all = calls.counted();
    let of_method = all.iter().filter(|(known, _)| known.method == method);
    let codes = of_method.flat_map(|(_, figures)| &figures.handled);
    codes
        .filter(|(_, count)| **count > 0)
        .map(|(code, count)| (*code, *count))
        .collect()
}

#[tokio::test]
async fn calls_are_counted_by_method_and_code() {
    let dra = DraEndpoint::open().await;
    let calls = dra.companion.counted.clone();
    let mut client = NodeClient::new(channel(&dra.service()).await);
    let claims = |uid: &str| {
        let claim = Claim {
            namespace: "ns".into(),
            uid: uid.into(),
            name: "claim".into(),
            ..Claim::default()
        };
        NodePrepareResourcesRequest { claims: vec![claim] }
    };
    client.node_prepare_resources(claims("uid")).await.unwrap();
    client.node_prepare_resources(claims("uid")).await.unwrap();
    let refusal = client.node_prepare_resources(claims("")).await.unwrap_err();
    assert_eq!(refusal.code(), Code::InvalidArgument);
    // The client receives the response before the server drops its body.
    soon(async {
        while handled(&calls, "NodePrepareResources") != [("InvalidArgument", 1), ("OK", 2)] {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(handled(&calls, "NodeUnprepareResources"), []);
    drop(client);
    dra.close().await;
}
