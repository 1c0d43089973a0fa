//! Checks of `drayman doctor --this-node` on the machine itself.

mod containerd;
mod files;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::cli::diagnose::doctor::Finding;
use crate::cli::diagnose::gates;
use crate::cli::diagnose::nodes::{RUNTIME, without_runtime};
use crate::core::discovery::mounts;
use crate::node::container_runtime::SOCKETS;

/// Mounts visible to this process.
const MOUNTS: &str = "/proc/self/mountinfo";
/// Maximum length of a socket path in bytes: `sun_path` without its terminating NUL.
const SOCKET_PATH_MAX: usize = 107;

/// Input of the checks.
pub(super) struct Machine<'a> {
    /// Driver name.
    pub(super) driver: &'a str,
    /// Kubelet's root directory.
    pub(super) kubelet_root: &'a Path,
    /// Kubelet's directory of device plugins.
    pub(super) device_plugins: &'a Path,
    /// Where the companion writes CDI files.
    pub(super) cdi_root: &'a Path,
    /// Kubelet's configuration file.
    pub(super) kubelet_config: &'a Path,
    /// containerd's configuration file.
    pub(super) containerd_config: &'a Path,
    /// The container runtime's socket, if given.
    pub(super) runtime_socket: Option<&'a Path>,
}

/// Checks kubelet's directories and feature gate, the lengths of our socket paths, CDI in containerd, and the container
/// runtime's socket.
pub(super) fn look(machine: &Machine<'_>) -> Vec<Finding> {
    let mut findings = directories(machine.kubelet_root, machine.device_plugins);
    // Reads mounts and directories in this process's mount namespace.
    findings.extend(propagation(machine.kubelet_root, fs::read(MOUNTS)));
    findings.push(gate(machine.kubelet_config));
    findings.push(socket_lengths(machine.driver, machine.kubelet_root));
    findings.extend(containerd::look(
        machine.containerd_config,
        machine.cdi_root,
        containerd::installed,
    ));
    let usual = SOCKETS.map(Path::new);
    let named = machine.runtime_socket.as_ref().map(std::slice::from_ref);
    findings.push(runtime(named.unwrap_or(&usual)));
    findings
}

/// Checks whether a container runtime listens on one of these sockets.
fn runtime(sockets: &[&Path]) -> Finding {
    let connected = |socket: &&&Path| UnixStream::connect(socket).is_ok();
    if let Some(socket) = sockets.iter().find(connected) {
        return Finding::fine(RUNTIME, format!("listens at {}", socket.display()));
    }
    let paths: Vec<String> = sockets.iter().map(|path| path.display().to_string()).collect();
    without_runtime(&format!("nobody listens at {}", paths.join(", ")))
}

fn directories(kubelet_root: &Path, device_plugins: &Path) -> Vec<Finding> {
    let check = "kubelet";
    let mut findings = Vec::new();
    for name in ["plugins_registry", "plugins"] {
        let directory = kubelet_root.join(name);
        if !directory.is_dir() {
            findings.push(Finding::problem(
                check,
                format!("there is no directory {}", directory.display()),
                "kubelet makes it at its start: is --kubelet-root-dir kubelet's --root-dir?",
            ));
        }
    }
    let socket = device_plugins.join("kubelet.sock");
    if socket.exists() {
        findings.push(Finding::fine(
            check,
            format!("serves device plugins at {}", socket.display()),
        ));
    } else {
        findings.push(Finding::warning(
            check,
            format!("there is no {}", socket.display()),
            "kubelet does not run, or its device plugin directory is elsewhere (--device-plugin-dir)",
        ));
    }
    findings
}

/// Checks whether mounts and unmounts below kubelet's root directory propagate to the companion. A missing directory
/// has its own finding.
fn propagation(kubelet_root: &Path, mountinfo: io::Result<Vec<u8>>) -> Option<Finding> {
    let check = "kubelet";
    let real = fs::canonicalize(kubelet_root).ok()?;
    let root = kubelet_root.display();
    let unknown = |cause: String| {
        let message = format!("whether {root} lies on a shared mount is not known: {MOUNTS}: {cause}");
        Some(Finding::note(check, message))
    };
    let mountinfo = match mountinfo {
        Ok(mountinfo) => mountinfo,
        Err(error) => return unknown(error.to_string()),
    };
    let Some((point, is_shared)) = mounts::below(&mountinfo, real.as_os_str().as_bytes()) else {
        return unknown(format!("nothing that it lies on, in {} bytes", mountinfo.len()));
    };
    let point = String::from_utf8_lossy(&point).into_owned();
    Some(if is_shared {
        Finding::fine(check, format!("{root} lies on a shared mount, {point}"))
    } else {
        Finding::warning(
            check,
            format!("{root} lies on {point}, which is not a shared mount"),
            format!(
                "if there are kinds of mode both, or with node.readKubeletState in the chart: mount --make-rshared {point}, \
                 and see that it stays so after a boot"
            ),
        )
    })
}

/// The fields of kubelet's configuration used here.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct KubeletConfiguration {
    #[serde(default)]
    feature_gates: BTreeMap<String, bool>,
}

fn gate(config: &Path) -> Finding {
    let file = config.display().to_string();
    let text = match fs::read_to_string(config) {
        Ok(text) => text,
        Err(error) => {
            return Finding::note(
                "gates",
                format!(
                    "{file}: {error}; give kubelet's file by --kubelet-config, or look for {} in its --feature-gates",
                    gates::GATE
                ),
            );
        }
    };
    match serde_saphyr::from_str::<KubeletConfiguration>(&text) {
        Ok(read) => {
            let gate = |name: &str| read.feature_gates.get(name).copied();
            gates::configuration(&file, gate(gates::GATE), gate("AllAlpha"))
        }
        Err(error) => Finding::note("gates", format!("{file} is not kubelet's configuration: {error}")),
    }
}

fn socket_lengths(driver: &str, kubelet_root: &Path) -> Finding {
    let check = "sockets";
    // The longest socket path of every companion. The temporary name at bind is one dot longer.
    let longest = kubelet_root
        .join("plugins_registry")
        .join(driver)
        .join(".reg.sock");
    let length = longest.as_os_str().len();
    if length <= SOCKET_PATH_MAX {
        Finding::fine(
            check,
            format!("the longest path has {length} of {SOCKET_PATH_MAX} bytes"),
        )
    } else {
        Finding::problem(
            check,
            format!(
                "{} has {length} bytes, and a socket's path has at most {SOCKET_PATH_MAX}",
                longest.display()
            ),
            "take a shorter driver name, or a shorter root directory for kubelet",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::diagnose::doctor::Level;

    #[test]
    fn kubelet_s_file_is_read_for_the_gate() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("config.yaml");
        let level = |content: &str| {
            fs::write(&file, content).unwrap();
            gate(&file).level
        };
        let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nport: 10250\n";
        assert_eq!(level(head), Level::Warning);
        assert_eq!(
            level(&format!(
                "{head}featureGates: {{DynamicResourceAllocation: true}}\n"
            )),
            Level::Fine
        );
        assert_eq!(
            level(&format!(
                "{head}featureGates: {{DynamicResourceAllocation: false}}\n"
            )),
            Level::Problem
        );
        assert_eq!(level("- no map\n"), Level::Note);
        assert_eq!(gate(Path::new("/nowhere/config.yaml")).level, Level::Note);
    }

    #[test]
    fn a_machine_without_kubelet_is_told_so() {
        let directory = tempfile::tempdir().unwrap();
        let worst = |findings: Vec<Finding>| findings.into_iter().map(|finding| finding.level).max();
        let plugins = directory.path().join("device-plugins");
        assert_eq!(
            worst(directories(directory.path(), &plugins)),
            Some(Level::Problem)
        );
        for name in ["plugins_registry", "plugins", "device-plugins"] {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        fs::write(directory.path().join("device-plugins/kubelet.sock"), "").unwrap();
        assert_eq!(worst(directories(directory.path(), &plugins)), Some(Level::Fine));
        let elsewhere = directory.path().join("elsewhere");
        assert_eq!(
            worst(directories(directory.path(), &elsewhere)),
            Some(Level::Warning)
        );
    }

    #[test]
    fn a_root_directory_on_a_mount_that_is_not_shared_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let judge = |fields: &str, root: &Path| {
            let mountinfo = format!("22 1 8:1 / / rw {fields}- ext4 /dev/sda1 rw\n");
            propagation(root, Ok(mountinfo.into_bytes())).map(|finding| finding.level)
        };
        assert_eq!(judge("shared:1 ", directory.path()), Some(Level::Fine));
        assert_eq!(judge("", directory.path()), Some(Level::Warning));
        assert_eq!(judge("master:1 ", directory.path()), Some(Level::Warning));
        assert_eq!(judge("", &directory.path().join("gone")), None);
        // An unknown result is a note.
        let unknown = [Ok(Vec::new()), Err(io::Error::other("no /proc"))];
        for mountinfo in unknown {
            let told = propagation(directory.path(), mountinfo).map(|finding| finding.level);
            assert_eq!(told, Some(Level::Note));
        }
    }

    #[test]
    fn a_machine_without_a_runtime_socket_is_told_its_cost() {
        let directory = tempfile::tempdir().unwrap();
        let (there, gone) = (
            directory.path().join("cri.sock"),
            directory.path().join("gone.sock"),
        );
        let _listener = std::os::unix::net::UnixListener::bind(&there).unwrap();
        assert_eq!(runtime(&[&gone, &there]).level, Level::Fine);
        let told = runtime(&[&gone]);
        assert_eq!(told.level, Level::Note);
        assert!(told.message.contains("gone.sock") && told.message.contains("deleted by force"));
        assert!(told.fix.unwrap().contains("node.containerRuntimeSocket"));
    }

    #[test]
    fn a_path_that_is_too_long_for_a_socket_is_told_before_anything_fails() {
        let fine = socket_lengths("drayman.dev", Path::new("/var/lib/kubelet"));
        assert_eq!(fine.level, Level::Fine);
        let long = format!("/{}", "k".repeat(90));
        assert_eq!(
            socket_lengths("drayman.dev", Path::new(&long)).level,
            Level::Problem
        );
    }
}
