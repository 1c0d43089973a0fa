//! The generated files in `docs/reference` match the code. `make generate` updates them.

mod chart;
mod commands;
mod kinds;

use crate::page::repository;

/// Set by `make generate`: write instead of comparing.
const GENERATE: &str = "DRAYMAN_GENERATE";

/// Text in a table cell.
fn cell(text: &str) -> String {
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    lines.join(" ").replace('|', "\\|").replace('<', "&lt;")
}

/// Code in a table cell; empty for an empty text.
fn code(text: &str) -> String {
    if text.is_empty() {
        String::new()
    } else {
        format!("`{}`", text.replace('|', "\\|"))
    }
}

fn check(name: &str, made: &str) {
    check_file(&format!("docs/reference/{name}"), made);
}

fn check_file(name: &str, made: &str) {
    let path = repository(name);
    if std::env::var_os(GENERATE).is_some() {
        std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
        std::fs::write(&path, made).expect("written");
        return;
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    let difference = made
        .lines()
        .zip(kept.lines().chain(std::iter::repeat("")))
        .find(|(made, kept)| made != kept);
    assert!(
        difference.is_none() && kept.len() == made.len(),
        "{name} is out of date; run `make generate`: {difference:?}"
    );
}

#[test]
fn the_commands_and_their_flags_are_as_the_program_has_them() {
    check("commands.md", &commands::text());
}

#[test]
fn the_schema_of_answers_is_as_the_types_have_it() {
    let schemas = drayman::cli::output_schemas();
    let any_of: Vec<_> = schemas.iter().map(|(_, schema)| schema).collect();
    let schema = serde_json::json!({ "title": "Answers of drayman's commands (-o json)", "anyOf": any_of });
    let text = serde_json::to_string_pretty(&schema).expect("JSON");
    check("output.schema.json", &(text + "\n"));
}

#[test]
fn the_fields_of_our_kinds_are_as_the_types_have_them() {
    check("kinds.md", &kinds::text());
}

#[test]
fn the_values_of_the_chart_are_as_its_schema_has_them() {
    check("values.md", &chart::text());
}

#[test]
fn the_schema_of_the_chart_is_as_the_types_have_it() {
    check_file("charts/drayman/values.schema.json", &chart::schema());
}
