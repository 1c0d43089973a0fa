//! The companion's kubelet endpoints and its registration status.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use super::NodeError;
use super::mounted::cut_off;
use super::resource_apis::{KubeletApiStates, ResourceApis};
use super::retried::serve_again;
use crate::core::names::DriverName;
use crate::core::prepare::checkpoint::ClusterFacts;
use crate::core::prepare::claims_api::ClaimsApi;
use crate::core::prepare::kubelet_apis::{ApisDown, problems};
use crate::node::kubelet::device_plugin::PluginRegistration;
use crate::node::kubelet::dra::DraApi;
use crate::node::kubelet::transport::check_path;
use crate::node::kubelet::{self, KubeletApiError, KubeletApiState, KubeletPaths};
use crate::node::publish::inventory::RegistrationStatus;
use crate::node::reload::ConfiguredResources;
use crate::node::service::NodeService;

/// Name of the DRA API among the extended resources, whose names contain a slash.
const CLAIMS: &str = "claims";

/// The DRA endpoint of this companion. A companion that takes over from another one serves it before it has the node's state.
pub(super) struct ClaimsEndpoint {
    pub(super) node: NodeService,
    pub(super) paths: KubeletPaths,
    /// The API of structured mode.
    pub(super) structured: DraApi,
    pub(super) driver_name: DriverName,
    pub(super) cluster: watch::Receiver<ClusterFacts>,
}

/// The task of a [`ClaimsEndpoint`].
pub(super) struct ServedClaims {
    state: watch::Receiver<KubeletApiState>,
    /// The API by which claims were prepared before the start.
    prepared_by: watch::Sender<Option<ClaimsApi>>,
    /// Cancelled when the endpoint may serve.
    begin: CancellationToken,
    /// Cancelled when all endpoints end.
    end: CancellationToken,
    /// The tasks of all endpoints.
    tasks: JoinSet<()>,
}

impl ClaimsEndpoint {
    /// Spawns the endpoint, which does not serve before [`ServedClaims::begin`].
    pub(super) fn spawn(self) -> ServedClaims {
        let (state, seen) = watch::channel(KubeletApiState::Starting);
        let (prepared_by, recovered) = watch::channel(None);
        let (begin, end) = (CancellationToken::new(), CancellationToken::new());
        let mut tasks = JoinSet::new();
        let (may_serve, shutdown) = (begin.clone(), end.clone());
        tasks.spawn(async move {
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = may_serve.cancelled() => self.serve(state, recovered, shutdown.clone()).await,
            }
        });
        ServedClaims {
            state: seen,
            prepared_by,
            begin,
            end,
            tasks,
        }
    }
}

impl ServedClaims {
    /// Serves from now on.
    pub(super) fn begin(&self) {
        self.begin.cancel();
    }

    /// Tells the endpoint by which API claims were prepared before the start. Call it before their number is published.
    pub(super) fn recovered(&self, prepared_by: Option<ClaimsApi>) {
        self.prepared_by.send_replace(prepared_by);
    }

    /// Waits until kubelet has registered the endpoint.
    pub(super) async fn registered(&self) {
        let mut state = self.state.clone();
        let registered = state.wait_for(|state| *state == KubeletApiState::Registered);
        if registered.await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// The token that ends all endpoints.
    pub(super) fn end(&self) -> CancellationToken {
        self.end.clone()
    }

    /// Ends all endpoints and waits until their sockets are removed.
    pub(super) async fn close(&mut self) {
        self.end.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

/// The kubelet endpoints of this companion.
pub(super) struct KubeletApis {
    pub(super) paths: KubeletPaths,
    pub(super) plugin_registration: PluginRegistration,
    pub(super) driver_name: DriverName,
    pub(super) resources: watch::Receiver<Arc<ConfiguredResources>>,
    pub(super) cluster: watch::Receiver<ClusterFacts>,
    /// Mounted host directories without which the endpoints are not visible outside the pod.
    pub(super) mounted: Vec<PathBuf>,
}

impl KubeletApis {
    /// Serves the endpoints until their end. An endpoint that fails is retried while the others serve.
    pub(super) async fn serve(
        self,
        node: NodeService,
        registration_status: watch::Sender<RegistrationStatus>,
        claims: &mut ServedClaims,
    ) -> Result<(), NodeError> {
        self.check_paths()?;
        let ServedClaims {
            state,
            begin,
            end,
            tasks: apis,
            ..
        } = claims;
        begin.cancel();
        let (states, resources) = watch::channel(BTreeMap::new());
        let resource_apis = ResourceApis {
            node,
            paths: self.paths,
            plugin_registration: self.plugin_registration,
            driver_name: self.driver_name.to_string(),
            states,
        };
        apis.spawn(resource_apis.serve(self.resources, end.clone()));
        let follow = follow(self.cluster, state.clone(), resources, registration_status);
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
                    end.cancel();
                    result = Err(lost);
                }
                ended = apis.join_next() => match ended {
                    None => return result,
                    Some(Ok(())) => {}
                    Some(Err(broken)) => {
                        // The other endpoints finish their calls and close; then the companion ends.
                        end.cancel();
                        result = result.and(Err(NodeError::Broken(broken)));
                    }
                },
            }
        }
    }

    /// Rejects options whose socket paths can never be valid, since a retry would not help.
    fn check_paths(&self) -> Result<(), KubeletApiError> {
        let (paths, driver_name) = (&self.paths, self.driver_name.as_str());
        let mut locations = vec![
            paths.service_socket(driver_name),
            paths.registration_socket(driver_name),
        ];
        for name in self.resources.borrow().keys() {
            locations.extend(match self.plugin_registration {
                PluginRegistration::KubeletSocket => vec![paths.device_plugin_socket(name)],
                PluginRegistration::PluginWatcher => vec![
                    paths.watched_device_plugin_socket(driver_name, name),
                    paths.device_plugin_registration_socket(driver_name, name),
                ],
            });
        }
        locations
            .iter()
            .try_for_each(|location| Ok(check_path(location).map(drop)?))
    }
}

impl ClaimsEndpoint {
    /// Serves the DRA API of the cluster's mode, and changes it with the mode; an unreachable API server does not end it.
    async fn serve(
        mut self,
        state: watch::Sender<KubeletApiState>,
        recovered: watch::Receiver<Option<ClaimsApi>>,
        shutdown: CancellationToken,
    ) {
        let cluster = &mut self.cluster;
        let mut prepared = self.node.prepared();
        loop {
            let served = tokio::select! {
                () = shutdown.cancelled() => return,
                served = next_api(cluster, &mut prepared, &recovered) => served,
            };
            let dra_api = match served {
                Some(ClaimsApi::Classic) => DraApi::Classic,
                Some(ClaimsApi::Structured) => self.structured.clone(),
                Some(ClaimsApi::None) | None => return,
            };
            let open = shutdown.child_token();
            let report = |now| drop(state.send_replace(now));
            let api = serve_again(CLAIMS, report, &open, |state| {
                kubelet::dra::serve(
                    self.node.clone(),
                    self.paths.clone(),
                    self.driver_name.to_string(),
                    dra_api.clone(),
                    state,
                    open.clone(),
                )
            });
            tokio::pin!(api);
            let changed = async {
                loop {
                    match cluster.wait_for(|facts| facts.claims != served).await {
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
}

/// Waits for an API to serve. In a cluster without one, it is the API by which claims were prepared before the start, while claims are
/// prepared: kubelet must be able to unprepare them. `None` if the companion ends.
async fn next_api(
    cluster: &mut watch::Receiver<ClusterFacts>,
    prepared: &mut watch::Receiver<usize>,
    recovered: &watch::Receiver<Option<ClaimsApi>>,
) -> Option<ClaimsApi> {
    loop {
        let claims = cluster.borrow_and_update().claims;
        // Zero until the state task has started.
        let count = *prepared.borrow_and_update();
        let api = match claims {
            Some(ClaimsApi::None) if count > 0 => *recovered.borrow(),
            claims => claims.filter(|api| *api != ClaimsApi::None),
        };
        if api.is_some() {
            return api;
        }
        tokio::select! {
            changed = cluster.changed() => if changed.is_err() { return None },
            Ok(()) = prepared.changed() => {}
        }
    }
}

/// Publishes the registration status on each change of an endpoint or of the cluster, until an endpoint has ended.
async fn follow(
    mut cluster: watch::Receiver<ClusterFacts>,
    mut claims: watch::Receiver<KubeletApiState>,
    mut resources: watch::Receiver<KubeletApiStates>,
    registration_status: watch::Sender<RegistrationStatus>,
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
        let of_resources = resources.borrow_and_update().clone();
        let claims_now = claims.borrow_and_update().clone();
        let of_claims = (!no_claims).then(|| (CLAIMS.to_owned(), claims_now));
        let now = evaluate(of_claims, of_resources, &mut down);
        registration_status.send_if_modified(|published| {
            let changed = *published != now;
            *published = now;
            changed
        });
        tokio::select! {
            changed = claims.changed() => if changed.is_err() { return },
            changed = resources.changed() => if changed.is_err() { return },
            Ok(()) = cluster.changed() => {}
        }
    }
}

fn evaluate(
    claims: Option<(String, KubeletApiState)>,
    resources: KubeletApiStates,
    down: &mut ApisDown,
) -> RegistrationStatus {
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
    RegistrationStatus {
        ready,
        claims_ready,
        reason: reason.to_owned(),
        message,
        down: down.clone(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;
    use crate::node::service::Backend;

    fn evaluated(claims: Option<KubeletApiState>, resource: Option<KubeletApiState>) -> RegistrationStatus {
        let claims = claims.map(|state| (CLAIMS.to_owned(), state));
        let resources = resource.map(|state| ("example.com/camera".to_owned(), state));
        let mut down = ApisDown::default();
        evaluate(claims, resources.into_iter().collect(), &mut down)
    }

    fn failed() -> KubeletApiState {
        KubeletApiState::Failed {
            message: "read-only file system".into(),
        }
    }

    #[test]
    fn a_companion_is_ready_when_every_api_serves_unrefused() {
        let rejected = KubeletApiState::Rejected {
            message: "no such plugin type".into(),
        };
        for (state, ready, reason) in [
            (KubeletApiState::Starting, false, "Starting"),
            (KubeletApiState::Closed, false, "Starting"),
            (KubeletApiState::Waiting, true, "Serving"),
            (KubeletApiState::Registered, true, "Serving"),
            (rejected, false, "Rejected"),
            (failed(), false, "Failed"),
        ] {
            let registration_status = evaluated(Some(state), Some(KubeletApiState::Registered));
            assert_eq!(
                (
                    registration_status.ready,
                    registration_status.claims_ready,
                    registration_status.reason.as_str()
                ),
                (ready, ready, reason),
                "{registration_status:?}"
            );
        }
    }

    #[test]
    fn claims_go_on_when_an_extended_resource_is_down() {
        let registration_status = evaluated(Some(KubeletApiState::Registered), Some(failed()));
        assert!(
            !registration_status.ready && registration_status.claims_ready,
            "{registration_status:?}"
        );
        assert!(
            registration_status.message.contains("example.com/camera")
                && registration_status.message.contains("read-only"),
            "{registration_status:?}"
        );
    }

    #[test]
    fn a_cluster_without_claims_is_named_in_the_message() {
        let registration_status = evaluated(None, None);
        assert!(
            registration_status.ready
                && registration_status
                    .message
                    .contains("neither resource.k8s.io/v1 nor v1alpha2"),
            "{registration_status:?}"
        );
    }

    fn facts(api: ClaimsApi) -> ClusterFacts {
        ClusterFacts {
            claims: Some(api),
            ..ClusterFacts::default()
        }
    }

    /// The endpoint in a cluster with this API, which may serve.
    fn begun(root: &Path, api: ClaimsApi) -> (ServedClaims, Backend, watch::Sender<ClusterFacts>) {
        let paths = KubeletPaths {
            root_dir: root.to_owned(),
            ..KubeletPaths::default()
        };
        let (node, backend) = NodeService::new(None, Arc::default());
        let cluster = watch::Sender::new(facts(api));
        let endpoint = ClaimsEndpoint {
            node,
            paths,
            structured: DraApi::Classic,
            driver_name: DriverName::parse("drayman.dev").unwrap(),
            cluster: cluster.subscribe(),
        };
        let served = endpoint.spawn();
        served.begin();
        (served, backend, cluster)
    }

    async fn until(seen: &mut watch::Receiver<KubeletApiState>, state: KubeletApiState) {
        seen.wait_for(|now| *now == state).await.unwrap();
    }

    /// Whether the endpoint does not come to this state soon.
    async fn stays_out_of(seen: &mut watch::Receiver<KubeletApiState>, state: KubeletApiState) -> bool {
        let soon = Duration::from_millis(300);
        timeout(soon, until(seen, state)).await.is_err()
    }

    #[tokio::test]
    async fn claims_are_served_until_none_is_prepared() {
        let root = tempfile::tempdir().unwrap();
        let (mut served, backend, cluster) = begun(root.path(), ClaimsApi::Classic);
        let mut seen = served.state.clone();
        until(&mut seen, KubeletApiState::Waiting).await;

        backend.prepared.send_replace(1);
        cluster.send_replace(facts(ClaimsApi::None));
        assert!(stays_out_of(&mut seen, KubeletApiState::Closed).await);
        backend.prepared.send_replace(0);
        until(&mut seen, KubeletApiState::Closed).await;
        served.close().await;
    }

    #[tokio::test]
    async fn recovered_claims_are_served_until_none_is_prepared() {
        let root = tempfile::tempdir().unwrap();
        let (mut served, backend, _cluster) = begun(root.path(), ClaimsApi::None);
        let mut seen = served.state.clone();
        served.recovered(Some(ClaimsApi::Classic));
        assert!(stays_out_of(&mut seen, KubeletApiState::Waiting).await);

        backend.prepared.send_replace(1);
        until(&mut seen, KubeletApiState::Waiting).await;
        backend.prepared.send_replace(0);
        until(&mut seen, KubeletApiState::Closed).await;
        served.close().await;
    }

    #[tokio::test]
    async fn recovered_claims_stay_served_when_their_api_returns() {
        let root = tempfile::tempdir().unwrap();
        let (mut served, backend, cluster) = begun(root.path(), ClaimsApi::None);
        let mut seen = served.state.clone();
        served.recovered(Some(ClaimsApi::Classic));
        backend.prepared.send_replace(1);
        until(&mut seen, KubeletApiState::Waiting).await;

        cluster.send_replace(facts(ClaimsApi::Classic));
        assert!(stays_out_of(&mut seen, KubeletApiState::Closed).await);
        backend.prepared.send_replace(0);
        assert!(stays_out_of(&mut seen, KubeletApiState::Closed).await);
        cluster.send_replace(facts(ClaimsApi::None));
        until(&mut seen, KubeletApiState::Closed).await;
        served.close().await;
    }
}
