//! What is known about a device, and how the selectors judge it.
//!
//! A selector sees nothing but the facts, so its judgement is kept by the facts: it is never out of date, and devices that
//! are alike are judged once. The shell judges ([`crate::host`]); here is only what came of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::api::crd::AttributeValue;

/// The attributes of a device, in the order of their names. Devices whose facts are equal match the same selectors.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Facts {
    /// Compared first: it tells nearly all that differ apart, at the cost of one comparison.
    fingerprint: u64,
    attributes: Arc<[(Box<str>, Attribute)]>,
}

impl FromIterator<(Box<str>, Attribute)> for Facts {
    fn from_iter<T: IntoIterator<Item = (Box<str>, Attribute)>>(attributes: T) -> Self {
        let attributes: Arc<[_]> = attributes.into_iter().collect();
        Self {
            fingerprint: fingerprint(&attributes),
            attributes,
        }
    }
}

/// FNV-1a over names and values. Two that are equal by accident cost a comparison, nothing else.
fn fingerprint(attributes: &[(Box<str>, Attribute)]) -> u64 {
    let mix = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    attributes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, (name, value)| {
            let sum = name.as_bytes().iter().fold(sum, mix);
            match value {
                Attribute::String(text) | Attribute::Version(text) => text.as_bytes().iter().fold(sum, mix),
                Attribute::Int(number) => number.to_le_bytes().iter().fold(sum, mix),
                Attribute::Bool(value) => mix(sum, &u8::from(*value)),
            }
        })
}

impl std::ops::Deref for Facts {
    type Target = [(Box<str>, Attribute)];

    fn deref(&self) -> &Self::Target {
        &self.attributes
    }
}

impl Facts {
    /// The value of the attribute of this qualified name.
    pub fn value(&self, name: &str) -> Option<&Attribute> {
        let index = self.binary_search_by(|(other, _)| (**other).cmp(name)).ok()?;
        self.get(index).map(|(_, value)| value)
    }
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Attribute {
    /// A text.
    String(Box<str>),
    /// A whole number.
    Int(i64),
    /// A truth value.
    Bool(bool),
    /// A semantic version, as written.
    Version(Box<str>),
}

impl Attribute {
    /// The value, if it is exactly one of the four types.
    pub fn read(value: &AttributeValue) -> Option<Self> {
        match (&value.string, value.int, value.bool, &value.version) {
            (Some(string), None, None, None) => Some(Self::String(string.as_str().into())),
            (None, Some(int), None, None) => Some(Self::Int(int)),
            (None, None, Some(bool), None) => Some(Self::Bool(bool)),
            (None, None, None, Some(version)) => Some(Self::Version(version.as_str().into())),
            _ => None,
        }
    }
}

/// What a selector says of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Match {
    /// The device is wanted.
    Yes,
    /// It is not.
    No,
    /// The selector cannot be evaluated on it, which counts as no.
    Failed(Arc<str>),
}

/// What selectors say, by expression and facts.
#[derive(Clone, Debug, Default)]
pub struct Matches(BTreeMap<Arc<str>, Arc<BTreeMap<Facts, Match>>>);

impl Matches {
    /// What an expression says; `None` if it was not asked yet.
    pub fn get(&self, expression: &str, facts: &Facts) -> Option<&Match> {
        self.0.get(expression)?.get(facts)
    }

    /// Takes note of what an expression says.
    pub fn put(&mut self, expression: &Arc<str>, said: impl IntoIterator<Item = (Facts, Match)>) {
        let known = self.0.entry(Arc::clone(expression)).or_default();
        Arc::make_mut(known).extend(said);
    }

    /// What these expressions say, at the cost of a reference each.
    #[must_use]
    pub fn some<'a>(&self, expressions: impl Iterator<Item = &'a Arc<str>>) -> Self {
        let known = expressions.filter_map(|expression| self.0.get_key_value(expression));
        Self(
            known
                .map(|(expression, said)| (Arc::clone(expression), Arc::clone(said)))
                .collect(),
        )
    }

    /// Forgets what no other expression and no other device needs.
    pub fn retain(&mut self, expressions: &BTreeSet<Arc<str>>, facts: &BTreeSet<&Facts>) {
        self.0.retain(|expression, said| {
            Arc::make_mut(said).retain(|known, _| facts.contains(known));
            expressions.contains(expression)
        });
    }

    /// How many judgements are kept.
    pub fn len(&self) -> usize {
        self.0.values().map(|said| said.len()).sum()
    }

    /// Whether none is kept.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(value: i64) -> Facts {
        [("d/x".into(), Attribute::Int(value))].into_iter().collect()
    }

    #[test]
    fn a_judgement_is_kept_for_facts_and_forgotten_with_the_expression_or_the_devices() {
        let mut matches = Matches::default();
        let (first, second): (Arc<str>, Arc<str>) = ("first".into(), "second".into());
        matches.put(&first, [(facts(1), Match::Yes), (facts(2), Match::No)]);
        matches.put(&second, [(facts(1), Match::No)]);
        assert_eq!(matches.get("first", &facts(1)), Some(&Match::Yes));
        assert_eq!(matches.get("first", &facts(3)), None);
        matches.retain(
            &BTreeSet::from([Arc::clone(&first)]),
            &BTreeSet::from([&facts(1)]),
        );
        assert_eq!((matches.len(), matches.is_empty()), (1, false));
        assert_eq!(matches.get("first", &facts(1)), Some(&Match::Yes));
    }

    #[test]
    fn a_fact_is_found_by_its_name() {
        assert_eq!(facts(7).value("d/x"), Some(&Attribute::Int(7)));
        assert_eq!(facts(7).value("d/y"), None);
        assert_ne!(facts(7), facts(8));
    }
}
