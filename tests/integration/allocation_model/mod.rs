//! The allocator of the built-in driver against a reference that is nothing but sets and maps: random sequences of everything
//! that can happen to inventories, claims and the process itself.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

mod inventory;
mod reference;

use std::collections::BTreeSet;

use proptest::prelude::*;

use self::reference::Pair;

const DRIVER: &str = "devices.example";
const NODES: usize = 3;
const DEVICES: usize = 4;
const CLAIMS: usize = 6;
const KINDS: [&str; 2] = ["gpu", "nic"];

/// What can happen. Claims and nodes are numbers.
#[derive(Clone, Debug)]
enum Step {
    /// A node says what it has: its uid, whether it is ready, and of each device the kind and whether it is healthy.
    Inventory {
        node: usize,
        uid: u8,
        ready: bool,
        devices: Vec<Option<(usize, bool)>>,
    },
    /// A node's inventory is deleted.
    NoInventory { node: usize },
    /// These claims are allocated together, on a node or anywhere.
    Allocate {
        claims: BTreeSet<usize>,
        node: Option<usize>,
    },
    /// The status write of a granted claim succeeds, and is observed.
    Record { claim: usize },
    /// The claim is observed without a change.
    Observe { claim: usize },
    /// The driver is asked to give back what the claim holds.
    Deallocate { claim: usize },
    /// The allocation is cleared, and that is observed.
    Clear { claim: usize },
    /// The claim is deleted, and another of its name made.
    Delete { claim: usize },
    /// The process is killed and starts anew from the claims.
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
        let mut pair = Pair::new();
        for step in &steps {
            pair.run(step);
            pair.check();
        }
        for claim in 0..CLAIMS {
            pair.run(&Step::Delete { claim });
        }
        pair.check();
        prop_assert_eq!(pair.allocator.holdings().uids().count(), 0);
        for uid in (0..NODES).flat_map(|node| [format!("node-{node}-0"), format!("node-{node}-1")]) {
            prop_assert!(pair.allocator.holdings().on_node(&uid).is_none(), "nothing is left");
        }
    }
}
