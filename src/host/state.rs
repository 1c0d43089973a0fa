//! Everything the built-in driver knows: the books and its copies of the parameter objects.

use std::collections::BTreeMap;

use crate::api::crd::{DeviceClaimParametersSpec, DeviceClassParametersSpec};
use crate::api::resource::{ResourceClaim, ResourceClass};
use crate::core::devices::books::Books;
use crate::core::devices::inventory::Node;
use crate::core::devices::parameters::{ClassParameters, Demand, ParametersError};
use crate::core::devices::reference::{
    CLAIM_PARAMETERS_KIND, CLASS_PARAMETERS_KIND, ReferenceError, claim_reference, class_reference,
};
use crate::driver::DriverError;

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
}

impl State {
    pub(crate) fn new(driver: &str) -> Self {
        Self {
            books: Books::new(driver),
            classes: Copy::default(),
            claims: Copy::default(),
        }
    }

    /// Takes over a change of NodeInventory objects of this driver. Answers with how many devices have become available.
    pub(crate) fn apply_inventories(&mut self, change: Change<String, Node>) -> usize {
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
mod tests {
    use super::*;
    use crate::api::crd::{DeviceRequest, GROUP};
    use crate::api::resource::{ResourceClaimParametersReference, ResourceClassParametersReference};
    use crate::core::devices::fixture;
    use crate::driver::DriverErrorKind;

    fn class() -> ResourceClass {
        let reference = ResourceClassParametersReference {
            api_group: Some(GROUP.into()),
            kind: CLASS_PARAMETERS_KIND.into(),
            name: "p".into(),
            namespace: None,
        };
        ResourceClass {
            parameters_ref: Some(reference),
            ..ResourceClass::default()
        }
    }

    fn claim() -> ResourceClaim {
        let mut claim = fixture::claim("u", None);
        claim.spec.parameters_ref = Some(ResourceClaimParametersReference {
            api_group: Some(GROUP.into()),
            kind: CLAIM_PARAMETERS_KIND.into(),
            name: "p".into(),
        });
        claim
    }

    fn spec(kind: &str) -> DeviceClassParametersSpec {
        DeviceClassParametersSpec { kind: kind.into() }
    }

    #[test]
    fn parameters_that_are_missing_are_named_once_it_is_certain_that_they_are() {
        let mut state = State::new(fixture::DRIVER);
        let error = state.class_parameters(&class()).unwrap_err();
        assert_eq!((error.kind, error.reason), (DriverErrorKind::Retry, "NotSynced"));
        state.classes.apply(Change::All(vec![]));
        state.claims.apply(Change::All(vec![]));
        let error = state.class_parameters(&class()).unwrap_err();
        assert_eq!(
            (error.kind, error.reason),
            (DriverErrorKind::Invalid, "ParametersNotFound")
        );
        assert_eq!(error.message, "DeviceClassParameters p does not exist; create it");
        let error = state
            .claim_parameters(&claim(), &fixture::class("test"))
            .unwrap_err();
        assert_eq!(
            error.message,
            "DeviceClaimParameters ns/p does not exist; create it"
        );
    }

    #[test]
    fn an_object_that_cannot_be_read_is_a_reason_and_not_the_end_of_the_watch() {
        let mut state = State::new(fixture::DRIVER);
        state.classes.apply(Change::All(vec![(
            "p".into(),
            Err("unknown field `knid`".into()),
        )]));
        let error = state.class_parameters(&class()).unwrap_err();
        assert_eq!(
            error.message,
            "DeviceClassParameters p cannot be read: unknown field `knid`; correct it"
        );
        state
            .classes
            .apply(Change::Set("p".into(), Ok(spec("Not A Label"))));
        assert_eq!(
            state.class_parameters(&class()).unwrap_err().reason,
            "ParametersInvalid"
        );
        state.classes.apply(Change::Set("p".into(), Ok(spec("test"))));
        assert_eq!(state.class_parameters(&class()).unwrap().kind(), "test");
    }

    #[test]
    fn a_claim_wants_what_its_parameters_in_its_own_namespace_say() {
        let mut state = State::new(fixture::DRIVER);
        let requests = |count| DeviceClaimParametersSpec {
            requests: vec![DeviceRequest {
                name: "r".into(),
                count,
            }],
        };
        let entry = |namespace: &str, count| ((namespace.to_owned(), "p".to_owned()), Ok(requests(count)));
        state
            .claims
            .apply(Change::All(vec![entry("another", 1), entry("ns", 3)]));
        assert_eq!(
            state
                .claim_parameters(&claim(), &fixture::class("test"))
                .unwrap()
                .total(),
            3
        );
        let plain = fixture::claim("u", None);
        assert_eq!(
            state
                .claim_parameters(&plain, &fixture::class("test"))
                .unwrap()
                .total(),
            1
        );
    }

    #[test]
    fn only_what_is_new_or_different_can_help_somebody() {
        let mut copy: Copy<String, u8> = Copy::default();
        assert_eq!(
            copy.apply(Change::All(vec![("a".into(), Ok(1)), ("b".into(), Ok(1))])),
            2
        );
        assert_eq!(copy.apply(Change::Set("a".into(), Ok(1))), 0);
        assert_eq!(copy.apply(Change::Set("a".into(), Ok(2))), 1);
        assert_eq!(copy.apply(Change::Gone("b".into())), 0);
        assert_eq!(
            copy.apply(Change::All(vec![("a".into(), Ok(2)), ("b".into(), Ok(1))])),
            1
        );
    }
}
