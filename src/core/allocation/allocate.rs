//! Evaluation and allocation of claims with the device allocator, [`DeviceAllocator`].

use std::collections::BTreeMap;

use crate::api::resource::AllocationResult;
use crate::core::allocation::allocation_result::{self, claim_name};
use crate::core::allocation::allocator::DeviceAllocator;
use crate::core::allocation::anywhere::Route;
use crate::core::allocation::attribute_set::Matches;
use crate::core::allocation::errors::AllocateError;
use crate::core::allocation::evaluate::{Judged, NodeSnapshot, RequestedClaim};
use crate::core::allocation::index::{Grant, Holder, State};
use crate::core::allocation::unsuitable::Unsuitable;
use crate::core::allocation::work::{CALL_WORK_MAX, NODE_WORK_MAX, Work};

/// Where to allocate claims.
#[derive(Clone, Copy, Debug)]
pub enum Target<'a> {
    /// On the node with this name.
    Node(&'a str),
    /// On any node that the class allows: the one with the most free devices of the wanted kinds, then the lowest name.
    Anywhere,
}

/// For each claim, the nodes on which it cannot be allocated together with the claims before it, with the reason.
pub type Verdicts = Vec<BTreeMap<String, String>>;

/// The result of [`DeviceAllocator::allocate`].
#[derive(Clone, Debug, PartialEq)]
pub struct Allocated {
    /// One result per claim. Either all claims without an allocation get one, or none does.
    pub answers: Vec<Result<AllocationResult, AllocateError>>,
    /// Number of devices that have become available because a claim was moved or lost its devices.
    pub freed: usize,
}

impl DeviceAllocator {
    /// Returns the nodes on which each claim cannot be allocated together with the claims before it, with the reason.
    pub fn unsuitable_nodes(&self, wishes: &[RequestedClaim<'_>], nodes: &[String]) -> Verdicts {
        let matches = self.matches_of(wishes);
        let (mut verdicts, mut work) = (vec![BTreeMap::new(); wishes.len()], Work::new(CALL_WORK_MAX));
        for name in nodes {
            let judged = try_on(&self.scene(wishes, name), &matches, wishes, &mut work);
            add_verdict(&mut verdicts, name, &judged);
        }
        verdicts
    }

    /// Like [`DeviceAllocator::unsuitable_nodes`], with a work limit: adds the verdicts for the first of these nodes, and returns the others,
    /// starting with the one that exceeds the limit.
    pub fn verdicts<'a>(
        &self,
        wishes: &[RequestedClaim<'_>],
        nodes: &'a [String],
        verdicts: &mut Verdicts,
        work: &mut Work,
    ) -> &'a [String] {
        let matches = self.matches_of(wishes);
        let mut left = nodes;
        while let Some((name, after)) = left.split_first() {
            let judged = try_on(&self.scene(wishes, name), &matches, wishes, work);
            if work.is_spent() {
                break;
            }
            add_verdict(verdicts, name, &judged);
            left = after;
        }
        left
    }

    /// Allocates claims together and holds their devices. A claim that already holds devices on that node gets the same ones, as long as
    /// they are available; its unrecorded devices on other nodes are released.
    pub fn allocate(&mut self, wishes: &[RequestedClaim<'_>], target: Target<'_>) -> Allocated {
        match self.decide(wishes, target, &mut Work::new(CALL_WORK_MAX)) {
            Ok(grants) => self.hold(wishes, grants),
            Err(errors) => self.refuse(wishes, errors),
        }
    }

    /// Like [`DeviceAllocator::allocate`]; `None` if it exceeds the given work.
    pub fn allocate_within(
        &mut self,
        wishes: &[RequestedClaim<'_>],
        target: Target<'_>,
        work: &mut Work,
    ) -> Option<Allocated> {
        match self.decide(wishes, target, work) {
            Ok(grants) => Some(self.hold(wishes, grants)),
            Err(_) if work.is_spent() => None,
            Err(errors) => Some(self.refuse(wishes, errors)),
        }
    }

    /// Holds the devices found in a snapshot; `None` if they are no longer available.
    pub fn hold_in(
        &mut self,
        wishes: &[RequestedClaim<'_>],
        scene: &NodeSnapshot,
        judged: Judged,
    ) -> Option<Allocated> {
        if !self.still_grants(wishes, scene, &judged) {
            return None;
        }
        let grants = judged.into_iter().flatten().collect();
        Some(self.hold(wishes, grants))
    }

    fn decide(
        &self,
        wishes: &[RequestedClaim<'_>],
        target: Target<'_>,
        work: &mut Work,
    ) -> Result<Vec<Grant>, Vec<AllocateError>> {
        let route = self.route(wishes, target)?;
        let matches = self.matches_of(wishes);
        for name in route.nodes() {
            match granted(
                &route,
                name,
                try_on(&self.scene(wishes, name), &matches, wishes, work),
                wishes,
            ) {
                Some(decided) => return decided,
                None if work.is_spent() => break,
                None => {}
            }
        }
        let mut shortage = route.shortage(wishes);
        for name in route.candidates() {
            if !route.count(&self.scene(wishes, name), &matches, wishes, &mut shortage, work) {
                break;
            }
        }
        Err(route.exhausted(wishes, shortage, work))
    }

    fn hold(&mut self, wishes: &[RequestedClaim<'_>], grants: Vec<Grant>) -> Allocated {
        let mut freed = 0;
        let hold = |(wish, grant): (&RequestedClaim<'_>, Grant)| {
            let answer = allocation_result::write(&self.driver, wish.uid(), &grant)?;
            if !matches!(
                self.holdings.get(wish.uid()),
                Some(Holder {
                    state: State::Recorded(_),
                    ..
                })
            ) {
                let change = self.put(wish.claim, State::Held(grant), false);
                freed += self.available_again(&change);
            }
            Ok(answer)
        };
        let answers = wishes.iter().zip(grants).map(hold).collect();
        Allocated { answers, freed }
    }

    /// Allocates nothing, and releases unrecorded devices.
    pub fn refuse(&mut self, wishes: &[RequestedClaim<'_>], errors: Vec<AllocateError>) -> Allocated {
        let freed = wishes.iter().map(|wish| self.deallocate(wish.claim)).sum();
        Allocated {
            answers: errors.into_iter().map(Err).collect(),
            freed,
        }
    }
}

/// Evaluates claims in a snapshot with at most one node's share of the work.
pub fn try_on(
    scene: &NodeSnapshot,
    matches: &Matches,
    wishes: &[RequestedClaim<'_>],
    work: &mut Work,
) -> Judged {
    work.part(NODE_WORK_MAX, |part| scene.judge(matches, wishes, part))
}

/// Adds the reasons found for a node.
pub fn add_verdict(verdicts: &mut Verdicts, node: &str, judged: &Judged) {
    for (verdict, judged) in verdicts.iter_mut().zip(judged) {
        if let Err(reason) = judged {
            verdict.insert(node.to_owned(), reason.to_string());
        }
    }
}

/// Returns the first snapshot in which all claims fit, or else the last one.
pub fn first_fit(
    scenes: Vec<NodeSnapshot>,
    matches: &Matches,
    wishes: &[RequestedClaim<'_>],
    work: &mut Work,
) -> Option<(NodeSnapshot, Judged)> {
    let mut last = None;
    for scene in scenes {
        let judged = try_on(&scene, matches, wishes, work);
        let is_fit = judged.iter().all(Result::is_ok);
        last = Some((scene, judged));
        if is_fit {
            break;
        }
    }
    last
}

/// The final result after evaluating a node; `None` if another node may be tried.
pub fn granted(
    route: &Route,
    node: &str,
    judged: Judged,
    wishes: &[RequestedClaim<'_>],
) -> Option<Result<Vec<Grant>, Vec<AllocateError>>> {
    let misfit = wishes.iter().zip(&judged).find(|(_, judged)| judged.is_err());
    let Some((misfit, _)) = misfit else {
        return Some(Ok(judged.into_iter().flatten().collect()));
    };
    if !route.is_fixed() {
        return None;
    }
    let claim = claim_name(misfit.claim);
    let error = |judged: Result<Grant, Unsuitable>| match judged {
        Ok(_) => AllocateError::Together {
            node: node.to_owned(),
            claim: claim.clone(),
        },
        Err(why) => AllocateError::Unsuitable {
            node: node.to_owned(),
            why,
        },
    };
    Some(Err(judged.into_iter().map(error).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::crd::Mode;
    use crate::core::allocation::fixture::{DRIVER, claim, demand, inventory, node};
    use crate::core::allocation::inventory::Node;

    /// Node `a` has three devices of kind test, `b` has four, `c` has one and is not ready.
    fn books() -> DeviceAllocator {
        let mut books = DeviceAllocator::new(DRIVER);
        books.set_inventory("a", Some(node("a", "1", &["a1", "a2", "a3"])));
        books.set_inventory("b", Some(node("b", "2", &["b1", "b2", "b3", "b4"])));
        let mut stopped = inventory("c", "3", &["c1"]);
        stopped.status = None;
        books.set_inventory("c", Some(Node::read(&stopped)));
        books
    }

    fn allocate(
        books: &mut DeviceAllocator,
        wanted: &[(&str, &[u32])],
        target: Target<'_>,
    ) -> Vec<Result<String, String>> {
        let owned: Vec<_> = wanted
            .iter()
            .map(|(uid, counts)| (claim(uid, None), demand("test", counts)))
            .collect();
        let wishes: Vec<_> = owned
            .iter()
            .map(|(claim, demand)| RequestedClaim {
                claim,
                demand,
                suitable_nodes: None,
            })
            .collect();
        let answers = books.allocate(&wishes, target).answers;
        let short = |answer: Result<AllocationResult, AllocateError>| {
            let allocation = answer.map_err(|error| error.to_string())?;
            let record = allocation_result::read(DRIVER, "", &allocation);
            let grant = record.state.grant().cloned().unwrap();
            Ok(grant
                .devices
                .iter()
                .map(|device| device.device.as_str())
                .collect::<Vec<_>>()
                .join(" "))
        };
        answers.into_iter().map(short).collect()
    }

    fn verdict(books: &DeviceAllocator, wanted: &[(&str, &[u32])], node: &str) -> Vec<Option<String>> {
        let owned: Vec<_> = wanted
            .iter()
            .map(|(uid, counts)| (claim(uid, None), demand("test", counts)))
            .collect();
        let wishes: Vec<_> = owned
            .iter()
            .map(|(claim, demand)| RequestedClaim {
                claim,
                demand,
                suitable_nodes: None,
            })
            .collect();
        let verdicts = books.unsuitable_nodes(&wishes, &[node.to_owned()]);
        verdicts
            .into_iter()
            .map(|mut verdict| verdict.remove(node))
            .collect()
    }

    #[test]
    fn a_claim_gets_the_same_devices_again_if_possible() {
        let mut books = books();
        assert_eq!(
            allocate(&mut books, &[("u", &[1])], Target::Node("a")),
            [Ok("a1".into())]
        );
        assert_eq!(
            allocate(&mut books, &[("v", &[1]), ("u", &[1])], Target::Node("a")),
            [Ok("a2".into()), Ok("a1".into())]
        );
        assert_eq!(
            allocate(&mut books, &[("u", &[1])], Target::Anywhere),
            [Ok("a1".into())]
        );
        assert_eq!(
            allocate(&mut books, &[("u", &[1])], Target::Node("b")),
            [Ok("b1".into())]
        );
        assert_eq!(
            books.holdings().on_node("1").unwrap().len(),
            1,
            "what was granted elsewhere is given back"
        );
        books.set_inventory("b", Some(node("b", "2", &["b2"])));
        assert_eq!(
            allocate(&mut books, &[("u", &[1])], Target::Node("b")),
            [Ok("b2".into())],
            "b1 is gone"
        );
    }

    #[test]
    fn a_recorded_allocation_is_returned_as_it_is_and_never_moved() {
        let mut books = books();
        let (wish_claim, wanted) = (claim("u", None), demand("test", &[1]));
        let wish = RequestedClaim {
            claim: &wish_claim,
            demand: &wanted,
            suitable_nodes: None,
        };
        let first = books
            .allocate(&[wish], Target::Node("a"))
            .answers
            .remove(0)
            .unwrap();
        books.observe(&claim("u", Some(&first)), Some(&first));
        assert_eq!(
            books.allocate(&[wish], Target::Node("a")).answers,
            [Ok(first.clone())]
        );
        assert_eq!(books.allocate(&[wish], Target::Anywhere).answers, [Ok(first)]);
        let error = allocate(&mut books, &[("u", &[1])], Target::Node("b"));
        assert_eq!(
            error,
            [Err(
                "cannot allocate on node b: the claim is allocated on node a".into()
            )]
        );
        assert_eq!(
            verdict(&books, &[("u", &[1])], "b"),
            [Some("the claim is allocated on node a".into())]
        );
    }

    #[test]
    fn the_reason_counts_what_others_hold() {
        let mut books = books();
        for uid in ["u", "v", "w"] {
            assert!(allocate(&mut books, &[(uid, &[1])], Target::Node("a"))[0].is_ok());
        }
        assert_eq!(verdict(&books, &[("x", &[1])], "a"), [Some("3 of 3 held".into())]);
        assert_eq!(
            allocate(&mut books, &[("x", &[1])], Target::Node("a")),
            [Err("resources exhausted on node a: 3 of 3 held".into())]
        );
        assert_eq!(
            verdict(&books, &[("u", &[1])], "a"),
            [None],
            "it holds one itself"
        );
        assert_eq!(
            verdict(&books, &[("u", &[2])], "a"),
            [Some("2 of 3 held, 1 free, 2 wanted".into())]
        );
    }

    #[test]
    fn nodes_that_are_unknown_not_ready_or_without_the_kind_say_so() {
        let mut books = books();
        let mut other = inventory("d", "4", &["d1"]);
        other.spec.devices[0].mode = Mode::ExtendedResource;
        books.set_inventory("d", Some(Node::read(&other)));
        books.set_inventory("e", Some(node("e", "5", &[])));
        let text = |node| verdict(&books, &[("u", &[1])], node).remove(0).unwrap();
        assert_eq!(text("z"), "no inventory: drayman node does not run here");
        assert_eq!(
            text("c"),
            "inventory not ready: its companion has not reported yet"
        );
        assert_eq!(
            text("d"),
            "the devices of kind test here are not for claims: see their mode in the node's configuration"
        );
        assert_eq!(text("e"), "no device of kind test on this node");
    }

    #[test]
    fn claims_of_a_pod_are_allocated_together_or_not_at_all() {
        let mut books = books();
        let wanted: &[(&str, &[u32])] = &[("u", &[1, 1]), ("v", &[2])];
        let shortage = "3 of 3 free, 2 wanted besides 2 for the pod's other claims";
        assert_eq!(verdict(&books, wanted, "a"), [None, Some(shortage.into())]);
        let together = "not allocated, because claim ns/v of the same pod does not fit on node a";
        assert_eq!(
            allocate(&mut books, wanted, Target::Node("a")),
            [
                Err(together.into()),
                Err(format!("resources exhausted on node a: {shortage}"))
            ]
        );
        assert_eq!(books.holdings().uids().count(), 0);
        assert_eq!(
            allocate(&mut books, wanted, Target::Node("b")),
            [Ok("b1 b2".into()), Ok("b3 b4".into())]
        );
    }

    #[test]
    fn a_claim_that_fails_holds_nothing_that_is_not_recorded() {
        let mut books = books();
        allocate(&mut books, &[("u", &[3])], Target::Node("a"));
        assert!(allocate(&mut books, &[("u", &[5])], Target::Node("b"))[0].is_err());
        assert_eq!(verdict(&books, &[("v", &[3])], "a"), [None]);
    }
}
