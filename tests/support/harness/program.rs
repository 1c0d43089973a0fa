//! Builds the Go program that runs clusters, and other programs of the tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, anyhow, bail};
use rustix::fs::FlockOperation;

/// Cargo's target directory.
pub fn target() -> &'static Path {
    let tmpdir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    tmpdir.parent().unwrap_or(tmpdir)
}

/// The program, rebuilt if its sources are newer. This takes a second at most, because it uses only Go's standard library. The program
/// itself builds Kubernetes, which takes minutes.
pub fn build() -> anyhow::Result<&'static Path> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = BUILT.get_or_init(|| build_once().map_err(|error| format!("{error:#}")));
    built.as_deref().map_err(|error| anyhow!("{error}"))
}

/// Helm. It is built if missing or if its recipe has changed, which takes minutes.
pub fn helm() -> anyhow::Result<&'static Path> {
    static HELM: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    made(&HELM, "helm", "Helm cannot be built")
}

/// The directory of `prometheus` and `promtool`, fetched from Debian if missing.
pub fn prometheus() -> anyhow::Result<&'static Path> {
    static PROMETHEUS: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    made(&PROMETHEUS, "prometheus", "Prometheus is not available")
}

/// The directory of the Prometheus operator's CRDs, fetched by Go if missing.
pub fn prometheus_operator() -> anyhow::Result<&'static Path> {
    static DEFINITIONS: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    made(
        &DEFINITIONS,
        "prometheus-operator",
        "the CRDs of the Prometheus operator are not available",
    )
}

/// The directory of `docker-registry`, fetched from Debian if missing, as is skopeo, which is then in `PATH`.
pub fn registry() -> anyhow::Result<&'static Path> {
    static REGISTRY: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    made(
        &REGISTRY,
        "registry",
        "docker-registry or skopeo is not available",
    )
}

/// Runs a command of the program and returns the printed path.
fn made(
    known: &'static OnceLock<Result<PathBuf, String>>,
    what: &str,
    failed: &str,
) -> anyhow::Result<&'static Path> {
    let made = known.get_or_init(|| {
        let program = build().map_err(|error| format!("{error:#}"))?;
        // Progress on stderr is visible to the user.
        let output = Command::new(program)
            .args([what, "--target"])
            .arg(target())
            .stderr(std::process::Stdio::inherit())
            .output()
            .map_err(|error| format!("running {}: {error}", program.display()))?;
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).trim().into())
        } else {
            Err(failed.to_owned())
        }
    });
    made.as_deref().map_err(|error| anyhow!("{error}"))
}

fn build_once() -> anyhow::Result<PathBuf> {
    build_go("tests/cluster", "cluster")
}

/// Builds a Go program from its folder in the repository.
pub fn build_go(source: &str, name: &str) -> anyhow::Result<PathBuf> {
    check_go()?;
    let directory = target().join("cluster");
    fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
    // Test programs run in parallel: one builds, the others wait for the lock. Closing the file unlocks it.
    let lock = directory.join("program.lock");
    let lock = fs::File::create(&lock).with_context(|| format!("opening {}", lock.display()))?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
    let program = directory.join(name);
    let output = Command::new("go")
        .args(["build", "-buildvcs=false", "-o"])
        .arg(&program)
        .arg(".")
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(source))
        .env("GOTOOLCHAIN", "local")
        .env("GOWORK", "off")
        .env("CGO_ENABLED", "0")
        .output()
        .context("running go build")?;
    if !output.status.success() {
        bail!(
            "building {source} failed:\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(program)
}

fn check_go() -> anyhow::Result<()> {
    let fix = "Go 1.22 or newer (1.26 for Kubernetes 1.36 and later) is needed to build Kubernetes for the tests: install it from your distribution \
               or from the Go project, and put it into PATH";
    let Ok(output) = Command::new("go").args(["env", "GOVERSION"]).output() else {
        bail!("{fix}")
    };
    let version = String::from_utf8_lossy(&output.stdout);
    // Development builds of Go have other version strings, and are newer than any release.
    let minor = version
        .strip_prefix("go1.")
        .and_then(|rest| rest.split(['.', '\n', 'r', 'b']).next()?.parse().ok());
    if !output.status.success() || minor.is_some_and(|minor: u32| minor < 22) {
        bail!("{fix} (found {})", version.trim());
    }
    Ok(())
}
