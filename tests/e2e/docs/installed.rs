//! Scripts that install the chart on real nodes with the image.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

use crate::chart::setup::ChartSetup;
use crate::docs::embedded;
use crate::harness::{self, Builder, Cluster, IMAGE};
use crate::page::{repository, script};
use crate::shell;

/// `drayman`; its node commands see the files of a node.
const DRAYMAN: &str = r#"#!/bin/sh
[ "$1" = node ] || exec "$DRAYMAN" "$@"
exec nsenter --mount="$NODE" -- sh -c 'cd "$0" && exec "$DRAYMAN" "$@"' "$PWD" "$@"
"#;

/// `sudo`, for the commands that the pages run on a node.
const SUDO: &str = r#"#!/bin/sh
exec nsenter --mount="$NODE" -- sh -c "$*"
"#;

/// Creates a pod that holds a device of the class of `install`, and defines the pages' placeholders `node.yaml`, `POD` and `UID`.
const HOLDER: &str = r#"
kubectl apply -f - <<EOF
OBJECTS
EOF
kubectl wait --for=condition=Ready --timeout=180s pod/holder
printf 'apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n- {name: serial, paths: [/dev/serial/by-id/*]}\n' >node.yaml
POD=$(kubectl --namespace drayman get pods --selector app.kubernetes.io/component=node --output name)
CLAIM=$(kubectl get resourceclaim held --output 'jsonpath={.metadata.uid}')
refused() { if "$@"; then echo "not refused: $*"; exit 1; fi; }
"#;

/// Deletes that pod and its claim.
const NO_HOLDER: &str = "kubectl delete pod/holder resourceclaim/held\n";

const STRUCTURED_OBJECTS: &str = "\
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: held}
spec: {devices: {requests: [{name: serial, exactly: {deviceClassName: serial}}]}}
---
apiVersion: v1
kind: Pod
metadata: {name: holder}
spec:
  resourceClaims: [{name: serial, resourceClaimName: held}]
  terminationGracePeriodSeconds: 1
  containers: [{name: main, image: 'busybox:1', imagePullPolicy: Never, resources: {claims: [{name: serial}]}}]";

const CLASSIC_OBJECTS: &str = "\
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaim
metadata: {name: held}
spec: {resourceClassName: serial}
---
apiVersion: v1
kind: Pod
metadata: {name: holder}
spec:
  resourceClaims: [{name: serial, source: {resourceClaimName: held}}]
  terminationGracePeriodSeconds: 1
  containers: [{name: main, image: 'busybox:1', imagePullPolicy: Never, resources: {claims: [{name: serial}]}}]";

/// The working directory of scripts.
pub(super) fn working_directory(setup: &ChartSetup) -> PathBuf {
    setup.cluster.directory().join("place")
}

/// Runs a script in the repository with kubectl, helm and drayman in the PATH. Returns its output.
pub(super) async fn run_script(setup: &ChartSetup, text: &str) -> anyhow::Result<String> {
    // Files of a script belong to this cluster, not into the repository.
    let place = working_directory(setup);
    let programs = place.join("programs");
    std::fs::create_dir_all(&programs)?;
    for name in ["charts", "examples", "hack"] {
        symlink(repository(name), place.join(name))?;
    }
    symlink(setup.cluster.kubectl_program(), programs.join("kubectl"))?;
    symlink(harness::helm()?, programs.join("helm"))?;
    for (name, script) in [("drayman", DRAYMAN), ("sudo", SUDO)] {
        let program = programs.join(name);
        std::fs::write(&program, script)?;
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
    }
    let output = setup
        .cluster
        .command("bash")
        // An image that the test node has without a registry.
        .args(["-c", &shell::script(&text.replace("busybox:1", IMAGE))])
        .current_dir(&place)
        .env("PATH", shell::path_with(&[&programs.join("kubectl")]))
        .env("DRAYMAN", env!("CARGO_BIN_EXE_drayman"))
        .env("NODE", format!("/proc/{}/ns/mnt", setup.cluster.node(0).init().0))
        .env("KUBECONFIG", setup.cluster.kubeconfig())
        // Cache directory of kubectl and Helm.
        .env("HOME", &place)
        .output()
        .await
        .context("bash")?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success(),
        "{}: {printed}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr),
        setup
            .cluster
            .kubectl(&["get", "pods,events", "--all-namespaces"])
            .await
            .unwrap_or_default()
    );
    Ok(printed)
}

/// A cluster before any page was followed: without the namespace.
async fn cluster(builder: Builder) -> anyhow::Result<ChartSetup> {
    let setup = ChartSetup::start_with(builder, 1).await?;
    setup.cluster.kubectl(&["delete", "namespace", "drayman"]).await?;
    Ok(setup)
}

#[tokio::test]
async fn the_readme_alone_leads_from_nothing_to_a_device_in_a_pod() -> anyhow::Result<()> {
    let setup = cluster(Cluster::structured()).await?;
    for page in ["README.md", "docs/user/quickstart.md"] {
        embedded::run_script(page, setup.cluster.kubectl_program())?;
    }
    let node = setup.cluster.node(0);
    // A test machine may lack /dev/fuse; the page says that most have it.
    if !node.path("/dev/fuse").exists() {
        node.make_device("/dev/fuse", 10, 229)?;
    }
    let printed = run_script(&setup, &script("README.md", "sh", "chart")).await?;
    println!("{printed}");
    let last = printed.lines().last().unwrap_or_default();
    ensure!(
        last.starts_with("crw") && last.ends_with("/dev/fuse"),
        "{printed}"
    );
    setup.cluster.stop().await
}

/// The scripts that inspect a node, with their placeholders filled in.
fn node_scripts() -> String {
    let pages =
        ["devices", "troubleshoot"].map(|page| script(&format!("docs/operator/{page}.md"), "sh", "chart"));
    let release = "kubectl --namespace drayman exec POD -- /drayman node release";
    pages
        .concat()
        // Refused, because kubelet lists the claim.
        .replace(release, &format!("refused {release}"))
        .replace(" POD ", " \"$POD\" ")
        .replace(" UID ", " \"$CLAIM\" ")
}

/// From the installation to the uninstallation, page by page.
async fn run_pages(builder: Builder, objects: &str) -> anyhow::Result<()> {
    let setup = cluster(builder).await?;
    let node = setup.cluster.node(0);
    let directory = Path::new("/dev/serial/by-id");
    std::fs::create_dir_all(node.path(directory))?;
    node.make_device(directory.join("usb-a_serial_adapter"), 1, 5)?;
    if !node.path("/dev/kvm").exists() {
        node.make_device("/dev/kvm", 10, 232)?;
    }
    let page = |page: &str| script(&format!("docs/operator/{page}.md"), "sh", "chart");
    let scripts = [
        page("install"),
        page("upgrade"),
        HOLDER.replace("OBJECTS", objects),
        node_scripts(),
        NO_HOLDER.to_owned(),
        page("leave"),
    ];
    let printed = run_script(&setup, &scripts.concat()).await?;
    println!("{printed}");
    ensure!(
        printed.contains("Phase:          Succeeded"),
        "the test of the release has passed: {printed}"
    );
    ensure!(
        printed.contains(" released: "),
        "the claim has been released: {printed}"
    );
    let left = node.path("/var/lib/kubelet/plugins/drayman.dev");
    ensure!(!left.exists(), "{} is left", left.display());
    setup.cluster.stop().await
}

#[tokio::test]
async fn the_pages_for_operators_work_in_structured_mode() -> anyhow::Result<()> {
    run_pages(Cluster::structured(), STRUCTURED_OBJECTS).await
}

#[tokio::test]
async fn the_pages_for_operators_work_in_classic_mode() -> anyhow::Result<()> {
    run_pages(Cluster::builder(), CLASSIC_OBJECTS).await
}
