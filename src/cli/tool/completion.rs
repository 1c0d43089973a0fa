//! `drayman completion SHELL`: a script that completes commands and flags. Under the name `kubectl_complete-drayman` the program tells
//! kubectl itself what could stand where a person has pressed TAB after `kubectl drayman`.

use std::ffi::OsString;
use std::io::Write as _;

use anyhow::Context as _;
use clap_complete::Shell;
use clap_complete::engine;

use crate::cli::Error;

/// cobra's `ShellCompDirectiveNoSpace` and `ShellCompDirectiveNoFileComp`: files are among the candidates where they fit.
const NO_SPACE: u8 = 2;
const NO_FILES: u8 = 4;

/// Print a script that completes commands and flags in a shell
///
/// For bash: `source <(drayman completion bash)`. For `kubectl drayman`, link the program as `kubectl_complete-drayman` into the PATH.
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
    write(&script)
}

/// Prints what fits for the last of the words after `kubectl drayman`, each with its help, and what the shell is to do with it: the
/// protocol of kubectl's `pkg/cmd/plugin/plugin_completion.go`, which is cobra's.
pub(in crate::cli) fn for_kubectl(words: Vec<OsString>, mut command: clap::Command) -> Result<(), Error> {
    let here = std::env::current_dir().ok();
    let last = words.len().saturating_sub(1);
    let fitting = engine::complete(&mut command, words, last, here.as_deref())
        .context("cannot tell what could stand here")?;
    let mut lines = Vec::new();
    let mut directive = NO_FILES;
    for candidate in fitting.iter().filter(|candidate| !candidate.is_hide_set()) {
        let value = candidate.get_value().to_string_lossy();
        // The way leads on below a directory.
        if value.ends_with('/') {
            directive = NO_FILES | NO_SPACE;
        }
        let help = candidate.get_help().map(ToString::to_string);
        match help.as_deref().and_then(|help| help.lines().next()) {
            Some(help) => writeln!(lines, "{value}\t{help}"),
            None => writeln!(lines, "{value}"),
        }
        .context("cannot write to memory")?;
    }
    writeln!(lines, ":{directive}").context("cannot write to memory")?;
    write(&lines)
}

fn write(text: &[u8]) -> Result<(), Error> {
    let mut stdout = std::io::stdout().lock();
    stdout
        .write_all(text)
        .and_then(|()| stdout.flush())
        .context("cannot write to stdout")?;
    Ok(())
}
