//! Kubelet's record of claims (`pkg/kubelet/cm/dra/claiminfo.go`): which pods use them, and whether their driver has prepared them. It calls
//! no driver: the test cluster and the simulation do.

use std::collections::{BTreeMap, BTreeSet};

/// A claim of one driver.
#[derive(Clone, Debug)]
pub struct ClaimRecord<C> {
    /// The part of the claim that the caller keeps.
    pub claim: C,
    /// The uids of the pods that use it.
    pub pods: BTreeSet<String>,
    /// Not in the checkpoint: a kubelet that starts asks the driver again.
    prepared: bool,
}

/// The claims of a node's pods, by a key of the caller.
#[derive(Clone, Debug)]
pub struct ClaimRecords<K, C>(BTreeMap<K, ClaimRecord<C>>);

impl<K, C> Default for ClaimRecords<K, C> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord, C> ClaimRecords<K, C> {
    /// Returns all records.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &ClaimRecord<C>)> {
        self.0.iter()
    }

    /// Returns the record of a claim.
    pub fn get(&self, key: &K) -> Option<&ClaimRecord<C>> {
        self.0.get(key)
    }

    /// Returns a claim that its driver has prepared.
    pub fn prepared(&self, key: &K) -> Option<&C> {
        let record = self.0.get(key).filter(|record| record.prepared);
        record.map(|record| &record.claim)
    }

    /// Lets a pod use a prepared claim. Returns whether it is prepared; if not, its driver must be asked.
    pub fn share(&mut self, key: &K, pod: &str) -> bool {
        let Some(record) = self.0.get_mut(key).filter(|record| record.prepared) else {
            return false;
        };
        record.pods.insert(pod.to_owned());
        true
    }

    /// Records a pod's claim. It is unprepared after the pod, prepared or not.
    pub fn add(&mut self, key: K, claim: C, pod: &str) {
        let record = self.0.entry(key).or_insert_with(|| ClaimRecord {
            claim,
            pods: BTreeSet::new(),
            prepared: false,
        });
        record.pods.insert(pod.to_owned());
    }

    /// Records that the driver has prepared a claim, which is returned.
    pub fn set_prepared(&mut self, key: &K) -> Option<&mut C> {
        let record = self.0.get_mut(key)?;
        record.prepared = true;
        Some(&mut record.claim)
    }

    /// Returns the claims of a pod, and whether no other pod uses them: those are unprepared after the pod.
    pub fn of_pod(&self, pod: &str) -> impl Iterator<Item = (&K, &C, bool)> {
        let own = self.0.iter().filter(move |(_, record)| record.pods.contains(pod));
        own.map(|(key, record)| (key, &record.claim, record.pods.len() == 1))
    }

    /// Records that a pod no longer uses a claim. A claim without pods is forgotten.
    pub fn release(&mut self, key: &K, pod: &str) {
        if let Some(record) = self.0.get_mut(key) {
            record.pods.remove(pod);
            if record.pods.is_empty() {
                self.0.remove(key);
            }
        }
    }

    /// Records that a pod no longer uses any claim.
    pub fn release_all(&mut self, pod: &str) {
        self.0.retain(|_, record| {
            record.pods.remove(pod);
            !record.pods.is_empty()
        });
    }

    /// Forgets the state that the checkpoint does not contain.
    pub fn restart(&mut self) {
        for record in self.0.values_mut() {
            record.prepared = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_pod(records: &ClaimRecords<&'static str, ()>, pod: &str) -> Vec<(&'static str, bool)> {
        records.of_pod(pod).map(|(key, (), last)| (*key, last)).collect()
    }

    #[test]
    fn a_claim_is_unprepared_after_its_last_pod() {
        let mut records = ClaimRecords::default();
        records.add("c", (), "p");
        assert!(!records.share(&"c", "q"));
        assert!(records.set_prepared(&"c").is_some());
        assert!(records.share(&"c", "q"));
        assert_eq!(of_pod(&records, "p"), [("c", false)]);
        records.release(&"c", "p");
        assert_eq!(of_pod(&records, "p"), []);
        assert_eq!(of_pod(&records, "q"), [("c", true)]);
        records.release_all("q");
        assert!(records.get(&"c").is_none());
    }

    #[test]
    fn a_claim_that_was_not_prepared_belongs_to_its_pod() {
        let mut records = ClaimRecords::default();
        records.add("c", (), "p");
        assert!(records.prepared(&"c").is_none());
        assert_eq!(of_pod(&records, "p"), [("c", true)]);
    }

    #[test]
    fn a_restarted_kubelet_prepares_the_claims_of_its_pods_again() {
        let mut records = ClaimRecords::default();
        records.add("c", (), "p");
        records.set_prepared(&"c");
        records.restart();
        assert!(!records.share(&"c", "p"));
        assert_eq!(of_pod(&records, "p"), [("c", true)]);
    }
}
