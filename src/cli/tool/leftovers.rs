//! `drayman leftovers`: lists objects that still use classic DRA.

use std::process::ExitCode;

use kube::Client;
use schemars::JsonSchema;
use serde::Serialize;

use super::kubectl_flags::KubectlFlags;
use super::read::{self, Namespaces, ServedApi};
use crate::cli::diagnose::leftovers::{Dependent, allocated_from, dependents, held_by};
use crate::cli::error::Error;
use crate::cli::output::{OutputFlags, Printable, Style, row, table};
use crate::cli::runtime::block_on;

/// List objects that still use classic Dynamic Resource Allocation
///
/// Delete these objects before you disable resource.k8s.io/v1alpha2 or upgrade to Kubernetes 1.31 or later, which does not serve
/// it; otherwise claims keep finalizers that no controller removes. Covers all drivers, or one with --this-driver. Evicts and deletes nothing.
/// Exit code 0 if nothing is left, 1 if something is left, 3 if the API is not served.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Arguments {
    /// List only claims that hold devices of this driver, in structured mode, too; delete them before you uninstall it
    #[arg(long)]
    this_driver: bool,

    #[command(flatten)]
    cluster: KubectlFlags,

    #[command(flatten)]
    output: OutputFlags,
}

/// Prints the remaining objects.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let driver = &arguments.cluster.driver.name;
    let left = block_on(async {
        let (client, _) = arguments.cluster.connect().await?;
        let items = if arguments.this_driver {
            of_this_driver(&client, driver).await?
        } else {
            of_all_drivers(&client).await?
        };
        let driver = arguments.this_driver.then(|| driver.clone());
        Ok(Leftovers { items, driver })
    })?;
    arguments.output.print(&left)?;
    Ok(if left.items.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Objects that still use classic DRA.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct Leftovers {
    items: Vec<Dependent>,
    /// The only driver whose claims are listed.
    #[serde(skip_serializing_if = "Option::is_none")]
    driver: Option<String>,
}

impl Printable for Leftovers {
    const KIND: &'static str = "LeftoverList";

    fn text(&self, style: Style) -> String {
        match &self.driver {
            Some(driver) => text_of_this_driver(style, driver, &self.items),
            None => text(style, &self.items),
        }
    }

    fn names(&self) -> Vec<String> {
        let names = self.items.iter();
        names
            .map(|object| format!("{}/{}", object.kind.to_lowercase(), object.name))
            .collect()
    }
}

async fn of_all_drivers(client: &Client) -> Result<Vec<Dependent>, Error> {
    let classes = match read::all(client).await {
        Err(error) if read::is_not_served(&error) => {
            let cause = "this API server does not serve resource.k8s.io/v1alpha2. Objects may remain from the time when it did, but only an \
                         API server that serves it can list them: on Kubernetes 1.27 to 1.30, enable it (docs/operator/install.md) and run the \
                         command again; later versions cannot";
            return Err(Error::Runtime(anyhow::anyhow!(cause)));
        }
        classes => classes?,
    };
    let claims = read::all(client).await?;
    let (templates, pods) = (read::all(client).await?, read::all(client).await?);
    Ok(dependents(&classes, &claims, &templates, &pods))
}

/// Reads only claims, so that the controller's permissions suffice. Returns none if no API of claims is served.
async fn of_this_driver(client: &Client, driver: &str) -> Result<Vec<Dependent>, Error> {
    if read::api(client).await? == ServedApi::Structured {
        let claims = read::structured_claims(client, &Namespaces::All).await?;
        return Ok(allocated_from(driver, &claims.items));
    }
    match read::all(client).await {
        Ok(claims) => Ok(held_by(driver, &claims)),
        Err(error) if read::is_not_served(&error) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn text(style: Style, left: &[Dependent]) -> String {
    if left.is_empty() {
        return "Nothing uses classic Dynamic Resource Allocation any more.\n".to_owned();
    }
    let rows = left.iter().map(|dependent| {
        row([
            dependent.kind,
            &dependent.name,
            dependent.driver.as_deref().unwrap_or_default(),
            &dependent.status,
        ])
    });
    table(style, ["KIND", "NAME", "DRIVER", "STATUS"], rows.collect())
        + "\nDelete the pods first, then the claims while their drivers still run, then the templates and the classes.\n"
}

fn text_of_this_driver(style: Style, driver: &str, left: &[Dependent]) -> String {
    if left.is_empty() {
        return format!("No claim holds anything of driver {driver}.\n");
    }
    let rows = left.iter().map(|claim| row([&claim.name, &claim.status]));
    table(style, ["CLAIM", "STATUS"], rows.collect())
        + &format!(
            "\nDelete the pods that use these claims, then the remaining claims, and wait until all are gone. Then uninstall \
             driver {driver}.\n"
        )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::diagnose::structured::tests::{DRIVER, held};
    use crate::cli::tool::tests::Server;

    #[tokio::test]
    async fn claims_of_structured_mode_hold_the_driver() {
        let claims = "/apis/resource.k8s.io/v1/resourceclaims";
        let server = Server::structured().with(claims, &[held("one", "node-a", &["a", "b"])]);
        let names = async |driver: &str| {
            let left = of_this_driver(&server.clone().client(), driver).await;
            let left = left.unwrap().into_iter();
            left.map(|claim| (claim.name, claim.status)).collect::<Vec<_>>()
        };
        let one = ("shop/one".to_owned(), "allocated, used by pod till".to_owned());
        assert_eq!(names(DRIVER).await, [one]);
        assert!(names("other.example").await.is_empty());
    }

    #[tokio::test]
    async fn without_an_api_of_claims_nothing_is_left() {
        let left = of_this_driver(&Server::default().client(), DRIVER).await;
        assert!(left.unwrap().is_empty());
    }
}
