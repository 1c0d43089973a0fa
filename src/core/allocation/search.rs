//! Finds devices for the requests of several claims so that all constraints hold. It finds a solution if there is one, unless that takes
//! more than the given [`Work`].
//!
//! A constraint is met by one group of devices with an equal attribute. First the constraints are made as few and as small as possible, and
//! the requests are fitted without them: if that fails, there is no solution. Then the groups are tried in order of preference. Once they
//! are selected, a [`Fit`] decides the rest without guessing.

use std::collections::{BTreeMap, BTreeSet};

use crate::core::allocation::fit::{Fit, Unfit};
use crate::core::allocation::work::Work;

/// The requests of one claim.
#[derive(Clone, Debug, Default)]
pub struct Ask {
    /// For each request: the candidates, in order of preference, and the number of devices.
    pub requests: Vec<(Vec<usize>, usize)>,
    /// The constraints between the requests.
    pub constraints: Vec<Equal>,
}

/// Requests whose devices must all be in one group.
#[derive(Clone, Debug)]
pub struct Equal {
    /// Indexes of the requests.
    pub requests: Vec<usize>,
    /// The devices of each group, in ascending order; the groups are in order of preference.
    pub groups: Vec<Vec<usize>>,
}

/// Returns the devices of each request of each claim, one claim after the other. `room` is the number of claims that each device can serve.
pub fn search(room: &[usize], asks: &[Ask], work: &mut Work) -> Result<Vec<Vec<usize>>, Unfit> {
    let fit = Fit::new(room.iter().copied());
    let constrained = asks.iter().any(|ask| !ask.constraints.is_empty());
    let mut asks = asks
        .iter()
        .map(|ask| narrowed(ask, room.len(), work))
        .collect::<Result<Vec<_>, _>>()?;
    if constrained {
        let mut relaxed = fit.clone();
        for (claim, ask) in asks.iter().enumerate() {
            for (candidates, count) in &ask.requests {
                relaxed.add(claim, candidates.clone(), *count, work)?;
            }
        }
        if asks.iter().all(|ask| ask.constraints.is_empty()) {
            return Ok(relaxed.answers());
        }
        drop_equivalent_groups(room, &mut asks, work)?;
    }
    let mut search = Search { asks: &asks, work };
    search.claim(0, fit).map(|fit| fit.answers())
}

/// Removes groups that are too small, and constraints that any remaining candidates meet: those for one device, or with only one group. The
/// candidates of these constraints are sorted by group.
fn narrowed(ask: &Ask, devices: usize, work: &mut Work) -> Result<Ask, Unfit> {
    let mut requests = ask.requests.clone();
    let mut constraints = Vec::new();
    // The first constraint has the greatest influence on the order, so it sorts last.
    for constraint in ask.constraints.iter().rev() {
        let named: Vec<&(Vec<usize>, usize)> = constraint
            .requests
            .iter()
            .filter_map(|&place| requests.get(place))
            .collect();
        if named.is_empty() {
            continue;
        }
        let wanted: usize = named.iter().map(|(_, count)| count).sum();
        work.spend(devices + constraint.groups.len())?;
        let mut group_of: Vec<Option<usize>> = vec![None; devices];
        for (number, group) in constraint.groups.iter().enumerate() {
            for &device in group {
                if let Some(group_of) = group_of.get_mut(device) {
                    *group_of = Some(number);
                }
            }
        }
        let mut enough: Vec<bool> = constraint
            .groups
            .iter()
            .map(|group| wanted <= group.len())
            .collect();
        for (candidates, count) in named {
            work.spend(candidates.len() + enough.len())?;
            let mut fitting = vec![0; enough.len()];
            for &device in candidates {
                let group = group_of.get(device).copied().flatten();
                if let Some(fitting) = group.and_then(|group| fitting.get_mut(group)) {
                    *fitting += 1;
                }
            }
            for (enough, fitting) in enough.iter_mut().zip(fitting) {
                *enough &= fitting >= *count;
            }
        }
        let groups: Vec<Vec<usize>> = constraint
            .groups
            .iter()
            .zip(&enough)
            .filter(|(_, enough)| **enough)
            .map(|(group, _)| group.clone())
            .collect();
        if groups.is_empty() {
            return Err(Unfit::Impossible);
        }
        let is_needed = wanted > 1 && groups.len() > 1;
        let rank = |device: &usize| {
            let group = group_of.get(*device).copied().flatten();
            group.filter(|&group| enough.get(group) == Some(&true))
        };
        for &place in &constraint.requests {
            if let Some((candidates, _)) = requests.get_mut(place) {
                work.spend(candidates.len())?;
                candidates.retain(|device| rank(device).is_some());
                if !is_needed {
                    candidates.sort_by_key(rank);
                }
            }
        }
        if is_needed {
            let requests = constraint.requests.clone();
            constraints.push(Equal { requests, groups });
        }
    }
    constraints.reverse();
    Ok(Ask {
        requests,
        constraints,
    })
}

/// Keeps one of several equivalent groups. Groups are equivalent if each device has a counterpart with the same room, wanted by the same
/// requests, and in the same groups of all other constraints. If one of them leads to no solution, neither does another.
fn drop_equivalent_groups(room: &[usize], asks: &mut [Ask], work: &mut Work) -> Result<(), Unfit> {
    // For each device: the requests that want it, as claim and request; and its groups, as claim, constraint and group.
    let mut wanted_by: Vec<Vec<(usize, usize)>> = vec![Vec::new(); room.len()];
    let mut member_of: Vec<Vec<(usize, usize, usize)>> = vec![Vec::new(); room.len()];
    for (claim, ask) in asks.iter().enumerate() {
        for (place, (candidates, _)) in ask.requests.iter().enumerate() {
            work.spend(candidates.len())?;
            for &device in candidates {
                wanted_by
                    .get_mut(device)
                    .into_iter()
                    .for_each(|by| by.push((claim, place)));
            }
        }
        for (place, constraint) in ask.constraints.iter().enumerate() {
            for (number, group) in constraint.groups.iter().enumerate() {
                work.spend(group.len())?;
                for &device in group {
                    member_of
                        .get_mut(device)
                        .into_iter()
                        .for_each(|of| of.push((claim, place, number)));
                }
            }
        }
    }
    // Devices that differ only in the group of this constraint get the same number.
    for (claim, ask) in asks.iter_mut().enumerate() {
        for (place, constraint) in ask.constraints.iter_mut().enumerate() {
            let mut alike = BTreeMap::new();
            let mut seen = BTreeSet::new();
            let mut error = None;
            constraint.groups.retain(|group| {
                let mut marks = Vec::with_capacity(group.len());
                for &device in group {
                    let others: Vec<_> = member_of
                        .get(device)
                        .into_iter()
                        .flatten()
                        .filter(|of| (of.0, of.1) != (claim, place))
                        .collect();
                    let by = wanted_by.get(device);
                    error = error.or_else(|| work.spend(1 + others.len() + by.map_or(0, Vec::len)).err());
                    let next = alike.len();
                    marks.push(*alike.entry((room.get(device), by, others)).or_insert(next));
                }
                marks.sort_unstable();
                seen.insert(marks)
            });
            if let Some(error) = error {
                return Err(error);
            }
        }
    }
    Ok(())
}

struct Search<'a> {
    asks: &'a [Ask],
    work: &'a mut Work,
}

impl Search<'_> {
    fn claim(&mut self, claim: usize, fit: Fit) -> Result<Fit, Unfit> {
        let asks = self.asks;
        match asks.get(claim) {
            None => Ok(fit),
            Some(ask) => self.constraint(claim, 0, &ask.requests, fit),
        }
    }

    /// Decides the constraints of a claim from `number` on, and everything after them. At most 8 constraints of at most 16 claims nest.
    fn constraint(
        &mut self,
        claim: usize,
        number: usize,
        requests: &[(Vec<usize>, usize)],
        fit: Fit,
    ) -> Result<Fit, Unfit> {
        let asks = self.asks;
        let constraint = asks.get(claim).and_then(|ask| ask.constraints.get(number));
        let Some(constraint) = constraint else {
            let fit = self.fit(claim, requests, fit)?;
            return self.claim(claim + 1, fit);
        };
        for group in &constraint.groups {
            // The cost of the copies made here and in the next step.
            let copied: usize = requests.iter().map(|(candidates, _)| candidates.len()).sum();
            self.work.spend(1 + copied + fit.size())?;
            let mut narrowed = requests.to_vec();
            for &place in &constraint.requests {
                if let Some((candidates, _)) = narrowed.get_mut(place) {
                    candidates.retain(|device| group.binary_search(device).is_ok());
                }
            }
            // Fit without the remaining constraints, to give up an impossible group at once.
            let decided = self.fit(claim, &narrowed, fit.clone()).and_then(|relaxed| {
                let asked = asks.get(claim).map_or(0, |ask| ask.constraints.len());
                if number + 1 == asked {
                    self.claim(claim + 1, relaxed)
                } else {
                    self.constraint(claim, number + 1, &narrowed, fit.clone())
                }
            });
            match decided {
                Err(Unfit::Impossible) => {}
                decided => return decided,
            }
        }
        Err(Unfit::Impossible)
    }

    fn fit(&mut self, claim: usize, requests: &[(Vec<usize>, usize)], mut fit: Fit) -> Result<Fit, Unfit> {
        for (candidates, count) in requests {
            fit.add(claim, candidates.clone(), *count, self.work)?;
        }
        Ok(fit)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::core::allocation::work::NODE_WORK_MAX;

    /// A claim's requests as candidates and counts, and its constraints as attribute and requests.
    type Claim = (Vec<(Vec<usize>, usize)>, Vec<(usize, Vec<usize>)>);
    /// A device's values of two attributes.
    type Values = [Option<u8>; 2];

    fn ask(values: &[Values], (requests, constraints): &Claim) -> Ask {
        let equal = |(attribute, requests): &(usize, Vec<usize>)| {
            let mut groups: BTreeMap<u8, Vec<usize>> = BTreeMap::new();
            for (device, values) in values.iter().enumerate() {
                if let Some(value) = values[*attribute] {
                    groups.entry(value).or_default().push(device);
                }
            }
            Equal {
                requests: requests.clone(),
                groups: groups.into_values().collect(),
            }
        };
        Ask {
            requests: requests.clone(),
            constraints: constraints.iter().map(equal).collect(),
        }
    }

    /// Whether these devices are a solution.
    fn holds(room: &[usize], values: &[Values], claims: &[Claim], answers: &[Vec<usize>]) -> bool {
        let mut used = vec![0; room.len()];
        let mut answers = answers.iter();
        for (requests, constraints) in claims {
            let mine: Vec<&Vec<usize>> = answers.by_ref().take(requests.len()).collect();
            let mut all: Vec<usize> = mine.iter().copied().flatten().copied().collect();
            all.sort_unstable();
            let right = mine.iter().zip(requests).all(|(answer, (candidates, count))| {
                answer.len() == *count && answer.iter().all(|device| candidates.contains(device))
            });
            let equal = constraints.iter().all(|(attribute, requests)| {
                let mut devices = requests.iter().flat_map(|&request| mine[request]);
                let first = devices.next().map(|&device| values[device][*attribute]);
                first.is_none_or(|first| {
                    first.is_some() && devices.all(|&device| values[device][*attribute] == first)
                })
            });
            if !right || !equal || all.windows(2).any(|pair| pair[0] == pair[1]) {
                return false;
            }
            for device in all {
                used[device] += 1;
            }
        }
        used.iter().zip(room).all(|(used, room)| used <= room)
    }

    /// Tries every set of devices for every request.
    fn possible(room: &[usize], values: &[Values], claims: &[Claim], answers: &mut Vec<Vec<usize>>) -> bool {
        let all: Vec<&(Vec<usize>, usize)> = claims.iter().flat_map(|(requests, _)| requests).collect();
        let Some((candidates, count)) = all.get(answers.len()) else {
            return holds(room, values, claims, answers);
        };
        (0..1_u32 << candidates.len()).any(|set| {
            if set.count_ones() as usize != *count {
                return false;
            }
            let chosen = candidates
                .iter()
                .enumerate()
                .filter(|(bit, _)| set & (1 << bit) != 0);
            answers.push(chosen.map(|(_, device)| *device).collect());
            let found = possible(room, values, claims, answers);
            answers.pop();
            found
        })
    }

    fn claim(devices: usize) -> impl Strategy<Value = Claim> {
        let request = (prop::collection::btree_set(0..devices, 1..devices), 1_usize..3)
            .prop_map(|(candidates, count)| (candidates.into_iter().collect(), count));
        let constraint = (0_usize..2, prop::collection::btree_set(0_usize..2, 1..3));
        (
            prop::collection::vec(request, 1..3),
            prop::collection::vec(constraint, 0..3),
        )
            .prop_map(|(requests, constraints): (Vec<_>, _)| {
                let number = requests.len();
                let there = |(attribute, named): (usize, std::collections::BTreeSet<usize>)| {
                    (
                        attribute,
                        named.into_iter().filter(|&request| request < number).collect(),
                    )
                };
                (requests, constraints.into_iter().map(there).collect())
            })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

        #[test]
        fn an_answer_is_found_exactly_if_there_is_one(
            devices in prop::collection::vec((0_usize..3, prop::option::of(0_u8..2), prop::option::of(0_u8..3)), 5),
            claims in prop::collection::vec(claim(5), 1..3)
        ) {
            let room: Vec<usize> = devices.iter().map(|device| device.0).collect();
            let values: Vec<Values> = devices.iter().map(|device| [device.1, device.2]).collect();
            // Constraints without requests are dropped.
            let claims: Vec<Claim> = claims.into_iter().map(|(requests, constraints)| {
                (requests, constraints.into_iter().filter(|(_, named)| !named.is_empty()).collect())
            }).collect();
            let asks: Vec<Ask> = claims.iter().map(|claim| ask(&values, claim)).collect();
            match search(&room, &asks, &mut Work::new(NODE_WORK_MAX)) {
                Ok(answers) => prop_assert!(holds(&room, &values, &claims, &answers), "{answers:?}"),
                Err(error) => {
                    prop_assert_eq!(error, Unfit::Impossible);
                    prop_assert!(!possible(&room, &values, &claims, &mut Vec::new()));
                }
            }
        }
    }

    fn equal(requests: &[usize], groups: &[&[usize]]) -> Equal {
        Equal {
            requests: requests.to_vec(),
            groups: groups.iter().map(|group| group.to_vec()).collect(),
        }
    }

    /// The outcome, and the number of steps.
    fn searched(room: &[usize], asks: &[Ask]) -> (Result<Vec<Vec<usize>>, Unfit>, usize) {
        let mut work = Work::new(NODE_WORK_MAX);
        let outcome = search(room, asks, &mut work);
        (outcome, work.done())
    }

    #[test]
    fn a_claim_that_wants_too_many_devices_is_refused_early() {
        // Eight devices, each with its own attribute value; seven requests for one device, and one for two.
        let groups: Vec<Vec<usize>> = (0..8).map(|device| vec![device]).collect();
        let single = |place| Equal {
            requests: vec![place],
            groups: groups.clone(),
        };
        let mut requests = vec![((0..8).collect(), 1); 7];
        requests.push(((0..8).collect(), 2));
        let ask = Ask {
            requests,
            constraints: (0..7).map(single).collect(),
        };
        let (outcome, steps) = searched(&[1; 8], &[ask]);
        assert_eq!(outcome, Err(Unfit::Impossible));
        assert!(steps < 5_000, "{steps} steps");
    }

    #[test]
    fn a_constraint_over_one_device_needs_no_search() {
        let pairs: Vec<Vec<usize>> = (0..32).map(|pair| vec![2 * pair, 2 * pair + 1]).collect();
        let single = |place| Equal {
            requests: vec![place],
            groups: pairs.clone(),
        };
        let ask = Ask {
            requests: vec![((0..64).collect(), 1); 8],
            constraints: (0..8).map(single).collect(),
        };
        let (outcome, steps) = searched(&[1; 64], &vec![ask; 8]);
        assert_eq!(outcome.map(|answers| answers.len()), Ok(64));
        assert!(steps < 100_000, "{steps} steps");
    }

    #[test]
    fn groups_that_differ_in_nothing_are_tried_once() {
        // Sixteen groups of four devices each, which differ in nothing.
        let groups: Vec<Vec<usize>> = (0..16)
            .map(|group| (4 * group..4 * group + 4).collect())
            .collect();
        let mut asks = vec![Ask {
            requests: vec![((0..64).collect(), 2)],
            constraints: vec![Equal {
                requests: vec![0],
                groups,
            }],
        }];
        drop_equivalent_groups(&[1; 64], &mut asks, &mut Work::new(NODE_WORK_MAX)).unwrap();
        assert_eq!(asks[0].constraints[0].groups.len(), 1);
        // The last device has room for two claims.
        let mut room = [1; 64];
        room[63] = 2;
        let groups = (0..16)
            .map(|group| (4 * group..4 * group + 4).collect())
            .collect();
        asks[0].constraints[0].groups = groups;
        drop_equivalent_groups(&room, &mut asks, &mut Work::new(NODE_WORK_MAX)).unwrap();
        assert_eq!(asks[0].constraints[0].groups.len(), 2);
    }

    #[test]
    fn a_constraint_over_one_device_keeps_the_preferred_group() {
        let ask = Ask {
            requests: vec![(vec![0, 1, 2, 3], 1)],
            constraints: vec![equal(&[0], &[&[2, 3], &[0, 1]])],
        };
        assert_eq!(searched(&[1; 4], &[ask]).0, Ok(vec![vec![2]]));
    }

    #[test]
    fn a_search_with_too_many_ways_gives_up() {
        // Ten groups of six devices; each of eleven claims wants four devices of one group.
        let groups: Vec<Vec<usize>> = (0..10)
            .map(|group| (6 * group..6 * group + 6).collect())
            .collect();
        let ask = Ask {
            requests: vec![((0..60).collect(), 4)],
            constraints: vec![Equal {
                requests: vec![0],
                groups,
            }],
        };
        let (outcome, steps) = searched(&[1; 60], &vec![ask; 11]);
        assert_eq!(outcome, Err(Unfit::TooMuchWork));
        assert!(steps < 2 * NODE_WORK_MAX);
    }
}
