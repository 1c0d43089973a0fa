//! A release: built by `hack/release`, pushed to a real registry as in `CONTRIBUTING.md`, and installed from there.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::chart::helm::yaml;
use crate::chart::image::{architecture, program};
use crate::chart::lifecycle::COMPANION;
use crate::chart::setup::ChartSetup;
use crate::docs::installed;
use crate::harness::{self, Cluster, TIMEOUT};
use crate::page::{repository, script};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The other architecture of a release, and its machine number in an ELF header.
fn other() -> (&'static str, u16) {
    if architecture() == "amd64" {
        ("arm64", 183)
    } else {
        ("amd64", 62)
    }
}

/// Programs for both architectures: the one of this build, and a copy with a patched ELF header, which is never executed.
fn programs() -> anyhow::Result<tempfile::TempDir> {
    let (_root, program) = program();
    let directory = tempfile::tempdir()?;
    let mut bytes = std::fs::read(program)?;
    let (other, machine) = other();
    for (architecture, machine) in [(architecture(), None), (other, Some(machine))] {
        if let Some(machine) = machine {
            bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        }
        let path = directory.path().join(format!("drayman-{architecture}"));
        std::fs::write(&path, &bytes)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    }
    Ok(directory)
}

/// Runs `hack/release` with these variables.
async fn release(programs: &Path, output: &Path, variables: &[(&str, &str)]) -> anyhow::Result<Output> {
    let mut command = Command::new(repository("hack/release"));
    for variable in ["ARCHITECTURES", "TAG"] {
        command.env_remove(variable);
    }
    command
        .env("REGISTRY", "registry.example.com/drayman")
        .env("REPOSITORY", "https://forge.example.com/drayman/drayman")
        .args(["--profile", "dev", "--programs"])
        .arg(programs)
        .arg("--output")
        .arg(output)
        .env("CARGO_TARGET_DIR", harness::target())
        .env("HELM", tokio::task::spawn_blocking(harness::helm).await??)
        .envs(variables.iter().copied())
        .output()
        .await
        .context("hack/release")
}

/// Runs `hack/release`, which must succeed. Returns the digest of the image.
async fn released(programs: &Path, output: &Path, variables: &[(&str, &str)]) -> anyhow::Result<String> {
    let made = release(programs, output, variables).await?;
    let stderr = String::from_utf8_lossy(&made.stderr);
    ensure!(made.status.success(), "{stderr}");
    Ok(String::from_utf8(made.stdout)?.trim().to_owned())
}

#[tokio::test]
async fn a_release_has_image_chart_plugin_and_checksums() -> anyhow::Result<()> {
    let (programs, place) = (programs()?, tempfile::tempdir()?);
    let output = place.path().join("release");
    let digest = released(programs.path(), &output, &[]).await?;
    let again = place.path().join("again");
    ensure!(
        released(programs.path(), &again, &[]).await? == digest,
        "the same bytes"
    );

    let sums = std::fs::read_to_string(output.join("SHA256SUMS"))?;
    ensure!(
        sums == std::fs::read_to_string(again.join("SHA256SUMS"))?,
        "{sums}"
    );
    let sums: BTreeMap<&str, &str> = sums
        .lines()
        .filter_map(|line| line.split_once("  "))
        .map(|(sum, name)| (name, sum))
        .collect();
    let expected = [
        "RELEASE-NOTES.md".to_owned(),
        format!("drayman-{VERSION}-amd64.spdx.json"),
        format!("drayman-{VERSION}-arm64.spdx.json"),
        format!("drayman-{VERSION}-image.tar"),
        format!("drayman-{VERSION}.tgz"),
        "drayman.yaml".to_owned(),
        format!("kubectl-drayman-{VERSION}-linux-amd64.tar.gz"),
        format!("kubectl-drayman-{VERSION}-linux-arm64.tar.gz"),
    ];
    ensure!(
        sums.keys().copied().eq(expected.iter().map(String::as_str)),
        "{sums:?}"
    );

    let manifest = yaml(&output.join("drayman.yaml"));
    let platforms = manifest["spec"]["platforms"].as_array().context("platforms")?;
    for (platform, architecture) in platforms.iter().zip(["amd64", "arm64"]) {
        ensure!(
            platform["selector"]["matchLabels"]["arch"] == architecture,
            "{platform}"
        );
        let archive = format!("kubectl-drayman-{VERSION}-linux-{architecture}.tar.gz");
        ensure!(
            platform["uri"]
                .as_str()
                .is_some_and(|uri| uri.ends_with(&format!("/v{VERSION}/{archive}")))
        );
        ensure!(platform["sha256"] == sums[archive.as_str()], "{platform}");
    }
    let archive = output.join(format!(
        "kubectl-drayman-{VERSION}-linux-{}.tar.gz",
        architecture()
    ));
    let unpacked = Command::new("tar")
        .arg("--extract")
        .arg("--directory")
        .arg(place.path())
        .arg("--file")
        .arg(archive)
        .status()
        .await?;
    ensure!(unpacked.success() && place.path().join("LICENSE").exists());
    let version = Command::new(place.path().join("kubectl-drayman"))
        .arg("--version")
        .output()
        .await?;
    let stdout = String::from_utf8(version.stdout)?;
    ensure!(stdout.contains(VERSION), "{stdout}");

    let notes = std::fs::read_to_string(output.join("RELEASE-NOTES.md"))?;
    ensure!(notes.contains(&digest) && notes.contains("### Added"), "{notes}");
    ensure!(!notes.contains("](docs/"), "a relative link: {notes}");
    Ok(())
}

#[tokio::test]
async fn a_release_lacks_nothing_silently() -> anyhow::Result<()> {
    let (programs, place) = (programs()?, tempfile::tempdir()?);
    let output = place.path().join("release");
    let refusal = async |variables: &[(&str, &str)]| {
        let made = release(programs.path(), &output, variables).await?;
        ensure!(!made.status.success() && !output.exists());
        Ok(String::from_utf8(made.stderr)?)
    };
    for variable in ["REGISTRY", "REPOSITORY"] {
        let stderr = refusal(&[(variable, "")]).await?;
        ensure!(stderr.contains(&format!("{variable} is not set")), "{stderr}");
    }
    let stderr = refusal(&[("TAG", "v99.0.0")]).await?;
    ensure!(
        stderr.contains(&format!("the tag must be v{VERSION}")),
        "{stderr}"
    );
    std::fs::remove_file(programs.path().join(format!("drayman-{}", other().0)))?;
    let stderr = refusal(&[]).await?;
    let chosen = format!("ARCHITECTURES={}", architecture());
    ensure!(
        stderr.contains(&format!("no image for {}; without it: {chosen}", other().0)),
        "{stderr}"
    );
    // The message contains the fix.
    released(programs.path(), &output, &[("ARCHITECTURES", architecture())]).await?;
    // An existing directory with other content is not replaced.
    let output = place.path().join("precious");
    std::fs::create_dir(&output)?;
    let made = release(programs.path(), &output, &[]).await?;
    ensure!(!made.status.success() && output.exists());
    Ok(())
}

/// A local registry with TLS. It ends when it is dropped.
struct Registry {
    _process: Child,
    /// Address for nodes and this machine.
    host: String,
    /// Its self-signed certificate.
    certificate: PathBuf,
}

impl Registry {
    async fn start(setup: &ChartSetup) -> anyhow::Result<Self> {
        let program = tokio::task::spawn_blocking(harness::registry).await??;
        let directory = setup.cluster.directory().join("registry");
        std::fs::create_dir(&directory)?;
        let address = setup.cluster.node(0).gateway();
        let signed = rcgen::generate_simple_self_signed(vec![address.to_owned()])?;
        let (certificate, key) = (directory.join("certificate.pem"), directory.join("key.pem"));
        std::fs::write(&certificate, signed.cert.pem())?;
        std::fs::write(&key, signed.signing_key.serialize_pem())?;
        let configuration = directory.join("configuration.yaml");
        let content = serde_json::json!({
            "version": "0.1",
            "storage": { "filesystem": { "rootdirectory": directory.join("data") } },
            "http": { "addr": format!("{address}:0"), "tls": { "certificate": certificate, "key": key } },
        });
        std::fs::write(&configuration, content.to_string())?;
        let mut process = setup
            .cluster
            .command(program.join("docker-registry"))
            .arg("serve")
            .arg(&configuration)
            .stderr(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(process.stderr.take().context("piped")?).lines();
        let port = timeout(TIMEOUT, async {
            while let Some(line) = lines.next_line().await? {
                println!("{line}");
                let begun = line.split_once(&format!("listening on {address}:"));
                if let Some((port, _)) = begun.and_then(|(_, rest)| rest.split_once(',')) {
                    return Ok(port.to_owned());
                }
            }
            anyhow::bail!("the registry ended")
        })
        .await??;
        // A full pipe would block the registry.
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                println!("{line}");
            }
        });
        Ok(Self {
            _process: process,
            host: format!("{address}:{port}"),
            certificate,
        })
    }

    /// Makes the container runtime of the node trust the registry. The runtime reads this file at each pull.
    fn trust_registry(&self, setup: &ChartSetup) -> anyhow::Result<()> {
        let registries = setup.cluster.node(0).configuration("registries");
        let directory = registries.join(&self.host);
        std::fs::create_dir_all(&directory)?;
        let server = format!("https://{}", self.host);
        let content = format!(
            "server = \"{server}\"\n[host.\"{server}\"]\n  ca = \"{}\"\n",
            self.certificate.display()
        );
        Ok(std::fs::write(directory.join("hosts.toml"), content)?)
    }
}

#[tokio::test]
async fn a_pushed_release_is_installed_from_its_registry() -> anyhow::Result<()> {
    let cluster = Cluster::structured().nodes(1).service_accounts().start().await?;
    let setup = ChartSetup::prepare(cluster).await?;
    setup.cluster.kubectl(&["delete", "namespace", "drayman"]).await?;
    let node = setup.cluster.node(0);
    let directory = Path::new("/dev/serial/by-id");
    std::fs::create_dir_all(node.path(directory))?;
    node.make_device(directory.join("usb-a_serial_adapter"), 1, 5)?;
    let registry = Registry::start(&setup).await?;
    registry.trust_registry(&setup)?;

    let programs = programs()?;
    let output = installed::working_directory(&setup).join(format!("target/release-{VERSION}"));
    let digest = released(programs.path(), &output, &[("REGISTRY", &registry.host)]).await?;
    let image = format!("{}/drayman@{digest}", registry.host);
    let chart = format!("oci://{}/charts/drayman --version {VERSION}", registry.host);
    let push =
        script("CONTRIBUTING.md", "sh", "release").replace("registry.example.com/drayman", &registry.host);
    let install = script("docs/operator/install.md", "sh", "chart");
    ensure!(
        install.contains("helm install drayman charts/drayman "),
        "{install}"
    );
    let install = install.replace("charts/drayman", &chart);
    let trust = format!("export SSL_CERT_FILE={}", registry.certificate.display());
    let look = format!("skopeo inspect --raw docker://{image}");
    let printed = installed::run_script(
        &setup,
        &[&trust, &push, &install, &look].map(String::as_str).join("\n"),
    )
    .await?;
    println!("{printed}");

    let index: Value = serde_json::from_str(printed.lines().last().unwrap_or_default())?;
    let architectures: Vec<&Value> = index["manifests"]
        .as_array()
        .context("an index")?
        .iter()
        .map(|manifest| &manifest["platform"]["architecture"])
        .collect();
    ensure!(architectures == ["amd64", "arm64"], "{index}");
    // The node had no image: its runtime has pulled it, by the digest in the chart.
    let pods = Api::<Pod>::namespaced(setup.cluster.client(), "drayman")
        .list(&ListParams::default().labels(COMPANION))
        .await?;
    let pod = pods.items.first().context("a companion")?;
    let status = pod
        .status
        .as_ref()
        .and_then(|status| status.container_statuses.as_ref()?.first());
    let status = status.context("a container")?;
    ensure!(status.ready && status.image_id == image, "{status:?}");
    setup.cluster.stop().await
}
