//! Tests of [`super`].

use super::*;

mod index {
    use super::*;

    fn grant(node_uid: &str, devices: &[&str]) -> DeviceGrant {
        let device = |name: &&str| HandleDevice {
            request: "r".into(),
            device: (*name).into(),
        };
        DeviceGrant {
            node_name: "a".into(),
            node_uid: node_uid.into(),
            devices: devices.iter().map(device).collect(),
        }
    }

    fn holder(claim: &str, created: i64, state: AllocationState) -> HoldingClaim {
        HoldingClaim {
            claim: claim.into(),
            created: Some(Timestamp::from_second(created).unwrap()),
            copied: false,
            state,
        }
    }

    fn unreadable(node: &str) -> AllocationState {
        AllocationState::Unreadable {
            nodes: BTreeSet::from([node.into()]),
            error: "x".into(),
        }
    }

    /// The claim that keeps the device, and the one that must give it up.
    fn keeper_and_other(conflict: &Finding) -> (&str, &str) {
        let (before, after) = conflict.message.split_once(" keeps it. ").unwrap();
        let (_, keeper) = before.rsplit_once(' ').unwrap();
        let (other, _) = after.split_once(' ').unwrap();
        assert_eq!(format!("{}/{}", conflict.namespace, conflict.name), other);
        assert!(conflict.roll_back);
        (keeper, other)
    }

    fn freed(keys: &[DeviceKey]) -> Vec<&str> {
        keys.iter().map(|key| &*key.device).collect()
    }

    #[test]
    fn a_held_device_recorded_in_its_claim_is_held_once() {
        let mut holdings = AllocationIndex::default();
        assert_eq!(
            holdings.put("u", holder("n/c", 1, AllocationState::Held(grant("1", &["d"])))),
            IndexChange::default()
        );
        assert_eq!(
            holdings.put(
                "u",
                holder("n/c", 1, AllocationState::Recorded(grant("1", &["d"])))
            ),
            IndexChange::default()
        );
        assert_eq!(freed(&holdings.remove("u").freed), ["d"]);
        assert!(holdings.remove("u") == IndexChange::default() && holdings.on_node("1").is_none());
    }

    #[test]
    fn a_claim_with_other_devices_frees_its_old_ones() {
        let mut holdings = AllocationIndex::default();
        holdings.put(
            "u",
            holder("n/c", 1, AllocationState::Recorded(grant("1", &["d", "e"]))),
        );
        let change = holdings.put(
            "u",
            holder("n/c", 1, AllocationState::Recorded(grant("1", &["e", "f"]))),
        );
        assert_eq!(freed(&change.freed), ["d"]);
    }

    #[test]
    fn the_older_claim_keeps_a_device_and_releases_are_reported() {
        let mut holdings = AllocationIndex::default();
        holdings.put(
            "u",
            holder("n/younger", 2, AllocationState::Recorded(grant("1", &["d"]))),
        );
        let change = holdings.put(
            "v",
            holder("n/older", 1, AllocationState::Recorded(grant("1", &["d"]))),
        );
        let [key] = change.shared.as_slice() else {
            panic!("{change:?}")
        };
        let conflicts = holdings.conflicts(key, 1);
        let [conflict] = conflicts.as_slice() else {
            panic!("{conflicts:?}")
        };
        assert_eq!(keeper_and_other(conflict), ("n/older", "n/younger"));
        assert_eq!(conflict.uid, "u");
        assert_eq!(holdings.conflicts(key, 2), [], "two may share it");
        let again = holdings.put(
            "v",
            holder("n/older", 1, AllocationState::Recorded(grant("1", &["d"]))),
        );
        assert_eq!(again, IndexChange::default(), "reported once");
        assert_eq!(freed(&holdings.remove("u").freed), ["d"]);
        assert_eq!(freed(&holdings.remove("v").freed), ["d"]);
    }

    #[test]
    fn recorded_allocations_win_over_held_and_then_the_lower_uid() {
        let mut holdings = AllocationIndex::default();
        holdings.put(
            "u",
            holder("n/held", 1, AllocationState::Held(grant("1", &["d"]))),
        );
        let change = holdings.put(
            "v",
            holder("n/recorded", 2, AllocationState::Recorded(grant("1", &["d"]))),
        );
        let pair = |keeper: &str, other: &str| (keeper.to_owned(), other.to_owned());
        let others = |holdings: &AllocationIndex| {
            let conflicts = holdings.conflicts(&change.shared[0], 1);
            let names = conflicts.iter().map(keeper_and_other);
            names
                .map(|(keeper, other)| pair(keeper, other))
                .collect::<Vec<_>>()
        };
        assert_eq!(others(&holdings), [pair("n/recorded", "n/held")]);
        holdings.put(
            "a",
            holder("n/same-age", 2, AllocationState::Recorded(grant("1", &["d"]))),
        );
        assert_eq!(
            others(&holdings),
            [pair("n/same-age", "n/recorded"), pair("n/same-age", "n/held")]
        );
    }

    #[test]
    fn a_copy_of_an_allocation_comes_last_however_old_its_claim_is() {
        for state in [AllocationState::Recorded, AllocationState::Held] {
            let mut holdings = AllocationIndex::default();
            let mut copy = holder("n/copy", 1, AllocationState::Recorded(grant("1", &["d"])));
            copy.copied = true;
            holdings.put("a", copy);
            let change = holdings.put("b", holder("n/original", 2, state(grant("1", &["d"]))));
            let conflicts = holdings.conflicts(&change.shared[0], 1);
            let [conflict] = conflicts.as_slice() else {
                panic!("{conflicts:?}")
            };
            assert_eq!(keeper_and_other(conflict), ("n/original", "n/copy"));
        }
    }

    #[test]
    fn a_node_of_another_uid_has_devices_of_its_own() {
        let mut holdings = AllocationIndex::default();
        holdings.put(
            "u",
            holder("n/c", 1, AllocationState::Recorded(grant("old", &["d"]))),
        );
        assert!(holdings.on_node("new").is_none());
        assert!(
            holdings
                .put("v", holder("n/e", 1, AllocationState::Held(grant("new", &["d"]))))
                .shared
                .is_empty()
        );
    }

    #[test]
    fn an_unreadable_allocation_blocks_its_node_until_it_is_gone() {
        let mut holdings = AllocationIndex::default();
        holdings.put("u", holder("n/c", 1, unreadable("a")));
        holdings.put("v", holder("n/d", 1, unreadable("a")));
        let other_error = AllocationState::Unreadable {
            nodes: BTreeSet::from(["a".into()]),
            error: "y".into(),
        };
        assert_eq!(
            holdings.put("v", holder("n/d", 1, other_error)),
            IndexChange::default()
        );
        assert!(holdings.unreadable_on("a") && !holdings.unreadable_on("b"));
        let change = holdings.put(
            "u",
            holder("n/c", 1, AllocationState::Recorded(grant("1", &["d"]))),
        );
        assert!(holdings.unreadable_on("a") && change.unblocked.is_empty());
        assert_eq!(holdings.remove("v").unblocked, ["a".into()]);
        assert!(!holdings.unreadable_on("a"));
    }

    #[test]
    fn a_node_may_be_known_by_the_value_of_its_label_alone() {
        let mut holdings = AllocationIndex::default();
        let long = "node-".repeat(40);
        holdings.put("u", holder("n/c", 1, unreadable(&label_of_node(&long))));
        assert!(holdings.unreadable_on(&long) && !holdings.unreadable_on(&"node-".repeat(39)));
    }

    #[test]
    fn a_handle_that_names_a_device_twice_holds_it_once() {
        let mut holdings = AllocationIndex::default();
        assert!(
            holdings
                .put(
                    "u",
                    holder("n/c", 1, AllocationState::Recorded(grant("1", &["d", "d"])))
                )
                .shared
                .is_empty()
        );
        assert_eq!(freed(&holdings.remove("u").freed), ["d"]);
    }
}

mod allocation_result {
    use super::*;
    use k8s_openapi::api::core::v1::NodeSelectorTerm;

    use crate::api::crd::CLAIM_DEVICES_MAX;
    use crate::api::handle::HandleDevice;

    fn grant(devices: usize) -> DeviceGrant {
        let device = |index| HandleDevice {
            request: "r".repeat(63),
            device: format!("{index:0>63}"),
        };
        DeviceGrant {
            node_name: "n".repeat(253).into(),
            node_uid: "u".repeat(64).into(),
            devices: (0..devices).map(device).collect(),
        }
    }

    #[test]
    fn a_granted_allocation_reads_back_unchanged() {
        let allocation = write("d.example", "uid", &grant(2)).unwrap();
        let state = AllocationState::Recorded(grant(2));
        assert_eq!(
            read("d.example", "uid", &allocation),
            Record {
                state: state.clone(),
                made_for: None
            }
        );
        let copied = read("d.example", "another", &allocation);
        assert_eq!(
            copied,
            Record {
                state,
                made_for: Some("uid".into())
            }
        );
        assert!(
            allocation.shareable,
            "every pod that names the claim has its devices"
        );
        let selector = allocation.available_on_nodes.unwrap();
        assert_eq!(suits(&selector, &grant(0).node_name), Some(true));
        assert_eq!(suits(&selector, "another"), Some(false));
    }

    #[test]
    fn the_largest_claim_with_the_longest_names_fits_into_a_handle() {
        assert!(write("d.example", &"u".repeat(36), &grant(CLAIM_DEVICES_MAX)).is_ok());
    }

    #[test]
    fn an_unreadable_allocation_has_a_reason_and_a_node() {
        let good = write("d.example", "uid", &grant(1)).unwrap();
        let state = |change: &dyn Fn(&mut AllocationResult)| {
            let mut allocation = good.clone();
            change(&mut allocation);
            match read("d.example", "uid", &allocation).state {
                AllocationState::Unreadable { nodes, error } => (nodes.len(), error.to_string()),
                state => panic!("{state:?}"),
            }
        };
        let set = |data: Option<&str>| {
            let data = data.map(str::to_owned);
            move |allocation: &mut AllocationResult| allocation.resource_handles[0].data.clone_from(&data)
        };
        assert!(state(&set(Some("{}"))).1.contains("cannot be read"));
        assert!(state(&set(Some(r#"{"version":9}"#))).1.contains("version 9"));
        assert_eq!(state(&set(None)), (1, "the resource handle has no data".into()));
        let (nodes, error) = state(&|allocation| {
            let other = Some("other.example".to_owned());
            allocation.resource_handles[0].driver_name = other;
            allocation.available_on_nodes = None;
        });
        assert_eq!((nodes, error.contains("0 resource handles")), (0, true));
        let (_, error) =
            state(&|allocation| allocation.resource_handles.extend(good.resource_handles.clone()));
        assert!(error.contains("2 resource handles"));
    }

    #[test]
    fn suitable_nodes_are_checked_by_name_and_uncertain_by_label() {
        let term = |fields: Option<Vec<NodeSelectorRequirement>>, labels: bool| NodeSelectorTerm {
            match_fields: fields,
            match_expressions: labels.then(|| {
                vec![NodeSelectorRequirement {
                    key: "gpu".into(),
                    operator: "Exists".into(),
                    values: None,
                }]
            }),
        };
        let only_a = AllocationResult::default()
            .on_nodes(["a"])
            .available_on_nodes
            .unwrap();
        let named = only_a.node_selector_terms[0].match_fields.clone();
        let not_named = named.clone().map(|mut fields| {
            fields[0].operator = "NotIn".into();
            fields
        });
        let evaluate = |terms: &[NodeSelectorTerm], node| {
            suits(
                &NodeSelector {
                    node_selector_terms: terms.to_vec(),
                },
                node,
            )
        };
        assert_eq!(evaluate(&[term(named.clone(), false)], "a"), Some(true));
        assert_eq!(evaluate(&[term(not_named, false)], "a"), Some(false));
        assert_eq!(evaluate(&[term(None, false)], "a"), Some(false));
        assert_eq!(evaluate(&[term(None, true)], "a"), None);
        assert_eq!(
            evaluate(&[term(named.clone(), true)], "b"),
            Some(false),
            "the name alone rules it out"
        );
        assert_eq!(evaluate(&[term(None, true), term(named, false)], "a"), Some(true));
    }
}
