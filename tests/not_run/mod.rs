//! A test that has shown nothing says so, past the capture of what tests print: `hack/test` counts it as not run.

use std::io::Write as _;

/// This machine lacks something that the test needs.
#[allow(dead_code, reason = "shared with targets that need root alone")]
pub(crate) fn not_run(why: &str) {
    say("here", why);
}

/// Whether this user may make device nodes and speak for others. If not, that is said.
#[allow(dead_code, reason = "shared with targets that need other things")]
pub(crate) fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        say("without root", "only root can do what it does");
    }
    root
}

fn say(what: &str, why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or_default();
    let line = format!("not run {what}: {test}: {why}\n");
    // Nothing can be done about a stderr that is closed.
    let _ = std::io::stderr().write_all(line.as_bytes());
}
