//! Everything the built-in driver knows: the books and its copies of the parameter objects.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::api::crd::{DeviceClaimParametersSpec, DeviceClassParametersSpec};
use crate::api::resource::{ResourceClaim, ResourceClass};
use crate::core::devices::books::Books;
use crate::core::devices::facts::{Facts, Match};
use crate::core::devices::inventory::Node;
use crate::core::devices::parameters::{ClassParameters, Demand, ParametersError};
use crate::core::devices::reference::{
    CLAIM_PARAMETERS_KIND, CLASS_PARAMETERS_KIND, ReferenceError, claim_reference, class_reference,
};
use crate::driver::DriverError;
use crate::host::selectors::{CHUNK, Judged, Refusal};

/// Changed inventories after which what was said of devices that are gone is forgotten.
const CHANGES_MAX: usize = 1024;

/// What a watch tells about objects of one kind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Change<K, V> {
    /// These are all.
    All(Vec<(K, V)>),
    /// This one is new or has changed.
    Set(K, V),
    /// This one is gone.
    Gone(K),
}

/// A copy of all objects of one kind. An object that cannot be read is kept as the reason why.
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
    /// Takes over a change. Answers with how many objects are new or different; one that is gone helps nobody.
    pub(crate) fn apply(&mut self, change: Change<K, Result<V, String>>) -> usize {
        match change {
            Change::All(objects) => {
                let before = std::mem::take(&mut self.objects);
                self.objects = objects.into_iter().collect();
                self.synced = true;
                self.objects
                    .iter()
                    .filter(|(key, value)| before.get(*key) != Some(*value))
                    .count()
            }
            Change::Set(key, value) => {
                let same = self.objects.get(&key) == Some(&value);
                self.objects.insert(key, value);
                usize::from(!same)
            }
            Change::Gone(key) => {
                self.objects.remove(&key);
                0
            }
        }
    }

    /// The objects that can be read.
    fn values(&self) -> impl Iterator<Item = &V> {
        self.objects.values().flatten()
    }

    /// The object, or why it is not to be had. `name` is its kind, namespace and name.
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

/// Everything the built-in driver knows.
#[derive(Debug)]
pub(crate) struct State {
    /// Inventory and holdings.
    pub(crate) books: Books,
    /// DeviceClassParameters by name.
    pub(crate) classes: Copy<String, DeviceClassParametersSpec>,
    /// DeviceClaimParameters by namespace and name.
    pub(crate) claims: Copy<(String, String), DeviceClaimParametersSpec>,
    /// The selectors that somebody asked for.
    pub(crate) selectors: Selectors,
}

/// After how long an expression that was not done in time is tried again, at first; each time twice as long.
const UNFINISHED_AGAIN: Duration = Duration::from_secs(5);
/// The longest of these times.
const UNFINISHED_LONGEST: Duration = Duration::from_secs(300);

/// What is known of an expression.
#[derive(Debug)]
enum Known {
    Fine,
    Wrong(String),
    Unfinished {
        error: String,
        failures: u32,
        again: Instant,
    },
}

/// Expressions that are in use.
#[derive(Debug, Default)]
pub(crate) struct Selectors {
    known: BTreeMap<Arc<str>, Known>,
    /// Inventories that have changed since what is of no use any more was forgotten.
    changes: usize,
}

/// Devices that have to be judged by an expression.
#[derive(Debug)]
pub(crate) struct Unjudged {
    /// The expression.
    pub(crate) expression: Arc<str>,
    /// Some of the devices.
    pub(crate) devices: Vec<Facts>,
}

impl State {
    pub(crate) fn new(driver: &str) -> Self {
        Self {
            books: Books::new(driver),
            classes: Copy::default(),
            claims: Copy::default(),
            selectors: Selectors::default(),
        }
    }

    /// What has to be judged before the devices of `kind` can be chosen by an expression; `None` if everything is.
    pub(crate) fn unjudged(
        &mut self,
        kind: &str,
        expression: &Arc<str>,
        now: Instant,
    ) -> Result<Option<Unjudged>, Refusal> {
        let known = match self.selectors.known.get(expression) {
            Some(Known::Wrong(error)) => return Err(Refusal::Wrong(error.clone())),
            Some(Known::Unfinished { error, again, .. }) if *again > now => {
                return Err(Refusal::Unfinished(error.clone()));
            }
            Some(Known::Unfinished { .. }) | None => false,
            Some(Known::Fine) => true,
        };
        self.books.want(kind, expression);
        let unjudged = self.books.wanted().unjudged(kind, expression);
        let devices: Vec<Facts> = unjudged.take(CHUNK).cloned().collect();
        Ok((!known || !devices.is_empty()).then(|| Unjudged {
            expression: Arc::clone(expression),
            devices,
        }))
    }

    /// When an expression that was not done in time is to be tried again.
    pub(crate) fn again(&self, expression: &Arc<str>) -> Option<Instant> {
        match self.selectors.known.get(expression) {
            Some(Known::Unfinished { again, .. }) => Some(*again),
            _ => None,
        }
    }

    /// The kinds whose devices are judged by an expression.
    pub(crate) fn kinds(&self, expression: &str) -> Vec<String> {
        let kinds = self.books.wanted().kinds(expression);
        kinds.map(str::to_owned).collect()
    }

    /// A kind and an expression that its devices still have to be judged by, after inventories have changed.
    pub(crate) fn due(&self) -> Option<(String, Arc<str>)> {
        let fine = |expression| matches!(self.selectors.known.get(expression), Some(Known::Fine));
        self.books
            .wanted()
            .due()
            .find(|(_, expression)| fine(*expression))
            .map(|(kind, expression)| (kind.to_owned(), Arc::clone(expression)))
    }

    /// Takes note of what an expression says, or of what is wrong with it. Answers with how many of them it wants.
    pub(crate) fn judged(
        &mut self,
        expression: &Arc<str>,
        judged: Result<Judged, Refusal>,
        now: Instant,
    ) -> usize {
        let (said, known) = match judged {
            Ok(said) => (said, Known::Fine),
            Err(Refusal::Wrong(error)) => (Vec::new(), Known::Wrong(error)),
            Err(Refusal::Unfinished(error)) => {
                let failures = match self.selectors.known.get(expression) {
                    Some(Known::Unfinished { failures, .. }) => failures.saturating_add(1),
                    _ => 0,
                };
                let delay = UNFINISHED_AGAIN.saturating_mul(1 << failures.min(16));
                let again = now + delay.min(UNFINISHED_LONGEST);
                let known = Known::Unfinished {
                    error,
                    failures,
                    again,
                };
                (Vec::new(), known)
            }
        };
        self.selectors.known.insert(Arc::clone(expression), known);
        let wanted = said.iter().filter(|(_, said)| *said == Match::Yes).count();
        self.books.judged(expression, said);
        wanted
    }

    /// Forgets the selectors that are in no object any more.
    pub(crate) fn forget_selectors(&mut self) {
        if self.selectors.known.is_empty() {
            return;
        }
        let classes = self.classes.values().flat_map(|spec| &spec.selectors);
        let requests = self.claims.values().flat_map(|spec| &spec.requests);
        let all = classes.chain(requests.flat_map(|request| &request.selectors));
        let written: BTreeSet<&str> = all.map(|selector| selector.cel.expression.as_str()).collect();
        let before = self.selectors.known.len();
        self.selectors
            .known
            .retain(|expression, _| written.contains(&**expression));
        if self.selectors.known.len() < before {
            self.books
                .retain_selectors(|expression| written.contains(expression));
        }
    }

    /// Takes over a change of NodeInventory objects of this driver. Answers with how many devices have become available.
    pub(crate) fn apply_inventories(&mut self, change: Change<String, Node>) -> usize {
        self.selectors.changes += 1;
        if self.selectors.changes >= CHANGES_MAX {
            self.selectors.changes = 0;
            self.books.retain_selectors(|_| true);
        }
        match change {
            Change::All(nodes) => self.books.replace_inventories(nodes.into_iter().collect()),
            Change::Set(object, node) => self.books.set_inventory(&object, Some(node)),
            Change::Gone(object) => self.books.set_inventory(&object, None),
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
    ) -> Result<Demand, DriverError> {
        let Some(name) = claim_reference(claim)? else {
            return Ok(Demand::one(class));
        };
        let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
        let key = (namespace.to_owned(), name.to_owned());
        let spec = self
            .claims
            .get(&key, || format!("{CLAIM_PARAMETERS_KIND} {namespace}/{name}"))?;
        Ok(Demand::check(class, namespace, name, spec)?)
    }
}

#[cfg(test)]
mod tests;
