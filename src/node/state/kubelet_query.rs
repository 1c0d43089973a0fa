//! Queries of kubelet's containers, outside the state task.
//!
//! Kubelet may take seconds to answer, or never answer. Each query is therefore a separate task, one at a time, for all resources together.
//! Requests that need its result wait apart from those that do not.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::resources::KubeletView;
use crate::core::prepare::plan::ClaimToPrepare;
use crate::node::kubelet::pod_resources::Grants;
use crate::node::service::ServiceError;

/// Pauses between queries for containers that hold devices of withdrawn resources: until kubelet has answered, and from then on until these
/// containers have ended.
const WITHDRAWN_PAUSES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(5)];

/// The response channel of a Prepare.
pub(super) type PrepareAnswer = oneshot::Sender<Vec<Result<Vec<String>, ServiceError>>>;

/// A request that waits for a query.
#[derive(Debug)]
pub(super) enum Waiting {
    /// Claims for devices that containers could hold, and those of them that kubelet has unprepared in the meantime.
    Prepare {
        claims: Vec<ClaimToPrepare>,
        withdrawn: BTreeSet<String>,
        answer: PrepareAnswer,
    },
    /// An administrative request for the devices that containers hold.
    InContainers(oneshot::Sender<BTreeMap<String, String>>),
}

#[derive(Debug, Default)]
enum Phase {
    #[default]
    Idle,
    Running {
        task: JoinHandle<KubeletView>,
        /// Whether another query must follow.
        again: bool,
        /// Requests that arrived after this query had begun.
        next: Vec<Waiting>,
    },
}

/// A finished query.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) view: KubeletView,
    /// The requests that waited for it.
    pub(super) waiting: Vec<Waiting>,
    /// Whether another query must follow.
    pub(super) again: bool,
}

/// The query in progress, and the requests that wait for it or the next one.
#[derive(Debug)]
pub(super) struct KubeletQuery {
    /// Kubelet's view of its containers; `None` if it cannot be queried.
    grants: Option<Arc<dyn Grants>>,
    phase: Phase,
    waiting: Vec<Waiting>,
    /// The time of the next query for withdrawn resources.
    withdrawn_due: Instant,
    /// Whether the failure of the last query has been logged.
    pub(super) has_warned: bool,
}

impl KubeletQuery {
    pub(super) fn new(grants: Option<Arc<dyn Grants>>) -> Self {
        Self {
            grants,
            phase: Phase::Idle,
            waiting: Vec::new(),
            withdrawn_due: Instant::now(),
            has_warned: false,
        }
    }

    /// Whether kubelet can be queried.
    pub(super) fn is_possible(&self) -> bool {
        self.grants.is_some()
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running { .. })
    }

    pub(super) fn withdrawn_due(&self) -> Instant {
        self.withdrawn_due
    }

    /// Schedules the next query for withdrawn resources.
    pub(super) fn schedule_withdrawn(&mut self, is_known: bool) {
        let [unknown, known] = WITHDRAWN_PAUSES;
        self.withdrawn_due = Instant::now() + if is_known { known } else { unknown };
    }

    /// Starts a query for these resources, or schedules another one after the query in progress.
    pub(super) fn start(&mut self, names: BTreeSet<String>) {
        let Some(grants) = self.grants.clone() else {
            return;
        };
        if let Phase::Running { again, .. } = &mut self.phase {
            *again = true;
            return;
        }
        if names.is_empty() && self.waiting.is_empty() {
            return;
        }
        self.phase = Phase::Running {
            task: tokio::spawn(async move { grants.look(names).await }),
            again: false,
            next: Vec::new(),
        };
    }

    /// Queues a request for the next query to begin. Returns whether the caller must start one.
    pub(super) fn wait(&mut self, request: Waiting) -> bool {
        match &mut self.phase {
            Phase::Running { next, .. } => {
                next.push(request);
                false
            }
            Phase::Idle => {
                self.waiting.push(request);
                true
            }
        }
    }

    /// Waits for the query to end; forever if there is none. Cancel safe.
    pub(super) async fn finished(&mut self) -> Finished {
        let Phase::Running { task, .. } = &mut self.phase else {
            return std::future::pending().await;
        };
        let view = task.await.unwrap_or_else(|error| Err(error.to_string()));
        let (again, next) = match std::mem::take(&mut self.phase) {
            Phase::Running { again, next, .. } => (again, next),
            Phase::Idle => (false, Vec::new()),
        };
        Finished {
            view,
            waiting: std::mem::replace(&mut self.waiting, next),
            again: again || !self.waiting.is_empty(),
        }
    }

    /// Marks a waiting claim as withdrawn, because kubelet has called Unprepare for it.
    pub(super) fn withdraw(&mut self, uid: &str) {
        let next = match &mut self.phase {
            Phase::Running { next, .. } => next.as_mut_slice(),
            Phase::Idle => &mut [],
        };
        for waiting in self.waiting.iter_mut().chain(next) {
            if let Waiting::Prepare {
                claims, withdrawn, ..
            } = waiting
                && claims.iter().any(|claim| claim.uid == uid)
            {
                withdrawn.insert(uid.to_owned());
            }
        }
    }

    /// Logs once why kubelet does not show its containers, and the effects.
    pub(super) fn report(&mut self, problem: Option<&str>, has_both: bool, has_withdrawn: bool) {
        let Some(problem) = problem else {
            self.has_warned = false;
            return;
        };
        if self.has_warned {
            debug!("kubelet still does not show its containers: {problem}");
            return;
        }
        self.has_warned = true;
        let mut effects = Vec::new();
        if has_both {
            effects.push("devices of mode both are given to nobody new");
        }
        if has_withdrawn {
            effects.push("devices of withdrawn extended resources are given to nobody");
        }
        warn!(
            reason = "PodResourcesUnavailable",
            "kubelet does not show which devices its containers hold ({}): {problem}",
            effects.join(", and ")
        );
    }
}
