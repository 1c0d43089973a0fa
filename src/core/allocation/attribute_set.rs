//! Attribute sets of devices, and selector results for them.
//!
//! A selector depends on attributes only, so its results are stored by attribute set: they are never outdated, and equal devices are
//! evaluated once. The runtime evaluates selectors ([`crate::host`]); this module stores the results.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::api::crd::AttributeValue;

/// The attributes of a device, sorted by name. Devices with equal sets match the same selectors.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AttributeSet {
    /// Compared first: nearly all different sets differ in it, at the cost of one comparison.
    fingerprint: u64,
    attributes: Arc<[(Box<str>, Attribute)]>,
}

impl FromIterator<(Box<str>, Attribute)> for AttributeSet {
    fn from_iter<T: IntoIterator<Item = (Box<str>, Attribute)>>(attributes: T) -> Self {
        let attributes: Arc<[_]> = attributes.into_iter().collect();
        Self {
            fingerprint: fingerprint(&attributes),
            attributes,
        }
    }
}

/// FNV-1a over names and values. A collision costs one full comparison.
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

impl std::ops::Deref for AttributeSet {
    type Target = [(Box<str>, Attribute)];

    fn deref(&self) -> &Self::Target {
        &self.attributes
    }
}

impl AttributeSet {
    /// The value of the attribute with this qualified name.
    pub fn value(&self, name: &str) -> Option<&Attribute> {
        let index = self.binary_search_by(|(other, _)| (**other).cmp(name)).ok()?;
        self.get(index).map(|(_, value)| value)
    }
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Attribute {
    /// A string.
    String(Box<str>),
    /// A 64-bit integer.
    Int(i64),
    /// A boolean.
    Bool(bool),
    /// A semantic version, as written.
    Version(Box<str>),
}

impl Attribute {
    /// Reads a value. `None` unless it has exactly one of the four types.
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

/// The result of a selector for a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Match {
    /// The device matches.
    Yes,
    /// The device does not match.
    No,
    /// The selector fails on the device, with this error. Counts as no match.
    Failed(Arc<str>),
}

/// Maximum number of errors kept for one expression. A device with a further error gets [`OTHER_ERROR`], so that an expression whose errors
/// quote attributes needs no text per device.
const ERRORS_MAX: usize = 4;
/// The error of a device whose own error is not kept.
const OTHER_ERROR: &str =
    "it fails in another way than on other devices; evaluate it with the attributes of this one";

/// A set of small numbers, with one bit for each number up to the largest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Bits {
    words: Vec<u64>,
    len: usize,
}

impl Bits {
    fn contains(&self, number: usize) -> bool {
        let word = self.words.get(number / 64);
        word.is_some_and(|word| word & (1 << (number % 64)) != 0)
    }

    pub(super) fn set(&mut self, number: usize, value: bool) {
        if self.contains(number) == value {
            return;
        }
        let (place, bit) = (number / 64, 1 << (number % 64));
        if self.words.len() <= place {
            self.words.resize(place + 1, 0);
        }
        if let Some(word) = self.words.get_mut(place) {
            *word ^= bit;
        }
        self.len = if value { self.len + 1 } else { self.len - 1 };
    }

    /// The numbers in ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        self.words.iter().enumerate().flat_map(|(place, word)| {
            let bits = (0..64).filter(move |bit| word & (1 << bit) != 0);
            bits.map(move |bit| 64 * place + bit)
        })
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

/// The results of one expression, by the number of the attribute set.
#[derive(Clone, Debug, Default)]
struct Said {
    judged: Bits,
    wanted: Bits,
    errors: Vec<(Arc<str>, Bits)>,
}

impl Said {
    fn get(&self, number: usize) -> Option<Match> {
        if !self.judged.contains(number) {
            return None;
        }
        if self.wanted.contains(number) {
            return Some(Match::Yes);
        }
        let error = self.errors.iter().find(|(_, failed)| failed.contains(number));
        Some(error.map_or(Match::No, |(error, _)| Match::Failed(Arc::clone(error))))
    }

    fn put(&mut self, number: usize, said: Match) {
        self.forget(number);
        self.judged.set(number, true);
        match said {
            Match::Yes => self.wanted.set(number, true),
            Match::No => {}
            Match::Failed(error) => {
                let known = self.errors.iter().position(|(other, _)| *other == error);
                let place = known.unwrap_or_else(|| {
                    if self.errors.len() < ERRORS_MAX {
                        self.errors.push((error, Bits::default()));
                    } else if self.errors.len() == ERRORS_MAX {
                        self.errors.push((OTHER_ERROR.into(), Bits::default()));
                    }
                    self.errors.len() - 1
                });
                if let Some((_, failed)) = self.errors.get_mut(place) {
                    failed.set(number, true);
                }
            }
        }
    }

    fn forget(&mut self, number: usize) {
        self.judged.set(number, false);
        self.wanted.set(number, false);
        for (_, failed) in &mut self.errors {
            failed.set(number, false);
        }
    }
}

/// Selector results by expression and attribute set; a few bits for each pair.
#[derive(Clone, Debug, Default)]
pub struct Matches {
    /// The numbers of all attribute sets with a stored or pending result.
    numbers: Arc<BTreeMap<AttributeSet, usize>>,
    /// The reverse of `numbers`; `None` for an unused number.
    facts: Vec<Option<AttributeSet>>,
    /// Unused numbers below the largest.
    unused: Vec<usize>,
    said: BTreeMap<Arc<str>, Arc<Said>>,
}

impl Matches {
    /// The result of an expression; `None` if none is stored.
    pub fn get(&self, expression: &str, facts: &AttributeSet) -> Option<Match> {
        self.said.get(expression)?.get(*self.numbers.get(facts)?)
    }

    /// Whether the result of an expression for the attribute set with this number is stored.
    pub(super) fn is_judged(&self, expression: &str, number: usize) -> bool {
        let said = self.said.get(expression);
        said.is_some_and(|said| said.judged.contains(number))
    }

    /// The number of an attribute set. A new set gets an unused number.
    pub(super) fn number(&mut self, facts: &AttributeSet) -> usize {
        if let Some(&number) = self.numbers.get(facts) {
            return number;
        }
        let number = self.unused.pop().unwrap_or(self.facts.len());
        if self.facts.len() <= number {
            self.facts.resize(number + 1, None);
        }
        if let Some(place) = self.facts.get_mut(number) {
            *place = Some(facts.clone());
        }
        Arc::make_mut(&mut self.numbers).insert(facts.clone(), number);
        number
    }

    /// The attribute set with this number.
    pub(super) fn facts(&self, number: usize) -> Option<&AttributeSet> {
        self.facts.get(number)?.as_ref()
    }

    /// Stores results of an expression.
    pub fn put(&mut self, expression: &Arc<str>, said: impl IntoIterator<Item = (AttributeSet, Match)>) {
        let said: Vec<_> = said
            .into_iter()
            .map(|(facts, said)| (self.number(&facts), said))
            .collect();
        let known = Arc::make_mut(self.said.entry(Arc::clone(expression)).or_default());
        for (number, said) in said {
            known.put(number, said);
        }
    }

    /// Returns the results of these expressions, sharing their memory.
    #[must_use]
    pub fn some<'a>(&self, expressions: impl Iterator<Item = &'a Arc<str>>) -> Self {
        let known = expressions.filter_map(|expression| self.said.get_key_value(expression));
        Self {
            numbers: Arc::clone(&self.numbers),
            facts: Vec::new(),
            unused: Vec::new(),
            said: known
                .map(|(expression, said)| (Arc::clone(expression), Arc::clone(said)))
                .collect(),
        }
    }

    /// Removes the results of an expression.
    pub fn forget(&mut self, expression: &str) {
        self.said.remove(expression);
    }

    /// Keeps the results for these attribute sets only. Returns the numbers that have become unused.
    pub fn retain(&mut self, facts: &BTreeSet<&AttributeSet>) -> Vec<usize> {
        let gone = self.numbers.iter().filter(|(known, _)| !facts.contains(known));
        let gone: Vec<usize> = gone.map(|(_, number)| *number).collect();
        if gone.is_empty() {
            return gone;
        }
        Arc::make_mut(&mut self.numbers).retain(|known, _| facts.contains(known));
        for said in self.said.values_mut() {
            let said = Arc::make_mut(said);
            for &number in &gone {
                said.forget(number);
            }
        }
        for &number in &gone {
            if let Some(place) = self.facts.get_mut(number) {
                *place = None;
            }
        }
        self.unused.extend(&gone);
        gone
    }

    /// Number of stored results.
    pub fn len(&self) -> usize {
        self.said.values().map(|said| said.judged.len()).sum()
    }

    /// Whether no result is stored.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(value: i64) -> AttributeSet {
        [("d/x".into(), Attribute::Int(value))].into_iter().collect()
    }

    #[test]
    fn a_selector_result_is_kept_per_attribute_set() {
        let mut matches = Matches::default();
        let (first, second): (Arc<str>, Arc<str>) = ("first".into(), "second".into());
        matches.put(&first, [(facts(1), Match::Yes), (facts(2), Match::No)]);
        matches.put(&second, [(facts(1), Match::No)]);
        assert_eq!(matches.get("first", &facts(1)), Some(Match::Yes));
        assert_eq!(matches.get("first", &facts(3)), None);
        matches.forget("second");
        matches.retain(&BTreeSet::from([&facts(1)]));
        assert_eq!(matches.get("first", &facts(2)), None);
        assert_eq!((matches.len(), matches.is_empty()), (1, false));
        assert_eq!(matches.get("first", &facts(1)), Some(Match::Yes));
    }

    #[test]
    fn errors_that_differ_per_device_share_a_text() {
        let mut matches = Matches::default();
        let expression: Arc<str> = "x".into();
        let failed = |number: i64| (facts(number), Match::Failed(format!("no {number}").into()));
        matches.put(&expression, (0..100).map(failed));
        let mut texts = BTreeSet::new();
        for number in 0..100 {
            match matches.get("x", &facts(number)) {
                Some(Match::Failed(error)) => texts.insert(error),
                other => panic!("{other:?}"),
            };
        }
        assert_eq!(texts.len(), ERRORS_MAX + 1);
        assert_eq!(matches.get("x", &facts(0)), Some(Match::Failed("no 0".into())));
        // A reused number does not keep the results of its former attribute set.
        matches.retain(&BTreeSet::new());
        matches.put(&expression, [(facts(7), Match::Yes)]);
        assert_eq!(matches.get("x", &facts(7)), Some(Match::Yes));
        assert_eq!(matches.len(), 1);
    }

    #[test]
    fn a_fact_is_found_by_its_name() {
        assert_eq!(facts(7).value("d/x"), Some(&Attribute::Int(7)));
        assert_eq!(facts(7).value("d/y"), None);
        assert_ne!(facts(7), facts(8));
    }
}
