//! A test that cannot show anything here is skipped, and says so: on stderr, and in the file that `DRAYMAN_TEST_SKIPPED` names, from which
//! `hack/test` counts it. The runner itself would count it as passed.
#![allow(unreachable_pub, reason = "a module of tests has no outside")]

use std::io::Write as _;

/// The variable that names the file.
const SKIPPED: &str = "DRAYMAN_TEST_SKIPPED";

/// This machine lacks something that the test needs.
#[allow(dead_code, reason = "not every program uses it")]
pub fn not_run(why: &str) {
    skipped("here", why);
}

/// Whether this user may make device nodes and speak for others. If not, the test is skipped.
#[allow(dead_code, reason = "not every program uses it")]
pub fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skipped("without root", "only root can do what it does");
    }
    root
}

/// Skips the test that calls it.
pub fn skipped(what: &str, why: &str) {
    let thread = std::thread::current();
    let test =
        std::env::var("NEXTEST_TEST_NAME").unwrap_or_else(|_| thread.name().unwrap_or("a test").to_owned());
    let line = format!("not run {what}: {test}: {why}\n");
    // Nothing can be done about a stderr that is closed.
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(path) = std::env::var_os(SKIPPED) {
        let file = std::fs::File::options().append(true).create(true).open(path);
        let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
        assert!(
            written.is_ok(),
            "a test that was skipped is not counted: {written:?}"
        );
    }
}
