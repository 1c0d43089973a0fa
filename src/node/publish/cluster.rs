//! Reads the Node, and which API for claims the cluster serves.

use http::Request;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::APIGroup;
use kube::api::{Api, GetParams};
use tokio::sync::watch;
use tokio::time::Instant;

use super::calls::{PublishError, call, spread};
use crate::api::resource;
use crate::core::discovery::device_events::DeviceEvent;
use crate::core::prepare::checkpoint::ClusterFacts;
use crate::core::prepare::claims_api::{ClaimsApi, Discovery, minor_of, usable_minor};
use crate::node::context::NodeContext;

/// Reads facts about the cluster and publishes them.
pub(super) struct ClusterReader {
    context: NodeContext,
    facts: watch::Sender<ClusterFacts>,
    claims: Discovery,
    /// The minor version of this node's kubelet.
    kubelet: Option<u32>,
    /// The API by which claims were prepared before the start.
    prepared_by: Option<ClaimsApi>,
    /// When to query the API for claims again.
    pub(super) due: Instant,
    /// Events not written yet.
    pub(super) unwritten: Vec<DeviceEvent>,
}

impl ClusterReader {
    pub(super) fn new(
        context: NodeContext,
        facts: watch::Sender<ClusterFacts>,
        prepared_by: Option<ClaimsApi>,
    ) -> Self {
        let known = facts.borrow().clone();
        let claims = Discovery::new(known.claims, known.minor);
        Self {
            context,
            facts,
            claims,
            kubelet: None,
            prepared_by,
            due: Instant::now(),
            unwritten: Vec::new(),
        }
    }

    /// Whether the cluster is in structured mode.
    pub(super) fn is_structured(&self) -> bool {
        self.facts.borrow().serves(ClaimsApi::Structured)
    }

    /// Reads the Node and the API for claims. Without an answer, and without a checkpoint that names the API, claims are served as those that
    /// are prepared: kubelet must be able to unprepare these.
    pub(super) async fn read(&mut self) -> Result<Node, PublishError> {
        let node = self.read_once().await;
        if node.is_err() && self.facts.borrow().claims.is_none() {
            let prepared_by = self.prepared_by;
            self.claims = Discovery::new(prepared_by, None);
            self.update_facts(|facts| facts.claims = prepared_by);
        }
        node
    }

    async fn read_once(&mut self) -> Result<Node, PublishError> {
        let nodes: Api<Node> = Api::all(self.context.client.clone());
        let node = call(nodes.get_opt(&self.context.node_name))
            .await?
            .ok_or_else(|| PublishError::NoNode(self.context.node_name.clone()))?;
        let uid = node
            .metadata
            .uid
            .clone()
            .ok_or_else(|| PublishError::NoUid(self.context.node_name.clone()))?;
        self.kubelet = kubelet_minor(&node);
        self.query().await?;
        self.update_facts(|facts| facts.node_uid = Some(uid));
        Ok(node)
    }

    /// Queries again which API for claims the cluster serves: it may have been enabled or disabled, API servers may differ, and kubelet may
    /// have been upgraded.
    pub(super) async fn read_claims_api(&mut self) -> Result<(), PublishError> {
        if self.is_structured() {
            let nodes: Api<Node> = Api::all(self.context.client.clone());
            // From the API server's cache. Without an answer, the last known version counts.
            if let Ok(node) = call(nodes.get_with(&self.context.node_name, &GetParams::any())).await {
                self.kubelet = kubelet_minor(&node);
            }
        }
        self.query().await
    }

    async fn query(&mut self) -> Result<(), PublishError> {
        let answer = self.served_claims().await;
        if let Ok((served, minor)) = answer {
            self.unwritten.extend(self.claims.answered(served, minor));
        }
        let claims = self.claims;
        let usable = usable_minor(claims.minor(), self.kubelet);
        self.due = Instant::now() + spread(claims.pause(usable), &self.context.node_name);
        answer?;
        self.update_facts(|facts| {
            facts.claims = claims.served();
            facts.minor = usable;
        });
        Ok(())
    }

    /// Queries again at once: kubelet has registered or refused this companion, so it may have been upgraded.
    pub(super) fn kubelet_changed(&mut self) {
        if self.is_structured() {
            self.due = Instant::now();
        }
    }

    fn update_facts(&self, change: impl FnOnce(&mut ClusterFacts)) {
        self.facts.send_if_modified(|known| {
            let before = known.clone();
            change(known);
            *known != before
        });
    }

    /// The API for claims, and the minor version of the API server that answered, if that serves `resource.k8s.io/v1`.
    async fn served_claims(&self) -> Result<(ClaimsApi, Option<u32>), PublishError> {
        let request = Request::get(format!("/apis/{}", resource::GROUP))
            .body(Vec::new())
            .map_err(kube::Error::HttpError)?;
        let api = match call(self.context.client.request::<APIGroup>(request)).await {
            Ok(group) => {
                ClaimsApi::of_versions(group.versions.iter().map(|version| version.version.as_str()))
            }
            Err(PublishError::Api(kube::Error::Api(status))) if status.code == 404 => ClaimsApi::None,
            Err(error) => return Err(error),
        };
        if api != ClaimsApi::Structured {
            return Ok((api, None));
        }
        // Managed clusters append a plus sign.
        let version = call(self.context.client.apiserver_version()).await?;
        Ok((api, version.minor.trim_end_matches('+').parse().ok()))
    }
}

/// The minor version of the node's kubelet.
fn kubelet_minor(node: &Node) -> Option<u32> {
    minor_of(&node.status.as_ref()?.node_info.as_ref()?.kubelet_version)
}
