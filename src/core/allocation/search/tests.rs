//! Tests of [`super`].

use super::*;

mod search {
    use super::*;
    use proptest::prelude::*;

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
            match search(&room, &asks, &mut WorkBudget::new(NODE_WORK_MAX)) {
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
        let mut work = WorkBudget::new(NODE_WORK_MAX);
        let outcome = search(room, asks, &mut work);
        (outcome, work.done())
    }

    #[test]
    fn a_claim_that_wants_too_many_devices_is_refused_early() {
        // Eight devices, each with its own attribute value; seven requests for one device, and one for two.
        let groups: Vec<Vec<usize>> = (0..8).map(|device| vec![device]).collect();
        let single = |index| Equal {
            requests: vec![index],
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
        let single = |index| Equal {
            requests: vec![index],
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
    fn equivalent_groups_are_tried_once() {
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
        drop_equivalent_groups(&[1; 64], &mut asks, &mut WorkBudget::new(NODE_WORK_MAX)).unwrap();
        assert_eq!(asks[0].constraints[0].groups.len(), 1);
        // The last device has room for two claims.
        let mut room = [1; 64];
        room[63] = 2;
        let groups = (0..16)
            .map(|group| (4 * group..4 * group + 4).collect())
            .collect();
        asks[0].constraints[0].groups = groups;
        drop_equivalent_groups(&room, &mut asks, &mut WorkBudget::new(NODE_WORK_MAX)).unwrap();
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

mod fit {
    use super::*;
    use proptest::prelude::*;

    fn work() -> WorkBudget {
        WorkBudget::new(NODE_WORK_MAX)
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
    fn preferred_candidates_are_taken_unless_others_need_them() {
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

mod work {
    use super::*;

    #[test]
    fn a_part_has_no_more_steps_than_are_left() {
        let mut work = WorkBudget::new(10);
        assert_eq!(work.part(8, |part| part.spend(8)), Ok(()));
        assert_eq!(work.part(8, |part| part.spend(3)), Err(Unfit::TooMuchWork));
        assert!(work.is_spent());
        assert_eq!(work.done(), 11);
    }
}
