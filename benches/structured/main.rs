//! Structured mode on a real cluster: `cargo bench --bench structured -- [SCENARIO]...`, as root.
//!
//! Each scenario starts its own cluster (see `tests/support/harness`): `publishers` and `burst` with nodes that exist only in the API, the
//! others with a real kubelet. Prints each figure with its goal. Request counts come from the API server's audit log, and durations of
//! Prepare from kubelet's metrics.

#[path = "../load/common.rs"]
#[allow(dead_code, reason = "shared with classic mode, which uses another part of it")]
mod common;
#[path = "../figures/mod.rs"]
mod figures;
#[path = "../../tests/e2e/structured/fixture.rs"]
#[allow(dead_code, reason = "shared with tests, which use another part of it")]
mod fixture;
#[path = "../../tests/support/harness/mod.rs"]
mod harness;
#[path = "../load/requests.rs"]
#[allow(dead_code, reason = "shared with classic mode, which uses another part of it")]
mod requests;
#[path = "../../tests/e2e/setup.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    clippy::single_match_else,
    reason = "shared with tests, which use another part of it"
)]
mod setup;

mod burst;
mod companion;
mod lifecycle;
mod memory;
mod metrics;
mod prepare;
mod publishers;
mod slices;

use std::path::PathBuf;

use anyhow::{Context as _, bail};

const USAGE: &str =
    "usage: cargo bench --bench structured -- [lifecycle|slices|prepare|publishers|burst|memory]...
  --program PATH     measure this build of drayman instead of the one that cargo has just made (not for publishers and burst)
  --publishers N     run so many publishers (5000)
  --peer PATH        prepare: compare with this build of dra-example-driver's kubelet plugin, pod by pod
All scenarios are run if none is named.";

#[derive(Clone, Debug)]
struct Options {
    /// The program under test.
    program: PathBuf,
    /// Number of publishers in the scenario `publishers`.
    publishers: usize,
    /// Another driver, for comparison in the scenario `prepare`.
    peer: Option<PathBuf>,
}

const SCENARIOS: [&str; 6] = ["lifecycle", "slices", "prepare", "publishers", "burst", "memory"];

fn main() -> anyhow::Result<()> {
    let mut options = Options {
        program: env!("CARGO_BIN_EXE_drayman").into(),
        publishers: 5_000,
        peer: None,
    };
    let mut scenarios = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            // Cargo passes `--bench` to every benchmark.
            "--bench" => {}
            "--program" => options.program = arguments.next().context(USAGE)?.into(),
            "--peer" => options.peer = Some(std::path::absolute(arguments.next().context(USAGE)?)?),
            "--publishers" => options.publishers = arguments.next().context(USAGE)?.parse()?,
            name if SCENARIOS.contains(&name) => scenarios.push(name.to_owned()),
            _ => bail!("{USAGE}"),
        }
    }
    if scenarios.is_empty() {
        scenarios = SCENARIOS.map(str::to_owned).to_vec();
    }
    // The program runs in the node's directory `/`.
    options.program = std::path::absolute(&options.program)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    for scenario in scenarios {
        figures::heading(&scenario);
        println!("program: {}", options.program.display());
        runtime.block_on(async {
            match scenario.as_str() {
                "lifecycle" => lifecycle::run(&options).await,
                "slices" => slices::run(&options).await,
                "prepare" => prepare::run(&options).await,
                "publishers" => publishers::run(&options).await,
                "burst" => burst::run().await,
                _ => memory::run(&options).await,
            }
        })?;
    }
    Ok(())
}
