//! This release and another one side by side: controllers, companions and CRDs, in every combination.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams, PostParams};

use crate::harness::{TIMEOUT, not_run};
use crate::kubelet_plugin::both_apis::{
    CONFIGURATION, ObservedDevices, PREFIX, RESOURCE, Random, assert_all_free, environment,
};
use crate::kubelet_plugin::helper::{devices_inside, restarts, wait_for_inventory};
use crate::pods::{MINORS, make_devices};
use crate::setup::{
    DRIVER, PROGRAM, Program, REGISTERED, Setup, is_allocated, pod_with_claim, pod_with_limit,
};

/// Variable with the path of the other release's program.
const OTHER: &str = "DRAYMAN_TEST_OTHER_RELEASE";
/// Number of pods of each sort that must start between two changes.
const SERVED: usize = 3;

/// Pods of both sorts that come and go.
#[derive(Default)]
struct Traffic {
    claims: Cell<usize>,
    limits: Cell<usize>,
    done: Cell<bool>,
}

impl Traffic {
    /// Creates pods and deletes the started ones until told to stop. All pods must start. At most two have a claim and one has a limit:
    /// claims get the first free devices and containers the last, and kubelet waits more than a minute before it retries a refused pod.
    async fn run(&self, setup: &Setup, watched: &mut ObservedDevices, seed: u64) -> anyhow::Result<()> {
        let (mut numbers, mut made) = (Random(seed), 0);
        let mut waiting: BTreeMap<String, Instant> = BTreeMap::new();
        let mut started: Vec<String> = Vec::new();
        while !self.done.get() || !waiting.is_empty() {
            watched.look(setup.cluster.node(0));
            let present = phases(setup).await?;
            let by_claim = present.iter().filter(|(name, _)| is_claim(name)).count();
            let by_limit = present
                .iter()
                .filter(|(name, _)| name.starts_with("plugged-"))
                .count();
            let sort = match (by_claim, by_limit) {
                _ if self.done.get() => None,
                (_, 0) if numbers.below(2) == 0 => Some(false),
                (0 | 1, _) => Some(true),
                _ => None,
            };
            if let Some(by_claim) = sort {
                made += 1;
                waiting.insert(create(setup, made, by_claim).await?, Instant::now());
            }
            for (name, phase) in present {
                let Some(since) = waiting.get(&name) else { continue };
                match phase.as_str() {
                    "Running" => {
                        let count = if is_claim(&name) {
                            &self.claims
                        } else {
                            &self.limits
                        };
                        count.set(count.get() + 1);
                        waiting.remove(&name);
                        started.push(name);
                    }
                    // Kubelet rejects a pod that is bound while the companion is replaced. Its owner would create another one.
                    "Failed" if !is_claim(&name) => {
                        waiting.remove(&name);
                        setup.pods().delete(&name, &DeleteParams::default()).await?;
                    }
                    _ => anyhow::ensure!(since.elapsed() < TIMEOUT * 2, "{name} does not start: {phase}"),
                }
            }
            if started.len() > 1 || (!started.is_empty() && (numbers.below(3) == 0 || self.done.get())) {
                let index = usize::try_from(numbers.below(started.len() as u64))?;
                let name = started.swap_remove(index);
                setup.pods().delete(&name, &DeleteParams::default()).await?;
            }
            tokio::time::sleep(Duration::from_millis(100 + numbers.below(300))).await;
        }
        for name in started {
            setup.pods().delete(&name, &DeleteParams::default()).await?;
        }
        Ok(())
    }

    /// Waits until more pods of both sorts have started.
    async fn until_progress(&self, what: &str) -> anyhow::Result<()> {
        let (claims, limits, since) = (self.claims.get(), self.limits.get(), Instant::now());
        while self.claims.get() < claims + SERVED || self.limits.get() < limits + SERVED {
            anyhow::ensure!(since.elapsed() < TIMEOUT * 2, "{what}: no pods start");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        println!(
            "{what}: {SERVED} pods of each sort started in {:?}",
            since.elapsed()
        );
        Ok(())
    }
}

fn is_claim(pod: &str) -> bool {
    pod.starts_with("claims-")
}

async fn create(setup: &Setup, number: usize, by_claim: bool) -> anyhow::Result<String> {
    let sort = if by_claim { "claims" } else { "plugged" };
    let name = format!("{sort}-{number}");
    let pod = if by_claim {
        pod_with_claim(&name)?
    } else {
        pod_with_limit(&name, RESOURCE)?
    };
    setup.pods().create(&PostParams::default(), &pod).await?;
    Ok(name)
}

async fn phases(setup: &Setup) -> anyhow::Result<Vec<(String, String)>> {
    let pods = Api::<Pod>::namespaced(setup.cluster.client(), "default");
    let pods = pods.list(&ListParams::default()).await?.items.into_iter();
    let phase = |pod: Pod| Some((pod.metadata.name?, pod.status?.phase?));
    Ok(pods.filter_map(phase).collect())
}

/// The programs of one release.
#[derive(Clone, Copy)]
struct Release<'a> {
    name: &'a str,
    program: &'a Path,
}

impl Release<'_> {
    async fn controller(self, setup: &Setup) -> anyhow::Result<Program> {
        let name = format!("controller-{}", self.name);
        setup.replica_of(self.program, &name).await
    }

    async fn companion(self, setup: &Setup) -> anyhow::Result<Program> {
        let companion = setup.companion_of(self.program, 0, CONFIGURATION, &[])?;
        companion.logged(REGISTERED).await?;
        Ok(companion)
    }

    /// Applies the CRDs of this release.
    async fn definitions(self, setup: &Setup) -> anyhow::Result<()> {
        let printed = setup.cluster.command(self.program).arg("crds").output().await?;
        anyhow::ensure!(printed.status.success(), "{} prints no definitions", self.name);
        let file = setup.cluster.directory().join(format!("crds-{}.yaml", self.name));
        std::fs::write(&file, printed.stdout)?;
        let file = file.to_str().unwrap_or_default();
        let apply = ["apply", "--server-side", "--force-conflicts", "-f", file];
        setup.cluster.kubectl(&apply).await.map(drop)
    }
}

/// Replaces one program after the other, so that each pair of releases serves pods, and each program continues where one of the other
/// release has ended or was killed.
async fn replace_in_every_order(
    setup: &Setup,
    traffic: &Traffic,
    old: Release<'_>,
    new: Release<'_>,
) -> anyhow::Result<(Program, Program)> {
    let mut companion = old.companion(setup).await?;
    let mut controller = old.controller(setup).await?;
    traffic.until_progress("controller old, companion old").await?;
    // Kubelet still has the killed one registered, through a socket that the next one may not see.
    companion.kill().await?;
    companion = new.companion(setup).await?;
    traffic.until_progress("controller old, companion new").await?;
    new.definitions(setup).await?;
    let standby = new.controller(setup).await?;
    controller.end().await?;
    controller = standby;
    traffic.until_progress("controller new, companion new").await?;
    companion.end().await?;
    companion = old.companion(setup).await?;
    traffic.until_progress("controller new, companion old").await?;
    let standby = old.controller(setup).await?;
    controller.kill().await?;
    controller = standby;
    old.definitions(setup).await?;
    traffic
        .until_progress("back to controller old, companion old")
        .await?;
    let standby = new.controller(setup).await?;
    controller.kill().await?;
    controller = standby;
    traffic
        .until_progress("controller new, companion old, definitions old")
        .await?;
    let standby = old.controller(setup).await?;
    controller.end().await?;
    controller = standby;
    companion.end().await?;
    companion = new.companion(setup).await?;
    traffic
        .until_progress("controller old, companion new, definitions old")
        .await?;
    let standby = new.controller(setup).await?;
    controller.end().await?;
    controller = standby;
    companion.kill().await?;
    companion = new.companion(setup).await?;
    traffic
        .until_progress("controller new, companion new, definitions old")
        .await?;
    traffic.done.set(true);
    Ok((controller, companion))
}

/// Asserts that a pod keeps its device from the first program to the last.
async fn assert_undisturbed(setup: &Setup, device: &[String]) -> anyhow::Result<()> {
    assert_eq!(devices_inside(setup, "stays", PREFIX).await?, device);
    assert_eq!(restarts(setup, "stays").await?, 0);
    Ok(())
}

#[tokio::test]
async fn two_releases_serve_pods_side_by_side_in_every_order() -> anyhow::Result<()> {
    let Some(other) = std::env::var_os(OTHER).map(PathBuf::from) else {
        not_run::not_run(&format!("{OTHER} names no program of another release"));
        return Ok(());
    };
    let (old, new) = (
        Release {
            name: "old",
            program: &other,
        },
        Release {
            name: "new",
            program: Path::new(PROGRAM),
        },
    );
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed()?;
    let seed = environment("DRAYMAN_TEST_BOTH_APIS_SEED", now.as_secs());
    println!("DRAYMAN_TEST_BOTH_APIS_SEED={seed}");
    let setup = Setup::start(1).await?;
    old.definitions(&setup).await?;
    let node = setup.cluster.node(0);
    make_devices(node, PREFIX, &MINORS)?;
    setup.make_template(None).await?;
    setup
        .pods()
        .create(&PostParams::default(), &pod_with_claim("stays")?)
        .await?;
    let (traffic, mut watched) = (Traffic::default(), ObservedDevices::default());
    let ((controller, companion), ()) =
        tokio::try_join!(replace_in_every_order(&setup, &traffic, old, new), async {
            setup.until_running("stays").await?;
            let device = devices_inside(&setup, "stays", PREFIX).await?;
            let claim = setup.claim_of("stays", "allocated", is_allocated).await?;
            traffic.run(&setup, &mut watched, seed).await?;
            assert_undisturbed(&setup, &device).await?;
            let after = setup.claim_of("stays", "allocated", is_allocated).await?;
            assert_eq!(after.status.allocation, claim.status.allocation);
            setup.pods().delete("stays", &DeleteParams::default()).await?;
            Ok(())
        })?;
    println!(
        "{} pods by claim and {} by limit started",
        traffic.claims.get(),
        traffic.limits.get()
    );
    wait_for_inventory(&setup, DRIVER, 4, 0).await?;
    setup.until_allocatable(RESOURCE, "4").await?;
    assert_all_free(&setup, &mut watched, MINORS.len()).await?;
    setup.end([companion, controller]).await
}
