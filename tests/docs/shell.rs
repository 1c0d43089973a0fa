//! Runs what a page shows, word for word.

use std::ffi::OsString;
use std::path::Path;

/// What a shell runs before the words of a page: `cargo run -- ARGUMENTS` is the program as it has been built already, since cargo
/// would build it once more, or wait for whoever builds.
const PRELUDE: &str = r#"
set -euo pipefail
cargo() {
    while [[ $1 != -- ]]; do shift; done
    shift
    drayman "$@"
}
"#;

/// What bash gets.
pub(crate) fn script(text: &str) -> String {
    format!("{PRELUDE}{text}")
}

/// A `PATH` with the directories of these programs first.
pub(crate) fn path_with(programs: &[&Path]) -> OsString {
    let own = programs
        .iter()
        .filter_map(|program| program.parent())
        .map(Path::to_owned);
    let usual = std::env::var_os("PATH").unwrap_or_default();
    std::env::join_paths(own.chain(std::env::split_paths(&usual))).expect("paths without colons")
}
