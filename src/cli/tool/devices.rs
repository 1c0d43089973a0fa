//! `drayman devices`: lists every device, its state and its holders.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::process::ExitCode;

use clap_complete::ArgValueCompleter;
use kube::Client;

use super::kubectl_flags::KubectlFlags;
use super::read::{ClaimScope, Namespaces, ServedApi};
use super::selector::AttributeSelector;
use super::{candidates, read, watch};
use crate::api::crd::{Mode, NodeInventory};
use crate::cli::diagnose::devices::{DeviceRow, DeviceState, DeviceTable, devices};
use crate::cli::diagnose::structured;
use crate::cli::error::Error;
use crate::cli::output::{Colour, OutputFlags, Printable, Style, coloured, one_line, row, table};
use crate::cli::runtime::block_on;
use crate::cli::value;

/// List the devices of the cluster with their states and holders
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Only devices of this node
    #[arg(long, value_name = "NAME", add = ArgValueCompleter::new(candidates::nodes))]
    node: Option<String>,

    /// Only devices of this kind
    #[arg(long, value_name = "KIND", add = ArgValueCompleter::new(candidates::kinds))]
    kind: Option<String>,

    /// Only devices in this state
    #[arg(long, value_name = "STATE", value_enum, ignore_case = true)]
    state: Option<DeviceState>,

    /// Only devices with these attributes, such as vendor=046d,serial!=7
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    selector: Option<AttributeSelector>,

    /// After the list, print each device that changes, until Ctrl-C
    #[arg(short, long)]
    watch: bool,

    #[command(flatten)]
    namespace: Namespace,

    #[command(flatten)]
    cluster: KubectlFlags,

    #[command(flatten)]
    output: OutputFlags,
}

/// Namespaces of the claims.
#[derive(Clone, Debug, clap::Args)]
struct Namespace {
    /// Only devices that claims in this namespace hold
    #[arg(short, long, value_name = "NAME", value_parser = value::namespace)]
    namespace: Option<String>,

    /// Fail without the right to read the claims of all namespaces. Default: without it, only claims in the context's
    /// namespace are read
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,
}

impl Namespace {
    fn of_context(&self, context_namespace: String) -> Namespaces {
        match &self.namespace {
            Some(namespace) => Namespaces::One(namespace.clone()),
            None if self.all_namespaces => Namespaces::All,
            None => Namespaces::AllOr(context_namespace),
        }
    }

    /// Whether a claim in the namespace holds the device; true without a namespace.
    fn has(&self, device: &DeviceRow) -> bool {
        self.namespace.as_ref().is_none_or(|namespace| {
            let is_in = |claim: &str| claim.split_once('/').is_some_and(|(of, _)| of == namespace);
            device.holders.iter().any(|holder| is_in(&holder.claim))
        })
    }
}

/// Prints the table.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let cluster = &arguments.cluster;
    let (mut all, scope) = read_all(cluster, |context| arguments.namespace.of_context(context))?;
    let answer = arguments.retain(all.clone());
    if answer.devices.is_empty() {
        eprintln!("{}", arguments.nothing_found());
    }
    let is_read = arguments.output.print(&answer)?;
    if arguments.watch && is_read {
        block_on(async {
            let client = cluster.connect_for_watches().await?;
            watch::devices(&client, &cluster.driver.name, &scope, |table| {
                let changed = arguments.changes(&all, &table);
                all = table;
                Ok(changed.devices.is_empty() || arguments.output.continued().print(&changed)?)
            })
            .await
        })?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Arguments {
    fn selects(&self, device: &DeviceRow) -> bool {
        let driver = &self.cluster.driver.name;
        let is = |asked: &Option<String>, found: &str| asked.as_deref().is_none_or(|asked| asked == found);
        self.namespace.has(device)
            && is(&self.node, &device.node)
            && is(&self.kind, &device.kind)
            && self.state.is_none_or(|asked| asked == device.state)
            && self
                .selector
                .as_ref()
                .is_none_or(|selector| selector.matches(driver, &device.attributes))
    }

    fn retain(&self, mut table: DeviceTable) -> DeviceTable {
        table.devices.retain(|device| self.selects(device));
        table
    }

    /// The rows that changed, of devices that were or are selected.
    fn changes(&self, before: &DeviceTable, after: &DeviceTable) -> DeviceTable {
        let selected = before.devices.iter().filter(|device| self.selects(device));
        let were: BTreeSet<_> = selected.map(DeviceRow::identity).collect();
        let are: BTreeSet<_> = after.devices.iter().map(DeviceRow::identity).collect();
        let mut changed = after.changed_since(before);
        changed.devices.retain(|device| {
            let identity = device.identity();
            were.contains(&identity) || (are.contains(&identity) && self.selects(device))
        });
        changed
    }

    fn nothing_found(&self) -> String {
        let mut text = format!("No devices found of driver {}", self.cluster.driver.name);
        let state = self.state.map(|state| format!("{state:?}"));
        let asked = [
            ("on node", self.node.as_deref()),
            ("of kind", self.kind.as_deref()),
            ("in state", state.as_deref()),
            ("held in namespace", self.namespace.namespace.as_deref()),
        ];
        for (what, value) in asked {
            if let Some(value) = value {
                let _ = write!(text, ", {what} {value}");
            }
        }
        if self.selector.is_some() {
            text += ", with these attributes";
        }
        text + "."
    }
}

/// Reads all devices of the driver. `namespaces` gets the context's namespace.
pub(super) fn read_all(
    cluster: &KubectlFlags,
    namespaces: impl FnOnce(String) -> Namespaces,
) -> Result<(DeviceTable, ClaimScope), Error> {
    block_on(async {
        let (client, context_namespace) = cluster.connect().await?;
        read_table(&client, &cluster.driver.name, &namespaces(context_namespace)).await
    })
}

async fn read_table(
    client: &Client,
    driver: &str,
    namespaces: &Namespaces,
) -> Result<(DeviceTable, ClaimScope), Error> {
    let (table, scope) = match read::api(client).await? {
        ServedApi::Structured => {
            let slices = read::slices(client).await?;
            let claims = read::structured_claims(client, namespaces).await?;
            let table = structured::devices::devices(driver, &slices, &claims.items);
            (table, claims.scope)
        }
        ServedApi::Classic => {
            let inventories: Vec<NodeInventory> = read::all(client).await?;
            let claims = read::claims(client, namespaces).await?;
            (devices(driver, &inventories, &claims.items), claims.scope)
        }
    };
    Ok((scope.limit(table), scope))
}

impl Printable for DeviceTable {
    const KIND: &'static str = "DeviceList";

    fn text(&self, style: Style) -> String {
        let mut text = String::new();
        if !self.devices.is_empty() {
            let rows = self.devices.iter();
            text += &if style.wide {
                let header = [
                    "NODE", "DEVICE", "KIND", "STATE", "HELD BY", "PODS", "SHARES", "API", "WHY",
                ];
                table(style, header, rows.map(wide_cells).collect())
            } else {
                let header = ["NODE", "DEVICE", "KIND", "STATE", "HELD BY"];
                table(style, header, rows.map(cells).collect())
            };
        }
        for (claim, reason) in &self.unreadable {
            let _ = writeln!(
                text,
                "{}: ResourceClaim {claim} holds devices that cannot be read: {}",
                coloured("warning", Colour::Yellow),
                one_line(reason)
            );
        }
        text
    }

    fn names(&self) -> Vec<String> {
        self.devices.iter().map(DeviceRow::name).collect()
    }
}

fn cells(device: &DeviceRow) -> Vec<String> {
    let claims: Vec<_> = device
        .holders
        .iter()
        .map(|holder| holder.claim.as_str())
        .collect();
    row([
        &device.node,
        &device.device,
        &device.kind,
        &format!("{:?}", device.state),
        &claims.join(","),
    ])
}

fn wide_cells(device: &DeviceRow) -> Vec<String> {
    let pods = device.holders.iter().flat_map(|holder| &holder.pods);
    let pods: Vec<_> = pods.map(String::as_str).collect();
    let mut all = cells(device);
    all.extend(row([
        &pods.join(","),
        &format!("{}/{}", device.holders.len(), device.shares),
        api(device),
        device.cause.as_deref().unwrap_or_default(),
    ]));
    all
}

/// Returns the device's mode, in the configuration's spelling.
pub(super) fn api(device: &DeviceRow) -> &'static str {
    device.mode.map_or("", Mode::name)
}

/// Returns the coloured state.
pub(super) fn state(state: DeviceState) -> String {
    let text = format!("{state:?}");
    let colour = match state {
        DeviceState::Free => Colour::Green,
        DeviceState::Held | DeviceState::NotClaimed | DeviceState::NotForClaims => return text,
        DeviceState::NotReady | DeviceState::Tainted | DeviceState::Unknown => Colour::Yellow,
        DeviceState::Unhealthy | DeviceState::Gone => Colour::Red,
    };
    coloured(&text, colour)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cli::diagnose::structured::tests::{DRIVER, camera, held, slice};
    use crate::cli::tool::tests::{Server, parsed};

    const CLAIMS: &str = "/apis/resource.k8s.io/v1/resourceclaims";
    const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

    fn or_shop() -> Namespaces {
        Namespaces::AllOr("shop".to_owned())
    }

    #[tokio::test]
    async fn structured_devices_have_the_same_columns() {
        let server = Server::structured()
            .with(SLICES, &[slice("node-a", json!([camera("a"), camera("b")]))])
            .with(CLAIMS, &[held("one", "node-a", &["b"])]);
        let (table, _) = read_table(&server.client(), DRIVER, &or_shop()).await.unwrap();
        assert_eq!(
            table.text(Style {
                wide: true,
                no_headers: false
            }),
            "NODE     DEVICE   KIND      STATE   HELD BY    PODS   SHARES   API      WHY\n\
             node-a   a        cameras   Free                      0/1      claims\n\
             node-a   b        cameras   Held    shop/one   till   1/1      claims\n"
        );
    }

    #[tokio::test]
    async fn taints_of_rules_are_shown_to_those_who_may_read_them() {
        const RULES: &str = "/apis/resource.k8s.io/v1/devicetaintrules";
        let rule = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceTaintRule", "metadata": { "name": "repair" },
            "spec": { "deviceSelector": { "device": "a" }, "taint": { "key": "example.com/repair", "effect": "NoSchedule" } },
        });
        let server = Server::structured().with(SLICES, &[slice("node-a", json!([camera("a")]))]);
        let state = async |server: Server| {
            let (table, _) = read_table(&server.client(), DRIVER, &or_shop()).await.unwrap();
            table.devices[0].state
        };
        let with_rule = server.clone().with(RULES, &[rule]);
        assert_eq!(state(with_rule).await, DeviceState::Tainted);
        assert_eq!(state(server.clone()).await, DeviceState::Free, "before 1.37");
        assert_eq!(
            state(server.clone().without_right(RULES)).await,
            DeviceState::Free
        );
        let failing = server.failing(RULES, 500).client();
        assert!(read_table(&failing, DRIVER, &or_shop()).await.is_err());
    }

    #[tokio::test]
    async fn nested_parameters_of_a_claim_do_not_stop_the_command() {
        let mut parameters = json!([]);
        for _ in 0..200 {
            parameters = json!([parameters]);
        }
        let mut claim = held("one", "node-a", &["a"]);
        let opaque = json!({ "driver": "other.example", "parameters": parameters });
        claim["status"]["allocation"]["devices"]["config"] =
            json!([{ "source": "FromClaim", "opaque": opaque }]);
        let server = Server::structured()
            .with(SLICES, &[slice("node-a", json!([camera("a")]))])
            .with(CLAIMS, &[claim]);
        let (table, _) = read_table(&server.client(), DRIVER, &or_shop()).await.unwrap();
        assert_eq!(table.devices[0].state, DeviceState::Held);
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
        let (table, scope) = read_table(&server.clone().client(), DRIVER, &or_shop())
            .await
            .unwrap();
        assert_eq!(scope, ClaimScope::Namespace("shop".to_owned()));
        let states: Vec<DeviceState> = table.devices.iter().map(|row| row.state).collect();
        assert_eq!(states, [DeviceState::Unknown, DeviceState::Held]);
        let refused = read_table(&server.client(), DRIVER, &Namespaces::All).await;
        assert!(read::is_forbidden(&refused.unwrap_err()), "-A does not fall back");
    }

    #[tokio::test]
    async fn a_namespace_filters_devices_by_their_holders() {
        let claims = "/apis/resource.k8s.io/v1/namespaces/shop/resourceclaims";
        let server = Server::structured()
            .with(SLICES, &[slice("node-a", json!([camera("a"), camera("b")]))])
            .with(claims, &[held("one", "node-a", &["b"])]);
        let namespaces = Namespaces::One("shop".to_owned());
        let (table, _) = read_table(&server.client(), DRIVER, &namespaces).await.unwrap();
        for (namespace, expected) in [("shop", vec!["node-a/b"]), ("sho", vec![])] {
            let table = parsed::<Arguments>(&["-n", namespace]).retain(table.clone());
            assert_eq!(table.names(), expected, "{namespace}");
        }
    }

    #[tokio::test]
    async fn a_watch_prints_changed_devices() {
        let all = [camera("a"), camera("b"), camera("c")];
        let read = async |devices: &[serde_json::Value], claims: &[serde_json::Value]| {
            let slices = [slice("node-a", json!(devices))];
            let server = Server::structured()
                .with(SLICES, &slices[..devices.len().min(1)])
                .with(CLAIMS, claims);
            let table = read_table(&server.client(), DRIVER, &Namespaces::All).await;
            table.unwrap().0
        };
        let before = read(&all[..2], &[]).await;
        let after = read(&all[1..], &[held("one", "node-a", &["b"])]).await;
        let printed = |flags: &[&str], before: &DeviceTable, after: &DeviceTable| {
            let changed = parsed::<Arguments>(flags)
                .changes(before, after)
                .devices
                .into_iter();
            changed.map(|row| (row.device, row.state)).collect::<Vec<_>>()
        };
        let row = |device: &str, state| (device.to_owned(), state);
        let [a, b, c] = [
            row("a", DeviceState::Gone),
            row("b", DeviceState::Held),
            row("c", DeviceState::Free),
        ];
        assert_eq!(printed(&[], &before, &after), [b.clone(), c.clone(), a.clone()]);
        assert!(printed(&[], &after, &after).is_empty());
        // A device that leaves the selection is printed as it is now.
        assert_eq!(
            printed(&["--state", "Held"], &before, &after),
            std::slice::from_ref(&b)
        );
        let left = [b.clone(), c.clone(), a];
        assert_eq!(printed(&["--state", "Free"], &before, &after), left);
        let freed = row("b", DeviceState::Free);
        assert_eq!(
            printed(&["--state", "Held"], &after, &before),
            std::slice::from_ref(&freed)
        );
        assert_eq!(printed(&["-n", "shop"], &after, &before), [freed]);
        assert!(printed(&["-n", "other"], &after, &before).is_empty());
        // A device that a claim still holds is printed once.
        let unplugged = read(&all[2..], &[held("one", "node-a", &["b"])]).await;
        let [gone_b, gone_c] = ["b", "c"].map(|device| row(device, DeviceState::Gone));
        assert_eq!(printed(&[], &after, &unplugged), std::slice::from_ref(&gone_b));
        // Also after the last slice of its node, and when the slices return.
        let wiped = read(&[], &[held("one", "node-a", &["b"])]).await;
        assert_eq!(printed(&[], &after, &wiped), [gone_b, gone_c]);
        assert_eq!(printed(&[], &wiped, &after), [b, c]);
        let claims = [held("one", "node-a", &["b"]), held("two", "node-a", &["gone"])];
        let lost = read(&all[1..], &claims).await;
        let gone = row("gone", DeviceState::Gone);
        assert_eq!(
            printed(&["--state", "Gone"], &after, &lost),
            std::slice::from_ref(&gone)
        );
    }

    #[tokio::test]
    async fn a_cluster_without_v1_is_read_in_classic_mode() {
        let server = Server::default().with("/apis/drayman.dev/v1alpha1/nodeinventories", &[]);
        let answer = read_table(&server.client(), DRIVER, &or_shop()).await.unwrap();
        assert_eq!(answer, (DeviceTable::default(), ClaimScope::NotServed));
    }
}
