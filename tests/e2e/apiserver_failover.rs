//! Failover between two API servers behind one address, and watches that restart after an etcd compaction.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use drayman::api::resource::ResourceClaim;
use kube::api::{Api, ListParams, PostParams};
use kube::runtime::wait::await_condition;
use rustix::process::Signal;
use serde_json::json;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Child;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::controller::assert_distinct;
use crate::harness::{Cluster, TIMEOUT};
use crate::pods::{CONFIGURATION, MINORS, look_inside, make_devices, wait_for_inventory};
use crate::setup::{REGISTERED, Setup, controller_rules, is_allocated, node_rules};
use crate::stored_claims::CONTROLLER;

/// An API server behind the balancer.
#[derive(Clone, Debug)]
struct Backend {
    address: SocketAddr,
    /// Number of open connections.
    open: Arc<AtomicUsize>,
}

/// A TCP load balancer. It gives each connection to the next backend that accepts it. Dropping it closes all connections.
pub(crate) struct Balancer {
    pub(crate) address: SocketAddr,
    backends: Vec<Backend>,
    connections: Arc<Mutex<JoinSet<()>>>,
    _task: tokio_util::task::AbortOnDropHandle<()>,
}

impl Balancer {
    pub(crate) async fn start(ports: &[u16]) -> anyhow::Result<Self> {
        Self::start_at(([127, 0, 0, 1], 0).into(), ports).await
    }

    pub(crate) async fn start_at(address: SocketAddr, ports: &[u16]) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let backends: Vec<Backend> = ports
            .iter()
            .map(|port| Backend {
                address: SocketAddr::from(([127, 0, 0, 1], *port)),
                open: Arc::default(),
            })
            .collect();
        let connections = Arc::new(Mutex::new(JoinSet::new()));
        let (known, open) = (backends.clone(), Arc::clone(&connections));
        let task = tokio::spawn(async move {
            let mut turn = 0;
            while let Ok((mut client, _)) = listener.accept().await {
                for _ in 0..known.len() {
                    let backend = known[turn % known.len()].clone();
                    turn += 1;
                    let Ok(mut server) = TcpStream::connect(backend.address).await else {
                        continue;
                    };
                    let passed = async move {
                        backend.open.fetch_add(1, Ordering::Relaxed);
                        // A connection ends when its backend dies.
                        let _ = copy_bidirectional(&mut client, &mut server).await;
                        backend.open.fetch_sub(1, Ordering::Relaxed);
                    };
                    open.lock().unwrap_or_else(PoisonError::into_inner).spawn(passed);
                    break;
                }
            }
        });
        Ok(Self {
            address,
            backends,
            connections,
            _task: tokio_util::task::AbortOnDropHandle::new(task),
        })
    }

    /// Ends all connections.
    fn close_connections(&self) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.abort_all();
    }

    /// Points the kubeconfigs of controller and companion at the balancer.
    async fn use_balancer(&self, setup: &Setup) -> anyhow::Result<()> {
        for (user, rules) in [(CONTROLLER, controller_rules()?), ("drayman-node", node_rules()?)] {
            let kubeconfig = setup.cluster.user(user, &rules).await?;
            self.rewrite(setup, &kubeconfig, &kubeconfig)?;
        }
        Ok(())
    }

    /// Copies a kubeconfig with the balancer as its server.
    pub(crate) fn rewrite(&self, setup: &Setup, from: &Path, to: &Path) -> anyhow::Result<()> {
        let text = std::fs::read_to_string(from)?;
        let server = setup.cluster.server();
        ensure!(text.contains(server), "{} names {server}", from.display());
        std::fs::write(to, text.replace(server, &format!("https://{}", self.address)))?;
        Ok(())
    }
}

/// The port of the API server.
pub(crate) fn port(setup: &Setup) -> anyhow::Result<u16> {
    let server: http::Uri = setup.cluster.server().parse()?;
    server.port_u16().context("a port")
}

/// Starts a second API server on the same etcd, with the flags of the first, but its own port and audit log.
async fn second_server(setup: &Setup, port: u16) -> anyhow::Result<Child> {
    let first = setup.cluster.component_pid("apiserver").await?;
    let line = std::fs::read(format!("/proc/{first}/cmdline"))?;
    let mut arguments = line
        .split(|byte| *byte == 0)
        .map(|part| String::from_utf8_lossy(part).into_owned())
        .filter(|part| !part.is_empty());
    let program = arguments.next().context("a program")?;
    let arguments = arguments.map(|argument| {
        if argument.starts_with("--secure-port=") {
            format!("--secure-port={port}")
        } else if argument.starts_with("--audit-log-path=") {
            "--audit-log-path=".to_owned()
        } else {
            argument
        }
    });
    let log = std::fs::File::create(setup.cluster.directory().join("second-apiserver.log"))?;
    let child = setup
        .cluster
        .command(program)
        .args(arguments)
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()?;
    Ok(child)
}

/// Waits until an API server answers through the balancer.
async fn until_ready(setup: &Setup, server: &Balancer) -> anyhow::Result<kube::Client> {
    let kubeconfig = setup.cluster.directory().join("behind-balancer.kubeconfig");
    server.rewrite(setup, setup.cluster.kubeconfig(), &kubeconfig)?;
    let client = setup.cluster.client_of(&kubeconfig).await?;
    let until = Instant::now() + TIMEOUT;
    loop {
        let request = http::Request::get("/readyz").body(Vec::new())?;
        match client.request_text(request).await {
            Ok(_) => return Ok(client),
            Err(error) => ensure!(Instant::now() < until, "{error}"),
        }
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn either_of_two_api_servers_may_die() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    make_devices(setup.cluster.node(0), "drayman-test-", &MINORS)?;
    setup.make_template(None).await?;
    // The ports of a test cluster are consecutive, and the last one is unused (`tests/cluster/supervisor/slot.go`).
    let (first, second) = (port(&setup)?, port(&setup)? + 7);
    let mut other = second_server(&setup, second).await?;
    let only_second = Balancer::start(&[second]).await?;
    until_ready(&setup, &only_second).await?;
    let balancer = Balancer::start(&[first, second]).await?;
    balancer.use_balancer(&setup).await?;
    let controller = setup.controller()?;
    let companion = setup.companion(0, CONFIGURATION)?;
    wait_for_inventory(&setup, 4).await?;
    companion.logged(REGISTERED).await?;
    setup.make_pod("before").await?;
    look_inside(&setup, "before").await?;
    for backend in &balancer.backends {
        ensure!(
            backend.open.load(Ordering::Relaxed) > 0,
            "no connections to {}",
            backend.address
        );
    }

    // Kills the second server. The scheduler and kubelet use the first.
    other.kill().await?;
    let begun = Instant::now();
    setup.make_pod("one-left").await?;
    look_inside(&setup, "one-left").await?;
    println!("a pod runs {:?} after the death of one server", begun.elapsed());
    setup.cluster.kubectl(&["delete", "pod", "before"]).await?;
    wait_for_claims(&setup, 1).await?;

    // Kills the first server. Only drayman can reach the other one.
    let mut other = second_server(&setup, second).await?;
    let client = until_ready(&setup, &only_second).await?;
    setup.cluster.stop_component("apiserver", 9).await?;
    let begun = Instant::now();
    let claims = Api::<ResourceClaim>::namespaced(client, "default");
    let immediate = json!({ "metadata": { "name": "immediate" },
        "spec": { "resourceClassName": "test", "allocationMode": "Immediate" } });
    claims
        .create(&PostParams::default(), &serde_json::from_value(immediate)?)
        .await?;
    let met = |claim: Option<&ResourceClaim>| claim.is_some_and(is_allocated);
    timeout(TIMEOUT, await_condition(claims.clone(), "immediate", met)).await??;
    println!(
        "a claim is allocated {:?} after the death of the other",
        begun.elapsed()
    );
    setup.cluster.start_component("apiserver").await?;
    other.kill().await?;

    for pod in ["two", "three"] {
        setup.make_pod(pod).await?;
        look_inside(&setup, pod).await?.only_device();
    }
    assert_distinct(&setup).await?;
    for pod in ["one-left", "two", "three"] {
        setup.cluster.kubectl(&["delete", "pod", pod]).await?;
    }
    setup.delete_claim("immediate").await?;
    wait_for_claims(&setup, 0).await?;
    setup.end([companion, controller]).await
}

/// Waits until `count` claims are left.
async fn wait_for_claims(setup: &Setup, count: usize) -> anyhow::Result<()> {
    let until = Instant::now() + TIMEOUT;
    loop {
        let left = setup.claims().list(&ListParams::default()).await?.items;
        if left.len() == count {
            return Ok(());
        }
        ensure!(Instant::now() < until, "{left:?}");
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn after_a_compaction_everything_is_listed_again() -> anyhow::Result<()> {
    // Without the watch cache of the API server, each watch reads from etcd.
    let cluster = Cluster::builder()
        .flag("apiserver", "--watch-cache=false")
        .flag("controller-manager", "--node-monitor-grace-period=1h");
    let setup = Setup::prepare(cluster.start().await?).await?;
    setup.make_fake_devices("node-a", 2).await?;
    setup.make_template(None).await?;
    let balancer = Balancer::start(&[port(&setup)?]).await?;
    balancer.use_balancer(&setup).await?;
    let controller = setup.controller()?;
    setup.serve("first").await?;
    setup.serve("second").await?;
    let first = setup.claim_of("first", "allocated", is_allocated).await?;
    let first = first.metadata.name.context("a name")?;

    // The controller is stopped and misses all of these changes.
    controller.signal(Signal::STOP)?;
    balancer.close_connections();
    setup.remove_pod("first").await?;
    setup.make_class("late").await?;
    setup
        .apply(
            &json!({ "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaim",
            "metadata": { "name": "late" },
            "spec": { "resourceClassName": "late", "allocationMode": "Immediate" } }),
        )
        .await?;
    setup.make_pod("third").await?;
    let uid = setup.node_uid("node-a").await?;
    setup.write_inventory("node-a", &uid, 3).await?;
    let contexts = |context: Option<&drayman::api::resource::PodSchedulingContext>| context.is_some();
    setup.wait(setup.contexts(), "third", "there", contexts).await?;
    setup.cluster.compact().await?;
    controller.signal(Signal::CONT)?;
    let begun = Instant::now();
    setup.until_claim_gone(&first).await?;
    setup.until_allocated("late").await?;
    setup.until_bound("third").await?;
    println!("all is served {:?} after the pause", begun.elapsed());
    let log = controller.log()?;
    // Classes, contexts, claims, inventories, class parameters and claim parameters.
    let refused = log
        .matches("The resourceVersion for the provided watch is too old")
        .count();
    ensure!(refused >= 6, "{refused} watches were refused:\n{log}");
    assert_distinct(&setup).await?;
    setup.end([controller]).await
}
