//! Checks the layers, which the compiler does not within one crate: `src/core` stays pure, and no layer names one above it.
//!
//! Sources are read as tokens, so that comments, texts and documentation may name what code must not.

mod named;
mod paths;
mod rules;

use std::path::{Path, PathBuf};

use rules::check;

/// Every Rust file under `src`, by its path from there, with its text.
fn sources() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut sources = Vec::new();
    let mut directories = vec![root.clone()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).expect("a directory of sources") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).expect("UTF-8");
                sources.push((path.strip_prefix(&root).expect("under src").to_owned(), text));
            }
        }
    }
    sources.sort();
    sources
}

fn list(lines: impl Iterator<Item = String>) -> String {
    lines.collect::<Vec<_>>().join(
        "
  ",
    )
}

#[test]
fn core_is_pure_and_no_layer_names_one_above_it() {
    let sources = sources();
    let violations: Vec<_> = sources
        .iter()
        .flat_map(|(file, text)| check(file, text))
        .collect();

    assert!(
        violations.is_empty(),
        "\n  {}",
        list(violations.iter().map(ToString::to_string))
    );
}

#[test]
fn the_check_sees_every_layer() {
    let sources = sources();
    for layer in [
        "api",
        "core",
        "controller",
        "host",
        "node",
        "testcluster",
        "testkit",
        "cli",
    ] {
        assert!(
            sources.iter().any(|(file, _)| file.starts_with(layer)),
            "no file of {layer} was read"
        );
    }
    assert!(sources.iter().any(|(file, _)| file == Path::new("driver.rs")));
}
