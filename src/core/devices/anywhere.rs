//! A node for claims that are allocated before anybody uses them: the one with the most free devices of the wanted kinds,
//! then the one with the lowest name.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::core::devices::allocation::suits;
use crate::core::devices::books::Books;
use crate::core::devices::errors::AllocateError;
use crate::core::devices::holdings::{Grant, State};
use crate::core::devices::judge::{Wish, census};
use crate::core::devices::unsuitable::Shortage;

impl Books {
    /// What the claims get, on the first node that can have them.
    pub(super) fn anywhere(&self, wishes: &[Wish<'_>]) -> Result<Vec<Grant>, Vec<AllocateError>> {
        let for_all = |error: AllocateError| Err(vec![error; wishes.len()]);
        // What a claim has already decides, first what is recorded, then what was granted.
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
            return self.on_node(wishes, &grant.node_name);
        }
        if let Some(granted) = held.and_then(|state| self.on_node(wishes, &state.grant()?.node_name).ok()) {
            return Ok(granted);
        }

        let kinds: BTreeSet<&str> = wishes.iter().map(|wish| wish.demand.kind()).collect();
        let Some(first) = wishes.first() else {
            return Ok(Vec::new());
        };
        let mut candidates = BTreeSet::new();
        let mut shortage = Shortage {
            kind: first.demand.kind().into(),
            ..Shortage::default()
        };
        for name in self.inventory.nodes_with(first.demand.kind()) {
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
            let census = census(&self.holdings, &self.matches, node, first.demand);
            shortage.add(&census);
            let free = self
                .available(node)
                .filter(|device| kinds.contains(&*device.kind))
                .count();
            candidates.insert((Reverse(free), name));
        }
        let fitting = candidates.iter().filter(|(Reverse(free), _)| *free > 0);
        let granted = fitting
            .map(|(_, name)| self.on_node(wishes, name))
            .find(Result::is_ok);
        if let Some(Ok(granted)) = granted {
            return Ok(granted);
        }
        if candidates.is_empty() {
            return for_all(AllocateError::Nowhere { kind: shortage.kind });
        }
        shortage.wanted = first.demand.total();
        shortage.wanted_besides = wishes.iter().skip(1).map(|wish| wish.demand.total()).sum();
        for_all(AllocateError::Exhausted {
            nodes: candidates.len(),
            shortage: Box::new(shortage),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::devices::allocate::Target;
    use crate::core::devices::allocation;
    use crate::core::devices::fixture::{DRIVER, claim, demand, node};

    /// Node `a` has three devices of kind test, `b` has four.
    fn books() -> Books {
        let mut books = Books::new(DRIVER);
        books.set_inventory("a", Some(node("a", "1", &["a1", "a2", "a3"])));
        books.set_inventory("b", Some(node("b", "2", &["b1", "b2", "b3", "b4"])));
        books
    }

    /// The device that a claim for one gets.
    fn device(books: &mut Books, uid: &str) -> Result<String, String> {
        let (claim, demand) = (&claim(uid, None), &demand("test", &[1]));
        let wish = Wish {
            claim,
            demand,
            suitable_nodes: None,
        };
        let answer = books.allocate(&[wish], Target::Anywhere).answers.remove(0);
        let allocation = answer.map_err(|error| error.to_string())?;
        let state = allocation::read(DRIVER, uid, &allocation).state;
        Ok(state.grant().unwrap().devices[0].device.clone())
    }

    #[test]
    fn anywhere_is_where_most_is_free_then_the_lowest_name_then_nowhere() {
        let mut books = books();
        let devices: Vec<String> = (0..7)
            .map(|uid| device(&mut books, &format!("u{uid}")).unwrap())
            .collect();
        assert_eq!(devices, ["b1", "a1", "b2", "a2", "b3", "a3", "b4"]);
        assert_eq!(device(&mut books, "u3"), Ok("a2".into()), "the same again");
        let exhausted = "resources exhausted on every ready node with devices of kind test (2): 7 of 7 held";
        assert_eq!(device(&mut books, "x"), Err(exhausted.into()));
        let nowhere = "no ready node has a device of kind test";
        assert_eq!(device(&mut Books::new(DRIVER), "x"), Err(nowhere.into()));
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
        let named = allocation::write(
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
            let wish = Wish {
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
