//! Calls the APIs with kubelet's own generated types. `main.go` is compiled from kubelet's module, dials as kubelet does, and reads every
//! field of each answer. It panics at an answer at which kubelet would panic.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

#[path = "../../integration/grpc/fixture.rs"]
#[allow(dead_code, reason = "tests of the other APIs use the other half")]
mod fixture;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use drayman::node::kubelet::device_plugin::{self, PluginRegistration};
use drayman::node::kubelet::{KubeletApiError, KubeletApiState};
use tokio::process::Command;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use fixture::{DRIVER, DraEndpoint, FakeCompanion, RESOURCE, paths, soon, until_exists, until_state};

/// Calls an API and returns the lines of the answers.
async fn call(api: &str, socket: &Path) -> BTreeSet<String> {
    let program =
        tokio::task::spawn_blocking(|| crate::harness::build_go("tests/e2e/kubelet_types", "kubelet_types"));
    let output = Command::new(program.await.unwrap().unwrap())
        .arg(api)
        .arg(socket)
        .kill_on_drop(true)
        .output();
    let output = soon(output).await.unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "kubelet would have panicked:\n{error}");
    let lines = String::from_utf8(output.stdout).unwrap();
    lines.lines().map(str::to_owned).collect()
}

fn lines<const N: usize>(lines: [&str; N]) -> BTreeSet<String> {
    lines.map(str::to_owned).into()
}

#[tokio::test]
async fn kubelet_reads_every_registration_and_dra_answer() {
    let dra = DraEndpoint::open().await;
    let endpoint = dra.service().display().to_string();
    let info = format!(
        r#"GetInfo {{"type":"DRAPlugin","name":"{DRIVER}","endpoint":"{endpoint}","supported_versions":["1.0.1"]}}"#
    );
    assert_eq!(
        call("registration", &dra.registration()).await,
        lines([&info, "NotifyRegistrationStatus {}"])
    );
    let refused = "DeviceSlow: the driver took more than 10 s for refuse; it is tried again";
    let expected = [
        r#"prepared u-1: [v/c=u-1] """#,
        r#"prepared u-2: [] "DeviceSlow: the driver took more than 10 s for refuse; it is tried again""#,
        r#"NodePrepareResources {"claims":{"u-1":{"cdi_devices":["v/c=u-1"]},"u-2":{"error":"DeviceSlow: the driver took more than 10 s for refuse; it is tried again"}}}"#,
        // The value of the first has no fields: a map entry that a plain encoder would omit.
        r#"unprepared u-1: """#,
        r#"unprepared u-2: "DeviceSlow: the driver took more than 10 s for refuse; it is tried again""#,
        r#"NodeUnprepareResources {"claims":{"u-1":{},"u-2":{"error":"DeviceSlow: the driver took more than 10 s for refuse; it is tried again"}}}"#,
        r#"NodePrepareResource {"cdi_devices":["v/c=u-1"]}"#,
        "NodeUnprepareResource {}",
        &format!("NodePrepareResource FailedPrecondition: {refused}"),
        &format!("NodeUnprepareResource FailedPrecondition: {refused}"),
    ];
    let mut answers = call("dra", &dra.service()).await;
    let unimplemented = answers
        .iter()
        .find(|line| line.starts_with("NodeListAndWatchResources Unimplemented:"))
        .cloned();
    assert!(answers.remove(&unimplemented.unwrap()));
    assert_eq!(answers, lines(expected));
    dra.close().await;
}

/// The device plugin of an extended resource with two devices, in the plugin watcher's directory.
struct PluginEndpoint {
    directory: tempfile::TempDir,
    shutdown: CancellationToken,
    task: JoinHandle<Result<(), KubeletApiError>>,
}

impl PluginEndpoint {
    async fn open() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let shutdown = CancellationToken::new();
        let (sender, mut state) = watch::channel(KubeletApiState::Starting);
        let companion = FakeCompanion::new();
        companion.devices.send_modify(|devices| {
            devices.push(fixture::device("b", false));
            devices[0].numa_nodes = vec![0, 1];
        });
        let serve = device_plugin::serve(
            companion.service.clone(),
            paths(&directory),
            PluginRegistration::PluginWatcher,
            DRIVER.into(),
            RESOURCE.into(),
            sender,
            shutdown.clone(),
        );
        let task = tokio::spawn(serve);
        until_state(&mut state, &KubeletApiState::Waiting).await;
        let plugin = Self {
            directory,
            shutdown,
            task,
        };
        until_exists(&plugin.registration(), true).await;
        plugin
    }

    fn registration(&self) -> PathBuf {
        paths(&self.directory)
            .device_plugin_registration_socket(DRIVER, RESOURCE)
            .path
    }

    fn service(&self) -> PathBuf {
        paths(&self.directory)
            .watched_device_plugin_socket(DRIVER, RESOURCE)
            .path
    }

    async fn close(self) {
        self.shutdown.cancel();
        soon(self.task).await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn kubelet_reads_every_device_plugin_answer() {
    let plugin = PluginEndpoint::open().await;
    let info = format!(
        r#"GetInfo {{"type":"DevicePlugin","name":"{RESOURCE}","endpoint":"{}","supported_versions":["v1beta1"]}}"#,
        plugin.service().display()
    );
    assert_eq!(
        call("registration", &plugin.registration()).await,
        lines([&info, "NotifyRegistrationStatus {}"])
    );
    let expected = [
        r#"GetDevicePluginOptions {"pre_start_required":true,"get_preferred_allocation_available":true}"#,
        r#"ListAndWatch {"devices":[{"ID":"a","health":"Healthy","topology":{"nodes":[{},{"ID":1}]}},{"ID":"b","health":"Unhealthy"}]}"#,
        r#"GetPreferredAllocation {"container_responses":[{"deviceIDs":["b","c"]}]}"#,
        concat!(
            r#"Allocate {"container_responses":[{"envs":{"DEVICES":"a"},"#,
            r#""mounts":[{"container_path":"/vendor","host_path":"/opt/vendor","read_only":true}],"#,
            r#""devices":[{"container_path":"/dev/a","host_path":"/dev/a","permissions":"rw"}],"#,
            r#""annotations":{"vendor.example/mode":""},"cdi_devices":[{"name":"vendor.example/device=a"}]}]}"#
        ),
        "PreStartContainer {}",
        "Allocate FailedPrecondition: DeviceSlow: the driver took more than 10 s for refuse; it is tried again",
        "PreStartContainer FailedPrecondition: DeviceSlow: the driver took more than 10 s for refuse; it is tried again",
    ];
    assert_eq!(call("deviceplugin", &plugin.service()).await, lines(expected));
    plugin.close().await;
}
