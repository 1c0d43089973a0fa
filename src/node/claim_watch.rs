//! The watch of the claims allocated on this node.

use std::sync::Arc;

use futures::TryStreamExt as _;
use kube::Api;
use kube::runtime::watcher::{Config, Event};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::api::claim::DecodedClaim;
use crate::api::resource::{LABEL_OF_ANY_NODE, NODE_LABEL, ResourceClaim, label_of_node};
use crate::core::prepare::checkpoint::ClusterFacts;
use crate::core::prepare::claims_api::ClaimsApi;
use crate::core::prepare::containers::AllocatedClaims;
use crate::node::context::NodeContext;
use crate::node::reload::ConfiguredResources;
use crate::node::watch::watch_objects;

/// Number of claims in a page of a list. A page is in memory as a whole, twice, and users can store some megabytes in each claim.
pub(super) const PAGE: u32 = 8;

/// Watches the claims allocated on this node, for kinds that are served through both DRA and the device plugin API.
///
/// The controller labels each claim with the node's name together with the finalizer, thus before it allocates. The watch selects this label,
/// so a node receives its own claims and not those of the whole cluster.
pub(super) struct ClaimWatch {
    pub(super) context: NodeContext,
    pub(super) cluster: watch::Receiver<ClusterFacts>,
    pub(super) resources: watch::Receiver<Arc<ConfiguredResources>>,
    pub(super) sender: watch::Sender<Arc<AllocatedClaims>>,
}

impl ClaimWatch {
    /// Watches the claims, once a kind is offered both as claims and as an extended resource, until the shutdown.
    pub(super) async fn run(mut self, shutdown: CancellationToken) {
        let has_both = |all: &Arc<ConfiguredResources>| all.values().any(|resource| resource.also_by_claims);
        tokio::select! {
            () = shutdown.cancelled() => return,
            both = self.resources.wait_for(has_both) => if both.is_err() { return },
        }
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                known = self.cluster.wait_for(|facts| facts.claims.is_some()) => if known.is_err() { return },
            }
            let serves = self.cluster.borrow_and_update().serves(ClaimsApi::Classic);
            if !serves {
                // There are no classic claims. Allocations of structured mode become known at Prepare.
                self.sender.send_replace(Arc::new(AllocatedClaims::none()));
            }
            let mut cluster = self.cluster.clone();
            tokio::select! {
                () = shutdown.cancelled() => return,
                changed = cluster.wait_for(|facts| facts.serves(ClaimsApi::Classic) != serves) => if changed.is_err() { return },
                () = self.follow(), if serves => {}
            }
        }
    }

    async fn follow(&self) {
        let driver = self.context.driver_name.as_str();
        let api = Api::<DecodedClaim<ResourceClaim>>::all(self.context.client.clone());
        let key = format!("{driver}/{NODE_LABEL}");
        let node_name = &self.context.node_name;
        let here = label_of_node(node_name);
        let selector = format!("{key} in ({here},{LABEL_OF_ANY_NODE})");
        let config = Config::default().labels(&selector).page_size(PAGE);
        let mut events = Box::pin(watch_objects(api, config));
        let mut allocated_claims = self.sender.borrow().as_ref().clone();
        let mut listed = AllocatedClaims::default();
        let mut complained = false;
        loop {
            let event = match events.try_next().await {
                Ok(Some(event)) => event,
                Ok(None) => return,
                Err(error) => {
                    if !complained {
                        complained = true;
                        warn!(
                            reason = "ClaimsUnwatched",
                            "the claims of this node cannot be watched, so that an allocation is noticed only at prepare: {error}"
                        );
                    }
                    continue;
                }
            };
            complained = false;
            match event {
                Event::Init => {
                    listed = AllocatedClaims::none();
                    continue;
                }
                Event::InitApply(DecodedClaim(claim)) => {
                    listed.set(&claim, driver, node_name);
                    continue;
                }
                Event::InitDone => {
                    allocated_claims = std::mem::take(&mut listed);
                    let claims = allocated_claims.count();
                    info!(claims, "the claims of this node are known");
                }
                Event::Apply(DecodedClaim(claim)) => allocated_claims.set(&claim, driver, node_name),
                Event::Delete(DecodedClaim(claim)) => {
                    allocated_claims.remove(claim.metadata.uid.as_deref().unwrap_or_default());
                }
            }
            self.sender.send_if_modified(|sent| {
                let changed = **sent != allocated_claims;
                if changed {
                    *sent = Arc::new(allocated_claims.clone());
                }
                changed
            });
        }
    }
}
