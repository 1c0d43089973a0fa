//! `drayman completion SHELL`: prints a completion script. As `kubectl_complete-drayman`, the program serves
//! completions of `kubectl drayman` to kubectl itself.

use std::ffi::OsString;
use std::io::Write as _;

use anyhow::Context as _;
use clap_complete::Shell;
use clap_complete::engine;
use clap_complete::env::Shells;

use crate::cli::error::Error;
use crate::cli::output::write;

/// cobra's `ShellCompDirectiveNoSpace` and `ShellCompDirectiveNoFileComp`; the candidates already include matching
/// files.
const NO_SPACE: u8 = 2;
const NO_FILES: u8 = 4;

/// Print a shell completion script
///
/// For bash: `source <(drayman completion bash)`. For `kubectl drayman`, link the program as `kubectl_complete-drayman` into the PATH.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The shell
    #[arg(value_name = "SHELL", value_enum)]
    shell: Shell,
}

/// Prints the script. The shell runs this program for the candidates, so that names come from the cluster.
pub(crate) fn run(arguments: Arguments) -> Result<(), Error> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut script = Vec::new();
    let shells = Shells::builtins();
    let shell = shells
        .completer(&arguments.shell.to_string())
        .with_context(|| format!("{} has no script", arguments.shell))?;
    shell
        .write_registration(
            "COMPLETE",
            "drayman",
            "drayman",
            &program.to_string_lossy(),
            &mut script,
        )
        .context("cannot write the script")?;
    write(&String::from_utf8_lossy(&script))?;
    Ok(())
}

/// Prints the candidates for the last word after `kubectl drayman`, each with its help, and the shell directive. This
/// is cobra's protocol, used in kubectl's `pkg/cmd/plugin/plugin_completion.go`.
pub(crate) fn for_kubectl(words: Vec<OsString>, mut command: clap::Command) -> Result<(), Error> {
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
    write(&String::from_utf8_lossy(&lines))?;
    Ok(())
}
