//! `drayman demo`: runs the test cluster and prints its events, one per line.

use std::io::IsTerminal as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::error::Error;
use super::logging::{self, LoggingFlags};
use super::output::write_all;
use super::runtime::{block_on, choose_tls_provider, shutdown_on_signal};
use crate::testcluster::api::ClusterMode;
use crate::testcluster::cluster::TestClusterError;
use crate::testcluster::demo::{Demo, OutputLine, REAL, SCENARIOS, Scenario, Summary};
use crate::testcluster::temporary_directory::TemporaryDirectory;

/// Demonstrate drayman on an embedded cluster
///
/// Runs three nodes with simulated devices, a companion for each node and, in classic mode, the controller in this process: first in
/// structured mode, then in classic mode. Needs neither an installation nor root. Prints each step as it happens and checks the
/// expected results.
#[derive(Clone, Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "independent flags of one command")]
pub(super) struct Arguments {
    /// Run only this scenario; may be given several times
    #[arg(long, value_name = "NAME", value_parser = scenario)]
    scenario: Vec<Scenario>,

    /// List the scenarios and exit
    #[arg(long)]
    list: bool,

    /// Keep the first cluster running until Ctrl-C, and print how to use kubectl with it
    #[arg(long)]
    keep: bool,

    /// Add a node with the devices of this machine that a preset finds, and run the scenario `real`
    #[arg(long)]
    real_devices: bool,

    /// Also print the logs of the controller and the companions
    #[arg(long)]
    logs: bool,

    #[command(flatten)]
    logging: LoggingFlags,
}

/// All scenarios.
fn all() -> impl Iterator<Item = Scenario> {
    SCENARIOS.into_iter().chain([REAL])
}

fn scenario(name: &str) -> Result<Scenario, String> {
    if name == "both-doors" {
        return Err("this scenario is now called both-apis".to_owned());
    }
    all().find(|scenario| scenario.name == name).ok_or_else(|| {
        let names: Vec<&str> = all().map(|scenario| scenario.name).collect();
        format!("no such scenario; scenarios: {}", names.join(", "))
    })
}

/// Runs the demo and fails if a scenario does not end as expected.
pub(super) fn run(arguments: &Arguments) -> Result<(), Error> {
    if arguments.list {
        let lines: Vec<String> = all()
            .map(|scenario| {
                let asked = if scenario == REAL {
                    " (only on request, or with --real-devices)"
                } else {
                    ""
                };
                format!("{:<12} {}{asked}\n", scenario.name, scenario.about)
            })
            .collect();
        return Ok(write_all(&lines.concat())?);
    }
    choose_tls_provider();
    block_on(async {
        let shutdown = shutdown_on_signal()?;
        if arguments.logs {
            logging::start(arguments.logging)?;
        }
        let name = format!("drayman-demo-{}", std::process::id());
        let directory = TemporaryDirectory::create(&name)
            .with_context(|| format!("cannot make {}", std::env::temp_dir().join(&name).display()))?;
        let (output, lines) = mpsc::unbounded_channel();
        let printing = tokio::spawn(print_all(lines, std::io::stdout().is_terminal()));
        let summary = tokio::select! {
            summary = run_scenarios(arguments, directory.path(), output, &shutdown) => summary,
            // With `--keep`, a shutdown is the normal end.
            () = shutdown.cancelled(), if !arguments.keep => return Err(Error::Runtime(anyhow!("stopped before the demo ended"))),
        };
        // Prints the last line only after all senders are gone, even if the demo failed.
        printing.await.context("printing")??;
        summary?
            .result()
            .map_err(|problem| Error::Runtime(anyhow!(problem)))
    })
}

/// Runs the scenarios and returns their summary. With `--keep`, continues until shutdown.
async fn run_scenarios(
    arguments: &Arguments,
    directory: &Path,
    output: mpsc::UnboundedSender<OutputLine>,
    shutdown: &CancellationToken,
) -> Result<Summary, Error> {
    let failed = |error: TestClusterError| Error::Runtime(error.into());
    let start = Instant::now();
    let remarks = output.clone();
    let remark = |text: String| {
        // Fails only if printing has stopped.
        let _ = remarks.send(OutputLine::Remark(text));
    };
    let scenarios = chosen(arguments);
    let mut summary = Summary::default();
    let mut kept = None;
    for (mode, name) in [
        (ClusterMode::Structured, "structured"),
        (ClusterMode::Classic, "classic"),
    ] {
        let scenarios: Vec<Scenario> = scenarios
            .iter()
            .copied()
            .filter(|scenario| scenario.mode == mode)
            .collect();
        // After a failure, nothing else is of interest.
        if scenarios.is_empty() || summary.held < summary.expected {
            continue;
        }
        let directory = directory.join(name);
        std::fs::create_dir(&directory).map_err(|error| Error::Runtime(error.into()))?;
        let mut demo = Demo::start(mode, &directory, output.clone(), scenarios.contains(&REAL))
            .await
            .map_err(failed)?;
        for scenario in &scenarios {
            demo.run(scenario).await.map_err(failed)?;
        }
        summary = summary.and(demo.summary());
        if arguments.keep && kept.is_none() {
            kept = Some((mode, demo));
        } else {
            demo.stop().await;
        }
    }
    remark(total(&summary, start.elapsed()));
    let Some((mode, mut demo)) = kept else {
        return Ok(summary);
    };
    let file = demo.keep(shutdown.clone()).await.map_err(failed)?;
    let (devices, apply) = match mode {
        ClusterMode::Structured => ("resourceslices", ""),
        ClusterMode::Classic => ("nodeinventories", "  kubectl apply -f examples/basic\n"),
    };
    remark(format!(
        "the cluster runs until Ctrl-C; inspect it with\n\n  export KUBECONFIG={}\n  kubectl get {devices},pods,resourceclaims\n{apply}",
        file.display()
    ));
    tokio::select! {
        () = shutdown.cancelled() => {}
        error = demo.broken() => return Err(failed(error)),
    }
    demo.stop().await;
    Ok(summary)
}

/// Returns the scenarios to run, in order.
fn chosen(arguments: &Arguments) -> Vec<Scenario> {
    let mut scenarios = if arguments.scenario.is_empty() {
        SCENARIOS.to_vec()
    } else {
        arguments.scenario.clone()
    };
    if arguments.real_devices && !scenarios.contains(&REAL) {
        scenarios.push(REAL);
    }
    scenarios
}

/// Formats the summary as one line.
fn total(summary: &Summary, took: Duration) -> String {
    let first = summary.first_allocation.map_or_else(String::new, |first| {
        format!(
            " (first claim allocated {:.2} s after the start)",
            first.as_secs_f64()
        )
    });
    format!(
        "{} scenarios, {} expectations, {} held, in {:.1} s{first}",
        summary.scenarios,
        summary.expected,
        summary.held,
        took.as_secs_f64()
    )
}

async fn print_all(
    mut lines: mpsc::UnboundedReceiver<OutputLine>,
    colour: bool,
) -> Result<(), anyhow::Error> {
    while let Some(output) = lines.recv().await {
        write_all(&format!("{}\n", text(&output, colour)))?;
    }
    Ok(())
}

fn text(output: &OutputLine, colour: bool) -> String {
    let painted = |code: &str, text: &str| {
        if colour {
            format!("\u{1b}[{code}m{text}\u{1b}[0m")
        } else {
            text.to_owned()
        }
    };
    match output {
        OutputLine::Heading(text) => format!("\n{}", painted("1", &format!("== {text}"))),
        OutputLine::Step(time, who, what) => {
            let who = painted("36", &format!("{who:<16}"));
            format!("{:>7.2}s  {who}  {what}", time.as_secs_f64())
        }
        OutputLine::Check(what, true) => format!("          {}", painted("32", &format!("ok      {what}"))),
        OutputLine::Check(what, false) => format!("          {}", painted("31", &format!("FAILED  {what}"))),
        OutputLine::Remark(text) => format!("\n{text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_colour_on_a_terminal_only() {
        let step = OutputLine::Step(Duration::from_millis(1234), "controller".into(), "waits".into());
        assert_eq!(text(&step, false), "   1.23s  controller        waits");
        assert!(text(&step, true).contains('\u{1b}'));
        assert_eq!(
            text(&OutputLine::Check("it runs".into(), false), false),
            "          FAILED  it runs"
        );
    }

    #[test]
    fn an_unknown_scenario_is_refused_with_the_known_ones() {
        assert!(all().all(|known| scenario(known.name) == Ok(known)));
        assert!(scenario("none").unwrap_err().contains("both-apis"));
        assert!(
            scenario("both-doors")
                .unwrap_err()
                .contains("now called both-apis")
        );
    }
}
