//! Which devices answer which requests: a search that finds an answer if there is one.
//!
//! Requests compete for devices, and a device answers one request. That is a matching in a bipartite graph, found with
//! augmenting paths: a request that finds no free device asks the requests that have one of its candidates to take
//! another. It needs no luck and no undo, and its work is bounded by `devices wanted x requests x candidates`.
//!
//! What a candidate is, the caller decides; selectors and equal-attribute constraints narrow the candidates of a request.

use std::collections::VecDeque;

/// Candidates looked at in one search, at most: enough for 64 devices out of 1024 by 15 requests that all get in each
/// other's way, and a few milliseconds of work.
pub const WORK_MAX: usize = 1_000_000;

/// Why a request was not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// There is no answer.
    Impossible,
    /// [`WORK_MAX`] was reached before an answer was found.
    TooMuchWork,
}

/// A growing set of requests, each answered by devices of its own. Devices are numbers below a limit.
#[derive(Clone, Debug)]
pub struct Fit {
    requests: Vec<Wanted>,
    /// The request that each device answers.
    taken: Vec<Option<usize>>,
    work: usize,
}

#[derive(Clone, Debug)]
struct Wanted {
    candidates: Vec<usize>,
    /// All candidates before this place are taken. A taken device stays taken, so it only moves forward.
    next: usize,
}

impl Fit {
    /// No request, `devices` devices.
    pub fn new(devices: usize) -> Self {
        Self {
            requests: Vec::new(),
            taken: vec![None; devices],
            work: 0,
        }
    }

    /// Adds a request for `count` of `candidates`, the preferred ones first. Earlier requests may have to take other
    /// candidates of theirs. After an error the fit is good for nothing more; try on a clone.
    pub fn add(&mut self, candidates: Vec<usize>, count: usize) -> Result<(), Unfit> {
        if candidates.len() < count {
            return Err(Unfit::Impossible);
        }
        let request = self.requests.len();
        self.requests.push(Wanted { candidates, next: 0 });
        (0..count).try_for_each(|_| self.add_one(request))
    }

    /// The devices that answer each request, in the order in which the requests were added.
    pub fn answers(&self) -> Vec<Vec<usize>> {
        let mut answers = vec![Vec::new(); self.requests.len()];
        for (device, taken) in self.taken.iter().enumerate() {
            if let Some(answer) = taken.and_then(|request| answers.get_mut(request)) {
                answer.push(device);
            }
        }
        answers
    }

    /// Gives `root` one device more, along the shortest chain of requests that take another device.
    fn add_one(&mut self, root: usize) -> Result<(), Unfit> {
        // For each request on the way: who wants which of its devices.
        let mut wanted_by: Vec<Option<(usize, usize)>> = vec![None; self.requests.len()];
        let mut queue = VecDeque::from([root]);
        while let Some(request) = queue.pop_front() {
            if let Some(device) = self.free_candidate(request)? {
                self.pass_on(root, request, device, &wanted_by);
                return Ok(());
            }
            let Some(wanted) = self.requests.get(request) else {
                continue;
            };
            self.work += wanted.candidates.len();
            for &device in &wanted.candidates {
                let Some(&Some(owner)) = self.taken.get(device) else {
                    continue;
                };
                if let Some(way) = wanted_by.get_mut(owner)
                    && owner != root
                    && way.is_none()
                {
                    *way = Some((request, device));
                    queue.push_back(owner);
                }
            }
        }
        Err(Unfit::Impossible)
    }

    fn free_candidate(&mut self, request: usize) -> Result<Option<usize>, Unfit> {
        let Some(wanted) = self.requests.get_mut(request) else {
            return Ok(None);
        };
        while let Some(&device) = wanted.candidates.get(wanted.next) {
            self.work += 1;
            if self.taken.get(device) == Some(&None) {
                break;
            }
            wanted.next += 1;
        }
        if self.work > WORK_MAX {
            return Err(Unfit::TooMuchWork);
        }
        Ok(wanted.candidates.get(wanted.next).copied())
    }

    /// `request` takes `device`, and hands what it was asked for to the one who asked, up to `root`.
    fn pass_on(&mut self, root: usize, request: usize, device: usize, wanted_by: &[Option<(usize, usize)>]) {
        let (mut request, mut device) = (request, device);
        loop {
            if let Some(taken) = self.taken.get_mut(device) {
                *taken = Some(request);
            }
            match wanted_by.get(request) {
                Some(&Some((asker, asked_for))) if request != root => (request, device) = (asker, asked_for),
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fit(devices: usize, requests: &[(&[usize], usize)]) -> Result<Vec<Vec<usize>>, Unfit> {
        let mut fit = Fit::new(devices);
        requests
            .iter()
            .try_for_each(|&(candidates, count)| fit.add(candidates.to_vec(), count))?;
        Ok(fit.answers())
    }

    #[test]
    fn the_preferred_candidates_are_taken_if_nobody_else_needs_them() {
        assert_eq!(fit(4, &[(&[3, 1, 0], 2)]), Ok(vec![vec![1, 3]]));
    }

    #[test]
    fn an_earlier_request_makes_way_for_a_later_one_that_has_no_choice() {
        let answers = fit(3, &[(&[0, 1], 1), (&[1, 2], 1), (&[0], 1)]);
        assert_eq!(answers, Ok(vec![vec![1], vec![2], vec![0]]));
    }

    #[test]
    fn too_few_devices_and_unknown_devices_are_no_answer() {
        assert_eq!(
            fit(3, &[(&[0, 1, 2], 2), (&[0, 1, 2], 2)]),
            Err(Unfit::Impossible)
        );
        assert_eq!(fit(1, &[(&[0, 5], 2)]), Err(Unfit::Impossible));
        assert_eq!(fit(0, &[(&[], 0)]), Ok(vec![vec![]]));
    }

    #[test]
    fn a_search_that_takes_too_long_gives_up() {
        let everything: Vec<usize> = (0..1024).collect();
        let mut fit = Fit::new(1024);
        let outcome = (0..1025).try_for_each(|_| fit.add(everything.clone(), 1));
        assert_eq!(outcome, Err(Unfit::TooMuchWork));
        assert!(fit.work < 2 * WORK_MAX);
    }

    /// Tries everything.
    fn possible(requests: &[(Vec<usize>, usize)], taken: &mut Vec<usize>) -> bool {
        let Some(((candidates, count), rest)) = requests.split_first() else {
            return true;
        };
        if *count == 0 {
            return possible(rest, taken);
        }
        let mut one_less = vec![(candidates.clone(), count - 1)];
        one_less.extend_from_slice(rest);
        candidates.iter().any(|device| {
            if taken.contains(device) {
                return false;
            }
            taken.push(*device);
            let found = possible(&one_less, taken);
            taken.pop();
            found
        })
    }

    proptest! {
        #[test]
        fn an_answer_is_found_exactly_if_there_is_one(
            requests in prop::collection::vec((prop::collection::btree_set(0_usize..6, 0..6), 0_usize..4), 0..5)
        ) {
            let requests: Vec<(Vec<usize>, usize)> =
                requests.into_iter().map(|(candidates, count)| (candidates.into_iter().collect(), count)).collect();
            let borrowed: Vec<(&[usize], usize)> = requests.iter().map(|(c, count)| (c.as_slice(), *count)).collect();
            match fit(6, &borrowed) {
                Ok(answers) => {
                    let mut taken = std::collections::BTreeSet::new();
                    prop_assert_eq!(answers.len(), requests.len());
                    for (answer, (candidates, count)) in answers.iter().zip(&requests) {
                        prop_assert_eq!(answer.len(), *count);
                        prop_assert!(answer.iter().all(|device| candidates.contains(device) && taken.insert(*device)));
                    }
                }
                Err(error) => {
                    prop_assert_eq!(error, Unfit::Impossible);
                    prop_assert!(!possible(&requests, &mut Vec::new()));
                }
            }
        }
    }
}
