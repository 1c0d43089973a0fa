//! Faults that last, or that are the world's and no program's.

use std::sync::atomic::{AtomicI64, Ordering};

use jiff::{SignedDuration, Timestamp};

use crate::life::{CONTROLLER, is_root, live};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Runtime::new().unwrap()
}

/// Jumps to and fro by an hour with each look.
fn jumping() -> Timestamp {
    static LOOKS: AtomicI64 = AtomicI64::new(0);
    let hours = LOOKS.fetch_add(1, Ordering::Relaxed) % 3 - 1;
    Timestamp::now() + SignedDuration::from_hours(hours)
}

#[test]
fn the_api_server_s_clock_may_jump_by_an_hour_with_every_look_at_it() {
    if !is_root() {
        return;
    }
    let lived = runtime().block_on(live(Vec::new(), jumping));
    assert_eq!(lived.violations, Vec::<String>::new(), "{}", lived.trace.join("\n"));
}

#[test]
fn after_a_start_everything_is_listed_from_the_quorum_and_never_from_a_cache() {
    if !is_root() {
        return;
    }
    let lived = runtime().block_on(live(Vec::new(), Timestamp::now));
    assert_eq!(lived.violations, Vec::<String>::new());
    let requests = lived
        .trace
        .iter()
        .filter(|line| line.contains(CONTROLLER) && line.contains(": GET "));
    let lists: Vec<&String> = requests.filter(|line| line.contains("limit=")).collect();
    for plural in ["resourceclasses", "resourceclaims", "podschedulingcontexts", "nodeinventories"] {
        let of_kind = lists.iter().filter(|line| line.contains(plural));
        assert!(of_kind.count() > 0, "{plural} is not listed: {lists:?}");
    }
    // `resourceVersion=0` would be answered from the cache of whichever API server it is, which may lag behind.
    let from_a_cache: Vec<_> = lists
        .iter()
        .filter(|line| line.contains("resourceVersion"))
        .collect();
    assert!(from_a_cache.is_empty(), "{from_a_cache:?}");
}
