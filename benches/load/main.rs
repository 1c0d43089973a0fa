//! The controller under load on a real control plane: `cargo bench --bench load -- [SCENARIO]...`.
//!
//! Each scenario starts its own control plane (see `tests/support/harness`) with nodes that exist only in the API, runs `drayman
//! controller` as its own user, and prints each figure with its goal. Request counts and latencies come from the API server's audit log, so
//! they are comparable between controllers. All traffic uses the loopback interface.

#[path = "../figures/mod.rs"]
mod figures;
#[path = "../../tests/support/harness/mod.rs"]
mod harness;
#[path = "../../tests/e2e/setup.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    clippy::single_match_else,
    reason = "shared with tests, which use another part of it"
)]
mod setup;

mod burst;
mod common;
mod fair;
mod hostile;
mod lifecycle;
mod memory_driver;
mod requests;
mod rest;
mod restart;
mod wake;

use std::path::PathBuf;

use anyhow::bail;

const USAGE: &str =
    "usage: cargo bench --bench load -- [lifecycle|rest|wake|burst|restart|fair|hostile|expressions]...
  --program PATH   measure this build of drayman instead of the one that cargo has just made
All scenarios are run if none is named.";

#[derive(Clone, Debug)]
struct Options {
    /// The program under test.
    program: PathBuf,
}

const SCENARIOS: [&str; 8] = [
    "lifecycle",
    "rest",
    "wake",
    "burst",
    "restart",
    "fair",
    "hostile",
    "expressions",
];

fn main() -> anyhow::Result<()> {
    let mut options = Options {
        program: env!("CARGO_BIN_EXE_drayman").into(),
    };
    let mut scenarios = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            // Cargo passes `--bench` to every benchmark.
            "--bench" => {}
            "--program" => match arguments.next() {
                Some(path) => options.program = path.into(),
                None => bail!("{USAGE}"),
            },
            memory_driver::COMMAND => match arguments.next() {
                Some(kubeconfig) => return memory_driver::run(&kubeconfig),
                None => bail!("{USAGE}"),
            },
            name if SCENARIOS.contains(&name) => scenarios.push(name.to_owned()),
            _ => bail!("{USAGE}"),
        }
    }
    if scenarios.is_empty() {
        scenarios = SCENARIOS.map(str::to_owned).to_vec();
    }
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
                "rest" => rest::run(&options).await,
                "wake" => wake::run(&options).await,
                "burst" => burst::run(&options).await,
                "restart" => restart::run(&options).await,
                "fair" => fair::run(&options).await,
                "hostile" => hostile::run(&options).await,
                _ => hostile::expressions(&options).await,
            }
        })?;
    }
    Ok(())
}
