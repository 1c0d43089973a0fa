//! The test cluster: an API server, the control loops, the real controller, and a real companion for each node.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

use super::api::{ApiServer, ClusterMode, Patch, ResourcePath, StatusError, WriteOptions, object};
use super::client::ApiClient;
use super::clock_and_rng::ClockAndRng;
use super::kubelet::{Kubelet, TestNode};
use super::{claims, garbage, scheduler};
use crate::controller::{Controller, ControllerError};
use crate::host::HostDriver;
use crate::node::run::NodeError;

/// Why the test cluster fails.
#[derive(Debug, thiserror::Error)]
pub enum TestClusterError {
    /// A file operation of a node has failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The controller has failed.
    #[error("the controller: {0}")]
    Controller(#[from] ControllerError),
    /// A companion has failed.
    #[error("a companion: {0}")]
    Node(#[from] NodeError),
    /// An object could not be applied.
    #[error("{object} cannot be applied: {message}")]
    Refused {
        /// Kind and name.
        object: String,
        /// The API server's message.
        message: String,
    },
    /// The text is not valid YAML.
    #[error("this is no YAML: {0}")]
    Yaml(String),
}

/// An in-process cluster. It stops when dropped; [`TestCluster::stop`] also waits for the end.
#[derive(Debug)]
pub struct TestCluster {
    server: ApiServer,
    shutdown: CancellationToken,
    parts: JoinSet<Result<(), TestClusterError>>,
}

impl TestCluster {
    /// Starts a control plane in classic mode, without nodes. Must be called within a runtime.
    pub fn start(source: ClockAndRng) -> Self {
        Self::with_mode(source, ClusterMode::Classic)
    }

    /// Like [`TestCluster::start`], in the given mode.
    pub fn with_mode(source: ClockAndRng, mode: ClusterMode) -> Self {
        let server = ApiServer::with_mode(Arc::new(source), mode);
        let shutdown = CancellationToken::new();
        let mut parts = JoinSet::new();
        let loops: [(&str, Reconcile); 3] = [
            ("ResourceClaimController", claims::reconcile),
            ("kube-scheduler", scheduler::reconcile),
            ("garbage-collector", garbage::reconcile),
        ];
        for (name, reconcile) in loops {
            parts.spawn(run_loop(
                ApiClient::new(&server, name),
                reconcile,
                shutdown.clone(),
            ));
        }
        Self {
            server,
            shutdown,
            parts,
        }
    }

    /// Returns the API server.
    pub fn server(&self) -> &ApiServer {
        &self.server
    }

    /// Starts the real controller with the built-in driver, which allocates claims in classic mode.
    pub fn add_controller(&mut self, driver_name: &str) -> Result<(), TestClusterError> {
        let client = self.server.client();
        let driver = HostDriver::start(client.clone(), driver_name.to_owned(), self.shutdown.clone());
        let controller = Controller::builder(driver).build(client)?;
        let running = controller.run(self.shutdown.clone());
        self.parts.spawn(async move { Ok(running.await?) });
        Ok(())
    }

    /// Adds a node with a kubelet and a real companion that reads its devices from `configuration`.
    pub fn add_node(
        &mut self,
        name: &str,
        directory: &Path,
        configuration: &str,
    ) -> Result<Kubelet, TestClusterError> {
        let node = TestNode::within(name, directory);
        let file = directory.join("node.yaml");
        std::fs::write(&file, configuration)?;
        let options = node.options(&file, self.server.client());
        node.make()?;
        let kubelet = Kubelet::new(&self.server, node);
        self.add_kubelet(&kubelet);
        let companion = crate::node::run::run(options, self.shutdown.clone());
        self.parts.spawn(async move { Ok(companion.await?) });
        Ok(kubelet)
    }

    /// Starts a kubelet without a companion. Its directories must exist.
    pub fn add_kubelet(&mut self, kubelet: &Kubelet) {
        let running = kubelet.clone().run(self.shutdown.clone());
        self.parts.spawn(async move { Ok(running.await?) });
    }

    /// Applies YAML documents like `kubectl apply --server-side`.
    pub fn apply(&self, yaml: &str) -> Result<Vec<Value>, TestClusterError> {
        let documents: Vec<Value> =
            serde_saphyr::from_multiple(yaml).map_err(|error| TestClusterError::Yaml(error.to_string()))?;
        documents
            .into_iter()
            .filter(Value::is_object)
            .map(|document| self.apply_one(document))
            .collect()
    }

    fn apply_one(&self, document: Value) -> Result<Value, TestClusterError> {
        let name = object::name(&document);
        let shown = format!("{} {name}", object::text(&document, "/kind"));
        let refused = |refusal: StatusError| TestClusterError::Refused {
            object: shown.clone(),
            message: refusal.message,
        };
        let kind = self
            .server
            .kind_named(
                object::text(&document, "/apiVersion"),
                object::text(&document, "/kind"),
            )
            .ok_or_else(|| refused(StatusError::no_path()))?;
        let namespace = match (kind.namespaced, object::namespace(&document)) {
            (false, _) => "",
            (true, "") => "default",
            (true, namespace) => namespace,
        };
        let target = ResourcePath::new(kind, namespace, name, "");
        let options = WriteOptions {
            manager: "user".to_owned(),
            strict: true,
            ..WriteOptions::default()
        };
        let (_, object) = self
            .server
            .patch(&target, &Patch::Apply(document), &options)
            .map_err(refused)?;
        Ok(object)
    }

    /// Returns when a part has failed; never otherwise.
    pub async fn broken(&mut self) -> TestClusterError {
        loop {
            match self.parts.join_next().await.map(error_of) {
                Some(Some(error)) => return error,
                Some(None) => {}
                None => std::future::pending().await,
            }
        }
    }

    /// Returns a failure that has occurred but has not been returned yet.
    pub fn broken_by_now(&mut self) -> Option<TestClusterError> {
        std::iter::from_fn(|| self.parts.try_join_next()).find_map(error_of)
    }

    /// Stops the cluster and waits for its end.
    pub async fn stop(mut self) {
        self.shutdown.cancel();
        while self.parts.join_next().await.is_some() {}
    }
}

/// Returns the error of a part that has ended.
fn error_of(ended: Result<Result<(), TestClusterError>, JoinError>) -> Option<TestClusterError> {
    match ended {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error),
        Err(error) => Some(TestClusterError::Io(std::io::Error::other(error))),
    }
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// One reconciliation of a control loop.
type Reconcile = fn(&ApiClient);

/// Runs the control loop after every change.
async fn run_loop(
    client: ApiClient,
    reconcile: Reconcile,
    shutdown: CancellationToken,
) -> Result<(), TestClusterError> {
    let mut news = client.server.changes();
    loop {
        news.borrow_and_update();
        reconcile(&client);
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            changed = news.changed() => if changed.is_err() { return Ok(()) },
        }
    }
}
