//! Tests of [`super`].

use super::*;

mod allocator {
    use super::*;
    use crate::api::crd::{DeviceClassParametersSpec, DeviceSelector};
    use crate::api::resource::ResourceHandle;
    use crate::core::allocation::evaluate::RequestedClaim;
    use crate::core::allocation::parameters::{ClaimParameters, ClassParameters};
    use crate::core::allocation::tests::fixture::{self, DRIVER, claim, device_requests, inventory, node};

    fn allocator(devices: &[&str]) -> DeviceAllocator {
        let mut allocator = DeviceAllocator::new(DRIVER);
        allocator.set_inventory("a", Some(node("a", "1", devices)));
        allocator
    }

    fn allocate(allocator: &mut DeviceAllocator, uid: &str) -> Option<AllocationResult> {
        let request = RequestedClaim {
            claim: &claim(uid, None),
            device_requests: &device_requests("test", &[1]),
            suitable_nodes: None,
        };
        fixture::allocate(allocator, &[request], Some("a")).pop()?.ok()
    }

    fn observe(
        allocator: &mut DeviceAllocator,
        uid: &str,
        allocation: Option<&AllocationResult>,
    ) -> Observed {
        allocator.observe(&claim(uid, allocation), allocation)
    }

    #[test]
    fn unrecorded_devices_are_free_once_deallocated() {
        let mut allocator = allocator(&["d"]);
        allocate(&mut allocator, "u").unwrap();
        assert_eq!(
            observe(&mut allocator, "u", None),
            Observed::default(),
            "not written yet: still held"
        );
        assert!(allocate(&mut allocator, "v").is_none());
        assert_eq!(allocator.deallocate(&claim("u", None)), 1);
        assert_eq!(allocator.deallocate(&claim("u", None)), 0);
        assert!(allocate(&mut allocator, "v").is_some());
    }

    #[test]
    fn recorded_devices_stay_held_until_the_record_is_gone() {
        let mut allocator = allocator(&["d"]);
        let allocation = allocate(&mut allocator, "u").unwrap();
        assert_eq!(
            allocator.deallocate(&claim("u", Some(&allocation))),
            0,
            "recorded, although that was not observed yet"
        );
        observe(&mut allocator, "u", Some(&allocation));
        assert_eq!(allocator.deallocate(&claim("u", None)), 0);
        assert!(allocate(&mut allocator, "v").is_none());
        assert_eq!(observe(&mut allocator, "u", None).freed, 1);
        assert!(allocate(&mut allocator, "v").is_some());
    }

    #[test]
    fn the_error_is_that_of_the_claim_that_does_not_fit() {
        let mut allocator = allocator(&["d", "e", "f"]);
        let claims =
            [("u", 1), ("v", 3)].map(|(uid, count)| (claim(uid, None), device_requests("test", &[count])));
        let requested = fixture::requested(&claims);
        let allocated = allocator.allocate_within(&requested, Some("a"), &mut WorkBudget::new(NODE_WORK_MAX));
        let answer = allocated.unwrap().answer;
        assert!(
            matches!(answer, Err((1, AllocateError::Unsuitable { .. }))),
            "{answer:?}"
        );
    }

    #[test]
    fn claims_with_the_same_parameters_are_looked_up_once() {
        let spec = DeviceClassParametersSpec {
            kind: "test".into(),
            selectors: vec![DeviceSelector::cel("true"), DeviceSelector::cel("false")],
            ..DeviceClassParametersSpec::default()
        };
        let class = ClassParameters::check("class", Ok(spec)).unwrap();
        let device_requests = DeviceRequests::new(&class, ClaimParameters::default());
        let claims: Vec<_> = (0..128)
            .map(|number| (claim(&format!("u{number}"), None), device_requests.clone()))
            .collect();
        let requested = fixture::requested(&claims);
        let found: Vec<&str> = expressions(&requested).map(|expression| &**expression).collect();
        assert_eq!(found, ["true", "false"]);
    }

    #[test]
    fn a_deleted_claim_holds_nothing() {
        let mut allocator = allocator(&["d", "e"]);
        let allocation = allocate(&mut allocator, "u").unwrap();
        observe(&mut allocator, "u", Some(&allocation));
        allocate(&mut allocator, "v").unwrap();
        assert_eq!(
            (allocator.gone("u"), allocator.gone("v"), allocator.gone("w")),
            (1, 1, 0)
        );
    }

    #[test]
    fn an_allocator_rebuilt_from_claims_is_identical() {
        let mut before = allocator(&["d", "e"]);
        let allocation = allocate(&mut before, "u").unwrap();
        observe(&mut before, "u", Some(&allocation));
        allocate(&mut before, "lost").unwrap();
        let mut after = allocator(&["d", "e"]);
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
        let mut allocator = allocator(&["d"]);
        let allocation = allocate(&mut allocator, "u").unwrap();
        observe(&mut allocator, "u", Some(&allocation));
        assert_eq!(allocator.set_inventory("a", None), 0);
        assert_eq!(allocator.set_inventory("a", Some(node("a", "2", &["d"]))), 1);
        assert!(allocate(&mut allocator, "v").is_some());
        assert_eq!(allocator.deallocate(&claim("u", Some(&allocation))), 0);
        assert_eq!(observe(&mut allocator, "u", None), Observed::default());
    }

    #[test]
    fn an_unreadable_allocation_is_reported_and_blocks_its_node() {
        let mut allocator = allocator(&["d", "e"]);
        let mut allocation = allocate(&mut allocator, "u").unwrap();
        let newer = Some(r#"{"version":2}"#.to_owned());
        allocation.resource_handles = vec![ResourceHandle {
            data: newer,
            ..ResourceHandle::default()
        }];
        let observed = observe(&mut allocator, "u", Some(&allocation));
        let [finding] = observed.findings.as_slice() else {
            panic!("{observed:?}")
        };
        assert_eq!(finding.reason, "HoldingUnreadable");
        assert!(
            finding
                .message
                .starts_with("ResourceClaim ns/u has an allocation that cannot be read: "),
            "{finding:?}"
        );
        assert_eq!(
            observe(&mut allocator, "u", Some(&allocation)),
            Observed::default()
        );
        assert!(allocate(&mut allocator, "v").is_none());
        assert_eq!(allocator.deallocate(&claim("u", Some(&allocation))), 0);
        assert_eq!(observe(&mut allocator, "u", None).freed, 2);
        assert!(allocate(&mut allocator, "v").is_some());
    }

    #[test]
    fn a_copied_allocation_is_reported_and_both_hold_the_device() {
        let mut allocator = allocator(&["d"]);
        let allocation = allocate(&mut allocator, "u").unwrap();
        observe(&mut allocator, "u", Some(&allocation));
        let observed = observe(&mut allocator, "v", Some(&allocation));
        let reasons: Vec<&str> = observed.findings.iter().map(|finding| finding.reason).collect();
        assert_eq!(reasons, ["AllocationMadeForAnother", "DeviceHeldTwice"]);
        assert_eq!(observe(&mut allocator, "v", None).freed, 0);
        assert_eq!(observe(&mut allocator, "u", None).freed, 1);
    }

    #[test]
    fn a_copied_allocation_never_takes_the_original_device() {
        for original_first in [true, false] {
            // Both claims have the same age, so the lower uid decides.
            let mut before = allocator(&["d"]);
            let allocation = allocate(&mut before, "z").unwrap();
            let mut allocator = allocator(&["d"]);
            let order = if original_first { ["z", "a"] } else { ["a", "z"] };
            let mut observed = order
                .iter()
                .flat_map(|uid| observe(&mut allocator, uid, Some(&allocation)).findings);
            let conflict = observed
                .find(|finding| finding.reason == "DeviceHeldTwice")
                .unwrap();
            assert_eq!(
                (&*conflict.name, conflict.roll_back),
                ("a", true),
                "{original_first}"
            );
            assert!(conflict.message.contains("; ns/z keeps it."), "{conflict:?}");
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
            let mut allocator = allocator(&["d", "e"]);
            let mut claim = claim("u", Some(&nowhere));
            let label = label.map(|node| (format!("{DRIVER}/node"), node.to_owned()));
            claim.metadata.labels = Some(label.into_iter().collect());
            allocator.observe(&claim, Some(&nowhere));
            assert_eq!(
                allocate(&mut allocator, "v").is_none(),
                blocked,
                "{:?}",
                claim.metadata.labels
            );
            if blocked {
                assert_eq!(observe(&mut allocator, "u", None).freed, 2);
            }
        }
    }

    #[test]
    fn relisted_inventories_replace_all_and_count_new_capacity() {
        let mut allocator = allocator(&["d"]);
        let list = |nodes: &[(&str, &[&str])]| {
            nodes
                .iter()
                .map(|&(name, devices)| (name.to_owned(), node(name, "1", devices)))
                .collect()
        };
        assert_eq!(
            allocator.replace_inventories(list(&[("a", &["d", "e"]), ("b", &["d"])])),
            2
        );
        assert_eq!(
            allocator.replace_inventories(list(&[("a", &["d", "e"]), ("b", &["d"])])),
            0
        );
        assert_eq!(allocator.replace_inventories(list(&[])), 0);
        assert!(allocator.inventory.node("a").is_none());
    }

    #[test]
    fn claims_sharing_a_device_before_its_inventory_do_not_conflict() {
        let mut known = allocator(&["d"]);
        let allocation = allocate(&mut known, "u").unwrap();
        for (shares, listed, reasons) in [
            (2, true, vec![]),
            (2, false, vec![]),
            (1, true, vec!["DeviceHeldTwice"]),
            (1, false, vec!["DeviceHeldTwice"]),
        ] {
            let mut allocator = DeviceAllocator::new(DRIVER);
            observe(&mut allocator, "u", Some(&allocation));
            let observed = observe(&mut allocator, "v", Some(&allocation));
            let told =
                |findings: &[Finding]| findings.iter().map(|finding| finding.reason).collect::<Vec<_>>();
            assert_eq!(told(&observed.findings), ["AllocationMadeForAnother"]);
            let mut inventory = inventory("a", "1", &["d"]);
            inventory.spec.devices[0].shares = Some(shares);
            let node = NodeInfo::read(&inventory);
            if listed {
                allocator.replace_inventories(BTreeMap::from([("a".to_owned(), node)]));
            } else {
                allocator.set_inventory("a", Some(node));
            }
            assert_eq!(told(&allocator.recheck_conflicts()), reasons, "{shares} {listed}");
            assert_eq!(allocator.recheck_conflicts(), [], "reported once");
        }
    }

    #[test]
    fn a_device_with_two_holders_is_checked_once_it_is_listed() {
        let allocation = allocate(&mut allocator(&["d"]), "u").unwrap();
        let mut allocator = DeviceAllocator::new(DRIVER);
        observe(&mut allocator, "u", Some(&allocation));
        observe(&mut allocator, "v", Some(&allocation));
        assert_eq!(allocator.recheck_conflicts(), []);
        // The device is gone, and may have had shares.
        allocator.replace_inventories(BTreeMap::from([("a".to_owned(), node("a", "1", &["e"]))]));
        assert_eq!(allocator.recheck_conflicts(), []);
        allocator.set_inventory("a", Some(node("a", "1", &["d", "e"])));
        assert_eq!(allocator.recheck_conflicts().len(), 1);
    }

    #[test]
    fn a_device_that_goes_or_changes_may_help_a_request_for_all() {
        let mut allocator = allocator(&["d", "e"]);
        let allocation = allocate(&mut allocator, "u").unwrap();
        observe(&mut allocator, "u", Some(&allocation));
        let set = |allocator: &mut DeviceAllocator, inventory: &crate::api::crd::NodeInventory| {
            allocator.set_inventory("a", Some(NodeInfo::read(inventory)))
        };
        assert_eq!(set(&mut allocator, &inventory("a", "1", &["e"])), 1, "d is held");
        let mut broken = inventory("a", "1", &["e", "f"]);
        broken.spec.devices[1].unhealthy = Some("broken".into());
        assert_eq!(set(&mut allocator, &broken), 0, "f is in the way");
        broken.spec.devices[1].kind = "other".into();
        assert_eq!(set(&mut allocator, &broken), 1);
        broken.spec.devices[0].unhealthy = Some("broken".into());
        assert_eq!(set(&mut allocator, &broken), 0);
        assert_eq!(set(&mut allocator, &inventory("a", "1", &["f"])), 2);
        assert_eq!(allocator.set_inventory("a", None), 0);
    }
}

mod allocate {
    use super::*;
    use crate::api::crd::Mode;
    use crate::core::allocation::inventory::NodeInfo;
    use crate::core::allocation::tests::fixture::{self, DRIVER, claim, device_requests, inventory, node};

    /// Node `a` has three devices of kind test, `b` has four, `c` has one and is not ready.
    fn allocator() -> DeviceAllocator {
        let mut allocator = DeviceAllocator::new(DRIVER);
        allocator.set_inventory("a", Some(node("a", "1", &["a1", "a2", "a3"])));
        allocator.set_inventory("b", Some(node("b", "2", &["b1", "b2", "b3", "b4"])));
        let mut stopped = inventory("c", "3", &["c1"]);
        stopped.status = None;
        allocator.set_inventory("c", Some(NodeInfo::read(&stopped)));
        allocator
    }

    fn allocate(
        allocator: &mut DeviceAllocator,
        requested: &[(&str, &[u32])],
        node: Option<&str>,
    ) -> Vec<Result<String, String>> {
        let owned: Vec<_> = requested
            .iter()
            .map(|(uid, counts)| (claim(uid, None), device_requests("test", counts)))
            .collect();
        let requested = fixture::requested(&owned);
        let answers = fixture::allocate(allocator, &requested, node);
        let short = |answer: Result<AllocationResult, AllocateError>| {
            let allocation = answer.map_err(|error| error.to_string())?;
            let record = index::read(DRIVER, "", &allocation);
            let grant = record.state.grant().cloned().unwrap();
            Ok(grant
                .devices
                .iter()
                .map(|device| device.device.as_str())
                .collect::<Vec<_>>()
                .join(" "))
        };
        answers.into_iter().map(short).collect()
    }

    fn reasons(allocator: &DeviceAllocator, requested: &[(&str, &[u32])], node: &str) -> Vec<Option<String>> {
        let owned: Vec<_> = requested
            .iter()
            .map(|(uid, counts)| (claim(uid, None), device_requests("test", counts)))
            .collect();
        let requested = fixture::requested(&owned);
        let mut unsuitable = vec![BTreeMap::new(); requested.len()];
        let mut work = WorkBudget::new(NODE_WORK_MAX);
        allocator.unsuitable(&requested, &[node.to_owned()], &mut unsuitable, &mut work);
        unsuitable
            .into_iter()
            .map(|mut reasons| reasons.remove(node))
            .collect()
    }

    #[test]
    fn a_claim_gets_the_same_devices_again_if_possible() {
        let mut allocator = allocator();
        assert_eq!(
            allocate(&mut allocator, &[("u", &[1])], Some("a")),
            [Ok("a1".into())]
        );
        assert_eq!(
            allocate(&mut allocator, &[("v", &[1]), ("u", &[1])], Some("a")),
            [Ok("a2".into()), Ok("a1".into())]
        );
        assert_eq!(allocate(&mut allocator, &[("u", &[1])], None), [Ok("a1".into())]);
        assert_eq!(
            allocate(&mut allocator, &[("u", &[1])], Some("b")),
            [Ok("b1".into())]
        );
        assert_eq!(
            allocator.holdings().on_node("1").unwrap().len(),
            1,
            "devices granted elsewhere are deallocated"
        );
        allocator.set_inventory("b", Some(node("b", "2", &["b2"])));
        assert_eq!(
            allocate(&mut allocator, &[("u", &[1])], Some("b")),
            [Ok("b2".into())],
            "b1 is gone"
        );
    }

    #[test]
    fn a_recorded_allocation_is_returned_unchanged() {
        let mut allocator = allocator();
        let (wish_claim, requested) = (claim("u", None), device_requests("test", &[1]));
        let request = RequestedClaim {
            claim: &wish_claim,
            device_requests: &requested,
            suitable_nodes: None,
        };
        let first = fixture::allocate(&mut allocator, &[request], Some("a"))
            .remove(0)
            .unwrap();
        allocator.observe(&claim("u", Some(&first)), Some(&first));
        assert_eq!(
            fixture::allocate(&mut allocator, &[request], Some("a")),
            [Ok(first.clone())]
        );
        assert_eq!(fixture::allocate(&mut allocator, &[request], None), [Ok(first)]);
        let error = allocate(&mut allocator, &[("u", &[1])], Some("b"));
        assert_eq!(
            error,
            [Err(
                "cannot allocate on node b: the claim is allocated on node a".into()
            )]
        );
        assert_eq!(
            reasons(&allocator, &[("u", &[1])], "b"),
            [Some("the claim is allocated on node a".into())]
        );
    }

    #[test]
    fn the_reason_counts_devices_of_other_claims() {
        let mut allocator = allocator();
        for uid in ["u", "v", "w"] {
            assert!(allocate(&mut allocator, &[(uid, &[1])], Some("a"))[0].is_ok());
        }
        assert_eq!(
            reasons(&allocator, &[("x", &[1])], "a"),
            [Some("3 of 3 held".into())]
        );
        assert_eq!(
            allocate(&mut allocator, &[("x", &[1])], Some("a")),
            [Err("resources exhausted on node a: 3 of 3 held".into())]
        );
        assert_eq!(
            reasons(&allocator, &[("u", &[1])], "a"),
            [None],
            "it holds one itself"
        );
        assert_eq!(
            reasons(&allocator, &[("u", &[2])], "a"),
            [Some("2 of 3 held, 1 free, 2 requested".into())]
        );
    }

    #[test]
    fn an_unsuitable_node_has_a_reason() {
        let mut allocator = allocator();
        let mut other = inventory("d", "4", &["d1"]);
        other.spec.devices[0].mode = Mode::ExtendedResource;
        allocator.set_inventory("d", Some(NodeInfo::read(&other)));
        allocator.set_inventory("e", Some(node("e", "5", &[])));
        let text = |node| reasons(&allocator, &[("u", &[1])], node).remove(0).unwrap();
        assert_eq!(text("z"), "no inventory: drayman node does not run here");
        assert_eq!(
            text("c"),
            "inventory not ready: its companion has not reported yet"
        );
        assert_eq!(
            text("d"),
            "the devices of kind test here are not for claims: see their mode in the node's configuration"
        );
        assert_eq!(text("e"), "no device of kind test on this node");
    }

    #[test]
    fn claims_of_a_pod_are_allocated_together_or_not_at_all() {
        let mut allocator = allocator();
        let requested: &[(&str, &[u32])] = &[("u", &[1, 1]), ("v", &[2])];
        let shortage = "3 of 3 free, 2 requested besides 2 for the pod's other claims";
        assert_eq!(reasons(&allocator, requested, "a"), [None, Some(shortage.into())]);
        let error = format!("resources exhausted on node a: {shortage}");
        assert_eq!(
            allocate(&mut allocator, requested, Some("a")),
            [Err(error.clone()), Err(error)]
        );
        assert_eq!(allocator.holdings().uids().count(), 0);
        assert_eq!(
            allocate(&mut allocator, requested, Some("b")),
            [Ok("b1 b2".into()), Ok("b3 b4".into())]
        );
    }

    #[test]
    fn a_failed_claim_holds_only_recorded_devices() {
        let mut allocator = allocator();
        allocate(&mut allocator, &[("u", &[3])], Some("a"));
        assert!(allocate(&mut allocator, &[("u", &[5])], Some("b"))[0].is_err());
        assert_eq!(reasons(&allocator, &[("v", &[3])], "a"), [None]);
    }
}

mod anywhere {
    use super::*;
    use crate::core::allocation::index::{self, DeviceGrant};
    use crate::core::allocation::tests::fixture::{self, DRIVER, claim, device_requests, node};

    /// Node `a` has three devices of kind test, `b` has four.
    fn allocator() -> DeviceAllocator {
        let mut allocator = DeviceAllocator::new(DRIVER);
        allocator.set_inventory("a", Some(node("a", "1", &["a1", "a2", "a3"])));
        allocator.set_inventory("b", Some(node("b", "2", &["b1", "b2", "b3", "b4"])));
        allocator
    }

    /// The device allocated to a claim for one device.
    fn device(allocator: &mut DeviceAllocator, uid: &str) -> Result<String, String> {
        let (claim, device_requests) = (&claim(uid, None), &device_requests("test", &[1]));
        let request = RequestedClaim {
            claim,
            device_requests,
            suitable_nodes: None,
        };
        let answer = fixture::allocate(allocator, &[request], None).remove(0);
        let allocation = answer.map_err(|error| error.to_string())?;
        let state = index::read(DRIVER, uid, &allocation).state;
        Ok(state.grant().unwrap().devices[0].device.clone())
    }

    #[test]
    fn without_a_node_the_one_with_most_free_devices_is_chosen() {
        let mut allocator = allocator();
        let devices: Vec<String> = (0..7)
            .map(|uid| device(&mut allocator, &format!("u{uid}")).unwrap())
            .collect();
        assert_eq!(devices, ["b1", "a1", "b2", "a2", "b3", "a3", "b4"]);
        assert_eq!(device(&mut allocator, "u3"), Ok("a2".into()), "the same again");
        let exhausted = "resources exhausted on every ready node with devices of kind test (2): 7 of 7 held";
        assert_eq!(device(&mut allocator, "x"), Err(exhausted.into()));
        let nowhere = "no ready node has a device of kind test";
        assert_eq!(
            device(&mut DeviceAllocator::new(DRIVER), "x"),
            Err(nowhere.into())
        );
    }

    #[test]
    fn an_unreadable_allocation_is_not_replaced() {
        let mut allocator = allocator();
        let unreadable = claim("u", Some(&crate::api::resource::AllocationResult::default()));
        allocator.observe(&unreadable, unreadable.status.allocation.as_ref());
        let error = device(&mut allocator, "u").unwrap_err();
        assert!(error.contains("this release cannot read"), "{error}");
        assert!(device(&mut allocator, "v").is_ok());
    }

    #[test]
    fn suitable_nodes_of_the_class_restrict_anywhere() {
        let mut allocator = allocator();
        let named = index::write(
            DRIVER,
            "u",
            &DeviceGrant {
                node_name: "a".into(),
                node_uid: "1".into(),
                devices: vec![],
            },
        );
        let by_name = named.unwrap().available_on_nodes.unwrap();
        let mut by_label = by_name.clone();
        by_label.node_selector_terms[0].match_expressions =
            by_label.node_selector_terms[0].match_fields.take();
        let mut anywhere = |selector| {
            let (claim, device_requests) = (&claim("u", None), &device_requests("test", &[1]));
            let request = RequestedClaim {
                claim,
                device_requests,
                suitable_nodes: Some(selector),
            };
            fixture::allocate(&mut allocator, &[request], None).remove(0)
        };
        let error = anywhere(&by_label).unwrap_err();
        assert!(
            error.is_final()
                && error
                    .to_string()
                    .contains("requires allocationMode WaitForFirstConsumer")
        );
        let allocation = anywhere(&by_name).unwrap();
        assert_eq!(allocation.available_on_nodes, Some(by_name));
    }
}
