//! Checks whether nodes offer the devices that their companions list.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::doctor::{DoctorFinding, Level, first, some};
use super::inventories_of;
use crate::api::crd::{Mode, NodeInventory};
use crate::core::allocation::inventory::unready;

/// Maximum number of nodes in a message.
const NODES_MAX: usize = 5;

/// Name of the check of the container runtime's socket.
pub const RUNTIME: &str = "container runtime";

/// The name of a node.
pub(super) fn name_of(node: &Node) -> &str {
    node.metadata.name.as_deref().unwrap_or_default()
}

/// Checks the inventories of `driver`, and compares them with the cluster's nodes if those are known.
pub fn inventories(
    driver: &str,
    inventories: &[NodeInventory],
    nodes: Option<&[Node]>,
) -> Vec<DoctorFinding> {
    let check = "nodes";
    let mut findings = Vec::new();
    let by_name: Option<BTreeMap<&str, &Node>> =
        nodes.map(|nodes| nodes.iter().map(|node| (name_of(node), node)).collect());
    let mut ready = 0;
    let mut with_devices = 0;
    let mut nonempty = 0;
    let mut devices = 0;
    let mut empty = Vec::new();
    for inventory in inventories_of(driver, inventories) {
        let spec = &inventory.spec;
        let name = spec.node_name.as_str();
        match by_name.as_ref().map(|nodes| nodes.get(name)) {
            Some(None) => {
                findings.push(DoctorFinding::warning(
                    check,
                    format!("there is an inventory of node {name}, and no such node"),
                    format!(
                        "if the node is gone for good: kubectl delete nodeinventory {}",
                        inventory.metadata.name.as_deref().unwrap_or_default()
                    ),
                ));
                continue;
            }
            Some(Some(node)) if node.metadata.uid.as_ref() != Some(&spec.node_uid) => {
                findings.push(DoctorFinding::problem(
                    check,
                    format!("the inventory of node {name} belongs to an earlier node of that name"),
                    "restart the companion there: it has not noticed that the Node was recreated",
                ));
            }
            Some(Some(_)) | None => {}
        }
        nonempty += usize::from(!spec.devices.is_empty());
        if let Some(cause) = unready(inventory) {
            findings.push(DoctorFinding::problem(
                check,
                format!("the companion of node {name} does not serve: {cause}"),
                "check its pod and log",
            ));
            continue;
        }
        ready += 1;
        with_devices += usize::from(!spec.devices.is_empty());
        devices += spec.devices.len();
        for device in spec.devices.iter().filter(|device| device.unhealthy.is_some()) {
            findings.push(DoctorFinding::warning(
                check,
                format!(
                    "device {} of node {name} is unhealthy: {}",
                    device.name,
                    device.unhealthy.as_deref().unwrap_or_default()
                ),
                "repair or reconnect the device; it is allocated again once it is healthy",
            ));
        }
        if spec.devices.is_empty() {
            empty.push(name);
        }
    }
    let fix = "`drayman node discover` on such a node shows why each candidate is excluded";
    findings.extend(without_devices(
        "have no device of any kind",
        &empty,
        nonempty,
        fix,
    ));
    findings.push(if ready == 0 {
        without_nodes(driver)
    } else {
        let all = nodes.map(|nodes| format!(" of {}", nodes.len()));
        let all = all.unwrap_or_default();
        DoctorFinding::fine(
            check,
            format!("{with_devices}{all} nodes offer {devices} devices"),
        )
    });
    let ours = inventories_of(driver, inventories);
    let with = ours.map(|object| object.spec.node_name.as_str()).collect();
    findings.extend(without_companion(&with, nodes.unwrap_or_default()));
    findings
}

/// Reports that no node offers devices.
pub(super) fn without_nodes(driver: &str) -> DoctorFinding {
    DoctorFinding::problem(
        "nodes",
        format!("no node offers devices of driver {driver}"),
        "check that the companion's DaemonSet has pods, and read their logs",
    )
}

/// Reports the nodes whose companion offers no devices. `with_devices` is the number of the other nodes, and `lack` the verb phrase of
/// the message. If some nodes have devices, it is a note: the others may lack the hardware.
pub(super) fn without_devices(
    lack: &str,
    nodes: &[&str],
    with_devices: usize,
    fix: &str,
) -> Option<DoctorFinding> {
    if nodes.is_empty() {
        return None;
    }
    let (number, all) = (nodes.len(), nodes.len() + with_devices);
    let names = first(nodes, NODES_MAX);
    let message = format!("{number} of {all} nodes with a companion {lack}: {names}");
    Some(DoctorFinding {
        level: if with_devices > 0 {
            Level::Note
        } else {
            Level::Warning
        },
        ..DoctorFinding::warning("nodes", message, fix)
    })
}

/// Reports pods of this driver with a waiting container. `waiting` has the name of each, with the message of kubelet.
pub fn not_running(driver: &str, waiting: &[String]) -> Option<DoctorFinding> {
    (!waiting.is_empty()).then(|| {
        DoctorFinding::problem(
            "pods",
            format!("pods of driver {driver} do not run: {}", some(waiting)),
            "check the pod (kubectl describe) and its log (kubectl logs --previous); if its image is missing, load it on the node, or use \
             a registry that its container runtime reaches and trusts",
        )
    })
}

/// Reports nodes that are not in `with`, the nodes with a companion, if any is.
pub(super) fn without_companion(with: &BTreeSet<&str>, nodes: &[Node]) -> Option<DoctorFinding> {
    let (have, lack): (Vec<&str>, Vec<&str>) =
        nodes.iter().map(name_of).partition(|name| with.contains(name));
    if have.is_empty() || lack.is_empty() {
        return None;
    }
    Some(DoctorFinding::note(
        "nodes",
        format!(
            "{} of {} nodes have no companion: {}; the chart's node.nodeSelector selects its nodes, so this may be intended",
            lack.len(),
            nodes.len(),
            first(&lack, NODES_MAX)
        ),
    ))
}

/// Checks whether companions can query the container runtime for the devices of containers; one entry per companion,
/// `true` if it has the socket.
pub fn runtime_sockets(companions: &[bool]) -> Option<DoctorFinding> {
    let without = companions.iter().filter(|has_socket| !**has_socket).count();
    match (without, companions.len()) {
        (_, 0) => None,
        (0, all) => Some(DoctorFinding::fine(
            RUNTIME,
            format!("{all} companions have its socket"),
        )),
        (without, all) => Some(without_runtime(&format!(
            "{without} of {all} companions have no socket of it"
        ))),
    }
}

/// Describes the consequences of a companion without access to the container runtime. The socket grants root on the
/// node, so an operator may omit it deliberately.
pub fn without_runtime(what: &str) -> DoctorFinding {
    let message = format!(
        "{what}: if a pod is deleted by force, its devices can stay withheld until `drayman node release --force`, and kubelet can \
         give its extended resources to the next pod while its containers still have them"
    );
    DoctorFinding {
        fix: Some(
            "if pods are deleted by force here: set node.containerRuntimeSocket of the chart (containerd: \
             /run/containerd/containerd.sock, CRI-O: /var/run/crio/crio.sock), and outside of a pod --container-runtime-socket; \
             access to this socket is root access to the node"
                .to_owned(),
        ),
        ..DoctorFinding::note(RUNTIME, message)
    }
}

/// Reports extended resources with the driver's prefix that a node advertises without a matching device in its
/// inventory.
pub fn extended_resources(driver: &str, inventories: &[NodeInventory], nodes: &[Node]) -> Vec<DoctorFinding> {
    let prefix = format!("{driver}/");
    let mut findings = Vec::new();
    // The inventory does not record resource names, which the configuration sets freely.
    let announces = |object: &&NodeInventory| {
        let mut devices = object.spec.devices.iter();
        devices.any(|device| device.mode != Mode::Claims)
    };
    let announcing: BTreeSet<&str> = inventories_of(driver, inventories)
        .filter(announces)
        .map(|object| object.spec.node_name.as_str())
        .collect();
    for node in nodes {
        let name = name_of(node);
        let allocatable = node
            .status
            .iter()
            .flat_map(|status| status.allocatable.iter().flatten());
        for (resource, Quantity(number)) in allocatable {
            if resource.starts_with(&prefix) && number != "0" && !announcing.contains(name) {
                findings.push(DoctorFinding::warning(
                    "extended resources",
                    format!("node {name} advertises {number} of {resource}, but its companion has no device for it"),
                    "another device plugin uses this name, or kubelet still advertises a removed resource: restart kubelet there",
                ));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cli::diagnose::doctor::worst;
    use crate::core::allocation::tests::fixture::{DRIVER, inventory};

    fn node(name: &str, uid: &str) -> Node {
        serde_json::from_value(json!({ "metadata": { "name": name, "uid": uid } })).unwrap()
    }

    #[test]
    fn an_inventory_must_be_ready_and_of_the_present_node() {
        let good = inventory("node-a", "1", &["a"]);
        let level = |object: &NodeInventory, nodes: &[Node]| {
            worst(&inventories(DRIVER, std::slice::from_ref(object), Some(nodes)))
        };
        assert_eq!(level(&good, &[node("node-a", "1")]), Level::Fine);
        assert_eq!(level(&good, &[node("node-a", "2")]), Level::Problem);
        assert_eq!(level(&good, &[]), Level::Problem);
        let mut silent = good.clone();
        silent.status = None;
        assert_eq!(level(&silent, &[node("node-a", "1")]), Level::Problem);
    }

    #[test]
    fn only_nodes_with_devices_offer_devices() {
        let objects = [inventory("node-a", "1", &["a"]), inventory("node-b", "2", &[])];
        let nodes = [node("node-a", "1"), node("node-b", "2")];
        let offers = |nodes: Option<&[Node]>| {
            let findings = inventories(DRIVER, &objects, nodes).into_iter();
            let mut fine = findings.filter(|finding| finding.level == Level::Fine);
            fine.next().unwrap().message
        };
        assert_eq!(offers(Some(&nodes)), "1 of 2 nodes offer 1 devices");
        assert_eq!(offers(None), "1 nodes offer 1 devices");
    }

    #[test]
    fn nodes_without_a_device_are_one_finding() {
        let empty = |number: usize| inventory(&format!("node-{number}"), "1", &[]);
        let of = |objects: &[NodeInventory]| {
            let mut findings = inventories(DRIVER, objects, None);
            findings.retain(|finding| finding.message.contains("device of any kind"));
            let found = findings.into_iter();
            found
                .map(|finding| (finding.level, finding.message))
                .collect::<Vec<_>>()
        };
        let mut objects: Vec<NodeInventory> = (0..7).map(empty).collect();
        let names = "node-0, node-1, node-2, node-3, node-4 and 2 more";
        let message = format!("7 of 7 nodes with a companion have no device of any kind: {names}");
        assert_eq!(of(&objects), [(Level::Warning, message)]);
        objects.push(inventory("node-7", "1", &["a"]));
        let message = format!("7 of 8 nodes with a companion have no device of any kind: {names}");
        assert_eq!(of(&objects), [(Level::Note, message)]);
    }

    #[test]
    fn a_resource_without_an_inventory_is_reported() {
        let mut node = node("node-a", "1");
        let status = json!({ "allocatable": { format!("{DRIVER}/whatever"): "1" } });
        node.status = serde_json::from_value(status).unwrap();
        let claimed = inventory("node-a", "1", &["a"]);
        let mut allocated_claims = claimed.clone();
        allocated_claims.spec.devices[0].mode = Mode::ExtendedResource;
        let nodes = std::slice::from_ref(&node);
        assert!(extended_resources(DRIVER, &[allocated_claims], nodes).is_empty());
        assert_eq!(
            worst(&extended_resources(DRIVER, &[claimed], nodes)),
            Level::Warning
        );
        assert_eq!(worst(&extended_resources(DRIVER, &[], nodes)), Level::Warning);
    }

    #[test]
    fn nodes_without_a_companion_are_named_where_others_have_one() {
        let objects = [inventory("node-0", "0", &["a"])];
        let nodes = |count: usize| -> Vec<Node> {
            (0..count)
                .map(|number| node(&format!("node-{number}"), &number.to_string()))
                .collect()
        };
        let note = |nodes: &[Node]| {
            let mut findings = inventories(DRIVER, &objects, Some(nodes)).into_iter();
            findings
                .find(|finding| finding.level == Level::Note)
                .map(|finding| finding.message)
        };
        assert_eq!(note(&nodes(1)), None);
        let three = note(&nodes(3)).unwrap();
        assert!(
            three.starts_with("2 of 3 nodes have no companion: node-1, node-2; "),
            "{three}"
        );
        let nine = note(&nodes(9)).unwrap();
        assert!(
            nine.contains("8 of 9") && nine.contains("node-5 and 3 more;"),
            "{nine}"
        );
        assert_eq!(
            worst(&inventories(DRIVER, &objects, Some(&nodes(3)))),
            Level::Note
        );
        // A cluster without companions gets another finding, and the inventory of a deleted node does not count.
        assert_eq!(note(&nodes(3)[1..]), None);
        assert!(
            inventories(DRIVER, &[], Some(&nodes(2)))
                .iter()
                .all(|finding| finding.level != Level::Note)
        );
    }
}
