//! `drayman config check`: validates a device configuration without starting anything.

use std::path::PathBuf;

use super::error::Error;
use super::output::write_all;
use crate::node::config::NodeConfiguration;

/// Validate device configurations
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Command {
    /// Validate a file. The exit code is 0 if it is valid, 2 with the line, the field and the fix if not
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
            "{}: valid, without kinds: the node has no devices\n",
            file.display()
        )
    } else {
        format!("{}: valid; kinds: {}\n", file.display(), names.join(", "))
    };
    Ok(write_all(&text)?)
}
