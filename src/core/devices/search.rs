//! Which devices answer the requests of several claims so that all constraints hold: a search that finds an answer if there
//! is one, unless that takes more than [`WORK_MAX`].
//!
//! A constraint is met by one group of devices with an equal attribute. The groups are tried one after the other, the
//! preferred ones first; once they are chosen, what is left is a [`Fit`], which decides without a guess.

use crate::core::devices::fit::{Fit, Unfit, WORK_MAX};

/// What one claim wants.
#[derive(Clone, Debug, Default)]
pub struct Ask {
    /// Of each request: the candidates, the preferred ones first, and how many of them.
    pub requests: Vec<(Vec<usize>, usize)>,
    /// What must hold between them.
    pub constraints: Vec<Equal>,
}

/// Requests whose devices are all of one group.
#[derive(Clone, Debug)]
pub struct Equal {
    /// The requests, by their place.
    pub requests: Vec<usize>,
    /// The devices of each group, in order of their numbers; the preferred groups first.
    pub groups: Vec<Vec<usize>>,
}

/// The devices that answer each request of each claim, one claim after the other. `room` is the number of claims that there
/// is room for on each device.
pub fn search(room: &[usize], asks: &[Ask]) -> Result<Vec<Vec<usize>>, Unfit> {
    let mut search = Search {
        asks,
        room: room.len(),
        work: 0,
    };
    let fit = Fit::new(room.iter().copied());
    search.claim(0, fit).map(|fit| fit.answers())
}

struct Search<'a> {
    asks: &'a [Ask],
    /// How many devices there are.
    room: usize,
    work: usize,
}

impl Search<'_> {
    fn claim(&mut self, claim: usize, fit: Fit) -> Result<Fit, Unfit> {
        match self.asks.get(claim) {
            None => Ok(fit),
            Some(ask) => self.constraint(claim, 0, &ask.requests.clone(), fit),
        }
    }

    /// Decides on the constraints of a claim from `number` on, and on everything after them. At most 8 constraints of at
    /// most 16 claims nest.
    fn constraint(
        &mut self,
        claim: usize,
        number: usize,
        requests: &[(Vec<usize>, usize)],
        fit: Fit,
    ) -> Result<Fit, Unfit> {
        let constraint = self.asks.get(claim).and_then(|ask| ask.constraints.get(number));
        let Some(constraint) = constraint.cloned() else {
            return self.fit(claim, requests, fit);
        };
        for group in &constraint.groups {
            let mut narrowed = requests.to_vec();
            let mut wanted = 0;
            for &place in &constraint.requests {
                if let Some((candidates, count)) = narrowed.get_mut(place) {
                    self.work += candidates.len();
                    candidates.retain(|device| group.binary_search(device).is_ok());
                    wanted += *count;
                }
            }
            // The copies that the next step makes.
            self.spend(1 + self.room)?;
            let enough = wanted <= group.len()
                && narrowed
                    .iter()
                    .all(|(candidates, count)| candidates.len() >= *count);
            if !enough {
                continue;
            }
            match self.constraint(claim, number + 1, &narrowed, fit.clone()) {
                Err(Unfit::Impossible) => {}
                decided => return decided,
            }
        }
        Err(Unfit::Impossible)
    }

    fn fit(&mut self, claim: usize, requests: &[(Vec<usize>, usize)], mut fit: Fit) -> Result<Fit, Unfit> {
        let before = fit.work();
        let added = requests
            .iter()
            .try_for_each(|(candidates, count)| fit.add(claim, candidates.clone(), *count));
        added?;
        self.spend(fit.work() - before)?;
        self.claim(claim + 1, fit)
    }

    /// Counts what was done on all ways together, and refuses to go on if that is too much.
    fn spend(&mut self, work: usize) -> Result<(), Unfit> {
        self.work = self.work.saturating_add(work);
        if self.work > WORK_MAX {
            return Err(Unfit::TooMuchWork);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Of each claim: its requests as candidates and counts, and its constraints as attribute and requests.
    type Claim = (Vec<(Vec<usize>, usize)>, Vec<(usize, Vec<usize>)>);
    /// Of each device: the values of two attributes.
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

    /// Whether these devices are an answer.
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
            // A constraint without any request is not one.
            let claims: Vec<Claim> = claims.into_iter().map(|(requests, constraints)| {
                (requests, constraints.into_iter().filter(|(_, named)| !named.is_empty()).collect())
            }).collect();
            let asks: Vec<Ask> = claims.iter().map(|claim| ask(&values, claim)).collect();
            match search(&room, &asks) {
                Ok(answers) => prop_assert!(holds(&room, &values, &claims, &answers), "{answers:?}"),
                Err(error) => {
                    prop_assert_eq!(error, Unfit::Impossible);
                    prop_assert!(!possible(&room, &values, &claims, &mut Vec::new()));
                }
            }
        }
    }

    #[test]
    fn a_search_with_too_many_ways_gives_up() {
        // 64 devices in 64 ways of 32 pairs: every constraint can be met, all together cannot.
        let groups: Vec<Vec<usize>> = (0..32).map(|pair| vec![2 * pair, 2 * pair + 1]).collect();
        let equal = |place| Equal {
            requests: vec![place],
            groups: groups.clone(),
        };
        let everything: Vec<usize> = (0..64).collect();
        let ask = Ask {
            requests: vec![(everything, 1); 9],
            constraints: (0..8).map(equal).collect(),
        };
        let asks = vec![ask; 8];
        assert_eq!(search(&[1; 64], &asks), Err(Unfit::TooMuchWork));
    }
}
