//! What `drayman doctor --this-node` looks at: the machine itself.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::core::inspect::doctor::Finding;
use crate::core::inspect::gates;

/// Bytes of a socket's path, at most: `sun_path` less its final zero.
const SOCKET_PATH_MAX: usize = 107;
/// Where containerd reads CDI files unless it is told otherwise.
const SPEC_DIRS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// What is looked at.
pub(super) struct Machine<'a> {
    /// The driver's name.
    pub(super) driver: &'a str,
    /// Kubelet's root directory.
    pub(super) kubelet_root: &'a Path,
    /// Kubelet's directory of device plugins.
    pub(super) device_plugins: &'a Path,
    /// Where the companion writes CDI files.
    pub(super) cdi_root: &'a Path,
    /// Kubelet's configuration file.
    pub(super) kubelet_config: &'a Path,
    /// Containerd's configuration file.
    pub(super) containerd_config: &'a Path,
}

/// Looks at the directories of kubelet and its feature gate, the lengths of our sockets' paths, and at CDI in containerd.
pub(super) fn look(machine: &Machine<'_>) -> Vec<Finding> {
    let mut findings = directories(machine.kubelet_root, machine.device_plugins);
    findings.push(gate(machine.kubelet_config));
    findings.push(socket_lengths(machine.driver, machine.kubelet_root));
    findings.extend(containerd(machine.containerd_config, machine.cdi_root));
    findings
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

/// What matters here of kubelet's configuration.
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
    // The longest of those that every companion has. The name under which it is bound at first is longer by a dot.
    let longest = kubelet_root
        .join("plugins_registry")
        .join(format!(".{driver}-reg.sock"));
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

/// Reads what matters out of containerd's configuration: whether CDI is on, which it is not by default before containerd 2, and where
/// CDI files are read.
fn containerd(config: &Path, cdi_root: &Path) -> Vec<Finding> {
    let check = "cdi";
    let text = match fs::read_to_string(config) {
        Ok(text) => text,
        Err(error) => {
            return vec![Finding::warning(
                check,
                format!("{}: {error}", config.display()),
                "if the runtime is containerd, give its file by --containerd-config; CRI-O has CDI by default",
            )];
        }
    };
    let off = "set enable_cdi = true in [plugins.\"io.containerd.grpc.v1.cri\"] and restart containerd";
    let is_on = match (setting(&text, "enable_cdi"), setting(&text, "version")) {
        (Some("true"), _) => Finding::fine(check, "containerd reads CDI files"),
        (Some(_), _) => Finding::problem(check, "CDI is switched off in containerd", off),
        (None, Some("3")) => Finding::fine(check, "containerd 2 reads CDI files by default"),
        (None, _) => Finding::problem(check, "containerd 1 does not read CDI files by default", off),
    };
    vec![is_on, spec_dirs(&text, cdi_root)]
}

/// Whether containerd reads CDI files where the companion writes them.
fn spec_dirs(text: &str, cdi_root: &Path) -> Finding {
    let check = "cdi";
    let listed = strings(text, "cdi_spec_dirs");
    let directories: Vec<&str> = if listed.is_empty() {
        SPEC_DIRS.to_vec()
    } else {
        listed
    };
    // /var/run is a link to /run nearly everywhere.
    let real = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if directories
        .iter()
        .any(|directory| real(Path::new(directory)) == real(cdi_root))
    {
        return Finding::fine(
            check,
            format!("containerd reads CDI files in {}", cdi_root.display()),
        );
    }
    Finding::problem(
        check,
        format!(
            "containerd reads CDI files in {}, and not in {}, where the companion writes them",
            directories.join(", "),
            cdi_root.display()
        ),
        "add the directory to cdi_spec_dirs and restart containerd, or give the companion one of these: --cdi-root, in the chart \
         node.cdiRoot",
    )
}

/// The value of a setting that stands on one line.
fn setting<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().map(str::trim).find_map(|line| {
        let (key, value) = line.split_once('=')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// The texts of a list, which may stand on several lines.
fn strings<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let is_it = |line: &&str| {
        line.trim_start()
            .strip_prefix(name)
            .is_some_and(|rest| rest.trim_start().starts_with('='))
    };
    let lines = text.lines().skip_while(|line| !is_it(line));
    let mut found = Vec::new();
    for line in lines {
        // Texts stand between quotes of one sort; a comment may follow.
        let mut rest = line;
        while let Some(start) = rest.find(['"', '\'']) {
            if rest.find('#').is_some_and(|comment| comment < start) {
                break;
            }
            let quote = rest.get(start..=start).unwrap_or_default();
            let Some((content, after)) = rest.get(start + 1..).and_then(|rest| rest.split_once(quote)) else {
                break;
            };
            found.push(content);
            rest = after;
        }
        if rest.contains(']') {
            break;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::inspect::doctor::Level;

    fn cdi(content: &str) -> Level {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("config.toml");
        fs::write(&file, content).unwrap();
        containerd(&file, Path::new("/var/run/cdi"))
            .into_iter()
            .map(|finding| finding.level)
            .max()
            .unwrap()
    }

    #[test]
    fn cdi_must_be_switched_on_before_containerd_2() {
        assert_eq!(cdi("version = 2\n  enable_cdi = true\n"), Level::Fine);
        assert_eq!(cdi("version = 2\n"), Level::Problem);
        assert_eq!(cdi("version = 3\n"), Level::Fine);
        assert_eq!(cdi("version = 3\nenable_cdi = false\n"), Level::Problem);
    }

    #[test]
    fn the_runtime_must_read_cdi_files_where_they_are_written() {
        let judge = |text: &str, root: &str| spec_dirs(text, Path::new(root)).level;
        assert_eq!(judge("version = 3\n", "/etc/cdi"), Level::Fine);
        assert_eq!(judge("version = 3\n", "/opt/cdi"), Level::Problem);
        let listed = "[plugins]\n  cdi_spec_dirs = [\n    \"/opt/cdi\", # ours, and not \"/x\"\n    '/srv/cdi',\n  ]\n  other = \"/y\"\n";
        assert_eq!(strings(listed, "cdi_spec_dirs"), ["/opt/cdi", "/srv/cdi"]);
        assert_eq!(judge(listed, "/srv/cdi"), Level::Fine);
        assert_eq!(judge(listed, "/var/run/cdi"), Level::Problem);
        assert_eq!(
            strings("cdi_spec_dirs = [\"/a\", \"/b\"]\nx = \"/c\"", "cdi_spec_dirs"),
            ["/a", "/b"]
        );
        assert_eq!(
            strings("# cdi_spec_dirs = [\"/a\"]\n", "cdi_spec_dirs"),
            Vec::<&str>::new()
        );
    }

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
