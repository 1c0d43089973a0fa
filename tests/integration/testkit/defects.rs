//! The kit can fail: a driver that breaks a rule is found out, and the finding says which.

use std::collections::BTreeSet;
use std::time::Duration;

use drayman::testkit::{Finding, Rule, conformance};

use crate::testkit::found_out;
use crate::testkit::shelf::Shelf;

/// Runs the kit on a driver that breaks a rule, as far as the rule is concerned. Only where a call hangs its limit is short: to
/// print a panic takes seconds on a machine with other work.
async fn broken(rule: Rule) -> Vec<Finding> {
    let hangs = matches!(rule, Rule::ReturnsInTime | Rule::BecomesReady);
    let outcome = conformance(move |environment| Shelf::new(&environment, Some(rule)))
        .only([rule])
        .call_limit(Duration::from_secs(if hangs { 3 } else { 20 }))
        .timeout(Duration::from_secs(10))
        .run()
        .await;
    found_out(rule, outcome)
}

async fn is_found(rule: Rule) {
    broken(rule).await;
}

/// A test for each rule, so that each fails on its own; and none is forgotten.
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
    a_missing_verdict_is_found: OneEntryPerClaim
    a_verdict_that_reserves_is_found: EvaluationReservesNothing
    a_full_node_without_a_reason_is_found: FullIsUnsuitable
    a_verdict_that_does_not_hold_is_found: SuitableIsAllocatable
    a_missing_result_is_found: OneAllocationPerClaim
    a_handle_that_is_too_large_is_found: RecordableAllocation
    an_allocation_for_another_node_is_found: ReachableAllocation
    a_look_that_is_not_one_step_with_the_hold_is_found: CapacityIsKept
    an_allocation_that_differs_when_asked_again_is_found: AllocateIsIdempotent
    what_is_not_given_back_is_found: UnrecordedIsReleased
    an_error_for_a_claim_that_holds_nothing_is_found: DeallocateIsIdempotent
    what_is_freed_while_it_is_recorded_is_found: RecordedIsHeld
    what_is_not_freed_when_it_is_observed_is_found: ObservedIsReleased
    a_new_instance_that_does_not_look_at_the_claims_is_found: StateFromClaims
    what_a_killed_process_has_left_is_found: LostAllocationIsReleased
    a_batch_that_leaves_something_is_found: FailedAllocateIsReleased
    a_dropped_call_that_leaves_something_is_found: DroppedAllocateIsReleased
    a_driver_that_wakes_nobody_is_found: FreedWakes
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
    let report = conformance(|environment| Shelf::new(&environment, None))
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
async fn a_test_with_which_nothing_can_be_tried_says_so() {
    let error = conformance(|environment| Shelf::new(&environment, None))
        .nodes(["unknown"])
        .run()
        .await
        .unwrap_err();
    assert_eq!(error.reason(), "InvalidSetup");
    assert!(error.to_string().contains("no claim fits on any node"), "{error}");
    let error = conformance(|environment| Shelf::new(&environment, None))
        .objects("kind: [")
        .run()
        .await
        .unwrap_err();
    assert_eq!(error.reason(), "InvalidSetup");
}
