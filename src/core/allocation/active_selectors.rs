//! The active selectors and their pending evaluations, updated with every change so that a query does not scan the nodes.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::core::allocation::attribute_set::{Bits, Matches};
use crate::core::allocation::inventory::Node;

/// The active selectors by device kind, each with the numbers of the attribute sets that it has yet to evaluate. Stored as bits, because
/// all devices can change at once, under every selector.
#[derive(Clone, Debug, Default)]
pub struct Wanted(BTreeMap<Box<str>, BTreeMap<Arc<str>, Bits>>);

impl Wanted {
    /// Whether an expression is active for a kind.
    pub fn contains(&self, kind: &str, expression: &str) -> bool {
        self.0
            .get(kind)
            .is_some_and(|selectors| selectors.contains_key(expression))
    }

    /// Whether no selector is active.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The attribute sets of a kind that an expression has yet to evaluate, by number.
    pub(super) fn unjudged(&self, kind: &str, expression: &str) -> impl Iterator<Item = usize> {
        let selectors = self.0.get(kind);
        selectors
            .and_then(|selectors| selectors.get(expression))
            .into_iter()
            .flat_map(Bits::iter)
    }

    /// The kinds and expressions with pending evaluations.
    pub fn due(&self) -> impl Iterator<Item = (&str, &Arc<str>)> {
        self.all()
            .filter(|(_, _, unjudged)| unjudged.len() > 0)
            .map(|(kind, expression, _)| (kind, expression))
    }

    /// The kinds for which an expression is active.
    pub fn kinds(&self, expression: &str) -> impl Iterator<Item = &str> {
        self.all()
            .filter(move |(_, wanted, _)| ***wanted == *expression)
            .map(|(kind, _, _)| kind)
    }

    fn all(&self) -> impl Iterator<Item = (&str, &Arc<str>, &Bits)> {
        self.0.iter().flat_map(|(kind, selectors)| {
            selectors
                .iter()
                .map(move |(expression, unjudged)| (&**kind, expression, unjudged))
        })
    }

    /// Activates an expression for a kind. `unjudged` are the attribute sets without a result.
    pub(super) fn begin(&mut self, kind: &str, expression: &Arc<str>, unjudged: impl Iterator<Item = usize>) {
        let mut bits = Bits::default();
        for number in unjudged {
            bits.set(number, true);
        }
        let selectors = self.0.entry(kind.into()).or_default();
        selectors.insert(Arc::clone(expression), bits);
    }

    /// Adds the pending evaluations for the devices of a node.
    pub(super) fn see(&mut self, node: &Node, matches: &mut Matches) {
        for device in node.devices() {
            let Some(selectors) = self.0.get_mut(&device.kind) else {
                continue;
            };
            let number = matches.number(&device.attributes);
            for (expression, unjudged) in selectors {
                if !matches.is_judged(expression, number) {
                    unjudged.set(number, true);
                }
            }
        }
    }

    /// Removes evaluations whose results are stored.
    pub(super) fn judged(&mut self, expression: &str, numbers: &[usize]) {
        for selectors in self.0.values_mut() {
            if let Some(unjudged) = selectors.get_mut(expression) {
                for &number in numbers {
                    unjudged.set(number, false);
                }
            }
        }
    }

    pub(super) fn forget(&mut self, expression: &str) {
        self.0.retain(|_, selectors| {
            selectors.remove(expression);
            !selectors.is_empty()
        });
    }

    /// Removes attribute sets that no device has any more.
    pub(super) fn forget_devices(&mut self, gone: &[usize]) {
        for unjudged in self.0.values_mut().flat_map(BTreeMap::values_mut) {
            for &number in gone {
                unjudged.set(number, false);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::api::crd::AttributeValue;
    use crate::core::allocation::allocator::DeviceAllocator;
    use crate::core::allocation::attribute_set::{AttributeSet, Match};
    use crate::core::allocation::fixture::{DRIVER, inventory};

    const KINDS: [&str; 2] = ["even", "odd"];
    const EXPRESSIONS: [&str; 2] = ["first", "second"];

    /// A node with one device per value, of kind `even` or `odd`.
    fn node(name: &str, values: &[i64]) -> Node {
        let names: Vec<String> = (0..values.len()).map(|number| format!("d{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut inventory = inventory(name, name, &names);
        for (device, value) in inventory.spec.devices.iter_mut().zip(values) {
            device.kind = if value % 2 == 0 { "even" } else { "odd" }.to_owned();
            device
                .attributes
                .insert("d/x".into(), AttributeValue::int(*value));
        }
        Node::read(&inventory)
    }

    /// [`Wanted`] must agree with a scan of all devices.
    fn check(books: &DeviceAllocator) -> Result<(), TestCaseError> {
        for (kind, expression) in KINDS
            .iter()
            .flat_map(|kind| EXPRESSIONS.map(|other| (kind, other)))
        {
            if !books.wanted().contains(kind, expression) {
                continue;
            }
            let unjudged: BTreeSet<&AttributeSet> = books.unjudged(kind, expression).collect();
            for device in books.inventory().nodes().flat_map(Node::devices) {
                let known = books.matches().get(expression, &device.attributes).is_some();
                let left = unjudged.contains(&device.attributes);
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
            let mut books = DeviceAllocator::new(DRIVER);
            for (what, number, values) in steps {
                let name = format!("n{number}");
                let (kind, expression) = (KINDS[number % 2], EXPRESSIONS[number / 2]);
                match what {
                    0 => drop(books.set_inventory(&name, Some(node(&name, &values)))),
                    1 => drop(books.set_inventory(&name, None)),
                    2 => books.want(kind, &expression.into()),
                    3 => {
                        let some = books.unjudged(kind, expression).take(values.len()).cloned();
                        let said = some.map(|facts| (facts, Match::Yes)).collect();
                        books.judged(&expression.into(), said);
                    }
                    _ if values.is_empty() => books.forget_devices(),
                    _ => books.forget_selector(expression),
                }
                check(&books)?;
            }
        }
    }

    #[test]
    fn an_evaluated_selector_is_due_only_after_a_node_changes() {
        let mut books = DeviceAllocator::new(DRIVER);
        let first: Arc<str> = "first".into();
        books.set_inventory("a", Some(node("a", &[0, 2, 1])));
        books.want("even", &first);
        let due = |books: &DeviceAllocator| {
            books
                .wanted()
                .due()
                .map(|(kind, _)| kind.to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(due(&books), ["even"]);
        let said: Vec<_> = books.unjudged("even", "first").cloned().collect();
        assert_eq!(said.len(), 2);
        books.judged(&first, said.into_iter().map(|facts| (facts, Match::No)).collect());
        assert!(due(&books).is_empty());
        // A device with a known attribute set, and one of another kind.
        books.set_inventory("b", Some(node("b", &[2, 3])));
        assert!(due(&books).is_empty());
        books.set_inventory("b", Some(node("b", &[4])));
        assert_eq!(due(&books), ["even"]);
        // A device that is removed before its evaluation is not kept forever.
        books.set_inventory("b", None);
        books.forget_devices();
        assert!(due(&books).is_empty());
        assert_eq!(books.wanted().kinds("first").collect::<Vec<_>>(), ["even"]);
        books.forget_selector("first");
        assert!(books.wanted().is_empty());
    }
}
