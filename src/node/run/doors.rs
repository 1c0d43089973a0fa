//! The doors of a companion: which are open, and how it stands with kubelet.

use std::sync::Arc;

use futures::FutureExt as _;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::NodeError;
use super::resource_doors::{DoorStates, ResourceDoors};
use crate::core::node::checkpoint::ClusterFacts;
use crate::core::node::driver_name::DriverName;
use crate::node::companion::Companion;
use crate::node::door::device_plugin::PluginRegistration;
use crate::node::door::{self, DoorError, DoorState, KubeletPaths};
use crate::node::inventory::Standing;
use crate::node::reload::Resources;

/// The doors of kubelet that this companion opens.
pub(super) struct Doors {
    pub(super) paths: KubeletPaths,
    pub(super) plugin_registration: PluginRegistration,
    pub(super) driver_name: DriverName,
    pub(super) resources: watch::Receiver<Arc<Resources>>,
    pub(super) cluster: watch::Receiver<ClusterFacts>,
}

impl Doors {
    /// Keeps the doors open until the shutdown, or until one cannot be opened.
    pub(super) async fn serve<C: Companion>(
        self,
        companion: Arc<C>,
        standing: watch::Sender<Standing>,
        shutdown: CancellationToken,
    ) -> Result<(), NodeError> {
        let ours = shutdown.child_token();
        let _end_with_this = ours.clone().drop_guard();
        let mut doors = JoinSet::new();
        let (state, claims) = watch::channel(DoorState::Starting);
        let (states, resources) = watch::channel(Vec::new());
        let resource_doors = ResourceDoors {
            companion: companion.clone(),
            paths: self.paths.clone(),
            plugin_registration: self.plugin_registration,
            driver_name: self.driver_name.to_string(),
            states,
        };
        doors.spawn(resource_doors.serve(self.resources, ours.clone()));
        let follow = follow(self.cluster.clone(), claims, resources, standing);
        doors.spawn(serve_claims(
            companion,
            self.paths,
            self.driver_name,
            self.cluster,
            state,
            ours.clone(),
        ));
        tokio::pin!(follow);
        let mut result = Ok(());
        let mut followed = false;
        loop {
            tokio::select! {
                () = &mut follow, if !followed => followed = true,
                ended = doors.join_next() => match ended {
                    None => return result,
                    Some(ended) => {
                        let ended = ended.map_err(NodeError::Broken).and_then(|ended| ended.map_err(NodeError::from));
                        if ended.is_err() && result.is_ok() {
                            // The others are closed with the calls that they have, and then all of it ends.
                            ours.cancel();
                            result = ended;
                        }
                    }
                },
            }
        }
    }
}

/// The door for claims: open while the cluster has claims of the version that we serve, or was not there to ask since.
async fn serve_claims<C: Companion>(
    companion: Arc<C>,
    paths: KubeletPaths,
    driver_name: DriverName,
    mut cluster: watch::Receiver<ClusterFacts>,
    state: watch::Sender<DoorState>,
    shutdown: CancellationToken,
) -> Result<(), DoorError> {
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            wanted = cluster.wait_for(|facts| facts.serves_claims == Some(true)) => if wanted.is_err() { return Ok(()) },
        }
        let open = shutdown.child_token();
        let door = door::dra::serve(
            companion.clone(),
            paths.clone(),
            driver_name.to_string(),
            state.clone(),
            open.clone(),
        );
        tokio::pin!(door);
        let given_up = async {
            cluster
                .wait_for(|facts| facts.serves_claims == Some(false))
                .await
                .is_ok()
        };
        let given_up = tokio::select! {
            ended = &mut door => return ended,
            given_up = given_up => given_up,
        };
        if given_up {
            open.cancel();
        }
        door.await?;
    }
}

/// Says how the companion stands, whenever a door or the cluster changes it, until a door has ended.
async fn follow(
    mut cluster: watch::Receiver<ClusterFacts>,
    mut claims: watch::Receiver<DoorState>,
    mut resources: watch::Receiver<DoorStates>,
    standing: watch::Sender<Standing>,
) {
    let mut warned = false;
    loop {
        let serves_claims = cluster.borrow_and_update().serves_claims;
        if serves_claims == Some(false) && !warned {
            warned = true;
            warn!(
                "this cluster does not serve resource.k8s.io/v1alpha2: claims are not offered, extended resources are"
            );
        }
        let mut states = resources.borrow_and_update().clone();
        let mut doors: Vec<(String, DoorState)> = states
            .iter_mut()
            .map(|(name, state)| (name.clone(), state.borrow_and_update().clone()))
            .collect();
        let claims_now = claims.borrow_and_update().clone();
        if serves_claims != Some(false) {
            doors.push(("claims".to_owned(), claims_now));
        }
        let now = judge(&doors, serves_claims);
        standing.send_if_modified(|published| {
            let changed = *published != now;
            *published = now;
            changed
        });
        // A door that has ended is taken off the list, or everything ends.
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

fn judge(doors: &[(String, DoorState)], serves_claims: Option<bool>) -> Standing {
    let standing = |ready, reason: &str, message: String| Standing {
        ready,
        reason: reason.to_owned(),
        message,
    };
    for (door, state) in doors {
        match state {
            DoorState::Rejected { message } => {
                return standing(
                    false,
                    "Rejected",
                    format!("kubelet refuses the door for {door}: {message}"),
                );
            }
            DoorState::Starting | DoorState::Closed => {
                return standing(false, "Starting", format!("the door for {door} is not open"));
            }
            DoorState::Waiting | DoorState::Registered => {}
        }
    }
    let message = match serves_claims {
        Some(false) => {
            "kubelet is served; this cluster does not serve resource.k8s.io/v1alpha2, so claims are not offered"
        }
        _ => "kubelet is served",
    };
    standing(true, "Serving", message.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_companion_is_ready_when_every_door_is_open_and_none_is_refused() {
        let rejected = DoorState::Rejected {
            message: "no such plugin type".into(),
        };
        for (state, ready, reason) in [
            (DoorState::Starting, false, "Starting"),
            (DoorState::Closed, false, "Starting"),
            (DoorState::Waiting, true, "Serving"),
            (DoorState::Registered, true, "Serving"),
            (rejected, false, "Rejected"),
        ] {
            let doors = [
                ("example.com/camera".to_owned(), DoorState::Registered),
                ("claims".to_owned(), state),
            ];
            let standing = judge(&doors, Some(true));
            assert_eq!(
                (standing.ready, standing.reason.as_str()),
                (ready, reason),
                "{standing:?}"
            );
        }
    }

    #[test]
    fn a_cluster_without_claims_is_named_in_the_message() {
        let standing = judge(&[], Some(false));
        assert!(
            standing.ready && standing.message.contains("resource.k8s.io/v1alpha2"),
            "{standing:?}"
        );
    }
}
