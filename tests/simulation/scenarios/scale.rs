//! CPU time of the core alone in a large cluster, without server, scheduler and driver.

use std::sync::Arc;
use std::time::Duration;

use drayman::api::resource::{
    ClaimSource, Pod, PodResourceClaim, PodSchedulingContext, PodSchedulingContextSpec, PodSpec,
    ResourceClaim, ResourceClass,
};
use drayman::core::claims::{
    Answer, ClaimWrite, Command, ControllerState, DriverRequest, Event, Moment, Outcome, Settings,
};
use drayman::driver::{CapacityCause, CapacityChange, UnsuitableNodes};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::driver::{DRIVER, FINALIZER, Hold, allocation_of};
use crate::generate::template_spec;
use crate::pods::owned_by;

fn named(name: &str, version: u64) -> ObjectMeta {
    ObjectMeta {
        namespace: Some("default".to_owned()),
        name: Some(name.to_owned()),
        uid: Some(format!("uid-of-{name}")),
        resource_version: Some(version.to_string()),
        ..ObjectMeta::default()
    }
}

fn allocated(claim: &mut ResourceClaim, node: &str, device: &str) {
    let devices = [device.to_owned()].into();
    claim.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
    claim.status.driver_name = Some(DRIVER.to_owned());
    claim.status.allocation = Some(allocation_of(
        &Hold {
            node: node.to_owned(),
            devices,
        },
        false,
    ));
}

fn pod(name: &str) -> Pod {
    Pod {
        metadata: named(name, 1),
        spec: PodSpec {
            resource_claims: vec![PodResourceClaim {
                name: "c".to_owned(),
                source: ClaimSource {
                    resource_claim_name: Some(format!("{name}-c")),
                    resource_claim_template_name: None,
                },
                ..PodResourceClaim::default()
            }],
            ..PodSpec::default()
        },
        ..Pod::default()
    }
}

/// A runtime that answers every command immediately: every node is full while `full`, every write is stored.
struct InstantRuntime {
    state: ControllerState,
    now: Moment,
    version: u64,
    full: bool,
    decisions: u64,
}

impl InstantRuntime {
    fn feed(&mut self, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            self.state.apply(event, self.now);
            self.decisions += 1;
            for command in self.state.decide(self.now) {
                events.extend(self.answer(command));
            }
        }
    }

    fn answer(&mut self, command: Command) -> Option<Event> {
        self.version += 1;
        let (id, answer) = match command {
            Command::AwaitDriver => return Some(Event::DriverReady),
            Command::Observe(_) | Command::Report(_) => return None,
            Command::ReadPod { id, key } => (id, Answer::PodRead(Ok(Some(Arc::new(pod(&key.name)))))),
            Command::CallDriver { id, request } => match request {
                DriverRequest::UnsuitableNodes { claims, nodes, .. } => {
                    let full = nodes.into_iter().filter(|_| self.full);
                    let unsuitable: UnsuitableNodes =
                        full.map(|node| (node, "8 of 8 held".to_owned())).collect();
                    (id, Answer::Evaluated(Ok(vec![unsuitable; claims.len()])))
                }
                DriverRequest::Allocate { claims, .. } => {
                    let results = claims.iter().map(|_| {
                        let mut claim = ResourceClaim::default();
                        allocated(&mut claim, "node-000", "any");
                        claim.status.allocation.unwrap()
                    });
                    (id, Answer::Allocated(Ok(results.collect())))
                }
                DriverRequest::Deallocate { .. } => (id, Answer::Deallocated(Ok(()))),
            },
            Command::WriteClaim { id, key, write, .. } => {
                let mut claim = ResourceClaim {
                    metadata: named(&key.name, self.version),
                    spec: template_spec("gpu"),
                    ..ResourceClaim::default()
                };
                claim.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
                if let ClaimWrite::Allocate { allocation, .. } = write {
                    claim.status.driver_name = Some(DRIVER.to_owned());
                    claim.status.allocation = Some(allocation);
                }
                (id, Answer::ClaimWritten(Outcome::Done(Arc::new(claim))))
            }
            Command::WriteContext { id, key, entries, .. } => {
                let mut context = context(&key.name, self.version);
                context.status.resource_claims = entries;
                (id, Answer::ContextWritten(Outcome::Done(Arc::new(context))))
            }
            Command::ReadClaim { .. } => unreachable!("nothing is unclear here"),
        };
        Some(Event::Answer { id, answer })
    }
}

fn context(pod_name: &str, version: u64) -> PodSchedulingContext {
    let mut metadata = named(pod_name, version);
    metadata.owner_references = Some(vec![owned_by(&pod(pod_name))]);
    PodSchedulingContext {
        metadata,
        spec: PodSchedulingContextSpec {
            selected_node: "node-000".to_owned(),
            potential_nodes: (0..128).map(|n| format!("node-{n:03}")).collect(),
        },
        ..PodSchedulingContext::default()
    }
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap()
}

/// CPU time of the core for `count` pods that wait, are woken by freed devices and are allocated, with `held` allocated claims.
fn cpu_time_for(held: u64, count: u64) -> Duration {
    let mut runtime = InstantRuntime {
        state: ControllerState::new(Settings::new(DRIVER)),
        now: Moment::default(),
        version: 1_000_000,
        full: true,
        decisions: 0,
    };
    let class = ResourceClass {
        metadata: ObjectMeta {
            namespace: None,
            ..named("gpu", 1)
        },
        driver_name: DRIVER.to_owned(),
        ..ResourceClass::default()
    };
    let held = (0..held).map(|n| {
        let mut claim = ResourceClaim {
            metadata: named(&format!("held-{n}"), n + 2),
            spec: template_spec("gpu"),
            ..ResourceClaim::default()
        };
        allocated(&mut claim, "node-001", &format!("d{n}"));
        Arc::new(claim)
    });
    let held: Vec<Arc<ResourceClaim>> = held.collect();
    runtime.feed(Event::Classes(vec![Arc::new(class)]));
    runtime.feed(Event::Claims(held.clone()));
    runtime.feed(Event::Contexts(Vec::new()));
    // The initial lists cost the same for any number of pods and would hide the cost of pods.
    let start = cpu_time();
    for n in 0..count {
        runtime.version += 1;
        let claim = ResourceClaim {
            metadata: named(&format!("p{n}-c"), runtime.version),
            spec: template_spec("gpu"),
            ..ResourceClaim::default()
        };
        runtime.feed(Event::Claim(Arc::new(claim)));
        runtime.feed(Event::Context(Arc::new(context(
            &format!("p{n}"),
            runtime.version,
        ))));
    }
    assert_eq!(runtime.state.statistics().allocations, 0);
    runtime.full = false;
    for _ in 0..count {
        runtime.feed(Event::Capacity(
            CapacityChange::new(CapacityCause::Freed).for_pods(1),
        ));
    }
    assert_eq!(runtime.state.statistics().allocations, count);
    for n in 0..count {
        let uid = format!("uid-of-p{n}");
        let key = super::key(&format!("p{n}"));
        runtime.feed(Event::ContextGone { key, uid });
    }
    let took = cpu_time().saturating_sub(start);
    println!(
        "{count} pods beside {} claims: {took:?} for {} decisions",
        held.len(),
        runtime.decisions
    );
    took
}

#[test]
fn the_work_grows_with_the_pods_and_not_with_their_square() {
    // Other processes only add to the time.
    let least = |held, count| (0..3).map(|_| cpu_time_for(held, count)).min().unwrap();
    let (few, many) = (least(1_000, 500), least(1_000, 2_000));
    // Four times the pods: quadratic work would be 16 times. The growth of sorted maps may show, a scan of all pods per event may not.
    assert!(many < few * 6, "{few:?} for 500 pods, {many:?} for 2000");
    let (beside_few, beside_many) = (least(1_000, 200), least(20_000, 200));
    assert!(
        beside_many < beside_few * 3,
        "{beside_few:?} beside 1000 claims, {beside_many:?} beside 20000"
    );
}
