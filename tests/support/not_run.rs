//! Skips tests that cannot run here. A skip is printed on stderr and appended to the file in `DRAYMAN_TEST_SKIPPED`, from which `hack/test`
//! counts it. The test runner counts the test as passed.
#![allow(unreachable_pub, reason = "a module of tests has no outside")]

use std::io::Write as _;

const SKIPPED: &str = "DRAYMAN_TEST_SKIPPED";

/// Skips the test because this machine lacks a requirement.
#[allow(dead_code, reason = "not every program uses it")]
pub fn not_run(why: &str) {
    skipped("here", why);
}

/// Whether this user may create device nodes and impersonate users. If not, skips the test.
#[allow(dead_code, reason = "not every program uses it")]
pub fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skipped("without root", "it requires root");
    }
    root
}

/// Skips the calling test.
pub fn skipped(what: &str, why: &str) {
    let thread = std::thread::current();
    let test =
        std::env::var("NEXTEST_TEST_NAME").unwrap_or_else(|_| thread.name().unwrap_or("a test").to_owned());
    let line = format!("not run {what}: {test}: {why}\n");
    // A closed stderr is ignored.
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
