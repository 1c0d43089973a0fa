//! `drayman node holdings` and `drayman node release`: list the devices held on this node and release a claim manually.

use std::collections::BTreeMap;
use std::process::ExitCode;

use schemars::JsonSchema;
use serde::Serialize;

use crate::api::proto::node_records::Holding;
use crate::cli::error::Error;
use crate::cli::flags;
use crate::cli::output::{OutputFlags, Printable, Style, one_line, row, table};
use crate::cli::runtime::block_on;
use crate::core::names::DriverName;
use crate::node::admin::{Access, RecordsError};
use crate::node::state::storage::Paths;

/// List the holders of this node's devices: claims and containers
///
/// Queries the running companion, or reads its checkpoint if none runs. Lists containers only for devices of mode `both`,
/// and only while the companion runs; for other extended resources only kubelet knows them. Requires root.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct HoldingsArguments {
    #[command(flatten)]
    storage: StorageFlags,

    #[command(flatten)]
    output: OutputFlags,
}

/// Free the devices of a claim on this node that kubelet has forgotten
///
/// Use it for claims in quarantine (see the events of the Node and `drayman node holdings`). Refuses claims that kubelet
/// lists as prepared; delete their pods instead. Requires root and a running companion.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct ReleaseArguments {
    /// Uid of the claim (see `drayman node holdings`)
    #[arg(value_name = "UID")]
    claim_uid: String,

    /// Free the devices even if kubelet lists the claim or its list is unavailable. Make sure that no container uses them;
    /// they can be allocated again.
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    storage: StorageFlags,

    #[command(flatten)]
    output: OutputFlags,
}

/// Location of the records.
#[derive(Clone, Debug, clap::Args)]
struct StorageFlags {
    #[command(flatten)]
    driver: flags::DriverNameFlag,

    #[command(flatten)]
    roots: flags::RootFlags,
}

impl StorageFlags {
    async fn access(&self) -> Result<Access, Error> {
        let driver =
            DriverName::parse(&self.driver.name).map_err(|error| Error::Configuration(error.to_string()))?;
        let paths = Paths::new(driver, &self.roots.kubelet_root_dir, &self.roots.cdi_root);
        let access = Access::find(paths, &self.roots.kubelet_root_dir).await;
        access.map_err(|error| Error::Runtime(error.into()))
    }
}

/// The holders of a node's devices.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct HoldingList {
    /// The prepared claims.
    items: Vec<HoldingRow>,
    /// Containers that have a device without a claim, by device; absent if no companion runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    containers: Option<BTreeMap<String, String>>,
}

/// A prepared claim.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct HoldingRow {
    /// Uid of the claim.
    uid: String,
    /// Namespace of the claim; empty if it is unknown.
    namespace: String,
    /// Name of the claim; empty if it is unknown.
    name: String,
    /// The devices; empty if they are unknown.
    devices: Vec<String>,
    /// `Preparing`, `Prepared`, or `EarlierBoot` if the node has booted since.
    state: &'static str,
    /// The reason for quarantine; empty if the claim is not in quarantine.
    quarantine: String,
}

impl From<Holding> for HoldingRow {
    fn from(holding: Holding) -> Self {
        Self {
            uid: holding.claim_uid,
            namespace: holding.claim_namespace,
            name: holding.claim_name,
            devices: holding.devices,
            // The companion may be of another release, and the schema names three states.
            state: match holding.state.as_str() {
                "Prepared" => "Prepared",
                "EarlierBoot" => "EarlierBoot",
                _ => "Preparing",
            },
            quarantine: holding.quarantine,
        }
    }
}

/// Prints the prepared claims.
pub(super) fn holdings(arguments: &HoldingsArguments) -> Result<ExitCode, Error> {
    block_on(async {
        let mut access = arguments.storage.access().await?;
        let holdings = access
            .holdings()
            .await
            .map_err(|error| Error::Runtime(error.into()))?;
        arguments.output.print(&HoldingList {
            items: holdings.by_claims.into_iter().map(HoldingRow::from).collect(),
            containers: holdings.by_containers,
        })?;
        Ok(ExitCode::SUCCESS)
    })
}

/// A claim that has been released.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct Released {
    released: HoldingRow,
}

/// Releases a claim and prints the devices it held.
pub(super) fn release(arguments: &ReleaseArguments) -> Result<ExitCode, Error> {
    block_on(async {
        let mut access = arguments.storage.access().await?;
        match access.release(&arguments.claim_uid, arguments.force).await {
            Ok(released) => {
                let released = released.into();
                arguments.output.print(&Released { released })?;
                Ok(ExitCode::SUCCESS)
            }
            Err(error @ RecordsError::Refused(_)) => {
                eprintln!("error: {error}");
                Ok(ExitCode::FAILURE)
            }
            Err(error) => Err(Error::Runtime(error.into())),
        }
    })
}

impl Printable for Released {
    const KIND: &'static str = "ReleasedHolding";

    fn text(&self, _: Style) -> String {
        format!("{} released: {}\n", self.released.uid, self.released.devices())
    }

    fn names(&self) -> Vec<String> {
        vec![self.released.uid.clone()]
    }
}

impl Printable for HoldingList {
    const KIND: &'static str = "HoldingList";

    fn text(&self, style: Style) -> String {
        let claims = if self.items.is_empty() {
            "No claim holds a device of this node.\n".to_owned()
        } else {
            let header = ["UID", "NAMESPACE", "CLAIM", "DEVICES", "STATE", "QUARANTINE"];
            table(style, header, self.items.iter().map(HoldingRow::cells).collect())
        };
        claims + &in_containers(self.containers.as_ref())
    }

    fn names(&self) -> Vec<String> {
        self.items.iter().map(|holding| holding.uid.clone()).collect()
    }
}

impl HoldingRow {
    fn cells(&self) -> Vec<String> {
        row([
            &self.uid,
            or_unknown(&self.namespace),
            or_unknown(&self.name),
            &self.devices(),
            self.state,
            &self.quarantine,
        ])
    }

    fn devices(&self) -> String {
        or_unknown(&self.devices.join(",")).to_owned()
    }
}

fn or_unknown(text: &str) -> &str {
    if text.is_empty() { "(unknown)" } else { text }
}

/// Formats one line per device that a container holds without a claim.
fn in_containers(devices: Option<&BTreeMap<String, String>>) -> String {
    let Some(devices) = devices else {
        return "No companion runs: devices allocated as extended resources are unknown.\n".to_owned();
    };
    let line = |(device, holder): (&String, &String)| {
        let text = format!("{device}: {holder} has it as an extended resource, and no claim");
        one_line(&text) + "\n"
    };
    devices.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_containers_are_listed_or_called_unknown() {
        let devices = BTreeMap::from([("a".to_owned(), "container main of pod default/p".to_owned())]);
        assert_eq!(
            in_containers(Some(&devices)),
            "a: container main of pod default/p has it as an extended resource, and no claim\n"
        );
        assert_eq!(in_containers(Some(&BTreeMap::new())), "");
        assert!(in_containers(None).contains("are unknown"));
    }

    #[test]
    fn holdings_are_shown_in_columns_with_unknown_values() {
        let known = Holding {
            claim_uid: "u-1".into(),
            claim_namespace: "default".into(),
            claim_name: "camera".into(),
            devices: vec!["a".into(), "b".into()],
            state: "Prepared".into(),
            quarantine: String::new(),
        };
        let lost = Holding {
            claim_uid: "u-22".into(),
            state: "EarlierBoot".into(),
            quarantine: "nobody knows".into(),
            ..Holding::default()
        };
        let holdings = |items: Vec<Holding>| HoldingList {
            items: items.into_iter().map(HoldingRow::from).collect(),
            containers: Some(BTreeMap::new()),
        };
        assert_eq!(
            holdings(vec![known, lost]).text(Style::default()),
            "UID    NAMESPACE   CLAIM       DEVICES     STATE         QUARANTINE\n\
             u-1    default     camera      a,b         Prepared\n\
             u-22   (unknown)   (unknown)   (unknown)   EarlierBoot   nobody knows\n"
        );
        let none = holdings(Vec::new()).text(Style::default());
        assert_eq!(none, "No claim holds a device of this node.\n");
    }
}
