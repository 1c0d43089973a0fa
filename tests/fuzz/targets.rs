//! The parsers, and what must be true of what they accept.

use std::cell::RefCell;
use std::collections::BTreeMap;

use drayman::api::cdi::Spec;
use drayman::api::crd::{Device, Mode};
use drayman::api::handle::{DeviceHandle, HandleDevice, VERSION};
use drayman::api::proto::{
    ClaimList, ContainerList, device_plugin_v1beta1, dra_v1alpha2, node_records, plugin_registration,
};
use drayman::core::node::checkpoint::Checkpoint;
use drayman::core::node::claim_uid::ClaimUid;
use drayman::core::node::containers::Containers;
use drayman::core::node::driver_name::DriverName;
use drayman::core::node::inventory::Devices;
use drayman::core::node::kubelet_state;
use drayman::core::node::ledger::Ledger;
use drayman::core::node::prepare::plan_prepare;
use drayman::core::node::rendering::{cdi_spec, entry_of_cdi_spec};
use drayman::core::node::request::{ClaimToPrepare, NodeIdentity};
use drayman::node::config::NodeConfiguration;
use drayman::node::transport::authority::Rewriter;
use prost::Message as _;

const UID: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10";

fn driver() -> DriverName {
    DriverName::parse("drayman.dev").unwrap()
}

/// An error is for a person: it neither floods the log nor breaks its lines.
fn check_error(text: &str) {
    assert!(!text.is_empty() && text.len() < 2_000, "{} bytes", text.len());
}

pub(crate) fn handle(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    match DeviceHandle::parse(text) {
        Ok(handle) => {
            assert!(handle.version <= VERSION);
            assert_eq!(DeviceHandle::parse(&handle.to_data().unwrap()), Ok(handle));
        }
        Err(error) => check_error(&error.to_string()),
    }
}

pub(crate) fn checkpoint(bytes: &[u8]) {
    let check = |bytes: &[u8]| match Checkpoint::decode(bytes) {
        Ok(checkpoint) => {
            let text = checkpoint.encode().unwrap();
            assert_eq!(Checkpoint::decode(text.as_bytes()).as_ref(), Ok(&checkpoint));
            let ledger = Ledger::new("boot", checkpoint.entries.clone());
            assert_eq!(Checkpoint::of(&ledger, &checkpoint.cluster), checkpoint);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    };
    check(bytes);
    // The same as content with a right checksum, or nothing behind the checksum would ever be reached.
    if let Ok(data) = std::str::from_utf8(bytes) {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&1_u32.to_le_bytes());
        hasher.update(data.as_bytes());
        check(
            format!(
                r#"{{"version":1,"checksum":{},"data":{data}}}"#,
                hasher.finalize()
            )
            .as_bytes(),
        );
    }
}

pub(crate) fn cdi(bytes: &[u8]) {
    let Ok(spec) = serde_json::from_slice::<Spec>(bytes) else {
        return;
    };
    let uid = ClaimUid::parse(UID).unwrap();
    let Some(entry) = entry_of_cdi_spec(&driver(), &uid, "boot", &spec) else {
        return;
    };
    assert!(!entry.devices.is_empty());
    let again = cdi_spec(&driver(), &uid, entry.injection().unwrap());
    let again = entry_of_cdi_spec(&driver(), &uid, "boot", &again).unwrap();
    assert_eq!(again.injection(), entry.injection());
}

pub(crate) fn kubelet_state(bytes: &[u8]) {
    match kubelet_state::parse(bytes, &driver()) {
        Ok(claims) => {
            for uid in claims.keys() {
                assert_eq!(ClaimUid::parse(uid.as_str()).as_ref(), Ok(uid));
            }
        }
        Err(error) => check_error(&error.to_string()),
    }
}

thread_local! {
    /// One file for all inputs of a thread, in memory where there is such.
    static FILE: RefCell<tempfile::NamedTempFile> = RefCell::new(
        tempfile::NamedTempFile::new_in("/dev/shm").or_else(|_| tempfile::NamedTempFile::new()).unwrap(),
    );
}

pub(crate) fn config(bytes: &[u8]) {
    FILE.with_borrow(|file| {
        std::fs::write(file.path(), bytes).unwrap();
        match NodeConfiguration::read(file.path()) {
            Ok(configuration) => assert!(configuration.kinds.len() <= 64),
            Err(error) => check_error(&error.to_string()),
        }
    });
}

/// Frames as they come from a client: the same output for every way to cut them, and never much of it.
pub(crate) fn authority(bytes: &[u8]) {
    const LIMIT: usize = 64 * 1024;
    let run = |size: usize| {
        let (mut rewriter, mut all) = (Rewriter::default(), Vec::new());
        for chunk in bytes.chunks(size) {
            let mut rest = chunk;
            while !rest.is_empty() {
                let mut output = Vec::new();
                let used = match rewriter.advance(rest, &mut output) {
                    Ok(used) => used,
                    Err(error) => return (all, Some(error.reason())),
                };
                assert!(used > 0 && output.len() <= LIMIT);
                all.extend(output);
                rest = &rest[used..];
            }
        }
        (all, None)
    };
    let (whole, error) = run(usize::MAX);
    for size in [1, 7, 100] {
        let (cut, same) = run(size);
        assert_eq!(error, same);
        // What comes before an error may have been given out or not.
        assert!(whole.starts_with(&cut) || cut.starts_with(&whole));
        assert!(error.is_some() || whole == cut);
    }
}

pub(crate) fn requests(bytes: &[u8]) {
    if let Ok(claims) = ClaimList::decode(bytes)
        && let Ok(claims) = claims.within_limit()
    {
        assert!(claims.len() <= 1024);
    }
    if let Ok(containers) = ContainerList::decode(bytes)
        && let Ok(containers) = containers.within_limit()
    {
        assert!(containers.len() <= 64);
    }
    let _ = dra_v1alpha2::NodePrepareResourceRequest::decode(bytes);
    let _ = dra_v1alpha2::NodeUnprepareResourceRequest::decode(bytes);
    let _ = device_plugin_v1beta1::DevicePluginOptions::decode(bytes);
    let _ = plugin_registration::RegistrationStatus::decode(bytes);
    let _ = node_records::ReleaseRequest::decode(bytes);
}

/// A whole request for a claim, in lines: namespace, name, uid, and the resource handle in the rest.
pub(crate) fn prepare(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let mut lines = text.splitn(4, '\n').map(str::to_owned);
    let mut next = || lines.next().unwrap_or_default();
    let claim = ClaimToPrepare {
        namespace: next(),
        name: next(),
        uid: next(),
        resource_handle: next(),
    };
    let device = |name: &str| {
        let device = Device {
            name: name.into(),
            kind: "test".into(),
            mode: Mode::Claims,
            ..Device::default()
        };
        (name.to_owned(), device)
    };
    let inventory: Devices = ["x", "y"].map(device).into();
    let node = NodeIdentity {
        name: "node-a".into(),
        uid: Some("n-1".into()),
    };
    let (ledger, containers) = (Ledger::new("boot", BTreeMap::new()), Containers::default());
    match plan_prepare(&ledger, &containers, &inventory, &node, &claim) {
        Ok((uid, steps)) => {
            assert_eq!(uid.as_str(), claim.uid);
            let handle = DeviceHandle::parse(&claim.resource_handle).unwrap();
            assert!(handle.claim_uid == claim.uid && handle.node_uid == "n-1");
            assert!(
                handle
                    .devices
                    .iter()
                    .all(|HandleDevice { device, .. }| inventory.contains_key(device))
            );
            assert!(!steps.is_empty());
        }
        Err(refusal) => check_error(&refusal.to_string()),
    }
}
