//! Prints answers: tables aligned like kubectl's, names, or objects with `apiVersion` and `kind` as JSON or YAML.

use std::io::{ErrorKind, IsTerminal as _, Write as _};

use anyhow::Context as _;
use schemars::{JsonSchema, Schema, schema_for};
use serde::Serialize;
use tabwriter::TabWriter;

use super::error::Error;

/// Version of the JSON and YAML objects. Fields may be added to a version.
pub(super) const API_VERSION: &str = "cli.drayman.dev/v1alpha1";

/// The form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Form {
    /// A table.
    Table,
    /// A table with more columns.
    Wide,
    /// JSON.
    Json,
    /// YAML.
    Yaml,
    /// Only names, one per line.
    Name,
}

/// The flags that choose the form.
#[derive(Clone, Copy, Debug, clap::Args)]
#[command(next_help_heading = "Output")]
pub(super) struct OutputFlags {
    /// Output format
    #[arg(short = 'o', long = "output", value_name = "FORM", value_enum, default_value_t = Form::Table)]
    pub(super) form: Form,

    /// Print tables without their header
    #[arg(long)]
    no_headers: bool,

    /// Whether the answer continues an earlier one.
    #[arg(skip)]
    continued: bool,
}

/// Style of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Style {
    /// More columns and lines.
    pub(super) wide: bool,
    /// No header above the columns.
    pub(super) no_headers: bool,
}

/// The answer of a command.
pub(super) trait Printable: Serialize + JsonSchema {
    /// `kind` of the JSON and YAML object.
    const KIND: &'static str;

    /// Formats the answer for a person.
    fn text(&self, style: Style) -> String;

    /// Returns the lines of `-o name`.
    fn names(&self) -> Vec<String>;
}

/// An answer as JSON or YAML.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
struct AnswerObject<'a, T> {
    /// Version of this object.
    api_version: &'static str,
    /// Kind of this object.
    kind: &'static str,
    #[serde(flatten)]
    answer: &'a T,
}

impl OutputFlags {
    /// For more rows of the same table, or another YAML document.
    pub(super) fn continued(mut self) -> Self {
        self.continued = true;
        self
    }

    /// Prints an answer. Returns false if the reader has closed the pipe, as `head` does.
    pub(super) fn print<T: Printable>(self, answer: &T) -> Result<bool, Error> {
        write(&self.formatted(answer)?)
    }

    fn formatted<T: Printable>(self, answer: &T) -> Result<String, Error> {
        let style = Style {
            wide: self.form == Form::Wide,
            no_headers: self.no_headers || self.continued,
        };
        let object = AnswerObject {
            api_version: API_VERSION,
            kind: T::KIND,
            answer,
        };
        Ok(match self.form {
            Form::Table | Form::Wide => answer.text(style),
            Form::Json => serde_json::to_string_pretty(&object).context("the answer as JSON")? + "\n",
            Form::Yaml => {
                let separator = if self.continued { "---\n" } else { "" };
                separator.to_owned() + &serde_saphyr::to_string(&object).context("the answer as YAML")?
            }
            Form::Name => answer.names().iter().map(|name| one_line(name) + "\n").collect(),
        })
    }
}

/// Writes to stdout. Returns false if the reader has closed the pipe.
pub(super) fn write(text: &str) -> Result<bool, Error> {
    match to_stdout(text) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        written => Ok(written.map(|()| true).context("cannot write to stdout")?),
    }
}

/// Writes to stdout; a closed pipe is an error.
pub(super) fn write_all(text: &str) -> Result<(), anyhow::Error> {
    to_stdout(text).context("cannot write to stdout")
}

fn to_stdout(text: &str) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
}

/// Returns the JSON schema of an answer's object.
pub(super) fn schema<T: Printable + 'static>() -> (&'static str, Schema) {
    let mut schema = schema_for!(AnswerObject<'static, T>);
    for (field, value) in [("apiVersion", API_VERSION), ("kind", T::KIND)] {
        if let Some(field) = schema.pointer_mut(&format!("/properties/{field}"))
            && let Some(field) = field.as_object_mut()
        {
            field.insert("const".to_owned(), value.into());
        }
    }
    (T::KIND, schema)
}

/// Formats rows as columns with kubectl's three-space padding.
pub(super) fn table<const N: usize>(style: Style, header: [&str; N], rows: Vec<Vec<String>>) -> String {
    let header = (!style.no_headers).then(|| row(header));
    columns(&header.into_iter().chain(rows).collect::<Vec<_>>())
}

/// Formats rows as columns without a header.
pub(super) fn columns(rows: &[Vec<String>]) -> String {
    let mut writer = TabWriter::new(Vec::new()).padding(3).minwidth(0);
    let text: String = rows.iter().map(|row| row.join("\t") + "\n").collect();
    // Writing to a `Vec` cannot fail, and the output remains UTF-8.
    let _ = writer.write_all(text.as_bytes());
    let bytes = writer.into_inner().unwrap_or_default();
    let aligned = String::from_utf8_lossy(&bytes).into_owned();
    aligned
        .lines()
        .map(|line| line.trim_end().to_owned() + "\n")
        .collect()
}

pub(super) fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(one_line).to_vec()
}

/// Replaces control characters of a text from the cluster, so that no object can control the terminal.
pub(super) fn one_line(text: &str) -> String {
    text.chars()
        .map(|character| if character.is_control() { ' ' } else { character })
        .collect()
}

/// Colour of a word.
#[derive(Clone, Copy, Debug)]
pub(super) enum Colour {
    Red,
    Yellow,
    Green,
}

/// Colours a word if stdout is a terminal and `NO_COLOR` is not set.
pub(super) fn coloured(text: &str, colour: Colour) -> String {
    let has_colour =
        std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    if !has_colour {
        return text.to_owned();
    }
    let code = match colour {
        Colour::Red => 31,
        Colour::Yellow => 33,
        Colour::Green => 32,
    };
    format!("\u{1b}[{code}m{text}\u{1b}[0m")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_have_no_trailing_space() {
        let rows = || vec![row(["a-long-name", "x"]), row(["b", ""])];
        let mut style = Style::default();
        let text = table(style, ["NODE", "DEVICE"], rows());
        assert_eq!(text, "NODE          DEVICE\na-long-name   x\nb\n");
        style.no_headers = true;
        assert_eq!(table(style, ["NODE", "DEVICE"], rows()), "a-long-name   x\nb\n");
    }

    #[test]
    fn a_continued_answer_is_another_yaml_document() {
        #[derive(Serialize, JsonSchema)]
        struct Nothing {}
        impl Printable for Nothing {
            const KIND: &'static str = "Nothing";

            fn text(&self, _: Style) -> String {
                String::new()
            }

            fn names(&self) -> Vec<String> {
                Vec::new()
            }
        }
        let flags = OutputFlags {
            form: Form::Yaml,
            no_headers: false,
            continued: false,
        };
        let first = flags.formatted(&Nothing {}).unwrap();
        let next = flags.continued().formatted(&Nothing {}).unwrap();
        assert!(!first.contains("---"), "{first}");
        assert_eq!(next, format!("---\n{first}"));
    }

    #[test]
    fn texts_of_objects_cannot_control_the_terminal() {
        assert_eq!(one_line("a\u{1b}[31m\nb"), "a [31m b");
    }
}
