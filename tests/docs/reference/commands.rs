//! Generates the page of commands and flags.

use clap::{Arg, ArgAction, Command};

use super::{cell, code};

pub(super) fn text() -> String {
    let mut text = String::from(
        "# Commands and flags\n\nMade from the program by `make generate`. A flag wins over its variable; `--help` of each command \
         says the same. Exit codes: 0 for a clean end, 1 for a failure at run time, 2 for a wrong flag, file or environment. Commands that ask a \
         question end with 1 if the answer is no, and with 3 if they could not ask. [output.schema.json](output.schema.json) is the schema of \
         their JSON and YAML.\n",
    );
    let mut command = drayman::cli::command();
    command.build();
    for below in command.get_subcommands() {
        describe(below, "drayman", &mut text);
    }
    text
}

fn describe(command: &Command, above: &str, text: &mut String) {
    let name = format!("{above} {}", command.get_name());
    if command.is_hide_set() || command.get_name() == "help" {
        return;
    }
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    text.extend([format!("\n## {name}\n\n{}.\n", about.trim_end_matches('.'))]);
    let long = command
        .get_long_about()
        .map(ToString::to_string)
        .unwrap_or_default();
    if let Some((_, more)) = long.split_once("\n\n") {
        text.extend([format!("\n{}\n", more.trim())]);
    }
    let arguments: Vec<&Arg> = command
        .get_arguments()
        .filter(|argument| {
            !argument.is_hide_set() && !["help", "version"].contains(&argument.get_id().as_str())
        })
        .collect();
    if !arguments.is_empty() {
        text.push_str("\n| flag | variable | default | meaning |\n|---|---|---|---|\n");
    }
    for argument in arguments {
        text.push_str(&row(argument));
    }
    for below in command.get_subcommands() {
        describe(below, &name, text);
    }
}

fn row(argument: &Arg) -> String {
    let values: Vec<String> = argument
        .get_value_names()
        .unwrap_or_default()
        .iter()
        .map(ToString::to_string)
        .collect();
    let takes_value = matches!(argument.get_action(), ArgAction::Set | ArgAction::Append);
    let value = if takes_value {
        values.join(" ")
    } else {
        String::new()
    };
    let mut names: Vec<String> = argument
        .get_long()
        .map(|long| format!("--{long}"))
        .into_iter()
        .collect();
    names.extend(argument.get_short().map(|short| format!("-{short}")));
    let names: Vec<String> = if names.is_empty() {
        vec![code(&value)]
    } else {
        names
            .iter()
            .map(|name| code(format!("{name} {value}").trim()))
            .collect()
    };
    let variable = argument
        .get_env()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    let defaults: Vec<String> = argument
        .get_default_values()
        .iter()
        .map(|value| value.to_string_lossy().into_owned())
        .collect();
    let default = if argument.is_required_set() && argument.get_long().is_some() {
        "required".to_owned()
    } else if takes_value {
        code(&defaults.join(" "))
    } else {
        String::new()
    };
    let help = argument.get_long_help().or_else(|| argument.get_help());
    let mut meaning = cell(&help.map(ToString::to_string).unwrap_or_default());
    let possible: Vec<String> = argument
        .get_possible_values()
        .iter()
        .filter(|value| takes_value && !value.is_hide_set())
        .map(|value| code(value.get_name()))
        .collect();
    if !possible.is_empty() {
        meaning = format!(
            "{} One of {}.",
            meaning.trim_end_matches('.').to_owned() + ".",
            possible.join(", ")
        );
    }
    format!(
        "| {} | {} | {default} | {meaning} |\n",
        names.join(", "),
        code(&variable)
    )
}
