//! The state of the built-in driver: the device allocator and caches of the parameter objects.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::api::crd::{DeviceClaimParametersSpec, DeviceClassParametersSpec, REQUESTS_MAX, SELECTORS_MAX};
use crate::api::resource::{ResourceClaim, ResourceClass};
use crate::core::allocation::allocator::DeviceAllocator;
use crate::core::allocation::inventory::AttributeSet;
use crate::core::allocation::inventory::Node;
use crate::core::allocation::parameters::{
    CLAIM_PARAMETERS_KIND, CLASS_PARAMETERS_KIND, ReferenceError, claim_reference, class_reference,
};
use crate::core::allocation::parameters::{ClassParameters, DeviceRequests, ParametersError, Selector};
use crate::core::allocation::selectors::Match;
use crate::driver::DriverError;
use crate::host::selectors::{CHUNK, Refusal, Results};

/// Number of inventory changes after which results for deleted devices are dropped.
const CHANGES_MAX: usize = 1024;
/// Maximum number of different expressions in use by the objects of one namespace: as many as one object can have.
pub(crate) const NAMESPACE_EXPRESSIONS_MAX: usize = REQUESTS_MAX * SELECTORS_MAX;
/// The same limit for all namespaces together. With the stored errors, each expression takes up to seven bits per different device: this
/// is below 10 MB with 5,000 of them.
pub(crate) const EXPRESSIONS_MAX: usize = 8 * NAMESPACE_EXPRESSIONS_MAX;

/// A change of the objects of one kind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Change<K, V> {
    /// The complete list of objects.
    All(Vec<(K, V)>),
    /// An object is new or has changed.
    Set(K, V),
    /// An object is deleted.
    Gone(K),
}

/// A cache of all objects of one kind. For an unreadable object it keeps the error.
#[derive(Debug)]
pub(crate) struct Copy<K, V> {
    objects: BTreeMap<K, Result<V, String>>,
    synced: bool,
}

impl<K, V> Default for Copy<K, V> {
    fn default() -> Self {
        Self {
            objects: BTreeMap::new(),
            synced: false,
        }
    }
}

impl<K: Ord, V: PartialEq> Copy<K, V> {
    /// Applies a change. Returns how many objects are new or different; deleted objects do not count.
    #[cfg(test)]
    pub(crate) fn apply(&mut self, change: Change<K, Result<V, String>>) -> usize {
        self.apply_with(change, |_, _, _| ())
    }

    /// Like `apply`, and calls `tell` for each changed object with its key, its old value and its new value.
    fn apply_with(
        &mut self,
        change: Change<K, Result<V, String>>,
        mut tell: impl FnMut(&K, Option<&V>, Option<&V>),
    ) -> usize {
        match change {
            Change::All(objects) => {
                let before = std::mem::take(&mut self.objects);
                self.objects = objects.into_iter().collect();
                self.synced = true;
                let mut number = 0;
                for (key, value) in &self.objects {
                    let old = before.get(key);
                    if old != Some(value) {
                        number += 1;
                        tell(key, old.and_then(|old| old.as_ref().ok()), value.as_ref().ok());
                    }
                }
                for (key, old) in before.iter().filter(|(key, _)| !self.objects.contains_key(*key)) {
                    tell(key, old.as_ref().ok(), None);
                }
                number
            }
            Change::Set(key, value) => {
                let old = self.objects.get(&key);
                let same = old == Some(&value);
                if !same {
                    tell(&key, old.and_then(|old| old.as_ref().ok()), value.as_ref().ok());
                }
                self.objects.insert(key, value);
                usize::from(!same)
            }
            Change::Gone(key) => {
                if let Some(Ok(old)) = self.objects.remove(&key) {
                    tell(&key, Some(&old), None);
                }
                0
            }
        }
    }

    /// The object, or why it is unavailable. `name` is its kind, namespace and name.
    fn get(&self, key: &K, name: impl FnOnce() -> String) -> Result<&V, DriverError> {
        match self.objects.get(key) {
            Some(Ok(value)) => Ok(value),
            Some(Err(error)) => Err(ParametersError::Malformed {
                object: name(),
                error: error.clone(),
            }
            .into()),
            None if self.synced => Err(ParametersError::NotFound { object: name() }.into()),
            None => Err(DriverError::retry(
                "NotSynced",
                format!("{} is not known yet", name()),
            )),
        }
    }
}

impl From<ParametersError> for DriverError {
    fn from(error: ParametersError) -> Self {
        Self::invalid(error.reason(), error.to_string())
    }
}

impl From<ReferenceError> for DriverError {
    fn from(error: ReferenceError) -> Self {
        Self::invalid(error.reason(), error.to_string())
    }
}

#[derive(Debug)]
pub(crate) struct State {
    /// Inventory and allocations.
    pub(crate) allocator: DeviceAllocator,
    /// DeviceClassParameters by name.
    pub(crate) classes: Copy<String, DeviceClassParametersSpec>,
    /// DeviceClaimParameters by namespace and name.
    pub(crate) claims: Copy<(String, String), DeviceClaimParametersSpec>,
    /// The selectors in use.
    pub(crate) selectors: Selectors,
}

/// Delay before the first retry of an expression that was not evaluated in time; doubled with each failure.
const UNFINISHED_RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// The longest of these delays.
const MAX_UNFINISHED_RETRY_INTERVAL: Duration = Duration::from_secs(300);

/// The evaluation status of an expression.
#[derive(Debug)]
enum Known {
    Fine,
    Wrong(String),
    Unfinished {
        error: String,
        failures: u32,
        retry_at: Instant,
    },
}

/// Expressions in use.
#[derive(Debug, Default)]
pub(crate) struct Selectors {
    known: BTreeMap<Arc<str>, Known>,
    /// The objects that contain an expression, by expression and namespace. One map, because most expressions are in one namespace only.
    written: BTreeMap<(Arc<str>, Arc<str>), Written>,
    /// How many expressions of each namespace are in use.
    used: BTreeMap<Arc<str>, usize>,
    /// Inventory changes since unused results were last dropped.
    changes: usize,
}

/// An expression in the objects of one namespace.
#[derive(Debug, Default)]
struct Written {
    /// The number of objects that contain it.
    objects: usize,
    /// Whether it was requested.
    used: bool,
}

impl Selectors {
    fn written(&mut self, namespace: &str, expressions: &BTreeSet<&str>) {
        let namespace: Arc<str> = namespace.into();
        for expression in expressions {
            let key = (self.shared(expression), Arc::clone(&namespace));
            self.written.entry(key).or_default().objects += 1;
        }
    }

    /// The text of an expression, shared with the stored one if there is one.
    fn shared(&self, expression: &str) -> Arc<str> {
        let text: Arc<str> = expression.into();
        let known = self
            .namespaces(&text)
            .next()
            .map(|((known, _), _)| Arc::clone(known));
        known.unwrap_or(text)
    }

    /// The namespaces that contain an expression.
    fn namespaces(&self, expression: &Arc<str>) -> impl Iterator<Item = (&(Arc<str>, Arc<str>), &Written)> {
        let first = (Arc::clone(expression), Arc::from(""));
        let all = self.written.range(first..);
        all.take_while(move |((other, _), _)| other == expression)
    }

    fn is_written(&self, expression: &Arc<str>) -> bool {
        self.namespaces(expression).next().is_some()
    }

    /// Returns the expressions that no object contains any more.
    fn erased<'a>(&mut self, namespace: &str, expressions: &BTreeSet<&'a str>) -> Vec<&'a str> {
        let mut gone = Vec::new();
        let namespace: Arc<str> = namespace.into();
        for expression in expressions {
            let key = (Arc::from(*expression), Arc::clone(&namespace));
            let Some(written) = self.written.get_mut(&key) else {
                continue;
            };
            written.objects = written.objects.saturating_sub(1);
            if written.objects > 0 {
                continue;
            }
            if written.used
                && let Some(used) = self.used.get_mut(&namespace)
            {
                *used = used.saturating_sub(1);
                if *used == 0 {
                    self.used.remove(&namespace);
                }
            }
            self.written.remove(&key);
            if !self.is_written(&key.0) {
                self.known.remove(*expression);
                gone.push(*expression);
            }
        }
        gone
    }
}

/// Devices for which an expression is pending.
#[derive(Debug)]
pub(crate) struct Pending {
    /// The expression.
    pub(crate) expression: Arc<str>,
    /// Some of the devices.
    pub(crate) devices: Vec<AttributeSet>,
}

impl State {
    pub(crate) fn new(driver: &str) -> Self {
        Self {
            allocator: DeviceAllocator::new(driver),
            classes: Copy::default(),
            claims: Copy::default(),
            selectors: Selectors::default(),
        }
    }

    /// Marks a selector as in use, unless too many are.
    pub(crate) fn select(&mut self, selector: &Selector) -> Result<(), DriverError> {
        let (namespace, expression) = (selector.namespace(), selector.expression());
        let selectors = &mut self.selectors;
        let in_namespace = selectors.used.get(namespace).copied().unwrap_or(0);
        // Operators write the classes, so the number of expressions in user objects must not make a class fail.
        let in_all: usize = selectors
            .used
            .iter()
            .filter(|(namespace, _)| !namespace.is_empty())
            .map(|(_, used)| used)
            .sum();
        let key = (Arc::clone(expression), Arc::clone(namespace));
        let Some(written) = selectors.written.get_mut(&key) else {
            return Err(DriverError::retry(
                "NotSynced",
                format!("{} has changed meanwhile", selector.object()),
            ));
        };
        if written.used {
            return Ok(());
        }
        let is_full = in_namespace >= NAMESPACE_EXPRESSIONS_MAX;
        if !namespace.is_empty() && (is_full || in_all >= EXPRESSIONS_MAX) {
            let limit = if is_full {
                format!(
                    "the limit of {NAMESPACE_EXPRESSIONS_MAX} different expressions in use in namespace {namespace}"
                )
            } else {
                format!("the limit of {EXPRESSIONS_MAX} different expressions in use in all namespaces")
            };
            return Err(DriverError::retry(
                "TooManySelectors",
                format!(
                    "{}: {} is beyond {limit}; write the same expression in several objects, or delete DeviceClaimParameters that no claim uses",
                    selector.object(),
                    selector.label()
                ),
            ));
        }
        written.used = true;
        *selectors.used.entry(Arc::clone(namespace)).or_default() += 1;
        Ok(())
    }

    /// Applies a change of DeviceClassParameters. Returns how many objects are new or different.
    pub(crate) fn apply_classes(
        &mut self,
        change: Change<String, Result<DeviceClassParametersSpec, String>>,
    ) -> usize {
        fn expressions(spec: Option<&DeviceClassParametersSpec>) -> BTreeSet<&str> {
            let selectors = spec.into_iter().flat_map(|spec| &spec.selectors);
            selectors
                .map(|selector| selector.cel.expression.as_str())
                .collect()
        }
        let (selectors, allocator) = (&mut self.selectors, &mut self.allocator);
        self.classes.apply_with(change, |_, old, new| {
            // Add the new expressions first, so that unchanged ones keep their results.
            selectors.written("", &expressions(new));
            for expression in selectors.erased("", &expressions(old)) {
                allocator.forget_selector(expression);
            }
        })
    }

    /// Applies a change of DeviceClaimParameters. Returns how many objects are new or different.
    pub(crate) fn apply_claims(
        &mut self,
        change: Change<(String, String), Result<DeviceClaimParametersSpec, String>>,
    ) -> usize {
        fn expressions(spec: Option<&DeviceClaimParametersSpec>) -> BTreeSet<&str> {
            let requests = spec.into_iter().flat_map(|spec| &spec.requests);
            let selectors = requests.flat_map(|request| &request.selectors);
            selectors
                .map(|selector| selector.cel.expression.as_str())
                .collect()
        }
        let (selectors, allocator) = (&mut self.selectors, &mut self.allocator);
        self.claims.apply_with(change, |(namespace, _), old, new| {
            selectors.written(namespace, &expressions(new));
            for expression in selectors.erased(namespace, &expressions(old)) {
                allocator.forget_selector(expression);
            }
        })
    }

    /// Devices to evaluate before devices of `kind` can be selected by an expression; `None` if all are.
    pub(crate) fn pending(
        &mut self,
        kind: &str,
        expression: &Arc<str>,
        now: Instant,
    ) -> Result<Option<Pending>, Refusal> {
        if !self.selectors.is_written(expression) {
            return Err(Refusal::Unfinished("it is in no object any more".to_owned()));
        }
        let known = match self.selectors.known.get(expression) {
            Some(Known::Wrong(error)) => return Err(Refusal::Wrong(error.clone())),
            Some(Known::Unfinished { error, retry_at, .. }) if *retry_at > now => {
                return Err(Refusal::Unfinished(error.clone()));
            }
            Some(Known::Unfinished { .. }) | None => false,
            Some(Known::Fine) => true,
        };
        self.allocator.activate(kind, expression);
        let pending = self.allocator.pending(kind, expression);
        let devices: Vec<AttributeSet> = pending.take(CHUNK).cloned().collect();
        Ok((!known || !devices.is_empty()).then(|| Pending {
            expression: Arc::clone(expression),
            devices,
        }))
    }

    /// When an expression that was not evaluated in time is due for a retry.
    pub(crate) fn retry_at(&self, expression: &Arc<str>) -> Option<Instant> {
        match self.selectors.known.get(expression) {
            Some(Known::Unfinished { retry_at, .. }) => Some(*retry_at),
            _ => None,
        }
    }

    /// The kinds whose devices an expression selects from.
    pub(crate) fn kinds(&self, expression: &str) -> Vec<String> {
        let kinds = self.allocator.active_selectors().kinds(expression);
        kinds.map(str::to_owned).collect()
    }

    /// A kind and an expression pending for it, after inventories have changed.
    pub(crate) fn due(&self) -> Option<(String, Arc<str>)> {
        let fine = |expression| matches!(self.selectors.known.get(expression), Some(Known::Fine));
        self.allocator
            .active_selectors()
            .due()
            .find(|(_, expression)| fine(*expression))
            .map(|(kind, expression)| (kind.to_owned(), Arc::clone(expression)))
    }

    /// Records the result or the error of an evaluation. Returns how many devices match.
    pub(crate) fn evaluated(
        &mut self,
        expression: &Arc<str>,
        evaluated: Result<Results, Refusal>,
        now: Instant,
    ) -> usize {
        if !self.selectors.is_written(expression) {
            return 0;
        }
        let (results, known) = match evaluated {
            Ok(results) => (results, Known::Fine),
            Err(Refusal::Wrong(error)) => (Vec::new(), Known::Wrong(error)),
            Err(Refusal::Unfinished(error)) => {
                let failures = match self.selectors.known.get(expression) {
                    Some(Known::Unfinished { failures, .. }) => failures.saturating_add(1),
                    _ => 0,
                };
                let delay = UNFINISHED_RETRY_INTERVAL.saturating_mul(1 << failures.min(16));
                let retry_at = now + delay.min(MAX_UNFINISHED_RETRY_INTERVAL);
                let known = Known::Unfinished {
                    error,
                    failures,
                    retry_at,
                };
                (Vec::new(), known)
            }
        };
        self.selectors.known.insert(Arc::clone(expression), known);
        let matching = results
            .iter()
            .filter(|(_, results)| *results == Match::Yes)
            .count();
        self.allocator.evaluated(expression, results);
        matching
    }

    /// Applies a change of NodeInventory objects of this driver. Returns how many devices have become available.
    pub(crate) fn apply_inventories(&mut self, change: Change<String, Node>) -> usize {
        self.selectors.changes += 1;
        if self.selectors.changes >= CHANGES_MAX {
            self.selectors.changes = 0;
            self.allocator.forget_devices();
        }
        match change {
            Change::All(nodes) => self.allocator.replace_inventories(nodes.into_iter().collect()),
            Change::Set(object, node) => self.allocator.set_inventory(&object, Some(node)),
            Change::Gone(object) => self.allocator.set_inventory(&object, None),
        }
    }

    pub(crate) fn class_parameters(&self, class: &ResourceClass) -> Result<ClassParameters, DriverError> {
        let name = class_reference(class)?;
        let spec = self
            .classes
            .get(&name.to_owned(), || format!("{CLASS_PARAMETERS_KIND} {name}"))?;
        Ok(ClassParameters::check(name, spec)?)
    }

    pub(crate) fn claim_parameters(
        &self,
        claim: &ResourceClaim,
        class: &ClassParameters,
    ) -> Result<DeviceRequests, DriverError> {
        let Some(name) = claim_reference(claim)? else {
            return Ok(DeviceRequests::one(class));
        };
        let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
        let key = (namespace.to_owned(), name.to_owned());
        let spec = self
            .claims
            .get(&key, || format!("{CLAIM_PARAMETERS_KIND} {namespace}/{name}"))?;
        Ok(DeviceRequests::check(class, namespace, name, spec)?)
    }
}

#[cfg(test)]
mod tests;
