//! Command line: validates flags and runs a subcommand.
//!
//! Flag names follow Kubernetes components and device drivers. Each flag has an environment variable: `--driver-name`
//! has `DRAYMAN_DRIVER_NAME`, and so on; `--node-name` has `NODE_NAME`, which is usually set through the downward API.
//! A flag overrides its variable. clap checks every value with `cli::value`, so no later code validates a flag again.
//!
//! Exit codes: 0 for success, 1 for a failure at run time, 2 for an invalid flag, file or environment. Commands that ask a
//! question end with 1 if the answer is no, and with 3 if they could not ask.

mod client;
mod config;
mod controller;
mod crds;
#[cfg(feature = "testcluster")]
mod demo;
pub mod diagnose;
mod discover;
mod error;
mod flags;
mod logging;
mod node;
mod objects;
mod observe;
mod output;
mod runtime;
mod tool;
mod value;
mod version;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::ContextKind;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use clap_complete::CompleteEnv;

use self::error::Error;

/// Renamed commands: the old and the new name.
const RENAMED: [(&str, &str); 1] = [("drain", "leftovers")];

/// DRA driver and device plugin that makes host devices schedulable on Kubernetes.
#[derive(Debug, Parser)]
#[command(name = "drayman", version, about, disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Controller(controller::Arguments),
    Node(Box<node::Arguments>),
    Devices(tool::devices::Arguments),
    Who(tool::who::Arguments),
    Explain(tool::explain::Arguments),
    Doctor(tool::doctor::Arguments),
    Leftovers(tool::leftovers::Arguments),
    Config(config::Arguments),
    Crds(crds::Arguments),
    #[cfg(feature = "testcluster")]
    Demo(demo::Arguments),
    Completion(tool::completion::Arguments),
    Version(version::Arguments),
}

/// Returns the clap definition of all commands and flags, for generated docs such as the reference in `docs/`.
pub fn command() -> clap::Command {
    without_values(Arguments::command())
}

/// The help shows no values of variables, which may be secret.
fn without_values(command: clap::Command) -> clap::Command {
    command
        .mut_args(|argument| argument.hide_env_values(true))
        .mut_subcommands(without_values)
}

/// Returns the JSON schema of each object that a command prints, with the object's kind.
pub fn output_schemas() -> Vec<(&'static str, schemars::Schema)> {
    vec![
        output::schema::<diagnose::devices::DeviceTable>(),
        output::schema::<tool::explain::answer::Explained>(),
        output::schema::<tool::doctor::FindingList>(),
        output::schema::<tool::leftovers::Leftovers>(),
        output::schema::<node::HoldingList>(),
        output::schema::<node::Released>(),
        output::schema::<discover::Discovered>(),
    ]
}

/// Runs the program. The first argument is the program's own name.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    if tool::completes_for_kubectl(&arguments) {
        return ended(tool::completion::for_kubectl(arguments, command()).map(succeeded));
    }
    // A shell asks with a variable; the script of `drayman completion` sets it.
    match CompleteEnv::with_factory(command).try_complete(&arguments, std::env::current_dir().ok().as_deref())
    {
        Ok(false) => {}
        Ok(true) => return ExitCode::SUCCESS,
        // The shell shows no error.
        Err(_) => return ExitCode::FAILURE,
    }
    let matches = command().try_get_matches_from(tool::as_kubectl_plugin(arguments));
    let command = match matches.and_then(|matches| Arguments::from_arg_matches(&matches)) {
        Ok(arguments) => arguments.command,
        Err(refusal) => {
            if let Some(new) = renamed(&refusal) {
                return ended(Err(new));
            }
            // Help and the version go to stdout with exit code 0, everything else goes to stderr with 2.
            let code = u8::try_from(refusal.exit_code()).unwrap_or(2);
            // A closed stream cannot be reported.
            let _ = refusal.print();
            return ExitCode::from(code);
        }
    };
    ended(match command {
        Command::Controller(arguments) => controller::run(&arguments).map(succeeded),
        Command::Node(arguments) => node::run(*arguments),
        Command::Devices(arguments) => tool::devices::run(&arguments).map_err(Error::unanswered),
        Command::Who(arguments) => tool::who::run(&arguments).map_err(Error::unanswered),
        Command::Explain(arguments) => tool::explain::run(&arguments).map_err(Error::unanswered),
        Command::Doctor(arguments) => tool::doctor::run(&arguments).map_err(Error::unanswered),
        Command::Leftovers(arguments) => tool::leftovers::run(&arguments).map_err(Error::unanswered),
        Command::Config(arguments) => config::run(&arguments).map(succeeded),
        Command::Crds(arguments) => crds::run(&arguments).map(succeeded),
        #[cfg(feature = "testcluster")]
        Command::Demo(arguments) => demo::run(&arguments).map(succeeded),
        Command::Completion(arguments) => tool::completion::run(arguments).map(succeeded),
        Command::Version(arguments) => version::run(arguments).map(succeeded),
    })
}

/// Returns an error that names the new command if its old name was typed.
fn renamed(refusal: &clap::Error) -> Option<Error> {
    let typed = refusal.get(ContextKind::InvalidSubcommand)?.to_string();
    let (old, new) = RENAMED.into_iter().find(|(old, _)| *old == typed)?;
    Some(Error::Configuration(format!(
        "`drayman {old}` is now `drayman {new}`"
    )))
}

fn ended(result: Result<ExitCode, Error>) -> ExitCode {
    match result {
        Ok(code) => code,
        Err(error) => {
            logging::report(&error);
            error.exit_code()
        }
    }
}

fn succeeded((): ()) -> ExitCode {
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn flag_definitions_are_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_flag_has_a_variable_of_its_name_and_a_section() {
        let command = command();
        for path in [&["controller"][..], &["node"], &["node", "discover"]] {
            let name = path.join(" ");
            let subcommand = path.iter().fold(&command, |command, name| {
                command.find_subcommand(name).expect("the subcommand exists")
            });
            let mut flags = 0;
            for argument in subcommand
                .get_arguments()
                .filter(|argument| argument.get_id() != "help")
            {
                let flag = argument.get_long().expect("every argument is a flag");
                let variable = argument
                    .get_env()
                    .and_then(|name| name.to_str())
                    .unwrap_or_default();
                if matches!(flag, "output" | "no-headers") {
                    continue;
                }
                let expected = match flag {
                    "node-name" => "NODE_NAME".to_owned(),
                    _ => format!("DRAYMAN_{}", flag.to_uppercase().replace('-', "_")),
                };
                assert_eq!(variable, expected, "variable of --{flag}");
                assert!(argument.get_help_heading().is_some(), "section of --{flag}");
                assert!(argument.get_help().is_some(), "help of --{flag}");
                assert!(
                    argument.is_hide_env_values_set(),
                    "value of {variable} in the help"
                );
                flags += 1;
            }
            assert!(flags > 4, "flags of {name}");
        }
    }
}
