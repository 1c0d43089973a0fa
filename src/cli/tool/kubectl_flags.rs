//! The flags of kubectl by which the diagnostic commands access a cluster.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

use clap_complete::{ArgValueCompleter, CompletionCandidate};
use http::Uri;
use kube::Client;
use kube::config::{Config, KubeConfigOptions};

use crate::cli::error::Error;
use crate::cli::runtime::choose_tls_provider;
use crate::cli::{client, flags, logging, value};

/// Access to the cluster, by the flags of kubectl.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Cluster")]
pub(crate) struct KubectlFlags {
    /// Kubeconfig file. Default, as for kubectl: KUBECONFIG, then ~/.kube/config, then the pod's service account
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig file
    #[arg(long, value_name = "NAME", add = ArgValueCompleter::new(contexts))]
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
    pub(super) driver: flags::DriverNameFlag,
}

impl KubectlFlags {
    /// Returns a client and the context's namespace.
    pub(super) async fn connect(&self) -> Result<(Client, String), Error> {
        let mut configuration = self.configuration().await?;
        client::limit_requests(&mut configuration, self.request_timeout);
        let namespace = configuration.default_namespace.clone();
        Ok((client::build_limited(configuration, "tool")?, namespace))
    }

    /// Returns a client whose requests may be silent for as long as a watch.
    pub(super) async fn connect_for_watches(&self) -> Result<Client, Error> {
        client::build(self.configuration().await?, "tool")
    }

    async fn configuration(&self) -> Result<Config, Error> {
        choose_tls_provider();
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

/// Contexts of the kubeconfig.
fn contexts(typed: &OsStr) -> Vec<CompletionCandidate> {
    let content = client::kubeconfig_of_person().ok().flatten();
    let contexts = content.map(|content| content.contexts).unwrap_or_default();
    fitting(typed, contexts.into_iter().map(|context| context.name).collect())
}

/// Returns the names that begin with the typed text.
pub(super) fn fitting(typed: &OsStr, names: BTreeSet<String>) -> Vec<CompletionCandidate> {
    let typed = typed.to_string_lossy();
    names
        .into_iter()
        .filter(|name| !name.is_empty() && name.starts_with(&*typed))
        .map(CompletionCandidate::new)
        .collect()
}
