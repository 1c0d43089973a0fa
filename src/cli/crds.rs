//! `drayman crds`: the definitions that the API server needs, for `kubectl apply -f -` or as files.

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::Context as _;

use super::Error;
use crate::api::crd;

/// Print the CustomResourceDefinitions of drayman.dev
///
/// `drayman crds | kubectl apply --server-side -f -` installs them.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Arguments {
    /// Write one file per definition into this directory instead, and print nothing
    #[arg(long, value_name = "DIRECTORY")]
    output_directory: Option<PathBuf>,
}

/// Prints the definitions, or writes them.
pub(super) fn run(arguments: &Arguments) -> Result<(), Error> {
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
