//! A standby has watched everything but claims when it takes over; a restarted container takes over its own lease.

use std::collections::BTreeMap;

use anyhow::{Context as _, ensure};
use tokio::time::{Duration, Instant, sleep};

use crate::controller::assert_distinct;
use crate::harness::TIMEOUT;
use crate::setup::Setup;

const STANDBY: &str = "controller-b";

/// Number of list requests of the standby by resource, and the query of its list of claims.
async fn lists(setup: &Setup) -> anyhow::Result<(BTreeMap<String, usize>, Option<String>)> {
    let mut lists = BTreeMap::new();
    let mut claims = None;
    for entry in setup.cluster.audit().of_user(STANDBY).await? {
        if entry.verb == "list" {
            if entry.resource == "resourceclaims" {
                claims = Some(entry.uri);
            }
            *lists.entry(entry.resource).or_default() += 1;
        }
    }
    Ok((lists, claims))
}

#[tokio::test]
async fn a_new_leader_lists_claims_and_knows_waiting_pods() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 1).await?;
    setup.make_template(None).await?;
    let mut first = setup.replica("controller-a").await?;
    setup.serve("before").await?;

    let second = setup.replica(STANDBY).await?;
    let warm: BTreeMap<String, usize> = [
        "deviceclaimparameters",
        "deviceclassparameters",
        "nodeinventories",
        "podschedulingcontexts",
        "resourceclasses",
    ]
    .map(|resource| (resource.to_owned(), 1))
    .into();
    let deadline = Instant::now() + TIMEOUT;
    while lists(&setup).await?.0 != warm {
        ensure!(Instant::now() < deadline, "{:?} are listed", lists(&setup).await?);
        sleep(Duration::from_millis(100)).await;
    }
    // The standby learns of this pod only through its watch, while another controller leads.
    setup.make_pod("waiting").await?;
    let asked = |context: Option<&drayman::api::resource::PodSchedulingContext>| {
        context.is_some_and(|context| !context.status.resource_claims.is_empty())
    };
    setup.wait(setup.contexts(), "waiting", "answered", asked).await?;

    first.kill().await?;
    setup.remove_pod("before").await?;
    setup.until_bound("waiting").await?;
    assert_distinct(&setup).await?;
    let (mut after, claims) = lists(&setup).await?;
    let claims = claims.context("the claims are listed")?;
    assert!(
        !claims.contains("resourceVersion="),
        "a stale list could lack allocations of the last leader: {claims}"
    );
    assert_eq!(after.remove("resourceclaims"), Some(1));
    // The leader searches for another release with its driver's name.
    assert!(after.remove("leases").unwrap_or_default() <= 2);
    assert_eq!(after, warm, "nothing else is listed a second time");
    setup.end([second]).await
}

/// Limits for a takeover with the chart's lease. A restarted container waits for 5 s; without knowing its own lease, it would wait for the
/// lease of 15 s and a tenth of it. A standby waits as long from the last renewal, of which there is one every 2 s. The rest is a margin
/// for slow machines.
const CONTAINER_MAX: Duration = Duration::from_secs(14);
const REPLICA_MIN: Duration = Duration::from_secs(10);
const REPLICA_MAX: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_restarted_container_takes_its_own_lease_over() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 3).await?;
    let directory = setup.cluster.directory().join("state");
    std::fs::create_dir(&directory)?;
    let flag = format!("--leader-elect-state-dir={}", directory.display());
    let flags = [flag.as_str()];
    let immediate = async |name: &str| {
        // The request may be slow, and the wait that is measured has begun before it.
        let start = Instant::now();
        setup.make_claim(name, "Immediate", false).await?;
        setup.until_allocated(name).await?;
        anyhow::Ok(start.elapsed())
    };

    let mut first = setup.replica_with("controller-a", &flags).await?;
    immediate("before").await?;
    let locked = setup.replica_with("controller-b", &flags).await?;
    assert_eq!(
        locked.ended().await?.code(),
        Some(1),
        "the same directory as that of the first"
    );
    first.kill().await?;
    let mut again = setup.replica_with("controller-a", &flags).await?;
    let container = immediate("same-pod").await?;
    println!(
        "killed and started again in the same pod: allocates after {:.1} s",
        container.as_secs_f64()
    );
    assert!(container < CONTAINER_MAX, "{container:?}");
    assert!(
        container > Duration::from_secs(4),
        "{container:?}: a request of the killed one could still arrive"
    );

    let standby = setup.replica_with("controller-b", &[]).await?;
    standby.logged("waiting to lead").await?;
    again.kill().await?;
    let replica = immediate("other-pod").await?;
    println!(
        "killed beside a standby: allocates after {:.1} s",
        replica.as_secs_f64()
    );
    assert!(replica < REPLICA_MAX, "{replica:?}");
    assert!(
        replica > REPLICA_MIN,
        "{replica:?}: another pod's process may still live"
    );
    setup.end([standby]).await
}
