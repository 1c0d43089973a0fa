//! `drayman completion SHELL`: prints a completion script. As `kubectl_complete-drayman`, the program serves
//! completions of `kubectl drayman` to kubectl itself.

use std::ffi::OsString;
use std::io::Write as _;

use anyhow::Context as _;
use clap_complete::Shell;
use clap_complete::engine;

use crate::cli::Error;

/// cobra's `ShellCompDirectiveNoSpace` and `ShellCompDirectiveNoFileComp`; the candidates already include matching
/// files.
const NO_SPACE: u8 = 2;
const NO_FILES: u8 = 4;

/// Print a shell completion script
///
/// For bash: `source <(drayman completion bash)`. For `kubectl drayman`, link the program as `kubectl_complete-drayman` into the PATH.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(in crate::cli) struct Arguments {
    /// The shell
    #[arg(value_name = "SHELL", value_enum)]
    shell: Shell,
}

/// Prints the script for `command`.
pub(in crate::cli) fn run(arguments: Arguments, mut command: clap::Command) -> Result<(), Error> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "drayman", &mut script);
    write(&script)
}

/// Prints the candidates for the last word after `kubectl drayman`, each with its help, and the shell directive. This
/// is cobra's protocol, used in kubectl's `pkg/cmd/plugin/plugin_completion.go`.
pub(in crate::cli) fn for_kubectl(words: Vec<OsString>, mut command: clap::Command) -> Result<(), Error> {
    let here = std::env::current_dir().ok();
    let last = words.len().saturating_sub(1);
    let fitting =
        engine::complete(&mut command, words, last, here.as_deref()).context("cannot compute completions")?;
    let mut lines = Vec::new();
    let mut directive = NO_FILES;
    for candidate in fitting.iter().filter(|candidate| !candidate.is_hide_set()) {
        let value = candidate.get_value().to_string_lossy();
        // No space after a directory, so that completion can continue below it.
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
