//! What `drayman doctor --this-node` looks at: the machine itself.

use std::fs;
use std::path::Path;

use crate::core::inspect::doctor::Finding;

/// Bytes of a socket's path, at most: `sun_path` less its final zero.
const SOCKET_PATH_MAX: usize = 107;

/// Looks at the directories of kubelet, the lengths of our sockets' paths, and at CDI in containerd.
pub(super) fn look(driver: &str, kubelet_root: &Path, containerd_config: &Path) -> Vec<Finding> {
    let mut findings = directories(kubelet_root);
    findings.push(socket_lengths(driver, kubelet_root));
    findings.push(containerd(containerd_config));
    findings
}

fn directories(kubelet_root: &Path) -> Vec<Finding> {
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
    let socket = kubelet_root.join("device-plugins/kubelet.sock");
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

fn socket_lengths(driver: &str, kubelet_root: &Path) -> Finding {
    let check = "sockets";
    // The longest of ours. The name under which it is bound at first is longer by a dot and a suffix.
    let longest = kubelet_root
        .join("plugins")
        .join(driver)
        .join(".dra.sock.binding");
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

/// Reads the one line that matters out of containerd's configuration: CDI is off by default before containerd 2.
fn containerd(config: &Path) -> Finding {
    let check = "cdi";
    let text = match fs::read_to_string(config) {
        Ok(text) => text,
        Err(error) => {
            return Finding::warning(
                check,
                format!("{}: {error}", config.display()),
                "if the runtime is containerd, give its file by --containerd-config; CRI-O has CDI by default",
            );
        }
    };
    let setting = |name: &str| {
        text.lines().map(str::trim).find_map(|line| {
            let (key, value) = line.split_once('=')?;
            (key.trim() == name).then(|| value.trim().to_owned())
        })
    };
    match (setting("enable_cdi").as_deref(), setting("version").as_deref()) {
        (Some("true"), _) => Finding::fine(check, "containerd reads CDI files"),
        (Some(_), _) => Finding::problem(
            check,
            "CDI is switched off in containerd",
            "set enable_cdi = true in [plugins.\"io.containerd.grpc.v1.cri\"] and restart containerd",
        ),
        (None, Some("3")) => Finding::fine(check, "containerd 2 reads CDI files by default"),
        (None, _) => Finding::problem(
            check,
            "containerd 1 does not read CDI files by default",
            "set enable_cdi = true in [plugins.\"io.containerd.grpc.v1.cri\"] and restart containerd",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::inspect::doctor::Level;

    fn cdi(content: &str) -> Level {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("config.toml");
        fs::write(&file, content).unwrap();
        containerd(&file).level
    }

    #[test]
    fn cdi_must_be_switched_on_before_containerd_2() {
        assert_eq!(cdi("version = 2\n  enable_cdi = true\n"), Level::Fine);
        assert_eq!(cdi("version = 2\n"), Level::Problem);
        assert_eq!(cdi("version = 3\n"), Level::Fine);
        assert_eq!(cdi("version = 3\nenable_cdi = false\n"), Level::Problem);
    }

    #[test]
    fn a_machine_without_kubelet_is_told_so() {
        let directory = tempfile::tempdir().unwrap();
        let worst = |findings: Vec<Finding>| findings.into_iter().map(|finding| finding.level).max();
        assert_eq!(worst(directories(directory.path())), Some(Level::Problem));
        for name in ["plugins_registry", "plugins", "device-plugins"] {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        fs::write(directory.path().join("device-plugins/kubelet.sock"), "").unwrap();
        assert_eq!(worst(directories(directory.path())), Some(Level::Fine));
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
