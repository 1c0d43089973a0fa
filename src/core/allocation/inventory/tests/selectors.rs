//! Tests of selector results and active selectors.

use super::super::*;

mod attribute_set {
    use super::*;

    fn attributes(value: i64) -> AttributeSet {
        [("d/x".into(), Attribute::Int(value))].into_iter().collect()
    }

    #[test]
    fn a_selector_result_is_kept_per_attribute_set() {
        let mut matches = SelectorResults::default();
        let (first, second): (Arc<str>, Arc<str>) = ("first".into(), "second".into());
        matches.put(&first, [(attributes(1), Match::Yes), (attributes(2), Match::No)]);
        matches.put(&second, [(attributes(1), Match::No)]);
        assert_eq!(matches.get("first", &attributes(1)), Some(Match::Yes));
        assert_eq!(matches.get("first", &attributes(3)), None);
        matches.forget("second");
        matches.retain(&BTreeSet::from([&attributes(1)]));
        assert_eq!(matches.get("first", &attributes(2)), None);
        assert_eq!(matches.len(), 1);
        assert_eq!(matches.get("first", &attributes(1)), Some(Match::Yes));
    }

    #[test]
    fn errors_that_differ_per_device_share_a_text() {
        let mut matches = SelectorResults::default();
        let expression: Arc<str> = "x".into();
        let failed = |number: i64| (attributes(number), Match::Failed(format!("no {number}").into()));
        matches.put(&expression, (0..100).map(failed));
        let mut texts = BTreeSet::new();
        for number in 0..100 {
            match matches.get("x", &attributes(number)) {
                Some(Match::Failed(error)) => texts.insert(error),
                other => panic!("{other:?}"),
            };
        }
        assert_eq!(texts.len(), ERRORS_MAX + 1);
        assert_eq!(
            matches.get("x", &attributes(0)),
            Some(Match::Failed("no 0".into()))
        );
        // A reused number does not keep the results of its previous attribute set.
        matches.retain(&BTreeSet::new());
        matches.put(&expression, [(attributes(7), Match::Yes)]);
        assert_eq!(matches.get("x", &attributes(7)), Some(Match::Yes));
        assert_eq!(matches.len(), 1);
    }

    #[test]
    fn a_fact_is_found_by_its_name() {
        assert_eq!(attributes(7).value("d/x"), Some(&Attribute::Int(7)));
        assert_eq!(attributes(7).value("d/y"), None);
        assert_ne!(attributes(7), attributes(8));
    }
}

mod active_selectors {
    use super::*;
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use crate::api::crd::AttributeValue;
    use crate::core::allocation::allocator::DeviceAllocator;
    use crate::core::allocation::inventory::AttributeSet;
    use crate::core::allocation::tests::fixture::{DRIVER, inventory};

    const KINDS: [&str; 2] = ["even", "odd"];
    const EXPRESSIONS: [&str; 2] = ["first", "second"];

    /// A node with one device per value, of kind `even` or `odd`.
    fn node(name: &str, values: &[i64]) -> NodeInfo {
        let names: Vec<String> = (0..values.len()).map(|number| format!("d{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut inventory = inventory(name, name, &names);
        for (device, value) in inventory.spec.devices.iter_mut().zip(values) {
            device.kind = if value % 2 == 0 { "even" } else { "odd" }.to_owned();
            device
                .attributes
                .insert("d/x".into(), AttributeValue::int(*value));
        }
        NodeInfo::read(&inventory)
    }

    /// [`ActiveSelectors`] must agree with a scan of all devices.
    fn check(allocator: &DeviceAllocator) -> Result<(), TestCaseError> {
        for (kind, expression) in KINDS
            .iter()
            .flat_map(|kind| EXPRESSIONS.map(|other| (kind, other)))
        {
            if !allocator.active_selectors().contains(kind, expression) {
                continue;
            }
            let pending: BTreeSet<&AttributeSet> = allocator.pending(kind, expression).collect();
            for device in allocator.inventory.nodes().flat_map(NodeInfo::devices) {
                let known = allocator.matches().get(expression, &device.attributes).is_some();
                let left = pending.contains(&device.attributes);
                prop_assert!(
                    *device.kind != **kind || known != left,
                    "{device:?}: {known} {left}"
                );
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn every_pending_selector_is_evaluated(
            steps in prop::collection::vec((0..5, 0_usize..4, prop::collection::vec(0_i64..6, 0..4)), 1..32)
        ) {
            let mut allocator = DeviceAllocator::new(DRIVER);
            for (what, number, values) in steps {
                let name = format!("n{number}");
                let (kind, expression) = (KINDS[number % 2], EXPRESSIONS[number / 2]);
                match what {
                    0 => drop(allocator.set_inventory(&name, Some(node(&name, &values)))),
                    1 => drop(allocator.set_inventory(&name, None)),
                    2 => allocator.activate(kind, &expression.into()),
                    3 => {
                        let some = allocator.pending(kind, expression).take(values.len()).cloned();
                        let results = some.map(|attributes| (attributes, Match::Yes)).collect();
                        allocator.evaluated(&expression.into(), results);
                    }
                    _ if values.is_empty() => allocator.forget_devices(),
                    _ => allocator.forget_selector(expression),
                }
                check(&allocator)?;
            }
        }
    }

    #[test]
    fn an_evaluated_selector_is_due_only_after_a_node_changes() {
        let mut allocator = DeviceAllocator::new(DRIVER);
        let first: Arc<str> = "first".into();
        allocator.set_inventory("a", Some(node("a", &[0, 2, 1])));
        allocator.activate("even", &first);
        let due = |allocator: &DeviceAllocator| {
            allocator
                .active_selectors()
                .due()
                .map(|(kind, _)| kind.to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(due(&allocator), ["even"]);
        let results: Vec<_> = allocator.pending("even", "first").cloned().collect();
        assert_eq!(results.len(), 2);
        allocator.evaluated(
            &first,
            results
                .into_iter()
                .map(|attributes| (attributes, Match::No))
                .collect(),
        );
        assert!(due(&allocator).is_empty());
        // A device with a known attribute set, and one of another kind.
        allocator.set_inventory("b", Some(node("b", &[2, 3])));
        assert!(due(&allocator).is_empty());
        allocator.set_inventory("b", Some(node("b", &[4])));
        assert_eq!(due(&allocator), ["even"]);
        // A device that is removed before its evaluation is not kept forever.
        allocator.set_inventory("b", None);
        allocator.forget_devices();
        assert!(due(&allocator).is_empty());
        assert_eq!(
            allocator.active_selectors().kinds("first").collect::<Vec<_>>(),
            ["even"]
        );
        allocator.forget_selector("first");
        assert_eq!(allocator.active_selectors().kinds("first").next(), None);
    }
}
