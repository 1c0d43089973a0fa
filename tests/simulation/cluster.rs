//! The simulated cluster: a virtual clock, an event queue and all components. One thread, one seed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drayman::core::claims::{Answer, Command, Event, EventReport, ObjectKey, Statistics};

use crate::calls::{Call, Request};
use crate::driver::{Environment, MemoryDriver};
use crate::faults::{Fault, Faults};
use crate::node::{NodeAction, Nodes};
use crate::rng::Rng;
use crate::runtime::Process;
use crate::scheduler::Plan;
use crate::store::{Kind, Store};

pub(crate) const MILLISECOND: u64 = 1_000;
pub(crate) const SECOND: u64 = 1_000_000;
/// More steps than this in ten seconds are a hot loop.
const HOT: u64 = 10_000;

/// A watch, identified by its kind and the number of its restarts. Events of earlier rounds are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Watch {
    pub(crate) kind: Kind,
    pub(crate) round: u32,
}

/// A scheduled action.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    /// An event reaches the controller; `from` is the watch that delivers it, if any.
    Deliver {
        generation: u32,
        event: Event,
        from: Option<Watch>,
    },
    /// A watch starts or restarts with a list.
    List {
        generation: u32,
        watch: Watch,
    },
    /// A watch delivers its next event.
    Watch {
        generation: u32,
        watch: Watch,
    },
    /// The controller decides.
    Decide {
        generation: u32,
    },
    /// A request reaches the API server.
    Arrive(u64),
    /// The driver executes a call.
    Work {
        generation: u32,
        call: u64,
    },
    /// A paused previous leader sends its pending command.
    LateWrite(Command),
    /// The controller process starts.
    Start,
    /// The scheduler runs a cycle for a pod.
    Cycle(ObjectKey),
    /// The scheduler writes its decision.
    ApplyPlan(Plan),
    /// One of the other controllers performs a task.
    Housekeep,
    /// A user acts.
    User,
    Node {
        node: String,
        action: NodeAction,
    },
}

/// The state of the cluster and of the run.
#[expect(clippy::struct_excessive_bools, reason = "independent switches")]
pub(crate) struct Cluster {
    /// Virtual time in microseconds.
    pub(crate) now: u64,
    queue: BTreeMap<(u64, u64), Action>,
    sequence: u64,
    pub(crate) rng: Rng,
    pub(crate) store: Store,
    pub(crate) environment: Environment,
    pub(crate) faults: Faults,
    pub(crate) driver: MemoryDriver,
    /// The driver state survives a restart of the controller, as for network-attached devices.
    pub(crate) durable_driver: bool,
    pub(crate) process: Option<Process>,
    pub(crate) generation: u32,
    /// Requests in flight, including those of dead processes.
    pub(crate) network: BTreeMap<u64, Request>,
    pub(crate) calls: BTreeMap<u64, Call>,
    pub(crate) requests_sent: u64,
    /// Number of commands sent to the server or the driver.
    pub(crate) commands: u64,
    /// The commands as text if `record` is set.
    pub(crate) command_log: Vec<String>,
    pub(crate) record: bool,
    /// Prints a trace.
    pub(crate) verbose: bool,
    /// The server refuses every allocation of claims with this name prefix.
    pub(crate) refuse_allocations: Option<&'static str>,
    pub(crate) reports: Vec<EventReport>,
    /// Number of writes and reads that reached the server.
    pub(crate) writes: u64,
    pub(crate) reads: u64,
    pub(crate) evaluations: u64,
    /// Statistics of ended processes.
    pub(crate) statistics: Statistics,
    /// UIDs of pods with a scheduled or running cycle.
    pub(crate) cycles: BTreeSet<String>,
    pub(crate) attempts: BTreeMap<String, u32>,
    /// The scheduler waits at least a second before it retries a pod, as the real one does.
    pub(crate) slow_scheduler: bool,
    /// By pod UID, the nodes that the pod can run on apart from devices; all nodes if absent.
    pub(crate) pod_nodes: BTreeMap<String, BTreeSet<String>>,
    pub(crate) housekeeping: bool,
    /// The store version at which the other controllers were idle.
    pub(crate) idle_version: Option<u64>,
    pub(crate) user_actions: u64,
    /// Maximum delay until the other controllers observe a change.
    pub(crate) lag: u64,
    /// UIDs of claims whose allocation a previous leader recorded late.
    pub(crate) late_allocations: BTreeSet<String>,
    /// UIDs of pods without a node at the last read by the controller.
    pub(crate) read_without_node: BTreeSet<String>,
    /// UIDs of claims that a previous leader labelled late.
    pub(crate) late_labels: BTreeSet<String>,
    /// The request being served was sent by a previous leader.
    pub(crate) late: bool,
    /// Pairs of claims that shared a device because of late allocations.
    pub(crate) double_allocations: BTreeSet<(String, String)>,
    /// Structured mode: the cluster serves `resource.k8s.io/v1`, and the scheduler allocates instead of our controller.
    pub(crate) structured: bool,
    /// Number of shares that the scheduler allocated.
    pub(crate) shares_given: u64,
    /// Kubelets and companions, if any.
    pub(crate) nodes: Nodes,
    pub(crate) violation: Option<String>,
    pub(crate) hash: u64,
    pub(crate) steps: u64,
    /// Start time and first step of the current ten-second window.
    window: (u64, u64),
    pub(crate) last_change: u64,
    seen_version: u64,
}

impl Cluster {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            now: 0,
            queue: BTreeMap::new(),
            sequence: 0,
            rng: Rng::new(seed),
            store: Store::default(),
            environment: Environment::default(),
            faults: Faults::default(),
            driver: MemoryDriver::default(),
            durable_driver: false,
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
            evaluations: 0,
            statistics: Statistics::default(),
            cycles: BTreeSet::new(),
            attempts: BTreeMap::new(),
            slow_scheduler: false,
            pod_nodes: BTreeMap::new(),
            housekeeping: false,
            idle_version: None,
            user_actions: 0,
            lag: 20 * MILLISECOND,
            late_allocations: BTreeSet::new(),
            read_without_node: BTreeSet::new(),
            late_labels: BTreeSet::new(),
            late: false,
            double_allocations: BTreeSet::new(),
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

    /// A network latency: usually short, occasionally long.
    pub(crate) fn delay(&mut self) -> u64 {
        if self.rng.chance(30) {
            self.rng.between(0, 500 * MILLISECOND)
        } else {
            self.rng.between(100, 5 * MILLISECOND)
        }
    }

    pub(crate) fn trace(&self, text: impl FnOnce() -> String) {
        if self.verbose {
            let (seconds, micros) = (self.now / SECOND, self.now % SECOND);
            println!("[{seconds:>5}.{micros:06}] {}", text());
        }
    }

    /// Records a violated invariant. The first one ends the run.
    pub(crate) fn violate(&mut self, text: impl FnOnce() -> String) {
        if self.violation.is_none() {
            let text = text();
            self.trace(|| format!("VIOLATION {text}"));
            self.violation = Some(text);
        }
    }

    fn mix(&mut self, value: u64) {
        self.hash = (self.hash ^ value).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
    }

    /// Executes the next action if it is due by `end`. Returns whether there was one.
    pub(crate) fn step(&mut self, end: u64) -> bool {
        if self.violation.is_some() {
            return false;
        }
        // A scenario may have changed the store between two steps.
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

    /// Notifies all components of store changes.
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
            Action::List { generation, watch } => self.take_list(generation, watch),
            Action::Watch { generation, watch } => self.show_next(generation, watch),
            Action::Decide { generation } => {
                if generation == self.generation {
                    self.decide();
                }
            }
            Action::Arrive(number) => self.arrive(number),
            Action::Work { generation, call } => self.work(generation, call),
            Action::LateWrite(command) => self.send_late_write(&command),
            Action::Start => self.start(),
            Action::Cycle(pod) => self.cycle(&pod),
            Action::ApplyPlan(plan) => self.apply_plan(plan),
            Action::Housekeep => self.housekeep(),
            Action::User => self.user_acts(),
            Action::Node { node, action } => self.act_on_node(&node, action),
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

    /// Plans a fault at the n-th command from now.
    pub(crate) fn fault_at(&mut self, command: u64, fault: Fault) {
        self.faults.plan.insert(self.commands + command, fault);
    }

    /// Runs until `done`; a violation after ten minutes.
    pub(crate) fn run_until(&mut self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let end = self.now + 600 * SECOND;
        while !done(self) {
            if !self.step(end) {
                self.violate(|| format!("timeout: {what}"));
                return;
            }
        }
    }

    /// Runs until the store is unchanged for two minutes. More than `limit` steps are a hot loop.
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
                self.violate(|| "the cluster does not become idle".to_owned());
                return;
            }
            if self.steps > last_step {
                self.violate(|| format!("more than {limit} steps without becoming idle"));
                return;
            }
        }
    }

    /// Statistics of all controller processes.
    pub(crate) fn counted(&self) -> Statistics {
        let mut sum = self.statistics.clone();
        if let Some(process) = &self.process {
            add(&mut sum, &process.state.statistics());
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
