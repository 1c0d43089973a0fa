//! Optional settings: a companion that opens devices and reads kubelet's checkpoint, CRD updates, and an immutable driver name.

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::chart::life::{COMPANION, claims, pod, template};
use crate::chart::stage::Stage;

/// Both settings of docs/operator/security.md that grant more rights, with short periods.
const VALUES: &str = "\
deviceKinds:
- name: test
  paths: [\"/dev/drayman-test-*\"]
  health: {open: read}
classes:
- name: test
  kind: test
node:
  privileged: true
  readKubeletState: true
  extraEnv:
  - name: DRAYMAN_ORPHAN_GRACE_PERIOD
    value: 1s
";

const INVENTORY: &str = "node-0.drayman.dev";

#[tokio::test]
async fn a_companion_with_more_rights_frees_forgotten_devices() -> anyhow::Result<()> {
    let stage = Stage::start(1).await?;
    let node = stage.cluster.node(0);
    // A major number without a driver.
    node.make_device("/dev/drayman-test-9", 120, 99)?;
    let values = stage.cluster.directory().join("options.yaml");
    std::fs::write(&values, VALUES)?;
    stage.deploy("install", &values, &[]).await?;
    stage.ready(INVENTORY).await?;

    stage
        .until(
            "the device that cannot be opened is unhealthy, and no other",
            async || {
                let told = stage
                    .field(
                        &["nodeinventory", INVENTORY],
                        "range .spec.devices[*]}{.name}={.unhealthy}{\"\\n\"}{end",
                    )
                    .await?;
                let unhealthy: Vec<&str> = told.lines().filter(|line| !line.ends_with('=')).collect();
                Ok(told.lines().count() == 4
                    && unhealthy.len() == 1
                    && unhealthy[0].starts_with("drayman-test-9=")
                    && unhealthy[0].contains("cannot be opened"))
            },
        )
        .await?;

    stage.apply(&template("test", "test")).await?;
    stage.apply(&pod("left", &["test"])).await?;
    stage.running("left").await?;
    assert_eq!(stage.devices("left").await?.len(), 1);

    // Kubelet is down and loses its checkpoint; the pod and its claim are deleted meanwhile.
    let companion = stage.run_of("drayman", COMPANION).await?;
    node.stop("kubelet", 9).await?;
    node.remove("/var/lib/kubelet/dra_manager_state")?;
    let delete = ["delete", "pod", "left", "--force", "--grace-period=0"];
    stage.cluster.kubectl(&delete).await?;
    stage
        .until("the claim is gone", async || Ok(claims(&stage).await?.is_empty()))
        .await?;
    node.start("kubelet").await?;
    let selector = format!("--selector={COMPANION}");
    let logs = ["logs", "--namespace=drayman", &selector, "--tail=-1"];
    stage
        .until("what the claim held is free without a person", async || {
            // Kubelet serves logs only some time after its start.
            let log = stage.cluster.kubectl(&logs).await.unwrap_or_default();
            Ok(log.contains("OrphanFreed"))
        })
        .await?;
    assert_eq!(stage.run_of("drayman", COMPANION).await?, companion);

    make_directories_anew(&stage).await?;
    keep_the_driver_s_name(&stage, &values).await?;
    bring_definitions_up_to_date(&stage, &values).await?;
    stage.cluster.stop().await
}

/// A pod's mounts refer to directories that the host has removed, so the companion exits and its container is recreated. Running pods keep
/// their devices.
async fn make_directories_anew(stage: &Stage) -> anyhow::Result<()> {
    let node = stage.cluster.node(0);
    stage.apply(&pod("holder", &["test"])).await?;
    stage.running("holder").await?;
    let held = stage.devices("holder").await?;
    for directory in ["/var/lib/kubelet/plugins/drayman.dev", "/run/cdi"] {
        let before = stage.run_of("drayman", COMPANION).await?;
        // The companion may write a file meanwhile.
        while std::fs::remove_dir_all(node.path(directory)).is_err() {
            tokio::task::yield_now().await;
        }
        std::fs::create_dir(node.path(directory))?;
        stage
            .until("the companion is started again", async || {
                let now = stage.run_of("drayman", COMPANION).await;
                Ok(now.is_ok_and(|now| now.uid == before.uid && now.restarts > before.restarts))
            })
            .await?;
        stage.ready(INVENTORY).await?;
    }
    // One of three usable devices is held.
    for name in ["next-a", "next-b"] {
        stage.apply(&pod(name, &["test"])).await?;
        stage.running(name).await?;
        ensure!(stage.devices(name).await? != held, "{name} has {held:?} as well");
    }
    for name in ["holder", "next-a", "next-b"] {
        stage.cluster.kubectl(&["delete", "pod", name]).await?;
    }
    stage
        .until("all claims are gone", async || {
            Ok(claims(stage).await?.is_empty())
        })
        .await
}

/// A changed driver name would orphan the allocations of the old one.
async fn keep_the_driver_s_name(stage: &Stage, values: &std::path::Path) -> anyhow::Result<()> {
    let refused = stage
        .deploy("upgrade", values, &["--set=driverName=other.example.com"])
        .await
        .expect_err("another name")
        .to_string();
    ensure!(
        refused
            .contains("This release serves the driver name drayman.dev, and driverName is other.example.com")
            && refused.contains("uninstall the release"),
        "{refused}"
    );
    Ok(())
}

/// One CRD of an earlier release and one deleted CRD, restored by an upgrade and by hand.
async fn bring_definitions_up_to_date(stage: &Stage, values: &std::path::Path) -> anyhow::Result<()> {
    let older = ["customresourcedefinition", "nodeinventories.drayman.dev"];
    let deleted = ["customresourcedefinition", "deviceclaimparameters.drayman.dev"];
    let columns = ".spec.versions[0].additionalPrinterColumns[*].name";
    let expected = stage.field(&older, columns).await?;
    ensure!(!expected.is_empty());
    for by_hand in [false, true] {
        let get = [&["get"], &older[..], &["--output=json"]].concat();
        let mut definition: Value = serde_json::from_str(&stage.cluster.kubectl(&get).await?)?;
        definition["spec"]["versions"][0]
            .as_object_mut()
            .context("a version")?
            .remove("additionalPrinterColumns");
        let file = stage.cluster.directory().join("older.json");
        std::fs::write(&file, definition.to_string())?;
        let file = file.to_str().context("UTF-8")?;
        stage.cluster.kubectl(&["replace", "--filename", file]).await?;
        ensure!(stage.field(&older, columns).await? != expected);
        stage
            .cluster
            .kubectl(&[&["delete"], &deleted[..]].concat())
            .await?;

        if by_hand {
            // As `drayman doctor` and docs/operator/upgrade.md recommend.
            let printed = stage
                .cluster
                .command(env!("CARGO_BIN_EXE_drayman"))
                .arg("crds")
                .output()
                .await?;
            let file = stage.cluster.directory().join("printed.yaml");
            std::fs::write(&file, printed.stdout)?;
            let file = file.to_str().context("UTF-8")?;
            let apply = ["apply", "--server-side", "--force-conflicts", "--filename", file];
            stage.cluster.kubectl(&apply).await?;
        } else {
            stage.deploy("upgrade", values, &[]).await?;
        }
        assert_eq!(
            stage.field(&older, columns).await?,
            expected,
            "by hand: {by_hand}"
        );
        let established = [
            "wait",
            "--for=condition=Established",
            "--timeout=60s",
            "customresourcedefinition/deviceclaimparameters.drayman.dev",
        ];
        stage.cluster.kubectl(&established).await?;
    }
    stage.doctor().await.map(drop)
}
