//! Runs the scripts of pages verbatim.

use std::ffi::OsString;
use std::path::Path;

/// Prepended to a page's script: `cargo run -- ARGUMENTS` runs the existing build, because cargo would build again or wait for a lock.
const PRELUDE: &str = r#"
set -euo pipefail
cargo() {
    while [[ $1 != -- ]]; do shift; done
    shift
    drayman "$@"
}
"#;

/// Input of bash.
pub(crate) fn script(text: &str) -> String {
    format!("{PRELUDE}{text}")
}

/// A `PATH` that starts with the directories of these programs.
pub(crate) fn path_with(programs: &[&Path]) -> OsString {
    let own = programs
        .iter()
        .filter_map(|program| program.parent())
        .map(Path::to_owned);
    let usual = std::env::var_os("PATH").unwrap_or_default();
    std::env::join_paths(own.chain(std::env::split_paths(&usual))).expect("paths without colons")
}
