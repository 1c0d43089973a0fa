//! A small conforming node driver that can break one rule. A file per device holds the UID of its claim.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use drayman::node::driver::{ContainerEdits, Device, DeviceNode, NodeDriver, NodeDriverError, PreparedClaim};
use drayman::testkit::{Environment, Rule};
use futures::Stream;
use futures::stream::{self, StreamExt as _};

pub(crate) struct TestNodeDriver {
    broken: Option<Rule>,
    directory: PathBuf,
    /// The number of earlier instances.
    number: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    calls: usize,
    /// UIDs of claims prepared by this process.
    prepared: Vec<String>,
}

const DEVICES: [&str; 2] = ["first", "second"];

impl TestNodeDriver {
    pub(crate) fn new(environment: &Environment, broken: Option<Rule>) -> Self {
        let directory = environment.directory().to_owned();
        let instances = directory.join("instances");
        let number = fs::read_to_string(&instances).map_or(0, |text| text.len());
        fs::write(&instances, "x".repeat(number + 1)).expect("a file");
        Self {
            broken,
            directory,
            number,
            state: Mutex::default(),
        }
    }

    fn breaks(&self, rule: Rule) -> bool {
        self.broken == Some(rule)
    }

    fn file(&self, device: &str) -> PathBuf {
        self.directory.join(format!("{device}.claim"))
    }

    fn hold(&self, device: &str, claim: &PreparedClaim) -> Result<(), NodeDriverError> {
        match fs::read_to_string(self.file(device)) {
            Ok(holder) if holder != claim.uid => Err(failed(device, format!("claim {holder} has it"))),
            _ => fs::write(self.file(device), &claim.uid).map_err(|error| failed(device, error.to_string())),
        }
    }
}

/// The devices prepared in a directory.
pub(crate) fn left_over(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".claim"))
        .collect()
}

fn failed(device: &str, problem: String) -> NodeDriverError {
    let device = device.to_owned();
    NodeDriverError::Failed { device, problem }
}

impl NodeDriver for TestNodeDriver {
    fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static {
        let name = |name: &str| match self.broken {
            Some(Rule::StableDevices) => format!("{name}-{}", self.number),
            Some(Rule::ServableDevices) => name.to_uppercase(),
            _ => name.to_owned(),
        };
        let list: Vec<Device> = DEVICES
            .iter()
            .map(|device| Device {
                name: name(device),
                kind: "test".to_owned(),
                ..Device::default()
            })
            .collect();
        let lists = if self.breaks(Rule::FirstListComes) {
            Vec::new()
        } else {
            vec![list]
        };
        stream::iter(lists).chain(stream::pending())
    }

    async fn container_edits(&self, device: &str) -> Result<ContainerEdits, NodeDriverError> {
        let calls = {
            let mut state = self.state.lock().expect("no panic");
            state.calls += 1;
            state.calls
        };
        let known = DEVICES.contains(&device) || device.starts_with("first") || device.starts_with("second");
        if !known && !self.breaks(Rule::UnknownDeviceIsRefused) {
            let (device, problem) = (device.to_owned(), "it is not plugged in".to_owned());
            return Err(NodeDriverError::Gone { device, problem });
        }
        let permissions = if self.breaks(Rule::UsableContainerEdits) {
            "all"
        } else {
            "rw"
        };
        let path = if self.breaks(Rule::ContainerEditsAreStable) {
            format!("/dev/{device}-{calls}")
        } else {
            format!("/dev/{device}")
        };
        Ok(ContainerEdits {
            device_nodes: vec![DeviceNode {
                host_path: "/dev/null".to_owned(),
                container_path: path,
                permissions: permissions.to_owned(),
            }],
            ..ContainerEdits::default()
        })
    }

    async fn prepare(&self, claim: &PreparedClaim) -> Result<ContainerEdits, NodeDriverError> {
        match self.broken {
            Some(Rule::ReturnsInTime) => std::future::pending().await,
            Some(Rule::NoPanic) => panic!("injected defect"),
            // Only the kit uses claims of these names.
            Some(Rule::ServesPods) if !claim.name.starts_with("claim-") => {
                return Err(failed("first", "not for pods".to_owned()));
            }
            Some(Rule::NodeSurvivesCrash) if self.number > 0 && !claim.name.starts_with("claim-") => {
                return Err(failed("first", "only the first process may".to_owned()));
            }
            _ => {}
        }
        let mut all = ContainerEdits::default();
        for device in &claim.devices {
            if self.breaks(Rule::FailedPrepareCanBeRolledBack) {
                self.hold(device, claim)?;
            }
            all.extend(self.container_edits(device).await?);
            self.hold(device, claim)?;
            if self.breaks(Rule::DroppedPrepareCanBeRolledBack) {
                let mark = self.directory.join("busy");
                if mark.exists() {
                    return Err(failed(device, "it is busy".to_owned()));
                }
                fs::write(&mark, "").map_err(|error| failed(device, error.to_string()))?;
                tokio::task::yield_now().await;
                fs::remove_file(&mark).map_err(|error| failed(device, error.to_string()))?;
            }
        }
        let again = {
            let mut state = self.state.lock().expect("no panic");
            let again = state.prepared.contains(&claim.uid);
            state.prepared.push(claim.uid.clone());
            again
        };
        if again && self.breaks(Rule::PrepareIsIdempotent) {
            return Err(failed("first", "it is prepared already".to_owned()));
        }
        let breaks = self.breaks(Rule::NodeSurvivesFailedCall) || self.breaks(Rule::NodeSurvivesSlowCall);
        if again && breaks && !claim.name.starts_with("claim-") {
            return Err(failed("first", "it is prepared already".to_owned()));
        }
        Ok(all)
    }

    async fn unprepare(&self, claim: &PreparedClaim) -> Result<(), NodeDriverError> {
        if self.breaks(Rule::NothingIsLeft) {
            let _ = fs::write(self.file("another"), "");
        }
        if self.breaks(Rule::FailedPrepareCanBeRolledBack) && claim.devices.len() > 1 {
            return Ok(());
        }
        for device in &claim.devices {
            if self.breaks(Rule::UnprepareIsForOneClaim) {
                for file in left_over(&self.directory) {
                    // The defect: changes all claims.
                    let _ = fs::write(self.directory.join(file), "none");
                }
                continue;
            }
            match fs::remove_file(self.file(device)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(failed(device, error.to_string()));
                }
                Err(_) if self.breaks(Rule::UnprepareIsIdempotent) => {
                    return Err(failed(device, "it was not prepared".to_owned()));
                }
                _ => {}
            }
        }
        Ok(())
    }
}
