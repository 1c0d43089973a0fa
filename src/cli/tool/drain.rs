//! `drayman drain`: lists objects that still use classic DRA.

use std::process::ExitCode;

use kube::Client;

use super::output::{Output, row, table};
use super::{Cluster, read};
use crate::cli::diagnose::usage::{Dependent, Objects, dependents, held_by};
use crate::cli::{Error, block_on, choose_tls_provider};

/// List what still uses classic Dynamic Resource Allocation
///
/// Before resource.k8s.io/v1alpha2 is switched off, or the cluster is upgraded to Kubernetes 1.32, which no longer has it:
/// claims would stay behind with finalizers that nobody can remove. All drivers are looked at, with --this-driver one alone. Exit
/// code 0 says that nothing is left, 1 that something is, or that it cannot be told.
#[derive(Clone, Debug, clap::Args)]
pub(in crate::cli) struct Arguments {
    /// Only the claims that hold something of this driver: they must be gone before it is uninstalled
    #[arg(long)]
    this_driver: bool,

    #[command(flatten)]
    cluster: Cluster,

    #[command(flatten)]
    output: Output,
}

/// Prints the remaining objects.
pub(in crate::cli) fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    choose_tls_provider();
    let left = block_on(async {
        let (client, _) = arguments.cluster.connect().await?;
        if arguments.this_driver {
            of_this_driver(&client, &arguments.cluster.driver.name).await
        } else {
            of_everybody(&client).await
        }
    })?;
    arguments.output.print(&left, |left, _| {
        if arguments.this_driver {
            text_of_this_driver(&arguments.cluster.driver.name, left)
        } else {
            text(left)
        }
    })?;
    Ok(if left.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

async fn of_everybody(client: &Client) -> Result<Vec<Dependent>, Error> {
    let classes = match read::all(client).await {
        Err(error) if read::is_not_served(&error) => {
            let cause = "this API server does not serve resource.k8s.io/v1alpha2, so that nothing can use it. Whether something is left \
                         of a time when it did can be told only while it is served: on Kubernetes 1.27 to \
                         1.30 switch it on again (docs/install.md) and ask then; later versions cannot tell";
            return Err(Error::Runtime(anyhow::anyhow!(cause)));
        }
        classes => classes?,
    };
    let claims = read::all(client).await?;
    let (templates, pods) = (read::all(client).await?, read::all(client).await?);
    Ok(dependents(Objects {
        classes: &classes,
        claims: &claims,
        templates: &templates,
        pods: &pods,
    }))
}

/// Reads only claims, so that the controller's permissions suffice. Returns none if the API is not served.
async fn of_this_driver(client: &Client, driver: &str) -> Result<Vec<Dependent>, Error> {
    match read::all(client).await {
        Ok(claims) => Ok(held_by(driver, &claims)),
        Err(error) if read::is_not_served(&error) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
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

fn text_of_this_driver(driver: &str, left: &[Dependent]) -> String {
    if left.is_empty() {
        return format!("No claim holds anything of driver {driver}.\n");
    }
    let mut rows = vec![row(["CLAIM", "STANDING"])];
    rows.extend(left.iter().map(|claim| row([&claim.name, &claim.standing])));
    table(&rows)
        + &format!(
            "\nDriver {driver} must not go before these claims: delete the pods that use them, then the claims that are left, and wait \
             until all are gone.\n"
        )
}
