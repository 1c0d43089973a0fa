//! Allocations and errors with selectors, constraints, shares and requests for all.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::api::crd::{AttributeValue, DeviceClaimParametersSpec};
use crate::core::allocation::allocate::Target;
use crate::core::allocation::allocation_result;
use crate::core::allocation::allocator::DeviceAllocator;
use crate::core::allocation::attribute_set::{Attribute, Match};
use crate::core::allocation::evaluate::RequestedClaim;
use crate::core::allocation::fixture::{self, DRIVER, claim};
use crate::core::allocation::inventory::Node;
use crate::core::allocation::parameters::{ClassParameters, Constraint, DeviceRequests};
use crate::core::allocation::work::{QUICK_WORK_MAX, Work};

/// Eight devices `d0` to `d7`; `d0` to `d2` are on NUMA node 0, the others on 1; even ones are of vendor `x`, others `y`.
fn books(shares: Option<u32>) -> DeviceAllocator {
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
    let mut books = DeviceAllocator::new(DRIVER);
    books.set_inventory("a", Some(Node::read(&inventory)));
    books
}

/// Evaluates an expression in place of the runtime: a device matches if its vendor equals the expression.
fn judge(books: &mut DeviceAllocator, expression: &str) {
    let expression: Arc<str> = expression.into();
    books.want("test", &expression);
    let said = books.unjudged("test", &expression).cloned().map(|facts| {
        let vendor = facts.value("d/vendor").cloned();
        let said = match vendor {
            _ if *expression == *"broken" => Match::Failed("No such key: z".into()),
            Some(Attribute::String(vendor)) if *vendor == *expression => Match::Yes,
            _ => Match::No,
        };
        (facts, said)
    });
    let said: Vec<_> = said.collect();
    books.judged(&expression, said);
}

fn request(name: &str, count: u32, expression: &str) -> Value {
    json!({"name": name, "count": count, "selectors": [{"cel": {"expression": expression}}]})
}

fn demand(policy: &str, requests: &Value, constraints: &Value) -> DeviceRequests {
    let class = json!({"kind": "test", "policy": policy});
    let class = ClassParameters::check("class", &serde_json::from_value(class).unwrap()).unwrap();
    let spec = json!({"requests": requests, "constraints": constraints});
    let spec: DeviceClaimParametersSpec = serde_json::from_value(spec).unwrap();
    DeviceRequests::check(&class, "ns", "p", &spec).unwrap()
}

/// The devices of each claim, or the error.
fn allocate(books: &mut DeviceAllocator, wanted: &[(&str, &DeviceRequests)]) -> Vec<Result<String, String>> {
    let claims: Vec<_> = wanted.iter().map(|(uid, _)| claim(uid, None)).collect();
    let wishes: Vec<_> = claims
        .iter()
        .zip(wanted)
        .map(|(claim, (_, demand))| RequestedClaim {
            claim,
            demand,
            suitable_nodes: None,
        })
        .collect();
    let answers = books.allocate(&wishes, Target::Node("a")).answers;
    let short = |answer: Result<_, crate::core::allocation::errors::AllocateError>| {
        let allocation = answer.map_err(|error| error.to_string())?;
        let record = allocation_result::read(DRIVER, "", &allocation);
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

fn one(books: &mut DeviceAllocator, uid: &str, demand: &DeviceRequests) -> Result<String, String> {
    allocate(books, &[(uid, demand)]).remove(0)
}

#[test]
fn only_matching_devices_are_allocated_and_missing_are_counted() {
    let mut books = books(None);
    let demand = |count| demand("Packing", &json!([request("gpu", count, "x")]), &json!([]));
    assert_eq!(
        one(&mut books, "u", &demand(1)).unwrap_err(),
        "resources exhausted on node a: 8 of 8 not evaluated yet by selector 1 of request gpu, 1 wanted"
            .replace(", 1 wanted", "")
    );
    judge(&mut books, "x");
    assert_eq!(one(&mut books, "u", &demand(2)), Ok("d0 d2".into()));
    assert_eq!(
        one(&mut books, "u", &demand(2)),
        Ok("d0 d2".into()),
        "the same again"
    );
    assert_eq!(
        one(&mut books, "v", &demand(3)).unwrap_err(),
        "resources exhausted on node a: 2 of 8 held, 4 of 8 do not match selector 1 of request gpu, 2 free, 3 wanted"
    );
    let broken = self::demand("Packing", &json!([request("gpu", 1, "broken")]), &json!([]));
    judge(&mut books, "broken");
    assert_eq!(
        one(&mut books, "v", &broken).unwrap_err(),
        "resources exhausted on node a: 2 of 8 held, 6 of 8 cause an error in selector 1 of request gpu (No such key: z)"
    );
}

#[test]
fn devices_of_a_claim_share_the_constrained_attribute() {
    let equal = json!([{"matchAttribute": "d/numa"}]);
    let demand = |policy, count| demand(policy, &json!([{"name": "a", "count": count}]), &equal);
    assert_eq!(
        one(&mut books(None), "u", &demand("Packing", 2)),
        Ok("d0 d1".into())
    );
    assert_eq!(
        one(&mut books(None), "u", &demand("Spreading", 2)),
        Ok("d3 d4".into())
    );
    assert_eq!(
        one(&mut books(None), "u", &demand("Packing", 4)),
        Ok("d3 d4 d5 d6".into())
    );
    let mut books = books(None);
    assert_eq!(
        one(&mut books, "u", &demand("Packing", 6)).unwrap_err(),
        "resources exhausted on node a: 8 of 8 free, no 6 of the rest have an equal d/numa"
    );
    assert_eq!(
        one(&mut books, "u", &demand("Packing", 4)),
        Ok("d3 d4 d5 d6".into())
    );
    assert_eq!(one(&mut books, "v", &demand("Packing", 2)), Ok("d0 d1".into()));
    assert_eq!(
        one(&mut books, "w", &demand("Packing", 2)).unwrap_err(),
        "resources exhausted on node a: 6 of 8 held, no 2 of the rest have an equal d/numa"
    );
    let missing = self::demand(
        "Packing",
        &json!([{"name": "a"}]),
        &json!([{"matchAttribute": "d/none"}]),
    );
    assert!(
        one(&mut books, "w", &missing)
            .unwrap_err()
            .ends_with("no 1 of the rest have an equal d/none")
    );
}

#[test]
fn a_constraint_yields_to_another_claim_of_the_pod() {
    let mut books = books(None);
    judge(&mut books, "x");
    let equal = json!([{"matchAttribute": "d/numa"}]);
    let pair = demand("Packing", &json!([{"name": "a", "count": 3}]), &equal);
    let both = demand(
        "Packing",
        &json!([{"name": "a", "count": 2}]),
        &json!([{"matchAttribute": "d/numa"}, {"matchAttribute": "d/vendor"}]),
    );
    // The first claim takes the small group and leaves the large one to the others.
    let answers = allocate(&mut books, &[("u", &pair), ("v", &both), ("w", &both)]);
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
    let wanted = demand(
        "Packing",
        &json!([{"name": "a", "count": 2}, {"name": "b", "count": 2}]),
        &constraints,
    );
    assert!(
        one(&mut books(None), "u", &wanted)
            .unwrap_err()
            .ends_with("each constraint can be met, but not all of them together")
    );
}

#[test]
fn all_means_every_device_that_matches_or_nothing() {
    let mut books = books(None);
    judge(&mut books, "x");
    judge(&mut books, "z");
    let all = |expression| {
        let request =
            json!({"name": "a", "allocationMode": "All", "selectors": [{"cel": {"expression": expression}}]});
        demand("Packing", &json!([request]), &json!([]))
    };
    assert!(
        one(&mut books, "u", &all("z"))
            .unwrap_err()
            .ends_with("8 of 8 do not match selector 1 of request a")
    );
    assert_eq!(one(&mut books, "u", &all("x")), Ok("d0 d2 d4 d6".into()));
    assert_eq!(
        one(&mut books, "u", &all("x")),
        Ok("d0 d2 d4 d6".into()),
        "the same again"
    );
    assert_eq!(
        one(&mut books, "v", &all("x")).unwrap_err(),
        "resources exhausted on node a: 4 of 8 held, 4 of 8 do not match selector 1 of request a, request a wants all 4 \
         that match, and 4 of them are held or unhealthy"
    );
    assert!(
        one(&mut books, "v", &all("new"))
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
        let mut books = books(Some(2));
        let wish = demand(policy, &json!([{"name": "a"}]), &json!([]));
        for (uid, device) in ["t", "u", "v", "w"].into_iter().zip(expected) {
            one(&mut books, uid, &wish).unwrap();
            let holder = books.holdings().get(uid).unwrap();
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
    let mut books = books(Some(2));
    let eight = demand("Packing", &json!([{"name": "a", "count": 8}]), &json!([]));
    let nine = demand(
        "Packing",
        &json!([{"name": "a", "count": 8}, {"name": "b"}]),
        &json!([]),
    );
    assert!(one(&mut books, "u", &nine).is_err(), "a claim has a device once");
    let answers = allocate(&mut books, &[("u", &eight), ("v", &eight)]);
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert!(one(&mut books, "w", &eight).unwrap_err().contains("8 of 8 held"));
    assert_eq!(books.gone("u"), 8, "each has a share left again");
    assert!(one(&mut books, "w", &eight).is_ok());
    // Recorded allocations are no conflict while there are shares.
    let record = |books: &mut DeviceAllocator, uid: &str, from: &str| {
        let grant = books
            .holdings()
            .get(from)
            .and_then(|holder| holder.state.grant())
            .cloned()
            .unwrap();
        let claim = claim(uid, Some(&allocation_result::write(DRIVER, uid, &grant).unwrap()));
        books
            .observe(&claim, claim.status.allocation.as_ref())
            .problems
            .len()
    };
    assert_eq!(record(&mut books, "v", "v"), 0);
    assert_eq!(record(&mut books, "w", "v"), 0);
    assert_eq!(record(&mut books, "x", "v"), 8, "one more than shares");
}

#[test]
fn a_claim_has_at_most_64_devices_even_if_it_wants_all() {
    let names: Vec<String> = (0..65).map(|number| format!("d{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut books = DeviceAllocator::new(DRIVER);
    books.set_inventory("a", Some(fixture::node("a", "1", &names)));
    let all = demand(
        "Packing",
        &json!([{"name": "a", "allocationMode": "All"}]),
        &json!([]),
    );
    let error = one(&mut books, "u", &all).unwrap_err();
    assert!(
        error.ends_with("the requests for all devices make 65; a claim gets at most 64"),
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
    let mut books = DeviceAllocator::new(DRIVER);
    books.set_inventory("a", Some(Node::read(&inventory)));
    let requests: Vec<Value> = (1..=8)
        .map(|number| json!({"name": format!("r{number}"), "count": if number == 8 { 2 } else { 1 }}))
        .collect();
    let constraints: Vec<Value> = (1..=7)
        .map(|number| json!({"matchAttribute": "d/own", "requests": [format!("r{number}")]}))
        .collect();
    let demand = demand("Packing", &json!(requests), &json!(constraints));
    let claim = claim("u", None);
    let wish = RequestedClaim {
        claim: &claim,
        demand: &demand,
        suitable_nodes: None,
    };
    let nodes = vec!["a".to_owned(); 64];
    let mut work = Work::new(QUICK_WORK_MAX);
    let mut verdicts = vec![BTreeMap::new()];
    let left = books.verdicts(&[wish], &nodes, &mut verdicts, &mut work);
    assert_eq!(verdicts[0]["a"], "8 of 8 free, 9 wanted");
    assert!(left.is_empty(), "{} steps", work.done());
}

#[test]
fn constraints_on_one_attribute_that_share_a_request_are_one() {
    let request = |name: &str| json!({"name": name, "count": 1});
    let equal = |requests: &[&str]| json!({"matchAttribute": "d/numa", "requests": requests});
    let demand = demand(
        "Packing",
        &json!([request("a"), request("b"), request("c"), request("d")]),
        &json!([equal(&["a", "b"]), equal(&["d"]), equal(&["b", "c"])]),
    );
    let joined: Vec<&[usize]> = demand.constraints().iter().map(Constraint::requests).collect();
    assert_eq!(joined, [&[3][..], &[0, 1, 2]]);
}
