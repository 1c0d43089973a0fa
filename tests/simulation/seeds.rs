//! Randomized runs.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cluster::Cluster;
use crate::faults::{ALL, BETWEEN_APIS, Fault, Faults, OF_APIS, OF_NODES, OF_STRUCTURED};

pub(crate) struct Run {
    pub(crate) hash: u64,
    pub(crate) hits: BTreeMap<Fault, u64>,
    pub(crate) violation: Option<String>,
    pub(crate) steps: u64,
    pub(crate) allocations: u64,
    pub(crate) granted: u64,
}

pub(crate) fn run(seed: u64, verbose: bool) -> Run {
    let mut cluster = Cluster::new(seed);
    cluster.verbose = verbose;
    let mut fault_rng = crate::rng::Rng::new(!seed);
    cluster.faults = Faults::by_seed(&mut fault_rng);
    cluster.structured = seed % 8 == 5;
    cluster.set_up_by_seed();
    // Runs without nodes are faster; their pods end immediately.
    if !seed.is_multiple_of(2) {
        cluster.set_up_nodes(seed);
    }
    // In half of these, devices are also available as an extended resource.
    if seed % 4 == 3 {
        cluster.open_both_apis();
    }
    while cluster.violation.is_none()
        && (cluster.user_actions > 0 || (cluster.generation == 0 && !cluster.structured))
    {
        let end = cluster.now + 600 * crate::cluster::SECOND;
        if !cluster.step(end) {
            break;
        }
    }
    let linger = cluster.rng.between(0, 60 * crate::cluster::SECOND);
    cluster.run_for(linger);
    if cluster.structured {
        cluster.conclude_structured();
    } else {
        cluster.conclude();
    }
    cluster.conclude_nodes();
    Run {
        hash: cluster.hash,
        hits: cluster.faults.hits.clone(),
        allocations: cluster.counted().allocations,
        granted: cluster.nodes.granted,
        steps: cluster.steps,
        violation: cluster.violation,
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Prints the current seed on panic.
struct Guard(u64);

impl Drop for Guard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("panic in seed {}: {}", self.0, command(self.0));
        }
    }
}

fn command(seed: u64) -> String {
    format!("SEED={seed} cargo test --test simulation replay -- --nocapture")
}

/// `SEEDS` is the number of seeds, `FIRST` the first one.
#[test]
fn every_seed_holds_every_invariant_and_meets_every_fault() {
    let (first, count) = (number("FIRST", 0), number("SEEDS", 5000));
    let next = AtomicU64::new(first);
    let sums: Mutex<(BTreeMap<Fault, u64>, u64, u64, u64)> = Mutex::default();
    let failures: Mutex<Vec<(u64, String)>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        break;
                    }
                    let _guard = Guard(seed);
                    let result = run(seed, false);
                    if seed.is_multiple_of(15) {
                        assert_eq!(
                            result.hash,
                            run(seed, false).hash,
                            "seed {seed} is not reproducible"
                        );
                    }
                    if let Some(text) = result.violation {
                        failures.lock().unwrap().push((seed, text));
                    }
                    let mut sums = sums.lock().unwrap();
                    for (fault, hits) in result.hits {
                        *sums.0.entry(fault).or_default() += hits;
                    }
                    sums.1 += result.steps;
                    sums.2 += result.allocations;
                    sums.3 += result.granted;
                }
            });
        }
    });
    let (hits, steps, allocations, granted) = sums.into_inner().unwrap();
    println!(
        "{count} seeds, {steps} steps, {allocations} allocations, {granted} grants of extended resources, faults: {hits:#?}"
    );
    let mut failures = failures.into_inner().unwrap();
    failures.sort();
    for (seed, text) in &failures {
        println!("seed {seed}: {text}\n    {}", command(*seed));
    }
    assert!(failures.is_empty(), "{} of {count} seeds fail", failures.len());
    if count >= 600 {
        let caused = ALL.into_iter().filter(|fault| *fault != Fault::DoubleAllocation);
        for fault in caused.chain(OF_NODES).chain(OF_APIS).chain(OF_STRUCTURED) {
            assert!(hits.contains_key(&fault), "{fault:?} was never hit");
        }
        // Effects of faults are rarer.
        let effects = BETWEEN_APIS.into_iter().chain([Fault::DoubleAllocation]);
        for fault in effects.filter(|_| count >= 2400) {
            assert!(hits.contains_key(&fault), "{fault:?} never occurred");
        }
        assert!(allocations > 0, "nothing was ever allocated");
        assert!(granted > 0, "nothing was ever granted");
    }
}

/// Runs the seed `SEED` with a trace.
#[test]
fn replay() {
    let seed = number("SEED", 1);
    let result = run(seed, std::env::var("SEED").is_ok());
    assert_eq!(result.violation, None, "seed {seed}");
}
