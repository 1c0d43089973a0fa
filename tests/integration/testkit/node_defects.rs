//! Tests that the kit detects a node driver that breaks a rule.

use std::collections::BTreeSet;
use std::time::Duration;

use drayman::testkit::{ClusterMode, Rule, node_conformance};

use crate::testkit::expect_finding;
use crate::testkit::node_driver::{TestNodeDriver, left_over};

async fn is_found(rule: Rule, mode: ClusterMode) {
    let hangs = matches!(rule, Rule::ReturnsInTime | Rule::FirstListComes);
    let outcome = node_conformance(move |environment| async move { TestNodeDriver::new(&environment, Some(rule)) })
        .left_over(left_over)
        .only([rule])
        .mode(mode)
        // Printing a panic takes seconds on a loaded machine.
        .call_limit(Duration::from_secs(if hangs { 3 } else { 20 }))
        // A hanging call is cancelled after ten seconds.
        .timeout(Duration::from_secs(if rule == Rule::NodeSurvivesSlowCall { 40 } else { 15 }))
        .run()
        .await;
    let findings = expect_finding(rule, outcome);
    if POD_RULES.contains(&rule) {
        let name = match mode {
            ClusterMode::Classic => "classic mode",
            ClusterMode::Structured => "structured mode",
        };
        assert!(
            findings.iter().all(|finding| finding.tried.contains(name)),
            "{findings:?}"
        );
    }
}

/// Rules that are tested with pods; the others are tested with calls only.
const POD_RULES: [Rule; 4] = [
    Rule::ServesPods,
    Rule::NodeSurvivesCrash,
    Rule::NodeSurvivesSlowCall,
    Rule::NodeSurvivesFailedCall,
];

macro_rules! defects {
    ($($name:ident: $rule:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                is_found(Rule::$rule, ClusterMode::Classic).await;
            }
        )*

        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn defects_that_pods_show_are_found_in_structured_mode() {
            futures::future::join_all(POD_RULES.map(|rule| is_found(rule, ClusterMode::Structured))).await;
        }

        #[test]
        fn every_rule_of_a_nodes_driver_has_a_defect_that_breaks_it() {
            let tried = BTreeSet::from([$(Rule::$rule),*]);
            assert_eq!(tried, Rule::NODE_DRIVER.iter().copied().collect::<BTreeSet<_>>());
        }
    };
}

defects! {
    a_list_that_does_not_come_is_found: FirstListComes
    an_invalid_name_is_found: ServableDevices
    names_that_change_with_each_process_are_found: StableDevices
    invalid_permissions_are_found: UsableContainerEdits
    container_edits_that_change_are_found: ContainerEditsAreStable
    a_device_in_place_of_another_is_found: UnknownDeviceIsRefused
    an_error_for_a_claim_that_is_prepared_is_found: PrepareIsIdempotent
    an_error_for_a_claim_that_is_not_prepared_is_found: UnprepareIsIdempotent
    an_unprepare_of_another_claim_is_found: UnprepareIsForOneClaim
    a_failed_prepare_that_leaks_is_found: FailedPrepareCanBeRolledBack
    a_dropped_prepare_that_leaks_is_found: DroppedPrepareCanBeRolledBack
    an_unprepare_that_leaks_is_found: NothingIsLeft
    a_call_that_does_not_return_is_found: ReturnsInTime
    a_panic_is_found: NoPanic
    a_driver_that_serves_the_kit_and_no_pods_is_found: ServesPods
    a_crash_that_is_not_survived_is_found: NodeSurvivesCrash
    a_slow_call_that_is_not_survived_is_found: NodeSurvivesSlowCall
    a_failed_call_that_is_not_survived_is_found: NodeSurvivesFailedCall
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_driver_without_a_defect_conforms() {
    let report = node_conformance(|environment| async move { TestNodeDriver::new(&environment, None) })
        .left_over(left_over)
        .run()
        .await
        .unwrap();
    println!("{report}");
    let tried: BTreeSet<Rule> = report.kept.keys().copied().collect();
    assert_eq!(tried, Rule::NODE_DRIVER.iter().copied().collect::<BTreeSet<_>>());
}
