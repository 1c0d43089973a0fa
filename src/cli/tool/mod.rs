//! Diagnostic commands: `drayman COMMAND` or, as the plugin `kubectl-drayman`, `kubectl drayman COMMAND`. They only
//! read.
//!
//! Exit codes: 0 for success, 1 for a negative result (not found, problems, remaining objects) or a failure, 2 for an
//! invalid flag.

mod ask_for_gates;
pub(super) mod completion;
pub(super) mod devices;
pub(super) mod doctor;

pub(super) mod explain;
pub(super) mod leftovers;
#[cfg(test)]
mod mock;
mod node_check;
mod output;
mod read;
mod rights;
pub(super) mod who;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use kube::Client;

use super::{Error, client, group};

/// Name of the program as a kubectl plugin.
const PLUGIN: &str = "kubectl-drayman";
/// Name under which kubectl requests completions.
const COMPLETES_PLUGIN: &str = "kubectl_complete-drayman";

/// Access to the cluster.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Cluster")]
pub(super) struct Cluster {
    /// Kubeconfig file. Default, as for kubectl: KUBECONFIG, then ~/.kube/config, then the pod's service account.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig file
    #[arg(long, value_name = "NAME")]
    context: Option<String>,

    #[command(flatten)]
    driver: group::DriverName,
}

impl Cluster {
    /// Returns a client and the context's namespace.
    async fn connect(&self) -> Result<(Client, String), Error> {
        let configuration =
            client::configuration_of_person(self.kubeconfig.as_deref(), self.context.as_deref()).await?;
        let namespace = configuration.default_namespace.clone();
        Ok((client::build(configuration, "tool")?, namespace))
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_knows_itself_as_a_plugin_of_kubectl_by_its_name() {
        let name = |program: &str| as_kubectl_plugin(vec![program.into()]).remove(0);
        assert_eq!(name("/usr/local/bin/kubectl-drayman"), "kubectl drayman");
        assert_eq!(name("/usr/local/bin/drayman"), "/usr/local/bin/drayman");
        assert!(as_kubectl_plugin(Vec::new()).is_empty());
    }
}
