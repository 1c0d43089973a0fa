//! Plugin registration: kubelet's plugin watcher for DRA drivers, and device plugins.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

use super::grpc_client::{GrpcClient, hold_connection};
use crate::api::proto::device_plugin_v1beta1::device_plugin_client::DevicePluginClient;
use crate::api::proto::device_plugin_v1beta1::registration_server::{Registration, RegistrationServer};
use crate::api::proto::device_plugin_v1beta1::{Empty, RegisterRequest};
use crate::api::proto::plugin_registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use crate::testcluster::api::ClusterMode;

/// Poll interval of the plugin watcher. The real one uses inotify and reconciles about every second.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Deadline of GetInfo.
const INFO: Duration = Duration::from_secs(1);
/// Deadline of NotifyRegistrationStatus.
const NOTIFY: Duration = Duration::from_secs(5);

/// Pause before a lost connection to a plugin is opened again (gRPC's first backoff).
const RECONNECT: Duration = Duration::from_secs(1);
/// Time without a connected plugin after which the driver's ResourceSlices are deleted (`defaultWipingDelay`).
const WIPING_DELAY: Duration = Duration::from_secs(30);

/// Returns whether kubelet knows one of the versions of a plugin: before 1.32, API versions; later, services. Kubelet calls the first
/// service that it knows. Only `v1` is simulated, which plugins name before `v1beta1`.
fn is_known(mode: ClusterMode, versions: &[String]) -> bool {
    versions.iter().any(|version| match mode {
        ClusterMode::Classic => version.starts_with("1."),
        ClusterMode::Structured => version == "v1.DRAPlugin",
    })
}

/// A registered DRA plugin.
#[derive(Clone, Debug)]
pub(crate) struct Plugin {
    /// Service socket.
    pub(crate) endpoint: PathBuf,
    /// Whether kubelet's idle connection to the socket is open.
    connected: bool,
}

/// Registered plugins.
#[derive(Debug, Default)]
pub(crate) struct Plugins {
    /// DRA plugins by driver name, in the order of their registration.
    drivers: BTreeMap<String, Vec<Plugin>>,
    /// When the ResourceSlices of drivers without a connected plugin are deleted.
    wipes: BTreeMap<String, Instant>,
    /// Clients and devices of device plugins by resource; the value of a device is `true` if it is healthy.
    pub(crate) resources: BTreeMap<String, (DevicePluginClient<Channel>, BTreeMap<String, bool>)>,
}

impl Plugins {
    /// Returns the plugin of a driver: the newest that is connected, else the newest.
    pub(crate) fn driver(&self, name: &str) -> Option<&Plugin> {
        let plugins = self.drivers.get(name)?;
        plugins
            .iter()
            .rfind(|plugin| plugin.connected)
            .or_else(|| plugins.last())
    }

    /// Adds a plugin. Before 1.33, a driver has one plugin.
    fn add(&mut self, mode: ClusterMode, driver: &str, plugin: Plugin) {
        let plugins = self.drivers.entry(driver.to_owned()).or_default();
        plugins.retain(|known| mode == ClusterMode::Structured && known.endpoint != plugin.endpoint);
        plugins.push(plugin);
        self.plan_wipe(driver);
    }

    fn remove(&mut self, driver: &str, endpoint: &Path) {
        if let Some(plugins) = self.drivers.get_mut(driver) {
            plugins.retain(|plugin| plugin.endpoint != endpoint);
            if plugins.is_empty() {
                self.drivers.remove(driver);
            }
        }
        self.plan_wipe(driver);
    }

    fn connect(&mut self, driver: &str, endpoint: &Path, connected: bool) {
        let plugins = self.drivers.get_mut(driver).into_iter().flatten();
        for plugin in plugins.filter(|plugin| plugin.endpoint == endpoint) {
            plugin.connected = connected;
        }
        self.plan_wipe(driver);
    }

    /// Plans the deletion of a driver's ResourceSlices while none of its plugins is connected.
    fn plan_wipe(&mut self, driver: &str) {
        let plugins = self.drivers.get(driver).into_iter().flatten();
        if plugins.into_iter().any(|plugin| plugin.connected) {
            self.wipes.remove(driver);
        } else {
            let end = Instant::now() + WIPING_DELAY;
            self.wipes.entry(driver.to_owned()).or_insert(end);
        }
    }

    /// Takes the drivers whose ResourceSlices are due for deletion.
    pub(crate) fn take_wipes(&mut self) -> Vec<String> {
        let now = Instant::now();
        let (due, later) = std::mem::take(&mut self.wipes)
            .into_iter()
            .partition(|(_, end)| *end <= now);
        self.wipes = later;
        BTreeMap::into_keys(due).collect()
    }
}

/// Shared state of a node's plugins.
#[derive(Clone, Debug)]
pub(crate) struct Registry {
    pub(crate) plugins: Arc<Mutex<Plugins>>,
    pub(crate) changed: watch::Sender<u64>,
    directory: PathBuf,
    grpc: GrpcClient,
    mode: ClusterMode,
}

impl Registry {
    pub(crate) fn new(mode: ClusterMode, directory: PathBuf, grpc: GrpcClient) -> Self {
        Self {
            mode,
            plugins: Arc::default(),
            changed: watch::Sender::new(0),
            directory,
            grpc,
        }
    }

    pub(crate) fn with<T>(&self, access: impl FnOnce(&mut Plugins) -> T) -> T {
        access(&mut self.plugins.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn notify(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    /// Accepts device plugin registrations on `kubelet.sock` until shutdown.
    pub(crate) async fn serve(self, shutdown: CancellationToken) -> std::io::Result<()> {
        let connections = listen(&self.directory)?;
        Server::builder()
            .add_service(RegistrationServer::new(self))
            .serve_with_incoming_shutdown(connections, shutdown.cancelled_owned())
            .await
            .map_err(std::io::Error::other)
    }

    /// Watches the plugin registration directory until shutdown.
    pub(crate) async fn watch(self, directory: PathBuf, shutdown: CancellationToken) {
        let mut known: BTreeMap<PathBuf, Registered> = BTreeMap::new();
        loop {
            let sockets = sockets(&directory);
            let gone: Vec<PathBuf> = known
                .keys()
                .filter(|path| !sockets.contains_key(*path))
                .cloned()
                .collect();
            for path in gone {
                if let Some(gone) = known.remove(&path) {
                    self.with(|plugins| plugins.remove(&gone.driver, &gone.endpoint));
                    self.notify();
                }
            }
            for (path, inode) in sockets {
                if known.get(&path).is_none_or(|known| known.inode != inode)
                    && let Some((driver, plugin)) = register(&path, &self.grpc, self.mode).await
                {
                    let endpoint = plugin.endpoint.clone();
                    self.with(|plugins| {
                        if let Some(old) = known.remove(&path) {
                            plugins.remove(&old.driver, &old.endpoint);
                        }
                        plugins.add(self.mode, &driver, plugin);
                    });
                    let connection = (self.mode == ClusterMode::Structured).then(|| {
                        let monitor = self.clone().monitor(driver.clone(), endpoint.clone());
                        AbortOnDropHandle::new(tokio::spawn(monitor))
                    });
                    let registered = Registered {
                        inode,
                        driver,
                        endpoint,
                        _connection: connection,
                    };
                    known.insert(path, registered);
                    self.notify();
                }
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
        }
    }

    /// Keeps a connection to a plugin open, as kubelet does since 1.33.
    async fn monitor(self, driver: String, endpoint: PathBuf) {
        loop {
            let connect = |connected| self.with(|plugins| plugins.connect(&driver, &endpoint, connected));
            hold_connection(&endpoint, || connect(true)).await;
            connect(false);
            tokio::time::sleep(RECONNECT).await;
        }
    }

    /// Follows a plugin's device stream. All devices become unhealthy when it ends.
    async fn follow(self, resource: String, mut client: DevicePluginClient<Channel>) {
        if let Ok(stream) = client.list_and_watch(Request::new(Empty {})).await {
            let mut stream = stream.into_inner();
            while let Ok(Some(update)) = stream.message().await {
                let devices = update
                    .devices
                    .into_iter()
                    .map(|device| (device.id, device.health == "Healthy"))
                    .collect();
                self.with(|plugins| {
                    plugins
                        .resources
                        .insert(resource.clone(), (client.clone(), devices))
                });
                self.notify();
            }
        }
        self.with(|plugins| {
            if let Some((_, devices)) = plugins.resources.get_mut(&resource) {
                for healthy in devices.values_mut() {
                    *healthy = false;
                }
            }
        });
        self.notify();
    }
}

#[tonic::async_trait]
impl Registration for Registry {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        if request.version != "v1beta1" {
            return Err(Status::invalid_argument(format!(
                "unsupported version {:?}",
                request.version
            )));
        }
        // kubelet dials the plugin before it responds.
        let socket = self.directory.join(&request.endpoint);
        let refused =
            |error: &dyn std::fmt::Display| Status::failed_precondition(format!("failed to dial: {error}"));
        let channel = Endpoint::from_shared(format!("unix://{}", socket.display()))
            .map_err(|error| refused(&error))?
            .connect()
            .await
            .map_err(|error| refused(&error))?;
        let mut client = DevicePluginClient::new(channel);
        client.get_device_plugin_options(Request::new(Empty {})).await?;
        tokio::spawn(self.clone().follow(request.resource_name, client));
        Ok(Response::new(Empty {}))
    }
}

/// A plugin that was found in the registration directory.
struct Registered {
    inode: u64,
    driver: String,
    endpoint: PathBuf,
    /// Ends with the registration.
    _connection: Option<AbortOnDropHandle<()>>,
}

/// Listens on kubelet's socket in a directory, where an earlier process may have left one.
pub(super) fn listen(directory: &Path) -> std::io::Result<UnixListenerStream> {
    let socket = directory.join("kubelet.sock");
    match std::fs::remove_file(&socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    Ok(UnixListenerStream::new(UnixListener::bind(socket)?))
}

/// Returns the sockets of a directory tree with their inodes; skips sockets whose name starts with a dot.
fn sockets(directory: &Path) -> BTreeMap<PathBuf, u64> {
    use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
    let mut sockets = BTreeMap::new();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        let Ok(metadata) = entry.path().symlink_metadata() else {
            continue;
        };
        if metadata.is_dir() {
            sockets.append(&mut self::sockets(&entry.path()));
        } else if !hidden && metadata.file_type().is_socket() {
            sockets.insert(entry.path(), metadata.ino());
        }
    }
    sockets
}

/// Queries a registration socket for its plugin and confirms the registration.
async fn register(socket: &Path, grpc: &GrpcClient, mode: ClusterMode) -> Option<(String, Plugin)> {
    const SERVICE: &str = "/pluginregistration.Registration";
    let info: PluginInfo = grpc
        .call(socket, &format!("{SERVICE}/GetInfo"), &InfoRequest {}, INFO)
        .await
        .ok()?;
    let is_known = info.r#type == "DRAPlugin" && is_known(mode, &info.supported_versions);
    let status = RegistrationStatus {
        plugin_registered: is_known,
        error: if is_known {
            String::new()
        } else {
            "no handler for this type or version".to_owned()
        },
    };
    let _: RegistrationStatusResponse = grpc
        .call(
            socket,
            &format!("{SERVICE}/NotifyRegistrationStatus"),
            &status,
            NOTIFY,
        )
        .await
        .ok()?;
    let endpoint = if info.endpoint.is_empty() {
        socket.to_path_buf()
    } else {
        PathBuf::from(info.endpoint)
    };
    let plugin = Plugin {
        endpoint,
        connected: false,
    };
    is_known.then_some((info.name, plugin))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRIVER: &str = "x.dev";

    fn plugin(endpoint: &str) -> Plugin {
        Plugin {
            endpoint: endpoint.into(),
            connected: false,
        }
    }

    fn endpoint(plugins: &Plugins) -> Option<&str> {
        plugins.driver(DRIVER)?.endpoint.to_str()
    }

    #[test]
    fn the_versions_of_a_plugin_must_be_those_of_the_mode() {
        for (versions, in_classic_mode, in_structured_mode) in [
            (&["v1.DRAPlugin", "v1beta1.DRAPlugin"][..], false, true),
            (&["v1alpha1.DRAResourceHealth", "v1.DRAPlugin"][..], false, true),
            (&["1.0.1"][..], true, false),
        ] {
            let versions: Vec<String> = versions.iter().map(|version| (*version).to_owned()).collect();
            assert_eq!(is_known(ClusterMode::Classic, &versions), in_classic_mode);
            assert_eq!(is_known(ClusterMode::Structured, &versions), in_structured_mode);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_newest_connected_plugin_is_called() {
        let mut plugins = Plugins::default();
        for endpoint in ["old", "new"] {
            plugins.add(ClusterMode::Structured, DRIVER, plugin(endpoint));
        }
        assert_eq!(endpoint(&plugins), Some("new"));
        plugins.connect(DRIVER, Path::new("old"), true);
        assert_eq!(endpoint(&plugins), Some("old"));
        plugins.connect(DRIVER, Path::new("new"), true);
        assert_eq!(endpoint(&plugins), Some("new"));
        plugins.remove(DRIVER, Path::new("new"));
        assert_eq!(endpoint(&plugins), Some("old"));
    }

    #[tokio::test(start_paused = true)]
    async fn slices_are_wiped_thirty_seconds_after_the_connection() {
        let mut plugins = Plugins::default();
        plugins.add(ClusterMode::Structured, DRIVER, plugin("socket"));
        plugins.connect(DRIVER, Path::new("socket"), true);
        plugins.connect(DRIVER, Path::new("socket"), false);
        tokio::time::advance(WIPING_DELAY / 2).await;
        // A second change does not extend the delay.
        plugins.remove(DRIVER, Path::new("socket"));
        assert!(plugins.take_wipes().is_empty());
        tokio::time::advance(WIPING_DELAY / 2).await;
        assert_eq!(plugins.take_wipes(), [DRIVER]);
        assert!(plugins.take_wipes().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_plugin_that_comes_back_keeps_its_slices() {
        let mut plugins = Plugins::default();
        plugins.add(ClusterMode::Structured, DRIVER, plugin("socket"));
        plugins.connect(DRIVER, Path::new("socket"), true);
        plugins.connect(DRIVER, Path::new("socket"), false);
        tokio::time::advance(WIPING_DELAY / 2).await;
        plugins.connect(DRIVER, Path::new("socket"), true);
        tokio::time::advance(WIPING_DELAY).await;
        assert!(plugins.take_wipes().is_empty());
    }
}
