//! Scripts that install the chart, on real nodes with the image.

use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context as _, ensure};

use crate::chart::stage::Stage;
use crate::harness::{self, IMAGE};
use crate::page::{repository, script};
use crate::shell;

/// Types a script where the repository is, with kubectl, helm and drayman at hand. What it printed.
async fn types(stage: &Stage, text: &str) -> anyhow::Result<String> {
    // What a script writes belongs to this cluster and not into the repository.
    let place = stage.cluster.directory().join("place");
    let programs = place.join("programs");
    std::fs::create_dir_all(&programs)?;
    for name in ["charts", "examples", "hack"] {
        symlink(repository(name), place.join(name))?;
    }
    symlink(stage.cluster.kubectl_program(), programs.join("kubectl"))?;
    symlink(harness::helm()?, programs.join("helm"))?;
    symlink(env!("CARGO_BIN_EXE_drayman"), programs.join("drayman"))?;
    let output = stage
        .cluster
        .command("bash")
        // What a node of the test can have without a way to any registry.
        .args(["-c", &shell::script(&text.replace("busybox:1", IMAGE))])
        .current_dir(&place)
        .env("PATH", shell::path_with(&[&programs.join("kubectl")]))
        .env("KUBECONFIG", stage.cluster.kubeconfig())
        // kubectl and Helm keep there what they know.
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
        stage
            .cluster
            .kubectl(&["get", "pods,events", "--all-namespaces"])
            .await
            .unwrap_or_default()
    );
    Ok(printed)
}

/// A cluster as somebody has it who has followed no page yet: without the namespace.
async fn cluster() -> anyhow::Result<Stage> {
    let stage = Stage::start(1).await?;
    stage.cluster.kubectl(&["delete", "namespace", "drayman"]).await?;
    Ok(stage)
}

#[tokio::test]
async fn the_readme_alone_leads_from_nothing_to_a_device_in_a_pod() -> anyhow::Result<()> {
    let stage = cluster().await?;
    let node = stage.cluster.node(0);
    // A machine of the tests may lack it; the page says that most have it.
    if !node.path("/dev/fuse").exists() {
        node.make_device("/dev/fuse", 10, 229)?;
    }
    let printed = types(&stage, &script("README.md", "sh", "chart")).await?;
    println!("{printed}");
    let last = printed.lines().last().unwrap_or_default();
    ensure!(
        last.starts_with("crw") && last.ends_with("/dev/fuse"),
        "{printed}"
    );
    stage.cluster.stop().await
}

#[tokio::test]
async fn the_install_and_upgrade_pages_work_as_written() -> anyhow::Result<()> {
    let stage = cluster().await?;
    let node = stage.cluster.node(0);
    let directory = Path::new("/dev/serial/by-id");
    std::fs::create_dir_all(node.path(directory))?;
    node.make_device(directory.join("usb-a_serial_adapter"), 1, 5)?;
    let upgrade = script("docs/upgrade.md", "sh", "chart");
    let printed = types(
        &stage,
        &format!("{}{upgrade}", script("docs/install.md", "sh", "chart")),
    )
    .await?;
    println!("{printed}");
    ensure!(
        printed.contains("Phase:          Succeeded"),
        "the test of the release has passed: {printed}"
    );
    stage.cluster.stop().await
}
