//! The companion's kubelet endpoints and its registration status.

use std::path::PathBuf;
use std::sync::Arc;

use futures::FutureExt as _;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use super::NodeError;
use super::mounted::cut_off;
use super::resource_apis::{KubeletApiStates, ResourceApis};
use super::retried::serve_again;
use crate::core::prepare::checkpoint::ClusterFacts;
use crate::core::prepare::claims_api::ClaimsApi;
use crate::core::prepare::kubelet_apis::{ApiState, ApisDown, problems};
use crate::core::prepare::names::DriverName;
use crate::node::kubelet::device_plugin::PluginRegistration;
use crate::node::kubelet::dra::DraApi;
use crate::node::kubelet::dra::claim_reader::ClaimReader;
use crate::node::kubelet::dra::device_health::DeviceHealth;
use crate::node::kubelet::transport::check_path;
use crate::node::kubelet::{self, KubeletApiError, KubeletApiState, KubeletPaths};
use crate::node::publish::inventory::Standing;
use crate::node::reload::Resources;
use crate::node::service::NodeService;

/// Name of the DRA API among the extended resources, whose names contain a slash.
const CLAIMS: &str = "claims";

/// The kubelet endpoints of this companion.
pub(super) struct KubeletApis {
    pub(super) client: kube::Client,
    /// Sends the health of devices in structured mode.
    pub(super) health: DeviceHealth,
    pub(super) paths: KubeletPaths,
    pub(super) plugin_registration: PluginRegistration,
    pub(super) driver_name: DriverName,
    pub(super) resources: watch::Receiver<Arc<Resources>>,
    pub(super) cluster: watch::Receiver<ClusterFacts>,
    /// Mounted host directories without which the endpoints are not visible outside the pod.
    pub(super) mounted: Vec<PathBuf>,
}

impl KubeletApis {
    /// Serves the endpoints until the shutdown. An endpoint that fails is retried while the others serve.
    pub(super) async fn serve(
        self,
        node: NodeService,
        standing: watch::Sender<Standing>,
        shutdown: CancellationToken,
    ) -> Result<(), NodeError> {
        self.check_paths()?;
        let ours = shutdown.child_token();
        let _end_with_this = ours.clone().drop_guard();
        let mut apis = JoinSet::new();
        let (state, claims) = watch::channel(KubeletApiState::Starting);
        let (states, resources) = watch::channel(Vec::new());
        let resource_apis = ResourceApis {
            node: node.clone(),
            paths: self.paths.clone(),
            plugin_registration: self.plugin_registration,
            driver_name: self.driver_name.to_string(),
            states,
        };
        apis.spawn(resource_apis.serve(self.resources, ours.clone()));
        let follow = follow(self.cluster.clone(), claims, resources, standing);
        apis.spawn(serve_claims(
            node,
            self.paths,
            DraApi::Structured {
                claims: ClaimReader::new(self.client, self.driver_name.clone()),
                health: self.health,
            },
            self.driver_name,
            self.cluster,
            state,
            ours.clone(),
        ));
        let lost = cut_off(self.mounted);
        tokio::pin!(follow, lost);
        let mut result = Ok(());
        let mut followed = false;
        loop {
            tokio::select! {
                () = &mut follow, if !followed => followed = true,
                lost = &mut lost, if result.is_ok() => {
                    let lost = NodeError::CutOff(lost);
                    error!(reason = lost.reason(), "{lost}");
                    ours.cancel();
                    result = Err(lost);
                }
                ended = apis.join_next() => match ended {
                    None => return result,
                    Some(Ok(())) => {}
                    Some(Err(broken)) => {
                        // The other endpoints finish their calls and close; then the companion ends.
                        ours.cancel();
                        result = result.and(Err(NodeError::Broken(broken)));
                    }
                },
            }
        }
    }

    /// Rejects options whose socket paths can never be valid, since a retry would not help.
    fn check_paths(&self) -> Result<(), KubeletApiError> {
        let (paths, driver_name) = (&self.paths, self.driver_name.as_str());
        let mut places = vec![
            paths.service_socket(driver_name),
            paths.registration_socket(driver_name),
        ];
        for name in self.resources.borrow().keys() {
            places.extend(match self.plugin_registration {
                PluginRegistration::KubeletSocket => vec![paths.device_plugin_socket(name)],
                PluginRegistration::PluginWatcher => vec![
                    paths.watched_device_plugin_socket(driver_name, name),
                    paths.device_plugin_registration_socket(driver_name, name),
                ],
            });
        }
        places
            .iter()
            .try_for_each(|place| Ok(check_path(place).map(drop)?))
    }
}

/// Serves the DRA API of the cluster's mode, and changes it with the mode; an unreachable API server does not end it.
async fn serve_claims(
    node: NodeService,
    paths: KubeletPaths,
    structured: DraApi,
    driver_name: DriverName,
    mut cluster: watch::Receiver<ClusterFacts>,
    state: watch::Sender<KubeletApiState>,
    shutdown: CancellationToken,
) {
    let api_of = |facts: &ClusterFacts| match facts.claims {
        Some(ClaimsApi::Classic) => Some(DraApi::Classic),
        Some(ClaimsApi::Structured) => Some(structured.clone()),
        Some(ClaimsApi::None) | None => None,
    };
    loop {
        let served = tokio::select! {
            () = shutdown.cancelled() => return,
            served = cluster.wait_for(|facts| api_of(facts).is_some()) => match served {
                Ok(facts) => facts.clone(),
                Err(_) => return,
            },
        };
        let Some(dra_api) = api_of(&served) else {
            continue;
        };
        let open = shutdown.child_token();
        let api = serve_again(CLAIMS, &state, &open, |state| {
            kubelet::dra::serve(
                node.clone(),
                paths.clone(),
                driver_name.to_string(),
                dra_api.clone(),
                state,
                open.clone(),
            )
        });
        tokio::pin!(api);
        let mut prepared = node.prepared();
        let changed = async {
            loop {
                match cluster.wait_for(|facts| facts.claims != served.claims).await {
                    Ok(facts) if facts.serves(ClaimsApi::None) => {}
                    Ok(_) => return true,
                    Err(_) => return false,
                }
                // Kubelet must be able to unprepare the claims of an API that is gone.
                tokio::select! {
                    unprepared = prepared.wait_for(|count| *count == 0) => return unprepared.is_ok(),
                    changed = cluster.changed() => if changed.is_err() { return false },
                }
            }
        };
        let changed = tokio::select! {
            () = &mut api => return,
            changed = changed => changed,
        };
        if changed {
            open.cancel();
        }
        api.await;
    }
}

/// Publishes the registration status on each change of an endpoint or of the cluster, until an endpoint has ended.
async fn follow(
    mut cluster: watch::Receiver<ClusterFacts>,
    mut claims: watch::Receiver<KubeletApiState>,
    mut resources: watch::Receiver<KubeletApiStates>,
    standing: watch::Sender<Standing>,
) {
    let mut warned = false;
    let mut down = ApisDown::default();
    loop {
        let no_claims = cluster.borrow_and_update().serves(ClaimsApi::None);
        if no_claims && !warned {
            warn!(
                "this cluster serves neither resource.k8s.io/v1 nor v1alpha2: claims are not offered until it does, extended resources are"
            );
        }
        warned = no_claims;
        let mut states = resources.borrow_and_update().clone();
        let of_resources: Vec<(String, ApiState)> = states
            .iter_mut()
            .map(|(name, state)| (name.clone(), api_state(&state.borrow_and_update())))
            .collect();
        let claims_now = api_state(&claims.borrow_and_update());
        let of_claims = (!no_claims).then(|| (CLAIMS.to_owned(), claims_now));
        let now = judge(of_claims, of_resources, &mut down);
        standing.send_if_modified(|published| {
            let changed = *published != now;
            *published = now;
            changed
        });
        // An ended endpoint is removed from the list, or the companion stops.
        let of_resources = states.iter_mut().map(|(_, state)| {
            let changed = async {
                if state.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            changed.boxed()
        });
        let any_resource = futures::future::select_all(of_resources.chain([std::future::pending().boxed()]));
        tokio::select! {
            _ = any_resource => {}
            changed = claims.changed() => if changed.is_err() { return },
            changed = resources.changed() => if changed.is_err() { return },
            Ok(()) = cluster.changed() => {}
        }
    }
}

fn api_state(state: &KubeletApiState) -> ApiState {
    match state {
        KubeletApiState::Starting | KubeletApiState::Closed => ApiState::Starting,
        KubeletApiState::Waiting => ApiState::Waiting,
        KubeletApiState::Registered => ApiState::Registered,
        KubeletApiState::Rejected { message } => ApiState::Rejected(message.clone()),
        KubeletApiState::Failed { message } => ApiState::Failed(message.clone()),
    }
}

fn judge(
    claims: Option<(String, ApiState)>,
    resources: Vec<(String, ApiState)>,
    down: &mut ApisDown,
) -> Standing {
    let no_claims = claims.is_none();
    let claims: Vec<_> = claims.into_iter().collect();
    let claims_ready = problems(&claims).is_none();
    let all: Vec<_> = claims.into_iter().chain(resources).collect();
    down.update(&all);
    let problem = problems(&all);
    let served = || {
        if no_claims {
            "kubelet is served; this cluster serves neither resource.k8s.io/v1 nor v1alpha2, so claims are not offered"
        } else {
            "kubelet is served"
        }
    };
    let ready = problem.is_none();
    let (reason, message) = problem.unwrap_or_else(|| ("Serving", served().to_owned()));
    Standing {
        ready,
        claims_ready,
        reason: reason.to_owned(),
        message,
        down: down.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(claims: Option<ApiState>, resource: Option<ApiState>) -> Standing {
        let claims = claims.map(|state| (CLAIMS.to_owned(), state));
        let resources = resource.map(|state| ("example.com/camera".to_owned(), state));
        let mut down = ApisDown::default();
        judge(claims, resources.into_iter().collect(), &mut down)
    }

    #[test]
    fn a_companion_is_ready_when_every_api_serves_unrefused() {
        let rejected = ApiState::Rejected("no such plugin type".into());
        let failed = ApiState::Failed("read-only file system".into());
        for (state, ready, reason) in [
            (ApiState::Starting, false, "Starting"),
            (ApiState::Waiting, true, "Serving"),
            (ApiState::Registered, true, "Serving"),
            (rejected, false, "Rejected"),
            (failed, false, "Failed"),
        ] {
            let standing = judged(Some(state), Some(ApiState::Registered));
            assert_eq!(
                (standing.ready, standing.claims_ready, standing.reason.as_str()),
                (ready, ready, reason),
                "{standing:?}"
            );
        }
    }

    #[test]
    fn claims_go_on_when_an_extended_resource_is_down() {
        let failed = ApiState::Failed("read-only file system".into());
        let standing = judged(Some(ApiState::Registered), Some(failed));
        assert!(!standing.ready && standing.claims_ready, "{standing:?}");
        assert!(
            standing.message.contains("example.com/camera") && standing.message.contains("read-only"),
            "{standing:?}"
        );
    }

    #[test]
    fn a_cluster_without_claims_is_named_in_the_message() {
        let standing = judged(None, None);
        assert!(
            standing.ready
                && standing
                    .message
                    .contains("neither resource.k8s.io/v1 nor v1alpha2"),
            "{standing:?}"
        );
    }

    #[tokio::test]
    async fn claims_are_served_until_none_is_prepared() {
        let root = tempfile::tempdir().unwrap();
        let paths = KubeletPaths {
            root_dir: root.path().to_owned(),
            ..KubeletPaths::default()
        };
        let (node, backend) = NodeService::new(false, Arc::default());
        let facts = |api| ClusterFacts {
            claims: Some(api),
            ..ClusterFacts::default()
        };
        let cluster = watch::Sender::new(facts(ClaimsApi::Classic));
        let (state, mut seen) = watch::channel(KubeletApiState::Starting);
        let driver = DriverName::parse("drayman.dev").unwrap();
        let (known, shutdown) = (cluster.subscribe(), CancellationToken::new());
        let served = serve_claims(node, paths, DraApi::Classic, driver, known, state, shutdown);
        let served = tokio::spawn(served);
        seen.wait_for(|state| *state == KubeletApiState::Waiting)
            .await
            .unwrap();

        backend.prepared.send_replace(1);
        cluster.send_replace(facts(ClaimsApi::None));
        let closed = seen.wait_for(|state| *state == KubeletApiState::Closed);
        let soon = std::time::Duration::from_millis(300);
        assert!(tokio::time::timeout(soon, closed).await.is_err());
        backend.prepared.send_replace(0);
        seen.wait_for(|state| *state == KubeletApiState::Closed)
            .await
            .unwrap();
        served.abort();
    }
}
