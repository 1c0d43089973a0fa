//! Device plugin endpoints of the extended resources, which follow the configuration.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::retried::serve_again;
use crate::core::prepare::allocate::ExtendedResource;
use crate::node::kubelet::device_plugin::PluginRegistration;
use crate::node::kubelet::{self, KubeletApiState, KubeletPaths};
use crate::node::reload::ConfiguredResources;
use crate::node::service::NodeService;

/// How long an endpoint stays open after its devices were withdrawn, so that kubelet receives the update. Otherwise the Node
/// keeps the resource's last capacity until kubelet drops it minutes later.
const WITHDRAWAL: Duration = Duration::from_secs(1);
/// Poll interval until a new resource has its devices.
const PAUSE: Duration = Duration::from_millis(20);

/// State of each endpoint, by resource.
pub(super) type KubeletApiStates = Vec<(String, watch::Receiver<KubeletApiState>)>;

/// Runs the device plugin endpoint of each extended resource.
pub(super) struct ResourceApis {
    pub(super) node: NodeService,
    pub(super) paths: KubeletPaths,
    pub(super) plugin_registration: PluginRegistration,
    pub(super) driver_name: String,
    pub(super) states: watch::Sender<KubeletApiStates>,
}

/// A running endpoint.
struct Open {
    resource: ExtendedResource,
    state: watch::Receiver<KubeletApiState>,
    /// Requests its end.
    withdrawn: CancellationToken,
}

impl ResourceApis {
    /// Serves an endpoint for each extended resource until the shutdown. An endpoint that fails is retried independently.
    pub(super) async fn serve(
        self,
        mut wanted: watch::Receiver<Arc<ConfiguredResources>>,
        shutdown: CancellationToken,
    ) {
        let ours = shutdown.child_token();
        let mut apis: JoinSet<String> = JoinSet::new();
        let mut open: BTreeMap<String, Open> = BTreeMap::new();
        let mut follows = true;
        loop {
            let resources = wanted.borrow_and_update().clone();
            for (name, api) in &open {
                if resources.get(name) != Some(&api.resource) && !api.withdrawn.is_cancelled() {
                    info!(resource = name, "the resource is withdrawn");
                    api.withdrawn.cancel();
                }
            }
            for (name, resource) in resources.iter() {
                // A closing endpoint is reopened only after it has closed, because both would use the same socket.
                if !open.contains_key(name) {
                    let api = self.open(&mut apis, name, resource, &ours);
                    open.insert(name.clone(), api);
                }
            }
            let staying = open.iter().filter(|(_, api)| !api.withdrawn.is_cancelled());
            let states = staying
                .map(|(name, api)| (name.clone(), api.state.clone()))
                .collect();
            self.states.send_replace(states);
            tokio::select! {
                () = shutdown.cancelled() => break,
                changed = wanted.changed(), if follows => follows = changed.is_ok(),
                Some(ended) = apis.join_next() => if let Ok(name) = ended {
                    open.remove(&name);
                },
            }
        }
        // The remaining endpoints finish their calls and close.
        ours.cancel();
        while apis.join_next().await.is_some() {}
    }

    fn open(
        &self,
        apis: &mut JoinSet<String>,
        name: &str,
        resource: &ExtendedResource,
        shutdown: &CancellationToken,
    ) -> Open {
        let (sender, state) = watch::channel(KubeletApiState::Starting);
        let (withdrawn, end) = (CancellationToken::new(), shutdown.child_token());
        let (node, paths, registration) = (self.node.clone(), self.paths.clone(), self.plugin_registration);
        let (driver_name, name, asked) = (self.driver_name.clone(), name.to_owned(), withdrawn.clone());
        apis.spawn(async move {
            // The state task learns of a new resource at the same time as this task.
            while node.plugin_devices(&name).is_none() && !asked.is_cancelled() && !end.is_cancelled() {
                sleep(PAUSE).await;
            }
            if asked.is_cancelled() || end.is_cancelled() {
                return name;
            }
            let api = serve_again(&name, &sender, &end, |state| {
                kubelet::device_plugin::serve(
                    node.clone(),
                    paths.clone(),
                    registration,
                    driver_name.clone(),
                    name.clone(),
                    state,
                    end.clone(),
                )
            });
            let withdraw = async {
                asked.cancelled().await;
                sleep(WITHDRAWAL).await;
                end.cancel();
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = api => {}
                () = withdraw => {}
            }
            name
        });
        Open {
            resource: resource.clone(),
            state,
            withdrawn,
        }
    }
}
