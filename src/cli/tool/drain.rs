//! `drayman drain`: what of a cluster still uses classic Dynamic Resource Allocation.

use std::process::ExitCode;

use super::output::{Output, row, table};
use super::{Cluster, read};
use crate::cli::{Error, block_on, choose_tls_provider};
use crate::core::inspect::usage::{Dependent, Objects, dependents};

/// List what still uses classic Dynamic Resource Allocation
///
/// Before resource.k8s.io/v1alpha2 is switched off, or the cluster is upgraded to Kubernetes 1.32, which no longer has it:
/// claims would stay behind with finalizers that nobody can remove. All drivers are looked at. Exit code 0 says that nothing is left, 1 that something is.
#[derive(Clone, Debug, clap::Args)]
pub(in crate::cli) struct Arguments {
    #[command(flatten)]
    cluster: Cluster,

    #[command(flatten)]
    output: Output,
}

/// Prints what is left.
pub(in crate::cli) fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    choose_tls_provider();
    let left = block_on(async {
        let (client, _) = arguments.cluster.connect().await?;
        let (classes, claims) = (read::all(&client).await?, read::all(&client).await?);
        let (templates, pods) = (read::all(&client).await?, read::all(&client).await?);
        Ok(dependents(Objects {
            classes: &classes,
            claims: &claims,
            templates: &templates,
            pods: &pods,
        }))
    })?;
    arguments.output.print(&left, |left, _| text(left))?;
    Ok(if left.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn text(left: &[Dependent]) -> String {
    if left.is_empty() {
        return "Nothing uses classic Dynamic Resource Allocation any more.\n".to_owned();
    }
    let mut rows = vec![row(["KIND", "NAME", "DRIVER", "STANDING"])];
    rows.extend(left.iter().map(|dependent| {
        row([
            dependent.kind,
            &dependent.name,
            dependent.driver.as_deref().unwrap_or_default(),
            &dependent.standing,
        ])
    }));
    table(&rows)
        + "\nEnd the pods first, then delete the claims while their drivers still run, then the templates and the classes.\n"
}
