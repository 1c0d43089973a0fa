//! Tests that the kit detects a driver that breaks a rule and names the rule.

use std::collections::BTreeSet;
use std::time::Duration;

use drayman::testkit::{BrokenRule, Rule, conformance};

use crate::testkit::driver::TestDriver;
use crate::testkit::expect_finding;

/// Runs the kit for one rule on a driver that breaks it. Only rules about hanging calls have a short limit, because printing a panic takes
/// seconds on a loaded machine.
async fn broken(rule: Rule) -> Vec<BrokenRule> {
    let hangs = matches!(rule, Rule::ReturnsInTime | Rule::BecomesReady);
    let outcome = conformance(move |environment| TestDriver::new(&environment, Some(rule)))
        .only([rule])
        .call_limit(Duration::from_secs(if hangs { 3 } else { 20 }))
        .timeout(Duration::from_secs(10))
        .run()
        .await;
    expect_finding(rule, outcome)
}

async fn is_found(rule: Rule) {
    broken(rule).await;
}

/// Defines a test per rule, and a test that every rule has one.
macro_rules! defects {
    ($($name:ident: $rule:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                is_found(Rule::$rule).await;
            }
        )*

        #[test]
        fn every_rule_of_a_driver_has_a_defect_that_breaks_it() {
            let tried = BTreeSet::from([$(Rule::$rule),*]);
            assert_eq!(tried, Rule::DRIVER.iter().copied().collect::<BTreeSet<_>>());
        }
    };
}

defects! {
    a_name_that_changes_is_found: StableName
    a_driver_that_never_gets_ready_is_found: BecomesReady
    parameters_that_are_read_once_only_are_found: ParametersAreRead
    a_missing_evaluation_is_found: OneEntryPerClaim
    an_evaluation_that_reserves_is_found: EvaluationReservesNothing
    a_full_node_without_a_reason_is_found: FullIsUnsuitable
    an_evaluation_that_does_not_hold_is_found: SuitableIsAllocatable
    a_missing_result_is_found: OneAllocationPerClaim
    a_handle_that_is_too_large_is_found: RecordableAllocation
    an_allocation_for_another_node_is_found: ReachableAllocation
    an_allocation_that_is_not_atomic_is_found: CapacityIsKept
    an_allocation_that_differs_when_asked_again_is_found: AllocateIsIdempotent
    an_allocation_that_is_not_released_is_found: UnrecordedIsReleased
    an_error_for_a_claim_that_holds_nothing_is_found: DeallocateIsIdempotent
    a_release_of_a_recorded_allocation_is_found: RecordedIsHeld
    a_missed_observed_release_is_found: ObservedIsReleased
    a_new_instance_that_ignores_the_claims_is_found: StateFromClaims
    an_allocation_lost_by_a_kill_is_found: LostAllocationIsReleased
    a_failed_allocate_that_leaks_is_found: FailedAllocateIsReleased
    a_dropped_allocate_that_leaks_is_found: DroppedAllocateIsReleased
    a_driver_without_capacity_changes_is_found: FreedWakes
    a_finding_without_cause_is_found: NoFalseFinding
    an_error_without_a_reason_is_found: ReadableErrors
    a_call_that_does_not_return_is_found: ReturnsInTime
    a_panic_is_found: NoPanic
    a_driver_that_serves_the_kit_and_no_pods_is_found: ServesPods
    a_crash_that_is_not_survived_is_found: SurvivesCrash
    a_slow_call_that_is_not_survived_is_found: SurvivesSlowCall
    a_failed_call_that_is_not_survived_is_found: SurvivesFailedCall
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_driver_without_a_defect_conforms() {
    let report = conformance(|environment| TestDriver::new(&environment, None))
        .run()
        .await
        .unwrap();
    println!("{report}");
    let tried: Vec<Rule> = report.kept.keys().copied().collect();
    assert_eq!(
        tried,
        Rule::DRIVER
            .iter()
            .copied()
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect::<Vec<_>>()
    );
}

#[tokio::test]
async fn an_invalid_setup_is_reported() {
    let error = conformance(|environment| TestDriver::new(&environment, None))
        .nodes(["unknown"])
        .run()
        .await
        .unwrap_err();
    assert_eq!(error.reason(), "InvalidSetup");
    assert!(error.to_string().contains("no claim fits on any node"), "{error}");
    let error = conformance(|environment| TestDriver::new(&environment, None))
        .objects("kind: [")
        .run()
        .await
        .unwrap_err();
    assert_eq!(error.reason(), "InvalidSetup");
}
