use container_device_interface::cache::{new_cache, with_auto_refresh};
use container_device_interface::spec::{parse_spec, read_spec, validate_spec};
use container_device_interface::spec_dirs::with_spec_dirs;

use super::super::*;
use crate::api::crd::Device;
use crate::core::prepare::container_edits::{DeviceNode, Mount};
use crate::core::prepare::device_metadata::DeviceMetadata;
use crate::core::prepare::prepared_claims::{HeldDevice, Progress, Structured};

/// A container to which the runtime's library has added a CDI device.
fn injected(directory: &Path, id: String) -> serde_json::Value {
    let cache = new_cache(vec![
        with_spec_dirs(&[directory.to_str().unwrap()]),
        with_auto_refresh(false),
    ]);
    let mut cache = cache.lock().unwrap();
    cache.refresh().unwrap();
    let mut container = oci_spec::runtime::Spec::default();
    cache.inject_devices(Some(&mut container), vec![id]).unwrap();
    serde_json::to_value(&container).unwrap()
}

fn uid(last: char) -> ClaimUid {
    ClaimUid::parse(&format!("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0{last}")).unwrap()
}

fn directory() -> (tempfile::TempDir, CdiDirectory) {
    let directory = tempfile::tempdir().unwrap();
    let files = CdiDirectory::new(
        &disk::Disk::default(),
        DriverName::parse("drayman.dev").unwrap(),
        directory.path(),
    );
    (directory, files)
}

fn null() -> Entry {
    let node = DeviceNode {
        host_path: "/dev/null".into(),
        container_path: "/dev/drayman-test-0".into(),
        permissions: "rw".into(),
    };
    Entry {
        namespace: "default".into(),
        name: "camera".into(),
        boot_id: "boot".into(),
        devices: vec![HeldDevice::named("drayman-test-0")],
        progress: Progress::Done {
            container_edits: ContainerEdits::of_device_node("drayman-test-0", node),
        },
    }
}

#[test]
fn a_runtimes_own_reader_takes_what_is_written() {
    let (_directory, files) = directory();
    files.write(&uid('1'), &null()).unwrap();
    let path = files.path(&uid('1'));
    validate_spec(&parse_spec(&path).unwrap()).unwrap();
    assert_eq!(read_spec(&path, 1).unwrap().get_vendor(), "drayman.dev");
}

#[test]
fn the_runtime_adds_the_node_and_variable_of_a_cdi_file() {
    let (directory, files) = directory();
    files.write(&uid('1'), &null()).unwrap();
    let id = DriverName::parse("drayman.dev").unwrap().cdi_id(&uid('1'));
    let container = injected(directory.path(), id);
    let variables = container["process"]["env"].as_array().unwrap();
    assert!(
        variables
            .iter()
            .any(|v| v == "DRAYMAN_DEVICE_DRAYMAN_TEST_0=/dev/drayman-test-0"),
        "{variables:?}"
    );
    let device = &container["linux"]["devices"][0];
    assert_eq!(
        (device["path"].as_str(), device["major"].as_i64()),
        (Some("/dev/drayman-test-0"), Some(1))
    );
    assert_eq!(container["hooks"], serde_json::Value::Null);
}

#[test]
fn only_our_files_are_seen_and_partial_ones_are_removed() {
    let (directory, files) = directory();
    files.write(&uid('1'), &null()).unwrap();
    let half = format!("drayman.dev-claim_{}.json.tmp", uid('2'));
    for name in [
        half.as_str(),
        "drayman.dev-claim_x.json",
        "other.dev-claim_7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a03.json",
        "drayman.dev-claim_7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a04.yaml",
        "drayman.dev-claim-claim_7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a05.json",
    ] {
        std::fs::write(directory.path().join(name), "").unwrap();
    }
    assert_eq!(files.claims().unwrap(), BTreeSet::from([uid('1')]));
    assert!(directory.path().join(&half).exists());
    files.remove_half_written().unwrap();
    assert!(!directory.path().join(half).exists());
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 5);
}

#[test]
fn an_unchanged_file_is_not_written_again() {
    let (_directory, files) = directory();
    files.write(&uid('1'), &null()).unwrap();
    let before = files.path(&uid('1')).metadata().unwrap().modified().unwrap();
    files.write(&uid('1'), &null()).unwrap();
    assert_eq!(
        files.path(&uid('1')).metadata().unwrap().modified().unwrap(),
        before
    );
    std::fs::write(files.path(&uid('1')), "damaged").unwrap();
    files.write(&uid('1'), &null()).unwrap();
    assert!(files.read(&uid('1')).unwrap().is_some());
}

#[test]
fn metadata_is_mounted_and_removed_with_the_claim() {
    let (directory, files) = directory();
    let mut metadata = DeviceMetadata::new("node-a", "request", None);
    metadata.describe(&Device::default());
    let mut entry = null();
    entry.devices[0].structured = Some(Structured {
        metadata,
        ..Structured::default()
    });
    let path = directory
        .path()
        .join(format!("drayman.dev-metadata/{}/0.json", uid('1')));
    let mounted = || {
        let spec = files.read(&uid('1')).unwrap().unwrap();
        let mounts = &spec.devices[0].container_edits.mounts;
        assert_eq!(mounts[0].host_path, path.to_str().unwrap());
        assert!(mounts[0].options.iter().any(|option| option == "ro"));
        std::fs::read_to_string(&path).unwrap()
    };
    files.write(&uid('1'), &entry).unwrap();
    let content = mounted();
    // Both are restored.
    std::fs::write(&path, "damaged").unwrap();
    files.write(&uid('1'), &entry).unwrap();
    assert_eq!(mounted(), content);
    std::fs::remove_dir_all(directory.path().join("drayman.dev-metadata")).unwrap();
    files.write(&uid('1'), &entry).unwrap();
    assert_eq!(mounted(), content);

    files.write(&uid('2'), &entry).unwrap();
    files.keep_metadata(&BTreeMap::from([(uid('2'), entry)]));
    assert!(!path.exists());
    files.remove(&uid('2')).unwrap();
    let left = directory.path().join("drayman.dev-metadata");
    assert_eq!(std::fs::read_dir(left).unwrap().count(), 0);
}

#[test]
fn a_second_removal_changes_nothing() {
    let (_directory, files) = directory();
    files.write(&uid('1'), &null()).unwrap();
    files.remove(&uid('1')).unwrap();
    files.remove(&uid('1')).unwrap();
    assert_eq!(files.claims().unwrap(), BTreeSet::new());
}

fn names(directory: &std::path::Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn only_the_files_of_devices_that_are_there_stay() {
    let directory = tempfile::tempdir().unwrap();
    let files = CdiDirectory::new(
        &disk::Disk::default(),
        DriverName::parse("drayman.dev").unwrap(),
        directory.path(),
    );
    for device in ["a", "b"] {
        files.write_device(device, &ContainerEdits::default()).unwrap();
    }
    for name in [
        "drayman.dev-claim_x.json",
        "drayman.dev-device_c.json.tmp",
        "other.dev-device_a.json",
    ] {
        std::fs::write(directory.path().join(name), "").unwrap();
    }
    files.keep_devices(&BTreeSet::from(["b".to_owned()])).unwrap();
    assert_eq!(
        names(directory.path()),
        [
            "drayman.dev-claim_x.json",
            "drayman.dev-device_b.json",
            "other.dev-device_a.json"
        ]
    );
}

#[test]
fn the_runtime_finds_a_cdi_device_by_name_with_its_mount() {
    let directory = tempfile::tempdir().unwrap();
    let driver = DriverName::parse("drayman.dev").unwrap();
    let files = CdiDirectory::new(&disk::Disk::default(), driver.clone(), directory.path());
    let node = DeviceNode {
        host_path: "/dev/null".into(),
        container_path: "/dev/a".into(),
        permissions: "rw".into(),
    };
    let container_edits = ContainerEdits {
        mounts: vec![Mount {
            host_path: "/opt".into(),
            container_path: "/vendor".into(),
            read_only: true,
        }],
        ..ContainerEdits::of_device_node("a", node)
    };
    files.write_device("a", &container_edits).unwrap();
    let before = oci_spec::runtime::Spec::default()
        .mounts()
        .as_ref()
        .map_or(0, Vec::len);
    let container = injected(directory.path(), driver.cdi_device_id("a"));
    assert_eq!(container["linux"]["devices"][0]["path"], "/dev/a");
    let mounts = container["mounts"].as_array().unwrap();
    assert_eq!(mounts.len(), before + 1);
    let mount = mounts
        .iter()
        .find(|mount| mount["destination"] == "/vendor")
        .unwrap();
    assert_eq!(mount["source"], "/opt");
}
