//! Diagnostic commands: `drayman COMMAND` or, as the plugin `kubectl-drayman`, `kubectl drayman COMMAND`. They only
//! read.
//!
//! Exit codes: 0 for success, 1 for a negative result (not found, problems, remaining objects), 2 for an invalid flag, and
//! 3 if the cluster or the node could not be asked.

mod ask_for_gates;
mod candidates;
pub(super) mod completion;
pub(super) mod devices;
pub(super) mod doctor;

pub(super) mod explain;
pub(super) mod leftovers;
#[cfg(test)]
mod mock;
mod node_check;
mod read;
mod rights;
mod selector;
mod watch;
pub(super) mod who;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap_complete::ArgValueCompleter;
use http::Uri;
use kube::Client;
use kube::config::{Config, KubeConfigOptions};

use super::{Error, client, group, logging, value};

/// Name of the program as a kubectl plugin.
const PLUGIN: &str = "kubectl-drayman";
/// Name under which kubectl requests completions.
const COMPLETES_PLUGIN: &str = "kubectl_complete-drayman";

/// Access to the cluster, by the flags of kubectl.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Cluster")]
pub(super) struct Cluster {
    /// Kubeconfig file. Default, as for kubectl: KUBECONFIG, then ~/.kube/config, then the pod's service account
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig file
    #[arg(long, value_name = "NAME", add = ArgValueCompleter::new(candidates::contexts))]
    context: Option<String>,

    /// Cluster of the kubeconfig file. Default: that of the context
    #[arg(id = "kubeconfig_cluster", long = "cluster", value_name = "NAME")]
    of_kubeconfig: Option<String>,

    /// User of the kubeconfig file. Default: that of the context
    #[arg(long, value_name = "NAME")]
    user: Option<String>,

    /// URL of the API server. Default: that of the cluster
    #[arg(short, long, value_name = "URL")]
    server: Option<Uri>,

    /// User to impersonate
    #[arg(long = "as", value_name = "USER", value_parser = value::header)]
    impersonate: Option<String>,

    /// Group to impersonate; may be given several times
    #[arg(long = "as-group", value_name = "GROUP", requires = "impersonate", value_parser = value::header)]
    impersonate_groups: Vec<String>,

    /// Limit for each request, from 100ms to 10m; without a unit in seconds
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = value::request_timeout)]
    request_timeout: Duration,

    /// Log level: 6 logs each API request, 9 everything; 0 logs nothing
    #[arg(short = 'v', long = "v", value_name = "LEVEL", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=9))]
    verbosity: u8,

    #[command(flatten)]
    driver: group::DriverName,
}

impl Cluster {
    /// Returns a client and the context's namespace.
    async fn connect(&self) -> Result<(Client, String), Error> {
        let mut configuration = self.configuration().await?;
        client::limit_requests(&mut configuration, self.request_timeout);
        let namespace = configuration.default_namespace.clone();
        Ok((client::build_limited(configuration, "tool")?, namespace))
    }

    /// Returns a client whose requests may be silent for as long as a watch.
    async fn connect_for_watches(&self) -> Result<Client, Error> {
        client::build(self.configuration().await?, "tool")
    }

    async fn configuration(&self) -> Result<Config, Error> {
        if self.verbosity > 0 {
            logging::start_for_person(self.verbosity)?;
        }
        let options = KubeConfigOptions {
            context: self.context.clone(),
            cluster: self.of_kubeconfig.clone(),
            user: self.user.clone(),
        };
        let mut configuration = client::configuration_of_person(self.kubeconfig.as_deref(), &options).await?;
        if let Some(server) = &self.server {
            client::has_scheme(server)
                .map_err(|error| Error::Configuration(format!("--server {server}: {error}")))?;
            configuration.cluster_url = server.clone();
        }
        if self.impersonate.is_some() {
            configuration.auth_info.impersonate.clone_from(&self.impersonate);
            configuration.auth_info.impersonate_groups = Some(self.impersonate_groups.clone());
        }
        Ok(configuration)
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
