//! Tests of [`super`].

use super::*;

mod view {
    use super::*;
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use serde_json::{Value, json};

    use crate::api::crd::{AttributeValue, DeviceClaimParametersSpec};
    use crate::core::allocation::allocator::DeviceAllocator;
    use crate::core::allocation::index;
    use crate::core::allocation::inventory::{Attribute, Match, NodeInfo};
    use crate::core::allocation::parameters::{ClaimParameters, ClassParameters, Constraint, DeviceRequests};
    use crate::core::allocation::search::{QUICK_WORK_MAX, WorkBudget};
    use crate::core::allocation::tests::fixture::{self, DRIVER, claim};

    /// Eight devices `d0` to `d7`; `d0` to `d2` are on NUMA node 0, the others on 1; even ones are of vendor `x`, others `y`.
    fn allocator(shares: Option<u32>) -> DeviceAllocator {
        let names: Vec<String> = (0..8).map(|number| format!("d{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut inventory = fixture::inventory("a", "1", &names);
        for (number, device) in inventory.spec.devices.iter_mut().enumerate() {
            let vendor = if number % 2 == 0 { "x" } else { "y" };
            device
                .attributes
                .insert("d/numa".into(), AttributeValue::int(i64::from(number > 2)));
            device
                .attributes
                .insert("d/vendor".into(), AttributeValue::string(vendor));
            device.shares = shares;
        }
        let mut allocator = DeviceAllocator::new(DRIVER);
        allocator.set_inventory("a", Some(NodeInfo::read(&inventory)));
        allocator
    }

    /// Evaluates an expression in place of the runtime: a device matches if its vendor equals the expression.
    fn evaluate(allocator: &mut DeviceAllocator, expression: &str) {
        let expression: Arc<str> = expression.into();
        allocator.activate("test", &expression);
        let results = allocator.pending("test", &expression).cloned().map(|attributes| {
            let vendor = attributes.value("d/vendor").cloned();
            let results = match vendor {
                _ if *expression == *"broken" => Match::Failed("No such key: z".into()),
                Some(Attribute::String(vendor)) if *vendor == *expression => Match::Yes,
                _ => Match::No,
            };
            (attributes, results)
        });
        let results: Vec<_> = results.collect();
        allocator.evaluated(&expression, results);
    }

    fn request(name: &str, count: u32, expression: &str) -> Value {
        json!({"name": name, "count": count, "selectors": [{"cel": {"expression": expression}}]})
    }

    fn device_requests(policy: &str, requests: &Value, constraints: &Value) -> DeviceRequests {
        let class = json!({"kind": "test", "policy": policy});
        let class = ClassParameters::check("class", Ok(serde_json::from_value(class).unwrap())).unwrap();
        let spec = json!({"requests": requests, "constraints": constraints});
        let spec: DeviceClaimParametersSpec = serde_json::from_value(spec).unwrap();
        let claim = ClaimParameters::check("ns", "p", Ok(spec)).unwrap();
        DeviceRequests::new(&class, claim)
    }

    /// The devices of each claim, or the error.
    fn allocate(
        allocator: &mut DeviceAllocator,
        requested: &[(&str, &DeviceRequests)],
    ) -> Vec<Result<String, String>> {
        let claims: Vec<_> = requested.iter().map(|(uid, _)| claim(uid, None)).collect();
        let requested: Vec<_> = claims
            .iter()
            .zip(requested)
            .map(|(claim, (_, device_requests))| RequestedClaim {
                claim,
                device_requests,
                suitable_nodes: None,
            })
            .collect();
        let answers = fixture::allocate(allocator, &requested, Some("a"));
        let short = |answer: Result<_, crate::core::allocation::allocator::AllocateError>| {
            let allocation = answer.map_err(|error| error.to_string())?;
            let record = index::read(DRIVER, "", &allocation);
            let devices = record
                .state
                .grant()
                .unwrap()
                .devices
                .iter()
                .map(|device| device.device.clone());
            Ok(devices.collect::<Vec<_>>().join(" "))
        };
        answers.into_iter().map(short).collect()
    }

    fn one(
        allocator: &mut DeviceAllocator,
        uid: &str,
        device_requests: &DeviceRequests,
    ) -> Result<String, String> {
        allocate(allocator, &[(uid, device_requests)]).remove(0)
    }

    #[test]
    fn only_matching_devices_are_allocated_and_missing_are_counted() {
        let mut allocator = allocator(None);
        let device_requests =
            |count| device_requests("Packing", &json!([request("gpu", count, "x")]), &json!([]));
        assert_eq!(
            one(&mut allocator, "u", &device_requests(1)).unwrap_err(),
            "resources exhausted on node a: 8 of 8 not evaluated yet by selector 1 of request gpu, 1 requested"
                .replace(", 1 requested", "")
        );
        evaluate(&mut allocator, "x");
        assert_eq!(one(&mut allocator, "u", &device_requests(2)), Ok("d0 d2".into()));
        assert_eq!(
            one(&mut allocator, "u", &device_requests(2)),
            Ok("d0 d2".into()),
            "the same again"
        );
        assert_eq!(
            one(&mut allocator, "v", &device_requests(3)).unwrap_err(),
            "resources exhausted on node a: 2 of 8 held, 4 of 8 do not match selector 1 of request gpu, 2 free, 3 requested"
        );
        let broken = self::device_requests("Packing", &json!([request("gpu", 1, "broken")]), &json!([]));
        evaluate(&mut allocator, "broken");
        assert_eq!(
            one(&mut allocator, "v", &broken).unwrap_err(),
            "resources exhausted on node a: 2 of 8 held, 6 of 8 cause an error in selector 1 of request gpu (No such key: z)"
        );
    }

    #[test]
    fn devices_of_a_claim_share_the_constrained_attribute() {
        let equal = json!([{"matchAttribute": "d/numa"}]);
        let device_requests =
            |policy, count| device_requests(policy, &json!([{"name": "a", "count": count}]), &equal);
        assert_eq!(
            one(&mut allocator(None), "u", &device_requests("Packing", 2)),
            Ok("d0 d1".into())
        );
        assert_eq!(
            one(&mut allocator(None), "u", &device_requests("Spreading", 2)),
            Ok("d3 d4".into())
        );
        assert_eq!(
            one(&mut allocator(None), "u", &device_requests("Packing", 4)),
            Ok("d3 d4 d5 d6".into())
        );
        let mut allocator = allocator(None);
        assert_eq!(
            one(&mut allocator, "u", &device_requests("Packing", 6)).unwrap_err(),
            "resources exhausted on node a: 8 of 8 free, no 6 of the remaining devices have the same d/numa"
        );
        assert_eq!(
            one(&mut allocator, "u", &device_requests("Packing", 4)),
            Ok("d3 d4 d5 d6".into())
        );
        assert_eq!(
            one(&mut allocator, "v", &device_requests("Packing", 2)),
            Ok("d0 d1".into())
        );
        assert_eq!(
            one(&mut allocator, "w", &device_requests("Packing", 2)).unwrap_err(),
            "resources exhausted on node a: 6 of 8 held, no 2 of the remaining devices have the same d/numa"
        );
        let missing = self::device_requests(
            "Packing",
            &json!([{"name": "a"}]),
            &json!([{"matchAttribute": "d/none"}]),
        );
        assert!(
            one(&mut allocator, "w", &missing)
                .unwrap_err()
                .ends_with("no 1 of the remaining devices have the same d/none")
        );
    }

    #[test]
    fn a_constraint_yields_to_another_claim_of_the_pod() {
        let mut allocator = allocator(None);
        evaluate(&mut allocator, "x");
        let equal = json!([{"matchAttribute": "d/numa"}]);
        let pair = device_requests("Packing", &json!([{"name": "a", "count": 3}]), &equal);
        let both = device_requests(
            "Packing",
            &json!([{"name": "a", "count": 2}]),
            &json!([{"matchAttribute": "d/numa"}, {"matchAttribute": "d/vendor"}]),
        );
        // The first claim takes the small group and leaves the large one to the others.
        let answers = allocate(&mut allocator, &[("u", &pair), ("v", &both), ("w", &both)]);
        assert_eq!(
            answers,
            [Ok("d0 d1 d2".into()), Ok("d4 d6".into()), Ok("d3 d5".into())]
        );
    }

    #[test]
    fn conflicting_constraints_differ_from_unsatisfiable_ones() {
        let constraints = json!([
            {"requests": ["a", "b"], "matchAttribute": "d/numa"}, {"requests": ["a", "b"], "matchAttribute": "d/vendor"}
        ]);
        let requested = device_requests(
            "Packing",
            &json!([{"name": "a", "count": 2}, {"name": "b", "count": 2}]),
            &constraints,
        );
        assert!(
            one(&mut allocator(None), "u", &requested)
                .unwrap_err()
                .ends_with("each constraint can be met, but not all of them together")
        );
    }

    #[test]
    fn all_means_every_device_that_matches_or_nothing() {
        let mut allocator = allocator(None);
        evaluate(&mut allocator, "x");
        evaluate(&mut allocator, "z");
        let all = |expression| {
            let request = json!({"name": "a", "allocationMode": "All", "selectors": [{"cel": {"expression": expression}}]});
            device_requests("Packing", &json!([request]), &json!([]))
        };
        assert!(
            one(&mut allocator, "u", &all("z"))
                .unwrap_err()
                .ends_with("8 of 8 do not match selector 1 of request a")
        );
        assert_eq!(one(&mut allocator, "u", &all("x")), Ok("d0 d2 d4 d6".into()));
        assert_eq!(
            one(&mut allocator, "u", &all("x")),
            Ok("d0 d2 d4 d6".into()),
            "the same again"
        );
        assert_eq!(
            one(&mut allocator, "v", &all("x")).unwrap_err(),
            "resources exhausted on node a: 4 of 8 held, 4 of 8 do not match selector 1 of request a, request a is for all 4 \
         that match, and 4 of them are held or unhealthy"
        );
        assert!(
            one(&mut allocator, "v", &all("new"))
                .unwrap_err()
                .contains("4 of 8 not evaluated yet")
        );
    }

    #[test]
    fn shares_are_packed_or_spread_by_policy() {
        for (policy, expected) in [
            ("Packing", ["d0", "d0", "d1", "d1"]),
            ("Spreading", ["d0", "d1", "d2", "d3"]),
        ] {
            let mut allocator = allocator(Some(2));
            let request = device_requests(policy, &json!([{"name": "a"}]), &json!([]));
            for (uid, device) in ["t", "u", "v", "w"].into_iter().zip(expected) {
                one(&mut allocator, uid, &request).unwrap();
                let holder = allocator.holdings().get(uid).unwrap();
                assert_eq!(
                    holder.state.grant().unwrap().devices[0].device,
                    device,
                    "{policy} {uid}"
                );
            }
        }
    }

    #[test]
    fn a_shared_device_has_as_many_holders_as_shares() {
        let mut allocator = allocator(Some(2));
        let eight = device_requests("Packing", &json!([{"name": "a", "count": 8}]), &json!([]));
        let nine = device_requests(
            "Packing",
            &json!([{"name": "a", "count": 8}, {"name": "b"}]),
            &json!([]),
        );
        assert!(
            one(&mut allocator, "u", &nine).is_err(),
            "a claim has a device once"
        );
        let answers = allocate(&mut allocator, &[("u", &eight), ("v", &eight)]);
        assert!(answers.iter().all(Result::is_ok), "{answers:?}");
        assert!(
            one(&mut allocator, "w", &eight)
                .unwrap_err()
                .contains("8 of 8 held")
        );
        assert_eq!(allocator.gone("u"), 8, "each has a share left again");
        assert!(one(&mut allocator, "w", &eight).is_ok());
        // Recorded allocations are no conflict while there are shares.
        let record = |allocator: &mut DeviceAllocator, uid: &str, from: &str| {
            let grant = allocator
                .holdings()
                .get(from)
                .and_then(|holder| holder.state.grant())
                .cloned()
                .unwrap();
            let claim = claim(uid, Some(&index::write(DRIVER, uid, &grant).unwrap()));
            allocator
                .observe(&claim, claim.status.allocation.as_ref())
                .findings
                .len()
        };
        assert_eq!(record(&mut allocator, "v", "v"), 0);
        assert_eq!(record(&mut allocator, "w", "v"), 0);
        assert_eq!(record(&mut allocator, "x", "v"), 8, "one more than shares");
    }

    #[test]
    fn a_claim_has_at_most_64_devices_even_if_it_wants_all() {
        let names: Vec<String> = (0..65).map(|number| format!("d{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut allocator = DeviceAllocator::new(DRIVER);
        allocator.set_inventory("a", Some(fixture::node("a", "1", &names)));
        let all = device_requests(
            "Packing",
            &json!([{"name": "a", "allocationMode": "All"}]),
            &json!([]),
        );
        let error = one(&mut allocator, "u", &all).unwrap_err();
        assert!(
            error.ends_with("the requests for all devices add up to 65; a claim gets at most 64"),
            "{error}"
        );
    }

    #[test]
    fn an_impossible_claim_costs_few_steps_and_is_counted() {
        // Eight devices, each with its own attribute value.
        let names: Vec<String> = (0..8).map(|number| format!("d{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut inventory = fixture::inventory("a", "1", &names);
        for (number, device) in inventory.spec.devices.iter_mut().enumerate() {
            let own = AttributeValue::int(i64::try_from(number).unwrap());
            device.attributes.insert("d/own".into(), own);
        }
        let mut allocator = DeviceAllocator::new(DRIVER);
        allocator.set_inventory("a", Some(NodeInfo::read(&inventory)));
        let requests: Vec<Value> = (1..=8)
            .map(|number| json!({"name": format!("r{number}"), "count": if number == 8 { 2 } else { 1 }}))
            .collect();
        let constraints: Vec<Value> = (1..=7)
            .map(|number| json!({"matchAttribute": "d/own", "requests": [format!("r{number}")]}))
            .collect();
        let device_requests = device_requests("Packing", &json!(requests), &json!(constraints));
        let claim = claim("u", None);
        let request = RequestedClaim {
            claim: &claim,
            device_requests: &device_requests,
            suitable_nodes: None,
        };
        let nodes = vec!["a".to_owned(); 64];
        let mut work = WorkBudget::new(QUICK_WORK_MAX);
        let mut unsuitable = vec![BTreeMap::new()];
        let left = allocator.unsuitable(&[request], &nodes, &mut unsuitable, &mut work);
        assert_eq!(unsuitable[0]["a"], "8 of 8 free, 9 requested");
        assert!(left.is_empty(), "{} steps", work.done());
    }

    #[test]
    fn constraints_on_one_attribute_that_share_a_request_are_one() {
        let request = |name: &str| json!({"name": name, "count": 1});
        let equal = |requests: &[&str]| json!({"matchAttribute": "d/numa", "requests": requests});
        let device_requests = device_requests(
            "Packing",
            &json!([request("a"), request("b"), request("c"), request("d")]),
            &json!([equal(&["a", "b"]), equal(&["d"]), equal(&["b", "c"])]),
        );
        let joined: Vec<&[usize]> = device_requests
            .constraints()
            .iter()
            .map(Constraint::requests)
            .collect();
        assert_eq!(joined, [&[3][..], &[0, 1, 2]]);
    }
}

mod unsuitable {
    use super::*;

    fn text(
        total: usize,
        held: usize,
        unhealthy: usize,
        requested_count: usize,
        requested_besides: usize,
    ) -> String {
        Shortage {
            kind: "test".into(),
            total,
            held,
            unhealthy,
            requested_count,
            requested_besides,
            ..Shortage::default()
        }
        .to_string()
    }

    #[test]
    fn a_shortage_counts_the_devices_by_state() {
        assert_eq!(text(3, 3, 0, 1, 0), "3 of 3 held");
        assert_eq!(text(8, 4, 4, 1, 0), "4 of 8 held, 4 unhealthy");
        assert_eq!(
            text(8, 4, 3, 2, 0),
            "4 of 8 held, 3 unhealthy, 1 free, 2 requested"
        );
        assert_eq!(text(2, 0, 2, 1, 0), "2 of 2 unhealthy");
        assert_eq!(text(2, 0, 0, 3, 0), "2 of 2 free, 3 requested");
        assert_eq!(
            text(2, 1, 0, 1, 1),
            "1 of 2 held, 1 free, 1 requested besides 1 for the pod's other claims"
        );
        assert_eq!(text(3, 3, 0, 2, 0), "3 of 3 held, 2 requested");
    }

    #[test]
    fn many_long_reasons_make_a_short_text() {
        let shortage = |reasons: usize| {
            // Cut in the middle of a character.
            let error = format!("ee{}", "é".repeat(400));
            let misfit = |number: usize| {
                let selector = format!("selector {number:02} of request gpu");
                (Misfit::Failed(selector, error.clone()), 1)
            };
            let shortage = Shortage {
                kind: "test".into(),
                total: reasons,
                requested_count: 2,
                misfits: (0..reasons).map(misfit).collect(),
                ..Shortage::default()
            };
            shortage.to_string()
        };
        let text = shortage(80);
        assert!(text.len() <= 640, "{} bytes: {text}", text.len());
        assert_eq!(text.matches("1 of 80 ").count(), 3, "{text}");
        assert!(
            text.starts_with("1 of 80 cause an error in selector 00 of request gpu (eeéé")
                && text.ends_with("éé…, and 77 more reasons, 2 requested"),
            "{text}"
        );
        assert!(shortage(4).ends_with("éé…, and 1 more reason, 2 requested"));
        assert!(shortage(3).ends_with("éé…, 2 requested"));
        let misfit = |number: usize| (Misfit::Failed(format!("selector {number}"), "e".into()), number);
        let frequent = Shortage {
            kind: "test".into(),
            total: 10,
            misfits: (1..5).map(misfit).collect(),
            ..Shortage::default()
        };
        let text = frequent.to_string();
        assert!(
            text.starts_with("4 of 10 ") && text.contains(", 2 of 10 ") && !text.contains(", 1 of 10 "),
            "{text}"
        );
    }

    #[test]
    fn a_missing_kind_and_one_of_another_mode_are_different_errors() {
        let none = Shortage {
            kind: "test".into(),
            requested_count: 1,
            ..Shortage::default()
        };
        assert_eq!(none.to_string(), "no device of kind test on this node");
        let other = Shortage {
            other_mode: 2,
            ..none
        };
        assert!(other.to_string().contains("are not for claims"));
    }
}
