use super::super::*;

#[test]
fn a_missing_file_is_retried_with_growing_pauses() {
    let (mut retries, mut now) = (Retries::default(), Duration::ZERO);
    assert_eq!(retries.next(), None);
    let mut pauses = Vec::new();
    for _ in 0..8 {
        retries.failed(Missing::OfDevices, now);
        let due = retries.next().unwrap();
        assert!(
            retries
                .due(due.saturating_sub(Duration::from_millis(1)))
                .is_empty()
        );
        assert_eq!(retries.due(due), [Missing::OfDevices]);
        pauses.push(due.saturating_sub(now).as_secs());
        now = due;
    }
    assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
    assert!(retries.done(&Missing::OfDevices) && !retries.done(&Missing::OfDevices));
    assert_eq!((retries.next(), retries.due(now)), (None, vec![]));
    retries.failed(Missing::OfDevices, now);
    assert_eq!(retries.next(), Some(now + FIRST), "the next time begins anew");
}

#[test]
fn each_claim_has_its_own_time() {
    let claim = |last: char| {
        let uid = format!("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0{last}");
        Missing::OfClaim(ClaimUid::parse(&uid).unwrap())
    };
    let mut retries = Retries::default();
    retries.failed(claim('1'), Duration::ZERO);
    retries.failed(claim('1'), Duration::ZERO);
    retries.failed(claim('2'), Duration::ZERO);
    assert_eq!(retries.due(FIRST), [claim('2')]);
    assert_eq!(retries.due(FIRST * 2), [claim('2'), claim('1')]);
}
