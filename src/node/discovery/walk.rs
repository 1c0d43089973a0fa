//! The paths below `/dev` that match a pattern.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use glob::{MatchOptions, Pattern};

use super::node::{DevRoot, NodeError};
use crate::node::config::PathPattern;

/// As a shell matches: `*` does not stand for a dot at the beginning.
const MATCH: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: true,
};

/// What a pattern matches.
#[derive(Debug, Default)]
pub(super) struct Walked {
    /// The paths, relative to the root, in the order of their names.
    pub(super) paths: Vec<String>,
    /// Directories on the way that lead out of the root, with what is wrong.
    pub(super) outside: Vec<(String, String)>,
}

/// Walks along a pattern, and notes the directories that were looked into: the result can change only if one of them does.
pub(super) fn walk(root: &DevRoot, pattern: &PathPattern, directories: &mut BTreeSet<PathBuf>) -> Walked {
    let mut walked = Walked::default();
    let mut level = vec![String::new()];
    for (depth, part) in pattern.relative().split('/').enumerate() {
        let mut next = Vec::new();
        for parent in level {
            let directory = root.path().join(&parent);
            // A match in the middle of a pattern must be a directory inside of the root.
            if depth > 0 {
                match root.resolve(&directory) {
                    Ok(real) if real.is_dir() => {}
                    Err(error @ NodeError::Outside(_)) => {
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

/// The names in a directory that match one part of a pattern, sorted. Names that are not UTF-8 never match: nothing that
/// they would have to go through (JSON, protobuf) can carry them.
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
