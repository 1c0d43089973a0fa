use std::fs;
use std::os::unix::fs::MetadataExt;

use drayman::api::proto::dra_v1alpha2;
use drayman::api::proto::dra_v1alpha3::node_client::NodeClient;
use drayman::api::proto::dra_v1alpha3::{
    Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest, StructuredResourceHandle,
};
use drayman::api::proto::plugin_registration::registration_client::RegistrationClient;
use drayman::api::proto::plugin_registration::{InfoRequest, RegistrationStatus};
use drayman::node::kubelet::KubeletApiState;
use prost::Message;
use tonic::Code;

use crate::grpc::fixture::{DRIVER, DraEndpoint, REFUSED, RawClient, channel, until_state};

const PREPARE: &str = "/v1alpha3.Node/NodePrepareResources";
const UNPREPARE: &str = "/v1alpha3.Node/NodeUnprepareResources";

fn claim(name: &str) -> Claim {
    Claim {
        namespace: "ns".into(),
        uid: format!("uid-{name}"),
        name: name.into(),
        resource_handle: "handle".into(),
        structured_resource_handle: None,
    }
}

fn claims(names: &[&str]) -> NodePrepareResourcesRequest {
    NodePrepareResourcesRequest {
        claims: names.iter().map(|name| claim(name)).collect(),
    }
}

#[tokio::test]
async fn kubelet_registers_and_prepares_with_a_path_as_authority() {
    let mut dra = DraEndpoint::open().await;
    for escape in [false, true] {
        let authority = |path: &std::path::Path| {
            let path = path.display().to_string();
            if escape { path.replace('/', "%2F") } else { path }
        };
        let mut kubelet = RawClient::connect(&dra.registration()).await;
        let authority_of_socket = authority(&dra.registration());
        let info = kubelet
            .call(
                &authority_of_socket,
                "/pluginregistration.Registration/GetInfo",
                &[],
            )
            .await;
        let endpoint = dra.service().display().to_string();
        let golden = [
            b"\x0a\x09DRAPlugin\x12",
            &[u8::try_from(DRIVER.len()).unwrap()][..],
            DRIVER.as_bytes(),
            b"\x1a",
            &[u8::try_from(endpoint.len()).unwrap()],
            endpoint.as_bytes(),
            b"\x22\x051.0.1",
        ];
        assert_eq!((info.status.as_str(), info.body), ("0", golden.concat()));
        let notify = "/pluginregistration.Registration/NotifyRegistrationStatus";
        assert_eq!(
            kubelet
                .call(&authority_of_socket, notify, &[0x08, 1])
                .await
                .status,
            "0"
        );
        until_state(&mut dra.state, &KubeletApiState::Registered).await;

        let mut kubelet = RawClient::connect(&dra.service()).await;
        let authority_of_socket = authority(&dra.service());
        let prepared = kubelet
            .call(&authority_of_socket, PREPARE, &claims(&["a"]).encode_to_vec())
            .await;
        assert_eq!(prepared.body, b"\x0a\x14\x0a\x05uid-a\x12\x0b\x0a\x09v/c=uid-a");
        let unprepared = kubelet
            .call(&authority_of_socket, UNPREPARE, &claims(&["a"]).encode_to_vec())
            .await;
        assert_eq!(
            unprepared.body, b"\x0a\x09\x0a\x05uid-a\x12\x00",
            "a present but empty value"
        );
        let old = dra_v1alpha2::NodePrepareResourceRequest {
            namespace: "ns".into(),
            claim_uid: "u".into(),
            claim_name: "b".into(),
            resource_handle: "handle".into(),
            structured_resource_handle: None,
        };
        let prepared = kubelet
            .call(
                &authority_of_socket,
                "/v1alpha2.Node/NodePrepareResource",
                &old.encode_to_vec(),
            )
            .await;
        assert_eq!(
            (prepared.status.as_str(), prepared.body.as_slice()),
            ("0", &b"\x0a\x05v/c=u"[..])
        );
        let unprepared = kubelet
            .call(
                &authority_of_socket,
                "/v1alpha2.Node/NodeUnprepareResource",
                b"\x12\x01u\x1a\x01b",
            )
            .await;
        assert_eq!(
            (unprepared.status.as_str(), unprepared.body.as_slice()),
            ("0", &[][..])
        );
        assert_eq!(
            dra.companion.calls(),
            [
                "prepare ns/a uid-a handle",
                "unprepare ns/a uid-a",
                "prepare ns/b u handle",
                "unprepare /b u"
            ]
        );
    }
    dra.close().await;
}

#[tokio::test]
async fn a_thousand_calls_on_one_connection_keep_their_headers() {
    let dra = DraEndpoint::open().await;
    let mut kubelet = RawClient::connect(&dra.service()).await;
    for index in 0..1000 {
        let name = format!("{index:03}");
        let answer = kubelet
            .call("/a/path", UNPREPARE, &claims(&[&name]).encode_to_vec())
            .await;
        assert_eq!(
            answer.body,
            format!("\n\u{b}\n\u{7}uid-{name}\u{12}\0").into_bytes()
        );
    }
    dra.close().await;
}

#[tokio::test]
async fn other_methods_of_kubelet_1_30_are_unimplemented() {
    let dra = DraEndpoint::open().await;
    let mut kubelet = RawClient::connect(&dra.service()).await;
    for path in [
        "/v1alpha3.Node/NodeListAndWatchResources",
        "/v1alpha2.Node/Other",
        "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources",
    ] {
        assert_eq!(kubelet.call("localhost", path, &[]).await.status, "12", "{path}");
    }
    dra.close().await;
}

#[tokio::test]
async fn each_claim_has_its_own_outcome() {
    let dra = DraEndpoint::open().await;
    let mut client = NodeClient::new(channel(&dra.service()).await);
    let mut structured = claim("structured");
    structured.structured_resource_handle = Some(StructuredResourceHandle::default());
    let mut list = claims(&["a", "refuse", "invalid", "b"]);
    list.claims.insert(2, structured);
    let answer = client.node_prepare_resources(list).await.unwrap().into_inner();
    let outcomes = answer.claims.into_iter().map(|entry| {
        let value = entry.value.unwrap();
        (entry.key, value.cdi_devices.join(" "), value.error)
    });
    let outcomes = outcomes.collect::<Vec<_>>();
    let expect = |index: usize, uid: &str, devices: &str, error: &str| {
        let (key, found, text) = &outcomes[index];
        assert_eq!((key.as_str(), found.as_str()), (uid, devices));
        assert!(
            text.starts_with(error) && text.is_empty() == error.is_empty(),
            "{text}"
        );
    };
    assert_eq!(outcomes.len(), 5);
    expect(0, "uid-a", "v/c=uid-a", "");
    expect(1, "uid-refuse", "", REFUSED);
    expect(2, "uid-structured", "v/c=uid-structured", "");
    expect(
        3,
        "uid-invalid",
        "",
        "InvalidResource: this node has no extended resource",
    );
    expect(4, "uid-b", "v/c=uid-b", "");
    let answer = client
        .node_unprepare_resources(NodeUnprepareResourcesRequest {
            claims: claims(&["a", "refuse"]).claims,
        })
        .await
        .unwrap()
        .into_inner();
    let errors = answer
        .claims
        .into_iter()
        .map(|entry| entry.value.unwrap().error)
        .collect::<Vec<_>>();
    assert_eq!(errors, ["", REFUSED]);
    let empty = client
        .node_prepare_resources(claims(&[]))
        .await
        .unwrap()
        .into_inner();
    assert!(empty.claims.is_empty());
    let error = client
        .node_prepare_resources(claims(&["a", "forgotten"]))
        .await
        .unwrap_err();
    assert_eq!(
        error.code(),
        Code::Internal,
        "a missing answer is not assigned to another claim"
    );

    let mut old = dra_v1alpha2::node_client::NodeClient::new(channel(&dra.service()).await);
    for (name, code) in [
        ("refuse", Code::FailedPrecondition),
        ("invalid", Code::InvalidArgument),
        ("forgotten", Code::Internal),
    ] {
        let request = dra_v1alpha2::NodePrepareResourceRequest {
            claim_uid: "u".into(),
            claim_name: name.into(),
            ..Default::default()
        };
        assert_eq!(old.node_prepare_resource(request).await.unwrap_err().code(), code);
    }
    let structured = dra_v1alpha2::NodePrepareResourceRequest {
        claim_uid: "uid-old".into(),
        structured_resource_handle: Some(dra_v1alpha2::StructuredResourceHandle::default()),
        ..Default::default()
    };
    old.node_prepare_resource(structured).await.unwrap();
    let calls = dra.companion.calls().join("\n");
    for uid in ["uid-structured", "uid-old"] {
        assert!(calls.contains(&format!("{uid} StructuredParameters")), "{calls}");
    }
    assert_eq!(calls.matches("StructuredParameters").count(), 2, "{calls}");
    dra.close().await;
}

#[tokio::test]
async fn a_rejection_is_a_state_and_not_an_error() {
    let mut dra = DraEndpoint::open().await;
    let mut kubelet = RegistrationClient::new(channel(&dra.registration()).await);
    assert_eq!(
        kubelet.get_info(InfoRequest {}).await.unwrap().into_inner().name,
        DRIVER
    );
    let status = RegistrationStatus {
        plugin_registered: false,
        error: "no handler".into(),
    };
    kubelet.notify_registration_status(status).await.unwrap();
    until_state(
        &mut dra.state,
        &KubeletApiState::Rejected {
            message: "no handler".into(),
        },
    )
    .await;
    dra.close().await;
}

#[tokio::test(start_paused = true)]
async fn a_rejected_registration_is_offered_again_as_a_new_socket() {
    let mut dra = DraEndpoint::open().await;
    let inode = |dra: &DraEndpoint| fs::metadata(dra.registration()).unwrap().ino();
    let mut last = inode(&dra);
    for pause in [30, 60, 120] {
        let mut kubelet = RegistrationClient::new(channel(&dra.registration()).await);
        let status = RegistrationStatus {
            plugin_registered: false,
            error: "no handler".into(),
        };
        kubelet.notify_registration_status(status).await.unwrap();
        dra.state
            .wait_for(|state| matches!(state, KubeletApiState::Rejected { .. }))
            .await
            .unwrap();
        let start = tokio::time::Instant::now();
        dra.state
            .wait_for(|state| *state == KubeletApiState::Waiting)
            .await
            .unwrap();
        assert_eq!(start.elapsed().as_secs(), pause);
        assert_ne!(inode(&dra), std::mem::replace(&mut last, inode(&dra)));
    }
    dra.shutdown.cancel();
    dra.task.await.unwrap().unwrap();
}
