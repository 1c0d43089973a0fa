//! `drayman config check`: validates a device configuration without starting anything.

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::Context as _;

use super::Error;
use crate::node::config::NodeConfiguration;

/// Check the file of device kinds
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Command {
    /// Say whether a file is right: exit code 0 if it is, 2 with the line, the field and what to write if it is not
    Check {
        /// The file
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

/// Validates the file and prints a summary.
pub(super) fn run(arguments: &Arguments) -> Result<(), Error> {
    let Command::Check { file } = &arguments.command;
    let configuration =
        NodeConfiguration::read(file).map_err(|error| Error::Configuration(error.to_string()))?;
    let names: Vec<&str> = configuration
        .kinds
        .iter()
        .map(|kind| kind.name.as_str())
        .collect();
    let text = if names.is_empty() {
        format!(
            "{}: is right, without any kind: the node will have no devices\n",
            file.display()
        )
    } else {
        format!("{}: is right; kinds: {}\n", file.display(), names.join(", "))
    };
    let mut stdout = std::io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .context("cannot write to stdout")?;
    Ok(())
}
