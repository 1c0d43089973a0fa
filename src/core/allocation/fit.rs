//! Assigns devices to requests, and finds an assignment if there is one.
//!
//! Requests compete for devices. A device serves one claim, or several if it is shared, and serves each claim once. This is a flow from
//! requests through pairs of claim and device to devices, found with augmenting paths: a request without a free device makes the requests
//! in its way take other candidates. There is no backtracking, and the work is bounded by `devices wanted x requests x candidates`.
//!
//! The caller provides the candidates. Selectors and equal-attribute constraints narrow the candidates of a request.

use std::collections::VecDeque;

use crate::core::allocation::work::Work;

/// Why no assignment was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// No assignment exists.
    Impossible,
    /// The limit of the [`Work`] was reached first.
    TooMuchWork,
}

/// A growing set of requests with the devices assigned to each. Devices are numbers below a limit.
#[derive(Clone, Debug)]
pub struct Fit {
    requests: Vec<Wanted>,
    devices: Vec<Place>,
}

#[derive(Clone, Debug)]
struct Wanted {
    claim: usize,
    candidates: Vec<usize>,
    /// No candidate before this index has room for the request, and none ever will: a full device stays full, and a claim loses a device
    /// only to another claim, when the device is full.
    next: usize,
}

/// A device with the requests that it serves: at most one per claim.
#[derive(Clone, Debug)]
struct Place {
    room: usize,
    taken: Vec<usize>,
}

impl Fit {
    /// No requests, and for each device the number of claims that it can serve.
    pub fn new(room: impl IntoIterator<Item = usize>) -> Self {
        let place = |room| Place {
            room,
            taken: Vec::new(),
        };
        Self {
            requests: Vec::new(),
            devices: room.into_iter().map(place).collect(),
        }
    }

    /// The cost of a copy, in steps.
    pub fn size(&self) -> usize {
        let candidates: usize = self.requests.iter().map(|wanted| wanted.candidates.len()).sum();
        self.devices.len() + candidates
    }

    /// Adds a request of a claim for `count` of `candidates`, which are in order of preference. Earlier requests may move to other
    /// candidates. After an error the fit must not be used any more: try on a clone.
    pub fn add(
        &mut self,
        claim: usize,
        candidates: Vec<usize>,
        count: usize,
        work: &mut Work,
    ) -> Result<(), Unfit> {
        if candidates.len() < count {
            return Err(Unfit::Impossible);
        }
        let request = self.requests.len();
        self.requests.push(Wanted {
            claim,
            candidates,
            next: 0,
        });
        (0..count).try_for_each(|_| self.add_one(request, work))
    }

    /// The devices of each request, in the order in which the requests were added.
    pub fn answers(&self) -> Vec<Vec<usize>> {
        let mut answers = vec![Vec::new(); self.requests.len()];
        for (device, place) in self.devices.iter().enumerate() {
            for &request in &place.taken {
                if let Some(answer) = answers.get_mut(request) {
                    answer.push(device);
                }
            }
        }
        answers
    }

    /// Assigns one more device to `root`, along the shortest chain of requests that move to another device.
    fn add_one(&mut self, root: usize, work: &mut Work) -> Result<(), Unfit> {
        // For each request on the path: the request that wants one of its devices, and that device.
        let mut wanted_by: Vec<Option<(usize, usize)>> = vec![None; self.requests.len()];
        let mut queue = VecDeque::from([root]);
        while let Some(request) = queue.pop_front() {
            if let Some(device) = self.candidate_with_room(request, work)? {
                self.pass_on(root, request, device, &wanted_by);
                return Ok(());
            }
            let Some(wanted) = self.requests.get(request) else {
                continue;
            };
            let mut steps = 0;
            for &device in &wanted.candidates {
                let taken = self.devices.get(device).map_or(&[][..], |place| &place.taken);
                steps += 1 + taken.len();
                // If a request of the same claim has the device, only that one is in the way; otherwise all that have it are.
                let same = taken
                    .iter()
                    .find(|&&other| self.claim(other) == Some(wanted.claim));
                for &owner in same.map_or(taken, std::slice::from_ref) {
                    if let Some(way) = wanted_by.get_mut(owner)
                        && owner != root
                        && owner != request
                        && way.is_none()
                    {
                        *way = Some((request, device));
                        queue.push_back(owner);
                    }
                }
            }
            work.spend(steps)?;
        }
        Err(Unfit::Impossible)
    }

    fn claim(&self, request: usize) -> Option<usize> {
        self.requests.get(request).map(|wanted| wanted.claim)
    }

    fn candidate_with_room(&mut self, request: usize, work: &mut Work) -> Result<Option<usize>, Unfit> {
        let Some(wanted) = self.requests.get(request) else {
            return Ok(None);
        };
        let has_room = |&device: &usize| {
            let place = self.devices.get(device);
            place.is_some_and(|place| {
                place.taken.len() < place.room
                    && !place
                        .taken
                        .iter()
                        .any(|&other| self.claim(other) == Some(wanted.claim))
            })
        };
        let without = wanted
            .candidates
            .iter()
            .skip(wanted.next)
            .take_while(|&device| !has_room(device))
            .count();
        let next = wanted.next + without;
        let found = wanted.candidates.get(next).copied();
        if let Some(wanted) = self.requests.get_mut(request) {
            wanted.next = next;
        }
        work.spend(without + 1)?;
        Ok(found)
    }

    /// Assigns `device` to `request`, whose former device goes to the request that wants it, and so on up to `root`.
    fn pass_on(&mut self, root: usize, request: usize, device: usize, wanted_by: &[Option<(usize, usize)>]) {
        let (mut request, mut device) = (request, device);
        loop {
            if let Some(place) = self.devices.get_mut(device) {
                place.taken.push(request);
            }
            match wanted_by.get(request) {
                Some(&Some((asker, asked_for))) if request != root => {
                    if let Some(place) = self.devices.get_mut(asked_for) {
                        place.taken.retain(|&other| other != request);
                    }
                    (request, device) = (asker, asked_for);
                }
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::core::allocation::work::NODE_WORK_MAX;

    fn work() -> Work {
        Work::new(NODE_WORK_MAX)
    }

    fn fit(devices: usize, requests: &[(&[usize], usize)]) -> Result<Vec<Vec<usize>>, Unfit> {
        let mut fit = Fit::new(vec![1; devices]);
        let mut add = |(claim, &(candidates, count)): (usize, &(&[usize], usize))| {
            fit.add(claim, candidates.to_vec(), count, &mut work())
        };
        requests.iter().enumerate().try_for_each(&mut add)?;
        Ok(fit.answers())
    }

    #[test]
    fn the_preferred_candidates_are_taken_if_nobody_else_needs_them() {
        assert_eq!(fit(4, &[(&[3, 1, 0], 2)]), Ok(vec![vec![1, 3]]));
    }

    #[test]
    fn an_earlier_request_yields_to_one_without_a_choice() {
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
    fn a_shared_device_answers_several_claims_and_each_of_them_once() {
        let mut fit = Fit::new([2]);
        fit.add(0, vec![0], 1, &mut work()).unwrap();
        assert_eq!(
            fit.clone().add(0, vec![0], 1, &mut work()),
            Err(Unfit::Impossible)
        );
        fit.add(1, vec![0], 1, &mut work()).unwrap();
        assert_eq!(fit.answers(), [[0], [0]]);
        assert_eq!(fit.add(2, vec![0], 1, &mut work()), Err(Unfit::Impossible));
    }

    #[test]
    fn a_search_that_takes_too_long_gives_up() {
        let everything: Vec<usize> = (0..1024).collect();
        let mut fit = Fit::new(vec![1; 1024]);
        let mut work = work();
        let outcome = (0..1025).try_for_each(|claim| fit.add(claim, everything.clone(), 1, &mut work));
        assert_eq!(outcome, Err(Unfit::TooMuchWork));
        assert!(work.done() < 2 * NODE_WORK_MAX);
    }

    type Asked = (usize, Vec<usize>, usize);

    /// Tries all assignments.
    fn possible(room: &[usize], requests: &[Asked], taken: &mut Vec<(usize, usize)>) -> bool {
        let Some(((claim, candidates, count), rest)) = requests.split_first() else {
            return true;
        };
        if *count == 0 {
            return possible(room, rest, taken);
        }
        let mut one_less = vec![(*claim, candidates.clone(), count - 1)];
        one_less.extend_from_slice(rest);
        candidates.iter().any(|&device| {
            let full = taken.iter().filter(|(_, other)| *other == device).count() >= room[device];
            if full || taken.contains(&(*claim, device)) {
                return false;
            }
            taken.push((*claim, device));
            let found = possible(room, &one_less, taken);
            taken.pop();
            found
        })
    }

    proptest! {
        #[test]
        fn an_answer_is_found_exactly_if_there_is_one(
            room in prop::collection::vec(0_usize..3, 5),
            requests in
                prop::collection::vec((0_usize..3, prop::collection::btree_set(0_usize..5, 0..5), 0_usize..4), 0..5)
        ) {
            let requests: Vec<Asked> =
                requests.into_iter().map(|(claim, set, count)| (claim, set.into_iter().collect(), count)).collect();
            let mut fit = Fit::new(room.clone());
            let mut work = work();
            let outcome =
                requests.iter().try_for_each(|(claim, set, count)| fit.add(*claim, set.clone(), *count, &mut work));
            match outcome {
                Ok(()) => {
                    let answers = fit.answers();
                    let mut taken = std::collections::BTreeSet::new();
                    let mut used = vec![0; room.len()];
                    prop_assert_eq!(answers.len(), requests.len());
                    for (answer, (claim, candidates, count)) in answers.iter().zip(&requests) {
                        prop_assert_eq!(answer.len(), *count);
                        for &device in answer {
                            prop_assert!(candidates.contains(&device) && taken.insert((*claim, device)));
                            used[device] += 1;
                            prop_assert!(used[device] <= room[device]);
                        }
                    }
                }
                Err(error) => {
                    prop_assert_eq!(error, Unfit::Impossible);
                    prop_assert!(!possible(&room, &requests, &mut Vec::new()));
                }
            }
        }
    }
}
