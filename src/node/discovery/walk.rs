//! Finds the paths below `/dev` that match a pattern.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use glob::{MatchOptions, Pattern};

use super::device::{DevRoot, DevicePathError};
use super::sysfs::{if_exists, names};
use crate::node::config::PathPattern;

/// Matches like a shell: `*` does not match a leading dot.
const MATCH: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: true,
};

/// The matches of a pattern.
#[derive(Debug, Default)]
pub(super) struct Walked {
    /// Sorted paths relative to the root.
    pub(super) paths: Vec<String>,
    /// Directories that are outside the root or cannot be read.
    pub(super) refused: Vec<(String, DevicePathError)>,
}

/// Finds the matches of a pattern, and records the directories that were read: the result changes only if one of them does.
pub(super) fn walk(root: &DevRoot, pattern: &PathPattern, directories: &mut BTreeSet<PathBuf>) -> Walked {
    let mut walked = Walked::default();
    let mut level = vec![String::new()];
    for (depth, part) in pattern.relative().split('/').enumerate() {
        let mut next = Vec::new();
        for parent in level {
            let directory = root.path().join(&parent);
            // A match for an inner part must be a directory inside the root.
            if depth > 0 {
                match root.resolve(&directory) {
                    Ok(real) if real.is_dir() => {}
                    Err(error) if error.is_unread() || matches!(error, DevicePathError::Outside(_)) => {
                        walked.refused.push((parent, error));
                        continue;
                    }
                    Ok(_) | Err(_) => continue,
                }
            }
            let names = matching(&directory, part);
            directories.insert(directory);
            match names {
                Ok(names) if depth == 0 => next.extend(names),
                Ok(names) => next.extend(names.into_iter().map(|name| format!("{parent}/{name}"))),
                Err(error) => walked.refused.push((parent, error.into())),
            }
        }
        level = next;
    }
    walked.paths = level;
    walked
}

/// Sorted names in a directory that match one part of a pattern.
fn matching(directory: &Path, part: &str) -> io::Result<Vec<String>> {
    if !part.contains(['*', '?', '[']) {
        let found = if_exists(directory.join(part).symlink_metadata())?;
        return Ok(found.map(|_| part.to_owned()).into_iter().collect());
    }
    let Ok(pattern) = Pattern::new(part) else {
        return Ok(Vec::new());
    };
    let mut names = names(directory)?;
    names.retain(|name| pattern.matches_with(name, MATCH));
    Ok(names)
}
