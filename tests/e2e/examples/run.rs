//! Runs the folders one after the other on one cluster.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, bail};
use serde_json::json;

use crate::examples::folder::{Folder, folders, structured_folder};
use crate::examples::pattern::Names;
use crate::examples::user::User;
use crate::harness::Cluster;
use crate::page::script;
use crate::setup::{Program, Setup, controller_rules, node_rules, structured_node_rules};
use crate::{harness, sensors, shell};

/// Set in the process in which the next function is the vendor's program of the folder `vendor`.
const AS_PROGRAM: &str = "DRAYMAN_TEST_RUN_SENSORS";

/// The other test also uses this to start the vendor's companion, so that nothing else must be built.
#[test]
fn the_vendors_companion_asks_for_the_name_of_its_node() {
    let ended = sensors::main();
    if std::env::var_os(AS_PROGRAM).is_some() {
        ended.expect("it ends cleanly");
    } else if std::env::var_os("NODE_NAME").is_none() {
        let error = ended.expect_err("it cannot run without").to_string();
        assert!(error.contains("NODE_NAME"), "{error}");
    }
}

#[tokio::test]
async fn every_example_matches_its_readme() -> anyhow::Result<()> {
    // A single folder, for authors.
    let only = std::env::var("DRAYMAN_TEST_EXAMPLE").ok();
    let folders: Vec<Folder> = folders()?
        .into_iter()
        .filter(|folder| only.as_ref().is_none_or(|only| *only == folder.name))
        .collect();
    anyhow::ensure!(!folders.is_empty(), "there is no folder {only:?}");
    follow_all(
        Setup::with_crds(Cluster::builder().nodes(2).start().await?).await?,
        &folders,
    )
    .await
}

#[tokio::test]
async fn every_example_of_structured_mode_matches_its_readme() -> anyhow::Result<()> {
    let cluster = Cluster::structured().nodes(2).start().await?;
    follow_all(Setup::structured(cluster).await?, &[structured_folder()?]).await
}

async fn follow_all(setup: Setup, folders: &[Folder]) -> anyhow::Result<()> {
    let start = Instant::now();
    let programs = start_programs(&setup).await?;
    println!("the programs are ready after {:.1?}", start.elapsed());
    let mut failed = Vec::new();
    for folder in folders {
        let start = Instant::now();
        let name = &folder.name;
        match follow(&setup, folder).await {
            Ok(()) => println!(
                "examples/{name}: {} commands in {:.1?}",
                folder.steps.len(),
                start.elapsed()
            ),
            Err(error) => {
                let about = "get events,pods,resourceclaims";
                let arguments: Vec<&str> = about.split(' ').chain(["--namespace", name]).collect();
                let more = setup.cluster.kubectl(&arguments).await.unwrap_or_default();
                failed.push(format!("examples/{name}/README.md: {error:#}\n{more}"));
                clean_up(&setup, name).await.context(failed.join("\n\n"))?;
            }
        }
    }
    println!("{} folders in {:.1?}", folders.len(), start.elapsed());
    if !failed.is_empty() {
        bail!("{}", failed.join("\n\n"));
    }
    for program in programs {
        program.end().await?;
    }
    setup.cluster.stop().await
}

/// The companions, with the vendor's on the first node, and the controllers of classic mode.
async fn start_programs(setup: &Setup) -> anyhow::Result<Vec<Program>> {
    let configuration = include_str!("../../../examples/node.yaml");
    let is_classic = !setup.cluster.has_structured_mode();
    let mut programs = Vec::new();
    if is_classic {
        programs.push(setup.controller()?);
        let user = setup
            .cluster
            .user("vendor-controller", &controller_rules()?)
            .await?;
        let mut command = vendor(setup, "drayman controller")?;
        command.env("KUBECONFIG", user);
        programs.push(setup.program("vendor-controller", command)?);
    }
    for number in 0..2 {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/hack/pretend-devices");
        let made = setup.cluster.node(number).command(script).output().await?;
        let message = String::from_utf8_lossy(&made.stderr).into_owned();
        anyhow::ensure!(made.status.success(), "{script}: {message}");
        programs.push(setup.companion(number, configuration)?);
    }
    let node_rules = if is_classic {
        node_rules()?
    } else {
        structured_node_rules()?
    };
    let node = setup.cluster.node(0);
    let user = setup.cluster.user("vendor-node", &node_rules).await?;
    let mut command = vendor(setup, "NODE_NAME=")?;
    let nodes = json!({ "nodes": [{ "name": node.name(), "init": node.init().0 }] });
    command
        .env(AS_PROGRAM, "1")
        .env("CLUSTER", nodes.to_string())
        .env("KUBECONFIG", user);
    programs.push(setup.program("vendor-companion", command)?);

    let everybody = User::new(&setup.cluster, "everybody").await?;
    // One word for each ready driver and node.
    let ready = if is_classic {
        "kubectl get nodeinventories -o 'jsonpath={.items[*].status.conditions[?(@.type==\"Ready\")].status}'"
    } else {
        "kubectl get resourceslices -o 'jsonpath={.items[?(@.spec.devices)].spec.driver}'"
    };
    let count = |printed: &str| printed.split_whitespace().filter(|word| *word != "False").count();
    everybody.until(ready, |printed| count(printed) == 3).await?;
    Ok(programs)
}

/// The command in the vendor's README that starts with `beginning`, run in the repository. The vendor's program is this test binary.
fn vendor(setup: &Setup, beginning: &str) -> anyhow::Result<tokio::process::Command> {
    let text = script("examples/vendor/README.md", "sh", "vendor");
    let line = text.lines().find(|line| line.starts_with(beginning));
    let line = line.with_context(|| format!("no line begins with {beginning}"))?;
    let place = setup.cluster.directory().join("place");
    let sensors = place.join("target/debug/examples/sensors");
    if !sensors.exists() {
        std::fs::create_dir_all(place.join("target/debug/examples"))?;
        symlink(harness::target().join("cluster"), place.join("target/cluster"))?;
        let vendors = "examples::run::the_vendors_companion_asks_for_the_name_of_its_node";
        let own = std::env::current_exe()?;
        let program = format!(
            "#!/bin/sh\nexec {} --exact --nocapture {vendors}\n",
            own.display()
        );
        std::fs::write(&sensors, program)?;
        std::fs::set_permissions(&sensors, std::fs::Permissions::from_mode(0o755))?;
    }
    let mut command = setup.cluster.command("bash");
    command
        .args(["-c", &format!("exec env {line}")])
        .current_dir(place)
        .env(
            "PATH",
            shell::path_with(&[Path::new(env!("CARGO_BIN_EXE_drayman"))]),
        );
    Ok(command)
}

async fn follow(setup: &Setup, folder: &Folder) -> anyhow::Result<()> {
    let user = User::new(&setup.cluster, &folder.name).await?;
    let mut names = Names::from([("namespace".to_owned(), folder.name.clone())]);
    for step in &folder.steps {
        user.follow(step, &mut names).await?;
    }
    let left = if setup.cluster.has_structured_mode() {
        "kubectl get pods,resourceclaims,resourceclaimtemplates,deviceclasses -o name"
    } else {
        "kubectl get pods,resourceclaims,resourceclaimtemplates,deviceclaimparameters,jobs,statefulsets -o name; \
         kubectl get resourceclasses,deviceclassparameters -o name"
    };
    user.until(left, str::is_empty)
        .await
        .context("the folder leaves objects behind")?;
    // Otherwise the next folder could lack devices that kubelet has yet to unprepare.
    user.until("drayman devices --state held", |printed| {
        printed.starts_with("No devices found")
    })
    .await
    .context("devices are held although no pod is left")
}

/// Removes the leftovers of a failed folder.
async fn clean_up(setup: &Setup, namespace: &str) -> anyhow::Result<()> {
    let timeout = format!("--timeout={}s", harness::TIMEOUT.as_secs());
    let cluster = &setup.cluster;
    let classes = if cluster.has_structured_mode() {
        "deviceclasses"
    } else {
        "resourceclasses,deviceclassparameters"
    };
    cluster
        .kubectl(&["delete", "namespace", namespace, &timeout])
        .await?;
    cluster.kubectl(&["delete", classes, "--all"]).await.map(drop)
}
