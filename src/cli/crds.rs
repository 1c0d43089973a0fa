//! `drayman crds`: prints the CRDs for `kubectl apply -f -`, writes them to files, or applies them.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use kube::config::KubeConfigOptions;
use kube::runtime::wait::await_condition;
use serde_json::Value;
use tokio::time::timeout;

use super::client;
use super::error::Error;
use super::objects::CustomResourceDefinition;
use super::output::write_all;
use super::runtime::{block_on, choose_tls_provider};

/// The definitions, in the order of output. `make generate` creates them from the types; building them here would need code in the memory of
/// every companion.
const FILES: [(&str, &str); 3] = [
    (
        "drayman.dev_nodeinventories.yaml",
        include_str!("../../crds/drayman.dev_nodeinventories.yaml"),
    ),
    (
        "drayman.dev_deviceclassparameters.yaml",
        include_str!("../../crds/drayman.dev_deviceclassparameters.yaml"),
    ),
    (
        "drayman.dev_deviceclaimparameters.yaml",
        include_str!("../../crds/drayman.dev_deviceclaimparameters.yaml"),
    ),
];
/// Limit for one request, and for the API server to establish a CRD.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Field manager of the applied CRDs.
const FIELD_MANAGER: &str = "drayman";

/// Print the CustomResourceDefinitions of drayman.dev
///
/// `drayman crds | kubectl apply --server-side --force-conflicts -f -` installs or updates them.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Arguments {
    /// Write one file per definition into this directory instead of printing
    #[arg(long, value_name = "DIRECTORY")]
    output_directory: Option<PathBuf>,

    /// Apply them to the cluster instead of printing, and wait until it serves them
    #[arg(long, conflicts_with = "output_directory")]
    apply: bool,

    /// Kubeconfig file for --apply. Default, as for kubectl: KUBECONFIG, then ~/.kube/config, then the pod's service account
    #[arg(long, value_name = "FILE", requires = "apply")]
    kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig file
    #[arg(long, value_name = "NAME", requires = "apply")]
    context: Option<String>,
}

/// Prints, writes or applies the CRDs.
pub(super) fn run(arguments: &Arguments) -> Result<(), Error> {
    if arguments.apply {
        choose_tls_provider();
        return block_on(apply(arguments)).map_err(Error::unanswered);
    }
    let Some(directory) = &arguments.output_directory else {
        return Ok(write_all(&yaml())?);
    };
    std::fs::create_dir_all(directory).map_err(|error| {
        Error::Configuration(format!("--output-directory {}: {error}", directory.display()))
    })?;
    for (name, content) in FILES {
        let file = directory.join(name);
        std::fs::write(&file, content).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

async fn apply(arguments: &Arguments) -> Result<(), Error> {
    let options = KubeConfigOptions {
        context: arguments.context.clone(),
        ..KubeConfigOptions::default()
    };
    let configuration = client::configuration_of_person(arguments.kubeconfig.as_deref(), &options).await?;
    let client = client::build(configuration, "crds")?;
    for (file, content) in FILES {
        let definition: Value =
            serde_saphyr::from_str(content).with_context(|| format!("cannot read {file}"))?;
        let name = definition["metadata"]["name"].as_str().unwrap_or_default();
        apply_one(client.clone(), name, &definition)
            .await
            .with_context(|| format!("cannot apply the CustomResourceDefinition {name}"))?;
        writeln!(std::io::stdout(), "{name} is served").context("cannot write to stdout")?;
    }
    Ok(())
}

async fn apply_one(client: Client, name: &str, definition: &Value) -> anyhow::Result<()> {
    let definitions = Api::<CustomResourceDefinition>::all(client);
    // Forced: the CRD's fields may belong to the field manager that installed it.
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    timeout(
        TIMEOUT,
        definitions.patch(name, &parameters, &Patch::Apply(definition)),
    )
    .await
    .map_err(|_| anyhow!("the API server does not answer"))??;
    timeout(
        TIMEOUT,
        await_condition(
            definitions,
            name,
            |definition: Option<&CustomResourceDefinition>| {
                definition.is_some_and(CustomResourceDefinition::is_established)
            },
        ),
    )
    .await
    .map_err(|_| anyhow!("it is stored, but the API server does not serve it"))??;
    Ok(())
}

fn yaml() -> String {
    format!("---\n{}", FILES.map(|(_, content)| content).join("---\n"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::api::crd;

    #[test]
    fn files_match_the_types() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("crds");
        let made = crd::definitions().into_iter().map(|definition| {
            let name = format!("{}_{}.yaml", definition.spec.group, definition.spec.names.plural);
            (name, serde_saphyr::to_string(&definition).unwrap())
        });
        let made: Vec<(String, String)> = made.collect();
        if std::env::var_os("DRAYMAN_GENERATE").is_some() {
            for (name, content) in &made {
                std::fs::write(directory.join(name), content).unwrap();
            }
            return;
        }
        let files = FILES.map(|(name, content)| (name.to_owned(), content.to_owned()));
        assert!(
            files.as_slice() == made,
            "crds/ differs from the types; run `make generate`"
        );
    }
}
