//! An API server that rejects our writes or throttles our requests: an admission policy, a failing webhook, API Priority and Fairness.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use drayman::api::resource::{Pod, ResourceClaim};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::controller::assert_distinct;
use crate::harness::{Cluster, Entry, IMAGE, TIMEOUT, rule};
use crate::pods::{CONFIGURATION, MINORS, make_devices, wait_for_inventory};
use crate::setup::{Program, REGISTERED, Setup, controller_rules, is_allocated, pod_from, replica_rules};
use crate::stored_claims::CONTROLLER;

/// The user name of the companion.
const NODE: &str = "drayman-node";
/// The message of the admission policy.
const MESSAGE: &str = "change freeze until Monday, ask the platform team";
/// How long requests are counted while none can succeed.
const COUNTING_PERIOD: Duration = Duration::from_secs(5);
/// Limit for writes to one object in that time. A delay that doubles from 100 ms allows seven, and a pod has two written objects: its claim
/// and its scheduling context.
const WRITES: usize = 20;

/// `matchConstraints` of a policy or `rules` of a webhook: pairs of API group and resource or subresource.
fn rules(resources: &[(&str, &str)]) -> Value {
    let rule = |(group, resource): &(&str, &str)| json!({ "apiGroups": [group], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"], "resources": [resource] });
    resources.iter().map(rule).collect()
}

fn admission(setup: &Setup, kind: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", kind);
    Api::all_with(setup.cluster.client(), &ApiResource::from_gvk(&kind))
}

async fn create(api: &Api<DynamicObject>, object: Value) -> anyhow::Result<()> {
    api.create(&PostParams::default(), &serde_json::from_value(object)?)
        .await
        .map(drop)?;
    Ok(())
}

/// Creates a policy that denies these writes to controller and companion.
async fn forbid(setup: &Setup, resources: &[(&str, &str)]) -> anyhow::Result<()> {
    let policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": { "name": "freeze" },
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": { "resourceRules": rules(resources) },
            "validations": [{
                "expression": format!("!(request.userInfo.username in ['{CONTROLLER}', '{NODE}'])"),
                "message": MESSAGE,
            }],
        },
    });
    let binding = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": { "name": "freeze" },
        "spec": { "policyName": "freeze", "validationActions": ["Deny"] },
    });
    create(&admission(setup, "ValidatingAdmissionPolicy"), policy).await?;
    create(&admission(setup, "ValidatingAdmissionPolicyBinding"), binding).await
}

async fn allow(setup: &Setup) -> anyhow::Result<()> {
    for kind in ["ValidatingAdmissionPolicyBinding", "ValidatingAdmissionPolicy"] {
        let _ = admission(setup, kind)
            .delete("freeze", &DeleteParams::default())
            .await?;
    }
    Ok(())
}

/// Waits until a claim write by the controller's user is refused (or allowed again). The API server learns of policies and webhooks through
/// its own watches, so this polls with a dry run.
async fn until_refused(
    setup: &Setup,
    subresource: Option<&str>,
    is_refused: bool,
    text: &str,
) -> anyhow::Result<()> {
    let kubeconfig = setup.cluster.user(CONTROLLER, &controller_rules()?).await?;
    let claims = Api::<ResourceClaim>::namespaced(setup.cluster.client_of(&kubeconfig).await?, "default");
    let parameters = PatchParams {
        dry_run: true,
        ..PatchParams::default()
    };
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let patch = Patch::Merge(json!({ "metadata": { "annotations": { "probe": "x" } } }));
        let answer = match subresource {
            None => claims.patch("probe", &parameters, &patch).await,
            Some(_) => claims.patch_status("probe", &parameters, &patch).await,
        };
        let refused = matches!(&answer, Err(kube::Error::Api(status)) if status.message.contains(text));
        if refused == is_refused && (is_refused || answer.is_ok()) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{answer:?}");
        sleep(Duration::from_millis(50)).await;
    }
}

/// Requests of a user that were received at `since` or later, without dry runs.
async fn requests_since(setup: &Setup, user: &str, since: Timestamp) -> anyhow::Result<Vec<Entry>> {
    let mut entries = setup.cluster.audit().of_user(user).await?;
    entries.retain(|entry| {
        entry.uri.split("dryRun").count() == 1
            && entry
                .received
                .parse::<Timestamp>()
                .is_ok_and(|received| received >= since)
    });
    Ok(entries)
}

/// A control plane with two fake nodes of two devices each, and a real node with a companion.
async fn start() -> anyhow::Result<(Setup, Program, Program)> {
    // Fake nodes have no heartbeats.
    let cluster = Cluster::builder()
        .nodes(1)
        .flag("controller-manager", "--node-monitor-grace-period=1h");
    let setup = Setup::prepare(cluster.start().await?).await?;
    make_devices(setup.cluster.node(0), "drayman-test-", &MINORS[..1])?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let companion = setup.companion(0, CONFIGURATION)?;
    wait_for_inventory(&setup, 1).await?;
    companion.logged(REGISTERED).await?;
    // The scheduler binds pods to these nodes; nothing runs there.
    for node in ["node-a", "node-b"] {
        setup.make_fake_devices(node, 2).await?;
    }
    setup.make_claim("probe", "WaitForFirstConsumer", false).await?;
    Ok((setup, controller, companion))
}

/// A pod with two claims. The scheduler selects a node only after it has the unsuitable nodes of both.
fn pod_with_two_claims(name: &str) -> anyhow::Result<Pod> {
    let source = json!({ "resourceClaimTemplateName": "test" });
    pod_from(json!({ "metadata": { "name": name }, "spec": {
        "resourceClaims": [{ "name": "a", "source": source }, { "name": "b", "source": source }],
        "containers": [{ "name": "main", "image": IMAGE, "imagePullPolicy": "Never",
            "resources": { "claims": [{ "name": "a" }, { "name": "b" }] } }],
        "dnsPolicy": "Default", "terminationGracePeriodSeconds": 1 } }))
}

/// Registers an unreachable webhook for the controller's writes to claims, so that they fail.
async fn break_webhook(setup: &Setup) -> anyhow::Result<()> {
    let webhook = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
        "metadata": { "name": "down" },
        "webhooks": [{
            "name": "down.example.com", "failurePolicy": "Fail", "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "timeoutSeconds": 1,
            // No server listens there.
            "clientConfig": { "url": "https://127.0.0.1:1/" },
            "rules": rules(&[("resource.k8s.io", "resourceclaims"), ("resource.k8s.io", "resourceclaims/status")]),
            "matchConditions": [{ "name": "user", "expression": format!("request.userInfo.username == '{CONTROLLER}'") }],
        }],
    });
    create(&admission(setup, "ValidatingWebhookConfiguration"), webhook).await
}

/// Number of writes to each object after `since`.
async fn writes_since(
    setup: &Setup,
    user: &str,
    begun: Timestamp,
) -> anyhow::Result<BTreeMap<String, usize>> {
    let mut writes = BTreeMap::new();
    for entry in requests_since(setup, user, begun)
        .await?
        .iter()
        .filter(|entry| entry.is_write())
    {
        let path = entry.uri.split('?').next().unwrap_or_default();
        *writes.entry(path.to_owned()).or_default() += 1;
    }
    Ok(writes)
}

#[tokio::test]
async fn refused_writes_are_reported_and_made_when_the_policy_goes() -> anyhow::Result<()> {
    let (setup, controller, companion) = start().await?;
    if setup.cluster.is_before(30, "admission policies are in beta") {
        return Ok(());
    }
    setup.serve("held").await?;
    let claim = setup.claim_of("held", "allocated", is_allocated).await?;
    let claim = claim.metadata.name.context("a name")?;

    // Finalizers, scheduling contexts and inventories.
    forbid(
        &setup,
        &[
            ("resource.k8s.io", "resourceclaims"),
            ("resource.k8s.io", "podschedulingcontexts/status"),
            ("drayman.dev", "nodeinventories"),
        ],
    )
    .await?;
    until_refused(&setup, None, true, MESSAGE).await?;
    let begun = Timestamp::now();
    setup.make_claim("immediate", "Immediate", false).await?;
    setup.make_pod("one").await?;
    let two = pod_with_two_claims("two")?;
    setup.pods().create(&PostParams::default(), &two).await?;
    setup.remove_pod("held").await?;
    let node = setup.cluster.node(0);
    node.make_device("/dev/drayman-test-1", 1, MINORS[1])?;
    for (name, reason) in [
        ("immediate", "AllocationNotRecorded"),
        ("one", "AllocationNotRecorded"),
        ("two", "AnswerRefused"),
        (claim.as_str(), "ReleaseRefused"),
    ] {
        setup.wait_for_event(name, reason, MESSAGE).await?;
    }
    companion.logged(MESSAGE).await?;
    sleep(COUNTING_PERIOD).await;
    for user in [CONTROLLER, NODE] {
        let writes = writes_since(&setup, user, begun).await?;
        println!("{user} in {:#}: {writes:#?}", Timestamp::now() - begun);
        assert!(writes.values().all(|count| *count <= WRITES), "{writes:#?}");
    }
    allow(&setup).await?;
    for name in ["one", "two"] {
        setup.until_bound(name).await?;
    }
    setup.until_claim_gone(&claim).await?;
    wait_for_inventory(&setup, 2).await?;

    // Allocations: the finalizer is stored, and the device is freed again.
    until_refused(&setup, None, false, MESSAGE).await?;
    forbid(&setup, &[("resource.k8s.io", "resourceclaims/status")]).await?;
    until_refused(&setup, Some("status"), true, MESSAGE).await?;
    setup.make_pod("three").await?;
    setup
        .wait_for_event("three", "AllocationNotRecorded", MESSAGE)
        .await?;
    allow(&setup).await?;
    setup.until_bound("three").await?;

    // An unreachable webhook fails writes without a denial.
    until_refused(&setup, Some("status"), false, MESSAGE).await?;
    let claim = setup.claim_of("three", "allocated", is_allocated).await?;
    let claim = claim.metadata.name.context("a name")?;
    break_webhook(&setup).await?;
    until_refused(&setup, None, true, "down.example.com").await?;
    setup.make_pod("four").await?;
    setup.remove_pod("three").await?;
    for (name, reason) in [
        ("four", "AllocationNotRecorded"),
        (claim.as_str(), "ReleaseRefused"),
    ] {
        setup.wait_for_event(name, reason, "down.example.com").await?;
    }
    let _ = admission(&setup, "ValidatingWebhookConfiguration")
        .delete("down", &DeleteParams::default())
        .await?;
    setup.until_bound("four").await?;
    setup.until_claim_gone(&claim).await?;
    assert_distinct(&setup).await?;
    setup.end([companion, controller]).await
}

/// Gives users a priority level without seats: the server handles one request at a time and rejects the others.
async fn throttle(setup: &Setup, users: &[&str]) -> anyhow::Result<()> {
    let subjects: Vec<Value> = users
        .iter()
        .map(|name| json!({ "kind": "User", "user": { "name": name } }))
        .collect();
    let all = ["*"];
    setup
        .apply(&json!({
            "apiVersion": "flowcontrol.apiserver.k8s.io/v1", "kind": "PriorityLevelConfiguration",
            "metadata": { "name": "starved" },
            "spec": { "type": "Limited", "limited": {
                "nominalConcurrencyShares": 0, "lendablePercent": 0, "borrowingLimitPercent": 0,
                "limitResponse": { "type": "Reject" } } },
        }))
        .await?;
    setup
        .apply(&json!({
            "apiVersion": "flowcontrol.apiserver.k8s.io/v1", "kind": "FlowSchema",
            "metadata": { "name": "starved" },
            "spec": {
                "priorityLevelConfiguration": { "name": "starved" },
                "matchingPrecedence": 2,
                "distinguisherMethod": { "type": "ByUser" },
                "rules": [{ "subjects": subjects, "resourceRules": [{ "verbs": all, "apiGroups": all, "resources": all,
                    "namespaces": all, "clusterScope": true }],
                    "nonResourceRules": [{ "verbs": all, "nonResourceURLs": all }] }],
            },
        }))
        .await
}

/// Waits until the API server assigns a user's requests to the level `starved`.
async fn until_throttled(setup: &Setup, user: &str) -> anyhow::Result<()> {
    let schema = [
        "get",
        "flowschema",
        "starved",
        "--output=jsonpath={.metadata.uid}",
    ];
    let uid = setup.cluster.kubectl(&schema).await?;
    let kubeconfig = setup.cluster.user(user, &replica_rules()?).await?;
    let client = setup.cluster.client_of(&kubeconfig).await?;
    let until = Instant::now() + TIMEOUT;
    loop {
        let request = http::Request::get("/version").body(kube::client::Body::empty())?;
        let answer = client.send(request).await?;
        let level = answer.headers().get("x-kubernetes-pf-flowschema-uid");
        if level.is_some_and(|level| level.as_bytes() == uid.as_bytes()) {
            return Ok(());
        }
        ensure!(Instant::now() < until, "{level:?} is not {uid}");
        sleep(Duration::from_millis(50)).await;
    }
}

async fn stop_throttling(setup: &Setup) -> anyhow::Result<()> {
    for kind in ["flowschema", "prioritylevelconfiguration"] {
        setup.cluster.kubectl(&["delete", kind, "starved"]).await?;
    }
    Ok(())
}

/// A client of the same priority level that sends requests continuously. Each takes ten seconds because a webhook does not answer.
struct BusyClient {
    _webhook: TcpListener,
    _requests: JoinSet<()>,
}

impl BusyClient {
    const USER: &'static str = "crowd";

    async fn begin(setup: &Setup) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let webhook = json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
            "metadata": { "name": "silent" },
            "webhooks": [{
                "name": "silent.example.com", "failurePolicy": "Fail", "sideEffects": "None",
                "admissionReviewVersions": ["v1"], "timeoutSeconds": 30,
                "clientConfig": { "url": format!("https://{}/", listener.local_addr()?) },
                "rules": rules(&[("", "configmaps")]),
                "matchConditions": [{ "name": "user",
                    "expression": format!("request.userInfo.username == '{}'", Self::USER) }],
            }],
        });
        create(&admission(setup, "ValidatingWebhookConfiguration"), webhook).await?;
        let rights = rule(&[""], &["configmaps"], &["create"]);
        let kubeconfig = setup.cluster.user(Self::USER, &[rights]).await?;
        let client = setup.cluster.client_of(&kubeconfig).await?;
        let mut requests = JoinSet::new();
        for number in 0..3 {
            let maps = Api::<ConfigMap>::namespaced(client.clone(), "default");
            let map = json!({ "metadata": { "name": format!("crowd-{number}") } });
            let map: ConfigMap = serde_json::from_value(map)?;
            requests.spawn(async move {
                loop {
                    // The request is rejected, or fails in the webhook.
                    let _ = maps.create(&PostParams::default(), &map).await;
                    sleep(Duration::from_millis(20)).await;
                }
            });
        }
        Ok(Self {
            _webhook: listener,
            _requests: requests,
        })
    }
}

/// A free address for the probes.
async fn free_address() -> anyhow::Result<String> {
    Ok(TcpListener::bind("127.0.0.1:0").await?.local_addr()?.to_string())
}

/// Whether `/livez` succeeds within ten seconds. The machine may be busy.
async fn is_alive(address: &str) -> anyhow::Result<bool> {
    let answer = async {
        let mut connection = TcpStream::connect(address).await?;
        let request = b"GET /livez HTTP/1.1\r\nhost: probe\r\nconnection: close\r\n\r\n";
        connection.write_all(request).await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        anyhow::Ok(answer)
    };
    let answer = timeout(Duration::from_secs(10), answer)
        .await
        .context("/livez is silent")??;
    Ok(answer.starts_with("HTTP/1.1 200"))
}

#[tokio::test]
async fn programs_starved_by_priority_and_fairness_live_and_recover() -> anyhow::Result<()> {
    const LEADER: &str = "leader";
    let (setup, controller, companion) = start().await?;
    if setup
        .cluster
        .is_before(30, "a level without any seat is not possible")
    {
        return Ok(());
    }
    controller.end().await?;
    companion.end().await?;
    let (leads, serves) = (free_address().await?, free_address().await?);
    let controller_flag = format!("--health-probe-bind-address={leads}");
    let node_flag = format!("--health-probe-bind-address={serves}");
    let flags = [
        "--leader-elect-lease-duration=9s",
        "--leader-elect-renew-deadline=4s",
        "--leader-elect-retry-period=500ms",
        controller_flag.as_str(),
    ];
    let leader = || setup.replica_with(LEADER, &flags);
    let controller = leader().await?;
    let companion = setup.companion_with(0, CONFIGURATION, &[&node_flag])?;
    companion.logged(REGISTERED).await?;
    controller.logged("leading").await?;

    throttle(&setup, &[LEADER, NODE, BusyClient::USER]).await?;
    until_throttled(&setup, LEADER).await?;

    // The leader gives up its lease in time; the companion keeps running.
    let crowd = BusyClient::begin(&setup).await?;
    let (begun, when) = (Instant::now(), Timestamp::now());
    let probed = async {
        while is_alive(&leads).await.is_ok_and(|lives| lives) {
            ensure!(is_alive(&serves).await?, "the companion is alive");
            sleep(Duration::from_millis(200)).await;
        }
        anyhow::Ok(())
    };
    let (status, probed) = tokio::join!(controller.ended(), probed);
    probed?;
    ensure!(status?.code() == Some(1), "a leader that loses its lease exits");
    let entries = requests_since(&setup, LEADER, when).await?;
    println!(
        "the leader ended after {:?} and {} requests",
        begun.elapsed(),
        entries.len()
    );
    setup.make_pod("starved").await?;
    setup
        .cluster
        .node(0)
        .make_device("/dev/drayman-test-1", 1, MINORS[1])?;
    let counted = Timestamp::now();
    let end = Instant::now() + COUNTING_PERIOD;
    while Instant::now() < end {
        ensure!(is_alive(&serves).await?, "the companion is alive");
        sleep(Duration::from_millis(200)).await;
    }
    let entries = requests_since(&setup, NODE, counted).await?;
    let refused = entries.iter().filter(|entry| entry.code == 429).count();
    println!(
        "{NODE}: {refused} of {} requests in {COUNTING_PERIOD:?} were refused",
        entries.len()
    );
    ensure!(refused > 0 && entries.len() <= WRITES, "{entries:#?}");

    drop(crowd);
    stop_throttling(&setup).await?;
    let controller = leader().await?;
    let begun = Instant::now();
    setup.until_bound("starved").await?;
    println!("served {:?} later", begun.elapsed());
    wait_for_inventory(&setup, 2).await?;
    println!("inventory {:?} later", begun.elapsed());
    setup.end([companion, controller]).await
}
