//! The stage: a virtual clock, one queue of what is to happen, and everybody on it. One thread, one seed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drayman::core::claims::{Answer, Command, Event, ObjectKey, Report, Statistics};

use crate::calls::{Call, Request};
use crate::driver::{Facts, MemoryDriver};
use crate::faults::Faults;
use crate::node::{Doing, Nodes};
use crate::rng::Rng;
use crate::scheduler::Plan;
use crate::shell::Process;
use crate::store::{Kind, Store};

pub(crate) const MILLISECOND: u64 = 1_000;
pub(crate) const SECOND: u64 = 1_000_000;
/// More steps than this in ten seconds are no work any more.
const HOT: u64 = 10_000;

/// A watch: its kind, and how often it has started over. What an earlier round had on its way is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) kind: Kind,
    pub(crate) round: u32,
}

/// Something that happens at its time.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    /// An event reaches the controller; `from` is the watch that it came by.
    Deliver {
        generation: u32,
        event: Event,
        from: Option<Way>,
    },
    /// A list is taken for a watch that starts (over).
    List { generation: u32, way: Way },
    /// A watch shows its next event.
    Watch { generation: u32, way: Way },
    /// The controller gets round to deciding.
    Decide { generation: u32 },
    /// A request reaches the server.
    Arrive(u64),
    /// The driver does what it was asked.
    Work { generation: u32, call: u64 },
    /// A leader that was paused sends what it was about to send.
    Ghost(Command),
    /// The controller's process starts.
    Start,
    /// The scheduler looks at a pod.
    Cycle(ObjectKey),
    /// The scheduler writes what it decided.
    Carry(Plan),
    /// One of the cluster's other controllers does one thing.
    Housekeep,
    /// A user does something.
    User,
    /// Something happens on a node.
    Node { node: String, doing: Doing },
}

/// The whole cluster.
#[expect(
    clippy::struct_excessive_bools,
    reason = "switches of a stage, independent of each other"
)]
pub(crate) struct Stage {
    /// Microseconds.
    pub(crate) now: u64,
    queue: BTreeMap<(u64, u64), Action>,
    sequence: u64,
    pub(crate) rng: Rng,
    pub(crate) store: Store,
    pub(crate) facts: Facts,
    pub(crate) faults: Faults,
    pub(crate) driver: MemoryDriver,
    /// The driver's books survive the controller, as those of devices on a network do.
    pub(crate) lasting_driver: bool,
    pub(crate) process: Option<Process>,
    pub(crate) generation: u32,
    /// Requests on their way to the server, of this process and of dead ones.
    pub(crate) network: BTreeMap<u64, Request>,
    pub(crate) calls: BTreeMap<u64, Call>,
    pub(crate) requests_sent: u64,
    /// Commands that went to the server or the driver.
    pub(crate) commands: u64,
    /// The commands as text, if `record` is set.
    pub(crate) command_log: Vec<String>,
    pub(crate) record: bool,
    /// Print everything.
    pub(crate) verbose: bool,
    /// The server refuses every allocation of claims whose names begin so, for good.
    pub(crate) refuse_allocations: Option<&'static str>,
    pub(crate) reports: Vec<Report>,
    /// Writes and reads that reached the server.
    pub(crate) writes: u64,
    pub(crate) reads: u64,
    pub(crate) judgements: u64,
    /// Statistics of the processes that have ended.
    pub(crate) statistics: Statistics,
    /// Pods' cycles that are under way or due, by uid.
    pub(crate) cycles: BTreeSet<String>,
    pub(crate) attempts: BTreeMap<String, u32>,
    /// The scheduler takes a second or more before it looks at a pod again, as the real one does.
    pub(crate) patient_scheduler: bool,
    /// The nodes that a pod can run on for other reasons than devices, by uid; all if absent.
    pub(crate) pod_nodes: BTreeMap<String, BTreeSet<String>>,
    pub(crate) housekeeping: bool,
    /// The version at which the other controllers had nothing to do.
    pub(crate) tidy_at: Option<u64>,
    pub(crate) user_actions: u64,
    /// For how long changes may rest before the other controllers see them, at most.
    pub(crate) lag: u64,
    /// Uids of claims whose allocation an old leader has recorded late.
    pub(crate) ghosts: BTreeSet<String>,
    /// Uids of the pods that had no node when the controller last read them.
    pub(crate) read_without_node: BTreeSet<String>,
    /// Uids of claims to which an old leader has given its label late.
    pub(crate) late_labels: BTreeSet<String>,
    /// What is carried out now was sent by an old leader.
    pub(crate) late: bool,
    /// Pairs of claims that had the same device because of that.
    pub(crate) doubles: BTreeSet<(String, String)>,
    /// The cluster serves `resource.k8s.io/v1`: there is no controller of ours, and the scheduler allocates.
    pub(crate) structured: bool,
    /// Shares that the scheduler has given to claims.
    pub(crate) shares_given: u64,
    /// Kubelets and companions, if the run has them.
    pub(crate) nodes: Nodes,
    pub(crate) violation: Option<String>,
    pub(crate) hash: u64,
    pub(crate) steps: u64,
    /// When the present ten seconds began, and with which step.
    window: (u64, u64),
    pub(crate) last_change: u64,
    seen_version: u64,
}

impl Stage {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            now: 0,
            queue: BTreeMap::new(),
            sequence: 0,
            rng: Rng::new(seed),
            store: Store::default(),
            facts: Facts::default(),
            faults: Faults::default(),
            driver: MemoryDriver::default(),
            lasting_driver: false,
            process: None,
            generation: 0,
            network: BTreeMap::new(),
            calls: BTreeMap::new(),
            requests_sent: 0,
            commands: 0,
            command_log: Vec::new(),
            record: false,
            verbose: false,
            refuse_allocations: None,
            reports: Vec::new(),
            writes: 0,
            reads: 0,
            judgements: 0,
            statistics: Statistics::default(),
            cycles: BTreeSet::new(),
            attempts: BTreeMap::new(),
            patient_scheduler: false,
            pod_nodes: BTreeMap::new(),
            housekeeping: false,
            tidy_at: None,
            user_actions: 0,
            lag: 20 * MILLISECOND,
            ghosts: BTreeSet::new(),
            read_without_node: BTreeSet::new(),
            late_labels: BTreeSet::new(),
            late: false,
            doubles: BTreeSet::new(),
            structured: false,
            shares_given: 0,
            nodes: Nodes::default(),
            violation: None,
            hash: 0,
            steps: 0,
            window: (0, 0),
            last_change: 0,
            seen_version: 0,
        }
    }

    // === time ===

    pub(crate) fn at(&mut self, when: u64, action: Action) {
        self.sequence += 1;
        self.queue.insert((when.max(self.now), self.sequence), action);
    }

    pub(crate) fn after(&mut self, delay: u64, action: Action) {
        self.at(self.now + delay, action);
    }

    /// A delay as on a good network, now and then as on a bad one.
    pub(crate) fn delay(&mut self) -> u64 {
        if self.rng.chance(30) {
            self.rng.between(0, 500 * MILLISECOND)
        } else {
            self.rng.between(100, 5 * MILLISECOND)
        }
    }

    pub(crate) fn note(&self, text: impl FnOnce() -> String) {
        if self.verbose {
            let (seconds, micros) = (self.now / SECOND, self.now % SECOND);
            println!("[{seconds:>5}.{micros:06}] {}", text());
        }
    }

    /// A promise is broken. The first one ends the run.
    pub(crate) fn violate(&mut self, text: impl FnOnce() -> String) {
        if self.violation.is_none() {
            let text = text();
            self.note(|| format!("VIOLATION {text}"));
            self.violation = Some(text);
        }
    }

    fn mix(&mut self, value: u64) {
        self.hash = (self.hash ^ value).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
    }

    /// Lets the next thing happen, if it is due by `end`. The answer is whether there was one.
    pub(crate) fn step(&mut self, end: u64) -> bool {
        if self.violation.is_some() {
            return false;
        }
        // A story may have changed something between two steps.
        self.follow_up();
        let Some((&(when, number), _)) = self.queue.first_key_value() else {
            return false;
        };
        if when > end {
            return false;
        }
        let action = self.queue.remove(&(when, number)).unwrap();
        self.now = when;
        self.steps += 1;
        if when > self.window.0 + 10 * SECOND {
            self.window = (when, self.steps);
        } else if self.steps > self.window.1 + HOT {
            self.violate(|| format!("a hot loop: more than {HOT} steps in ten seconds"));
            return false;
        }
        self.act(action);
        let (version, probe) = (self.store.version(), self.rng.clone().next());
        self.mix(when);
        self.mix(version);
        self.mix(probe);
        self.mix(self.commands);
        self.follow_up();
        true
    }

    /// Everybody notices what has been stored.
    fn follow_up(&mut self) {
        let version = self.store.version();
        if version != self.seen_version {
            self.seen_version = version;
            self.last_change = self.now;
            self.check_store();
            self.feed_watches();
            self.wake_scheduler();
            self.wake_kubelets();
        }
        self.start_housekeeping();
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Deliver {
                generation,
                event,
                from,
            } => self.deliver(generation, event, from),
            Action::List { generation, way } => self.take_list(generation, way),
            Action::Watch { generation, way } => self.show_next(generation, way),
            Action::Decide { generation } => {
                if generation == self.generation {
                    self.decide();
                }
            }
            Action::Arrive(number) => self.arrive(number),
            Action::Work { generation, call } => self.work(generation, call),
            Action::Ghost(command) => self.ghost_writes(&command),
            Action::Start => self.start(),
            Action::Cycle(pod) => self.cycle(&pod),
            Action::Carry(plan) => self.carry(plan),
            Action::Housekeep => self.housekeep(),
            Action::User => self.user_acts(),
            Action::Node { node, doing } => self.act_on_node(&node, doing),
        }
    }

    // === running ===

    /// Runs for `duration`.
    pub(crate) fn run_for(&mut self, duration: u64) {
        let end = self.now + duration;
        while self.step(end) {}
        if self.violation.is_none() {
            self.now = end;
        }
    }

    /// Runs until `done`, or fails after ten minutes.
    pub(crate) fn run_until(&mut self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let end = self.now + 600 * SECOND;
        while !done(self) {
            if !self.step(end) {
                self.violate(|| format!("never: {what}"));
                return;
            }
        }
    }

    /// Runs until nothing has been stored for two minutes. More than `limit` steps on the way are a hot loop.
    pub(crate) fn run_until_quiet(&mut self, limit: u64) {
        let last_step = self.steps + limit;
        let end = self.now + 7200 * SECOND;
        self.follow_up();
        loop {
            let quiet_until = self.last_change + 120 * SECOND;
            if self
                .queue
                .first_key_value()
                .is_none_or(|((when, _), _)| *when > quiet_until)
                && self.network.is_empty()
                && (self.process.is_some() || self.structured)
            {
                self.now = self.now.max(quiet_until);
                return;
            }
            if !self.step(end) {
                self.violate(|| "it never comes to rest".to_owned());
                return;
            }
            if self.steps > last_step {
                self.violate(|| format!("more than {limit} steps without coming to rest"));
                return;
            }
        }
    }

    /// What the controller has counted, over all its lives.
    pub(crate) fn counted(&self) -> Statistics {
        let mut sum = self.statistics.clone();
        if let Some(process) = &self.process {
            add(&mut sum, &process.world.statistics());
        }
        sum
    }

    pub(crate) fn answer_later(
        &mut self,
        generation: u32,
        delay: u64,
        id: drayman::core::claims::CallId,
        answer: Answer,
    ) {
        let event = Event::Answer { id, answer };
        self.after(
            delay,
            Action::Deliver {
                generation,
                event,
                from: None,
            },
        );
    }

    pub(crate) fn claim(&self, name: &str) -> Option<Arc<drayman::api::resource::ResourceClaim>> {
        self.store.claims.get(&ObjectKey::new("default", name)).cloned()
    }
}

pub(crate) fn add(sum: &mut Statistics, more: &Statistics) {
    sum.allocations += more.allocations;
    sum.deallocations += more.deallocations;
    sum.caught_by_recheck += more.caught_by_recheck;
}
