//! Users: they create, delete, replace and edit objects.

use drayman::api::resource::{
    AllocationMode, ClaimSource, Pod, PodResourceClaim, PodSpec, ResourceClaim, ResourceClass,
};
use drayman::core::claims::ObjectKey;
use drayman::driver::CapacityCause;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::cluster::{Action, Cluster, MILLISECOND, SECOND};
use crate::driver::{DRIVER, OTHER_DRIVER, Parameters};
use crate::faults::Fault;
use crate::generate::template_spec;
use crate::store::Endpoint;

/// A finalizer that a user adds to a claim and does not remove.
pub(crate) const STRANGE_FINALIZER: &str = "example.com/hold";

/// How a pod names a claim.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Use<'a> {
    Template(&'a str),
    Named(&'a str),
}

impl Cluster {
    pub(crate) fn set_class(&mut self, name: &str, driver: &str) {
        self.store.put_class(ResourceClass {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                ..ObjectMeta::default()
            },
            driver_name: driver.to_owned(),
            ..ResourceClass::default()
        });
    }

    pub(crate) fn set_parameters(&mut self, name: &str, count: usize, valid: bool, shareable: bool) {
        let parameters = Parameters {
            count,
            valid,
            shareable,
        };
        self.environment.parameters.insert(name.to_owned(), parameters);
        let delay = self.delay();
        self.report_capacity(CapacityCause::Parameters, None, delay);
    }

    pub(crate) fn set_devices(&mut self, node: &str, count: usize) {
        let devices = (0..count).map(|n| format!("d{n}")).collect();
        self.environment.nodes.insert(node.to_owned(), devices);
        let delay = self.delay();
        self.report_capacity(CapacityCause::Inventory, None, delay);
    }

    /// Creates a pod with the entries `c0`, `c1`, …
    pub(crate) fn create_pod(&mut self, key: &ObjectKey, uses: &[Use<'_>], node: Option<&str>) -> String {
        let resource_claims = uses
            .iter()
            .enumerate()
            .map(|(index, used)| PodResourceClaim {
                name: format!("c{index}"),
                source: match used {
                    Use::Template(name) => ClaimSource {
                        resource_claim_name: None,
                        resource_claim_template_name: Some((*name).to_owned()),
                    },
                    Use::Named(name) => ClaimSource {
                        resource_claim_name: Some((*name).to_owned()),
                        resource_claim_template_name: None,
                    },
                },
                ..PodResourceClaim::default()
            })
            .collect();
        let pod = self.store.create_pod(Pod {
            metadata: ObjectMeta {
                namespace: Some(key.namespace.clone()),
                name: Some(key.name.clone()),
                ..ObjectMeta::default()
            },
            spec: PodSpec {
                node_name: node.map(str::to_owned),
                resource_claims,
                ..PodSpec::default()
            },
            ..Pod::default()
        });
        self.trace(|| format!("user: pod {key} {uses:?}"));
        pod.metadata.uid.clone().unwrap()
    }

    pub(crate) fn create_claim(&mut self, key: &ObjectKey, template: &str, mode: AllocationMode) {
        let mut spec = template_spec(template);
        spec.allocation_mode = Some(mode);
        let _ = self.store.create_claim(ResourceClaim {
            metadata: ObjectMeta {
                namespace: Some(key.namespace.clone()),
                name: Some(key.name.clone()),
                ..ObjectMeta::default()
            },
            spec,
            ..ResourceClaim::default()
        });
        self.trace(|| format!("user: claim {key} {template} {mode:?}"));
    }

    /// Creates random nodes, classes and parameters.
    pub(crate) fn set_up_by_seed(&mut self) {
        self.durable_driver = self.rng.chance(300);
        self.lag = self.rng.between(2, 200) * MILLISECOND;
        for index in 0..self.rng.between(1, 4) {
            let count = self.rng.pick(&[0, 1, 2, 3]).unwrap();
            self.set_devices(&format!("node-{index}"), count);
        }
        for name in ["gpu", "late", "flip"] {
            self.set_class(name, DRIVER);
        }
        self.set_class("other", OTHER_DRIVER);
        self.set_parameters("pair", 2, true, false);
        self.set_parameters("shared", 1, true, true);
        let valid = self.rng.chance(500);
        self.set_parameters("odd", 1, valid, false);
        self.user_actions = self.rng.between(5, 80);
        self.after(0, Action::User);
        let start = self.rng.between(0, SECOND);
        if !self.structured {
            self.after(start, Action::Start);
        }
    }

    pub(crate) fn user_acts(&mut self) {
        if self.user_actions == 0 {
            return;
        }
        self.user_actions -= 1;
        self.user_act();
        let longest = if self.rng.chance(300) {
            10 * SECOND
        } else {
            300 * MILLISECOND
        };
        let delay = self.rng.between(0, longest);
        self.after(delay, Action::User);
    }

    pub(crate) fn any_claim(&mut self) -> Option<ObjectKey> {
        let keys: Vec<ObjectKey> = self.store.claims.keys().cloned().collect();
        self.rng.pick(&keys)
    }

    fn any_pod(&mut self) -> Option<ObjectKey> {
        let keys: Vec<ObjectKey> = self.store.pods.keys().cloned().collect();
        self.rng.pick(&keys)
    }

    fn user_act(&mut self) {
        match self.rng.below(20) {
            0..=6 => self.user_creates_pod(),
            7 | 8 => {
                if let Some(pod) = self.any_pod() {
                    self.trace(|| format!("user: deletes pod {pod}"));
                    if self.occurs_on_node(Fault::ForcedDeletion) {
                        self.store.remove_pod(&pod);
                    }
                    self.store.delete_pod(&pod);
                    // Recreates a pod of the same name immediately.
                    if self.rng.chance(300) && !self.store.pods.contains_key(&pod) {
                        self.create_pod(&pod, &[Use::Template("gpu")], None);
                    }
                }
            }
            9 | 10 => {
                if let Some(pod) = self.any_pod()
                    && self.store.pods[&pod].spec.node_name.is_some()
                {
                    self.trace(|| format!("pod {pod} ends"));
                    self.containers_end(&pod);
                }
            }
            11 => {
                let name = *self.rng.pick(&["named-0", "named-1"]).as_ref().unwrap();
                let template = *self
                    .rng
                    .pick(&["gpu", "gpu.shared", "flip", "gpu.odd"])
                    .as_ref()
                    .unwrap();
                let mode = if self.rng.chance(400) {
                    AllocationMode::Immediate
                } else {
                    AllocationMode::WaitForFirstConsumer
                };
                self.create_claim(&ObjectKey::new("default", name), template, mode);
            }
            12 => {
                if let Some(claim) = self.any_claim() {
                    self.trace(|| format!("user: deletes claim {claim}"));
                    self.store.delete_claim(&claim);
                }
            }
            13 => {
                if let Some(claim) = self.any_claim() {
                    let _ = self.store.update_claim(&claim, None, Endpoint::Main, |claim| {
                        let finalizers = claim.metadata.finalizers.get_or_insert_default();
                        match finalizers.iter().position(|name| name == STRANGE_FINALIZER) {
                            Some(index) => drop(finalizers.remove(index)),
                            None => finalizers.push(STRANGE_FINALIZER.to_owned()),
                        }
                        Ok(())
                    });
                }
            }
            14..=16 if self.structured => self.user_interferes(),
            14 => {
                let repointed = self
                    .store
                    .classes
                    .get("flip")
                    .is_some_and(|class| class.driver_name == OTHER_DRIVER);
                self.trace(|| "user: repoints class flip".to_owned());
                self.set_class("flip", if repointed { DRIVER } else { OTHER_DRIVER });
            }
            15 => {
                self.trace(|| "user: class late comes or goes".to_owned());
                if self.store.classes.contains_key("late") {
                    self.store.delete_class("late");
                } else {
                    self.set_class("late", DRIVER);
                }
            }
            16 => {
                let valid = self.rng.chance(500);
                self.trace(|| format!("user: parameters odd are now valid: {valid}"));
                self.set_parameters("odd", 1, valid, false);
            }
            17 => self.user_changes_inventory(),
            18 => {
                if let Some(key) = self.store.contexts.keys().next().cloned() {
                    self.trace(|| format!("user: deletes context {key}"));
                    self.store.delete_context(&key);
                }
            }
            _ => {
                if let Some(claim) = self.any_claim() {
                    let tick = self.now.to_string();
                    let _ = self.store.update_claim(&claim, None, Endpoint::Main, |claim| {
                        let annotations = claim.metadata.annotations.get_or_insert_default();
                        annotations.insert("example.com/tick".to_owned(), tick);
                        Ok(())
                    });
                }
            }
        }
    }

    /// The containers of a pod succeed. With a kubelet, the pod status changes after its claims are unprepared.
    fn containers_end(&mut self, key: &ObjectKey) {
        if self.nodes.is_empty() {
            self.store
                .update_pod(key, |pod| pod.status.phase = Some("Succeeded".to_owned()));
        } else if let Some(pod) = self.store.pods.get(key) {
            self.nodes.ending.insert(crate::pods::uid_of_pod(pod));
            self.wake_kubelets();
        }
    }

    fn user_creates_pod(&mut self) {
        let namespace = *self.rng.pick(&["default", "default", "team"]).as_ref().unwrap();
        let key = ObjectKey::new(namespace, format!("p{}", self.rng.below(8)));
        if self.store.pods.contains_key(&key) {
            return;
        }
        if self.structured {
            self.user_creates_structured_pod(&key);
            return;
        }
        let kinds = [
            Use::Template("gpu"),
            Use::Template("gpu"),
            Use::Template("gpu"),
            Use::Template("gpu.pair"),
            Use::Template("gpu.odd"),
            Use::Template("late"),
            Use::Template("flip"),
            Use::Template("other"),
            Use::Named("named-0"),
            Use::Named("named-1"),
        ];
        let count = *self.rng.pick(&[1, 1, 1, 2, 2, 3]).as_ref().unwrap();
        let uses: Vec<Use<'_>> = (0..count).filter_map(|_| self.rng.pick(&kinds)).collect();
        let nodes: Vec<String> = self.environment.nodes.keys().cloned().collect();
        let node = self.rng.pick(&nodes);
        let bound = node.clone().filter(|_| self.rng.chance(70));
        let uid = self.create_pod(&key, &uses, bound.as_deref());
        if bound.is_none() && self.rng.chance(250) {
            self.pod_nodes.insert(uid, node.into_iter().collect());
        }
    }

    fn user_changes_inventory(&mut self) {
        let nodes: Vec<String> = self.environment.nodes.keys().cloned().collect();
        let Some(node) = self.rng.pick(&nodes) else { return };
        let name = format!("d{}", self.rng.below(5));
        let devices = self.environment.nodes.entry(node.clone()).or_default();
        if !devices.remove(&name) {
            devices.insert(name.clone());
        }
        self.trace(|| format!("user: device {name} of {node} comes or goes"));
        let delay = self.delay();
        self.report_capacity(CapacityCause::Inventory, None, delay);
    }

    /// Stops user actions and removes the finalizers of users, so that the final state is determined.
    pub(crate) fn stop_users(&mut self) {
        self.user_actions = 0;
        let held: Vec<ObjectKey> = self.store.claims.keys().cloned().collect();
        for key in held {
            let _ = self.store.update_claim(&key, None, Endpoint::Main, |claim| {
                if let Some(finalizers) = &mut claim.metadata.finalizers {
                    finalizers.retain(|name| name != STRANGE_FINALIZER);
                }
                Ok(())
            });
        }
        self.feed_watches();
        self.wake_scheduler();
    }
}
