//! What is asked of the [`Books`]: where claims do not fit, and to allocate them.

use std::collections::BTreeMap;

use crate::api::resource::AllocationResult;
use crate::core::devices::allocation::{self, claim_name};
use crate::core::devices::books::Books;
use crate::core::devices::errors::AllocateError;
use crate::core::devices::holdings::{Grant, Holder, State};
use crate::core::devices::judge::{Wish, judge};
use crate::core::devices::unsuitable::Unsuitable;

/// Where claims shall be allocated.
#[derive(Clone, Copy, Debug)]
pub enum Target<'a> {
    /// On this node.
    Node(&'a str),
    /// Anywhere that the class allows: on the node with the most free devices of the wanted kinds, then the lowest name.
    Anywhere,
}

/// The answer to [`Books::allocate`].
#[derive(Clone, Debug, PartialEq)]
pub struct Allocated {
    /// One result per claim. Either all claims that held nothing get something, or none.
    pub answers: Vec<Result<AllocationResult, AllocateError>>,
    /// Devices that have become available, because a claim was moved or lost what it held.
    pub freed: usize,
}

impl Books {
    /// The reason for each node on which a claim cannot be allocated together with those before it.
    pub fn unsuitable_nodes(&self, wishes: &[Wish<'_>], nodes: &[String]) -> Vec<BTreeMap<String, String>> {
        let mut verdicts = vec![BTreeMap::new(); wishes.len()];
        for node in nodes {
            let judged = judge(&self.inventory, &self.holdings, &self.matches, node, wishes);
            for (verdict, judged) in verdicts.iter_mut().zip(judged) {
                if let Err(reason) = judged {
                    verdict.insert(node.clone(), reason.to_string());
                }
            }
        }
        verdicts
    }

    /// Allocates claims together and holds what they get. A claim that holds something on that node already gets the same,
    /// as long as it is still to be had; what it was granted elsewhere and is not recorded is given back.
    pub fn allocate(&mut self, wishes: &[Wish<'_>], target: Target<'_>) -> Allocated {
        let granted = match target {
            Target::Node(node) => self.on_node(wishes, node),
            Target::Anywhere => self.anywhere(wishes),
        };
        let mut freed = 0;
        let granted: Vec<Result<Grant, AllocateError>> = match granted {
            Ok(grants) => grants.into_iter().map(Ok).collect(),
            Err(errors) => {
                freed += wishes
                    .iter()
                    .map(|wish| self.deallocate(wish.claim))
                    .sum::<usize>();
                errors.into_iter().map(Err).collect()
            }
        };
        let hold = |(wish, granted): (&Wish<'_>, Result<Grant, AllocateError>)| {
            let grant = granted?;
            let answer = allocation::write(&self.driver, wish.uid(), &grant)?;
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
        let answers = wishes.iter().zip(granted).map(hold).collect();
        Allocated { answers, freed }
    }

    pub(super) fn on_node(&self, wishes: &[Wish<'_>], node: &str) -> Result<Vec<Grant>, Vec<AllocateError>> {
        let judged = judge(&self.inventory, &self.holdings, &self.matches, node, wishes);
        let misfit = wishes.iter().zip(&judged).find(|(_, judged)| judged.is_err());
        let Some((misfit, _)) = misfit else {
            return Ok(judged.into_iter().flatten().collect());
        };
        let (node, claim) = (node.to_owned(), claim_name(misfit.claim));
        let error = |judged: Result<Grant, Unsuitable>| match judged {
            Ok(_) => AllocateError::Together {
                node: node.clone(),
                claim: claim.clone(),
            },
            Err(why) => AllocateError::Unsuitable {
                node: node.clone(),
                why,
            },
        };
        Err(judged.into_iter().map(error).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::crd::Mode;
    use crate::core::devices::fixture::{DRIVER, claim, demand, inventory, node};
    use crate::core::devices::inventory::Node;

    /// Node `a` has three devices of kind test, `b` has four, `c` has one and is not ready.
    fn books() -> Books {
        let mut books = Books::new(DRIVER);
        books.set_inventory("a", Some(node("a", "1", &["a1", "a2", "a3"])));
        books.set_inventory("b", Some(node("b", "2", &["b1", "b2", "b3", "b4"])));
        let mut stopped = inventory("c", "3", &["c1"]);
        stopped.status = None;
        books.set_inventory("c", Some(Node::read(&stopped)));
        books
    }

    fn allocate(
        books: &mut Books,
        wanted: &[(&str, &[u32])],
        target: Target<'_>,
    ) -> Vec<Result<String, String>> {
        let owned: Vec<_> = wanted
            .iter()
            .map(|(uid, counts)| (claim(uid, None), demand("test", counts)))
            .collect();
        let wishes: Vec<_> = owned
            .iter()
            .map(|(claim, demand)| Wish {
                claim,
                demand,
                suitable_nodes: None,
            })
            .collect();
        let answers = books.allocate(&wishes, target).answers;
        let short = |answer: Result<AllocationResult, AllocateError>| {
            let allocation = answer.map_err(|error| error.to_string())?;
            let record = allocation::read(DRIVER, "", &allocation);
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

    fn verdict(books: &Books, wanted: &[(&str, &[u32])], node: &str) -> Vec<Option<String>> {
        let owned: Vec<_> = wanted
            .iter()
            .map(|(uid, counts)| (claim(uid, None), demand("test", counts)))
            .collect();
        let wishes: Vec<_> = owned
            .iter()
            .map(|(claim, demand)| Wish {
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
    fn a_claim_gets_the_same_again_and_something_else_only_if_it_must() {
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
        let wish = Wish {
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
    fn claims_of_one_pod_are_judged_and_allocated_together_or_not_at_all() {
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
