//! A node with its directories and devices, and the companion on it.

use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use drayman::api::handle::{DeviceHandle, HandleDevice, VERSION};
use drayman::api::proto::device_plugin_v1beta1::device_plugin_client::DevicePluginClient;
use drayman::api::proto::device_plugin_v1beta1::{Empty, ListAndWatchResponse};
use drayman::api::proto::dra_v1;
use drayman::api::proto::dra_v1::dra_plugin_client::DraPluginClient;
use drayman::api::proto::dra_v1alpha3::node_client::NodeClient;
use drayman::api::proto::dra_v1alpha3::{Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use drayman::node::discovery::HostPaths;
use drayman::node::kubelet::KubeletPaths;
use drayman::node::run::{NodeError, NodeOptions, run};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use super::api::Api;
use crate::not_run::is_root;

pub(crate) struct Node {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) api: Api,
    /// Configuration file instead of `node.yaml`.
    pub(crate) config: Option<PathBuf>,
    url: tokio::sync::OnceCell<String>,
}

/// Directory of the claims' metadata files, below the CDI directory.
const METADATA: &str = "drayman.dev-metadata";

/// The names in a directory, sorted.
fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

impl Node {
    /// A node with three devices for claims and one for an extended resource. Without root, skips the test and returns `None`.
    pub(crate) fn new() -> Option<Self> {
        if !is_root() {
            return None;
        }
        Some(Self::within(tempfile::tempdir().unwrap()))
    }

    /// A node in this directory.
    pub(crate) fn within(directory: tempfile::TempDir) -> Self {
        let node = Self {
            directory,
            api: Api::new(),
            config: None,
            url: tokio::sync::OnceCell::new(),
        };
        for directory in ["dev", "kubelet/device-plugins"] {
            std::fs::create_dir_all(node.path(directory)).unwrap();
        }
        for (number, name) in ["test-0", "test-1", "test-2", "camera-0"].into_iter().enumerate() {
            node.device(name, u32::try_from(number).unwrap());
        }
        let configuration = "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n\
            - {name: test, paths: [\"/dev/test-*\"]}\n\
            - {name: camera, mode: extended-resource, resourceName: example.com/camera, paths: [\"/dev/camera-*\"]}\n";
        std::fs::write(node.path("node.yaml"), configuration).unwrap();
        node
    }

    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.directory.path().join(path)
    }

    pub(crate) fn device(&self, name: &str, minor: u32) {
        self.device_of(name, 240, minor);
    }

    pub(crate) fn device_of(&self, name: &str, major: u32, minor: u32) {
        let path = self.path("dev").join(name);
        mknodat(
            CWD,
            path,
            FileType::CharacterDevice,
            Mode::RUSR | Mode::WUSR,
            makedev(major, minor),
        )
        .unwrap();
    }

    pub(crate) fn options(&self) -> NodeOptions {
        let mut options = NodeOptions::new(
            "node-a",
            self.config.clone().unwrap_or_else(|| self.path("node.yaml")),
            self.api.client(),
        );
        options.kubelet_root = self.path("kubelet");
        options.device_plugin_dir = self.path("kubelet/device-plugins");
        options.cdi_dir = self.path("cdi");
        options.host = HostPaths {
            dev: self.path("dev"),
            ..HostPaths::default()
        };
        options
    }

    /// URL of the API server for a companion in another process.
    pub(crate) async fn url(&self) -> &str {
        self.url.get_or_init(|| self.api.listen()).await
    }

    /// Command-line options for the directories of this node.
    pub(crate) fn directories(&self) -> Vec<String> {
        [
            ("--kubelet-root-dir", "kubelet"),
            ("--device-plugin-dir", "kubelet/device-plugins"),
            ("--cdi-root", "cdi"),
        ]
        .map(|(option, path)| format!("{option}={}", self.path(path).display()))
        .into()
    }

    /// Writes kubelet's checkpoint of claims, in the format of kubelet 1.30.
    pub(crate) fn kubelet_lists(&self, claims: &[(&str, &[&str])]) {
        let entry = |(uid, devices): &(&str, &[&str])| {
            json!({
                "DriverName": "drayman.dev", "ClassName": "test", "ClaimUID": uid, "ClaimName": "claim",
                "Namespace": "default", "PodUIDs": {"5b6e": {}},
                "ResourceHandles": [{"driverName": "drayman.dev", "data": handle(uid, "n-1", devices)}],
                "CDIDevices": {"drayman.dev": [format!("drayman.dev/claim={uid}")]},
            })
        };
        let entries: Vec<Value> = claims.iter().map(entry).collect();
        let list = json!({"version": "v1", "entries": entries, "checksum": 1});
        let path = self.path("kubelet/dra_manager_state");
        let temporary = self.path("kubelet/dra_manager_state.new");
        std::fs::write(&temporary, list.to_string()).unwrap();
        std::fs::rename(temporary, path).unwrap();
    }

    pub(crate) fn start(&self) -> Process {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let shutdown = CancellationToken::new();
        let task = runtime.spawn(run(self.options(), shutdown.clone()));
        Process {
            runtime: Some(runtime),
            shutdown,
            task: Some(task),
            kubelet: self.path("kubelet"),
        }
    }

    pub(crate) fn dra_socket(&self) -> PathBuf {
        self.path("kubelet/plugins/drayman.dev/dra.sock")
    }

    pub(crate) async fn until_exists(&self, path: &Path) {
        until_exists(path, true).await;
    }

    pub(crate) async fn until_gone(&self, path: &Path) {
        until_exists(path, false).await;
    }

    /// A kubelet client of the companion.
    pub(crate) async fn kubelet(&self) -> Kubelet {
        self.kubelet_at(&self.dra_socket()).await
    }

    /// A kubelet client of the companion in structured mode.
    pub(crate) async fn structured_kubelet(&self) -> StructuredKubelet {
        self.structured_kubelet_at(&self.dra_socket()).await
    }

    /// As [`Node::structured_kubelet`], for a socket at another path.
    pub(crate) async fn structured_kubelet_at(&self, socket: &Path) -> StructuredKubelet {
        let client = self.connected(socket, DraPluginClient::new).await;
        StructuredKubelet { client }
    }

    /// Stores a structured claim in the API server, reserved for a pod.
    pub(crate) fn allocate(&self, name: &str, uid: &str, devices: &[&str]) {
        let claim = structured_claim(name, uid, devices);
        self.api.set(|state| {
            state.stored_claims.insert(name.into(), claim);
        });
    }

    /// As [`Node::kubelet`], for a socket at another path.
    pub(crate) async fn kubelet_at(&self, socket: &Path) -> Kubelet {
        let client = self.connected(socket, NodeClient::new).await;
        Kubelet { client }
    }

    async fn connected<T>(&self, socket: &Path, client: fn(Channel) -> T) -> T {
        let socket = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
        let start = Instant::now();
        loop {
            // A killed companion leaves its socket behind.
            match socket.connect().await {
                Ok(channel) => return client(channel),
                Err(error) => assert!(start.elapsed() < Duration::from_secs(20), "no companion: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// The socket of an extended resource.
    pub(crate) fn plugin_socket(&self, resource: &str) -> PathBuf {
        let paths = KubeletPaths {
            root_dir: self.path("kubelet"),
            device_plugin_dir: self.path("kubelet/device-plugins"),
        };
        paths.device_plugin_socket(resource).path
    }

    /// A kubelet client of an extended resource.
    pub(crate) async fn plugin(&self, resource: &str) -> DevicePluginClient<Channel> {
        let socket = self.plugin_socket(resource);
        self.until_exists(&socket).await;
        let socket = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
        DevicePluginClient::new(socket.connect().await.unwrap())
    }

    /// The ListAndWatch stream of an extended resource.
    pub(crate) async fn plugin_lists(&self, resource: &str) -> Streaming<ListAndWatchResponse> {
        let mut plugin = self.plugin(resource).await;
        plugin.list_and_watch(Empty {}).await.unwrap().into_inner()
    }

    /// The CDI files, sorted.
    pub(crate) fn cdi_files(&self) -> Vec<String> {
        let mut names = names(&self.path("cdi"));
        names.retain(|name| name != METADATA);
        names
    }

    /// The uids of the claims with metadata files, sorted.
    pub(crate) fn claims_with_metadata(&self) -> Vec<String> {
        let directory = self.path("cdi").join(METADATA);
        if directory.exists() {
            names(&directory)
        } else {
            Vec::new()
        }
    }

    pub(crate) fn checkpoint(&self) -> String {
        std::fs::read_to_string(self.path("kubelet/plugins/drayman.dev/checkpoint.json")).unwrap()
    }

    /// Waits until the checkpoint on disk meets a condition and no write is in progress.
    pub(crate) async fn until_checkpoint(&self, such: impl Fn(&str) -> bool) {
        let path = self.path("kubelet/plugins/drayman.dev/checkpoint.json");
        let half = path.with_extension("json.tmp");
        let start = Instant::now();
        while half.exists() || !std::fs::read_to_string(&path).is_ok_and(|text| such(&text)) {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "the checkpoint stays: {:?}",
                std::fs::read_to_string(&path)
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Waits until a file exists, or no longer does.
async fn until_exists(path: &Path, wanted: bool) {
    let start = Instant::now();
    while path.exists() != wanted {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "{} exists: {}",
            path.display(),
            !wanted
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A companion that can be stopped or killed.
pub(crate) struct Process {
    runtime: Option<Runtime>,
    shutdown: CancellationToken,
    task: Option<JoinHandle<Result<(), NodeError>>>,
    kubelet: PathBuf,
}

impl Process {
    pub(crate) async fn stop(mut self) -> Result<(), NodeError> {
        self.shutdown.cancel();
        self.ended().await
    }

    pub(crate) async fn ended(&mut self) -> Result<(), NodeError> {
        let task = self.task.take().unwrap();
        tokio::time::timeout(Duration::from_secs(20), task)
            .await
            .expect("it ends in time")
            .unwrap()
    }

    /// Drops the companion without cleanup and waits until its sockets refuse connections. A concurrent test may have just forked: until
    /// exec, its child has copies of this process's sockets, so the kernel would still accept connections.
    pub(crate) fn kill(self) {
        let sockets = sockets_below(&self.kubelet);
        drop(self);
        let start = Instant::now();
        for socket in sockets {
            while UnixStream::connect(&socket).is_ok() {
                assert!(
                    start.elapsed() < Duration::from_secs(20),
                    "a process still listens at {}",
                    socket.display()
                );
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Drops all tasks at their current await point, without any shutdown.
        if let Some(runtime) = self.runtime.take() {
            std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)))
                .join()
                .unwrap();
        }
    }
}

fn sockets_below(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(sort) if sort.is_dir() => found.extend(sockets_below(&entry.path())),
            Ok(sort) if sort.is_socket() => found.push(entry.path()),
            _ => {}
        }
    }
    found
}

pub(crate) struct Kubelet {
    client: NodeClient<Channel>,
}

impl Kubelet {
    /// Returns the CDI ids, or the error of the claim.
    pub(crate) async fn prepare(&mut self, uid: &str, devices: &[&str]) -> Result<Vec<String>, String> {
        self.prepare_claim(claim(uid, "n-1", devices)).await
    }

    /// As [`Kubelet::prepare`], for any claim.
    pub(crate) async fn prepare_claim(&mut self, claim: Claim) -> Result<Vec<String>, String> {
        let uid = claim.uid.clone();
        let answer = self
            .client
            .node_prepare_resources(NodePrepareResourcesRequest { claims: vec![claim] })
            .await;
        let answer = answer.map_err(|status| status.to_string())?.into_inner();
        let entry = answer
            .claims
            .into_iter()
            .find(|entry| entry.key == uid)
            .expect("an entry for the claim");
        let value = entry.value.expect("a value");
        if value.error.is_empty() {
            Ok(value.cdi_devices)
        } else {
            Err(value.error)
        }
    }

    pub(crate) async fn unprepare(&mut self, uid: &str) -> Result<(), String> {
        let claim = claim(uid, "n-1", &[]);
        let answer = self
            .client
            .node_unprepare_resources(NodeUnprepareResourcesRequest { claims: vec![claim] })
            .await;
        let answer = answer.map_err(|status| status.to_string())?.into_inner();
        let entry = answer
            .claims
            .into_iter()
            .find(|entry| entry.key == uid)
            .expect("an entry for the claim");
        let error = entry.value.expect("a value").error;
        if error.is_empty() { Ok(()) } else { Err(error) }
    }
}

/// Kubelet in structured mode.
pub(crate) struct StructuredKubelet {
    client: DraPluginClient<Channel>,
}

fn structured_request(name: &str, uid: &str) -> dra_v1::Claim {
    dra_v1::Claim {
        namespace: "default".into(),
        uid: uid.into(),
        name: name.into(),
    }
}

impl StructuredKubelet {
    /// Returns the CDI ids, or the error of the claim.
    pub(crate) async fn prepare(&mut self, name: &str, uid: &str) -> Result<Vec<String>, String> {
        self.prepare_all(&[(name, uid)]).await?.remove(0)
    }

    /// As [`StructuredKubelet::prepare`], for several claims in one call.
    pub(crate) async fn prepare_all(
        &mut self,
        claims: &[(&str, &str)],
    ) -> Result<Vec<Result<Vec<String>, String>>, String> {
        let request = dra_v1::NodePrepareResourcesRequest {
            claims: claims
                .iter()
                .map(|(name, uid)| structured_request(name, uid))
                .collect(),
        };
        let answer = self.client.node_prepare_resources(request).await;
        let answer = answer.map_err(|status| status.to_string())?.into_inner();
        assert_eq!(answer.claims.len(), claims.len(), "an entry for each claim");
        let entry = |uid: &str| {
            let mut entries = answer.claims.iter();
            let entry = entries.find(|entry| entry.key == uid).expect("an entry");
            let value = entry.value.clone().expect("a value");
            if value.error.is_empty() {
                let devices = value.devices.into_iter();
                Ok(devices.flat_map(|device| device.cdi_device_ids).collect())
            } else {
                Err(value.error)
            }
        };
        Ok(claims.iter().map(|(_, uid)| entry(uid)).collect())
    }

    pub(crate) async fn unprepare(&mut self, name: &str, uid: &str) -> Result<(), String> {
        let request = dra_v1::NodeUnprepareResourcesRequest {
            claims: vec![structured_request(name, uid)],
        };
        let answer = self.client.node_unprepare_resources(request).await;
        let mut answer = answer.map_err(|status| status.to_string())?.into_inner();
        let error = answer.claims.remove(0).value.expect("a value").error;
        if error.is_empty() { Ok(()) } else { Err(error) }
    }
}

/// A claim as allocated by the scheduler.
pub(crate) fn structured_claim(name: &str, uid: &str, devices: &[&str]) -> Value {
    let result = |device: &&str| json!({"request": "device", "driver": "drayman.dev", "pool": "node-a", "device": device});
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default", "uid": uid},
        "spec": {"devices": {"requests": [{"name": "device", "exactly": {"deviceClassName": "test"}}]}},
        "status": {
            "allocation": {"devices": {"results": devices.iter().map(result).collect::<Vec<_>>()}},
            "reservedFor": [{"resource": "pods", "name": "p", "uid": "p-1"}],
        },
    })
}

/// The controller's resource handle.
pub(crate) fn handle(uid: &str, node_uid: &str, devices: &[&str]) -> String {
    let device = |name: &&str| HandleDevice {
        request: "device".into(),
        device: (*name).into(),
    };
    let handle = DeviceHandle {
        version: VERSION,
        claim_uid: uid.into(),
        node_name: "node-a".into(),
        node_uid: node_uid.into(),
        devices: devices.iter().map(device).collect(),
    };
    handle.to_data().unwrap()
}

/// A claim as requested by kubelet.
pub(crate) fn claim(uid: &str, node_uid: &str, devices: &[&str]) -> Claim {
    Claim {
        namespace: "default".into(),
        uid: uid.into(),
        name: "claim".into(),
        resource_handle: handle(uid, node_uid, devices),
        structured_resource_handle: None,
    }
}
