//! Diagnostic commands: `drayman COMMAND` or, as the plugin `kubectl-drayman`, `kubectl drayman COMMAND`. They only
//! read.
//!
//! Exit codes: 0 for success, 1 for a negative result (not found, problems, remaining objects), 2 for an invalid flag, and
//! 3 if the cluster or the node could not be asked.

mod candidates;
pub(super) mod completion;
pub(super) mod devices;
pub(super) mod doctor;
mod feature_gates;

pub(super) mod explain;
mod kubectl_flags;
pub(super) mod leftovers;
mod node_check;
mod read;
mod rights;
mod selector;
#[cfg(test)]
mod tests;
mod watch;
pub(super) mod who;

use std::ffi::{OsStr, OsString};
use std::path::Path;

/// Name of the program as a kubectl plugin.
const PLUGIN: &str = "kubectl-drayman";
/// Name under which kubectl requests completions.
const COMPLETES_PLUGIN: &str = "kubectl_complete-drayman";

/// Returns whether the program, possibly given by path, has this name.
fn is_called(program: &OsStr, name: &str) -> bool {
    Path::new(program)
        .file_name()
        .is_some_and(|called| called == name)
}

/// Returns whether kubectl requests completions.
pub(super) fn completes_for_kubectl(arguments: &[OsString]) -> bool {
    arguments
        .first()
        .is_some_and(|program| is_called(program, COMPLETES_PLUGIN))
}

/// As a kubectl plugin, the program's help says `kubectl drayman`.
pub(super) fn as_kubectl_plugin(mut arguments: Vec<OsString>) -> Vec<OsString> {
    if let Some(program) = arguments.first_mut()
        && is_called(program, PLUGIN)
    {
        *program = "kubectl drayman".into();
    }
    arguments
}
