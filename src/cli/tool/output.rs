//! Prints answers as tables aligned like kubectl's, or as JSON or YAML.

use std::io::{IsTerminal as _, Write as _};

use anyhow::Context as _;
use serde::Serialize;
use tabwriter::TabWriter;

use super::super::Error;

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
}

/// The flag that chooses the form.
#[derive(Clone, Copy, Debug, clap::Args)]
#[command(next_help_heading = "Output")]
pub(super) struct Output {
    /// Output format
    #[arg(short = 'o', long = "output", value_name = "FORM", value_enum, default_value_t = Form::Table)]
    pub(super) form: Form,
}

impl Output {
    /// Prints `answer` as JSON or YAML, or else the result of `text`.
    pub(super) fn print<T: Serialize>(
        self,
        answer: &T,
        text: impl FnOnce(&T, bool) -> String,
    ) -> Result<(), Error> {
        let printed = match self.form {
            Form::Table => text(answer, false),
            Form::Wide => text(answer, true),
            Form::Json => serde_json::to_string_pretty(answer).context("the answer as JSON")? + "\n",
            Form::Yaml => serde_saphyr::to_string(answer).context("the answer as YAML")?,
        };
        let mut stdout = std::io::stdout().lock();
        let written = stdout.write_all(printed.as_bytes()).and_then(|()| stdout.flush());
        match written {
            // The reader has closed the pipe, as `head` does.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            other => Ok(other.context("cannot write to stdout")?),
        }
    }
}

/// Formats rows as columns with kubectl's three-space padding. The first row is the header.
pub(super) fn table(rows: &[Vec<String>]) -> String {
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
    let wanted =
        std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    if !wanted {
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
        let text = table(&[row(["NODE", "DEVICE"]), row(["a-long-name", "x"]), row(["b", ""])]);
        assert_eq!(text, "NODE          DEVICE\na-long-name   x\nb\n");
    }

    #[test]
    fn what_an_object_says_cannot_paint_the_terminal() {
        assert_eq!(one_line("a\u{1b}[31m\nb"), "a [31m b");
    }
}
