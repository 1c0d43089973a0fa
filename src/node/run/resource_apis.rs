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
use crate::core::prepare::device_plugin::ExtendedResource;
use crate::node::kubelet::device_plugin::PluginRegistration;
use crate::node::kubelet::{self, KubeletApiState, KubeletPaths};
use crate::node::reload::ConfiguredResources;
use crate::node::service::NodeService;

/// How long an endpoint stays open after its devices were withdrawn, so that kubelet receives the update. Otherwise the Node
/// keeps the resource's last capacity until kubelet drops it minutes later.
const WITHDRAWAL: Duration = Duration::from_secs(1);

/// How long a closed endpoint stays closed, so that kubelet notices. Kubelet keeps connections by resource and socket: when it notices late that
/// the earlier connection has ended, it closes the new one (kubernetes#121994), and kubelet 1.37 then refuses this socket until it restarts.
const DISCONNECTION: Duration = Duration::from_secs(1);

/// State of each endpoint, by resource.
pub(super) type KubeletApiStates = BTreeMap<String, KubeletApiState>;

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
    /// Requests its end.
    withdrawn: CancellationToken,
}

impl ResourceApis {
    /// Serves an endpoint for each extended resource until the shutdown. An endpoint that fails is retried independently.
    pub(super) async fn serve(
        self,
        mut configured: watch::Receiver<Arc<ConfiguredResources>>,
        shutdown: CancellationToken,
    ) {
        let ours = shutdown.child_token();
        let mut apis: JoinSet<String> = JoinSet::new();
        let mut open: BTreeMap<String, Open> = BTreeMap::new();
        let mut follows = true;
        loop {
            let resources = configured.borrow_and_update().clone();
            for (name, api) in &open {
                if resources.get(name) != Some(&api.resource) && !api.withdrawn.is_cancelled() {
                    info!(resource = name, "the resource is withdrawn");
                    api.withdrawn.cancel();
                    self.states.send_modify(|states| drop(states.remove(name)));
                }
            }
            for (name, resource) in resources.iter() {
                // A closing endpoint is reopened only after it has closed, because both would use the same socket.
                if !open.contains_key(name) {
                    let api = self.open(&mut apis, name, resource, &ours);
                    open.insert(name.clone(), api);
                }
            }
            tokio::select! {
                () = shutdown.cancelled() => break,
                changed = configured.changed(), if follows => follows = changed.is_ok(),
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
        self.states
            .send_modify(|states| drop(states.insert(name.to_owned(), KubeletApiState::Starting)));
        let (withdrawn, end) = (CancellationToken::new(), shutdown.child_token());
        let (node, paths, registration) = (self.node.clone(), self.paths.clone(), self.plugin_registration);
        let (driver_name, name, asked) = (self.driver_name.clone(), name.to_owned(), withdrawn.clone());
        let (configured, states, shutdown) = (resource.clone(), self.states.clone(), shutdown.clone());
        apis.spawn(async move {
            // The state task learns of a change at the same time as this task, and may be busy. Until then, it serves the earlier devices.
            tokio::select! {
                () = asked.cancelled() => return name,
                () = end.cancelled() => return name,
                () = node.serves(&name, &configured) => {}
            }
            let report = |now| {
                states.send_if_modified(|states| {
                    // A withdrawn resource has no state.
                    let Some(state) = states.get_mut(&name) else {
                        return false;
                    };
                    *state = now;
                    true
                });
            };
            let api = serve_again(&name, report, &end, |state| {
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
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = sleep(DISCONNECTION) => {}
            }
            name
        });
        Open {
            resource: resource.clone(),
            withdrawn,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::pin::pin;

    use tokio::time::{Instant, timeout};

    use super::*;
    use crate::node::service::{Backend, ServedResource};

    const RESOURCE: &str = "example.com/port";

    fn resource_apis(root: &Path) -> (ResourceApis, Backend) {
        let (node, backend) = NodeService::new(None, Arc::default());
        let resource_apis = ResourceApis {
            node,
            paths: KubeletPaths {
                root_dir: root.to_owned(),
                device_plugin_dir: root.join("device-plugins"),
            },
            plugin_registration: PluginRegistration::default(),
            driver_name: "drayman.dev".into(),
            states: watch::Sender::new(BTreeMap::new()),
        };
        (resource_apis, backend)
    }

    /// The state task serves the resource.
    fn offer(backend: &Backend, resource: &ExtendedResource) {
        let served = ServedResource {
            resource: resource.clone(),
            devices: watch::channel(Vec::new()).1,
        };
        let all = BTreeMap::from([(RESOURCE.to_owned(), served)]);
        backend.resources.send_replace(Arc::new(all));
    }

    #[tokio::test]
    async fn a_changed_resource_waits_for_its_own_devices() {
        let root = tempfile::tempdir().unwrap();
        let (before, after) = (ExtendedResource::of_kind("a"), ExtendedResource::of_kind("b"));
        let (resource_apis, backend) = resource_apis(root.path());
        offer(&backend, &before);
        let mut seen = resource_apis.states.subscribe();
        let (mut apis, shutdown) = (JoinSet::new(), CancellationToken::new());
        resource_apis.open(&mut apis, RESOURCE, &after, &shutdown);
        let mut is_served = pin!(seen.wait_for(|states| states[RESOURCE] == KubeletApiState::Waiting));
        let still = Duration::from_millis(200);
        assert!(
            timeout(still, &mut is_served).await.is_err(),
            "the devices are those of before"
        );
        offer(&backend, &after);
        is_served.await.unwrap();
        shutdown.cancel();
        apis.join_next().await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_changed_resource_lets_kubelet_notice_the_end() {
        let root = tempfile::tempdir().unwrap();
        let (before, after) = (ExtendedResource::of_kind("a"), ExtendedResource::of_kind("b"));
        let (resource_apis, backend) = resource_apis(root.path());
        offer(&backend, &before);
        let mut seen = resource_apis.states.subscribe();
        let configured = |resource| Arc::new(BTreeMap::from([(RESOURCE.to_owned(), resource)]));
        let (configure, follow) = watch::channel(configured(before));
        let shutdown = CancellationToken::new();
        let served = tokio::spawn(resource_apis.serve(follow, shutdown.clone()));
        let is_served = |states: &KubeletApiStates| states.get(RESOURCE) == Some(&KubeletApiState::Waiting);
        seen.wait_for(is_served).await.unwrap();
        offer(&backend, &after);
        configure.send_replace(configured(after));
        let is_withdrawn = |states: &KubeletApiStates| !states.contains_key(RESOURCE);
        seen.wait_for(is_withdrawn).await.unwrap();
        let withdrawn = Instant::now();
        seen.wait_for(is_served).await.unwrap();
        let until_served = withdrawn.elapsed();
        shutdown.cancel();
        served.await.unwrap();
        assert!(until_served >= WITHDRAWAL + DISCONNECTION, "{until_served:?}");
    }
}
