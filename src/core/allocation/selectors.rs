//! Selector results ([`Matches`]), and the active selectors with their pending evaluations ([`ActiveSelectors`]).
//!
//! A selector depends on attributes only, so its results are stored by attribute set: they are never outdated, and equal devices are
//! evaluated once. The runtime evaluates selectors ([`crate::host`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::core::allocation::inventory::{AttributeSet, Node};

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
struct ExpressionResults {
    evaluated: Bits,
    matching: Bits,
    errors: Vec<(Arc<str>, Bits)>,
}

impl ExpressionResults {
    fn get(&self, number: usize) -> Option<Match> {
        if !self.evaluated.contains(number) {
            return None;
        }
        if self.matching.contains(number) {
            return Some(Match::Yes);
        }
        let error = self.errors.iter().find(|(_, failed)| failed.contains(number));
        Some(error.map_or(Match::No, |(error, _)| Match::Failed(Arc::clone(error))))
    }

    fn put(&mut self, number: usize, results: Match) {
        self.forget(number);
        self.evaluated.set(number, true);
        match results {
            Match::Yes => self.matching.set(number, true),
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
        self.evaluated.set(number, false);
        self.matching.set(number, false);
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
    attributes: Vec<Option<AttributeSet>>,
    /// Unused numbers below the largest.
    unused: Vec<usize>,
    results: BTreeMap<Arc<str>, Arc<ExpressionResults>>,
}

impl Matches {
    /// The result of an expression; `None` if none is stored.
    pub fn get(&self, expression: &str, attributes: &AttributeSet) -> Option<Match> {
        self.results.get(expression)?.get(*self.numbers.get(attributes)?)
    }

    /// Whether the result of an expression for the attribute set with this number is stored.
    pub(super) fn is_evaluated(&self, expression: &str, number: usize) -> bool {
        let results = self.results.get(expression);
        results.is_some_and(|results| results.evaluated.contains(number))
    }

    /// The number of an attribute set. A new set gets an unused number.
    pub(super) fn number(&mut self, attributes: &AttributeSet) -> usize {
        if let Some(&number) = self.numbers.get(attributes) {
            return number;
        }
        let number = self.unused.pop().unwrap_or(self.attributes.len());
        if self.attributes.len() <= number {
            self.attributes.resize(number + 1, None);
        }
        if let Some(place) = self.attributes.get_mut(number) {
            *place = Some(attributes.clone());
        }
        Arc::make_mut(&mut self.numbers).insert(attributes.clone(), number);
        number
    }

    /// The attribute set with this number.
    pub(super) fn attribute_set(&self, number: usize) -> Option<&AttributeSet> {
        self.attributes.get(number)?.as_ref()
    }

    /// Stores results of an expression.
    pub fn put(&mut self, expression: &Arc<str>, results: impl IntoIterator<Item = (AttributeSet, Match)>) {
        let results: Vec<_> = results
            .into_iter()
            .map(|(attributes, results)| (self.number(&attributes), results))
            .collect();
        let known = Arc::make_mut(self.results.entry(Arc::clone(expression)).or_default());
        for (number, results) in results {
            known.put(number, results);
        }
    }

    /// Returns the results of these expressions, sharing their memory.
    #[must_use]
    pub fn some<'a>(&self, expressions: impl Iterator<Item = &'a Arc<str>>) -> Self {
        let known = expressions.filter_map(|expression| self.results.get_key_value(expression));
        Self {
            numbers: Arc::clone(&self.numbers),
            attributes: Vec::new(),
            unused: Vec::new(),
            results: known
                .map(|(expression, results)| (Arc::clone(expression), Arc::clone(results)))
                .collect(),
        }
    }

    /// Removes the results of an expression.
    pub fn forget(&mut self, expression: &str) {
        self.results.remove(expression);
    }

    /// Keeps the results for these attribute sets only. Returns the numbers that have become unused.
    pub fn retain(&mut self, attributes: &BTreeSet<&AttributeSet>) -> Vec<usize> {
        let gone = self
            .numbers
            .iter()
            .filter(|(known, _)| !attributes.contains(known));
        let gone: Vec<usize> = gone.map(|(_, number)| *number).collect();
        if gone.is_empty() {
            return gone;
        }
        Arc::make_mut(&mut self.numbers).retain(|known, _| attributes.contains(known));
        for results in self.results.values_mut() {
            let results = Arc::make_mut(results);
            for &number in &gone {
                results.forget(number);
            }
        }
        for &number in &gone {
            if let Some(place) = self.attributes.get_mut(number) {
                *place = None;
            }
        }
        self.unused.extend(&gone);
        gone
    }

    /// Number of stored results.
    pub fn len(&self) -> usize {
        self.results.values().map(|results| results.evaluated.len()).sum()
    }

    /// Whether no result is stored.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The active selectors by device kind, each with the numbers of the attribute sets that it has yet to evaluate. Stored as bits, because
/// all devices can change at once, under every selector.
#[derive(Clone, Debug, Default)]
pub struct ActiveSelectors(BTreeMap<Box<str>, BTreeMap<Arc<str>, Bits>>);

impl ActiveSelectors {
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
    pub(super) fn pending(&self, kind: &str, expression: &str) -> impl Iterator<Item = usize> {
        let selectors = self.0.get(kind);
        selectors
            .and_then(|selectors| selectors.get(expression))
            .into_iter()
            .flat_map(Bits::iter)
    }

    /// The kinds and expressions with pending evaluations.
    pub fn due(&self) -> impl Iterator<Item = (&str, &Arc<str>)> {
        self.all()
            .filter(|(_, _, pending)| pending.len() > 0)
            .map(|(kind, expression, _)| (kind, expression))
    }

    /// The kinds for which an expression is active.
    pub fn kinds(&self, expression: &str) -> impl Iterator<Item = &str> {
        self.all()
            .filter(move |(_, active, _)| ***active == *expression)
            .map(|(kind, _, _)| kind)
    }

    fn all(&self) -> impl Iterator<Item = (&str, &Arc<str>, &Bits)> {
        self.0.iter().flat_map(|(kind, selectors)| {
            selectors
                .iter()
                .map(move |(expression, pending)| (&**kind, expression, pending))
        })
    }

    /// Activates an expression for a kind. `pending` are the attribute sets without a result.
    pub(super) fn begin(&mut self, kind: &str, expression: &Arc<str>, pending: impl Iterator<Item = usize>) {
        let mut bits = Bits::default();
        for number in pending {
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
            for (expression, pending) in selectors {
                if !matches.is_evaluated(expression, number) {
                    pending.set(number, true);
                }
            }
        }
    }

    /// Removes evaluations whose results are stored.
    pub(super) fn evaluated(&mut self, expression: &str, numbers: &[usize]) {
        for selectors in self.0.values_mut() {
            if let Some(pending) = selectors.get_mut(expression) {
                for &number in numbers {
                    pending.set(number, false);
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
        for pending in self.0.values_mut().flat_map(BTreeMap::values_mut) {
            for &number in gone {
                pending.set(number, false);
            }
        }
    }
}

#[cfg(test)]
mod tests;
