//! What a person types: questions about a cluster, as `drayman COMMAND` or, under the name `kubectl-drayman`, as
//! `kubectl drayman COMMAND`. They read, and never write.
//!
//! Exit codes: 0 if all is well, 1 if the answer is a bad one (not found, problems, something left) or the question failed,
//! 2 for a wrong flag.

mod ask_for_gates;
pub(super) mod completion;
pub(super) mod devices;
pub(super) mod doctor;
pub(super) mod drain;
pub(super) mod explain;
mod node_check;
mod output;
mod read;
mod rights;
pub(super) mod who;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use kube::Client;

use super::{Error, client, group};

/// The name under which kubectl finds the program as its plugin.
const PLUGIN: &str = "kubectl-drayman";
/// The name under which kubectl asks it what could stand at TAB.
const COMPLETES_PLUGIN: &str = "kubectl_complete-drayman";

/// How the cluster is found and what is printed.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Cluster")]
pub(super) struct Cluster {
    /// Kubeconfig file. Without it, as for kubectl: KUBECONFIG, then ~/.kube/config, then the pod's service account.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig file
    #[arg(long, value_name = "NAME")]
    context: Option<String>,

    #[command(flatten)]
    driver: group::DriverName,
}

impl Cluster {
    /// A client, and the namespace of the context.
    async fn connect(&self) -> Result<(Client, String), Error> {
        let configuration =
            client::configuration_of_person(self.kubeconfig.as_deref(), self.context.as_deref()).await?;
        let namespace = configuration.default_namespace.clone();
        Ok((client::build(configuration, "tool")?, namespace))
    }
}

/// Whether the program, which may be given by its path, has this name.
fn is_called(program: &OsStr, name: &str) -> bool {
    Path::new(program)
        .file_name()
        .is_some_and(|called| called == name)
}

/// Whether the program runs under the name by which kubectl asks for completions.
pub(super) fn completes_for_kubectl(arguments: &[OsString]) -> bool {
    arguments
        .first()
        .is_some_and(|program| is_called(program, COMPLETES_PLUGIN))
}

/// When the program runs under the name of kubectl's plugin, its help speaks of `kubectl drayman`.
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
