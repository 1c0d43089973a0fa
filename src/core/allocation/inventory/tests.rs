//! Tests of [`super`].

use super::*;
use crate::api::crd::AttributeValue;
use crate::core::allocation::tests::fixture;

mod selectors;

impl SelectorResults {
    /// The result of an expression; `None` if none is stored.
    pub(crate) fn get(&self, expression: &str, attributes: &AttributeSet) -> Option<Match> {
        self.of_expression(expression)?
            .get(self.known_number(attributes)?)
    }

    /// Number of stored results.
    pub(crate) fn len(&self) -> usize {
        self.results.values().map(|results| results.evaluated.len()).sum()
    }
}

fn names(inventory: &Inventory, kind: &str) -> Vec<String> {
    inventory.nodes_with(kind).map(str::to_owned).collect()
}

#[test]
fn a_node_is_found_by_name_and_by_kind_until_its_object_is_gone() {
    let mut inventory = Inventory::default();
    let replaced = inventory.set("a.x", Some(fixture::node("a", "1", &["d1", "d2"])));
    assert_eq!(
        replaced,
        [Replaced {
            name: "a".into(),
            before: None
        }]
    );
    assert_eq!(inventory.node("a").unwrap().uid(), "1");
    assert_eq!(names(&inventory, "test"), ["a"]);
    assert!(
        inventory
            .set("a.x", Some(fixture::node("a", "1", &["d1", "d2"])))
            .is_empty(),
        "nothing has changed"
    );
    assert_eq!(inventory.set("a.x", None).len(), 1);
    assert!(inventory.node("a").is_none());
    assert!(inventory.nodes_with("test").next().is_none() && inventory.objects().next().is_none());
    assert!(inventory.set("a.x", None).is_empty());
}

#[test]
fn of_two_objects_for_a_node_the_older_counts_until_it_is_gone() {
    let mut inventory = Inventory::default();
    let later = NodeInfo {
        created: Some(Timestamp::from_second(2).unwrap()),
        ..fixture::node("a", "2", &["x"])
    };
    let earlier = NodeInfo {
        created: Some(Timestamp::from_second(1).unwrap()),
        ..fixture::node("a", "1", &["y"])
    };
    inventory.set("first", Some(later));
    inventory.set("second", Some(earlier.clone()));
    assert_eq!(inventory.node("a").unwrap().uid(), "1");
    inventory.set(
        "second",
        Some(NodeInfo {
            devices: Box::default(),
            ..earlier
        }),
    );
    assert!(
        names(&inventory, "test").is_empty(),
        "what the later one says does not count"
    );
    inventory.set("second", None);
    assert_eq!(inventory.node("a").unwrap().uid(), "2");
    assert_eq!(names(&inventory, "test"), ["a"]);
}

#[test]
fn an_inventory_recreated_for_another_node_leaves_the_first() {
    let mut inventory = Inventory::default();
    inventory.set("o", Some(fixture::node("a", "1", &["d"])));
    let replaced = inventory.set("o", Some(fixture::node("b", "2", &["d"])));
    assert_eq!(
        replaced
            .iter()
            .map(|replaced| &*replaced.name)
            .collect::<Vec<_>>(),
        ["a", "b"]
    );
    assert!(inventory.node("a").is_none());
    assert_eq!(names(&inventory, "test"), ["b"]);
}

#[test]
fn only_a_true_ready_condition_makes_a_node_ready() {
    let mut inventory = fixture::inventory("a", "1", &["d"]);
    assert_eq!(NodeInfo::read(&inventory).unready(), None);
    let condition = inventory.status.as_mut().unwrap().conditions.first_mut().unwrap();
    condition.status = "False".into();
    condition.message = "drayman was stopped".into();
    assert_eq!(NodeInfo::read(&inventory).unready(), Some("drayman was stopped"));
    inventory.status = None;
    assert_eq!(
        NodeInfo::read(&inventory).unready(),
        Some("its companion has not reported yet")
    );
    inventory.spec.node_uid.clear();
    assert_eq!(NodeInfo::read(&inventory).unready(), Some("it names no node uid"));
}

#[test]
fn devices_and_attributes_against_the_schema_are_left_out() {
    let mut inventory = fixture::inventory("a", "1", &["d", "c", "d"]);
    let both = AttributeValue {
        int: Some(1),
        ..AttributeValue::string("x")
    };
    let attributes = [("e/both".into(), both), ("e/int".into(), AttributeValue::int(7))];
    inventory.spec.devices.first_mut().unwrap().attributes = attributes.into_iter().collect();
    let node = NodeInfo::read(&inventory);
    assert_eq!(
        node.devices()
            .iter()
            .map(|device| &*device.name)
            .collect::<Vec<_>>(),
        ["c", "d"]
    );
    assert_eq!(
        *node.device("d").unwrap().attributes,
        [("e/int".into(), Attribute::Int(7))]
    );
    assert_eq!(node.device("e"), None);
}
