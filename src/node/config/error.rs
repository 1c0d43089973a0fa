//! Configuration errors and their position in the file.

use std::fmt;
use std::path::PathBuf;

use serde_saphyr::{Location, Spanned};

/// Characters of a wrong value that an error repeats.
const SHOWN_MAX: usize = 80;

/// Why a configuration file is rejected.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path:?}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The content of the file is invalid.
    #[error("{path}:{position}: {problem}", path = path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The position of the error.
        position: Position,
        /// The problem and its remedy.
        problem: String,
    },
}

impl ConfigError {
    /// CamelCase, from a small fixed set.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Read { .. } => "ConfigurationUnreadable",
            Self::Content { .. } => "ConfigurationInvalid",
        }
    }
}

/// Line and column, both from 1; `1:1` for the whole file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    pub(super) line: u64,
    pub(super) column: u64,
}

impl Position {
    pub(super) const START: Self = Self { line: 1, column: 1 };

    pub(super) fn of(location: Location) -> Self {
        Self {
            line: location.line().max(1),
            column: location.column().max(1),
        }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

/// An error before the file name is added.
pub(in crate::node) type ContentError = (Position, String);

/// The error at the position of a value.
pub(super) fn at<T>(raw: &Spanned<T>, problem: String) -> ContentError {
    (Position::of(raw.referenced), problem)
}

/// Rejects a list or map with more than `max` entries.
pub(super) fn at_most<T>(
    max: usize,
    field: &str,
    raw: &Spanned<T>,
    entries: usize,
) -> Result<(), ContentError> {
    if entries > max {
        let problem = format!("{field} has {entries} entries; at most {max} are allowed");
        return Err(at(raw, problem));
    }
    Ok(())
}

/// A wrong value, quoted and truncated.
pub(super) fn shown(raw: &Spanned<String>) -> String {
    let mut text: String = raw.value.chars().take(SHOWN_MAX).collect();
    if text.len() < raw.value.len() {
        text.push('…');
    }
    format!("{text:?}")
}
