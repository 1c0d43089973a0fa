//! Runs by seed.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::faults::{ALL, BETWEEN_APIS, Fault, Faults, OF_APIS, OF_NODES, OF_STRUCTURED};
use crate::stage::Stage;

pub(crate) struct Run {
    pub(crate) hash: u64,
    pub(crate) hits: BTreeMap<Fault, u64>,
    pub(crate) violation: Option<String>,
    pub(crate) steps: u64,
    pub(crate) allocations: u64,
    pub(crate) granted: u64,
}

pub(crate) fn run(seed: u64, verbose: bool) -> Run {
    let mut stage = Stage::new(seed);
    stage.verbose = verbose;
    let mut tempers = crate::rng::Rng::new(!seed);
    stage.faults = Faults::by_seed(&mut tempers);
    stage.structured = seed % 8 == 5;
    stage.set_up_by_seed();
    // The others are faster, and have pods that end at once.
    if !seed.is_multiple_of(2) {
        stage.set_up_nodes(seed);
    }
    // Every second of these has devices that containers may have as an extended resource, too.
    if seed % 4 == 3 {
        stage.open_both_apis();
    }
    while stage.violation.is_none()
        && (stage.user_actions > 0 || (stage.generation == 0 && !stage.structured))
    {
        let end = stage.now + 600 * crate::stage::SECOND;
        if !stage.step(end) {
            break;
        }
    }
    let linger = stage.rng.between(0, 60 * crate::stage::SECOND);
    stage.run_for(linger);
    if stage.structured {
        stage.conclude_structured();
    } else {
        stage.conclude();
    }
    stage.conclude_nodes();
    Run {
        hash: stage.hash,
        hits: stage.faults.hits.clone(),
        allocations: stage.counted().allocations,
        granted: stage.nodes.granted,
        steps: stage.steps,
        violation: stage.violation,
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Prints which seed a thread is at when it panics.
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

/// `SEEDS` says how many, `FIRST` where to begin.
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
                            "seed {seed} does not repeat itself"
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
        // What comes of faults comes less often.
        let effects = BETWEEN_APIS.into_iter().chain([Fault::DoubleAllocation]);
        for fault in effects.filter(|_| count >= 2400) {
            assert!(hits.contains_key(&fault), "{fault:?} has never come of anything");
        }
        assert!(allocations > 0, "nothing was ever allocated");
        assert!(granted > 0, "nothing was ever granted");
    }
}

/// Runs the seed `SEED` again and prints everything that happens.
#[test]
fn replay() {
    let seed = number("SEED", 1);
    let result = run(seed, std::env::var("SEED").is_ok());
    assert_eq!(result.violation, None, "seed {seed}");
}
