//! A real Prometheus scrapes a running controller and companion, and runs each query of the dashboard and of the chart's alerts.
//! `structured::metrics` covers structured mode.

mod prometheus;
mod secure;

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, ensure};
use kube::api::Api;
use serde_json::{Value, json};

use crate::harness::{IMAGE, STRUCTURED_VERSION, VERSION};
use crate::setup::Setup;
pub(crate) use prometheus::{Prometheus, free_port};
use prometheus::{promtool, scrape};

/// One kind for claims and one for extended resources.
const CONFIGURATION: &str = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: test
  paths: [\"/dev/drayman-test-*\"]
- name: plugged
  mode: extended-resource
  resourceName: drayman.dev/plugged
  paths: [\"/dev/drayman-plugged-*\"]
";

/// Expected values after three pods with one claim each, of which one waited and the first was deleted.
const EXPECTED: &[&str] = &[
    "drayman_claims_allocated_total == 3",
    "drayman_claims_released_total == 1",
    r#"drayman_allocation_attempts_total{result="Allocated"} == 3"#,
    "drayman_wake_up_duration_seconds_count >= 1",
    "drayman_recheck_caught_total == 0",
    "sum(drayman_pods_waiting) == 0",
    r#"drayman_events_total{reason="NoSuitableDevice"} >= 1"#,
    r#"leader_election_master_status{name="drayman.dev"} == 1"#,
    "drayman_node_ready == 1",
    r#"drayman_node_operations_total{operation="prepare",result="done"} == 3"#,
    r#"drayman_node_operations_total{operation="unprepare",result="done"} == 1"#,
    r#"drayman_node_claims{state="held"} == 2"#,
    r#"drayman_node_devices{kind="plugged",health="healthy",owner="kubelet"} == 1"#,
    r#"sum(grpc_server_handled_total{grpc_method="NodePrepareResources",grpc_code="OK"}) == 3"#,
    r#"grpc_server_started_total{grpc_method="ListAndWatch"} - on (grpc_method) sum by (grpc_method) (grpc_server_handled_total{grpc_method="ListAndWatch"}) == 1"#,
    r#"workqueue_adds_total{name="context"} > 3"#,
    "sum(workqueue_unfinished_work_seconds) == 0",
    r#"workqueue_work_duration_seconds_count{name="batch"} >= 9"#,
    "sum(rate(process_cpu_seconds_total[1m])) > 0",
];

fn repository(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Writes the chart's alerting rules for a Kubernetes version to a file.
pub(crate) fn write_rules(directory: &Path, version: &str) -> anyhow::Result<Value> {
    let api = if version == STRUCTURED_VERSION {
        "v1"
    } else {
        "v1alpha2"
    };
    let output = std::process::Command::new(crate::harness::helm()?)
        .args(["template", "drayman"])
        .arg(repository("charts/drayman"))
        .args(["--namespace", "drayman", "--kube-version", version])
        .arg(format!("--api-versions=resource.k8s.io/{api}"))
        .args(["--set", "monitoring.prometheusRule.enabled=true"])
        .args(["--show-only", "templates/monitoring/prometheusrule.yaml"])
        .output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let rendered: Value = serde_saphyr::from_str(&String::from_utf8(output.stdout)?)?;
    let rules = rendered["spec"].clone();
    std::fs::write(directory.join("rules.json"), rules.to_string())?;
    Ok(rules)
}

/// The alerts: name and expression.
fn alerts(rules: &Value) -> Vec<(String, String)> {
    let rules = rules["groups"].as_array().into_iter().flatten();
    let alerts = rules.flat_map(|group| group["rules"].as_array().cloned().unwrap_or_default());
    alerts
        .map(|rule| {
            let text = |key: &str| rule[key].as_str().unwrap_or_default().to_owned();
            (text("alert"), text("expr"))
        })
        .collect()
}

/// The dashboard's queries with variables filled in: titles of row and panel, expression.
fn queries() -> anyhow::Result<Vec<(String, String)>> {
    let text = std::fs::read_to_string(repository("charts/drayman/dashboards/drayman.json"))?;
    let dashboard: Value = serde_json::from_str(&text)?;
    let (mut queries, mut row) = (Vec::new(), "");
    for panel in dashboard["panels"].as_array().context("panels")? {
        let title = panel["title"].as_str().context("a panel has a title")?;
        if panel["type"] == "row" {
            row = title;
        }
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().context("a target has a query")?;
            let filled = expression
                .replace("$namespace", "drayman")
                .replace("$__rate_interval", "1m");
            ensure!(!filled.contains('$'), "{title}: unknown variable in {filled}");
            queries.push((format!("{row}: {title}"), filled));
        }
    }
    Ok(queries)
}

/// The series selectors in an expression: `name{...}`.
fn selectors(expression: &str) -> Vec<String> {
    let mut all = Vec::new();
    for (at, _) in expression.match_indices('{') {
        let before = &expression[..at];
        let name = before
            .rsplit(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .next();
        let end = expression[at..]
            .find('}')
            .map_or(expression.len(), |end| at + end + 1);
        all.push(format!("{}{}", name.unwrap_or_default(), &expression[at..end]));
    }
    all
}

/// Asserts that Prometheus has series for the queries of matching dashboard panels, and for each selector of an alert.
pub(crate) fn assert_found(
    prometheus: &Prometheus,
    rules: &Value,
    is_asked: fn(&str) -> bool,
) -> anyhow::Result<()> {
    for (titles, query) in queries()? {
        if is_asked(&titles) {
            assert!(!prometheus.ask(&query)?.is_empty(), "{titles}: {query}");
        }
    }
    for (alert, expression) in alerts(rules) {
        // An alert that does not fire has no series itself.
        prometheus.ask(&expression)?;
        for selector in selectors(&expression) {
            // No request has failed, so these codes do not occur.
            if selector.contains("5..") {
                continue;
            }
            assert!(!prometheus.ask(&selector)?.is_empty(), "{alert}: {selector}");
        }
    }
    Ok(())
}

/// The series in docs/reference/metrics.md.
fn documented() -> anyhow::Result<BTreeSet<String>> {
    let page = std::fs::read_to_string(repository("docs/reference/metrics.md"))?;
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    Ok(rows
        .filter_map(|row| row.split(['{', '`']).next())
        .map(str::to_owned)
        .collect())
}

fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "resourceClaims": [{ "name": "device", "source": { "resourceClaimTemplateName": "test" } }],
            "containers": [{
                "name": "main", "image": IMAGE, "imagePullPolicy": "Never",
                "resources": { "claims": [{ "name": "device" }] },
            }],
            "terminationGracePeriodSeconds": 1,
        },
    })
}

/// Columns of `kubectl get nodeinventories`.
async fn what_kubectl_shows(setup: &Setup) -> anyhow::Result<()> {
    let shown = setup.cluster.kubectl(&["get", "nodeinventories"]).await?;
    let rows: Vec<Vec<&str>> = shown
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(
        rows[0],
        ["NAME", "NODE", "DRIVER", "READY", "DEVICES", "UNHEALTHY", "AGE"]
    );
    assert_eq!(
        rows[1][..6],
        ["node-0.drayman.dev", "node-0", "drayman.dev", "True", "3", "0"]
    );
    Ok(())
}

#[test]
fn the_alerts_fire_exactly_when_they_should() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let rules = write_rules(directory.path(), VERSION)?;
    println!(
        "{}",
        promtool(directory.path(), &["check", "rules", "rules.json"], None)?
    );
    std::fs::copy(
        repository("tests/e2e/monitoring/alerts.yaml"),
        directory.path().join("alerts.yaml"),
    )?;
    println!(
        "{}",
        promtool(directory.path(), &["test", "rules", "alerts.yaml"], None)?
    );
    let tests = std::fs::read_to_string(repository("tests/e2e/monitoring/alerts.yaml"))?;
    let page = std::fs::read_to_string(repository("docs/reference/metrics.md"))?;
    let documented = page.lines().filter(|line| line.starts_with("| `Drayman")).count();
    let alerts = alerts(&rules);
    assert_eq!(
        documented,
        alerts.len(),
        "docs/reference/metrics.md lists all alerts and no other"
    );
    for (alert, _) in alerts {
        let fires = format!("alertname: {alert}\n    exp_alerts:\n    - ");
        assert!(tests.contains(&fires), "{alert} is never made to fire");
        assert!(
            tests.contains(&format!("alertname: {alert}, exp_alerts: []")),
            "{alert} is never kept quiet"
        );
        assert!(
            page.contains(&format!("| `{alert}` |")),
            "{alert} is not in docs/reference/metrics.md"
        );
    }
    Ok(())
}

#[test]
fn the_dashboard_shows_each_series_and_asks_for_no_other() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let documented = documented()?;
    let all = queries()?
        .into_iter()
        .chain(alerts(&write_rules(directory.path(), VERSION)?));
    for (what, expression) in all {
        let asked = selectors(&expression);
        assert!(!asked.is_empty(), "{what}: {expression}");
        for selector in asked {
            let name = selector.split('{').next().unwrap_or_default();
            let base = name.strip_suffix("_bucket").unwrap_or(name);
            // Prometheus adds this series itself.
            assert!(
                name == "up" || documented.contains(base),
                "{what} asks for {name}"
            );
        }
    }
    let shown: Vec<String> = queries()?
        .iter()
        .flat_map(|(_, query)| selectors(query))
        .collect();
    for series in documented.iter().filter(|name| name.starts_with("drayman_")) {
        let is_shown = |selector: &String| {
            let rest = selector.strip_prefix(series).unwrap_or_default();
            rest.starts_with('{') || rest.starts_with("_bucket{")
        };
        assert!(shown.iter().any(is_shown), "no panel shows {series}");
    }
    Ok(())
}

#[tokio::test]
async fn every_query_finds_its_series() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let rules = write_rules(directory.path(), VERSION)?;
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    for (name, minor) in [("test-0", 5), ("test-1", 7), ("plugged-0", 8)] {
        node.make_device(format!("/dev/drayman-{name}"), 1, minor)?;
    }
    setup.make_template(None).await?;
    let (of_controller, of_node) = (free_port()?, free_port()?);
    let metrics = format!("--metrics-bind-address=127.0.0.1:{of_controller}");
    let controller = setup.controller_with(&[&metrics])?;
    let metrics = format!("--metrics-bind-address=127.0.0.1:{of_node}");
    let companion = setup.companion_with(0, CONFIGURATION, &[&metrics])?;
    let prometheus = Prometheus::start(
        &setup,
        directory.path(),
        &[
            ("drayman-controller-7d4b9-x2x7q", of_controller),
            ("drayman-node-x8k2p", of_node),
        ],
    )?;

    // Two pods hold the two devices; a third one waits and is woken up when a device is released.
    for name in ["first", "second"] {
        setup.apply(&pod(name)).await?;
        setup.until_running(name).await?;
    }
    setup.apply(&pod("third")).await?;
    setup.wait_for_event("third", "NoSuitableDevice", "held").await?;
    prometheus
        .until(r#"drayman_pods_waiting{reason="NoSuitableDevice"} == 1"#)
        .await?;
    prometheus
        .until(r#"drayman_node_devices{kind="test",health="healthy",owner="claim"} == 2"#)
        .await?;
    setup.cluster.kubectl(&["delete", "pod", "first"]).await?;
    setup.until_pod_gone("first").await?;
    setup.until_running("third").await?;

    for expected in EXPECTED {
        prometheus.until(expected).await?;
    }

    assert_found(&prometheus, &rules, |_| true)?;
    // Both programs export every documented series.
    for series in documented()?.iter().filter(|name| name.contains('_')) {
        let any = [series.clone(), format!("{series}_count")];
        let found = any
            .iter()
            .any(|name| prometheus.ask(name).is_ok_and(|found| !found.is_empty()));
        let is_label = ![
            "drayman_",
            "grpc_server_",
            "leader_",
            "process_",
            "rest_client_",
            "workqueue_",
        ]
        .iter()
        .any(|prefix| series.starts_with(prefix));
        assert!(found || is_label, "{series} is documented, but not exported");
    }
    for port in [of_controller, of_node] {
        let text = scrape(port).await?;
        let message = promtool(directory.path(), &["check", "metrics"], Some(&text))?;
        assert!(message.trim().is_empty(), "{message}");
    }

    what_kubectl_shows(&setup).await?;

    for name in ["second", "third"] {
        setup.cluster.kubectl(&["delete", "pod", name]).await?;
    }
    setup
        .wait(
            Api::all(setup.cluster.client()),
            "node-0.drayman.dev",
            "there",
            |inventory: Option<&drayman::api::crd::NodeInventory>| inventory.is_some(),
        )
        .await?;
    drop((controller, companion, prometheus));
    Ok(())
}
