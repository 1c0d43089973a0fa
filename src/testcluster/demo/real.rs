//! Devices of this machine: an additional node whose companion uses every preset.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::scenarios::pod;
use super::{Demo, Halt, Shown};
use crate::node::config::PRESETS;
use crate::testcluster::api::object::{list, text};

/// Name of the node.
pub(super) const NODE: &str = "this-machine";

/// Returns the node's companion configuration: every preset, for claims.
pub(super) fn configuration() -> String {
    let mut text = "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n".to_owned();
    for preset in &PRESETS {
        // Writing to a `String` cannot fail.
        let _ = writeln!(text, "- preset: {}", preset.name);
    }
    text
}

/// Returns the class, parameters and template for a kind.
fn class(kind: &str) -> String {
    format!(
        "apiVersion: drayman.dev/v1alpha1\nkind: DeviceClassParameters\nmetadata: {{ name: {kind} }}\nspec: {{ kind: {kind} }}\n---\n\
         apiVersion: resource.k8s.io/v1alpha2\nkind: ResourceClass\nmetadata: {{ name: {kind} }}\ndriverName: drayman.dev\n\
         parametersRef: {{ apiGroup: drayman.dev, kind: DeviceClassParameters, name: {kind} }}\n---\n\
         apiVersion: resource.k8s.io/v1alpha2\nkind: ResourceClaimTemplate\nmetadata: {{ name: {kind} }}\n\
         spec: {{ spec: {{ resourceClassName: {kind} }} }}\n"
    )
}

/// Returns the healthy devices by kind.
fn found(demo: &Demo) -> BTreeMap<String, Vec<String>> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for inventory in demo.client.list("nodeinventories") {
        if text(&inventory, "/spec/nodeName") != NODE {
            continue;
        }
        for device in list(&inventory, "/spec/devices") {
            let (name, kind) = (text(device, "/name"), text(device, "/kind"));
            if text(device, "/unhealthy").is_empty() {
                found.entry(kind.to_owned()).or_default().push(name.to_owned());
            }
        }
    }
    found
}

pub(super) async fn play(demo: &mut Demo) -> Result<(), Halt> {
    let found = found(demo);
    if found.is_empty() {
        let text = "this machine has no device of a ready-made kind that can be handed out; drayman node discover says why";
        demo.show(Shown::Remark(text.to_owned()));
        return Ok(());
    }
    let mut pods = Vec::new();
    for (kind, devices) in &found {
        demo.apply(
            &format!("a class for {kind}, of which there is {}", devices.join(", ")),
            &class(kind),
        )?;
        let name = format!("real-{kind}");
        let template = format!("resourceClaimTemplateName: {kind}");
        demo.stage
            .apply(&pod(&name).replace("resourceClaimTemplateName: test", &template))?;
        let of = name.clone();
        demo.expect(
            &format!("pod {name} runs on {NODE} with a device of this machine"),
            move |demo| {
                // Whether this user may open the device does not matter here.
                demo.runs(&of) && demo.outfit(&of).is_some_and(|outfit| !outfit.devices.is_empty())
            },
        )
        .await?;
        demo.tell_outfit(&name);
        pods.push(name);
    }
    demo.clear(&pods).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::config::NodeConfiguration;

    #[test]
    fn every_ready_made_kind_is_looked_for() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), configuration()).unwrap();
        assert_eq!(
            NodeConfiguration::read(file.path()).unwrap().kinds.len(),
            PRESETS.len()
        );
    }
}
