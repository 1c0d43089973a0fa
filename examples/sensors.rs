//! A vendor's driver for both kubelet APIs: sensors that the vendor's daemon lists in a directory.
//!
//! Each file in `SENSORS_DIR` is a sensor: its name is the serial number, its content the path of the device node. While a claim holds a
//! sensor, `<serial>.claim` contains its uid, in place of the device configuration of a real driver.
//!
//! A ResourceClass with `driverName: sensors.example.com` and DeviceClassParameters with `kind: sensor` make the sensors claimable in
//! classic mode, through `drayman controller --driver-name sensors.example.com`. Containers can also request `sensors.example.com/sensor:
//! 1` in their limits.
//!
//! Run it on a node as root with `NODE_NAME` set: `cargo run --example sensors`. It uses the same kubeconfig as kubectl.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use drayman::node::driver::{
    AttributeValue, ContainerEdits, Device, DeviceNode, Mode, NodeDriver, NodeDriverError, PreparedClaim,
};
use drayman::node::{ExtendedResource, Node};
use futures::{Stream, StreamExt as _};
use tokio::signal::unix::{SignalKind, signal};
use tokio_stream::wrappers::IntervalStream;
use tokio_util::sync::CancellationToken;

/// The sensors of this node.
pub(crate) struct Sensors {
    pub(crate) directory: PathBuf,
}

/// Serial numbers and device nodes.
fn find(directory: &Path) -> io::Result<BTreeMap<String, String>> {
    let mut sensors = BTreeMap::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        // Skips a file that cannot be read: the daemon may have removed it meanwhile.
        if path.extension().is_none()
            && let Some(serial) = path.file_name().and_then(|name| name.to_str())
            && let Ok(node) = fs::read_to_string(&path)
        {
            sensors.insert(serial.to_owned(), node.trim().to_owned());
        }
    }
    Ok(sensors)
}

impl NodeDriver for Sensors {
    fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static {
        let device = |(serial, path): (String, String)| Device {
            name: format!("sensor-{serial}"),
            kind: "sensor".to_owned(),
            // A device is used through the API that requests it first: by a claim or in the limits of a container.
            mode: Mode::Both,
            unhealthy: (!Path::new(&path).exists()).then(|| format!("{path} is not there")),
            attributes: [(
                "sensors.example.com/serial".to_owned(),
                AttributeValue::string(serial),
            )]
            .into_iter()
            .collect(),
            ..Device::default()
        };
        let directory = self.directory.clone();
        // Polls once a second. The companion ignores unchanged lists.
        IntervalStream::new(tokio::time::interval(Duration::from_secs(1))).map(move |_| {
            let found = find(&directory).unwrap_or_default();
            found.into_iter().map(device).collect()
        })
    }

    async fn container_edits(&self, device: &str) -> Result<ContainerEdits, NodeDriverError> {
        let gone = |problem: String| NodeDriverError::Gone {
            device: device.to_owned(),
            problem,
        };
        let sensors = find(&self.directory).map_err(|error| gone(error.to_string()))?;
        let path = sensors
            .get(serial(device))
            .ok_or_else(|| gone("the vendor's daemon does not list it".to_owned()))?;
        Ok(ContainerEdits {
            device_nodes: vec![DeviceNode {
                host_path: path.clone(),
                container_path: format!("/dev/{device}"),
                permissions: "r".to_owned(),
            }],
            ..ContainerEdits::default()
        })
    }

    async fn prepare(&self, claim: &PreparedClaim) -> Result<ContainerEdits, NodeDriverError> {
        let mut all = ContainerEdits::default();
        for device in &claim.devices {
            all.extend(self.container_edits(device).await?);
            fs::write(self.claim_file(device), &claim.uid).map_err(|error| failed(device, &error))?;
        }
        Ok(all)
    }

    async fn unprepare(&self, claim: &PreparedClaim) -> Result<(), NodeDriverError> {
        for device in &claim.devices {
            match fs::remove_file(self.claim_file(device)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(device, &error)),
                _ => {}
            }
        }
        Ok(())
    }
}

impl Sensors {
    fn claim_file(&self, device: &str) -> PathBuf {
        self.directory.join(format!("{}.claim", serial(device)))
    }
}

fn serial(device: &str) -> &str {
    device.strip_prefix("sensor-").unwrap_or(device)
}

fn failed(device: &str, error: &io::Error) -> NodeDriverError {
    NodeDriverError::Failed {
        device: device.to_owned(),
        problem: error.to_string(),
    }
}

#[tokio::main]
pub(crate) async fn main() -> anyhow::Result<()> {
    let node_name =
        env::var("NODE_NAME").context("NODE_NAME is not set: the name of this machine's Node object")?;
    let directory = env::var_os("SENSORS_DIR").map_or_else(|| "/run/sensors".into(), PathBuf::from);
    tracing_subscriber::fmt().init();
    rustls::crypto::ring::default_provider().install_default().ok();
    let client = kube::Client::try_default().await?;
    let shutdown = CancellationToken::new();
    let (mut terminate, stop) = (signal(SignalKind::terminate())?, shutdown.clone());
    tokio::spawn(async move { terminate.recv().await.map(|()| stop.cancel()) });
    let resource = ExtendedResource {
        also_by_claims: true,
        ..ExtendedResource::of_kind("sensor")
    };
    let node = Node::builder(Sensors { directory }, node_name, client)
        .driver_name("sensors.example.com")
        .extended_resource("sensors.example.com/sensor", resource);
    Ok(node.run(shutdown).await?)
}
