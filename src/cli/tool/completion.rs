//! `drayman completion SHELL`: a script that completes commands and flags.

use std::io::Write as _;

use anyhow::Context as _;
use clap_complete::Shell;

use crate::cli::Error;

/// Print a script that completes commands and flags in a shell
///
/// For bash: `source <(drayman completion bash)`.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(in crate::cli) struct Arguments {
    /// The shell
    #[arg(value_name = "SHELL", value_enum)]
    shell: Shell,
}

/// Prints the script for the commands and flags of `command`.
pub(in crate::cli) fn run(arguments: Arguments, mut command: clap::Command) -> Result<(), Error> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "drayman", &mut script);
    let mut stdout = std::io::stdout().lock();
    stdout
        .write_all(&script)
        .and_then(|()| stdout.flush())
        .context("cannot write to stdout")?;
    Ok(())
}
