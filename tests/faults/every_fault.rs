//! Runs the scenario with every fault at every point.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use drayman::testcluster::api::ClusterMode;
use drayman::testcluster::faults::{Fault, Operation, PlannedFault};
use tokio::runtime::Runtime;

use crate::not_run::is_root;
use crate::program::panics;
use crate::scenario::{COMPANION, CONTROLLER, RunResult, run};

/// By program, operation and kind of fault: number of planned and of injected faults.
type Hits = BTreeMap<(&'static str, Operation, Fault), (u64, u64)>;

/// Concurrent runs. Each of them mostly waits.
const AT_ONCE: usize = 12;
const PROGRAMS: [&str; 2] = [CONTROLLER, COMPANION];
/// Places that occur in every run. If one is missing, faults are no longer injected there.
const PLACES: [(&str, Operation); 6] = [
    (CONTROLLER, Operation::Request),
    (CONTROLLER, Operation::Event),
    (COMPANION, Operation::Request),
    (COMPANION, Operation::Event),
    (COMPANION, Operation::Disk),
    (COMPANION, Operation::Call),
];
/// Places that occur in every run of structured mode, which has no controller.
const STRUCTURED_PLACES: [(&str, Operation); 4] = [PLACES[2], PLACES[3], PLACES[4], PLACES[5]];

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

fn number(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

fn command(mode: ClusterMode, planned: &[PlannedFault]) -> String {
    let planned: Vec<String> = planned.iter().map(ToString::to_string).collect();
    let variable = match mode {
        ClusterMode::Classic => "FAULT",
        ClusterMode::Structured => "STRUCTURED_FAULT",
    };
    format!(
        "{variable}={} cargo test --test faults replay -- --nocapture",
        planned.join(",")
    )
}

/// Parses the output of [`command`].
fn parse(text: &str) -> Option<PlannedFault> {
    let parts: Vec<&str> = text.split(':').collect();
    let [program, operation, number, fault] = parts.as_slice() else {
        return None;
    };
    let operation = Operation::ALL
        .into_iter()
        .find(|known| format!("{known:?}") == *operation)?;
    let faults = operation.faults().iter();
    Some(PlannedFault {
        program: PROGRAMS.into_iter().find(|known| known == program)?,
        operation,
        number: number.parse().ok()?,
        fault: *faults.clone().find(|known| format!("{known:?}") == *fault)?,
    })
}

fn now() -> jiff::Timestamp {
    jiff::Timestamp::now()
}

/// Every fault at every operation of a run without faults.
fn plans(counts: &BTreeMap<(&'static str, Operation), u64>) -> Vec<PlannedFault> {
    let mut plans = Vec::new();
    for (&(program, operation), &count) in counts {
        for number in 1..=count {
            for &fault in operation.faults() {
                plans.push(PlannedFault {
                    program,
                    operation,
                    number,
                    fault,
                });
            }
        }
    }
    plans
}

/// Kills and lost replies at every operation, and the other faults, after which the program keeps running, at every fourth. A kill before a
/// disk step or an event is almost equivalent to one after the previous step, so it is reduced like the others.
fn daily(plans: Vec<PlannedFault>) -> Vec<PlannedFault> {
    let is_daily = |planned: &PlannedFault| {
        let ends = match planned.operation {
            Operation::Disk | Operation::Event => &[Fault::KilledAfter][..],
            _ => &[Fault::KilledBefore, Fault::KilledAfter, Fault::ReplyLost],
        };
        let faults = planned.operation.faults().iter();
        let turn = faults.zip(0_u64..).find(|(fault, _)| **fault == planned.fault);
        let turn = turn.map_or(0, |(_, turn)| turn);
        ends.contains(&planned.fault) || planned.number == 1 || (planned.number + turn).is_multiple_of(4)
    };
    plans.into_iter().filter(is_daily).collect()
}

#[test]
fn every_fault_at_every_point_of_a_scenario_is_survived() {
    if !is_root() {
        return;
    }
    let baseline = every_fault(ClusterMode::Classic, &PLACES);
    // One call for each pod with claims, even for two claims. The third pod is refused a device that a container holds, and retried.
    let is_prepare = |line: &&String| line.contains(" Call ") && line.contains("/NodePrepareResources");
    let of_two = baseline
        .trace
        .iter()
        .take_while(|line| !line.contains("second is gone"));
    assert_eq!(
        of_two.filter(is_prepare).count(),
        2,
        "{}",
        baseline.trace.join("\n")
    );
}

#[test]
fn every_fault_in_structured_mode_is_survived() {
    if is_root() {
        every_fault(ClusterMode::Structured, &STRUCTURED_PLACES);
    }
}

/// Runs the scenario with every fault at every operation, and returns the run without faults.
fn every_fault(mode: ClusterMode, expected: &[(&'static str, Operation)]) -> RunResult {
    let runtime = runtime();
    let baseline = runtime.block_on(run(mode, Vec::new(), now));
    assert_eq!(
        baseline.violations,
        Vec::<String>::new(),
        "{}",
        baseline.trace.join("\n")
    );
    println!("a run has {:?}", baseline.counts);
    let places: BTreeSet<_> = baseline.counts.keys().copied().collect();
    let expected: BTreeSet<_> = expected.iter().copied().collect();
    assert_eq!(places, expected, "the places for faults");
    let mut plans = plans(&baseline.counts);
    if std::env::var("EVERY_FAULT").is_err() {
        plans = daily(plans);
        // One of `RUNS_OF` runs, and each kind of fault once at each place.
        let (of, mut index) = (number("RUNS_OF", 1), 0_usize);
        plans.retain(|planned| {
            index += 1;
            planned.number == 1 || index.is_multiple_of(of)
        });
    }
    println!("{} runs", plans.len());
    let next = AtomicUsize::new(0);
    let failures: Mutex<Vec<(PlannedFault, RunResult)>> = Mutex::default();
    let hits: Mutex<Hits> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..number("AT_ONCE", AT_ONCE) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&planned) = plans.get(index) else { break };
                    if index.is_multiple_of(50) {
                        println!(
                            "run {index} of {}, {} failed",
                            plans.len(),
                            failures.lock().unwrap().len()
                        );
                    }
                    let result = runtime.block_on(run(mode, vec![planned], now));
                    let mut hits = hits.lock().unwrap();
                    let kind = (planned.program, planned.operation, planned.fault);
                    let (tried, hit) = hits.entry(kind).or_default();
                    *tried += 1;
                    *hit += result.hits.len() as u64;
                    drop(hits);
                    if !result.violations.is_empty() {
                        failures.lock().unwrap().push((planned, result));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    for (planned, result) in &failures {
        println!("{:?}\n    {}", result.violations, command(mode, &[*planned]));
        println!("{}\n", result.trace.join("\n"));
    }
    let hits = hits.into_inner().unwrap();
    for ((program, operation, fault), (tried, hit)) in &hits {
        println!("{program} {operation:?} {fault:?}: {hit} of {tried}");
    }
    assert!(
        failures.is_empty(),
        "{} of {} runs fail",
        failures.len(),
        plans.len()
    );
    assert_eq!(panics(), Vec::<String>::new(), "I15");
    for (program, operation) in expected {
        for &fault in operation.faults() {
            let hit = hits.get(&(program, operation, fault)).map_or(0, |(_, hit)| *hit);
            assert!(hit > 0, "{program} {operation:?} {fault:?} was never injected");
        }
    }
    baseline
}

/// Repeats the run with the faults in `FAULT` or `STRUCTURED_FAULT`, and prints its trace.
#[test]
fn replay() {
    let classic = std::env::var("FAULT").map(|text| (ClusterMode::Classic, text));
    let structured = || std::env::var("STRUCTURED_FAULT").map(|text| (ClusterMode::Structured, text));
    let Ok((mode, text)) = classic.or_else(|_| structured()) else {
        return;
    };
    let planned: Vec<PlannedFault> = text.split(',').map(|text| parse(text).unwrap()).collect();
    let result = runtime().block_on(run(mode, planned, now));
    println!("{}", result.trace.join("\n"));
    assert_eq!(result.violations, Vec::<String>::new());
    assert_eq!(panics(), Vec::<String>::new());
}

#[test]
fn a_printed_command_can_be_parsed() {
    for operation in Operation::ALL {
        for &fault in operation.faults() {
            let planned = PlannedFault {
                program: COMPANION,
                operation,
                number: 7,
                fault,
            };
            assert_eq!(parse(&planned.to_string()), Some(planned));
        }
    }
}
