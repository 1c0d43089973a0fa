//! Log levels and formats.

mod json;

use std::io::IsTerminal as _;

use tracing::Level;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use super::error::Error;

/// The form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Format {
    /// For people.
    Text,
    /// One object per line.
    Json,
}

/// Log level and format. Logs go to stderr.
#[derive(Clone, Copy, Debug, clap::Args)]
#[command(next_help_heading = "Logging")]
pub(super) struct LoggingFlags {
    /// Log format: text for people, json for programs (one object per line with ts, level, msg, target and the fields of the
    /// event).
    #[arg(
        long,
        value_name = "FORMAT",
        env = "DRAYMAN_LOGGING_FORMAT",
        value_enum,
        default_value_t = Format::Text
    )]
    pub(super) logging_format: Format,

    /// Log level: 0 info, with the configuration at start; 2 also info of libraries; 4 each decision; 6 each API request; 8
    /// every step; 9 also every step of libraries.
    #[arg(
        short = 'v',
        long = "v",
        value_name = "LEVEL",
        env = "DRAYMAN_V",
        default_value_t = 0,
        value_parser = clap::value_parser!(u8).range(0..=9)
    )]
    pub(super) verbosity: u8,
}

/// API client libraries; at level 6 their requests are logged.
const API_CLIENTS: [&str; 2] = ["kube_client", "kube_runtime"];

/// Starts logging. Called once, after all flags are validated.
pub(super) fn start(logging: LoggingFlags) -> Result<(), Error> {
    let levels = levels(logging.verbosity);
    let registry = tracing_subscriber::registry();
    let started = match logging.logging_format {
        Format::Json => registry
            .with(json::JsonLayer(std::io::stderr).with_filter(levels))
            .try_init(),
        Format::Text => {
            let text = tracing_subscriber::fmt::layer()
                .with_writer(std::io::stderr)
                .with_ansi(std::io::stderr().is_terminal());
            registry.with(text.with_filter(levels)).try_init()
        }
    };
    Ok(started.map_err(anyhow::Error::from)?)
}

/// Starts logging for a command that a person runs.
pub(super) fn start_for_person(verbosity: u8) -> Result<(), Error> {
    if tracing::dispatcher::has_been_set() {
        return Ok(());
    }
    start(LoggingFlags {
        logging_format: Format::Text,
        verbosity,
    })
}

/// Reports why the program ends: through the log if it has started, otherwise in clap's error format.
pub(super) fn report(error: &Error) {
    let is_answer_missing = matches!(error, Error::Unanswered(_));
    if tracing::dispatcher::has_been_set() && !is_answer_missing {
        tracing::error!(reason = error.reason(), %error, "ending");
    } else {
        eprintln!("error: {error}");
    }
}

/// Maps a `--v` level to tracing levels; `docs/operator/metrics.md` has the table.
fn levels(verbosity: u8) -> Targets {
    let (own, api_clients, libraries) = match verbosity {
        0 | 1 => (Level::INFO, Level::WARN, Level::WARN),
        2 | 3 => (Level::INFO, Level::INFO, Level::INFO),
        4 | 5 => (Level::DEBUG, Level::INFO, Level::INFO),
        6 | 7 => (Level::DEBUG, Level::DEBUG, Level::INFO),
        8 => (Level::TRACE, Level::DEBUG, Level::DEBUG),
        _ => (Level::TRACE, Level::TRACE, Level::TRACE),
    };
    Targets::new()
        .with_default(LevelFilter::from_level(libraries))
        .with_target(env!("CARGO_CRATE_NAME"), own)
        .with_targets(API_CLIENTS.map(|target| (target, api_clients)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_higher_log_level_never_logs_less() {
        let targets = ["drayman::node", "kube_client::client", "h2::codec"];
        let order = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE];
        let shown = |verbosity, target| {
            order
                .iter()
                .filter(|level| levels(verbosity).would_enable(target, level))
                .count()
        };
        for target in targets {
            let counts: Vec<_> = (0..=9).map(|verbosity| shown(verbosity, target)).collect();
            assert!(counts.is_sorted(), "{target}: {counts:?}");
            assert_eq!(counts.last(), Some(&order.len()), "{target}");
        }
    }

    #[test]
    fn level_0_logs_our_information_and_warnings_of_libraries() {
        assert!(levels(0).would_enable("drayman::cli", &Level::INFO));
        assert!(!levels(0).would_enable("drayman::cli", &Level::DEBUG));
        assert!(levels(0).would_enable("kube_runtime::watcher", &Level::WARN));
        assert!(!levels(0).would_enable("kube_runtime::watcher", &Level::INFO));
    }

    #[test]
    fn the_documented_rows_are_the_levels_that_differ() {
        let page = include_str!("../../docs/operator/metrics.md");
        let table = page.split("| `--v` |").nth(1).expect("the table of levels");
        let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
        let rows: Vec<Vec<u8>> = rows
            .filter_map(|row| row.split('|').nth(1))
            .map(|first| {
                first
                    .split(',')
                    .filter_map(|level| level.trim().parse().ok())
                    .collect()
            })
            .collect();
        let all: Vec<u8> = rows.concat();
        assert_eq!(all, (0..=9).collect::<Vec<u8>>(), "{rows:?}");
        for row in &rows {
            let same = row.iter().all(|level| levels(*level) == levels(row[0]));
            assert!(same, "{row:?} are one row and not the same");
        }
        for pair in rows.windows(2) {
            assert_ne!(
                levels(pair[0][0]),
                levels(pair[1][0]),
                "{pair:?} are two rows and the same"
            );
        }
    }

    #[test]
    fn level_6_shows_each_request_to_the_api_server() {
        assert!(!levels(5).would_enable("kube_client::client::builder", &Level::DEBUG));
        assert!(levels(6).would_enable("kube_client::client::builder", &Level::DEBUG));
    }
}
