//! The parsers, and the properties of their results.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use drayman::api::cdi::Spec;
use drayman::api::crd::{Device, Devices, Mode, TEXT_MAX};
use drayman::api::handle::{DeviceHandle, HandleDevice, VERSION};
use drayman::api::proto::{
    device_plugin_v1beta1, dra_v1alpha2, dra_v1alpha3, node_records, plugin_registration,
};
use drayman::core::allocation::inventory::{Attribute, AttributeSet, Match};
use drayman::core::discovery::attributes::{Attributes, fit};
use drayman::core::discovery::mounts::{Mounts, mounts as read_mounts, swap_areas};
use drayman::core::discovery::pci::{PciFacts, megatransfers};
use drayman::core::discovery::usb::{UsbFacts, UsbIdentity, identities};
use drayman::core::names::{ClaimUid, DriverName};
use drayman::core::prepare::checkpoint::Checkpoint;
use drayman::core::prepare::container_edits::cdi_spec;
use drayman::core::prepare::containers::Containers;
use drayman::core::prepare::device_manager;
use drayman::core::prepare::kubelet_state;
use drayman::core::prepare::plan::{Allocation, ClaimToPrepare, NodeIdentity, plan_prepare};
use drayman::core::prepare::prepared_claims::{Entry, PreparedClaims};
use drayman::host::selectors::{CelEnvironment, Compiled, STACK};
use drayman::node::config::NodeConfiguration;
use drayman::node::kubelet::transport::relay::Rewriter;
use prost::Message as _;

const UID: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10";

fn driver() -> DriverName {
    DriverName::parse("drayman.dev").unwrap()
}

/// Checks that an error message is neither empty nor excessively long.
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
            let prepared_claims = PreparedClaims::new("boot", checkpoint.entries.clone());
            let unknown = &checkpoint.unknown_containers;
            let again = Checkpoint::of(&prepared_claims, &checkpoint.cluster, unknown);
            assert_eq!(again, checkpoint);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    };
    check(bytes);
    // Also tries the input as content with a valid checksum, which it rarely has otherwise.
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
    let Some(entry) = Entry::of_cdi_spec(&driver(), &uid, "boot", &spec) else {
        return;
    };
    assert!(!entry.devices.is_empty());
    let again = cdi_spec(&driver(), &uid, entry.container_edits().unwrap());
    let again = Entry::of_cdi_spec(&driver(), &uid, "boot", &again).unwrap();
    assert_eq!(again.container_edits(), entry.container_edits());
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
    /// One file for all inputs of a thread, in memory if possible.
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

/// HTTP/2 frames of a client: the output does not depend on how the input is split, and is bounded.
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
        // Output before an error may be incomplete.
        assert!(whole.starts_with(&cut) || cut.starts_with(&whole));
        assert!(error.is_some() || whole == cut);
    }
}

pub(crate) fn requests(bytes: &[u8]) {
    let _ = dra_v1alpha3::NodePrepareResourcesRequest::decode(bytes);
    let _ = dra_v1alpha3::NodeUnprepareResourcesRequest::decode(bytes);
    let _ = device_plugin_v1beta1::AllocateRequest::decode(bytes);
    let _ = device_plugin_v1beta1::PreferredAllocationRequest::decode(bytes);
    let _ = device_plugin_v1beta1::PreStartContainerRequest::decode(bytes);
    let _ = dra_v1alpha2::NodePrepareResourceRequest::decode(bytes);
    let _ = dra_v1alpha2::NodeUnprepareResourceRequest::decode(bytes);
    let _ = device_plugin_v1beta1::DevicePluginOptions::decode(bytes);
    let _ = plugin_registration::RegistrationStatus::decode(bytes);
    let _ = node_records::ReleaseRequest::decode(bytes);
}

/// A prepare request in lines: namespace, name, UID, and the resource handle in the rest.
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
        allocation: Allocation::Handle(next()),
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
    match plan_prepare(
        &PreparedClaims::new("boot", BTreeMap::new()),
        &Containers::default(),
        &inventory,
        &node,
        &claim,
    ) {
        Ok((uid, steps)) => {
            assert_eq!(uid.as_str(), claim.uid);
            let Allocation::Handle(handle) = &claim.allocation else {
                panic!("a classic claim");
            };
            let handle = DeviceHandle::parse(handle).unwrap();
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

/// A uevent of the kernel.
pub(crate) fn uevent(bytes: &[u8]) {
    if let Some(event) = drayman::core::discovery::uevent::parse(bytes) {
        let _ = event.concerns_devices();
        assert!(event.devpath.len() <= bytes.len());
    }
}

/// Sysfs values, one per line: for any values, attributes fit into an inventory and names are valid.
pub(crate) fn sysfs(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.lines().map(str::to_owned);
    let mut next = || lines.next();
    let usb = UsbFacts {
        sysfs_name: next().unwrap_or_default(),
        controller: next(),
        serial: next(),
        manufacturer: next(),
        model: next(),
        ..UsbFacts::default()
    };
    let pci = PciFacts {
        address: next().unwrap_or_default(),
        driver: next(),
        link_speed: next().as_deref().and_then(megatransfers),
        root: next(),
        ..PciFacts::default()
    };
    for identity in [UsbIdentity::Port, UsbIdentity::Serial] {
        let twins = [usb.clone(), usb.clone()];
        for one in identities(&twins, identity)
            .into_iter()
            .chain(identities(&twins[..1], identity))
        {
            assert!(!one.unwrap_or_else(|problem| problem).is_empty());
        }
    }
    let mut attributes = Attributes::default();
    attributes.usb(&usb).pci(&pci);
    let mut device = Device {
        name: "x".into(),
        attributes: attributes.finish(),
        ..Device::default()
    };
    for value in device.attributes.values() {
        let text = serde_json::to_value(value).unwrap();
        let text = text["string"].as_str().unwrap_or_default().to_owned();
        assert!(
            text.chars().count() <= TEXT_MAX && !text.chars().any(char::is_control),
            "{text:?}"
        );
    }
    let _ = fit(std::slice::from_mut(&mut device));
}

/// The checkpoint of the device manager of kubelet: every grant is either returned or an error.
pub(crate) fn device_manager(bytes: &[u8]) {
    match device_manager::parse(bytes) {
        Ok(grants) => {
            let resources: BTreeSet<String> =
                grants.iter().map(|grant| grant.resource_name.clone()).collect();
            let all = device_manager::recorded(&grants, &resources, |_| true);
            for grant in &grants {
                // The devices of one pod are a subset of all devices.
                let of_pod = device_manager::recorded(&grants, &resources, |uid| uid == grant.pod_uid);
                assert!(of_pod.is_subset(&all));
                let ids = grant.device_ids.iter().flat_map(BTreeMap::values).flatten();
                let held = |id: &String| of_pod.contains(id.split('.').next().unwrap_or_default());
                assert!(ids.into_iter().all(held), "{grant:?}");
            }
            assert!(device_manager::recorded(&grants, &BTreeSet::new(), |_| true).is_empty());
            assert!(device_manager::recorded(&grants, &resources, |_| false).is_empty());
        }
        Err(error) => check_error(&error.to_string()),
    }
}

/// The mount and swap tables of the kernel: each line is parsed independently, so that an invalid line cannot hide a disk in another.
pub(crate) fn mounts(bytes: &[u8]) {
    const DISK: &[u8] = b"\n22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n";
    let whole = read_mounts(bytes);
    let mut lines = Mounts::default();
    for line in bytes.split(|&byte| byte == b'\n') {
        let one = read_mounts(line);
        lines.numbers.extend(one.numbers);
        lines.sources.extend(one.sources);
    }
    assert_eq!(whole, lines);
    assert!(whole.numbers.iter().all(|(major, _)| *major != 0));
    let after = read_mounts(&[bytes, DISK].concat());
    assert!(after.numbers.contains(&(8, 1)) && after.sources.contains(b"/dev/sda1".as_slice()));
    let areas = swap_areas(&[bytes, b"\n/dev/sda2 partition 1 0 -2\n"].concat());
    assert!(areas.contains(b"/dev/sda2".as_slice()));
    for path in whole.sources.iter().chain(&areas) {
        assert!(path.starts_with(b"/dev/") && path.len() <= bytes.len().max(9));
    }
}

/// A selector on a thread with the stack size of the controller: the evaluation terminates with a deterministic result, because results are
/// cached by attributes.
pub(crate) fn selector(bytes: &[u8]) {
    let Ok(text) = String::from_utf8(bytes.to_vec()) else {
        return;
    };
    let thread = std::thread::Builder::new().stack_size(STACK);
    let evaluation = thread.spawn(move || {
        let compiled = match Compiled::new(&text) {
            Ok(compiled) => compiled,
            Err(error) => return check_error(&error),
        };
        let environment = CelEnvironment::new("drayman.dev");
        // Not the minimum: cel's `-` overflows, which only a debug build checks.
        let known: [(Box<str>, Attribute); 4] = [
            ("drayman.dev/firmware".into(), Attribute::Version("1.10.0".into())),
            ("drayman.dev/numaNode".into(), Attribute::Int(i64::MIN + 1)),
            ("drayman.dev/spare".into(), Attribute::Bool(false)),
            ("drayman.dev/vendor".into(), Attribute::String("0403".into())),
        ];
        for facts in [AttributeSet::from_iter([]), AttributeSet::from_iter(known)] {
            let result = compiled.evaluate(&environment, &facts);
            assert_eq!(compiled.evaluate(&environment, &facts), result);
            if let Match::Failed(why) = result {
                check_error(&why);
            }
        }
    });
    assert!(evaluation.unwrap().join().is_ok());
}
