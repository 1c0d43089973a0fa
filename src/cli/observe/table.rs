//! All metrics: name, labels and help text. The collectors and docs/reference/metrics.md use this table.

use prometheus_client::metrics::MetricType;

use super::reasons::{By, EVENTS, REFUSALS};
use crate::core::claims::Statistics;
use crate::node::kubelet::transport::GrpcCalls;
use crate::node::metrics::{Metrics, Omission};

/// Component that exports a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Of {
    Both,
    Controller,
    Companion,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum LabelValues {
    /// Fixed values, present from the start.
    These(fn() -> Vec<&'static str>),
    /// Open set of values, described in words.
    Such(&'static str),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct MetricLabel {
    pub(super) name: &'static str,
    pub(super) values: LabelValues,
}

/// A metric.
#[derive(Clone, Copy, Debug)]
pub(super) struct Series {
    pub(super) name: &'static str,
    pub(super) kind: MetricType,
    pub(super) of: Of,
    /// Labels, in order.
    pub(super) labels: &'static [MetricLabel],
    pub(super) help: &'static str,
}

const fn these(name: &'static str, values: fn() -> Vec<&'static str>) -> MetricLabel {
    MetricLabel {
        name,
        values: LabelValues::These(values),
    }
}

const fn such(name: &'static str, values: &'static str) -> MetricLabel {
    MetricLabel {
        name,
        values: LabelValues::Such(values),
    }
}

type Labels = &'static [MetricLabel];

const fn series(kind: MetricType, name: &'static str, of: Of, labels: Labels, help: &'static str) -> Series {
    Series {
        name,
        kind,
        of,
        labels,
        help,
    }
}

const fn counter(name: &'static str, of: Of, labels: Labels, help: &'static str) -> Series {
    series(MetricType::Counter, name, of, labels, help)
}

const fn gauge(name: &'static str, of: Of, labels: Labels, help: &'static str) -> Series {
    series(MetricType::Gauge, name, of, labels, help)
}

const fn histogram(name: &'static str, of: Of, labels: Labels, help: &'static str) -> Series {
    series(MetricType::Histogram, name, of, labels, help)
}

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

const GRPC_TYPE: MetricLabel = these("grpc_type", || grpc(|method| method.sort));
const GRPC_SERVICE: MetricLabel = these("grpc_service", || grpc(|method| method.service));
const GRPC_METHOD: MetricLabel = these("grpc_method", || grpc(|method| method.method));
const QUEUE: MetricLabel = these("name", || Statistics::QUEUES.to_vec());

pub(super) const BUILD: Series = gauge(
    "drayman_build_info",
    Both,
    &[
        these("component", || vec!["controller", "node"]),
        such("version", "the program's version"),
        such("architecture", "the processor architecture"),
    ],
    "Version and architecture of the program; always 1",
);
pub(super) const REQUESTS: Series = counter(
    "rest_client_requests_total",
    Both,
    &[
        such("code", "the HTTP status; `<error>` without a response"),
        these("method", || METHODS.to_vec()),
    ],
    "Requests to the API server",
);
pub(super) const REQUEST_DURATION: Series = histogram(
    "rest_client_request_duration_seconds",
    Both,
    &[these("verb", || METHODS.to_vec())],
    "Time from a request to the API server until its response headers",
);
pub(super) const CPU: Series = counter(
    "process_cpu_seconds_total",
    Both,
    &[],
    "CPU time in user and system mode",
);
pub(super) const RESIDENT: Series = gauge("process_resident_memory_bytes", Both, &[], "Resident memory");
pub(super) const VIRTUAL: Series = gauge("process_virtual_memory_bytes", Both, &[], "Virtual memory");
pub(super) const OPEN_FILES: Series = gauge("process_open_fds", Both, &[], "Open file descriptors");
pub(super) const MOST_FILES: Series = gauge(
    "process_max_fds",
    Both,
    &[],
    "Maximum number of open file descriptors",
);
pub(super) const STARTED: Series = gauge(
    "process_start_time_seconds",
    Both,
    &[],
    "Start time of the process in seconds since 1970",
);
pub(super) const EVENTS_TOLD: Series = counter(
    "drayman_events_total",
    Both,
    &[such("reason", "the reasons of the component's [events](#events)")],
    "Kubernetes events written, by reason",
);

pub(super) const LEADER: Series = gauge(
    "leader_election_master_status",
    Controller,
    &[such("name", "the driver's name, which is also the lease's")],
    "1 if this controller leads or runs without leader election",
);
pub(super) const QUEUE_DEPTH: Series = gauge("workqueue_depth", Controller, &[QUEUE], "Objects in the queue");
pub(super) const QUEUE_ADDS: Series = counter(
    "workqueue_adds_total",
    Controller,
    &[QUEUE],
    "Objects added to the queue",
);
pub(super) const QUEUE_WAITED: Series = histogram(
    "workqueue_queue_duration_seconds",
    Controller,
    &[QUEUE],
    "Time that objects spent in the queue",
);
pub(super) const QUEUE_WORKED: Series = histogram(
    "workqueue_work_duration_seconds",
    Controller,
    &[QUEUE],
    "Duration of the resulting requests and driver calls",
);
pub(super) const QUEUE_UNFINISHED: Series = gauge(
    "workqueue_unfinished_work_seconds",
    Controller,
    &[QUEUE],
    "Total time that pending requests and driver calls have taken so far",
);
pub(super) const QUEUE_LONGEST: Series = gauge(
    "workqueue_longest_running_processor_seconds",
    Controller,
    &[QUEUE],
    "Time that the oldest pending request or driver call has taken so far",
);
pub(super) const QUEUE_RETRIES: Series = counter(
    "workqueue_retries_total",
    Controller,
    &[QUEUE],
    "Failed requests and driver calls, whether retried or not",
);
pub(super) const ALLOCATED: Series = counter(
    "drayman_claims_allocated_total",
    Controller,
    &[],
    "Claims allocated, with the allocation stored",
);
pub(super) const RELEASED: Series = counter(
    "drayman_claims_released_total",
    Controller,
    &[],
    "Claims deallocated",
);
pub(super) const ATTEMPTS: Series = counter(
    "drayman_allocation_attempts_total",
    Controller,
    &[these("result", || Statistics::ATTEMPTS.to_vec())],
    "Attempts to allocate all claims of a pod, or one immediate claim, by result",
);
pub(super) const DRIVER_CALLS: Series = counter(
    "drayman_driver_calls_total",
    Controller,
    &[
        these("call", || Statistics::CALLS.to_vec()),
        these("result", || Statistics::CALL_RESULTS.to_vec()),
    ],
    "Driver calls",
);
pub(super) const WAITING: Series = gauge(
    "drayman_pods_waiting",
    Controller,
    &[these("reason", waiting)],
    "Pods that wait for devices, by the reason of their last event",
);
pub(super) const WAKE_UPS: Series = histogram(
    "drayman_wake_up_duration_seconds",
    Controller,
    &[],
    "Time from a device becoming free until a waiting pod gets it or the scheduler gets the suitable node",
);
pub(super) const RECHECK: Series = counter(
    "drayman_recheck_caught_total",
    Controller,
    &[],
    "Waiting pods that only the periodic recheck found a device for: lost wake-ups",
);

pub(super) const NODE_READY: Series = gauge(
    "drayman_node_ready",
    Companion,
    &[],
    "1 if the companion is registered with every kubelet API",
);
pub(super) const DEVICES: Series = gauge(
    "drayman_node_devices",
    Companion,
    &[
        such("kind", "kinds of the configuration with a device on this node"),
        these("health", || HEALTH.to_vec()),
        these("owner", owners),
    ],
    "Devices of this node",
);
pub(super) const NODE_CLAIMS: Series = gauge(
    "drayman_node_claims",
    Companion,
    &[these("state", || CLAIMS.to_vec())],
    "Claims that hold devices of this node; `held` includes those in quarantine",
);
pub(super) const OPERATIONS: Series = counter(
    "drayman_node_operations_total",
    Companion,
    &[
        these("operation", || Metrics::OPERATIONS.to_vec()),
        these("result", || RESULTS.to_vec()),
    ],
    "Kubelet's requests, per claim and per device plugin call",
);
pub(super) const NODE_REFUSALS: Series = counter(
    "drayman_node_refusals_total",
    Companion,
    &[these("reason", || REFUSALS.map(|(word, _)| word).to_vec())],
    "Requests of kubelet that were refused, by reason",
);
pub(super) const SLICES: Series = gauge(
    "drayman_node_slices",
    Companion,
    &[],
    "Published ResourceSlices of this node",
);
pub(super) const SLICE_DEVICES: Series = gauge(
    "drayman_node_slice_devices",
    Companion,
    &[],
    "Devices in the published ResourceSlices of this node",
);
pub(super) const SLICE_OMISSIONS: Series = gauge(
    "drayman_node_slice_omissions",
    Companion,
    &[these("cause", || Omission::ALL.map(Omission::name).to_vec())],
    "Devices that this Kubernetes version or its feature gates do not allow to be published",
);
pub(super) const SLICE_WRITES: Series = counter(
    "drayman_node_slice_writes_total",
    Companion,
    &[these("result", || Metrics::SLICE_WRITES.to_vec())],
    "Writes of ResourceSlices, by result",
);
pub(super) const GRPC_STARTED: Series = counter(
    "grpc_server_started_total",
    Companion,
    &[GRPC_TYPE, GRPC_SERVICE, GRPC_METHOD],
    "gRPC calls received",
);
pub(super) const GRPC_HANDLED: Series = counter(
    "grpc_server_handled_total",
    Companion,
    &[
        GRPC_TYPE,
        GRPC_SERVICE,
        GRPC_METHOD,
        such(
            "grpc_code",
            "gRPC codes; `OK`, `Canceled`, `FailedPrecondition` and `InvalidArgument` from the start",
        ),
    ],
    "gRPC calls completed, by code",
);
pub(super) const GRPC_HANDLING: Series = histogram(
    "grpc_server_handling_seconds",
    Companion,
    &[GRPC_TYPE, GRPC_SERVICE, GRPC_METHOD],
    "Duration of gRPC calls; for a stream, until its end",
);

pub(super) const ALL: [&Series; 37] = [
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
    &SLICES,
    &SLICE_DEVICES,
    &SLICE_OMISSIONS,
    &SLICE_WRITES,
    &GRPC_STARTED,
    &GRPC_HANDLED,
    &GRPC_HANDLING,
];
