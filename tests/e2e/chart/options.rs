//! Optional settings: a companion that opens devices and reads kubelet's checkpoint, CRD updates, an immutable driver name, and leader
//! election.

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::chart::lifecycle::{COMPANION, pod, template};
use crate::chart::setup::ChartSetup;
use crate::harness::Cluster;

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
    let setup = ChartSetup::start(1).await?;
    let node = setup.cluster.node(0);
    // A major number without a driver.
    node.make_device("/dev/drayman-test-9", 120, 99)?;
    let values = setup.cluster.directory().join("options.yaml");
    std::fs::write(&values, VALUES)?;
    setup.deploy("install", &values, &[]).await?;
    setup.ready(INVENTORY).await?;

    setup
        .until(
            "the device that cannot be opened is unhealthy, and no other",
            async || {
                let devices = setup
                    .field(
                        &["nodeinventory", INVENTORY],
                        "range .spec.devices[*]}{.name}={.unhealthy}{\"\\n\"}{end",
                    )
                    .await?;
                let unhealthy: Vec<&str> = devices.lines().filter(|line| !line.ends_with('=')).collect();
                Ok(devices.lines().count() == 4
                    && unhealthy.len() == 1
                    && unhealthy[0].starts_with("drayman-test-9=")
                    && unhealthy[0].contains("cannot be opened"))
            },
        )
        .await?;

    setup.apply(&template("test", "test")).await?;
    setup.apply(&pod("left", &["test"])).await?;
    setup.running("left").await?;
    assert_eq!(setup.devices("left").await?.len(), 1);

    // Kubelet is down and loses its checkpoint; the pod and its claim are deleted meanwhile.
    let companion = setup.run_of("drayman", COMPANION).await?;
    node.stop("kubelet", 9).await?;
    node.remove("/var/lib/kubelet/dra_manager_state")?;
    let delete = ["delete", "pod", "left", "--force", "--grace-period=0"];
    setup.kubectl(&delete).await?;
    setup.until_no_claims().await?;
    node.start("kubelet").await?;
    let selector = format!("--selector={COMPANION}");
    let logs = ["logs", "--namespace=drayman", &selector, "--tail=-1"];
    setup
        .until(
            "the device of the claim is free without manual release",
            async || {
                // Kubelet serves logs only some time after its start.
                let log = setup.kubectl(&logs).await.unwrap_or_default();
                Ok(log.contains("OrphanFreed"))
            },
        )
        .await?;
    assert_eq!(setup.run_of("drayman", COMPANION).await?, companion);

    recreate_directories(&setup).await?;
    keep_the_driver_name(&setup, &values).await?;
    bring_definitions_up_to_date(&setup, &values).await?;
    setup.cluster.stop().await
}

/// A pod's mounts refer to directories that the host has removed, so the companion exits and its container is recreated. Running pods keep
/// their devices.
async fn recreate_directories(setup: &ChartSetup) -> anyhow::Result<()> {
    let node = setup.cluster.node(0);
    setup.apply(&pod("holder", &["test"])).await?;
    setup.running("holder").await?;
    let held = setup.devices("holder").await?;
    for directory in ["/var/lib/kubelet/plugins/drayman.dev", "/run/cdi"] {
        let before = setup.run_of("drayman", COMPANION).await?;
        // The companion may write a file meanwhile.
        while std::fs::remove_dir_all(node.path(directory)).is_err() {
            tokio::task::yield_now().await;
        }
        std::fs::create_dir(node.path(directory))?;
        setup
            .until("the companion is started again", async || {
                let now = setup.run_of("drayman", COMPANION).await;
                Ok(now.is_ok_and(|now| now.uid == before.uid && now.restarts > before.restarts))
            })
            .await?;
        setup.ready(INVENTORY).await?;
    }
    // One of three usable devices is held.
    for name in ["next-a", "next-b"] {
        setup.apply(&pod(name, &["test"])).await?;
        setup.running(name).await?;
        ensure!(setup.devices(name).await? != held, "{name} has {held:?} as well");
    }
    for name in ["holder", "next-a", "next-b"] {
        setup.kubectl(&["delete", "pod", name]).await?;
    }
    setup.until_no_claims().await
}

/// A changed driver name would orphan the allocations of the old one.
async fn keep_the_driver_name(setup: &ChartSetup, values: &std::path::Path) -> anyhow::Result<()> {
    let refused = setup
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
async fn bring_definitions_up_to_date(setup: &ChartSetup, values: &std::path::Path) -> anyhow::Result<()> {
    let older = ["customresourcedefinition", "nodeinventories.drayman.dev"];
    let deleted = ["customresourcedefinition", "deviceclaimparameters.drayman.dev"];
    let columns = ".spec.versions[0].additionalPrinterColumns[*].name";
    let expected = setup.field(&older, columns).await?;
    ensure!(!expected.is_empty());
    for by_hand in [false, true] {
        let get = [&["get"], &older[..], &["--output=json"]].concat();
        let mut definition: Value = serde_json::from_str(&setup.kubectl(&get).await?)?;
        definition["spec"]["versions"][0]
            .as_object_mut()
            .context("a version")?
            .remove("additionalPrinterColumns");
        let file = setup.cluster.directory().join("older.json");
        std::fs::write(&file, definition.to_string())?;
        let file = file.to_str().context("UTF-8")?;
        setup.kubectl(&["replace", "--filename", file]).await?;
        ensure!(setup.field(&older, columns).await? != expected);
        setup.kubectl(&[&["delete"], &deleted[..]].concat()).await?;

        if by_hand {
            // As `drayman doctor` and docs/operator/upgrade.md recommend.
            let printed = setup
                .cluster
                .command(env!("CARGO_BIN_EXE_drayman"))
                .arg("crds")
                .output()
                .await?;
            let file = setup.cluster.directory().join("printed.yaml");
            std::fs::write(&file, printed.stdout)?;
            let file = file.to_str().context("UTF-8")?;
            let apply = ["apply", "--server-side", "--force-conflicts", "--filename", file];
            setup.kubectl(&apply).await?;
        } else {
            setup.deploy("upgrade", values, &[]).await?;
        }
        assert_eq!(
            setup.field(&older, columns).await?,
            expected,
            "by hand: {by_hand}"
        );
        let established = [
            "wait",
            "--for=condition=Established",
            "--timeout=60s",
            "customresourcedefinition/deviceclaimparameters.drayman.dev",
        ];
        setup.kubectl(&established).await?;
    }
    setup.doctor().await.map(drop)
}

/// Without nodes no pod runs; the Deployment shows how its pods would be replaced.
#[tokio::test]
async fn the_lease_is_not_introduced_by_a_rolling_update() -> anyhow::Result<()> {
    let setup = ChartSetup::prepare(Cluster::builder().start().await?).await?;
    for (verb, elects, expected) in [
        ("install", false, "Recreate"),
        // The running controller has no lease.
        ("upgrade", true, "Recreate"),
        ("upgrade", true, "RollingUpdate"),
    ] {
        let elects = format!("--set=controller.leaderElection.enabled={elects}");
        let more = ["--set=crds.upgrade=false", elects.as_str()];
        setup.release(verb, "drayman", None, &more).await?;
        let deployment = ["deployment", "drayman-controller", "--namespace=drayman"];
        let strategy = setup.field(&deployment, ".spec.strategy.type").await?;
        assert_eq!(strategy, expected, "{verb} {elects}");
    }
    setup.cluster.stop().await
}
