//! `drayman doctor`: checks an installation; each finding comes with its fix.

mod structured;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::rbac::v1::ClusterRole;
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt as _};
use schemars::JsonSchema;
use serde::Serialize;

use super::kubectl_flags::KubectlFlags;
use super::read::ServedApi;
use super::{feature_gates, node_check, read, rights};
use crate::api::crd::{self, DeviceClassParameters, Mode, NodeInventory};
use crate::api::resource::{ResourceClaim, ResourceClass, VERSION};
use crate::cli::diagnose::devices::devices;
use crate::cli::diagnose::doctor::{
    DoctorFinding, Level, api_server_minor, classes, definitions, joined, lease, server,
};
use crate::cli::diagnose::gates;
use crate::cli::diagnose::inventories_of;
use crate::cli::diagnose::nodes::{extended_resources, inventories};
use crate::cli::diagnose::overlap;
use crate::cli::diagnose::rights::Component;
use crate::cli::error::Error;
use crate::cli::objects::CustomResourceDefinition;
use crate::cli::output::{Colour, OutputFlags, Printable, Style, coloured, one_line};
use crate::cli::runtime::block_on;
use crate::cli::{flags, value};
use crate::core::prepare::claims_api::FIRST_STRUCTURED_MINOR;

/// Label of the controller's objects in the chart.
const CONTROLLER: &str = "app.kubernetes.io/component=controller";

/// Find problems that keep pods from their devices, and print the fixes
///
/// Checks the cluster, or with --this-node this machine (kubelet's directories, sockets, CDI in the container runtime).
/// The exit code is 1 if there are problems.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Check this node instead of the cluster
    #[arg(long)]
    this_node: bool,

    #[command(flatten)]
    roots: flags::RootFlags,

    #[command(flatten)]
    sockets: flags::SocketFlags,

    /// Configuration file of kubelet, for --this-node
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/var/lib/kubelet/config.yaml",
        value_parser = value::absolute_path
    )]
    kubelet_config: PathBuf,

    /// Removed; the error names the replacement
    #[arg(long = "containerd-config", hide = true, value_parser = without_containerd_config)]
    _containerd_config: Option<String>,

    /// Check the rights of this user as the controller (system:serviceaccount:NAMESPACE:NAME). The chart's accounts are found
    /// without this flag
    #[arg(long, value_name = "USER", conflicts_with = "this_node")]
    controller_user: Option<String>,

    /// Check the rights of this user as a companion
    #[arg(long, value_name = "USER", conflicts_with = "this_node")]
    node_user: Option<String>,

    #[command(flatten)]
    cluster: KubectlFlags,

    #[command(flatten)]
    output: OutputFlags,
}

fn without_containerd_config(_: &str) -> Result<String, &'static str> {
    Err("containerd itself is asked for its configuration: set its socket with --container-runtime-socket")
}

/// Prints the findings.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let driver = &arguments.cluster.driver.name;
    let findings = if arguments.this_node {
        let machine = node_check::Machine {
            driver,
            roots: &arguments.roots,
            sockets: &arguments.sockets,
            kubelet_config: &arguments.kubelet_config,
        };
        block_on(async { Ok(node_check::check(&machine).await) })?
    } else {
        block_on(async {
            let (client, _) = arguments.cluster.connect().await?;
            check(&client, arguments).await
        })?
    };
    let findings = FindingList { items: findings };
    arguments.output.print(&findings)?;
    let worst = findings.items.iter().map(|finding| finding.level).max();
    Ok(if worst == Some(Level::Problem) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Runs all checks. Read errors become findings; only an unreachable API server ends the run.
async fn check(client: &Client, arguments: &Arguments) -> Result<Vec<DoctorFinding>, Error> {
    let driver = &arguments.cluster.driver.name;
    let version = client
        .apiserver_version()
        .await
        .map_err(|error| anyhow::Error::from(error).context("cannot read the version of the API server"))?;
    let users = [
        (Component::Controller, arguments.controller_user.as_deref()),
        (Component::Node, arguments.node_user.as_deref()),
    ];
    let number = api_server_minor(&version.major, &version.minor);
    match read::api(client).await {
        Ok(ServedApi::Structured) => {
            return Ok(structured::check(client, driver, users, (&version.major, &version.minor)).await);
        }
        Err(error) if number.is_some_and(|minor| minor >= FIRST_STRUCTURED_MINOR) => {
            return Err(error);
        }
        // An error of discovery is a finding of classic mode.
        Ok(ServedApi::Classic) | Err(_) => {}
    }
    Ok(check_classic(client, driver, users, (&version.major, &version.minor)).await)
}

/// Runs the checks of classic mode, and of clusters without claims.
async fn check_classic(
    client: &Client,
    driver: &str,
    users: [(Component, Option<&str>); 2],
    (major, minor): (&str, &str),
) -> Vec<DoctorFinding> {
    let discovery = read::is_served(client, VERSION).await;
    let discovery = discovery.map_err(|error| error.to_string());
    // A discovery error has its own finding.
    let serves = discovery != Ok(false);
    let defined = read::all::<CustomResourceDefinition>(client).await;
    let defined = defined.map(|found| definitions(crd::definition_names(), crd::VERSION, &found));
    let are_defined = defined
        .iter()
        .flatten()
        .all(|finding| finding.level == Level::Fine);
    let mut checks = vec![defined];
    let mut inventories: Option<Vec<NodeInventory>> = None;
    if are_defined {
        match read::all(client).await {
            Ok(found) => inventories = Some(found),
            Err(error) => checks.push(Err(error)),
        }
    }
    let needs_claims = inventories
        .as_ref()
        .is_none_or(|inventories| gates::needs_claims(driver, inventories));
    let discovery = discovery.as_ref().copied().map_err(String::as_str);
    checks.insert(0, Ok(server(major, minor, discovery, needs_claims)));
    if needs_claims && serves {
        checks.push(Ok(feature_gates::check_classic(
            client,
            driver,
            inventories.as_deref(),
        )
        .await));
        checks.push(feature_gates::check_symptoms(client).await);
    }
    let of_lease = ListParams::default().fields(&format!("metadata.name={driver}"));
    let leases = read::list(&Api::<Lease>::all(client.clone()), of_lease).await;
    let mode_both = inventories_of(driver, inventories.as_deref().unwrap_or_default())
        .flat_map(|inventory| &inventory.spec.devices)
        .any(|device| device.mode == Mode::Both);
    let others = check_other_installations(
        client,
        driver,
        leases.as_deref().unwrap_or_default(),
        inventories.as_deref().filter(|_| serves),
    )
    .await;
    checks.push(leases.map(|found| vec![check_lease(&found, needs_claims)]));
    checks.push(rights::check_pods(client, driver, users, ServedApi::Classic, mode_both).await);
    checks.push(others);
    if let Some(inventories) = &inventories {
        checks.extend(check_devices(client, driver, inventories, serves && needs_claims).await);
    }
    joined(checks)
}

/// Looks for other installations with the same driver name, and for claims of drivers that no node serves. `None` if claims and inventories
/// cannot be read.
async fn check_other_installations(
    client: &Client,
    driver: &str,
    leases: &[Lease],
    inventories: Option<&[NodeInventory]>,
) -> Result<Vec<DoctorFinding>, Error> {
    let now = Timestamp::now();
    let leads = |object: &Lease| {
        let (renewed, duration, holder) = terms(object)?;
        let lives = !holder.is_empty() && now.duration_since(renewed) <= duration;
        lives.then(|| (object.namespace().unwrap_or_default(), holder.to_owned()))
    };
    let leaders = leases.iter().filter_map(leads).collect();
    let of_driver = ListParams::default().labels(&format!("drayman.dev/driver-name={driver},{CONTROLLER}"));
    let roles = read::list(&Api::<ClusterRole>::all(client.clone()), of_driver).await?;
    let roles: Vec<String> = roles.iter().map(kube::ResourceExt::name_any).collect();
    let claims: Vec<ResourceClaim> = match inventories {
        Some(_) => read::all(client).await?,
        None => Vec::new(),
    };
    let unreadable = devices(driver, &[], &claims).unreadable;
    let mut findings = overlap::findings(driver, &leaders, &roles, &unreadable);
    findings.extend(overlap::unserved_inventories(
        inventories.unwrap_or_default(),
        &claims,
    ));
    Ok(findings)
}

/// Checks classes, inventories and nodes, each as far as it can be read.
async fn check_devices(
    client: &Client,
    driver: &str,
    objects: &[NodeInventory],
    with_classes: bool,
) -> Vec<Result<Vec<DoctorFinding>, Error>> {
    let mut checks = Vec::new();
    if with_classes {
        checks.push(check_classes(client, driver, objects).await);
    }
    let nodes = read::all::<Node>(client).await;
    checks.push(Ok(inventories(driver, objects, nodes.as_deref().ok())));
    checks.push(nodes.map(|nodes| extended_resources(driver, objects, &nodes)));
    checks
}

async fn check_classes(
    client: &Client,
    driver: &str,
    objects: &[NodeInventory],
) -> Result<Vec<DoctorFinding>, Error> {
    let parameters = read::all::<DeviceClassParameters>(client).await?;
    let parameters = parameters
        .into_iter()
        .map(|object| (object.name_any(), object.spec.kind))
        .collect();
    let kinds: BTreeSet<String> = inventories_of(driver, objects)
        .flat_map(|object| object.spec.devices.iter().map(|device| device.kind.clone()))
        .collect();
    let all: Vec<ResourceClass> = read::all(client).await?;
    Ok(classes(driver, &all, &parameters, &kinds))
}

fn check_lease(found: &[Lease], needs_claims: bool) -> DoctorFinding {
    let newest = found
        .iter()
        .filter_map(terms)
        .max_by_key(|(renewed, ..)| *renewed);
    lease(newest, Timestamp::now(), needs_claims)
}

/// Returns a Lease's renewal time, duration and holder.
fn terms(object: &Lease) -> Option<(Timestamp, SignedDuration, &str)> {
    let spec = object.spec.as_ref()?;
    let renewed = spec.renew_time.as_ref()?.0;
    let seconds = i64::from(spec.lease_duration_seconds.unwrap_or_default());
    let holder = spec.holder_identity.as_deref().unwrap_or_default();
    Some((renewed, SignedDuration::from_secs(seconds), holder))
}

/// The findings of all checks.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct FindingList {
    items: Vec<DoctorFinding>,
}

impl Printable for FindingList {
    const KIND: &'static str = "FindingList";

    fn text(&self, _: Style) -> String {
        let mut text = String::new();
        for finding in &self.items {
            let word = match finding.level {
                Level::Fine => coloured("ok     ", Colour::Green),
                Level::Note => "note   ".to_owned(),
                Level::Warning => coloured("warning", Colour::Yellow),
                Level::Problem => coloured("problem", Colour::Red),
            };
            let _ = writeln!(text, "{word}  {}: {}", finding.check, one_line(&finding.message));
            if let Some(fix) = &finding.fix {
                let _ = writeln!(text, "         -> {}", one_line(fix));
            }
        }
        let count = |level| self.items.iter().filter(|finding| finding.level == level).count();
        let counted = |level, word| match count(level) {
            1 => format!("1 {word}"),
            number => format!("{number} {word}s"),
        };
        text + &format!(
            "\n{} ok, {}, {}, {}\n",
            count(Level::Fine),
            counted(Level::Note, "note"),
            counted(Level::Warning, "warning"),
            counted(Level::Problem, "problem")
        )
    }

    /// The checks with findings that need attention.
    fn names(&self) -> Vec<String> {
        let bad = self
            .items
            .iter()
            .filter(|finding| finding.level >= Level::Warning);
        let names: BTreeSet<&str> = bad.map(|finding| finding.check).collect();
        names.into_iter().map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::diagnose::structured::tests::node;
    use crate::cli::tool::tests::{Server, parsed};
    use crate::core::allocation::tests::fixture::{DRIVER, inventory};

    #[tokio::test]
    async fn an_unknown_api_is_not_taken_for_classic_mode() {
        let server = Server::structured().without_right("/apis/resource.k8s.io/v1");
        let error = check(&server.client(), &parsed(&[])).await.unwrap_err();
        assert!(error.to_string().starts_with("it is not known"), "{error}");
    }

    #[tokio::test]
    async fn a_missing_right_hides_no_inventory() {
        const NODES: &str = "/api/v1/nodes";
        const PARAMETERS: &str = "/apis/drayman.dev/v1alpha1/deviceclassparameters";
        let mut silent = inventory("node-a", "uid-node-a", &["a"]);
        silent.status = None;
        let server = Server::default()
            .with(NODES, &[node("node-a")])
            .with(PARAMETERS, &[])
            .with("/apis/resource.k8s.io/v1alpha2/resourceclasses", &[]);
        for path in [NODES, PARAMETERS] {
            let client = server.clone().without_right(path).client();
            let checks = check_devices(&client, DRIVER, std::slice::from_ref(&silent), true).await;
            let findings = joined(checks);
            let has = |level: Level, text: &str| {
                let mut found = findings.iter();
                found.any(|finding| finding.level == level && finding.message.contains(text))
            };
            assert!(
                has(Level::Problem, "node-a does not serve"),
                "{path}: {findings:?}"
            );
            assert!(has(Level::Warning, "cannot list"), "{path}: {findings:?}");
        }
    }
}
