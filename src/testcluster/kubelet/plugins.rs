//! Plugin registration: kubelet's plugin watcher for DRA drivers, and device plugins.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

use super::wire::Calls;
use crate::api::proto::device_plugin_v1beta1::device_plugin_client::DevicePluginClient;
use crate::api::proto::device_plugin_v1beta1::registration_server::{Registration, RegistrationServer};
use crate::api::proto::device_plugin_v1beta1::{Empty, RegisterRequest};
use crate::api::proto::plugin_registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};

/// Poll interval of the plugin watcher. The real one uses inotify and reconciles about every second.
const LOOK: Duration = Duration::from_millis(100);
/// Deadline of GetInfo.
const INFO: Duration = Duration::from_secs(1);
/// Deadline of NotifyRegistrationStatus.
const NOTIFY: Duration = Duration::from_secs(5);

/// Devices of a device plugin; the value is `true` if healthy.
pub(crate) type Devices = BTreeMap<String, bool>;

/// Registered plugins.
#[derive(Debug, Default)]
pub(crate) struct Plugins {
    /// Service sockets of DRA drivers by driver name.
    pub(crate) drivers: BTreeMap<String, PathBuf>,
    /// Clients and devices of device plugins by resource.
    pub(crate) resources: BTreeMap<String, (DevicePluginClient<Channel>, Devices)>,
}

/// Shared state of a node's plugins.
#[derive(Clone, Debug)]
pub(crate) struct Registry {
    pub(crate) plugins: Arc<Mutex<Plugins>>,
    pub(crate) changed: watch::Sender<u64>,
    directory: PathBuf,
    calls: Calls,
}

impl Registry {
    pub(crate) fn new(directory: PathBuf, calls: Calls) -> Self {
        Self {
            plugins: Arc::default(),
            changed: watch::Sender::new(0),
            directory,
            calls,
        }
    }

    pub(crate) fn with<T>(&self, look: impl FnOnce(&mut Plugins) -> T) -> T {
        look(&mut self.plugins.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn tell(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    /// Accepts device plugin registrations on `kubelet.sock` until shutdown.
    pub(crate) async fn serve(self, shutdown: CancellationToken) -> std::io::Result<()> {
        let socket = self.directory.join("kubelet.sock");
        match std::fs::remove_file(&socket) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(socket)?;
        Server::builder()
            .add_service(RegistrationServer::new(self))
            .serve_with_incoming_shutdown(UnixListenerStream::new(listener), shutdown.cancelled_owned())
            .await
            .map_err(std::io::Error::other)
    }

    /// Watches the plugin registration directory until shutdown.
    pub(crate) async fn watch(self, directory: PathBuf, shutdown: CancellationToken) {
        let mut known: BTreeMap<PathBuf, (u64, String)> = BTreeMap::new();
        loop {
            let sockets = sockets(&directory);
            let gone: Vec<PathBuf> = known
                .keys()
                .filter(|path| !sockets.contains_key(*path))
                .cloned()
                .collect();
            for path in gone {
                if let Some((_, name)) = known.remove(&path) {
                    self.with(|plugins| plugins.drivers.remove(&name));
                    self.tell();
                }
            }
            for (path, inode) in sockets {
                if known.get(&path).is_none_or(|(known, _)| *known != inode)
                    && let Some((name, service)) = register(&path, &self.calls).await
                {
                    self.with(|plugins| plugins.drivers.insert(name.clone(), service));
                    known.insert(path, (inode, name));
                    self.tell();
                }
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(LOOK) => {}
            }
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
                self.tell();
            }
        }
        self.with(|plugins| {
            if let Some((_, devices)) = plugins.resources.get_mut(&resource) {
                for healthy in devices.values_mut() {
                    *healthy = false;
                }
            }
        });
        self.tell();
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
async fn register(socket: &Path, calls: &Calls) -> Option<(String, PathBuf)> {
    const SERVICE: &str = "/pluginregistration.Registration";
    let info: PluginInfo = calls
        .call(socket, &format!("{SERVICE}/GetInfo"), &InfoRequest {}, INFO)
        .await
        .ok()?;
    let mut versions = info.supported_versions.iter();
    let accepted = info.r#type == "DRAPlugin" && versions.any(|version| version.starts_with("1."));
    let status = RegistrationStatus {
        plugin_registered: accepted,
        error: if accepted {
            String::new()
        } else {
            "no handler for this type or version".to_owned()
        },
    };
    let _: RegistrationStatusResponse = calls
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
    accepted.then_some((info.name, endpoint))
}
