//! `drayman devices`: lists every device, its state and its holders.

use std::fmt::Write as _;
use std::process::ExitCode;

use clap::builder::PossibleValue;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Client;

use super::output::{Colour, Output, coloured, one_line, row, table};
use super::read::Api;
use super::{Cluster, read};
use crate::api::crd::{Mode, NodeInventory};
use crate::cli::diagnose::devices::{DeviceRow, DeviceState, DeviceTable, devices};
use crate::cli::diagnose::structured;
use crate::cli::{Error, block_on, choose_tls_provider};

/// List the devices of the cluster with their states and holders
#[derive(Clone, Debug, clap::Args)]
pub(in crate::cli) struct Arguments {
    /// Only devices of this node
    #[arg(long, value_name = "NAME")]
    node: Option<String>,

    /// Only devices of this kind
    #[arg(long, value_name = "KIND")]
    kind: Option<String>,

    /// Only devices in this state
    #[arg(long, value_name = "STATE", value_enum, ignore_case = true)]
    state: Option<DeviceState>,

    #[command(flatten)]
    namespace: Namespace,

    #[command(flatten)]
    cluster: Cluster,

    #[command(flatten)]
    output: Output,
}

/// Namespace of the claims for users who cannot read all namespaces.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Namespace {
    /// Namespace whose claims are read if you cannot read all namespaces. Default: the kubeconfig context's
    #[arg(short, long, value_name = "NAME")]
    namespace: Option<String>,
}

impl clap::ValueEnum for DeviceState {
    fn value_variants<'a>() -> &'a [Self] {
        &Self::ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.as_str()))
    }
}

/// Prints the table.
pub(in crate::cli) fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let mut answer = read_all(&arguments.cluster, &arguments.namespace)?;
    answer.devices.retain(|device| {
        let is =
            |wanted: &Option<String>, found: &str| wanted.as_deref().is_none_or(|wanted| wanted == found);
        is(&arguments.node, &device.node)
            && is(&arguments.kind, &device.kind)
            && arguments.state.is_none_or(|wanted| wanted == device.state)
    });
    if answer.devices.is_empty() {
        let mut said = format!("No devices found of driver {}", arguments.cluster.driver.name);
        let state = arguments.state.map(DeviceState::as_str);
        let asked = [
            ("on node", arguments.node.as_deref()),
            ("of kind", arguments.kind.as_deref()),
            ("in state", state),
        ];
        for (what, value) in asked {
            if let Some(value) = value {
                let _ = write!(said, ", {what} {value}");
            }
        }
        eprintln!("{said}.");
    }
    arguments.output.print(&answer, text)?;
    Ok(ExitCode::SUCCESS)
}

/// Reads all devices of the driver.
pub(super) fn read_all(cluster: &Cluster, namespace: &Namespace) -> Result<DeviceTable, Error> {
    choose_tls_provider();
    block_on(async {
        let (client, context_namespace) = cluster.connect().await?;
        let namespace = namespace.namespace.clone().unwrap_or(context_namespace);
        read_table(&client, &cluster.driver.name, &namespace).await
    })
}

async fn read_table(client: &Client, driver: &str, namespace: &str) -> Result<DeviceTable, Error> {
    let (table, read_namespace) = match read::api(client).await? {
        Api::Structured => {
            let slices: Vec<ResourceSlice> = read::all(client).await?;
            let claims = read::served_claims(client, namespace).await?;
            let table = structured::devices::devices(driver, &slices, &claims.items);
            let inventories = read::inventories_of_structured_mode(client).await?;
            let unclaimed = devices(driver, &inventories, &[]);
            (
                structured::devices::with_inventories(table, unclaimed),
                claims.namespace,
            )
        }
        Api::Classic => {
            let inventories: Vec<NodeInventory> = read::all(client).await?;
            let claims = read::claims(client, namespace).await?;
            (devices(driver, &inventories, &claims.items), claims.namespace)
        }
    };
    Ok(match read_namespace {
        None => table,
        Some(namespace) => table.of_namespace(&namespace),
    })
}

fn text(answer: &DeviceTable, wide: bool) -> String {
    let mut rows = Vec::new();
    if !answer.devices.is_empty() {
        let mut head = row(["NODE", "DEVICE", "KIND", "STATE", "HELD BY"]);
        if wide {
            head.extend(row(["PODS", "SHARES", "API", "WHY"]));
        }
        rows.push(head);
    }
    for device in &answer.devices {
        let claims: Vec<_> = device
            .holders
            .iter()
            .map(|holder| holder.claim.as_str())
            .collect();
        let mut cells = row([
            &device.node,
            &device.device,
            &device.kind,
            &device.state.to_string(),
            &claims.join(","),
        ]);
        if wide {
            let pods: Vec<_> = device
                .holders
                .iter()
                .flat_map(|holder| &holder.pods)
                .map(String::as_str)
                .collect();
            cells.extend(row([
                &pods.join(","),
                &format!("{}/{}", device.holders.len(), device.shares),
                api(device),
                device.cause.as_deref().unwrap_or_default(),
            ]));
        }
        rows.push(cells);
    }
    let mut text = table(&rows);
    for (claim, reason) in &answer.unreadable {
        let _ = writeln!(
            text,
            "{}: ResourceClaim {claim} holds devices that cannot be read: {}",
            coloured("warning", Colour::Yellow),
            one_line(reason)
        );
    }
    text
}

/// Returns the device's mode, in the configuration's spelling.
pub(super) fn api(device: &DeviceRow) -> &'static str {
    match device.mode {
        Some(Mode::Claims) => "claims",
        Some(Mode::ExtendedResource) => "extended-resource",
        Some(Mode::Both) => "both",
        Some(Mode::Unknown) => "of a newer release",
        None => "",
    }
}

/// Returns the coloured state.
pub(super) fn state(state: DeviceState) -> String {
    let colour = match state {
        DeviceState::Free => Colour::Green,
        DeviceState::Held | DeviceState::NotClaimed | DeviceState::NotForClaims => return state.to_string(),
        DeviceState::NotReady | DeviceState::Tainted | DeviceState::Unknown => Colour::Yellow,
        DeviceState::Unhealthy | DeviceState::Gone => Colour::Red,
    };
    coloured(&state.to_string(), colour)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cli::diagnose::structured::tests::{DRIVER, camera, held, slice};
    use crate::cli::tool::mock::Server;

    const CLAIMS: &str = "/apis/resource.k8s.io/v1/resourceclaims";
    const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

    #[tokio::test]
    async fn structured_devices_have_the_same_columns() {
        let server = Server::structured()
            .with(SLICES, &[slice("node-a", json!([camera("a"), camera("b")]))])
            .with(CLAIMS, &[held("one", "node-a", &["b"])]);
        let table = read_table(&server.client(), DRIVER, "shop").await.unwrap();
        assert_eq!(
            text(&table, true),
            "NODE     DEVICE   KIND      STATE   HELD BY    PODS   SHARES   API      WHY\n\
             node-a   a        cameras   Free                      0/1      claims\n\
             node-a   b        cameras   Held    shop/one   till   1/1      claims\n"
        );
    }

    #[tokio::test]
    async fn claims_of_one_namespace_leave_states_unknown() {
        let server = Server::structured()
            .with(SLICES, &[slice("node-a", json!([camera("a"), camera("b")]))])
            .without_right(CLAIMS)
            .with(
                "/apis/resource.k8s.io/v1/namespaces/shop/resourceclaims",
                &[held("one", "node-a", &["b"])],
            );
        let table = read_table(&server.client(), DRIVER, "shop").await.unwrap();
        let states: Vec<DeviceState> = table.devices.iter().map(|row| row.state).collect();
        assert_eq!(states, [DeviceState::Unknown, DeviceState::Held]);
    }

    #[tokio::test]
    async fn a_cluster_without_v1_is_read_as_before() {
        let server = Server::default().with("/apis/drayman.dev/v1alpha1/nodeinventories", &[]);
        let table = read_table(&server.client(), DRIVER, "shop").await.unwrap();
        assert_eq!(table, DeviceTable::default());
    }
}
