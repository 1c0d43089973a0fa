//! Why a configuration is refused, and where in the file.

use std::fmt;
use std::path::PathBuf;

use serde_saphyr::Location;

/// Why a file is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path:?}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// What stands in the file is wrong.
    #[error("{path}:{place}: {problem}", path = path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// Where in it.
        place: Place,
        /// What is wrong, and what to write instead.
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

/// A line and a column, both from 1; `1:1` where the file as a whole is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub(super) line: u64,
    pub(super) column: u64,
}

impl Place {
    pub(super) const START: Self = Self { line: 1, column: 1 };

    pub(super) fn of(location: Location) -> Self {
        Self {
            line: location.line().max(1),
            column: location.column().max(1),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}
