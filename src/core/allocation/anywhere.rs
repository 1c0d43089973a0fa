//! Selects a node for claims with immediate allocation: the one with the most free devices of the wanted kinds, then the one with the
//! lowest name.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::core::allocation::allocate::Target;
use crate::core::allocation::allocation_result::suits;
use crate::core::allocation::allocator::DeviceAllocator;
use crate::core::allocation::attribute_set::Matches;
use crate::core::allocation::errors::AllocateError;
use crate::core::allocation::evaluate::{NodeSnapshot, RequestedClaim};
use crate::core::allocation::index::State;
use crate::core::allocation::unsuitable::{Shortage, Unsuitable};
use crate::core::allocation::work::Work;

/// The nodes to try for claims, in order.
#[derive(Clone, Debug)]
pub struct Route {
    nodes: Vec<Box<str>>,
    /// The nodes whose devices are counted if no node fits; `None` if the node is fixed.
    candidates: Option<Vec<Box<str>>>,
}

impl Route {
    fn fixed(node: &str) -> Self {
        Self {
            nodes: vec![node.into()],
            candidates: None,
        }
    }

    /// The names of the nodes to try, in order.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        self.nodes.iter().map(|name| &**name)
    }

    /// Whether only one node is possible, so that its errors are the result.
    pub fn is_fixed(&self) -> bool {
        self.candidates.is_none()
    }

    /// The nodes whose devices are counted if no node fits.
    pub fn candidates(&self) -> impl Iterator<Item = &str> {
        self.candidates.iter().flatten().map(|name| &**name)
    }

    /// The shortage before any node is counted.
    pub fn shortage(&self, wishes: &[RequestedClaim<'_>]) -> Shortage {
        Shortage {
            kind: wishes.first().map_or("", |wish| wish.demand.kind()).to_owned(),
            wanted: wishes.first().map_or(0, |wish| wish.demand.total()),
            wanted_besides: wishes.iter().skip(1).map(|wish| wish.demand.total()).sum(),
            ..Shortage::default()
        }
    }

    /// Counts the devices of a candidate. Returns `false` if that exceeds the work limit.
    pub fn count(
        &self,
        scene: &NodeSnapshot,
        matches: &Matches,
        wishes: &[RequestedClaim<'_>],
        shortage: &mut Shortage,
        work: &mut Work,
    ) -> bool {
        let Some(first) = wishes.first() else {
            return false;
        };
        let census = scene.census(matches, first.demand, work);
        census.map(|census| shortage.add(&census)).is_ok()
    }

    /// The error of each claim if no node fits.
    pub fn exhausted(
        &self,
        wishes: &[RequestedClaim<'_>],
        shortage: Shortage,
        work: &Work,
    ) -> Vec<AllocateError> {
        let nodes = self.candidates.as_ref().map_or(0, Vec::len);
        let error = if work.is_spent() {
            AllocateError::Unsuitable {
                node: self.nodes().next().unwrap_or_default().to_owned(),
                why: Unsuitable::TooMuchWork,
            }
        } else if nodes == 0 {
            AllocateError::Nowhere { kind: shortage.kind }
        } else {
            AllocateError::Exhausted {
                nodes,
                shortage: Box::new(shortage),
            }
        };
        vec![error; wishes.len()]
    }
}

impl DeviceAllocator {
    /// The nodes to try for these claims, or the error of each claim.
    pub fn route(
        &self,
        wishes: &[RequestedClaim<'_>],
        target: Target<'_>,
    ) -> Result<Route, Vec<AllocateError>> {
        if let Target::Node(node) = target {
            return Ok(Route::fixed(node));
        }
        let for_all = |error: AllocateError| Err(vec![error; wishes.len()]);
        // An existing allocation decides: first a recorded one, then an unrecorded grant.
        let holders = wishes.iter().filter_map(|wish| self.holdings.get(wish.uid()));
        let states: Vec<&State> = holders.map(|holder| &holder.state).collect();
        let recorded = states.iter().find(|state| matches!(state, State::Recorded(_)));
        if states
            .iter()
            .any(|state| matches!(state, State::Unreadable { .. }))
        {
            return for_all(AllocateError::HoldingUnreadable);
        }
        let held = states.iter().find(|state| matches!(state, State::Held(_)));
        if let Some(grant) = recorded.and_then(|state| state.grant()) {
            return Ok(Route::fixed(&grant.node_name));
        }
        let held = held.and_then(|state| state.grant());

        let kinds: BTreeSet<&str> = wishes.iter().map(|wish| wish.demand.kind()).collect();
        let mut candidates = BTreeSet::new();
        // A node without the first claim's kind cannot serve all claims.
        let first = wishes.iter().take(1).map(|wish| wish.demand.kind());
        for name in first.flat_map(|kind| self.inventory.nodes_with(kind)) {
            let mut allowed = true;
            for wish in wishes {
                let Some(suits) = wish
                    .suitable_nodes
                    .map_or(Some(true), |selector| suits(selector, name))
                else {
                    let class = wish.claim.spec.resource_class_name.clone();
                    return for_all(AllocateError::SuitableNodesByLabel { class });
                };
                allowed &= suits;
            }
            if !allowed {
                continue;
            }
            let Some(node) = self.inventory.node(name).filter(|node| node.unready().is_none()) else {
                continue;
            };
            let free = self
                .available(node)
                .filter(|device| kinds.contains(&*device.kind))
                .count();
            candidates.insert((Reverse(free), name));
        }
        let fitting = candidates.iter().filter(|(Reverse(free), _)| *free > 0);
        let first = held.map(|grant| grant.node_name.clone());
        Ok(Route {
            nodes: first
                .into_iter()
                .chain(fitting.map(|(_, name)| Box::from(*name)))
                .collect(),
            candidates: Some(candidates.iter().map(|(_, name)| Box::from(*name)).collect()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::allocation::allocate::Target;
    use crate::core::allocation::allocation_result;
    use crate::core::allocation::fixture::{DRIVER, claim, demand, node};
    use crate::core::allocation::index::Grant;

    /// Node `a` has three devices of kind test, `b` has four.
    fn books() -> DeviceAllocator {
        let mut books = DeviceAllocator::new(DRIVER);
        books.set_inventory("a", Some(node("a", "1", &["a1", "a2", "a3"])));
        books.set_inventory("b", Some(node("b", "2", &["b1", "b2", "b3", "b4"])));
        books
    }

    /// The device allocated to a claim for one device.
    fn device(books: &mut DeviceAllocator, uid: &str) -> Result<String, String> {
        let (claim, demand) = (&claim(uid, None), &demand("test", &[1]));
        let wish = RequestedClaim {
            claim,
            demand,
            suitable_nodes: None,
        };
        let answer = books.allocate(&[wish], Target::Anywhere).answers.remove(0);
        let allocation = answer.map_err(|error| error.to_string())?;
        let state = allocation_result::read(DRIVER, uid, &allocation).state;
        Ok(state.grant().unwrap().devices[0].device.clone())
    }

    #[test]
    fn without_a_node_the_one_with_most_free_devices_is_chosen() {
        let mut books = books();
        let devices: Vec<String> = (0..7)
            .map(|uid| device(&mut books, &format!("u{uid}")).unwrap())
            .collect();
        assert_eq!(devices, ["b1", "a1", "b2", "a2", "b3", "a3", "b4"]);
        assert_eq!(device(&mut books, "u3"), Ok("a2".into()), "the same again");
        let exhausted = "resources exhausted on every ready node with devices of kind test (2): 7 of 7 held";
        assert_eq!(device(&mut books, "x"), Err(exhausted.into()));
        let nowhere = "no ready node has a device of kind test";
        assert_eq!(
            device(&mut DeviceAllocator::new(DRIVER), "x"),
            Err(nowhere.into())
        );
    }

    #[test]
    fn an_allocation_that_cannot_be_read_is_not_replaced_by_another() {
        let mut books = books();
        let unreadable = claim("u", Some(&crate::api::resource::AllocationResult::default()));
        books.observe(&unreadable, unreadable.status.allocation.as_ref());
        let error = device(&mut books, "u").unwrap_err();
        assert!(error.contains("this release cannot read"), "{error}");
        assert!(device(&mut books, "v").is_ok());
    }

    #[test]
    fn suitable_nodes_of_the_class_restrict_anywhere() {
        let mut books = books();
        let named = allocation_result::write(
            DRIVER,
            "u",
            &Grant {
                node_name: "a".into(),
                node_uid: "1".into(),
                devices: vec![],
            },
        );
        let by_name = named.unwrap().available_on_nodes.unwrap();
        let mut by_label = by_name.clone();
        by_label.node_selector_terms[0].match_expressions =
            by_label.node_selector_terms[0].match_fields.take();
        let mut anywhere = |selector| {
            let (claim, demand) = (&claim("u", None), &demand("test", &[1]));
            let wish = RequestedClaim {
                claim,
                demand,
                suitable_nodes: Some(selector),
            };
            books.allocate(&[wish], Target::Anywhere).answers.remove(0)
        };
        let error = anywhere(&by_label).unwrap_err();
        assert!(
            error.is_final()
                && error
                    .to_string()
                    .contains("works with allocationMode WaitForFirstConsumer only")
        );
        let allocation = anywhere(&by_name).unwrap();
        assert_eq!(allocation.available_on_nodes, Some(by_name));
    }
}
