//! All metrics: name, labels and help text. The collectors and docs/metrics.md use this table.

use super::reasons::{By, EVENTS, REFUSALS};
use crate::core::claims::Statistics;
use crate::node::kubelet::transport::GrpcCalls;
use crate::node::metrics::Figures;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// Component that exports a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Of {
    Both,
    Controller,
    Companion,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Values {
    /// Fixed values, present from the start.
    These(fn() -> Vec<&'static str>),
    /// Open set of values, described in words.
    Such(&'static str),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Label {
    pub(super) name: &'static str,
    pub(super) values: Values,
}

/// A metric.
#[derive(Clone, Copy, Debug)]
pub(super) struct Series {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) of: Of,
    /// Labels, in order.
    pub(super) labels: &'static [Label],
    pub(super) help: &'static str,
}

const fn these(name: &'static str, values: fn() -> Vec<&'static str>) -> Label {
    Label {
        name,
        values: Values::These(values),
    }
}

const fn such(name: &'static str, values: &'static str) -> Label {
    Label {
        name,
        values: Values::Such(values),
    }
}

const fn series(
    name: &'static str,
    kind: Kind,
    of: Of,
    labels: &'static [Label],
    help: &'static str,
) -> Series {
    Series {
        name,
        kind,
        of,
        labels,
        help,
    }
}

use Kind::{Counter, Gauge, Histogram};
use Of::{Both, Companion, Controller};

/// HTTP methods of API requests.
pub(super) const METHODS: [&str; 5] = ["DELETE", "GET", "PATCH", "POST", "PUT"];
/// Values present from the start; others appear with their first response.
pub(super) const HTTP_CODES: [&str; 2] = ["200", "<error>"];
/// Device health.
pub(super) const HEALTH: [&str; 2] = ["healthy", "unhealthy"];
/// Results of kubelet's requests.
pub(super) const RESULTS: [&str; 2] = ["done", "refused"];
/// State of a claim on a node.
pub(super) const CLAIMS: [&str; 2] = ["held", "quarantined"];

/// Returns the event reasons of a component.
pub(super) fn events_of(by: By) -> impl Iterator<Item = &'static str> {
    EVENTS
        .iter()
        .filter(move |event| event.by == by)
        .map(|event| event.word)
}

/// Returns the reasons for which pods wait: the controller's event reasons on pods, and one without an event.
pub(super) fn waiting() -> Vec<&'static str> {
    let on_pods = EVENTS
        .iter()
        .filter(|event| event.by == By::Controller && event.on.contains("pod"));
    let mut all: Vec<_> = on_pods.map(|event| event.word).collect();
    all.push(Statistics::SOME_NODES);
    all.sort_unstable();
    all
}

fn owners() -> Vec<&'static str> {
    crate::core::prepare::inventory::Owner::ALL
        .map(crate::core::prepare::inventory::Owner::name)
        .to_vec()
}

fn grpc(part: fn(&crate::node::kubelet::transport::GrpcMethod) -> &'static str) -> Vec<&'static str> {
    let mut all: Vec<_> = GrpcCalls::METHODS.iter().map(part).collect();
    all.sort_unstable();
    all.dedup();
    all
}

const GRPC_TYPE: Label = these("grpc_type", || grpc(|method| method.sort));
const GRPC_SERVICE: Label = these("grpc_service", || grpc(|method| method.service));
const GRPC_METHOD: Label = these("grpc_method", || grpc(|method| method.method));
const QUEUE: Label = these("name", || Statistics::QUEUES.to_vec());

pub(super) const BUILD: Series = series(
    "drayman_build_info",
    Gauge,
    Both,
    &[
        these("component", || vec!["controller", "node"]),
        such("version", "the program's version"),
        such("architecture", "the processor's"),
    ],
    "The program that runs: always 1",
);
pub(super) const REQUESTS: Series = series(
    "rest_client_requests_total",
    Counter,
    Both,
    &[
        such("code", "the status of the answer; `<error>` if there was none"),
        these("method", || METHODS.to_vec()),
    ],
    "Requests to the API server",
);
pub(super) const REQUEST_DURATION: Series = series(
    "rest_client_request_duration_seconds",
    Histogram,
    Both,
    &[these("verb", || METHODS.to_vec())],
    "Time from a request to the API server until the head of its answer",
);
pub(super) const CPU: Series = series(
    "process_cpu_seconds_total",
    Counter,
    Both,
    &[],
    "Processor time that was used, in user and system mode",
);
pub(super) const RESIDENT: Series = series(
    "process_resident_memory_bytes",
    Gauge,
    Both,
    &[],
    "Memory that is resident",
);
pub(super) const VIRTUAL: Series = series(
    "process_virtual_memory_bytes",
    Gauge,
    Both,
    &[],
    "Address space that is in use",
);
pub(super) const OPEN_FILES: Series = series(
    "process_open_fds",
    Gauge,
    Both,
    &[],
    "File descriptors that are open",
);
pub(super) const MOST_FILES: Series = series(
    "process_max_fds",
    Gauge,
    Both,
    &[],
    "File descriptors that may be open",
);
pub(super) const STARTED: Series = series(
    "process_start_time_seconds",
    Gauge,
    Both,
    &[],
    "When the process was started, in seconds since 1970",
);
pub(super) const EVENTS_TOLD: Series = series(
    "drayman_events_total",
    Counter,
    Both,
    &[such("reason", "the reasons of the component's [events](#events)")],
    "Events for people, by reason",
);

pub(super) const LEADER: Series = series(
    "leader_election_master_status",
    Gauge,
    Controller,
    &[such("name", "the driver's name, which the lease has too")],
    "Whether this controller leads, or is known to be alone: 1 if so",
);
pub(super) const QUEUE_DEPTH: Series = series(
    "workqueue_depth",
    Gauge,
    Controller,
    &[QUEUE],
    "Objects that are to be looked at",
);
pub(super) const QUEUE_ADDS: Series = series(
    "workqueue_adds_total",
    Counter,
    Controller,
    &[QUEUE],
    "How often an object came into the queue",
);
pub(super) const QUEUE_WAITED: Series = series(
    "workqueue_queue_duration_seconds",
    Histogram,
    Controller,
    &[QUEUE],
    "How long objects were in the queue before they were looked at",
);
pub(super) const QUEUE_WORKED: Series = series(
    "workqueue_work_duration_seconds",
    Histogram,
    Controller,
    &[QUEUE],
    "How long the requests and calls took that followed, until they were answered",
);
pub(super) const QUEUE_UNFINISHED: Series = series(
    "workqueue_unfinished_work_seconds",
    Gauge,
    Controller,
    &[QUEUE],
    "How long the requests and calls without an answer have taken so far, all together",
);
pub(super) const QUEUE_LONGEST: Series = series(
    "workqueue_longest_running_processor_seconds",
    Gauge,
    Controller,
    &[QUEUE],
    "How long the oldest request or call without an answer has taken so far",
);
pub(super) const QUEUE_RETRIES: Series = series(
    "workqueue_retries_total",
    Counter,
    Controller,
    &[QUEUE],
    "Requests and calls that came to nothing, so that they are tried again or given up",
);
pub(super) const ALLOCATED: Series = series(
    "drayman_claims_allocated_total",
    Counter,
    Controller,
    &[],
    "Claims allocated, with the allocation stored",
);
pub(super) const RELEASED: Series = series(
    "drayman_claims_released_total",
    Counter,
    Controller,
    &[],
    "Claims whose devices were given back",
);
pub(super) const ATTEMPTS: Series = series(
    "drayman_allocation_attempts_total",
    Counter,
    Controller,
    &[these("result", || Statistics::ATTEMPTS.to_vec())],
    "Attempts to allocate all claims of a pod, or one immediate claim, by how they ended",
);
pub(super) const DRIVER_CALLS: Series = series(
    "drayman_driver_calls_total",
    Counter,
    Controller,
    &[
        these("call", || Statistics::CALLS.to_vec()),
        these("result", || Statistics::CALL_RESULTS.to_vec()),
    ],
    "Calls of the driver",
);
pub(super) const WAITING: Series = series(
    "drayman_pods_waiting",
    Gauge,
    Controller,
    &[these("reason", waiting)],
    "Pods that wait for devices now, by the reason of what was said of them last",
);
pub(super) const WAKE_UPS: Series = series(
    "drayman_wake_up_duration_seconds",
    Histogram,
    Controller,
    &[],
    "Time from when a device became free until a pod that waits for it was allocated it, or the scheduler told of the place",
);
pub(super) const RECHECK: Series = series(
    "drayman_recheck_caught_total",
    Counter,
    Controller,
    &[],
    "Waiting pods for which the slow recheck found a place that nothing had announced: lost wake-ups",
);

pub(super) const NODE_READY: Series = series(
    "drayman_node_ready",
    Gauge,
    Companion,
    &[],
    "Whether every door of kubelet is open: 1 if so",
);
pub(super) const DEVICES: Series = series(
    "drayman_node_devices",
    Gauge,
    Companion,
    &[
        such(
            "kind",
            "the kinds of the configuration that this node has had a device of",
        ),
        these("health", || HEALTH.to_vec()),
        these("owner", owners),
    ],
    "Devices of this node",
);
pub(super) const NODE_CLAIMS: Series = series(
    "drayman_node_claims",
    Gauge,
    Companion,
    &[these("state", || CLAIMS.to_vec())],
    "Claims that hold devices of this node; those in quarantine are counted among those that are held, too",
);
pub(super) const OPERATIONS: Series = series(
    "drayman_node_operations_total",
    Counter,
    Companion,
    &[
        these("operation", || Figures::OPERATIONS.to_vec()),
        these("result", || RESULTS.to_vec()),
    ],
    "What kubelet has asked for, for each claim and for each call of a device plugin",
);
pub(super) const NODE_REFUSALS: Series = series(
    "drayman_node_refusals_total",
    Counter,
    Companion,
    &[these("reason", || REFUSALS.map(|(word, _)| word).to_vec())],
    "What was refused to kubelet, by [reason](#why-a-companion-refuses)",
);
pub(super) const GRPC_STARTED: Series = series(
    "grpc_server_started_total",
    Counter,
    Companion,
    &[GRPC_TYPE, GRPC_SERVICE, GRPC_METHOD],
    "Calls that came in",
);
pub(super) const GRPC_HANDLED: Series = series(
    "grpc_server_handled_total",
    Counter,
    Companion,
    &[
        GRPC_TYPE,
        GRPC_SERVICE,
        GRPC_METHOD,
        such(
            "grpc_code",
            "the codes of gRPC; `OK`, `Canceled`, `FailedPrecondition` and `InvalidArgument` from the start",
        ),
    ],
    "Calls that have ended, by code",
);
pub(super) const GRPC_HANDLING: Series = series(
    "grpc_server_handling_seconds",
    Histogram,
    Companion,
    &[GRPC_TYPE, GRPC_SERVICE, GRPC_METHOD],
    "How long calls took; for a stream, until it ended",
);

pub(super) const ALL: [&Series; 33] = [
    &BUILD,
    &REQUESTS,
    &REQUEST_DURATION,
    &EVENTS_TOLD,
    &CPU,
    &RESIDENT,
    &VIRTUAL,
    &OPEN_FILES,
    &MOST_FILES,
    &STARTED,
    &LEADER,
    &ALLOCATED,
    &RELEASED,
    &ATTEMPTS,
    &DRIVER_CALLS,
    &WAITING,
    &WAKE_UPS,
    &RECHECK,
    &QUEUE_DEPTH,
    &QUEUE_ADDS,
    &QUEUE_WAITED,
    &QUEUE_WORKED,
    &QUEUE_UNFINISHED,
    &QUEUE_LONGEST,
    &QUEUE_RETRIES,
    &NODE_READY,
    &DEVICES,
    &NODE_CLAIMS,
    &OPERATIONS,
    &NODE_REFUSALS,
    &GRPC_STARTED,
    &GRPC_HANDLED,
    &GRPC_HANDLING,
];
