//! Every answer as bytes: read from the socket, compared with the expected bytes, and decoded by kubelet's own types.

use std::fmt::Write as _;

use drayman::api::proto::device_plugin_v1beta1::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, PreStartContainerRequest,
    PreferredAllocationRequest,
};
use drayman::api::proto::dra_v1alpha2;
use drayman::api::proto::dra_v1alpha3::{Claim, NodePrepareResourcesRequest, StructuredResourceHandle};
use prost::Message as _;

use super::{PluginEndpoint, call};
use crate::kubelet_types::fixture::{DRIVER, DraEndpoint, RESOURCE, RawClient, soon};

/// A call, its answer, the answer's type in kubelet, and the decoded text.
struct Golden<'a> {
    path: &'a str,
    request: Vec<u8>,
    answer: Vec<u8>,
    message: &'a str,
    read: String,
}

fn golden<'a>(
    path: &'a str,
    request: Vec<u8>,
    answer: impl Into<Vec<u8>>,
    message: &'a str,
    read: impl Into<String>,
) -> Golden<'a> {
    let (answer, read) = (answer.into(), read.into());
    Golden {
        path,
        request,
        answer,
        message,
        read,
    }
}

/// Makes the calls and compares the bytes.
async fn answer_so(client: &mut RawClient, authority: &str, all: &[Golden<'_>]) {
    for golden in all {
        let answer = client.call(authority, golden.path, &golden.request).await;
        assert_eq!(
            (answer.status.as_str(), answer.body),
            ("0", golden.answer.clone()),
            "{}",
            golden.path
        );
    }
}

/// Decodes the bytes with kubelet's types.
async fn are_read_so(all: &[Golden<'_>]) {
    let mut text = String::new();
    for golden in all {
        let digits = golden.answer.iter().fold(String::new(), |mut digits, byte| {
            write!(digits, "{byte:02x}").unwrap();
            digits
        });
        writeln!(text, "{} {digits}", golden.message).unwrap();
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let expected = all
        .iter()
        .map(|golden| format!("{} {}", golden.message, golden.read))
        .collect();
    assert_eq!(call("decode", file.path()).await, expected);
}

/// The bytes of a string field: field number, length, text.
fn field(number: u8, text: &str) -> Vec<u8> {
    let length = u8::try_from(text.len()).unwrap();
    assert!(length < 128, "the length fits in one byte");
    [&[number << 3 | 2, length], text.as_bytes()].concat()
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "a list of calls and their bytes")]
async fn claim_answers_are_the_bytes_that_kubelet_reads() {
    let api = DraEndpoint::open().await;
    let endpoint = api.service().display().to_string();
    let info = [
        b"\x0a\x09DRAPlugin".to_vec(),
        field(2, DRIVER),
        field(3, &endpoint),
        b"\x22\x051.0.1".to_vec(),
    ];
    let notify = "/pluginregistration.Registration/NotifyRegistrationStatus";
    let registration = [
        golden(
            "/pluginregistration.Registration/GetInfo",
            vec![],
            info.concat(),
            "PluginInfo",
            format!(
                r#"{{"type":"DRAPlugin","name":"{DRIVER}","endpoint":"{endpoint}","supported_versions":["1.0.1"]}}"#
            ),
        ),
        golden(
            notify,
            b"\x08\x01".to_vec(),
            "",
            "RegistrationStatusResponse",
            "{}",
        ),
        golden(
            notify,
            b"\x12\x02no".to_vec(),
            "",
            "RegistrationStatusResponse",
            "{}",
        ),
    ];
    let mut client = RawClient::connect(&api.registration()).await;
    answer_so(
        &mut client,
        &api.registration().display().to_string(),
        &registration,
    )
    .await;
    are_read_so(&registration).await;

    let claim = |uid: &str, name: &str| Claim {
        namespace: "default".into(),
        uid: uid.into(),
        name: name.into(),
        resource_handle: "h".into(),
        structured_resource_handle: None,
    };
    let list = |claims: Vec<Claim>| NodePrepareResourcesRequest { claims }.encode_to_vec();
    let both = || list(vec![claim("u-1", "one"), claim("u-2", "refuse")]);
    let structured = Claim {
        structured_resource_handle: Some(StructuredResourceHandle::default()),
        ..claim("u-3", "one")
    };
    let no_model = "the claim was allocated by structured parameters, which this driver does not have: use a ResourceClass without structuredParameters";
    let (prepare, unprepare) = (
        "/v1alpha3.Node/NodePrepareResources",
        "/v1alpha3.Node/NodeUnprepareResources",
    );
    let (prepared, unprepared) = ("NodePrepareResourcesResponse", "NodeUnprepareResourcesResponse");
    let old = |name: &str| dra_v1alpha2::NodePrepareResourceRequest {
        namespace: "default".into(),
        claim_uid: "u-1".into(),
        claim_name: name.into(),
        resource_handle: "h".into(),
        structured_resource_handle: None,
    };
    let claims = [
        golden(
            prepare,
            both(),
            b"\x0a\x10\x0a\x03u-1\x12\x09\x0a\x07v/c=u-1\
              \x0a\x51\x0a\x03u-2\x12\x4a\x12\x48DeviceSlow: the driver took more than 10 s for refuse; it is tried again"
                .as_slice(),
            prepared,
            r#"{"claims":{"u-1":{"cdi_devices":["v/c=u-1"]},"u-2":{"error":"DeviceSlow: the driver took more than 10 s for refuse; it is tried again"}}}"#,
        ),
        golden(
            prepare,
            list(vec![structured]),
            // Lengths of two bytes: 142, 134 and 131.
            [
                b"\x0a\x8e\x01\x0a\x03u-3\x12\x86\x01\x12\x83\x01".as_slice(),
                no_model.as_bytes(),
            ]
            .concat(),
            prepared,
            format!(r#"{{"claims":{{"u-3":{{"error":"{no_model}"}}}}}}"#),
        ),
        golden(prepare, vec![], "", prepared, "{}"),
        golden(
            unprepare,
            both(),
            b"\x0a\x07\x0a\x03u-1\x12\x00\
              \x0a\x51\x0a\x03u-2\x12\x4a\x0a\x48DeviceSlow: the driver took more than 10 s for refuse; it is tried again"
                .as_slice(),
            unprepared,
            r#"{"claims":{"u-1":{},"u-2":{"error":"DeviceSlow: the driver took more than 10 s for refuse; it is tried again"}}}"#,
        ),
        golden(unprepare, vec![], "", unprepared, "{}"),
        golden(
            "/v1alpha2.Node/NodePrepareResource",
            old("one").encode_to_vec(),
            "\x0a\x07v/c=u-1",
            "v1alpha2.NodePrepareResourceResponse",
            r#"{"cdi_devices":["v/c=u-1"]}"#,
        ),
        golden(
            "/v1alpha2.Node/NodeUnprepareResource",
            old("one").encode_to_vec(),
            "",
            "v1alpha2.NodeUnprepareResourceResponse",
            "{}",
        ),
    ];
    let mut client = RawClient::connect(&api.service()).await;
    answer_so(&mut client, &endpoint, &claims).await;
    are_read_so(&claims).await;
    // A refusal has no field in the old version's message, so the call itself fails with FAILED_PRECONDITION.
    for path in [
        "/v1alpha2.Node/NodePrepareResource",
        "/v1alpha2.Node/NodeUnprepareResource",
    ] {
        let answer = client.call(&endpoint, path, &old("refuse").encode_to_vec()).await;
        let message = answer.message.replace("%20", " ");
        assert_eq!(
            (answer.status.as_str(), message.as_str(), answer.body.len()),
            (
                "9",
                "DeviceSlow: the driver took more than 10 s for refuse; it is tried again",
                0
            ),
            "{path}"
        );
    }
    api.close().await;
}

/// An Allocate request for one container.
fn allocate_request(devices_ids: Vec<String>) -> Vec<u8> {
    let container_requests = vec![ContainerAllocateRequest { devices_ids }];
    AllocateRequest { container_requests }.encode_to_vec()
}

#[tokio::test]
async fn device_plugin_answers_are_the_bytes_that_kubelet_reads() {
    let api = PluginEndpoint::open().await;
    let endpoint = api.service().display().to_string();
    let info = [
        b"\x0a\x0cDevicePlugin".to_vec(),
        field(2, RESOURCE),
        field(3, &endpoint),
        b"\x22\x07v1beta1".to_vec(),
    ];
    let registration = [golden(
        "/pluginregistration.Registration/GetInfo",
        vec![],
        info.concat(),
        "PluginInfo",
        format!(
            r#"{{"type":"DevicePlugin","name":"{RESOURCE}","endpoint":"{endpoint}","supported_versions":["v1beta1"]}}"#
        ),
    )];
    let mut client = RawClient::connect(&api.registration()).await;
    answer_so(
        &mut client,
        &api.registration().display().to_string(),
        &registration,
    )
    .await;
    are_read_so(&registration).await;

    let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<String>>();
    let wish = ContainerPreferredAllocationRequest {
        available_device_i_ds: ids(&["a", "b", "c"]),
        must_include_device_i_ds: ids(&["b"]),
        allocation_size: 2,
    };
    let wishes = PreferredAllocationRequest {
        container_requests: vec![wish],
    };
    let devices_ids = ids(&["a"]);
    let start = PreStartContainerRequest { devices_ids };
    let allocated = [
        b"\x0a\x70".as_slice(),
        b"\x0a\x0c\x0a\x07DEVICES\x12\x01a",
        b"\x12\x18\x0a\x07/vendor\x12\x0b/opt/vendor\x18\x01",
        b"\x1a\x14\x0a\x06/dev/a\x12\x06/dev/a\x1a\x02rw",
        b"\x22\x15\x0a\x13vendor.example/mode",
        b"\x2a\x19\x0a\x17vendor.example/device=a",
    ];
    let calls = [
        golden(
            "/v1beta1.DevicePlugin/GetDevicePluginOptions",
            vec![],
            "\x08\x01\x10\x01",
            "DevicePluginOptions",
            r#"{"pre_start_required":true,"get_preferred_allocation_available":true}"#,
        ),
        golden(
            "/v1beta1.DevicePlugin/GetPreferredAllocation",
            wishes.encode_to_vec(),
            "\x0a\x06\x0a\x01b\x0a\x01c",
            "PreferredAllocationResponse",
            r#"{"container_responses":[{"deviceIDs":["b","c"]}]}"#,
        ),
        golden(
            "/v1beta1.DevicePlugin/Allocate",
            allocate_request(ids(&["a"])),
            allocated.concat(),
            "AllocateResponse",
            concat!(
                r#"{"container_responses":[{"envs":{"DEVICES":"a"},"#,
                r#""mounts":[{"container_path":"/vendor","host_path":"/opt/vendor","read_only":true}],"#,
                r#""devices":[{"container_path":"/dev/a","host_path":"/dev/a","permissions":"rw"}],"#,
                r#""annotations":{"vendor.example/mode":""},"cdi_devices":[{"name":"vendor.example/device=a"}]}]}"#
            ),
        ),
        golden(
            "/v1beta1.DevicePlugin/PreStartContainer",
            start.encode_to_vec(),
            "",
            "PreStartContainerResponse",
            "{}",
        ),
    ];
    let mut client = RawClient::connect(&api.service()).await;
    answer_so(&mut client, "localhost", &calls).await;
    are_read_so(&calls).await;

    let listed = golden(
        "/v1beta1.DevicePlugin/ListAndWatch",
        vec![],
        b"\x0a\x14\x0a\x01a\x12\x07Healthy\x1a\x06\x0a\x00\x0a\x02\x08\x01\x0a\x0e\x0a\x01b\x12\x09Unhealthy"
            .as_slice(),
        "ListAndWatchResponse",
        r#"{"devices":[{"ID":"a","health":"Healthy","topology":{"nodes":[{},{"ID":1}]}},{"ID":"b","health":"Unhealthy"}]}"#,
    );
    client.begin("localhost", listed.path, &listed.request).await;
    let message = soon(client.first_message()).await;
    assert_eq!(message.as_ref(), Some(&listed.answer));
    are_read_so(&[listed]).await;
    drop(client);
    api.close().await;
}

#[tokio::test]
async fn bytes_that_crash_kubelet_crash_its_types_too() {
    // A plain encoder writes an unprepared claim as an entry without a value.
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "NodeUnprepareResourcesResponse 0a050a03752d31\n").unwrap();
    let refused = tokio::spawn(async move { call("decode", file.path()).await }).await;
    assert!(refused.is_err(), "{refused:?}");
}
