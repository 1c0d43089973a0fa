//! Leader election with several controllers: clocks of different rates, lost and late requests, paused and killed processes. Some restarted
//! processes know the identities of their predecessors and take over their own lease without waiting for its expiry. At most one controller
//! leads, except that a paused process may send a late write; these are counted.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drayman::core::claims::Moment;
use drayman::core::lease::{Lease, LeaseAnswer, LeaseRecord, LeaseSettings, LeaseStep};

use crate::rng::Rng;

const SECOND: u64 = 1_000_000;
/// Real time until which faults occur, then the end of the run.
const FAULTS_END: u64 = 600 * SECOND;
const END: u64 = 700 * SECOND;
const KINDS: [&str; 10] = [
    "lease out of reach",
    "write of an ended process while its lease is taken over",
    "own lease taken over",
    "write of an ended process",
    "request lost",
    "answer lost",
    "request late",
    "pause",
    "kill",
    "write of a paused leader",
];

fn settings(identity: String, ended: BTreeSet<String>) -> LeaseSettings {
    LeaseSettings {
        identity,
        ended,
        duration: Duration::from_secs(15),
        renew_deadline: Duration::from_secs(10),
        retry_period: Duration::from_secs(2),
        request_timeout: Duration::from_secs(5),
    }
}

/// A controller that competes for the lease.
struct Candidate {
    lease: Lease,
    /// Rate of its clock in thousandths, and its real start time.
    rate: u64,
    started: u64,
    /// Number of its restarts.
    restarts: u64,
    /// Whether a restarted process knows earlier identities, as a container in a pod with a state directory does.
    remembers: bool,
    paused_until: u64,
    /// Its lease requests are lost until then.
    cut_until: u64,
    /// The real time at which it was first observed leading.
    leads_since: Option<u64>,
}

enum Event {
    /// The candidate processes the lease.
    Turn,
    /// A lease request reaches the server; the reply arrives at `answer_at` unless it is lost.
    Request {
        step: LeaseStep,
        sent: Moment,
        answer_at: Option<u64>,
    },
    Answer {
        answer: LeaseAnswer,
        sent: Moment,
    },
    /// The candidate writes to a claim if it leads.
    Work,
    /// A claim write reaches the server.
    Written {
        led_since: u64,
        paused: bool,
    },
}

impl Candidate {
    fn new(index: usize, restarts: u64, started: u64, rate: u64, remembers: bool) -> Self {
        let earlier = (0..restarts).filter(|_| remembers);
        let ended = earlier.map(|restarts| identity(index, restarts)).collect();
        Self {
            lease: Lease::new(settings(identity(index, restarts), ended)),
            rate,
            started,
            restarts,
            remembers,
            paused_until: 0,
            cut_until: 0,
            leads_since: None,
        }
    }
}

/// The fence of `controller/write.rs`.
fn holds(lease: &Lease, now: Moment) -> bool {
    lease.term().is_some_and(|term| term.contains(&now))
}

fn identity(index: usize, restarts: u64) -> String {
    format!("{index}-{restarts}")
}

struct Cluster {
    now: u64,
    rng: Rng,
    queue: BTreeMap<(u64, u64), (usize, u64, Event)>,
    number: u64,
    record: Option<LeaseRecord>,
    /// The time at which `record` was stored.
    stored: u64,
    versions: u64,
    all: Vec<Candidate>,
    hits: BTreeMap<&'static str, u64>,
    writes: u64,
    leaders: u64,
    violation: Option<String>,
}

impl Cluster {
    fn new(seed: u64, rates: &[u64]) -> Self {
        let mut rng = Rng::new(seed);
        let count = rng.between(2, 3);
        let mut cluster = Self {
            now: 0,
            rng,
            queue: BTreeMap::new(),
            number: 0,
            record: None,
            stored: 0,
            versions: 0,
            all: Vec::new(),
            hits: BTreeMap::new(),
            writes: 0,
            leaders: 0,
            violation: None,
        };
        for index in 0..count as usize {
            let rate = cluster.rng.pick(rates).unwrap();
            let remembers = cluster.rng.chance(500);
            cluster.all.push(Candidate::new(index, 0, 0, rate, remembers));
            cluster.at(0, index, Event::Turn);
            cluster.at(0, index, Event::Work);
        }
        cluster
    }

    fn at(&mut self, when: u64, index: usize, event: Event) {
        self.number += 1;
        let restarts = self.all[index].restarts;
        self.queue.insert((when, self.number), (index, restarts, event));
    }

    fn strikes(&mut self, kind: &'static str, per_thousand: u64) -> bool {
        let strikes = self.now < FAULTS_END && self.rng.chance(per_thousand);
        if strikes {
            *self.hits.entry(kind).or_default() += 1;
        }
        strikes
    }

    fn clock(&self, index: usize) -> Moment {
        let candidate = &self.all[index];
        Moment::new(Duration::from_micros(
            (self.now - candidate.started) * candidate.rate / 1000,
        ))
    }

    /// Converts microseconds of its clock to real time.
    fn real(&self, index: usize, micros: u64) -> u64 {
        micros * 1000 / self.all[index].rate + 1
    }

    fn run(&mut self) {
        while self.violation.is_none()
            && let Some(((when, _), (index, restarts, event))) = self.queue.pop_first()
            && when < END
        {
            self.now = when;
            let paused_until = self.all[index].paused_until;
            // Requests in flight survive a pause or the end of their process; a paused process receives replies later.
            match event {
                Event::Request {
                    step,
                    sent,
                    answer_at,
                } => {
                    let answer = self.serve(&step, index, restarts);
                    if let Some(when) = answer_at.filter(|_| restarts == self.all[index].restarts) {
                        self.at(when, index, Event::Answer { answer, sent });
                    }
                }
                Event::Written { led_since, paused } => self.written((index, restarts), led_since, paused),
                _ if restarts != self.all[index].restarts => {}
                event if paused_until > when => self.at(paused_until, index, event),
                Event::Turn => self.turn(index),
                Event::Answer { answer, sent } => {
                    let now = self.clock(index);
                    self.all[index].lease.answered(answer, sent, now);
                    self.at(self.now, index, Event::Turn);
                }
                Event::Work => self.work(index),
            }
        }
    }

    /// The leader election loop of `controller/leader.rs`.
    fn turn(&mut self, index: usize) {
        if self.strikes("pause", 10) {
            let pause = self.rng.between(SECOND, 40 * SECOND);
            self.all[index].paused_until = self.now + pause;
        } else if self.strikes("kill", 5) {
            self.restart(index);
            return;
        }
        let now = self.clock(index);
        let step = self.all[index].lease.step(now);
        match &step {
            LeaseStep::Lost => self.restart(index),
            LeaseStep::Wait(until) => {
                let wait = until.since_start().saturating_sub(now.since_start()).as_micros() as u64;
                let when = self.now + self.real(index, wait.max(1000));
                self.at(when, index, Event::Turn);
            }
            LeaseStep::Read | LeaseStep::Write { .. } => {
                self.all[index].lease.sent(&step, now);
                self.request(index, step, now);
            }
        }
    }

    fn request(&mut self, index: usize, step: LeaseStep, sent: Moment) {
        let timeout = self.real(index, 5 * SECOND);
        // The request is sent after the current pause.
        let start = self.now.max(self.all[index].paused_until);
        let late = self.strikes("request late", 50);
        let latency = if late {
            self.rng.between(0, timeout)
        } else {
            self.rng.between(100, 20_000)
        };
        let back = self.rng.between(100, 20_000);
        if self.strikes("lease out of reach", 10) {
            self.all[index].cut_until = self.now + self.rng.between(10 * SECOND, 20 * SECOND);
        }
        let lost = start < self.all[index].cut_until || self.strikes("request lost", 50);
        let unanswered = lost || latency + back >= timeout || self.strikes("answer lost", 50);
        if unanswered {
            let answer = LeaseAnswer::Unclear;
            self.at(start + timeout, index, Event::Answer { answer, sent });
        }
        if !lost {
            let answer_at = (!unanswered).then_some(start + latency + back);
            self.at(
                start + latency,
                index,
                Event::Request {
                    step,
                    sent,
                    answer_at,
                },
            );
        }
    }

    fn serve(&mut self, step: &LeaseStep, index: usize, restarts: u64) -> LeaseAnswer {
        let LeaseStep::Write {
            version, transitions, ..
        } = step
        else {
            return LeaseAnswer::Read(self.record.clone());
        };
        if *version != self.record.as_ref().map(|record| record.version.clone()) {
            return LeaseAnswer::Unclear;
        }
        let earlier = self.record.as_ref().map(|record| record.holder.as_str());
        if restarts > 0
            && earlier.is_some_and(|holder| (0..restarts).any(|restarts| identity(index, restarts) == holder))
        {
            *self.hits.entry("own lease taken over").or_default() += 1;
        }
        let by_itself =
            earlier.is_some_and(|holder| (0..=restarts).any(|restarts| identity(index, restarts) == holder));
        // The earliest expiry by the fastest clock.
        let ran_out = self.stored + 15 * SECOND * 1000 / 1040;
        if earlier.is_some() && !by_itself && self.now < ran_out {
            let now = self.now;
            self.violation = Some(format!(
                "at {now}: {index} takes a lease stored at {}",
                self.stored
            ));
        }
        self.stored = self.now;
        self.versions += 1;
        let record = LeaseRecord {
            holder: identity(index, restarts),
            duration: Duration::from_secs(15),
            transitions: *transitions,
            version: self.versions.to_string(),
        };
        self.record = Some(record.clone());
        LeaseAnswer::Written(record)
    }

    fn restart(&mut self, index: usize) {
        let old = &self.all[index];
        // A process starts only after its predecessor has ended, even if paused. Requests of the predecessor are still in flight.
        self.all[index] = Candidate::new(index, old.restarts + 1, self.now, old.rate, old.remembers);
        let when = self.now + self.rng.between(0, 3 * SECOND);
        self.at(when, index, Event::Turn);
        self.at(when, index, Event::Work);
    }

    fn work(&mut self, index: usize) {
        let now = self.clock(index);
        if holds(&self.all[index].lease, now) {
            if self.all[index].leads_since.is_none() {
                self.leaders += 1;
                self.all[index].leads_since = Some(self.now);
            }
            let led_since = self.all[index].leads_since.unwrap_or_default();
            // A pause between the check of the lease and the write.
            let paused = self.strikes("pause", 2);
            if paused {
                let pause = self.rng.between(SECOND, 40 * SECOND);
                self.all[index].paused_until = self.now + pause;
            }
            let limit = self.real(index, 5 * SECOND);
            // If lease requests are lost, claim writes are slow too.
            let is_cut = self.now < self.all[index].cut_until;
            let latency = if is_cut && self.rng.chance(500) {
                self.rng.between(limit * 9 / 10, limit)
            } else if self.rng.chance(100) {
                self.rng.between(0, limit)
            } else {
                self.rng.between(100, 20_000)
            };
            let start = self.now.max(self.all[index].paused_until);
            self.at(start + latency, index, Event::Written { led_since, paused });
        }
        let pace = if self.now < self.all[index].cut_until {
            5
        } else {
            1
        };
        let when = self.now + self.rng.between(10_000, SECOND / pace);
        self.at(when, index, Event::Work);
    }

    /// No other process may have started to lead after this leader and before its write arrives.
    fn written(&mut self, (index, restarts): (usize, u64), led_since: u64, paused: bool) {
        self.writes += 1;
        if self.all[index].restarts != restarts {
            *self.hits.entry("write of an ended process").or_default() += 1;
            let holder = self.record.as_ref().map(|record| record.holder.as_str());
            if holder == Some(&identity(index, self.all[index].restarts)) {
                let kind = "write of an ended process while its lease is taken over";
                *self.hits.entry(kind).or_default() += 1;
            }
        }
        let now = self.now;
        let successor = self.all.iter().enumerate().any(|(other, candidate)| {
            (other, candidate.restarts) != (index, restarts)
                && candidate
                    .leads_since
                    .is_some_and(|since| since > led_since && since < now)
        });
        if successor && paused {
            *self.hits.entry("write of a paused leader").or_default() += 1;
        } else if successor {
            self.violation = Some(format!(
                "at {now}: a write of {} arrives when another one leads",
                identity(index, restarts)
            ));
        }
    }
}

fn run(seed: u64, rates: &[u64]) -> Cluster {
    let mut cluster = Cluster::new(seed, rates);
    cluster.run();
    cluster
}

#[test]
fn one_leads_with_any_clocks_and_only_a_pause_breaks_it() {
    let mut hits: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut writes, mut leaders) = (0, 0);
    for seed in 0..400 {
        // Clock rates that differ by almost 10 %: real machines differ far less.
        let cluster = run(seed, &[950, 975, 1000, 1020, 1040]);
        assert_eq!(cluster.violation, None, "seed {seed}");
        let leads = |index: usize| {
            let candidate = &cluster.all[index];
            holds(&candidate.lease, cluster.clock(index))
        };
        let now_leading = (0..cluster.all.len()).filter(|index| leads(*index)).count();
        assert_eq!(now_leading, 1, "seed {seed}: exactly one leads after the faults");
        for (kind, count) in cluster.hits {
            *hits.entry(kind).or_default() += count;
        }
        writes += cluster.writes;
        leaders += cluster.leaders;
    }
    println!("{writes} writes of {leaders} leaders, {hits:?}");
    for kind in KINDS {
        assert!(hits.contains_key(kind), "{kind} never happened");
    }
    assert!(
        leaders > 1000 && writes > 100_000,
        "{leaders} leaders, {writes} writes"
    );
}

#[test]
fn a_clock_that_is_too_fast_permits_two_leaders() {
    let broken = (0..400).find_map(|seed| run(seed, &[800, 1300]).violation);
    assert!(broken.is_some(), "the model does not detect two leaders");
}
