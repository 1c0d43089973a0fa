//! Checks of a driver by calls alone, as the controller makes them. Each check has its own cluster and instance.

use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;

use super::fixture::{CheckResult, Fixture, summed};
use super::instance::{ClaimAllocation, Instance, Kit, shown_error};
use super::measure::Capacity;
use super::rule::Rule;
use crate::driver::{CapacityChange, Driver, DriverErrorKind, Holding, Observation};

/// Maximum number of polls before an allocation is dropped.
const MAX_POLLS: usize = 12;
/// Number of rounds of concurrent calls that exceed the capacity.
const ROUNDS: usize = 5;

/// Exhausted capacity.
pub(super) async fn full<D: Driver>(kit: &Kit<D>, fixture: &Fixture, capacity: &Capacity) -> CheckResult<()> {
    let instance = kit.started(fixture).await?;
    let Some(places) = capacity.places else {
        return Ok(());
    };
    let held = instance.some(places).await?;
    let claim = [fixture.claim()?];
    let unsuitable = instance.unsuitable_nodes(&claim, &fixture.nodes).await?;
    for node in &fixture.nodes {
        let reason = unsuitable.first().and_then(|unsuitable| unsuitable.get(node));
        if reason.is_none_or(|reason| reason.trim().is_empty()) {
            let tried = format!(
                "unsuitable_nodes after {} claims are allocated and none fits any more",
                held.len()
            );
            let expected = format!("a reason for {node}, such as \"{places} of {places} held\"");
            return Err(instance.broken(Rule::FullIsUnsuitable, &tried, expected, format!("{reason:?}")));
        }
    }
    for node in fixture.nodes.iter().map(|node| Some(node.as_str())).chain([None]) {
        let tried = format!("allocate one claim more than the {places} that fit");
        match instance.allocate(&claim, node).await? {
            Ok(_) => {
                let rule = Rule::CapacityIsKept;
                return Err(instance.broken(rule, &tried, "an error", "an allocation"));
            }
            Err(error) if error.kind == DriverErrorKind::Invalid => {
                let expected = "an error of the kind Retry, because the request is valid";
                return Err(instance.broken(Rule::FullIsUnsuitable, &tried, expected, shown_error(&error)));
            }
            Err(_) => {}
        }
    }
    instance.deallocate_all(&held).await?;
    let tried = "refused allocations, then deallocate all claims";
    instance
        .expect_free(Rule::UnrecordedIsReleased, tried, capacity.places, 0)
        .await
}

/// More concurrent calls than capacity.
pub(super) async fn rush<D: Driver>(kit: &Kit<D>, fixture: &Fixture, capacity: &Capacity) -> CheckResult<()> {
    let instance = kit.started(fixture).await?;
    let Some(places) = capacity.places else {
        return Ok(());
    };
    for _ in 0..ROUNDS {
        let claims = fixture.claims(places + fixture.nodes.len().max(2))?;
        let results = instance.at_once(&claims).await?;
        let held: Vec<ClaimAllocation> = results.iter().flatten().cloned().collect();
        fixture.note(format!(
            "({} concurrent allocations -> {} succeeded)",
            claims.len(),
            held.len()
        ));
        if held.len() > places {
            let tried = format!("{} concurrent allocations", claims.len());
            let expected = format!("at most {places} of them succeed");
            let found = format!(
                "{} succeed, on {}",
                held.len(),
                summed(held.iter().map(|one| one.node.clone()))
            );
            return Err(instance.broken(Rule::CapacityIsKept, &tried, expected, found));
        }
        for claim in &claims {
            instance.deallocate(&Holding::new(claim.clone()), None).await?;
        }
    }
    let tried = "concurrent allocations, then deallocate all claims";
    instance
        .expect_free(Rule::UnrecordedIsReleased, tried, capacity.places, 0)
        .await
}

/// Repeated calls, and allocations that were never recorded.
pub(super) async fn again<D: Driver>(
    kit: &Kit<D>,
    fixture: &Fixture,
    capacity: &Capacity,
) -> CheckResult<()> {
    let instance = kit.started(fixture).await?;
    let held = instance.some(1).await?;
    let places = capacity.places;
    for one in &held {
        for _ in 0..2 {
            let again = instance
                .allocate(std::slice::from_ref(&one.claim), Some(&one.node))
                .await?;
            let same = matches!(again.as_deref(), Ok([allocation]) if *allocation == one.allocation);
            if !same {
                let expected = format!("{:?}", one.allocation);
                let found = format!("{again:?}");
                return Err(instance.broken(Rule::AllocateIsIdempotent, "allocate again", expected, found));
            }
        }
    }
    let tried = "allocate three times for one claim";
    instance
        .expect_free(Rule::AllocateIsIdempotent, tried, places, held.len())
        .await?;
    let stranger = Holding::new(fixture.claim()?);
    for _ in 0..2 {
        instance.deallocate(&stranger, None).await?;
    }
    let tried = "deallocate a claim that was never allocated, while another claim holds an allocation";
    instance
        .expect_free(Rule::DeallocateIsIdempotent, tried, places, held.len())
        .await?;
    for _ in 0..2 {
        instance.deallocate_all(&held).await?;
    }
    let tried = "deallocate an unrecorded allocation twice";
    instance
        .expect_free(Rule::UnrecordedIsReleased, tried, places, 0)
        .await?;
    for one in &held {
        instance.take(std::slice::from_ref(&one.claim), &one.node).await?;
    }
    instance.deallocate_all(&held).await?;
    let tried = "allocate a deallocated claim again, and deallocate it";
    instance
        .expect_free(Rule::UnrecordedIsReleased, tried, places, 0)
        .await
}

/// Recorded allocations, through `observe`.
pub(super) async fn recorded<D: Driver>(
    kit: &Kit<D>,
    fixture: &Fixture,
    capacity: &Capacity,
) -> CheckResult<()> {
    let instance = kit.started(fixture).await?;
    let places = capacity.places;
    for gone in [false, true] {
        let Some(held) = instance.allocate_one().await? else {
            return Ok(());
        };
        instance.record(&held).await?;
        let tried = "allocate, and observe the recorded allocation";
        instance
            .expect_free(Rule::RecordedIsHeld, tried, places, 1)
            .await?;
        // Repeats the observation, as after any other change of the claim.
        instance.record(&held).await?;
        let holding = held.recorded(fixture.driver_name());
        instance.deallocate(&holding, Some(&held.allocation)).await?;
        let tried =
            "deallocate a recorded allocation, whose record remains until the controller's next write";
        instance
            .expect_free(Rule::RecordedIsHeld, tried, places, 1)
            .await?;
        let (observation, tried) = if gone {
            let uid = held.uid();
            (Observation::Gone { uid }, "observe that the claim is gone")
        } else {
            let holding = held.unrecorded();
            (
                Observation::Changed(holding),
                "observe the claim without allocation",
            )
        };
        instance.observe(observation).await?;
        instance
            .expect_free(Rule::ObservedIsReleased, tried, places, 0)
            .await?;
        if !gone {
            instance.observe(Observation::Gone { uid: held.uid() }).await?;
        }
    }
    // A finalizer removed by force causes no deallocation.
    let Some(held) = instance.allocate_one().await? else {
        return Ok(());
    };
    instance.record(&held).await?;
    instance.observe(Observation::Gone { uid: held.uid() }).await?;
    let tried = "observe that a recorded claim is gone, without an earlier deallocate";
    instance
        .expect_free(Rule::ObservedIsReleased, tried, places, 0)
        .await
}

/// State of a new instance after a restart.
pub(super) async fn restart<D: Driver>(
    kit: &Kit<D>,
    fixture: &Fixture,
    capacity: &Capacity,
) -> CheckResult<()> {
    let places = capacity.places;
    let instance = kit.started(fixture).await?;
    let held = instance.some(places.map_or(2, |places| places.min(2))).await?;
    for one in &held {
        instance.record(one).await?;
    }
    let recorded = instance.recorded(&held);
    instance.kill().await;

    let instance = kit.instance(fixture).await?;
    instance.begin(recorded.clone()).await?;
    let tried = "killed; observe all claims after the restart";
    instance
        .expect_free(Rule::StateFromClaims, tried, places, held.len())
        .await?;
    instance.kill().await;

    let instance = kit.instance(fixture).await?;
    instance.begin(Vec::new()).await?;
    let tried = "killed; observe an empty list of claims after the restart";
    instance
        .expect_free(Rule::StateFromClaims, tried, places, 0)
        .await?;
    instance.kill().await;

    // An allocation that was not recorded before the crash.
    let instance = kit.instance(fixture).await?;
    instance.begin(Vec::new()).await?;
    let lost = instance.some(1).await?;
    instance.kill().await;
    let instance = kit.instance(fixture).await?;
    let holdings: Vec<Holding> = lost.iter().map(ClaimAllocation::unrecorded).collect();
    instance.begin(holdings.clone()).await?;
    for holding in &holdings {
        instance.deallocate(holding, None).await?;
    }
    let tried = "killed between an allocation and its record; deallocate after the start";
    instance
        .expect_free(Rule::LostAllocationIsReleased, tried, places, 0)
        .await
}

/// Several claims of one pod.
pub(super) async fn several_claims<D: Driver>(
    kit: &Kit<D>,
    fixture: &Fixture,
    capacity: &Capacity,
) -> CheckResult<()> {
    let instance = kit.started(fixture).await?;
    let Capacity {
        places,
        node,
        together,
    } = capacity;
    let claims = fixture.claims(*together)?;
    let allocations = instance.take(&claims, node).await?;
    let held: Vec<ClaimAllocation> = claims
        .into_iter()
        .zip(allocations)
        .map(|(claim, allocation)| ClaimAllocation {
            claim,
            allocation,
            node: node.clone(),
        })
        .collect();
    let tried = format!("allocate {together} claims of a pod together");
    instance
        .expect_free(Rule::OneAllocationPerClaim, &tried, *places, *together)
        .await?;
    instance.deallocate_all(&held).await?;
    let tried = format!("allocate {together} claims of a pod together, and deallocate all");
    instance
        .expect_free(Rule::FailedAllocateIsReleased, &tried, *places, 0)
        .await?;
    let Some(places) = *places else { return Ok(()) };
    let claims = fixture.claims(places + 1)?;
    if instance.allocate(&claims, Some(node)).await?.is_ok() {
        let tried = format!("allocate {} claims together where {places} fit", claims.len());
        let found = "an allocation for each claim";
        return Err(instance.broken(Rule::CapacityIsKept, &tried, "an error", found));
    }
    for claim in &claims {
        instance.deallocate(&Holding::new(claim.clone()), None).await?;
    }
    let tried = format!(
        "allocate {} claims together where {places} fit, and deallocate each",
        claims.len()
    );
    instance
        .expect_free(Rule::FailedAllocateIsReleased, &tried, Some(places), 0)
        .await
}

/// Calls dropped at a wait because of the time limit.
pub(super) async fn dropped<D: Driver>(
    kit: &Kit<D>,
    fixture: &Fixture,
    capacity: &Capacity,
) -> CheckResult<()> {
    let instance = kit.started(fixture).await?;
    for waits in 1..=MAX_POLLS {
        let claim = fixture.claim()?;
        let done = instance.allocate_and_drop(&claim, &capacity.node, waits).await?;
        instance.deallocate(&Holding::new(claim), None).await?;
        let tried = if done {
            "allocate, lose the answer, then deallocate".to_owned()
        } else {
            format!("drop an allocate at wait {waits}, then deallocate")
        };
        instance
            .expect_free(Rule::DroppedAllocateIsReleased, &tried, capacity.places, 0)
            .await?;
        if done {
            break;
        }
    }
    Ok(())
}

/// Wake-up of waiting pods.
pub(super) async fn woken<D: Driver>(
    kit: &Kit<D>,
    fixture: &Fixture,
    capacity: &Capacity,
) -> CheckResult<()> {
    let instance = kit.instance(fixture).await?;
    let mut changes = instance.capacity_changes();
    instance.begin(Vec::new()).await?;
    let Some(places) = capacity.places else {
        return Ok(());
    };
    let held = instance.some(places).await?;
    let (Some(first), true) = (held.first(), held.len() == places) else {
        return Ok(());
    };
    instance.record(first).await?;
    // Skips capacity changes reported for the start.
    settle(kit.limit, &mut changes).await;
    instance.observe(Observation::Changed(first.unrecorded())).await?;
    let tried = "hold the whole capacity, then observe one claim without allocation";
    wait_for(&instance, kit.limit, &mut changes, tried).await?;
    if let Some(last) = held.get(1) {
        settle(kit.limit, &mut changes).await;
        instance
            .deallocate(&last.unrecorded(), Some(&last.allocation))
            .await?;
        let tried = "hold all but one claim, then deallocate an unrecorded allocation";
        wait_for(&instance, kit.limit, &mut changes, tried).await?;
    }
    Ok(())
}

/// Skips the pending changes. A driver that yields all the time never pauses.
async fn settle(limit: Duration, changes: &mut UnboundedReceiver<CapacityChange>) {
    let pause = Duration::from_millis(50);
    let all = async { while let Ok(Some(_)) = tokio::time::timeout(pause, changes.recv()).await {} };
    // Both results are valid.
    let _ = tokio::time::timeout(limit, all).await;
}

async fn wait_for<D: Driver>(
    instance: &Instance<'_, D>,
    limit: Duration,
    changes: &mut UnboundedReceiver<CapacityChange>,
    tried: &str,
) -> CheckResult<()> {
    let found = match tokio::time::timeout(limit, changes.recv()).await {
        Ok(Some(_)) => return Ok(()),
        Ok(None) => "the stream has ended".to_owned(),
        Err(_) => format!("nothing within {limit:?}"),
    };
    let expected =
        "capacity_changes yields; for a driver that cannot report it, set without_waking() in the test";
    Err(instance.broken(Rule::FreedWakes, tried, expected, found))
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;
    use crate::driver::CapacityCause;

    #[tokio::test(start_paused = true)]
    async fn a_driver_that_yields_all_the_time_does_not_stop_the_kit() {
        let (sender, mut changes) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while sender.send(CapacityChange::new(CapacityCause::Freed)).is_ok() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        let limit = Duration::from_secs(1);
        let settled = tokio::time::timeout(2 * limit, settle(limit, &mut changes)).await;
        assert!(settled.is_ok());
    }
}
