//! Devices released and problems found by observations.

use super::*;
use crate::api::resource::ResourceHandle;
use crate::core::allocation::allocate::Target;
use crate::core::allocation::evaluate::RequestedClaim;
use crate::core::allocation::fixture::{DRIVER, claim, demand, inventory, node};

fn books(devices: &[&str]) -> DeviceAllocator {
    let mut books = DeviceAllocator::new(DRIVER);
    books.set_inventory("a", Some(node("a", "1", devices)));
    books
}

fn allocate(books: &mut DeviceAllocator, uid: &str) -> Option<AllocationResult> {
    let wish = RequestedClaim {
        claim: &claim(uid, None),
        demand: &demand("test", &[1]),
        suitable_nodes: None,
    };
    books.allocate(&[wish], Target::Node("a")).answers.pop()?.ok()
}

fn observe(books: &mut DeviceAllocator, uid: &str, allocation: Option<&AllocationResult>) -> Observed {
    books.observe(&claim(uid, allocation), allocation)
}

#[test]
fn what_was_never_recorded_is_free_when_it_is_given_back() {
    let mut books = books(&["d"]);
    allocate(&mut books, "u").unwrap();
    assert_eq!(
        observe(&mut books, "u", None),
        Observed::default(),
        "not written yet: still held"
    );
    assert!(allocate(&mut books, "v").is_none());
    assert_eq!(books.deallocate(&claim("u", None)), 1);
    assert_eq!(books.deallocate(&claim("u", None)), 0);
    assert!(allocate(&mut books, "v").is_some());
}

#[test]
fn what_is_recorded_stays_held_until_it_is_seen_to_be_gone() {
    let mut books = books(&["d"]);
    let allocation = allocate(&mut books, "u").unwrap();
    assert_eq!(
        books.deallocate(&claim("u", Some(&allocation))),
        0,
        "recorded, although that was not observed yet"
    );
    observe(&mut books, "u", Some(&allocation));
    assert_eq!(books.deallocate(&claim("u", None)), 0);
    assert!(allocate(&mut books, "v").is_none());
    assert_eq!(observe(&mut books, "u", None).freed, 1);
    assert!(allocate(&mut books, "v").is_some());
}

#[test]
fn a_deleted_claim_holds_nothing() {
    let mut books = books(&["d", "e"]);
    let allocation = allocate(&mut books, "u").unwrap();
    observe(&mut books, "u", Some(&allocation));
    allocate(&mut books, "v").unwrap();
    assert_eq!((books.gone("u"), books.gone("v"), books.gone("w")), (1, 1, 0));
}

#[test]
fn an_allocator_rebuilt_from_claims_is_identical() {
    let mut before = books(&["d", "e"]);
    let allocation = allocate(&mut before, "u").unwrap();
    observe(&mut before, "u", Some(&allocation));
    allocate(&mut before, "lost").unwrap();
    let mut after = books(&["d", "e"]);
    let claims = [claim("u", Some(&allocation)), claim("lost", None)];
    after.observe_all(
        claims
            .iter()
            .map(|claim| (claim, claim.status.allocation.as_ref())),
    );
    assert_eq!(after.holdings().uids().collect::<Vec<_>>(), ["u"]);
    before.observe_all(
        claims
            .iter()
            .map(|claim| (claim, claim.status.allocation.as_ref())),
    );
    assert_eq!(before.observe_all([]).freed, 2);
}

#[test]
fn allocations_on_a_recreated_node_block_nothing() {
    let mut books = books(&["d"]);
    let allocation = allocate(&mut books, "u").unwrap();
    observe(&mut books, "u", Some(&allocation));
    assert_eq!(books.set_inventory("a", None), 0);
    assert_eq!(books.set_inventory("a", Some(node("a", "2", &["d"]))), 1);
    assert!(allocate(&mut books, "v").is_some());
    assert_eq!(books.deallocate(&claim("u", Some(&allocation))), 0);
    assert_eq!(observe(&mut books, "u", None), Observed::default());
}

#[test]
fn an_unreadable_allocation_is_reported_and_blocks_its_node() {
    let mut books = books(&["d", "e"]);
    let mut allocation = allocate(&mut books, "u").unwrap();
    let newer = Some(r#"{"version":2}"#.to_owned());
    allocation.resource_handles = vec![ResourceHandle {
        data: newer,
        ..ResourceHandle::default()
    }];
    let observed = observe(&mut books, "u", Some(&allocation));
    let [problem] = observed.problems.as_slice() else {
        panic!("{observed:?}")
    };
    assert_eq!(problem.reason(), "HoldingUnreadable");
    assert!(
        problem
            .to_string()
            .starts_with("ResourceClaim ns/u holds something that cannot be read: "),
        "{problem}"
    );
    assert_eq!(observe(&mut books, "u", Some(&allocation)), Observed::default());
    assert!(allocate(&mut books, "v").is_none());
    assert_eq!(books.deallocate(&claim("u", Some(&allocation))), 0);
    assert_eq!(observe(&mut books, "u", None).freed, 2);
    assert!(allocate(&mut books, "v").is_some());
}

#[test]
fn a_copied_allocation_is_reported_and_both_hold_the_device() {
    let mut books = books(&["d"]);
    let allocation = allocate(&mut books, "u").unwrap();
    observe(&mut books, "u", Some(&allocation));
    let observed = observe(&mut books, "v", Some(&allocation));
    let reasons: Vec<&str> = observed.problems.iter().map(Problem::reason).collect();
    assert_eq!(reasons, ["AllocationMadeForAnother", "DeviceHeldTwice"]);
    assert_eq!(observe(&mut books, "v", None).freed, 0);
    assert_eq!(observe(&mut books, "u", None).freed, 1);
}

#[test]
fn a_copied_allocation_never_takes_the_original_device() {
    for original_first in [true, false] {
        // Both claims have the same age, so the lower uid decides.
        let mut before = books(&["d"]);
        let allocation = allocate(&mut before, "z").unwrap();
        let mut books = books(&["d"]);
        let order = if original_first { ["z", "a"] } else { ["a", "z"] };
        let observed: Vec<Problem> = order
            .iter()
            .flat_map(|uid| observe(&mut books, uid, Some(&allocation)).problems)
            .collect();
        let conflict = observed.iter().find_map(|problem| match problem {
            Problem::Conflict(conflict) => Some((&*conflict.keeper, &*conflict.other)),
            _ => None,
        });
        assert_eq!(conflict, Some(("ns/z", "ns/a")), "{original_first}");
    }
}

#[test]
fn an_unreadable_allocation_blocks_the_node_of_its_label() {
    let nowhere = AllocationResult::new(DRIVER, "{");
    for (label, blocked) in [
        (Some("a"), true),
        (Some("b"), false),
        (Some("Any"), false),
        (None, false),
    ] {
        let mut books = books(&["d", "e"]);
        let mut claim = claim("u", Some(&nowhere));
        let label = label.map(|node| (format!("{DRIVER}/node"), node.to_owned()));
        claim.metadata.labels = Some(label.into_iter().collect());
        books.observe(&claim, Some(&nowhere));
        assert_eq!(
            allocate(&mut books, "v").is_none(),
            blocked,
            "{:?}",
            claim.metadata.labels
        );
        if blocked {
            assert_eq!(observe(&mut books, "u", None).freed, 2);
        }
    }
}

#[test]
fn relisted_inventories_replace_all_and_count_new_capacity() {
    let mut books = books(&["d"]);
    let list = |nodes: &[(&str, &[&str])]| {
        nodes
            .iter()
            .map(|&(name, devices)| (name.to_owned(), node(name, "1", devices)))
            .collect()
    };
    assert_eq!(
        books.replace_inventories(list(&[("a", &["d", "e"]), ("b", &["d"])])),
        2
    );
    assert_eq!(
        books.replace_inventories(list(&[("a", &["d", "e"]), ("b", &["d"])])),
        0
    );
    assert_eq!(books.replace_inventories(list(&[])), 0);
    assert!(books.inventory().node("a").is_none());
}

#[test]
fn claims_sharing_a_device_before_its_inventory_do_not_conflict() {
    let mut known = books(&["d"]);
    let allocation = allocate(&mut known, "u").unwrap();
    for (shares, listed, reasons) in [
        (2, true, vec![]),
        (2, false, vec![]),
        (1, true, vec!["DeviceHeldTwice"]),
        (1, false, vec!["DeviceHeldTwice"]),
    ] {
        let mut books = DeviceAllocator::new(DRIVER);
        observe(&mut books, "u", Some(&allocation));
        let observed = observe(&mut books, "v", Some(&allocation));
        let told = |problems: &[Problem]| problems.iter().map(Problem::reason).collect::<Vec<_>>();
        assert_eq!(told(&observed.problems), ["AllocationMadeForAnother"]);
        let mut inventory = inventory("a", "1", &["d"]);
        inventory.spec.devices[0].shares = Some(shares);
        let node = Node::read(&inventory);
        if listed {
            books.replace_inventories(BTreeMap::from([("a".to_owned(), node)]));
        } else {
            books.set_inventory("a", Some(node));
        }
        assert_eq!(told(&books.settle_doubts()), reasons, "{shares} {listed}");
        assert_eq!(books.settle_doubts(), [], "said once");
    }
    // A device in no inventory has one share, once all inventories are listed.
    let mut books = DeviceAllocator::new(DRIVER);
    observe(&mut books, "u", Some(&allocation));
    observe(&mut books, "v", Some(&allocation));
    assert_eq!(books.settle_doubts(), []);
    books.replace_inventories(BTreeMap::new());
    assert_eq!(books.settle_doubts().len(), 1);
}
