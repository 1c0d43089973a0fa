//! Finds the paths below `/dev` that match a pattern.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use glob::{MatchOptions, Pattern};

use super::device::{DevRoot, DevicePathError};
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
    /// Parent directories outside the root, with the error.
    pub(super) outside: Vec<(String, String)>,
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
                    Err(error @ DevicePathError::Outside(_)) => {
                        walked.outside.push((parent, error.to_string()));
                        continue;
                    }
                    Ok(_) | Err(_) => continue,
                }
            }
            let names = names_in(&directory, part);
            directories.insert(directory);
            next.extend(names.into_iter().map(|name| {
                if depth == 0 {
                    name
                } else {
                    format!("{parent}/{name}")
                }
            }));
        }
        level = next;
    }
    walked.paths = level;
    walked
}

/// Sorted names in a directory that match one part of a pattern. Names that are not UTF-8 never match: neither JSON nor protobuf
/// can carry them.
fn names_in(directory: &Path, part: &str) -> Vec<String> {
    if !part.contains(['*', '?', '[']) {
        let exists = directory.join(part).symlink_metadata().is_ok();
        return if exists { vec![part.to_owned()] } else { Vec::new() };
    }
    let Ok(pattern) = Pattern::new(part) else {
        return Vec::new();
    };
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .map(|entries| {
            entries
                .flatten()
                .filter_map(|entry| entry.file_name().into_string().ok())
                .collect()
        })
        .unwrap_or_default();
    names.retain(|name| pattern.matches_with(name, MATCH));
    names.sort_unstable();
    names
}
