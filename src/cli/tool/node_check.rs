//! Checks this machine for `drayman doctor --this-node`: kubelet, the paths of sockets, and whether the container runtime reads CDI files.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fs;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use tokio::time::timeout;
use tonic::Status;
use tonic::transport::Endpoint;

use crate::api::proto::cri_v1::runtime_service_client::RuntimeServiceClient;
use crate::api::proto::cri_v1::{StatusRequest, VersionRequest};
use crate::cli::diagnose::doctor::DoctorFinding;
use crate::cli::diagnose::gates;
use crate::cli::diagnose::nodes::{RUNTIME, without_runtime};
use crate::cli::flags::{RootFlags, SocketFlags};
use crate::core::discovery::mounts;
use crate::node::container_runtime::SOCKETS;

/// Mounts visible to this process.
const MOUNTS: &str = "/proc/self/mountinfo";
/// Name of the checks of kubelet's directories.
const KUBELET: &str = "kubelet";
/// When the chart mounts kubelet's root directory, or a directory below it, so that mounts propagate.
const ROOT_IS_MOUNTED: &str = "if there are kinds of mode both, or with node.readKubeletState in the chart";
/// When the chart mounts the directory of the container runtime's socket.
const SOCKET_IS_MOUNTED: &str = "with node.containerRuntimeSocket in the chart";
/// Name of the check whether the container runtime reads CDI files.
const CDI: &str = "cdi";
/// Deadline of the queries to the container runtime. tonic bounds each answer to 4 MiB.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a socket path in bytes: `sun_path` without its terminating NUL.
const SOCKET_PATH_MAX: usize = 107;

/// Input of the checks.
pub(super) struct Machine<'a> {
    /// Driver name.
    pub(super) driver: &'a str,
    pub(super) roots: &'a RootFlags,
    pub(super) sockets: &'a SocketFlags,
    /// Kubelet's configuration file.
    pub(super) kubelet_config: &'a Path,
}

/// Checks kubelet's directories and feature gate, the lengths of our socket paths, mounts, and whether the container runtime listens
/// and reads CDI files.
pub(super) async fn check(machine: &Machine<'_>) -> Vec<DoctorFinding> {
    let kubelet_root = &machine.roots.kubelet_root_dir;
    let mut findings = directories(kubelet_root, &machine.sockets.device_plugin_dir);
    // Reads mounts and directories in this process's mount namespace.
    let mountinfo = || fs::read(MOUNTS);
    findings.extend(propagation(KUBELET, kubelet_root, ROOT_IS_MOUNTED, mountinfo()));
    let given = machine.sockets.container_runtime_socket.as_deref();
    // The chart mounts the directory only for a socket that its values name.
    if let Some(directory) = given.and_then(Path::parent) {
        findings.extend(propagation(RUNTIME, directory, SOCKET_IS_MOUNTED, mountinfo()));
    }
    findings.push(gate(machine.kubelet_config));
    findings.push(socket_lengths(machine.driver, kubelet_root));
    let usual = SOCKETS.map(Path::new);
    let given = given.as_ref().map(std::slice::from_ref);
    findings.extend(runtime(given.unwrap_or(&usual), &machine.roots.cdi_root).await);
    findings
}

/// Checks whether a container runtime listens on one of these sockets, and whether it reads CDI files in `cdi_root`.
async fn runtime(sockets: &[&Path], cdi_root: &Path) -> Vec<DoctorFinding> {
    let mut causes = Vec::new();
    for socket in sockets {
        match UnixStream::connect(socket) {
            Ok(_) => {
                let listens = DoctorFinding::fine(RUNTIME, format!("listens at {}", socket.display()));
                let cdi = match query(socket).await {
                    Ok(runtime) => reads_cdi(&runtime, cdi_root),
                    Err(cause) => vec![unknown(&format!("{}: {cause}", socket.display()))],
                };
                return [vec![listens], cdi].concat();
            }
            Err(error) => causes.push(format!("{}: {error}", socket.display())),
        }
    }
    let paths: Vec<String> = sockets.iter().map(|path| path.display().to_string()).collect();
    vec![
        without_runtime(&format!("no container runtime listens at {}", paths.join(", "))),
        unknown(&causes.join("; ")),
    ]
}

fn unknown(cause: &str) -> DoctorFinding {
    DoctorFinding::warning(
        CDI,
        format!("whether the container runtime reads CDI files is not known: {cause}"),
        "start the runtime, run this as root, and give the runtime's socket by --container-runtime-socket",
    )
}

/// A container runtime, as it describes itself over CRI.
#[derive(Debug)]
struct RuntimeInfo {
    /// Name and version.
    name: String,
    major: Option<u32>,
    /// Its effective configuration, in a format of its own.
    configuration: Option<String>,
}

async fn query(socket: &Path) -> Result<RuntimeInfo, String> {
    let queries = async {
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))
            .map_err(|error| error.to_string())?;
        let channel = endpoint.connect().await.map_err(|error| {
            let cause = error.source().map_or_else(String::new, ToString::to_string);
            format!("{error}: {cause}")
        })?;
        let mut client = RuntimeServiceClient::new(channel);
        let refused = |status: Status| format!("{}: {}", status.code(), status.message());
        let version = client
            .version(VersionRequest {})
            .await
            .map_err(refused)?
            .into_inner();
        let status = client
            .status(StatusRequest { verbose: true })
            .await
            .map_err(refused)?;
        let number = version.runtime_version.trim_start_matches('v');
        Ok(RuntimeInfo {
            name: format!("{} {number}", version.runtime_name),
            major: number.split('.').next().and_then(|major| major.parse().ok()),
            configuration: status.into_inner().info.remove("config"),
        })
    };
    let answered = timeout(TIMEOUT, queries).await;
    answered.unwrap_or_else(|_| Err(format!("no answer within {} s", TIMEOUT.as_secs())))
}

/// The fields of containerd's CRI configuration used here, as JSON of the running containerd.
#[derive(Debug, Default, serde::Deserialize)]
struct CriConfiguration {
    /// Absent in releases before 1.7 and in other runtimes.
    #[serde(rename = "enableCDI")]
    enable_cdi: Option<bool>,
    #[serde(rename = "cdiSpecDirs")]
    spec_dirs: Option<Vec<String>>,
}

fn reads_cdi(runtime: &RuntimeInfo, cdi_root: &Path) -> Vec<DoctorFinding> {
    let name = &runtime.name;
    let configuration = runtime.configuration.as_deref().unwrap_or("{}");
    let configuration: CriConfiguration = match serde_json::from_str(configuration) {
        Ok(configuration) => configuration,
        Err(error) => return vec![unknown(&format!("the configuration of {name}: {error}"))],
    };
    match configuration.enable_cdi {
        Some(true) => vec![
            DoctorFinding::fine(CDI, format!("{name} reads CDI files")),
            spec_dirs(name, &configuration.spec_dirs.unwrap_or_default(), cdi_root),
        ],
        Some(false) => {
            let section = match runtime.major {
                Some(0 | 1) => "io.containerd.grpc.v1.cri",
                _ => "io.containerd.cri.v1.runtime",
            };
            vec![DoctorFinding::problem(
                CDI,
                format!("{name} does not read CDI files"),
                format!("set enable_cdi = true in [plugins.\"{section}\"] and restart containerd"),
            )]
        }
        None if name.starts_with("containerd ") && matches!(runtime.major, Some(0 | 1)) => {
            vec![DoctorFinding::problem(
                CDI,
                format!("{name} has no CDI"),
                "upgrade to containerd 1.7 or later",
            )]
        }
        None => vec![DoctorFinding::note(
            CDI,
            format!("{name} does not report whether it reads CDI files; CRI-O reads them by default"),
        )],
    }
}

/// Checks whether the runtime's CDI directories include the companion's.
fn spec_dirs(runtime: &str, directories: &[String], cdi_root: &Path) -> DoctorFinding {
    // /var/run is usually a symlink to /run.
    let real = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mut all = directories.iter().map(|directory| real(Path::new(directory)));
    if all.any(|directory| directory == real(cdi_root)) {
        return DoctorFinding::fine(
            CDI,
            format!("{runtime} reads CDI files in {}", cdi_root.display()),
        );
    }
    let directories = if directories.is_empty() {
        "no directory".to_owned()
    } else {
        directories.join(", ")
    };
    DoctorFinding::problem(
        CDI,
        format!(
            "{runtime} reads CDI files in {directories}, and not in {}, where the companion writes them",
            cdi_root.display()
        ),
        "add the directory to cdi_spec_dirs and restart containerd, or give the companion one of these: --cdi-root, in the chart \
         node.cdiRoot",
    )
}

fn directories(kubelet_root: &Path, device_plugins: &Path) -> Vec<DoctorFinding> {
    let check = KUBELET;
    let mut findings = Vec::new();
    for name in ["plugins_registry", "plugins"] {
        let directory = kubelet_root.join(name);
        if !directory.is_dir() {
            findings.push(DoctorFinding::problem(
                check,
                format!("there is no directory {}", directory.display()),
                "kubelet creates it at its start: check that --kubelet-root-dir is kubelet's --root-dir",
            ));
        }
    }
    let socket = device_plugins.join("kubelet.sock");
    if socket.exists() {
        findings.push(DoctorFinding::fine(
            check,
            format!("serves device plugins at {}", socket.display()),
        ));
    } else {
        findings.push(DoctorFinding::warning(
            check,
            format!("there is no {}", socket.display()),
            "kubelet does not run, or its device plugin directory is elsewhere (--device-plugin-dir)",
        ));
    }
    findings
}

/// Checks whether mounts and unmounts below a directory propagate to the companion, which needs that under a condition. A missing
/// directory has its own finding.
fn propagation(
    check: &'static str,
    directory: &Path,
    condition: &str,
    mountinfo: io::Result<Vec<u8>>,
) -> Option<DoctorFinding> {
    let real = fs::canonicalize(directory).ok()?;
    let directory = directory.display();
    let unknown = |cause: String| {
        let message = format!("whether {directory} lies on a shared mount is not known: {MOUNTS}: {cause}");
        Some(DoctorFinding::note(check, message))
    };
    let mountinfo = match mountinfo {
        Ok(mountinfo) => mountinfo,
        Err(error) => return unknown(error.to_string()),
    };
    let Some((point, is_shared)) = mounts::below(&mountinfo, real.as_os_str().as_bytes()) else {
        return unknown(format!(
            "no mount contains it in the {} bytes read",
            mountinfo.len()
        ));
    };
    let point = String::from_utf8_lossy(&point).into_owned();
    Some(if is_shared {
        DoctorFinding::fine(check, format!("{directory} lies on a shared mount, {point}"))
    } else {
        DoctorFinding::warning(
            check,
            format!("{directory} lies on {point}, which is not a shared mount"),
            format!("{condition}: mount --make-rshared {point}, and make this permanent"),
        )
    })
}

/// Maximum size of kubelet's configuration that is read. Those of clusters have some KiB.
const KUBELET_CONFIG_MAX: u64 = 1 << 20;

/// The fields of kubelet's configuration used here.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct KubeletConfiguration {
    #[serde(default)]
    feature_gates: BTreeMap<String, bool>,
}

fn gate(config: &Path) -> DoctorFinding {
    let file = config.display().to_string();
    let read = |file: fs::File| io::read_to_string(file.take(KUBELET_CONFIG_MAX));
    let text = match fs::File::open(config).and_then(read) {
        Ok(text) => text,
        Err(error) => {
            return DoctorFinding::note(
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
        Err(error) => DoctorFinding::note("gates", format!("{file} is not kubelet's configuration: {error}")),
    }
}

fn socket_lengths(driver: &str, kubelet_root: &Path) -> DoctorFinding {
    let check = "sockets";
    // The longest socket path of every companion. The temporary name at bind is one dot longer.
    let longest = kubelet_root
        .join("plugins_registry")
        .join(driver)
        .join(".reg.sock");
    let length = longest.as_os_str().len();
    if length <= SOCKET_PATH_MAX {
        DoctorFinding::fine(
            check,
            format!("the longest path has {length} of {SOCKET_PATH_MAX} bytes"),
        )
    } else {
        DoctorFinding::problem(
            check,
            format!(
                "{} has {length} bytes, and a socket's path has at most {SOCKET_PATH_MAX}",
                longest.display()
            ),
            "use a shorter driver name, or a shorter root directory for kubelet",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::diagnose::doctor::Level;

    #[test]
    fn the_gate_is_read_from_kubelets_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("config.yaml");
        let level = |content: &str| {
            fs::write(&file, content).unwrap();
            gate(&file).level
        };
        let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nport: 10250\n";
        assert_eq!(level(head), Level::Note);
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
    fn a_machine_without_kubelet_is_reported() {
        let directory = tempfile::tempdir().unwrap();
        let worst = |findings: Vec<DoctorFinding>| findings.into_iter().map(|finding| finding.level).max();
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
    fn a_root_directory_on_an_unshared_mount_is_reported() {
        let directory = tempfile::tempdir().unwrap();
        let level = |fields: &str, root: &Path| {
            let mountinfo = format!("22 1 8:1 / / rw {fields}- ext4 /dev/sda1 rw\n");
            propagation(KUBELET, root, ROOT_IS_MOUNTED, Ok(mountinfo.into_bytes()))
                .map(|finding| finding.level)
        };
        assert_eq!(level("shared:1 ", directory.path()), Some(Level::Fine));
        assert_eq!(level("", directory.path()), Some(Level::Warning));
        assert_eq!(level("master:1 ", directory.path()), Some(Level::Warning));
        assert_eq!(level("", &directory.path().join("gone")), None);
        // An unknown result is a note.
        let unknown = [Ok(Vec::new()), Err(io::Error::other("no /proc"))];
        for mountinfo in unknown {
            let finding = propagation(KUBELET, directory.path(), ROOT_IS_MOUNTED, mountinfo);
            assert_eq!(finding.map(|finding| finding.level), Some(Level::Note));
        }
    }

    #[tokio::test]
    async fn the_directory_of_a_named_runtime_socket_is_checked() {
        let (kubelet, runtime) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let roots = RootFlags {
            kubelet_root_dir: kubelet.path().into(),
            cdi_root: "/var/run/cdi".into(),
        };
        let config = kubelet.path().join("config.yaml");
        let socket = runtime.path().join("cri.sock");
        for (given, expected) in [(Some(socket), 1), (None, 0)] {
            let sockets = SocketFlags {
                container_runtime_socket: given,
                device_plugin_dir: kubelet.path().join("device-plugins"),
            };
            let machine = Machine {
                driver: "drayman.dev",
                roots: &roots,
                sockets: &sockets,
                kubelet_config: &config,
            };
            // The result depends on the mounts of this machine.
            let about = format!("{} lies on", runtime.path().display());
            let mut findings = check(&machine).await;
            findings.retain(|finding| finding.check == RUNTIME && finding.message.contains(&about));
            assert_eq!(findings.len(), expected);
        }
        // The fix names the value of the chart that needs the mount.
        let mountinfo = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n".to_vec();
        let finding = propagation(RUNTIME, runtime.path(), SOCKET_IS_MOUNTED, Ok(mountinfo));
        let fix = finding.unwrap().fix.unwrap();
        assert!(fix.starts_with("with node.containerRuntimeSocket"), "{fix}");
    }

    #[tokio::test]
    async fn without_a_runtime_its_cost_is_reported() {
        let directory = tempfile::tempdir().unwrap();
        let (there, gone) = (
            directory.path().join("cri.sock"),
            directory.path().join("gone.sock"),
        );
        let root = Path::new("/var/run/cdi");
        let listener = std::os::unix::net::UnixListener::bind(&there).unwrap();
        let closes = std::thread::spawn(move || {
            while let Ok((connection, _)) = listener.accept() {
                drop(connection);
            }
        });
        let findings = runtime(&[&gone, &there], root).await;
        assert_eq!(findings[0].level, Level::Fine);
        assert!(findings[1].level == Level::Warning && findings[1].message.contains("cri.sock"));
        drop(closes);
        let findings = runtime(&[&gone], root).await;
        assert_eq!(findings[0].level, Level::Note);
        assert!(
            findings[0].message.contains("gone.sock") && findings[0].message.contains("deleted by force")
        );
        assert!(
            findings[0]
                .fix
                .as_ref()
                .unwrap()
                .contains("node.containerRuntimeSocket")
        );
        assert!(findings[1].level == Level::Warning && findings[1].message.contains("No such file"));
    }

    fn cdi(name: &str, configuration: &str, root: &str) -> Vec<(Level, String)> {
        let number = name.rsplit(' ').next().unwrap();
        let runtime = RuntimeInfo {
            name: name.into(),
            major: number.split('.').next().and_then(|major| major.parse().ok()),
            configuration: (!configuration.is_empty()).then(|| configuration.to_owned()),
        };
        let findings = reads_cdi(&runtime, Path::new(root)).into_iter();
        let text = |finding: DoctorFinding| {
            let fix = finding.fix.unwrap_or_default();
            (finding.level, format!("{} {fix}", finding.message))
        };
        findings.map(text).collect()
    }

    #[test]
    fn the_runtime_reports_whether_it_reads_cdi_files() {
        let on = r#"{"enableCDI":true,"cdiSpecDirs":["/opt/cdi","/srv/cdi"],"enableSelinux":false}"#;
        let levels = |root: &str| {
            cdi("containerd 1.7.27", on, root)
                .into_iter()
                .map(|(level, _)| level)
        };
        assert!(levels("/srv/cdi").eq([Level::Fine, Level::Fine]));
        assert!(levels("/var/run/cdi").eq([Level::Fine, Level::Problem]));
        let none = cdi(
            "containerd 2.1.0",
            r#"{"enableCDI":true,"cdiSpecDirs":null}"#,
            "/etc/cdi",
        );
        assert!(none[1].0 == Level::Problem && none[1].1.contains("no directory"));
        for (name, section) in [
            ("containerd 1.7.27", "io.containerd.grpc.v1.cri"),
            ("containerd 2.1.0", "io.containerd.cri.v1.runtime"),
        ] {
            let off = cdi(name, r#"{"enableCDI":false}"#, "/etc/cdi");
            assert!(
                off[0].0 == Level::Problem && off[0].1.contains(section),
                "{off:?}"
            );
        }
        for (name, configuration, expected) in [
            ("containerd 1.6.33", r#"{"sandboxImage":"pause"}"#, Level::Problem),
            ("containerd 2.9.0", "{}", Level::Note),
            ("cri-o 1.30.1", r#"{"sandboxImage":"pause"}"#, Level::Note),
            ("cri-o 1.30.1", "", Level::Note),
            ("containerd 2.1.0", "[]", Level::Warning),
        ] {
            assert_eq!(cdi(name, configuration, "/etc/cdi")[0].0, expected, "{name}");
        }
    }

    #[test]
    fn a_path_too_long_for_a_socket_is_reported() {
        let fine = socket_lengths("drayman.dev", Path::new("/var/lib/kubelet"));
        assert_eq!(fine.level, Level::Fine);
        let long = format!("/{}", "k".repeat(90));
        assert_eq!(
            socket_lengths("drayman.dev", Path::new(&long)).level,
            Level::Problem
        );
    }
}
