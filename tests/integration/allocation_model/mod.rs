//! Property test of the allocator of the built-in driver against a reference model of sets and maps: random sequences of inventory, claim
//! and process events.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

mod inventory;
mod reference;

use std::collections::BTreeSet;

use proptest::prelude::*;

use self::reference::Comparison;

const DRIVER: &str = "devices.example";
const NODES: usize = 3;
const DEVICES: usize = 4;
const CLAIMS: usize = 6;
const KINDS: [&str; 2] = ["gpu", "nic"];

/// An event. Claims and nodes are numbers.
#[derive(Clone, Debug)]
enum Step {
    /// A node publishes its inventory: UID, readiness, and kind and health of each device.
    Inventory {
        node: usize,
        uid: u8,
        ready: bool,
        devices: Vec<Option<(usize, bool)>>,
    },
    /// A node's inventory is deleted.
    NoInventory { node: usize },
    /// Allocates these claims together, on a node or on any node.
    Allocate {
        claims: BTreeSet<usize>,
        node: Option<usize>,
    },
    /// The allocation of a claim is recorded and observed.
    Record { claim: usize },
    /// The claim is observed without a change.
    Observe { claim: usize },
    /// The driver deallocates the claim.
    Deallocate { claim: usize },
    /// The recorded allocation is cleared, which is observed.
    Clear { claim: usize },
    /// The claim is deleted and recreated.
    Delete { claim: usize },
    /// The process restarts from the claims.
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let device = prop::option::weighted(0.8, (0..KINDS.len(), prop::bool::weighted(0.8)));
    let inventory = (
        0..NODES,
        0_u8..2,
        prop::bool::weighted(0.9),
        prop::collection::vec(device, DEVICES),
    )
        .prop_map(|(node, uid, ready, devices)| Step::Inventory {
            node,
            uid,
            ready,
            devices,
        });
    let allocate = (
        prop::collection::btree_set(0..CLAIMS, 1..4),
        prop::option::weighted(0.8, 0..NODES),
    )
        .prop_map(|(claims, node)| Step::Allocate { claims, node });
    prop_oneof![
        4 => inventory,
        1 => (0..NODES).prop_map(|node| Step::NoInventory { node }),
        10 => allocate,
        6 => (0..CLAIMS).prop_map(|claim| Step::Record { claim }),
        2 => (0..CLAIMS).prop_map(|claim| Step::Observe { claim }),
        2 => (0..CLAIMS).prop_map(|claim| Step::Deallocate { claim }),
        3 => (0..CLAIMS).prop_map(|claim| Step::Clear { claim }),
        2 => (0..CLAIMS).prop_map(|claim| Step::Delete { claim }),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn the_allocator_agrees_with_sets_and_maps(steps in prop::collection::vec(step(), 1..60)) {
        let mut comparison = Comparison::new();
        for step in &steps {
            comparison.run(step);
            comparison.check();
        }
        for claim in 0..CLAIMS {
            comparison.run(&Step::Delete { claim });
        }
        comparison.check();
        prop_assert_eq!(comparison.allocator.holdings().uids().count(), 0);
        for uid in (0..NODES).flat_map(|node| [format!("node-{node}-0"), format!("node-{node}-1")]) {
            prop_assert!(comparison.allocator.holdings().on_node(&uid).is_none(), "no allocation is left");
        }
    }
}
