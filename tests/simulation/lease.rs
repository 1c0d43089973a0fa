//! Several controllers and one lease: clocks that run differently, requests that are lost or late, processes that are paused or
//! die. Some are started again with the identities of their earlier lives, which have ended: they take their own lease over without
//! waiting for its end. Whoever is awake keeps the promise of one leader; what only a pause can break is counted.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drayman::core::claims::Moment;
use drayman::core::lease::{Lease, LeaseAnswer, LeaseRecord, LeaseSettings, LeaseStep};

use crate::rng::Rng;

const SECOND: u64 = 1_000_000;
/// Real time until which things go wrong, and then until the end.
const TROUBLE: u64 = 600 * SECOND;
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
    "death",
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

/// A controller, as far as the lease is concerned.
struct Candidate {
    lease: Lease,
    /// How fast its clock runs, in thousandths of the real speed, and when it was started.
    rate: u64,
    started: u64,
    /// Tells its lives apart.
    life: u64,
    /// Whether a life knows the identities of the earlier ones, as a container does whose pod has a state directory.
    remembers: bool,
    paused_until: u64,
    /// Its requests about the lease are lost until then.
    cut_until: u64,
    /// When it was first seen to lead, in real time.
    leads_since: Option<u64>,
}

enum Happening {
    /// It looks what to do about the lease.
    Turn,
    /// Its request reaches the server, and the answer comes back at this time unless it is lost.
    Request {
        step: LeaseStep,
        sent: Moment,
        answer_at: Option<u64>,
    },
    Answer {
        answer: LeaseAnswer,
        sent: Moment,
    },
    /// It writes to a claim, if it may.
    Work,
    /// That write reaches the server.
    Written {
        led_since: u64,
        paused: bool,
    },
}

impl Candidate {
    fn new(who: usize, life: u64, started: u64, rate: u64, remembers: bool) -> Self {
        let earlier = (0..life).filter(|_| remembers);
        let ended = earlier.map(|life| identity(who, life)).collect();
        Self {
            lease: Lease::new(settings(identity(who, life), ended)),
            rate,
            started,
            life,
            remembers,
            paused_until: 0,
            cut_until: 0,
            leads_since: None,
        }
    }
}

fn identity(who: usize, life: u64) -> String {
    format!("{who}-{life}")
}

struct Cluster {
    now: u64,
    rng: Rng,
    queue: BTreeMap<(u64, u64), (usize, u64, Happening)>,
    number: u64,
    record: Option<LeaseRecord>,
    /// When that was stored.
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
        for who in 0..count as usize {
            let rate = cluster.rng.pick(rates).unwrap();
            let remembers = cluster.rng.chance(500);
            cluster.all.push(Candidate::new(who, 0, 0, rate, remembers));
            cluster.at(0, who, Happening::Turn);
            cluster.at(0, who, Happening::Work);
        }
        cluster
    }

    fn at(&mut self, when: u64, who: usize, happening: Happening) {
        self.number += 1;
        let life = self.all[who].life;
        self.queue.insert((when, self.number), (who, life, happening));
    }

    fn strikes(&mut self, kind: &'static str, per_thousand: u64) -> bool {
        let strikes = self.now < TROUBLE && self.rng.chance(per_thousand);
        if strikes {
            *self.hits.entry(kind).or_default() += 1;
        }
        strikes
    }

    fn clock(&self, who: usize) -> Moment {
        let candidate = &self.all[who];
        Moment::new(Duration::from_micros(
            (self.now - candidate.started) * candidate.rate / 1000,
        ))
    }

    /// How long this many microseconds of its clock take.
    fn real(&self, who: usize, micros: u64) -> u64 {
        micros * 1000 / self.all[who].rate + 1
    }

    fn run(&mut self) {
        while self.violation.is_none()
            && let Some(((when, _), (who, life, happening))) = self.queue.pop_first()
            && when < END
        {
            self.now = when;
            let paused_until = self.all[who].paused_until;
            // What is on its way is not stopped by a pause or a death; whoever it is for finds it later, or never.
            match happening {
                Happening::Request {
                    step,
                    sent,
                    answer_at,
                } => {
                    let answer = self.serve(&step, who, life);
                    if let Some(when) = answer_at.filter(|_| life == self.all[who].life) {
                        self.at(when, who, Happening::Answer { answer, sent });
                    }
                }
                Happening::Written { led_since, paused } => self.written((who, life), led_since, paused),
                _ if life != self.all[who].life => {}
                happening if paused_until > when => self.at(paused_until, who, happening),
                Happening::Turn => self.turn(who),
                Happening::Answer { answer, sent } => {
                    let now = self.clock(who);
                    self.all[who].lease.answered(answer, sent, now);
                    self.at(self.now, who, Happening::Turn);
                }
                Happening::Work => self.work(who),
            }
        }
    }

    /// The shell's loop around the lease, in the words of `controller/leader.rs`.
    fn turn(&mut self, who: usize) {
        if self.strikes("pause", 10) {
            let pause = self.rng.between(SECOND, 40 * SECOND);
            self.all[who].paused_until = self.now + pause;
        } else if self.strikes("death", 5) {
            self.die(who);
            return;
        }
        let now = self.clock(who);
        let step = self.all[who].lease.step(now);
        match &step {
            LeaseStep::Lost => self.die(who),
            LeaseStep::Wait(until) => {
                let wait = until.since_start().saturating_sub(now.since_start()).as_micros() as u64;
                let when = self.now + self.real(who, wait.max(1000));
                self.at(when, who, Happening::Turn);
            }
            LeaseStep::Read | LeaseStep::Write { .. } => {
                self.all[who].lease.sent(&step, now);
                self.request(who, step, now);
            }
        }
    }

    fn request(&mut self, who: usize, step: LeaseStep, sent: Moment) {
        let timeout = self.real(who, 5 * SECOND);
        // Sent after the pause, if there is one.
        let start = self.now.max(self.all[who].paused_until);
        let late = self.strikes("request late", 50);
        let way = if late {
            self.rng.between(0, timeout)
        } else {
            self.rng.between(100, 20_000)
        };
        let back = self.rng.between(100, 20_000);
        if self.strikes("lease out of reach", 10) {
            self.all[who].cut_until = self.now + self.rng.between(10 * SECOND, 20 * SECOND);
        }
        let lost = start < self.all[who].cut_until || self.strikes("request lost", 50);
        let unheard = lost || way + back >= timeout || self.strikes("answer lost", 50);
        if unheard {
            let answer = LeaseAnswer::Unclear;
            self.at(start + timeout, who, Happening::Answer { answer, sent });
        }
        if !lost {
            let answer_at = (!unheard).then_some(start + way + back);
            self.at(
                start + way,
                who,
                Happening::Request {
                    step,
                    sent,
                    answer_at,
                },
            );
        }
    }

    fn serve(&mut self, step: &LeaseStep, who: usize, life: u64) -> LeaseAnswer {
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
        if life > 0 && earlier.is_some_and(|holder| (0..life).any(|life| identity(who, life) == holder)) {
            *self.hits.entry("own lease taken over").or_default() += 1;
        }
        let by_itself = earlier.is_some_and(|holder| (0..=life).any(|life| identity(who, life) == holder));
        // As early as by the fastest clock.
        let ran_out = self.stored + 15 * SECOND * 1000 / 1040;
        if earlier.is_some() && !by_itself && self.now < ran_out {
            let now = self.now;
            self.violation = Some(format!("at {now}: {who} takes a lease stored at {}", self.stored));
        }
        self.stored = self.now;
        self.versions += 1;
        let record = LeaseRecord {
            holder: identity(who, life),
            duration: Duration::from_secs(15),
            transitions: *transitions,
            version: self.versions.to_string(),
        };
        self.record = Some(record.clone());
        LeaseAnswer::Written(record)
    }

    fn die(&mut self, who: usize) {
        let old = &self.all[who];
        // Paused or not: nothing is started before its predecessor has ended. What that has sent is still on its way.
        self.all[who] = Candidate::new(who, old.life + 1, self.now, old.rate, old.remembers);
        let when = self.now + self.rng.between(0, 3 * SECOND);
        self.at(when, who, Happening::Turn);
        self.at(when, who, Happening::Work);
    }

    fn work(&mut self, who: usize) {
        let now = self.clock(who);
        if self.all[who].lease.holds(now) {
            if self.all[who].leads_since.is_none() {
                self.leaders += 1;
                self.all[who].leads_since = Some(self.now);
            }
            let led_since = self.all[who].leads_since.unwrap_or_default();
            // Between its last look at the clock and the write.
            let paused = self.strikes("pause", 2);
            if paused {
                let pause = self.rng.between(SECOND, 40 * SECOND);
                self.all[who].paused_until = self.now + pause;
            }
            let limit = self.real(who, 5 * SECOND);
            // A server that does not answer about the lease is slow with claims too.
            let is_cut = self.now < self.all[who].cut_until;
            let way = if is_cut && self.rng.chance(500) {
                self.rng.between(limit * 9 / 10, limit)
            } else if self.rng.chance(100) {
                self.rng.between(0, limit)
            } else {
                self.rng.between(100, 20_000)
            };
            let start = self.now.max(self.all[who].paused_until);
            self.at(start + way, who, Happening::Written { led_since, paused });
        }
        let pace = if self.now < self.all[who].cut_until { 5 } else { 1 };
        let when = self.now + self.rng.between(10_000, SECOND / pace);
        self.at(when, who, Happening::Work);
    }

    /// Nobody else may have begun to lead after this leader and before its write arrives.
    fn written(&mut self, (who, life): (usize, u64), led_since: u64, paused: bool) {
        self.writes += 1;
        if self.all[who].life != life {
            *self.hits.entry("write of an ended process").or_default() += 1;
            let holder = self.record.as_ref().map(|record| record.holder.as_str());
            if holder == Some(&identity(who, self.all[who].life)) {
                let kind = "write of an ended process while its lease is taken over";
                *self.hits.entry(kind).or_default() += 1;
            }
        }
        let now = self.now;
        let successor = self.all.iter().enumerate().any(|(other, candidate)| {
            (other, candidate.life) != (who, life)
                && candidate
                    .leads_since
                    .is_some_and(|since| since > led_since && since < now)
        });
        if successor && paused {
            *self.hits.entry("write of a paused leader").or_default() += 1;
        } else if successor {
            self.violation = Some(format!(
                "at {now}: a write of {} arrives when another one leads",
                identity(who, life)
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
        // Clocks that differ by almost a tenth: machines differ by far less.
        let cluster = run(seed, &[950, 975, 1000, 1020, 1040]);
        assert_eq!(cluster.violation, None, "seed {seed}");
        let leads = |who: usize| {
            let candidate = &cluster.all[who];
            candidate.lease.holds(cluster.clock(who))
        };
        let now_leading = (0..cluster.all.len()).filter(|who| leads(*who)).count();
        assert_eq!(
            now_leading, 1,
            "seed {seed}: when all is well again, exactly one leads"
        );
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
fn a_clock_half_as_fast_again_exceeds_what_a_lease_bears() {
    let broken = (0..400).find_map(|seed| run(seed, &[800, 1300]).violation);
    assert!(broken.is_some(), "the model above would not notice two leaders");
}
