//! The folders, one after the other, on one cluster.

use std::time::Instant;

use anyhow::{Context as _, bail};

use crate::examples::folder::{Folder, folders};
use crate::examples::pattern::Names;
use crate::examples::person::Person;
use crate::harness::Cluster;
use crate::stage::{Program, Stage, controller_rules, node_rules};
use crate::{harness, sensors};

/// Set where the next function is the vendor's program of the folder `vendor`.
const AS_PROGRAM: &str = "DRAYMAN_TEST_RUN_SENSORS";
const VENDOR: &str = "sensors.example.com";

/// This is also how the other test starts the vendor's companion: nothing else has to be built for it.
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
async fn every_example_does_what_its_readme_says() -> anyhow::Result<()> {
    // One folder alone, for those who write one.
    let only = std::env::var("DRAYMAN_TEST_EXAMPLE").ok();
    let folders: Vec<Folder> = folders()?
        .into_iter()
        .filter(|folder| only.as_ref().is_none_or(|only| *only == folder.name))
        .collect();
    anyhow::ensure!(!folders.is_empty(), "there is no folder {only:?}");
    let start = Instant::now();
    let stage = Stage::bare(Cluster::builder().nodes(2).start().await?).await?;
    let programs = start_programs(&stage).await?;
    println!("the cluster is ready after {:.1?}", start.elapsed());
    let mut failed = Vec::new();
    for folder in &folders {
        let start = Instant::now();
        let name = &folder.name;
        match follow(&stage, folder).await {
            Ok(()) => println!(
                "examples/{name}: {} commands in {:.1?}",
                folder.steps.len(),
                start.elapsed()
            ),
            Err(error) => {
                let about = "get events,pods,resourceclaims,resourceclasses,podschedulingcontexts";
                let arguments: Vec<&str> = about.split(' ').chain(["--namespace", name]).collect();
                let more = stage.cluster.kubectl(&arguments).await.unwrap_or_default();
                failed.push(format!("examples/{name}/README.md: {error:#}\n{more}"));
                clean_up(&stage, name).await.context(failed.join("\n\n"))?;
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
    stage.cluster.stop().await
}

/// Controller and companions, and those of the vendor on the first node.
async fn start_programs(stage: &Stage) -> anyhow::Result<Vec<Program>> {
    let configuration = include_str!("../../../examples/node.yaml");
    let mut programs = vec![stage.controller()?];
    for number in 0..2 {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/hack/pretend-devices");
        let made = stage.cluster.node(number).command(script).output().await?;
        let said = String::from_utf8_lossy(&made.stderr).into_owned();
        anyhow::ensure!(made.status.success(), "{script}: {said}");
        programs.push(stage.companion(number, configuration)?);
    }
    let user = stage
        .cluster
        .user("vendor-controller", &controller_rules()?)
        .await?;
    let mut command = stage.cluster.command(env!("CARGO_BIN_EXE_drayman"));
    command
        .args(["controller", "--driver-name", VENDOR, "--kubeconfig"])
        .arg(user);
    programs.push(stage.program("vendor-controller", command)?);
    let node = stage.cluster.node(0);
    let user = stage.cluster.user("vendor-node", &node_rules()?).await?;
    let mut command = node.command(std::env::current_exe()?);
    command
        .args(["--exact", "--nocapture"])
        .arg("examples::run::the_vendors_companion_asks_for_the_name_of_its_node")
        .env(AS_PROGRAM, "1")
        .env("NODE_NAME", node.name())
        .env("KUBECONFIG", user);
    programs.push(stage.program("vendor-companion", command)?);

    let everybody = Person::new(&stage.cluster, "everybody").await?;
    everybody
        .until(
            "kubectl get nodeinventories -o 'jsonpath={.items[*].status.conditions[?(@.type==\"Ready\")].status}'",
            |printed| printed.split_whitespace().filter(|status| *status == "True").count() == 3,
        )
        .await?;
    Ok(programs)
}

async fn follow(stage: &Stage, folder: &Folder) -> anyhow::Result<()> {
    let person = Person::new(&stage.cluster, &folder.name).await?;
    let mut names = Names::from([("namespace".to_owned(), folder.name.clone())]);
    for step in &folder.steps {
        person.follow(step, &mut names).await?;
    }
    let left = "kubectl get pods,resourceclaims,resourceclaimtemplates,deviceclaimparameters,jobs,statefulsets -o name; \
                kubectl get resourceclasses,deviceclassparameters -o name";
    person
        .until(left, str::is_empty)
        .await
        .context("it leaves something behind")?;
    // What kubelet still has to give back, the next folder would miss.
    person
        .until("drayman devices --state held", |printed| {
            printed.starts_with("No devices found")
        })
        .await
        .context("devices are held although nothing is left")
}

/// Takes away what a folder that failed has left, so that the next can be tried.
async fn clean_up(stage: &Stage, namespace: &str) -> anyhow::Result<()> {
    let timeout = format!("--timeout={}s", harness::PATIENCE.as_secs());
    let cluster = &stage.cluster;
    cluster
        .kubectl(&["delete", "namespace", namespace, &timeout])
        .await?;
    cluster
        .kubectl(&["delete", "resourceclasses,deviceclassparameters", "--all"])
        .await
        .map(drop)
}
