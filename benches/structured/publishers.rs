//! The publishers of many nodes against one API server.
//!
//! Each is the companion's publisher with its own client and watch, and with the companions' common service account.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use drayman::api::crd::Device;
use drayman::core::names::DriverName;
use drayman::core::prepare::checkpoint::ClusterFacts;
use drayman::node::context::{EventLimit, NodeContext};
use drayman::node::publish;
use drayman::node::publish::inventory::{InventoryPublisher, RegistrationStatus};
use futures::{StreamExt as _, TryStreamExt as _};
use http::header::RETRY_AFTER;
use http::{Request, Response, StatusCode};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, PostParams};
use kube::client::Body;
use kube::config::{AuthInfo, Config, KubeConfigOptions, Kubeconfig};
use kube::runtime::{WatchStreamExt as _, watcher};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::Options;
use crate::common::{self, node_name};
use crate::figures::{Goal, Times, figure, resident_kib, resident_kib_of};
use crate::harness::{Cluster, Entry};
use crate::requests;
use crate::setup::{DRIVER, Setup, structured_node_rules};

/// Period over which the publishers start, and over which their devices change, evenly.
const START: Duration = Duration::from_secs(60);
/// Limit for the last slices after the last start or change.
const LIMIT: Duration = Duration::from_secs(90);
const DEVICES: usize = 8;
const ACCOUNT: &str = "drayman-node";

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let count = options.publishers;
    // Nodes that exist only in the API have no heartbeats.
    let cluster = Cluster::structured().flag("controller-manager", "--node-monitor-grace-period=24h");
    let setup = Setup::structured(cluster.start().await?).await?;
    let nodes = Api::<Node>::all(setup.cluster.client());
    common::each(0..count, |number| {
        let node = serde_json::from_value::<Node>(json!({ "metadata": { "name": node_name(number) } }));
        let nodes = &nodes;
        async move { Ok(nodes.create(&PostParams::default(), &node?).await.map(drop)?) }
    })
    .await?;
    let configuration = service_account(&setup).await?;
    let stored = Stored::watch(&setup);
    let throttling = Arc::new(Throttling::default());

    let shutdown = CancellationToken::new();
    let _stop = shutdown.clone().drop_guard();
    let (mut publishers, mut started) = (Vec::new(), Vec::new());
    let mut pace = interval(START / u32::try_from(count)?);
    for number in 0..count {
        pace.tick().await;
        started.push(Instant::now());
        publishers.push(start(number, &configuration, &throttling, &shutdown)?);
    }
    let times = stored.until_each_has(&started, DEVICES).await;
    figure(
        &format!("{count} publishers started within {START:?}: start -> slice with {DEVICES} devices stored"),
        &format!("{times}, {} stored", times.len()),
        Goal::is(times.len() == count),
    );
    let first = requests::of(&setup, &user()).await?;
    figure(
        &format!("requests of {count} starts"),
        &requests::Count::new(&first).per(count),
        Goal::none(),
    );
    throttling.print();

    let mut changed = Vec::new();
    let mut pace = interval(START / u32::try_from(count)?);
    for publisher in &publishers {
        pace.tick().await;
        changed.push(Instant::now());
        publisher.send_replace(Arc::new(devices(DEVICES - 1)));
    }
    let times = stored.until_each_has(&changed, DEVICES - 1).await;
    // Late requests count too.
    sleep(Duration::from_secs(2)).await;
    let entries = requests::of(&setup, &user()).await?;
    let is_write = |entry: &&Entry| entry.is_write() && entry.resource == "resourceslices";
    let (done, refused): (Vec<_>, Vec<_>) = entries
        .iter()
        .skip(first.len())
        .filter(is_write)
        .partition(|entry| entry.code < 300);
    figure(
        &format!("a change of each of {count} nodes within {START:?}: change -> stored"),
        &format!("{times}, {} writes stored, {} refused", done.len(), refused.len()),
        Goal::is(times.len() == count && done.len() == count),
    );
    throttling.print();
    let server = setup.cluster.component_pid("apiserver").await?.to_string();
    figure(
        "resident memory then",
        &format!(
            "API server {} MB, all publishers {} MB",
            resident_kib_of(&server, "VmRSS:") / 1000,
            resident_kib() / 1000
        ),
        Goal::none(),
    );
    setup.cluster.stop().await
}

fn user() -> String {
    format!("system:serviceaccount:default:{ACCOUNT}")
}

/// Client configuration for the companions' service account.
async fn service_account(setup: &Setup) -> anyhow::Result<Config> {
    setup.cluster.user(&user(), &structured_node_rules()?).await?;
    let accounts = Api::<ServiceAccount>::default_namespaced(setup.cluster.client());
    let account: ServiceAccount = serde_json::from_value(json!({ "metadata": { "name": ACCOUNT } }))?;
    accounts.create(&PostParams::default(), &account).await?;
    let request = TokenRequest {
        spec: TokenRequestSpec::default(),
        ..TokenRequest::default()
    };
    let token = accounts
        .create_token_request(ACCOUNT, &PostParams::default(), &request)
        .await?
        .status
        .context("a token")?
        .token;
    let file = Kubeconfig::read_from(setup.cluster.kubeconfig())?;
    let mut configuration = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    configuration.auth_info = AuthInfo {
        token: Some(token.into()),
        ..AuthInfo::default()
    };
    // As in the companion.
    configuration.default_retry = false;
    Ok(configuration)
}

fn devices(count: usize) -> BTreeMap<String, Device> {
    let device = |number| Device {
        name: format!("device-{number}"),
        kind: "test".to_owned(),
        ..Device::default()
    };
    (0..count)
        .map(device)
        .map(|device| (device.name.clone(), device))
        .collect()
}

type Devices = watch::Sender<Arc<BTreeMap<String, Device>>>;

/// Starts the publisher of a node and returns the sender of its devices.
fn start(
    number: usize,
    configuration: &Config,
    throttling: &Arc<Throttling>,
    shutdown: &CancellationToken,
) -> anyhow::Result<Devices> {
    let client = kube::Client::try_from(configuration.clone())?;
    let sender = Devices::new(Arc::new(devices(DEVICES)));
    let publisher = InventoryPublisher {
        context: NodeContext {
            client: observed(client, throttling.clone()),
            driver_name: DriverName::parse(DRIVER)?,
            node_name: node_name(number),
            metrics: Arc::default(),
            events: EventLimit::default(),
        },
        devices: sender.subscribe(),
        cluster: watch::Sender::new(ClusterFacts::default()),
        prepared_by: None,
        registration_status: watch::Sender::new(RegistrationStatus::starting()).subscribe(),
        quarantine: watch::Sender::new(BTreeMap::new()).subscribe(),
        node_in_doubt: Arc::default(),
        notices: None,
    };
    tokio::spawn(publish::run(publisher, shutdown.clone()));
    Ok(sender)
}

/// Number of 429 responses for all publishers, and of requests sent before the requested delay.
#[derive(Debug, Default)]
struct Throttling {
    answers: AtomicUsize,
    too_early: AtomicUsize,
}

impl Throttling {
    fn print(&self) {
        let too_early = self.too_early.load(Ordering::Relaxed);
        figure(
            "answers 429 until then, and requests of a publisher before the requested time",
            &format!("{}, {too_early}", self.answers.load(Ordering::Relaxed)),
            Goal::is(too_early == 0),
        );
    }
}

/// A client that counts throttled requests.
fn observed(client: kube::Client, throttling: Arc<Throttling>) -> kube::Client {
    let namespace = client.default_namespace().to_owned();
    let until = Arc::new(Mutex::new(Instant::now()));
    let service = tower::service_fn(move |request: Request<Body>| {
        let (client, until, throttling) = (client.clone(), until.clone(), throttling.clone());
        async move {
            if Instant::now() < *until.lock().unwrap_or_else(PoisonError::into_inner) {
                throttling.too_early.fetch_add(1, Ordering::Relaxed);
            }
            let response: Response<_> = client.send(request).await?;
            if response.status() == StatusCode::TOO_MANY_REQUESTS {
                throttling.answers.fetch_add(1, Ordering::Relaxed);
                let header = response.headers().get(RETRY_AFTER);
                let seconds = header.and_then(|value| value.to_str().ok()?.parse().ok());
                *until.lock().unwrap_or_else(PoisonError::into_inner) =
                    Instant::now() + Duration::from_secs(seconds.unwrap_or(1));
            }
            Ok::<_, kube::Error>(response)
        }
    });
    kube::Client::new(service, namespace)
}

/// The latest time at which the watch reported each node's slice, and its number of devices.
struct Stored {
    seen: watch::Receiver<BTreeMap<String, (Instant, usize)>>,
    _watch: AbortOnDropHandle<()>,
}

impl Stored {
    fn watch(setup: &Setup) -> Self {
        let (sender, seen) = watch::channel(BTreeMap::new());
        let slices = Api::<ResourceSlice>::all(setup.cluster.client());
        let watch = async move {
            let mut slices = watcher(slices, watcher::Config::default())
                .default_backoff()
                .touched_objects()
                .boxed();
            while let Ok(Some(slice)) = slices.try_next().await {
                let count = slice.spec.devices.map_or(0, |devices| devices.len());
                let shown = (Instant::now(), count);
                sender.send_modify(|seen| {
                    seen.insert(slice.spec.pool.name, shown);
                });
            }
        };
        Self {
            seen,
            _watch: AbortOnDropHandle::new(tokio::spawn(watch)),
        }
    }

    /// Waits until the slice of each node has this many devices, up to the limit. Returns the durations of those that have.
    async fn until_each_has(&self, since: &[Instant], devices: usize) -> Times {
        let mut seen = self.seen.clone();
        let times = |seen: &BTreeMap<String, (Instant, usize)>| -> Times {
            let shown = |(number, since): (usize, &Instant)| {
                let (at, count) = seen.get(&node_name(number))?;
                (*count == devices).then(|| at.duration_since(*since))
            };
            since.iter().enumerate().filter_map(shown).collect()
        };
        let all = async {
            while times(&seen.borrow_and_update()).len() < since.len() {
                // Polled a few times a second, because there are thousands.
                sleep(Duration::from_millis(200)).await;
                if seen.changed().await.is_err() {
                    break;
                }
            }
        };
        let _ = timeout(LIMIT, all).await;
        times(&seen.borrow())
    }
}
