use super::super::container_edits::ContainerEdits;
use super::super::kubelet_state::{KubeletClaim, KubeletClaims};
use super::super::prepared_claims::{HeldDevice, Progress};
use super::*;

const GONE: ApiView = ApiView::Gone;
const PRESENT: ApiView = ApiView::Present { devices: None };
const MOMENT: Duration = Duration::from_secs(1);
const NO_VIEW: RuntimeView = RuntimeView {
    unused: BTreeSet::new(),
    undecided: BTreeSet::new(),
    unanswered: BTreeSet::new(),
};

fn uid() -> ClaimUid {
    ClaimUid::parse("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10").unwrap()
}

fn unused() -> RuntimeView {
    RuntimeView {
        unused: [uid()].into(),
        ..NO_VIEW
    }
}

fn undecided() -> RuntimeView {
    RuntimeView {
        undecided: [uid()].into(),
        ..NO_VIEW
    }
}

fn unanswered() -> RuntimeView {
    RuntimeView {
        unanswered: [uid()].into(),
        ..NO_VIEW
    }
}

fn prepared_claims(devices: &[&str]) -> PreparedClaims {
    let held = |name: &&str| HeldDevice {
        device: (*name).into(),
        kind: "test".into(),
        ..HeldDevice::default()
    };
    let entry = Entry {
        namespace: "default".into(),
        name: "camera".into(),
        boot_id: "boot".into(),
        devices: devices.iter().map(held).collect(),
        progress: Progress::Done {
            container_edits: ContainerEdits::default(),
        },
    };
    PreparedClaims::new("boot", BTreeMap::from([(uid(), entry)]))
}

fn lists(claims: &[ClaimUid]) -> KubeletView {
    let claims: KubeletClaims = claims
        .iter()
        .map(|uid| (uid.clone(), KubeletClaim::default()))
        .collect();
    KubeletView::Lists(claims)
}

fn unreadable() -> KubeletView {
    KubeletView::Unknown("no such file".into())
}

/// Checks twice, the second time after the grace period, and returns the decision.
fn after_the_grace(
    prepared_claims: &PreparedClaims,
    kubelet: &KubeletView,
    answer: &ApiView,
) -> (Vec<Decision>, BTreeMap<ClaimUid, String>) {
    let mut orphans = Orphans::new(GRACE, false);
    orphans.find(prepared_claims, kubelet, Duration::ZERO);
    let questions = orphans.find(prepared_claims, kubelet, GRACE);
    let answers = questions
        .into_iter()
        .map(|question| (question.uid, answer.clone()))
        .collect();
    let decisions = orphans.decide(prepared_claims, kubelet, &answers, &NO_VIEW, GRACE);
    (decisions, orphans.quarantine())
}

#[test]
fn a_claim_unknown_to_kubelet_and_api_server_is_freed() {
    let (decisions, quarantine) = after_the_grace(&prepared_claims(&["x"]), &lists(&[]), &GONE);
    assert_eq!(decisions, [Decision::Free(uid())]);
    assert!(quarantine.is_empty());
}

#[test]
fn no_other_combination_frees_anything() {
    for devices in [&["x"][..], &[]] {
        for kubelet in [lists(&[]), lists(&[uid()]), unreadable()] {
            for answer in [GONE, PRESENT, ApiView::Unknown("away".into())] {
                let (decisions, _) = after_the_grace(&prepared_claims(devices), &kubelet, &answer);
                let nobody_knows = kubelet == lists(&[]) && answer == GONE;
                assert_eq!(
                    decisions.contains(&Decision::Free(uid())),
                    nobody_knows,
                    "{kubelet:?} {answer:?}"
                );
            }
        }
    }
}

#[test]
fn a_claim_forgotten_by_one_side_is_quarantined_with_a_reason() {
    let (decisions, quarantine) = after_the_grace(&prepared_claims(&["x"]), &lists(&[]), &PRESENT);
    assert_eq!(decisions, []);
    let why = &quarantine[&uid()];
    assert!(why.contains("API server still has it"), "{why}");
    assert_eq!(
        gone_late(false),
        "the API server no longer has it, but kubelet's own list cannot be read: no such file"
    );
}

#[test]
fn a_conflict_does_not_shorten_the_wait_for_unprepare() {
    assert_eq!(gone_late(true), gone_late(false));
}

/// Deletes a claim long after Prepare while kubelet's list cannot be read, and returns the reason of its quarantine. Checks that it waits
/// for another grace period, each time that the claim is gone.
fn gone_late(conflicting: bool) -> String {
    let prepared_claims = prepared_claims(&["x"]);
    let mut orphans = Orphans::new(GRACE, false);
    orphans.find(&prepared_claims, &unreadable(), Duration::ZERO);
    if conflicting {
        orphans.mark_conflicting(&uid());
    }
    let mut check = |answer: ApiView, now: Duration| {
        let questions = orphans.find(&prepared_claims, &unreadable(), now);
        assert_eq!(questions.len(), 1, "{now:?}");
        let answers = BTreeMap::from([(uid(), answer)]);
        let decisions = orphans.decide(&prepared_claims, &unreadable(), &answers, &NO_VIEW, now);
        assert_eq!(decisions, []);
        (orphans.quarantine().remove(&uid()), orphans.next_check(now))
    };
    let (every, almost) = (GRACE * 5 / 2, GRACE.checked_sub(MOMENT).unwrap());
    assert_eq!(check(PRESENT, GRACE), (None, every));
    for late in [GRACE * 100, GRACE * 200] {
        assert_eq!(
            check(GONE, late),
            (None, GRACE),
            "kubelet may be about to unprepare it"
        );
        // The period goes on without an answer.
        assert_eq!(
            check(ApiView::Unknown("away".into()), late + MOMENT),
            (None, almost)
        );
        assert_eq!(check(GONE, late + almost), (None, MOMENT));
        let (why, next) = check(GONE, late + GRACE);
        assert!(why.is_some());
        assert_eq!(next, every);
        assert_eq!(
            check(PRESENT, late + GRACE * 2),
            (None, every),
            "it is in order again"
        );
    }
    check(GONE, GRACE * 300);
    check(GONE, GRACE * 301).0.unwrap()
}

/// Checks a claim for a day while kubelet's list cannot be read. Returns the seconds at which the API server is asked, and the next check.
fn a_day_without_a_list(
    orphans: &mut Orphans,
    prepared_claims: &PreparedClaims,
    answer: &ApiView,
) -> (Vec<u64>, Duration) {
    let (mut now, mut asked) = (Duration::ZERO, Vec::new());
    while now < Duration::from_secs(24 * 60 * 60) {
        let mut answers = BTreeMap::new();
        for question in orphans.find(prepared_claims, &unreadable(), now) {
            asked.push(now.as_secs());
            answers.insert(question.uid, answer.clone());
        }
        let decisions = orphans.decide(prepared_claims, &unreadable(), &answers, &NO_VIEW, now);
        assert_eq!((decisions, orphans.quarantine()), (vec![], BTreeMap::new()));
        now += orphans.next_check(now);
    }
    (asked, now)
}

#[test]
fn without_a_list_the_api_server_is_rarely_asked() {
    let prepared_claims = prepared_claims(&["x"]);
    let mut orphans = Orphans::new(GRACE, false);
    let (asked, now) = a_day_without_a_list(&mut orphans, &prepared_claims, &PRESENT);
    assert_eq!(asked[..6], [120, 420, 1020, 2220, 4320, 7920]);
    assert_eq!(asked.len(), 27, "then once an hour");
    // A claim of an earlier boot is recorded for as long as kubelet does not unprepare it.
    let earlier = PreparedClaims::new("another boot", prepared_claims.entries().clone());
    let (asked, _) = a_day_without_a_list(&mut Orphans::new(GRACE, false), &earlier, &GONE);
    assert_eq!(asked[..6], [120, 240, 540, 1140, 2340, 4440]);
    assert_eq!(asked.len(), 28);
    assert_eq!(orphans.find(&prepared_claims, &unreadable(), now), []);
    let missing = orphans.find(&prepared_claims, &lists(&[]), now);
    assert_eq!(missing.len(), 1, "the list can be read and lacks it");
    orphans.mark_conflicting(&uid());
    let needed = orphans.find(&prepared_claims, &unreadable(), now);
    assert_eq!(needed.len(), 1, "another claim needs its device");
}

#[test]
fn a_question_without_an_answer_is_repeated() {
    let mut orphans = Orphans::new(GRACE, false);
    let prepared_claims = prepared_claims(&["x"]);
    orphans.find(&prepared_claims, &unreadable(), Duration::ZERO);
    let mut check = |answer: ApiView, now: Duration| {
        let questions = orphans.find(&prepared_claims, &unreadable(), now);
        let answers = questions
            .into_iter()
            .map(|question| (question.uid, answer.clone()));
        let answers: BTreeMap<ClaimUid, ApiView> = answers.collect();
        orphans.decide(&prepared_claims, &unreadable(), &answers, &NO_VIEW, now);
        answers.len()
    };
    let no_answer = || ApiView::Unknown("away".into());
    assert_eq!(check(no_answer(), GRACE), 1);
    assert_eq!(check(PRESENT, GRACE), 1);
    let pause = GRACE * 2;
    assert_eq!(check(PRESENT, GRACE + pause.checked_sub(MOMENT).unwrap()), 0);
    assert_eq!(check(no_answer(), GRACE + pause), 1);
    assert_eq!(check(PRESENT, GRACE + pause), 1);
}

#[test]
fn a_claim_of_unknown_devices_waits_for_nothing() {
    let prepared_claims = prepared_claims(&[]);
    for answer in [PRESENT, GONE] {
        let mut orphans = Orphans::new(GRACE, false);
        for check in 0..10 {
            let now = MOMENT * check;
            let questions = orphans.find(&prepared_claims, &unreadable(), now);
            assert_eq!(questions.len(), 1, "{answer:?}");
            let answers = BTreeMap::from([(uid(), answer.clone())]);
            orphans.decide(&prepared_claims, &unreadable(), &answers, &NO_VIEW, now);
            assert!(orphans.quarantine()[&uid()].contains("lost with the checkpoint"));
        }
    }
}

#[test]
fn listed_and_unanswered_claims_are_left_alone() {
    for (kubelet, answer) in [
        (lists(&[uid()]), GONE),
        (lists(&[]), ApiView::Unknown("away".into())),
        (unreadable(), PRESENT),
    ] {
        let (decisions, quarantine) = after_the_grace(&prepared_claims(&["x"]), &kubelet, &answer);
        assert_eq!(
            (decisions, quarantine),
            (vec![], BTreeMap::new()),
            "{kubelet:?} {answer:?}"
        );
    }
}

#[test]
fn nothing_is_asked_before_the_grace_period_is_over() {
    let mut orphans = Orphans::new(GRACE, false);
    let prepared_claims = prepared_claims(&["x"]);
    let just_before = GRACE.checked_sub(Duration::from_nanos(1)).unwrap();
    assert_eq!(orphans.find(&prepared_claims, &lists(&[]), Duration::ZERO), []);
    assert_eq!(orphans.next_check(Duration::ZERO), GRACE);
    assert_eq!(orphans.find(&prepared_claims, &lists(&[]), just_before), []);
    assert_eq!(orphans.find(&prepared_claims, &lists(&[]), GRACE).len(), 1);
    assert_eq!(orphans.next_check(GRACE), GRACE * 5 / 2);
}

#[test]
fn a_claim_prepared_again_meanwhile_is_not_freed() {
    let mut orphans = Orphans::new(GRACE, false);
    let prepared_claims = prepared_claims(&["x"]);
    orphans.find(&prepared_claims, &lists(&[]), Duration::ZERO);
    orphans.find(&prepared_claims, &lists(&[]), GRACE);
    orphans.forget(&uid());
    let answers = BTreeMap::from([(uid(), GONE)]);
    let decisions = orphans.decide(&prepared_claims, &lists(&[]), &answers, &NO_VIEW, GRACE);
    assert_eq!(decisions, []);
    // The grace period starts again.
    assert_eq!(orphans.find(&prepared_claims, &lists(&[]), GRACE), []);
}

#[test]
fn a_claim_listed_again_leaves_quarantine() {
    let mut orphans = Orphans::new(GRACE, false);
    let prepared_claims = prepared_claims(&["x"]);
    orphans.find(&prepared_claims, &lists(&[]), Duration::ZERO);
    orphans.find(&prepared_claims, &lists(&[]), GRACE);
    orphans.decide(
        &prepared_claims,
        &lists(&[]),
        &BTreeMap::from([(uid(), PRESENT)]),
        &NO_VIEW,
        GRACE,
    );
    assert_eq!(orphans.quarantine().len(), 1);
    orphans.find(&prepared_claims, &lists(&[uid()]), GRACE * 2);
    assert_eq!(orphans.quarantine(), BTreeMap::new());
}

#[test]
fn a_claim_of_unknown_devices_is_read_and_explained_at_once() {
    let mut orphans = Orphans::new(GRACE, false);
    let prepared_claims = prepared_claims(&[]);
    let questions = orphans.find(&prepared_claims, &lists(&[uid()]), Duration::ZERO);
    assert_eq!(questions.len(), 1);
    let explained = ApiView::Present {
        devices: Some(vec![HeldDevice::named("x")]),
    };
    let answers = BTreeMap::from([(uid(), explained)]);
    assert_eq!(
        orphans.decide(
            &prepared_claims,
            &lists(&[uid()]),
            &answers,
            &NO_VIEW,
            Duration::ZERO
        ),
        [Decision::Explain(uid(), vec![HeldDevice::named("x")])]
    );
    let answers = BTreeMap::from([(uid(), ApiView::Unknown("away".into()))]);
    orphans.decide(
        &prepared_claims,
        &lists(&[uid()]),
        &answers,
        &NO_VIEW,
        Duration::ZERO,
    );
    assert!(orphans.quarantine()[&uid()].contains("lost with the checkpoint"));
}

#[test]
fn a_rebuilt_claim_gets_its_name_from_kubelet() {
    let mut orphans = Orphans::new(GRACE, false);
    let mut nameless = prepared_claims(&[]).entries()[&uid()].clone();
    (nameless.namespace, nameless.name) = (String::new(), String::new());
    let prepared_claims = PreparedClaims::new("boot", BTreeMap::from([(uid(), nameless)]));
    let claim = KubeletClaim {
        namespace: "default".into(),
        name: "camera".into(),
        ours: true,
        prepared: true,
        devices: None,
    };
    let kubelet = KubeletView::Lists(KubeletClaims::from([(uid(), claim)]));
    let question = &orphans.find(&prepared_claims, &kubelet, Duration::ZERO)[0];
    assert_eq!(
        (question.namespace.as_str(), question.name.as_str()),
        ("default", "camera")
    );
}

#[test]
fn claims_of_an_earlier_boot_are_never_quarantined() {
    let entries = prepared_claims(&["x"]).entries().clone();
    let prepared_claims = PreparedClaims::new("another boot", entries);
    let (decisions, quarantine) = after_the_grace(&prepared_claims, &lists(&[]), &PRESENT);
    assert_eq!((decisions, quarantine), (vec![], BTreeMap::new()));
    let (decisions, _) = after_the_grace(&prepared_claims, &lists(&[]), &GONE);
    assert_eq!(decisions, [Decision::Free(uid())]);
}

#[test]
fn a_listed_claim_is_checked_only_if_its_device_is_reallocated() {
    let mut orphans = Orphans::new(GRACE, false);
    let (prepared_claims, kubelet) = (prepared_claims(&["x"]), lists(&[uid()]));
    assert_eq!(orphans.find(&prepared_claims, &kubelet, GRACE), []);
    assert_eq!(orphans.next_check(GRACE), GRACE * 5 / 2);
    assert!(
        orphans.mark_conflicting(&uid()) && !orphans.mark_conflicting(&uid()),
        "news only once"
    );
    assert_eq!(
        orphans.find(&prepared_claims, &kubelet, GRACE),
        [],
        "its pod may be about to end"
    );
    assert_eq!(orphans.find(&prepared_claims, &kubelet, GRACE * 2).len(), 1);
    let decide = |orphans: &mut Orphans, answer| {
        let answers = BTreeMap::from([(uid(), answer)]);
        let decisions = orphans.decide(&prepared_claims, &kubelet, &answers, &NO_VIEW, GRACE * 2);
        assert_eq!(decisions, [], "kubelet lists it, so it is never freed");
        orphans.quarantine().remove(&uid())
    };
    let why = decide(&mut orphans, GONE).unwrap();
    assert!(why.contains("given its device to another claim"), "{why}");
    let why = decide(&mut orphans, PRESENT).unwrap();
    assert!(why.contains("not allocated any more"), "{why}");
    let has_it = ApiView::Present {
        devices: Some(vec![HeldDevice::named("x")]),
    };
    assert_eq!(decide(&mut orphans, has_it), None);
    assert_eq!(
        orphans.find(&prepared_claims, &kubelet, GRACE * 3),
        [],
        "it is in order"
    );
}

#[test]
fn a_newly_unlisted_claim_waits_for_the_grace_period() {
    let prepared_claims = prepared_claims(&["x"]);
    let gone = BTreeMap::from([(uid(), GONE)]);
    let not_listed = |mut orphans: Orphans, before: &KubeletView| {
        for now in [Duration::ZERO, GRACE] {
            orphans.find(&prepared_claims, before, now);
            orphans.decide(&prepared_claims, before, &gone, &NO_VIEW, now);
        }
        let withheld = orphans.quarantine();
        assert_eq!(withheld.len(), 1, "{before:?}");
        // Kubelet restarts without the claim while its containers may still be ending.
        let now = lists(&[]);
        orphans.find(&prepared_claims, &now, GRACE + MOMENT);
        assert_eq!(orphans.next_check(GRACE + MOMENT), GRACE);
        let decisions = orphans.decide(&prepared_claims, &now, &gone, &NO_VIEW, GRACE + MOMENT);
        assert_eq!(decisions, []);
        assert_eq!(orphans.quarantine(), withheld);
        // The period begins again each time.
        orphans.find(&prepared_claims, before, GRACE + MOMENT * 2);
        orphans.find(&prepared_claims, &now, GRACE + MOMENT * 3);
        let early = GRACE * 2 + MOMENT * 2;
        let decisions = orphans.decide(&prepared_claims, &now, &gone, &NO_VIEW, early);
        assert_eq!(decisions, []);
        let decisions = orphans.decide(&prepared_claims, &now, &gone, &NO_VIEW, early + MOMENT);
        assert_eq!(decisions, [Decision::Free(uid())], "{before:?}");
    };
    let mut conflicting = Orphans::new(GRACE, false);
    conflicting.mark_conflicting(&uid());
    not_listed(conflicting, &lists(&[uid()]));
    not_listed(Orphans::new(GRACE, false), &unreadable());
}

#[test]
fn a_conflicting_claim_without_containers_is_freed_at_once() {
    let prepared_claims = prepared_claims(&["x"]);
    let answers = BTreeMap::from([(uid(), ApiView::Gone)]);
    let mut orphans = Orphans::new(GRACE, true);
    assert_eq!(
        orphans.find(&prepared_claims, &lists(&[uid()]), Duration::ZERO),
        []
    );
    assert_eq!(
        orphans.claims_to_check(&prepared_claims, &lists(&[uid()]), &answers, GRACE),
        [],
        "no claim needs its device"
    );
    orphans.mark_conflicting(&uid());
    assert_eq!(
        orphans
            .find(&prepared_claims, &lists(&[uid()]), Duration::ZERO)
            .len(),
        1
    );
    assert_eq!(
        orphans.claims_to_check(&prepared_claims, &lists(&[uid()]), &answers, GRACE),
        [uid()]
    );
    // A container has the devices: it keeps them, and no intervention is needed.
    let decisions = orphans.decide(&prepared_claims, &lists(&[uid()]), &answers, &undecided(), GRACE);
    assert_eq!(decisions, []);
    assert!(orphans.quarantine().is_empty());
    // The runtime has never answered: the user is notified, as without the runtime check.
    let decisions = orphans.decide(&prepared_claims, &lists(&[uid()]), &answers, &NO_VIEW, MOMENT);
    assert_eq!(decisions, []);
    assert!(orphans.quarantine().is_empty(), "not before the grace period");
    let decisions = orphans.decide(&prepared_claims, &lists(&[uid()]), &answers, &NO_VIEW, GRACE);
    assert_eq!(decisions, []);
    assert_eq!(orphans.quarantine().len(), 1);
    let decisions = orphans.decide(
        &prepared_claims,
        &lists(&[uid()]),
        &answers,
        &unused(),
        Duration::ZERO,
    );
    assert_eq!(
        decisions,
        [Decision::Free(uid())],
        "though kubelet still lists it"
    );
}

#[test]
fn a_claim_reallocated_since_is_freed_by_the_runtime() {
    let prepared_claims = prepared_claims(&["x"]);
    let elsewhere = ApiView::Present {
        devices: Some(vec![HeldDevice::named("y")]),
    };
    let answers = BTreeMap::from([(uid(), elsewhere)]);
    let mut orphans = Orphans::new(GRACE, true);
    orphans.mark_conflicting(&uid());
    let kubelet = lists(&[uid()]);
    orphans.find(&prepared_claims, &kubelet, Duration::ZERO);
    let to_check = orphans.claims_to_check(&prepared_claims, &kubelet, &answers, Duration::ZERO);
    assert_eq!(to_check, [uid()]);
    let decisions = orphans.decide(&prepared_claims, &kubelet, &answers, &unused(), Duration::ZERO);
    assert_eq!(decisions, [Decision::Free(uid())]);
}

#[test]
fn a_claim_in_the_api_is_never_freed_by_the_runtime() {
    let prepared_claims = prepared_claims(&["x"]);
    for answer in [
        ApiView::Present {
            devices: Some(vec![HeldDevice::named("x")]),
        },
        ApiView::Unknown("away".into()),
    ] {
        let answers = BTreeMap::from([(uid(), answer)]);
        let mut orphans = Orphans::new(GRACE, true);
        orphans.mark_conflicting(&uid());
        orphans.find(&prepared_claims, &lists(&[uid()]), Duration::ZERO);
        assert_eq!(
            orphans.claims_to_check(&prepared_claims, &lists(&[uid()]), &answers, GRACE),
            []
        );
        let decisions = orphans.decide(&prepared_claims, &lists(&[uid()]), &answers, &unused(), GRACE);
        assert_eq!(decisions, []);
    }
}

#[test]
fn a_missing_claim_is_not_freed_while_a_container_uses_it() {
    let prepared_claims = prepared_claims(&["x"]);
    let answers = BTreeMap::from([(uid(), ApiView::Gone)]);
    let mut orphans = Orphans::new(GRACE, true);
    orphans.find(&prepared_claims, &lists(&[]), Duration::ZERO);
    let before = orphans.claims_to_check(&prepared_claims, &lists(&[]), &answers, Duration::ZERO);
    assert_eq!(before, [], "kubelet may not have got that far");
    orphans.find(&prepared_claims, &lists(&[]), GRACE);
    let due = orphans.claims_to_check(&prepared_claims, &lists(&[]), &answers, GRACE);
    assert_eq!(due, [uid()]);
    let decisions = orphans.decide(&prepared_claims, &lists(&[]), &answers, &undecided(), GRACE);
    assert_eq!(decisions, []);
    assert!(orphans.quarantine().is_empty());
    let decisions = orphans.decide(&prepared_claims, &lists(&[]), &answers, &unused(), GRACE);
    assert_eq!(decisions, [Decision::Free(uid())]);
}

#[test]
fn a_missing_claim_is_not_freed_while_the_runtime_is_silent() {
    let prepared = prepared_claims(&["x"]);
    let answers = BTreeMap::from([(uid(), GONE)]);
    let suspected = |prepared: &PreparedClaims| {
        let mut orphans = Orphans::new(GRACE, true);
        orphans.find(prepared, &lists(&[]), Duration::ZERO);
        orphans.find(prepared, &lists(&[]), GRACE);
        orphans
    };
    let mut orphans = suspected(&prepared);
    let decisions = orphans.decide(&prepared, &lists(&[]), &answers, &unanswered(), GRACE);
    assert_eq!(decisions, []);
    let why = orphans.quarantine().remove(&uid()).unwrap();
    assert!(why.contains("container runtime does not answer"), "{why}");
    let decisions = orphans.decide(&prepared, &lists(&[]), &answers, &unused(), GRACE);
    assert_eq!(decisions, [Decision::Free(uid())]);
    // None of the containers of an earlier boot runs.
    let earlier = PreparedClaims::new("another boot", prepared.entries().clone());
    let decisions = suspected(&earlier).decide(&earlier, &lists(&[]), &answers, &unanswered(), GRACE);
    assert_eq!(decisions, [Decision::Free(uid())]);
}
