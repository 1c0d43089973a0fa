//! Metrics over HTTPS, scrape by a real Prometheus with a token of a real API server.

use anyhow::Context as _;

use crate::harness::{Cluster, rule};
use crate::monitoring::prometheus::{Prometheus, free_port};
use crate::setup::{PROGRAM, Setup, controller_rules};

#[tokio::test]
async fn prometheus_needs_a_right_to_read_secure_metrics() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let file = |name: &str| directory.path().join(name);
    let made = rcgen::generate_simple_self_signed(["drayman-metrics.drayman.svc".to_owned()])?;
    std::fs::write(file("tls.crt"), made.cert.pem())?;
    std::fs::write(file("tls.key"), made.signing_key.serialize_pem())?;

    let setup = Setup::with_crds(Cluster::builder().service_accounts().start().await?).await?;
    let mut rules = controller_rules()?;
    rules.push(rule(&["authentication.k8s.io"], &["tokenreviews"], &["create"]));
    rules.push(rule(
        &["authorization.k8s.io"],
        &["subjectaccessreviews"],
        &["create"],
    ));
    let kubeconfig = setup.cluster.user("secure", &rules).await?;
    let port = free_port()?;
    let mut command = setup.cluster.command(PROGRAM);
    command
        .args(["controller", "--kubeconfig"])
        .arg(kubeconfig)
        .arg(format!("--metrics-bind-address=127.0.0.1:{port}"))
        .arg("--metrics-cert-dir")
        .arg(directory.path());
    let controller = setup.program("controller", command)?;
    controller.logged("drayman controller starts").await?;

    let kubectl = |words: &'static [&'static str]| setup.cluster.kubectl(words);
    kubectl(&["create", "serviceaccount", "scraper"]).await?;
    let token = kubectl(&["create", "token", "scraper"]).await?;
    std::fs::write(file("token"), token.trim())?;
    let path = directory.path().to_str().context("UTF-8")?;
    let scheme = format!(
        "  scheme: https\n  authorization: {{credentials_file: {path}/token}}\n  \
         tls_config: {{ca_file: {path}/tls.crt, server_name: drayman-metrics.drayman.svc}}\n"
    );
    let pods = [("drayman-controller-7d4b9-x2x7q", port)];
    let prometheus = Prometheus::start_with(&setup, directory.path(), &pods, &scheme)?;
    prometheus
        .until("count_over_time(up[1m]) > 4 and max_over_time(up[1m]) == 0")
        .await?;

    kubectl(&[
        "create",
        "clusterrole",
        "reader",
        "--verb=get",
        "--non-resource-url=/metrics",
    ])
    .await?;
    let bind = [
        "create",
        "clusterrolebinding",
        "reader",
        "--clusterrole=reader",
        "--serviceaccount=default:scraper",
    ];
    setup.cluster.kubectl(&bind).await?;
    prometheus.until("up == 1").await?;
    prometheus
        .until(r#"drayman_build_info{component="controller"}"#)
        .await?;
    setup.cluster.stop().await
}
