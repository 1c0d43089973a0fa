//! `drayman node holdings` and `drayman node release`: list the devices held on this node and release a claim manually.

use std::collections::BTreeMap;
use std::io::Write as _;

use crate::cli::{Error, group};
use crate::core::prepare::names::DriverName;
use crate::core::prepare::recovery::Holding;
use crate::node::admin::Access;
use crate::node::state::storage::Places;

/// List the holders of this node's devices: claims and containers
///
/// Queries the running companion, or reads its checkpoint if none runs. Lists containers only for devices of mode `both`,
/// and only while the companion runs; for other extended resources only kubelet knows them. Requires root.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Holdings {
    #[command(flatten)]
    place: Place,
}

/// Free the devices of a claim on this node that kubelet has forgotten
///
/// Use it for claims in quarantine (see the events of the Node and `drayman node holdings`). Refuses claims that kubelet
/// lists as prepared; delete their pods instead. Requires root and a running companion.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Release {
    /// Uid of the claim (see `drayman node holdings`)
    #[arg(value_name = "UID")]
    claim_uid: String,

    /// Free the devices even if kubelet lists the claim or its list is unavailable. Make sure that no container uses them;
    /// they can be allocated again.
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    place: Place,
}

/// Which records.
#[derive(Clone, Debug, clap::Args)]
struct Place {
    #[command(flatten)]
    driver: group::DriverName,

    #[command(flatten)]
    kubelet: group::KubeletRoot,

    #[command(flatten)]
    cdi: group::CdiRoot,
}

impl Place {
    async fn access(&self) -> Result<Access, Error> {
        let driver =
            DriverName::parse(&self.driver.name).map_err(|error| Error::Configuration(error.to_string()))?;
        let places = Places::new(driver, &self.kubelet.root_dir, &self.cdi.root);
        let access = Access::find(places, &self.kubelet.root_dir).await;
        access.map_err(|error| Error::Runtime(error.into()))
    }
}

/// Prints the prepared claims.
pub(super) fn holdings(arguments: &Holdings) -> Result<(), Error> {
    super::super::block_on(async {
        let mut access = arguments.place.access().await?;
        let holdings = access
            .holdings()
            .await
            .map_err(|error| Error::Runtime(error.into()))?;
        print(&format!(
            "{}{}",
            table(&holdings.by_claims),
            in_containers(holdings.by_containers.as_ref())
        ))
    })
}

/// Releases a claim and prints the devices it held.
pub(super) fn release(arguments: &Release) -> Result<(), Error> {
    super::super::block_on(async {
        let mut access = arguments.place.access().await?;
        let released = access
            .release(&arguments.claim_uid, arguments.force)
            .await
            .map_err(|error| Error::Runtime(error.into()))?;
        print(&format!("{} released: {}\n", released.uid, devices(&released)))
    })
}

fn devices(holding: &Holding) -> String {
    if holding.devices.is_empty() {
        "(unknown)".to_owned()
    } else {
        holding.devices.join(",")
    }
}

/// Formats one line per device that a container holds without a claim.
fn in_containers(devices: Option<&BTreeMap<String, String>>) -> String {
    let Some(devices) = devices else {
        return "No companion runs: what containers have got as extended resources is not known.\n"
            .to_owned();
    };
    let line = |(device, holder): (&String, &String)| {
        format!("{device}: {holder} has it as an extended resource, and no claim\n")
    };
    devices.iter().map(line).collect()
}

/// Formats one line per claim, in columns.
fn table(holdings: &[Holding]) -> String {
    if holdings.is_empty() {
        return "No claim holds a device of this node.\n".to_owned();
    }
    let head = ["UID", "NAMESPACE", "CLAIM", "DEVICES", "STATE", "QUARANTINE"].map(str::to_owned);
    let or_unknown = |text: &str| {
        if text.is_empty() {
            "(unknown)".to_owned()
        } else {
            text.to_owned()
        }
    };
    let row = |one: &Holding| {
        [
            one.uid.clone(),
            or_unknown(&one.namespace),
            or_unknown(&one.name),
            devices(one),
            one.state.as_str().to_owned(),
            one.quarantine.clone(),
        ]
    };
    let rows: Vec<[String; 6]> = std::iter::once(head).chain(holdings.iter().map(row)).collect();
    let widest = |column: usize| {
        rows.iter()
            .map(|row| row.get(column).map_or(0, String::len))
            .max()
    };
    let mut text = String::new();
    for row in &rows {
        let cells = row
            .iter()
            .enumerate()
            .map(|(column, cell)| format!("{cell:<width$}", width = widest(column).unwrap_or_default()));
        text.push_str(cells.collect::<Vec<_>>().join("   ").trim_end());
        text.push('\n');
    }
    text
}

fn print(text: &str) -> Result<(), Error> {
    std::io::stdout()
        .write_all(text.as_bytes())
        .map_err(|error| Error::Runtime(anyhow::Error::from(error).context("writing to standard output")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::prepare::recovery::HoldingState;

    #[test]
    fn devices_of_containers_are_listed_or_called_unknown() {
        let devices = BTreeMap::from([("a".to_owned(), "container main of pod default/p".to_owned())]);
        assert_eq!(
            in_containers(Some(&devices)),
            "a: container main of pod default/p has it as an extended resource, and no claim\n"
        );
        assert_eq!(in_containers(Some(&BTreeMap::new())), "");
        assert!(in_containers(None).contains("not known"));
    }

    #[test]
    fn holdings_are_shown_in_columns_with_what_is_not_known() {
        let known = Holding {
            uid: "u-1".into(),
            namespace: "default".into(),
            name: "camera".into(),
            devices: vec!["a".into(), "b".into()],
            state: HoldingState::Prepared,
            quarantine: String::new(),
        };
        let lost = Holding {
            uid: "u-22".into(),
            state: HoldingState::EarlierBoot,
            quarantine: "nobody knows".into(),
            ..Holding::default()
        };
        assert_eq!(
            table(&[known, lost]),
            "UID    NAMESPACE   CLAIM       DEVICES     STATE         QUARANTINE\n\
             u-1    default     camera      a,b         Prepared\n\
             u-22   (unknown)   (unknown)   (unknown)   EarlierBoot   nobody knows\n"
        );
        assert_eq!(table(&[]), "No claim holds a device of this node.\n");
    }
}
