//! The handle to the state task: requests, responses and errors.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::timeout;

use super::DRIVER_TIMEOUT;
use super::records::{RecordsHandle, RecordsRequest};
use crate::core::prepare::container_edits::ContainerEdits;
use crate::core::prepare::naming::device_of_plugin_id;
use crate::core::prepare::preferred::{End, Preference, preferred};
use crate::core::prepare::refusal::Refusal;
use crate::core::prepare::request::{ClaimToPrepare, ClaimToUnprepare, ExtendedResource, PluginDevice};
use crate::node::companion::{Companion, CompanionError};
use crate::node::driver::NodeDriverError;
use crate::node::kubelet::transport::GrpcCalls;
use crate::node::metrics::Figures;
use crate::node::state::storage::StoreError;

/// The reason of a refusal because the device has a holder.
const HELD: &str = "DeviceHeld";
/// How long Prepare waits for the check whether a device's holder still uses it. The check queries the API server and the container
/// runtime; kubelet waits 45 s.
const DECISION_LIMIT: Duration = Duration::from_secs(8);

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Driver(#[from] NodeDriverError),
    #[error("the driver took more than {} s for {what}; it is tried again", DRIVER_TIMEOUT.as_secs())]
    Slow { what: String },
    #[error("this node cannot keep its records, so nothing was handed out: {0}")]
    Store(#[from] StoreError),
    #[error("the companion is stopping; kubelet asks again when it is back")]
    Stopping,
}

impl Failure {
    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::Refused(refusal) => refusal.reason(),
            Self::Driver(error) => error.reason(),
            Self::Slow { .. } => "DeviceSlow",
            Self::Store(error) => error.reason(),
            Self::Stopping => "Stopping",
        }
    }
}

impl From<Failure> for CompanionError {
    fn from(failure: Failure) -> Self {
        Self {
            reason: failure.reason(),
            invalid_request: matches!(&failure, Failure::Refused(refusal) if refusal.is_invalid_request()),
            message: failure.to_string(),
        }
    }
}

#[derive(Debug)]
pub(super) enum Request {
    Prepare(
        Vec<ClaimToPrepare>,
        oneshot::Sender<Vec<Result<Vec<String>, CompanionError>>>,
    ),
    Unprepare(
        Vec<ClaimToUnprepare>,
        oneshot::Sender<Vec<Result<(), CompanionError>>>,
    ),
    Allocate(
        String,
        Vec<Vec<String>>,
        oneshot::Sender<Result<Vec<ContainerEdits>, CompanionError>>,
    ),
    CheckStart(String, Vec<String>, oneshot::Sender<Result<(), CompanionError>>),
    Records(RecordsRequest),
}

/// An extended resource, as served by the device plugin API.
#[derive(Clone, Debug)]
pub(super) struct Offered {
    pub(super) resource: ExtendedResource,
    pub(super) devices: watch::Receiver<Vec<PluginDevice>>,
}

/// A handle to the state task. When the last handle is dropped, the task serves the queued requests and ends.
#[derive(Debug)]
pub struct NodeStateHandle {
    pub(super) requests: mpsc::Sender<Request>,
    pub(super) resources: watch::Receiver<Arc<BTreeMap<String, Offered>>>,
    pub(super) held: watch::Receiver<usize>,
    pub(super) look_due: Arc<Notify>,
    pub(super) decisions: watch::Receiver<u64>,
    pub(super) has_witness: bool,
    pub(super) figures: Arc<Figures>,
}

impl NodeStateHandle {
    /// A handle for administrative requests.
    pub fn records(&self) -> RecordsHandle {
        RecordsHandle {
            requests: self.requests.clone(),
            held: self.held.clone(),
            look_due: self.look_due.clone(),
        }
    }

    async fn prepare_once(&self, claims: Vec<ClaimToPrepare>) -> Vec<Result<Vec<String>, CompanionError>> {
        let count = claims.len();
        let answer = self.ask(|sender| Request::Prepare(claims, sender)).await;
        answer.unwrap_or_else(|error| vec![Err(error); count])
    }

    async fn ask<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> Request) -> Result<T, CompanionError> {
        let (sender, answer) = oneshot::channel();
        let stopping = || CompanionError::from(Failure::Stopping);
        self.requests
            .send(request(sender))
            .await
            .map_err(|_| stopping())?;
        answer.await.map_err(|_| stopping())
    }
}

impl Companion for NodeStateHandle {
    fn grpc_calls(&self) -> Arc<GrpcCalls> {
        self.figures.calls.clone()
    }

    async fn prepare(&self, claims: Vec<ClaimToPrepare>) -> Vec<Result<Vec<String>, CompanionError>> {
        let mut decisions = self.decisions.clone();
        decisions.mark_unchanged();
        let mut answers = self.prepare_once(claims.clone()).await;
        let is_held = |answer: &Result<Vec<String>, CompanionError>| {
            answer.as_ref().is_err_and(|error| error.reason == HELD)
        };
        if !self.has_witness || !answers.iter().any(is_held) {
            return answers;
        }
        // Without this wait, kubelet retries only after up to 90 s.
        if !matches!(timeout(DECISION_LIMIT, decisions.changed()).await, Ok(Ok(()))) {
            return answers;
        }
        let held: Vec<usize> = (0..answers.len())
            .filter(|index| answers.get(*index).is_some_and(is_held))
            .collect();
        let again = held
            .iter()
            .filter_map(|index| claims.get(*index).cloned())
            .collect();
        for (index, answer) in held.into_iter().zip(self.prepare_once(again).await) {
            if let Some(first) = answers.get_mut(index) {
                *first = answer;
            }
        }
        answers
    }

    async fn unprepare(&self, claims: Vec<ClaimToUnprepare>) -> Vec<Result<(), CompanionError>> {
        let count = claims.len();
        let answer = self.ask(|sender| Request::Unprepare(claims, sender)).await;
        answer.unwrap_or_else(|error| vec![Err(error); count])
    }

    fn plugin_devices(&self, resource_name: &str) -> Option<watch::Receiver<Vec<PluginDevice>>> {
        self.resources
            .borrow()
            .get(resource_name)
            .map(|offered| offered.devices.clone())
    }

    fn checks_start(&self, resource_name: &str) -> bool {
        self.resources
            .borrow()
            .get(resource_name)
            .is_some_and(|offered| self.has_witness || offered.resource.pre_start_check)
    }

    fn choose(&self, resource_name: &str, wishes: Vec<Preference>) -> Vec<Vec<String>> {
        let resources = self.resources.borrow().clone();
        let Some(offered) = resources.get(resource_name) else {
            return vec![Vec::new(); wishes.len()];
        };
        let numa_nodes: BTreeMap<String, Vec<i64>> = offered
            .devices
            .borrow()
            .iter()
            .map(|device| {
                (
                    device_of_plugin_id(&device.id).to_owned(),
                    device.numa_nodes.clone(),
                )
            })
            .collect();
        let end = if offered.resource.also_by_claims {
            End::Back
        } else {
            End::Front
        };
        wishes
            .iter()
            .map(|wish| preferred(wish, &numa_nodes, end))
            .collect()
    }

    async fn check_start(&self, resource_name: &str, devices: Vec<String>) -> Result<(), CompanionError> {
        let resource = resource_name.to_owned();
        self.ask(|sender| Request::CheckStart(resource, devices, sender))
            .await?
    }

    async fn allocate(
        &self,
        resource_name: &str,
        containers: Vec<Vec<String>>,
    ) -> Result<Vec<ContainerEdits>, CompanionError> {
        let resource = resource_name.to_owned();
        self.ask(|sender| Request::Allocate(resource, containers, sender))
            .await?
    }
}
