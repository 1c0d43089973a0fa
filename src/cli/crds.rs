//! `drayman crds`: prints the CRDs for `kubectl apply -f -`, writes them to files, or applies them.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::conditions::is_crd_established;
use kube::runtime::wait::await_condition;
use kube::{Client, ResourceExt as _};
use tokio::time::timeout;

use super::{Error, client};
use crate::api::crd;

/// Limit for one request, and for the API server to establish a CRD.
const PATIENCE: Duration = Duration::from_secs(30);
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

    /// Kubeconfig file for --apply. Default: the service account of the pod
    #[arg(long, value_name = "FILE", requires = "apply")]
    kubeconfig: Option<PathBuf>,
}

/// Prints, writes or applies the CRDs.
pub(super) fn run(arguments: &Arguments) -> Result<(), Error> {
    if arguments.apply {
        super::choose_tls_provider();
        return super::block_on(apply(arguments.kubeconfig.as_deref()));
    }
    let Some(directory) = &arguments.output_directory else {
        let mut stdout = std::io::stdout().lock();
        stdout
            .write_all(yaml()?.as_bytes())
            .and_then(|()| stdout.flush())
            .context("cannot write to stdout")?;
        return Ok(());
    };
    std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    for (name, content) in files()? {
        let file = directory.join(name);
        std::fs::write(&file, content).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

async fn apply(kubeconfig: Option<&Path>) -> Result<(), Error> {
    let client = client::build(client::configuration(kubeconfig).await?, "crds")?;
    for definition in crd::definitions() {
        let name = definition.name_any();
        apply_one(client.clone(), &definition)
            .await
            .with_context(|| format!("cannot apply the CustomResourceDefinition {name}"))?;
        writeln!(std::io::stdout(), "{name} is served").context("cannot write to stdout")?;
    }
    Ok(())
}

async fn apply_one(client: Client, definition: &CustomResourceDefinition) -> anyhow::Result<()> {
    let name = definition.name_any();
    let definitions = Api::<CustomResourceDefinition>::all(client);
    // Forced: the CRD's fields may belong to the field manager that installed it.
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    timeout(
        PATIENCE,
        definitions.patch(&name, &parameters, &Patch::Apply(definition)),
    )
    .await
    .map_err(|_| anyhow!("the API server does not answer"))??;
    timeout(
        PATIENCE,
        await_condition(definitions, &name, is_crd_established()),
    )
    .await
    .map_err(|_| anyhow!("it is stored, but the API server does not serve it"))??;
    Ok(())
}

fn files() -> Result<Vec<(String, String)>, Error> {
    let mut files = Vec::new();
    for definition in crd::definitions() {
        let name = format!("{}_{}.yaml", definition.spec.group, definition.spec.names.plural);
        files.push((
            name,
            serde_saphyr::to_string(&definition).context("cannot write a definition as YAML")?,
        ));
    }
    Ok(files)
}

fn yaml() -> Result<String, Error> {
    let documents: Vec<_> = files()?.into_iter().map(|(_, content)| content).collect();
    Ok(format!("---\n{}", documents.join("---\n")))
}
