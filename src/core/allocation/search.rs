//! Finds devices for the requests of several claims so that all constraints hold. It finds a solution if there is one, unless that takes
//! more than the given [`WorkBudget`].
//!
//! A constraint is met by one group of devices with an equal attribute. First the constraints are made as few and as small as possible, and
//! the requests are fitted without them: if that fails, there is no solution. Then the groups are tried in order of preference. Once they
//! are selected, a [`Fit`] decides the rest without guessing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

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
pub fn search(room: &[usize], asks: &[Ask], work: &mut WorkBudget) -> Result<Vec<Vec<usize>>, Unfit> {
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
    let mut search = GroupSearch { asks: &asks, work };
    search.claim(0, fit).map(|fit| fit.answers())
}

/// Removes groups that are too small, and constraints that any remaining candidates meet: those for one device, or with only one group. The
/// candidates of these constraints are sorted by group.
fn narrowed(ask: &Ask, devices: usize, work: &mut WorkBudget) -> Result<Ask, Unfit> {
    let mut requests = ask.requests.clone();
    let mut constraints = Vec::new();
    // The first constraint has the greatest influence on the order, so it sorts last.
    for constraint in ask.constraints.iter().rev() {
        let named: Vec<&(Vec<usize>, usize)> = constraint
            .requests
            .iter()
            .filter_map(|&index| requests.get(index))
            .collect();
        if named.is_empty() {
            continue;
        }
        let requested_count: usize = named.iter().map(|(_, count)| count).sum();
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
            .map(|group| requested_count <= group.len())
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
        let is_needed = requested_count > 1 && groups.len() > 1;
        let rank = |device: &usize| {
            let group = group_of.get(*device).copied().flatten();
            group.filter(|&group| enough.get(group) == Some(&true))
        };
        for &index in &constraint.requests {
            if let Some((candidates, _)) = requests.get_mut(index) {
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

/// Keeps one of several equivalent groups. Groups are equivalent if each device has a counterpart with the same room, in the same
/// requests, and in the same groups of all other constraints. If one of them leads to no solution, neither does another.
fn drop_equivalent_groups(room: &[usize], asks: &mut [Ask], work: &mut WorkBudget) -> Result<(), Unfit> {
    // For each device: the requests that include it, as claim and request; and its groups, as claim, constraint and group.
    let mut requested_by: Vec<Vec<(usize, usize)>> = vec![Vec::new(); room.len()];
    let mut member_of: Vec<Vec<(usize, usize, usize)>> = vec![Vec::new(); room.len()];
    for (claim, ask) in asks.iter().enumerate() {
        for (index, (candidates, _)) in ask.requests.iter().enumerate() {
            work.spend(candidates.len())?;
            for &device in candidates {
                requested_by
                    .get_mut(device)
                    .into_iter()
                    .for_each(|by| by.push((claim, index)));
            }
        }
        for (index, constraint) in ask.constraints.iter().enumerate() {
            for (number, group) in constraint.groups.iter().enumerate() {
                work.spend(group.len())?;
                for &device in group {
                    member_of
                        .get_mut(device)
                        .into_iter()
                        .for_each(|of| of.push((claim, index, number)));
                }
            }
        }
    }
    // Devices that differ only in the group of this constraint get the same number.
    for (claim, ask) in asks.iter_mut().enumerate() {
        for (index, constraint) in ask.constraints.iter_mut().enumerate() {
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
                        .filter(|of| (of.0, of.1) != (claim, index))
                        .collect();
                    let by = requested_by.get(device);
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

struct GroupSearch<'a> {
    asks: &'a [Ask],
    work: &'a mut WorkBudget,
}

impl GroupSearch<'_> {
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
            for &index in &constraint.requests {
                if let Some((candidates, _)) = narrowed.get_mut(index) {
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

/// Why no assignment was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// No assignment exists.
    Impossible,
    /// The limit of the [`WorkBudget`] was reached first.
    TooMuchWork,
}

/// A growing set of requests with the devices assigned to each. Devices are numbers below a limit.
#[derive(Clone, Debug)]
pub struct Fit {
    requests: Vec<RequestCandidates>,
    devices: Vec<DeviceAssignments>,
}

#[derive(Clone, Debug)]
struct RequestCandidates {
    claim: usize,
    candidates: Vec<usize>,
    /// No candidate before this index has room for the request, and none ever will: a full device stays full, and a claim loses a device
    /// only to another claim, when the device is full.
    next: usize,
}

/// A device with the requests that it serves: at most one per claim.
#[derive(Clone, Debug)]
struct DeviceAssignments {
    room: usize,
    taken: Vec<usize>,
}

impl Fit {
    /// No requests, and for each device the number of claims that it can serve.
    pub fn new(room: impl IntoIterator<Item = usize>) -> Self {
        let device = |room| DeviceAssignments {
            room,
            taken: Vec::new(),
        };
        Self {
            requests: Vec::new(),
            devices: room.into_iter().map(device).collect(),
        }
    }

    /// The cost of a copy, in steps.
    pub fn size(&self) -> usize {
        let candidates: usize = self.requests.iter().map(|entry| entry.candidates.len()).sum();
        self.devices.len() + candidates
    }

    /// Adds a request of a claim for `count` of `candidates`, which are in order of preference. Earlier requests may move to other
    /// candidates. After an error the fit must not be used any more: try on a clone.
    pub fn add(
        &mut self,
        claim: usize,
        candidates: Vec<usize>,
        count: usize,
        work: &mut WorkBudget,
    ) -> Result<(), Unfit> {
        if candidates.len() < count {
            return Err(Unfit::Impossible);
        }
        let request = self.requests.len();
        self.requests.push(RequestCandidates {
            claim,
            candidates,
            next: 0,
        });
        (0..count).try_for_each(|_| self.add_one(request, work))
    }

    /// The devices of each request, in the order in which the requests were added.
    pub fn answers(&self) -> Vec<Vec<usize>> {
        let mut answers = vec![Vec::new(); self.requests.len()];
        for (device, assignments) in self.devices.iter().enumerate() {
            for &request in &assignments.taken {
                if let Some(answer) = answers.get_mut(request) {
                    answer.push(device);
                }
            }
        }
        answers
    }

    /// Assigns one more device to `root`, along the shortest chain of requests that move to another device.
    fn add_one(&mut self, root: usize, work: &mut WorkBudget) -> Result<(), Unfit> {
        // For each request on the path: the request that takes one of its devices, and that device.
        let mut taken_by: Vec<Option<(usize, usize)>> = vec![None; self.requests.len()];
        let mut queue = VecDeque::from([root]);
        while let Some(request) = queue.pop_front() {
            if let Some(device) = self.candidate_with_room(request, work)? {
                self.pass_on(root, request, device, &taken_by);
                return Ok(());
            }
            let Some(entry) = self.requests.get(request) else {
                continue;
            };
            let mut steps = 0;
            for &device in &entry.candidates {
                let taken = self
                    .devices
                    .get(device)
                    .map_or(&[][..], |assignments| &assignments.taken);
                steps += 1 + taken.len();
                // If a request of the same claim has the device, only that one is in the way; otherwise all that have it are.
                let same = taken
                    .iter()
                    .find(|&&other| self.claim(other) == Some(entry.claim));
                for &owner in same.map_or(taken, std::slice::from_ref) {
                    if let Some(way) = taken_by.get_mut(owner)
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
        self.requests.get(request).map(|entry| entry.claim)
    }

    fn candidate_with_room(&mut self, request: usize, work: &mut WorkBudget) -> Result<Option<usize>, Unfit> {
        let Some(entry) = self.requests.get(request) else {
            return Ok(None);
        };
        let has_room = |&device: &usize| {
            let assignments = self.devices.get(device);
            assignments.is_some_and(|assignments| {
                assignments.taken.len() < assignments.room
                    && !assignments
                        .taken
                        .iter()
                        .any(|&other| self.claim(other) == Some(entry.claim))
            })
        };
        let without = entry
            .candidates
            .iter()
            .skip(entry.next)
            .take_while(|&device| !has_room(device))
            .count();
        let next = entry.next + without;
        let found = entry.candidates.get(next).copied();
        if let Some(entry) = self.requests.get_mut(request) {
            entry.next = next;
        }
        work.spend(without + 1)?;
        Ok(found)
    }

    /// Assigns `device` to `request`, whose previous device goes to the request that takes it, and so on up to `root`.
    fn pass_on(&mut self, root: usize, request: usize, device: usize, taken_by: &[Option<(usize, usize)>]) {
        let (mut request, mut device) = (request, device);
        loop {
            if let Some(assignments) = self.devices.get_mut(device) {
                assignments.taken.push(request);
            }
            match taken_by.get(request) {
                Some(&Some((asker, asked_for))) if request != root => {
                    if let Some(assignments) = self.devices.get_mut(asked_for) {
                        assignments.taken.retain(|&other| other != request);
                    }
                    (request, device) = (asker, asked_for);
                }
                _ => return,
            }
        }
    }
}

/// Maximum steps for one node: enough for 64 out of 1024 devices by 15 requests that all compete, and less than a tenth of a second.
pub const NODE_WORK_MAX: usize = 1_000_000;
/// Maximum steps for all nodes and claims of one driver call: eight nodes of the hardest kind, or 128 nodes with some hundred devices each.
/// This takes less than a second, during which the searches of other pods wait.
pub const CALL_WORK_MAX: usize = 8_000_000;
/// Maximum steps of one call that run immediately: enough for 128 nodes with 8 devices each, and less than a millisecond, because many
/// calls may follow each other before the thread does anything else.
pub const INSTANT_WORK_MAX: usize = 10_000;
/// Maximum steps of one call that run on the controller's thread in one piece: enough for 128 nodes with 64 devices each, and less
/// than ten milliseconds.
pub const QUICK_WORK_MAX: usize = 100_000;

/// A work limit, and the steps taken so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkBudget {
    limit: usize,
    done: usize,
}

impl WorkBudget {
    /// A limit of this many steps.
    pub fn new(limit: usize) -> Self {
        Self { limit, done: 0 }
    }

    /// Counts steps. Fails if they exceed the limit.
    pub fn spend(&mut self, steps: usize) -> Result<(), Unfit> {
        self.done = self.done.saturating_add(steps);
        if self.is_spent() {
            return Err(Unfit::TooMuchWork);
        }
        Ok(())
    }

    /// Whether the limit was exceeded.
    pub fn is_spent(&self) -> bool {
        self.done > self.limit
    }

    /// Number of steps taken.
    pub fn done(&self) -> usize {
        self.done
    }

    /// Runs a part of the work with at most `limit` of the remaining steps.
    pub fn part<T>(&mut self, limit: usize, work: impl FnOnce(&mut Self) -> T) -> T {
        let mut part = Self::new(limit.min(self.limit.saturating_sub(self.done)));
        let result = work(&mut part);
        self.done = self.done.saturating_add(part.done);
        result
    }
}

#[cfg(test)]
mod tests;
