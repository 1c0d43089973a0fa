//! HTTP server of metrics and probes.
//!
//! Any network peer may connect. [`connections`] bounds the number, the lifetime and the buffers of connections.

mod connections;
mod secure;

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use axum::Router;
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use kube::Client;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::cli::error::Error;
use secure::{Certificate, Guard};

/// Content type for clients that accept OpenMetrics, such as Prometheus.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Content type for all other clients.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Addresses of metrics and probes.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Observability")]
pub(crate) struct ObserveFlags {
    /// Address of /metrics: an IP address and port, or ":8080" for all addresses; 0 disables it
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "DRAYMAN_METRICS_BIND_ADDRESS",
        default_value = "0",
        value_parser = bind_address
    )]
    pub(crate) metrics_bind_address: Bind,

    /// Address of /livez, /readyz and /healthz: an IP address and port, or ":8081" for all addresses; 0 disables them
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "DRAYMAN_HEALTH_PROBE_BIND_ADDRESS",
        default_value = "0",
        value_parser = bind_address
    )]
    pub(crate) health_probe_bind_address: Bind,

    /// Directory with tls.crt and tls.key. Serves /metrics over HTTPS, to bearer tokens whose account may get the path /metrics
    /// (TokenReview and SubjectAccessReview)
    #[arg(long, value_name = "DIRECTORY", env = "DRAYMAN_METRICS_CERT_DIR")]
    pub(crate) metrics_cert_dir: Option<PathBuf>,
}

/// Listen address, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bind {
    Nowhere,
    At(SocketAddr),
}

impl std::fmt::Display for Bind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nowhere => f.write_str("0"),
            Self::At(address) => address.fmt(f),
        }
    }
}

/// Parses an address in Kubernetes syntax: `0`, `:8080`, `127.0.0.1:8080`, `[::1]:8080`.
fn bind_address(text: &str) -> Result<Bind, String> {
    if text == "0" {
        return Ok(Bind::Nowhere);
    }
    let wrong =
        || "must be 0, or a port with or without an address, such as :8080 or 127.0.0.1:8080".to_owned();
    let address = match text.strip_prefix(':') {
        // IPv4 and IPv6, as far as the machine supports them.
        Some(port) => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port.parse().map_err(|_| wrong())?),
        None => text.parse().map_err(|_| wrong())?,
    };
    if address.port() == 0 {
        return Err(wrong());
    }
    Ok(Bind::At(address))
}

/// Returns whether a component is ready, or why not.
pub(crate) type Readiness = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// Binds the addresses and serves them in the background until the token is cancelled.
pub(super) async fn serve(
    registry: Arc<Registry>,
    flags: ObserveFlags,
    ready: Readiness,
    client: Client,
    shutdown: &CancellationToken,
) -> Result<(), Error> {
    let directory = flags.metrics_cert_dir.as_deref();
    let certificate = directory.map(Certificate::read).transpose()?;
    let guard = certificate.as_ref().map(|_| Arc::new(Guard::new(client)));
    let metrics = Router::new().route(
        "/metrics",
        get(move |headers: HeaderMap| async move {
            if let Some(guard) = guard
                && let Err(refusal) = guard.check(&headers).await
            {
                return refusal.into_response();
            }
            metrics(&registry, &headers)
        }),
    );
    let probes = Router::new()
        // A response at all proves liveness.
        .route("/livez", get(|| async { "ok" }))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(move || async move { readiness(&ready) }));
    let routes = match (flags.metrics_bind_address, flags.health_probe_bind_address) {
        (Bind::At(first), Bind::At(second)) if first == second => {
            if certificate.is_some() {
                return Err(Error::Configuration(format!(
                    "--metrics-bind-address and --health-probe-bind-address are both {first}, and --metrics-cert-dir is for the metrics only: \
                     give each its own address"
                )));
            }
            vec![("--metrics-bind-address", first, metrics.merge(probes), None)]
        }
        (first, second) => [
            ("--metrics-bind-address", first, metrics, certificate),
            ("--health-probe-bind-address", second, probes, None),
        ]
        .into_iter()
        .filter_map(|(flag, bind, router, certificate)| match bind {
            Bind::Nowhere => None,
            Bind::At(address) => Some((flag, address, router, certificate)),
        })
        .collect(),
    };
    for (flag, address, router, certificate) in routes {
        let listener = listen(address)
            .await
            .with_context(|| format!("cannot listen at {address} ({flag})"))?;
        tokio::spawn(connections::serve(
            listener,
            certificate,
            router,
            shutdown.clone(),
        ));
    }
    Ok(())
}

/// Listens on an address. An unspecified IPv6 address includes IPv4; without IPv6, falls back to IPv4 alone.
async fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let listener = TcpListener::bind(address).await;
    match listener {
        Err(error)
            if address.ip().is_unspecified()
                && error.raw_os_error() == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error()) =>
        {
            TcpListener::bind((std::net::Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        other => other,
    }
}

fn metrics(registry: &Registry, asked: &HeaderMap) -> Response {
    let mut text = String::new();
    if encode(&mut text, registry).is_err() {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    let accepts = asked
        .get_all(ACCEPT)
        .into_iter()
        .filter_map(|value| value.to_str().ok());
    let format = if accepts
        .into_iter()
        .any(|value| value.contains("application/openmetrics-text"))
    {
        OPEN_METRICS
    } else {
        text = older(&text);
        TEXT
    };
    let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(format))]);
    (headers, text).into_response()
}

/// Converts OpenMetrics to the Prometheus text format, which keeps the `_total` suffix of a counter in its metadata and
/// has no `# EOF`.
fn older(text: &str) -> String {
    let mut older = String::with_capacity(text.len());
    let mut help = None;
    for line in text.lines().filter(|line| *line != "# EOF") {
        if line.starts_with("# HELP ") {
            help = Some(line);
            continue;
        }
        let counter = line
            .strip_prefix("# TYPE ")
            .and_then(|line| line.strip_suffix(" counter"));
        let name = counter.unwrap_or_default();
        if let Some(help) = help.take() {
            let rest = counter.and_then(|name| help.strip_prefix("# HELP ")?.strip_prefix(name));
            match rest {
                Some(rest) => older.extend(["# HELP ", name, "_total", rest, "\n"]),
                None => older.extend([help, "\n"]),
            }
        }
        match counter {
            Some(_) => older.extend(["# TYPE ", name, "_total counter\n"]),
            None => older.extend([line, "\n"]),
        }
    }
    older
}

fn readiness(ready: &Readiness) -> Response {
    match ready() {
        Ok(()) => "ok".into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, why).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustls::pki_types::{CertificateDer, ServerName};
    use rustls::{ClientConfig, RootCertStore};
    use serde_json::{Value, json};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;
    use tokio::sync::watch;
    use tokio_rustls::TlsConnector;

    use super::super::Observer;
    use super::*;
    use crate::node::publish::inventory::RegistrationStatus;

    async fn ask(address: SocketAddr, path: &str) -> String {
        ask_for(address, path, "*/*").await
    }

    async fn ask_for(address: SocketAddr, path: &str, accept: &str) -> String {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request =
            format!("GET {path} HTTP/1.1\r\nhost: a\r\naccept: {accept}\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    /// Returns an unused address.
    async fn free() -> SocketAddr {
        TcpListener::bind("127.0.0.1:0")
            .await
            .unwrap()
            .local_addr()
            .unwrap()
    }

    /// A client of an API server that grants nothing.
    fn no_rights() -> Client {
        api_server(|_| json!({}))
    }

    /// A client of an API server with this answer to the body of each request.
    fn api_server(answer: fn(Value) -> Value) -> Client {
        let serve = move |request: http::Request<kube::client::Body>| async move {
            let body = request.into_body().collect_bytes().await?;
            let answer = answer(serde_json::from_slice(&body).unwrap_or_default());
            let body = kube::client::Body::from(answer.to_string().into_bytes());
            Ok::<_, kube::Error>(http::Response::new(body))
        };
        Client::new(tower::service_fn(serve), "default")
    }

    fn never() -> Readiness {
        Arc::new(|| Err("never".to_owned()))
    }

    #[tokio::test]
    async fn probes_and_metrics_are_served_at_their_addresses() {
        let flags = ObserveFlags {
            metrics_bind_address: Bind::At(free().await),
            health_probe_bind_address: Bind::At(free().await),
            metrics_cert_dir: None,
        };
        let (Bind::At(metrics), Bind::At(probes)) =
            (flags.metrics_bind_address, flags.health_probe_bind_address)
        else {
            unreachable!()
        };
        let (shutdown, ready) = (CancellationToken::new(), Arc::new(AtomicBool::new(false)));
        let seen = ready.clone();
        let readiness: Readiness = Arc::new(move || {
            let ready = seen.load(Ordering::Relaxed);
            ready.then_some(()).ok_or_else(|| "not registered".to_owned())
        });
        let (sender, registration_status) = watch::channel(RegistrationStatus::starting());
        let observer = Observer::of_node(Arc::default(), registration_status);
        observer
            .serve(flags, readiness, no_rights(), &shutdown)
            .await
            .unwrap();

        assert!(ask(probes, "/livez").await.starts_with("HTTP/1.1 200"));
        assert!(ask(probes, "/healthz").await.starts_with("HTTP/1.1 200"));
        let not_yet = ask(probes, "/readyz").await;
        assert!(
            not_yet.starts_with("HTTP/1.1 503") && not_yet.ends_with("not registered"),
            "{not_yet}"
        );
        ready.store(true, Ordering::Relaxed);
        assert!(ask(probes, "/readyz").await.starts_with("HTTP/1.1 200"));
        assert!(ask(probes, "/metrics").await.starts_with("HTTP/1.1 404"));
        assert!(ask(metrics, "/livez").await.starts_with("HTTP/1.1 404"));

        let text = ask(metrics, "/metrics").await;
        assert!(text.contains(TEXT), "{text}");
        for line in [
            concat!(
                "drayman_build_info{component=\"node\",version=\"",
                env!("CARGO_PKG_VERSION")
            ),
            "# TYPE rest_client_requests_total counter\n",
            "# HELP rest_client_requests_total ",
            "drayman_node_ready 0",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        assert!(!text.contains("# EOF"));
        let newer = ask_for(
            metrics,
            "/metrics",
            "application/openmetrics-text;version=1.0.0,*/*",
        )
        .await;
        assert!(
            newer.contains(OPEN_METRICS) && newer.ends_with("# EOF\n"),
            "{newer}"
        );
        assert!(newer.contains("# TYPE rest_client_requests counter\n"), "{newer}");
        sender.send_modify(|registration_status| registration_status.ready = true);
        assert!(ask(metrics, "/metrics").await.contains("drayman_node_ready 1"));
        shutdown.cancel();
    }

    #[tokio::test]
    async fn one_address_serves_both_and_one_in_use_is_named() {
        let address = free().await;
        let both = ObserveFlags {
            metrics_bind_address: Bind::At(address),
            health_probe_bind_address: Bind::At(address),
            metrics_cert_dir: None,
        };
        let shutdown = CancellationToken::new();
        Observer::new("controller")
            .serve(both.clone(), never(), no_rights(), &shutdown)
            .await
            .unwrap();
        assert!(ask(address, "/livez").await.starts_with("HTTP/1.1 200"));
        assert!(
            ask(address, "/metrics")
                .await
                .contains("component=\"controller\"")
        );
        let refusal = Observer::new("controller")
            .serve(both, never(), no_rights(), &shutdown)
            .await
            .expect_err("it is taken")
            .to_string();
        assert!(
            refusal.contains(&address.to_string()) && refusal.contains("--metrics-bind-address"),
            "{refusal}"
        );
        shutdown.cancel();
    }

    #[tokio::test]
    async fn nothing_is_served_by_default() {
        let nowhere = ObserveFlags {
            metrics_bind_address: Bind::Nowhere,
            health_probe_bind_address: Bind::Nowhere,
            metrics_cert_dir: None,
        };
        let shutdown = CancellationToken::new();
        Observer::new("node")
            .serve(nowhere, never(), no_rights(), &shutdown)
            .await
            .unwrap();
    }

    /// Answers reviews: the tokens `reader` and `other` are valid, and `reader` may read the metrics.
    fn review(object: Value) -> Value {
        let mut answer = object;
        answer["status"] = match answer["spec"]["token"].as_str() {
            Some(name @ ("reader" | "other")) => {
                json!({ "authenticated": true, "user": { "username": name } })
            }
            Some(_) => json!({ "authenticated": false }),
            None => {
                let asked = &answer["spec"]["nonResourceAttributes"];
                let is_metrics = asked["path"] == "/metrics" && asked["verb"] == "get";
                json!({ "allowed": is_metrics && answer["spec"]["user"] == "reader" })
            }
        };
        answer
    }

    /// A directory with a new certificate for `localhost`, which is also returned.
    fn certificate(directory: &std::path::Path) -> CertificateDer<'static> {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        std::fs::write(directory.join("tls.crt"), made.cert.pem()).unwrap();
        std::fs::write(directory.join("tls.key"), made.signing_key.serialize_pem()).unwrap();
        made.cert.der().clone()
    }

    /// Flags for secure metrics alone.
    fn secure(address: SocketAddr, directory: &std::path::Path) -> ObserveFlags {
        ObserveFlags {
            metrics_bind_address: Bind::At(address),
            health_probe_bind_address: Bind::Nowhere,
            metrics_cert_dir: Some(directory.to_owned()),
        }
    }

    async fn ask_securely(
        address: SocketAddr,
        root: &CertificateDer<'static>,
        token: &str,
    ) -> std::io::Result<String> {
        let mut roots = RootCertStore::empty();
        roots.add(root.clone()).unwrap();
        let config = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from("localhost").unwrap();
        let stream = TcpStream::connect(address).await?;
        let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        let request = format!("GET /metrics HTTP/1.1\r\nhost: a\r\n{token}connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        // The server closes the connection without a TLS alert.
        let _ = stream.read_to_end(&mut answer).await;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    #[tokio::test]
    async fn secure_metrics_need_tls_a_token_and_the_right() {
        crate::cli::runtime::choose_tls_provider();
        let directory = tempfile::tempdir().unwrap();
        let root = certificate(directory.path());
        let address = free().await;
        let flags = secure(address, directory.path());
        let shutdown = CancellationToken::new();
        let observer = Observer::new("node");
        observer
            .serve(flags.clone(), never(), api_server(review), &shutdown)
            .await
            .unwrap();
        for (header, status) in [
            ("", "401"),
            ("authorization: Basic reader\r\n", "401"),
            ("authorization: Bearer nobody\r\n", "401"),
            ("authorization: Bearer other\r\n", "403"),
            ("authorization: Bearer reader\r\n", "200"),
            ("authorization: Bearer reader\r\n", "200"),
        ] {
            let answer = ask_securely(address, &root, header).await.unwrap();
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status}")),
                "{header}: {answer}"
            );
            assert_eq!(answer.contains("drayman_build_info"), status == "200", "{header}");
        }
        // Without TLS there is no answer.
        let mut plain = TcpStream::connect(address).await.unwrap();
        plain
            .write_all(b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n")
            .await
            .unwrap();
        let mut answer = Vec::new();
        let _ = plain.read_to_end(&mut answer).await;
        assert!(!answer.starts_with(b"HTTP"), "{answer:?}");

        // An API server that answers nonsense grants nothing.
        let silent = ObserveFlags {
            metrics_bind_address: Bind::At(free().await),
            ..flags.clone()
        };
        let Bind::At(address) = silent.metrics_bind_address else {
            unreachable!()
        };
        let observer = Observer::new("node");
        observer
            .serve(silent, never(), api_server(|_| json!("nonsense")), &shutdown)
            .await
            .unwrap();
        let answer = ask_securely(address, &root, "authorization: Bearer reader\r\n")
            .await
            .unwrap();
        assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
        shutdown.cancel();
    }

    #[tokio::test]
    async fn secure_metrics_need_a_certificate_and_an_address() {
        crate::cli::runtime::choose_tls_provider();
        let directory = tempfile::tempdir().unwrap();
        let address = free().await;
        let mut flags = secure(address, directory.path());
        let refused = async |flags: ObserveFlags| {
            let shutdown = CancellationToken::new();
            let served = Observer::new("node")
                .serve(flags, never(), no_rights(), &shutdown)
                .await;
            served.expect_err("it is refused").to_string()
        };
        let missing = refused(flags.clone()).await;
        assert!(
            missing.contains("--metrics-cert-dir") && missing.contains("tls.crt"),
            "{missing}"
        );
        certificate(directory.path());
        flags.health_probe_bind_address = Bind::At(address);
        let shared = refused(flags.clone()).await;
        assert!(shared.contains("give each its own address"), "{shared}");
        let key = rcgen::KeyPair::generate().unwrap().serialize_pem();
        std::fs::write(directory.path().join("tls.key"), key).unwrap();
        let foreign = refused(flags).await;
        assert!(foreign.contains("do not belong together"), "{foreign}");
    }

    #[tokio::test]
    async fn a_new_certificate_is_served_without_a_restart() {
        crate::cli::runtime::choose_tls_provider();
        let directory = tempfile::tempdir().unwrap();
        let first = certificate(directory.path());
        let address = free().await;
        let flags = secure(address, directory.path());
        let shutdown = CancellationToken::new();
        let observer = Observer::new("node");
        observer
            .serve(flags, never(), api_server(review), &shutdown)
            .await
            .unwrap();
        assert!(ask_securely(address, &first, "").await.is_ok());
        let second = certificate(directory.path());
        tokio::time::pause();
        tokio::time::advance(std::time::Duration::from_secs(61)).await;
        tokio::time::resume();
        assert!(ask_securely(address, &second, "").await.is_ok());
        assert!(ask_securely(address, &first, "").await.is_err(), "it is replaced");
        shutdown.cancel();
    }

    #[test]
    fn addresses_have_the_kubernetes_syntax() {
        assert_eq!(bind_address("0"), Ok(Bind::Nowhere));
        assert_eq!(bind_address(":8080"), Ok(Bind::At("[::]:8080".parse().unwrap())));
        assert_eq!(
            bind_address("127.0.0.1:1"),
            Ok(Bind::At("127.0.0.1:1".parse().unwrap()))
        );
        assert_eq!(
            bind_address("[::1]:8080"),
            Ok(Bind::At("[::1]:8080".parse().unwrap()))
        );
        for wrong in [
            "",
            ":",
            "8080",
            ":0",
            "127.0.0.1:0",
            ":65536",
            "localhost:80",
            ":http",
        ] {
            let refusal = bind_address(wrong).expect_err(wrong);
            assert!(refusal.contains(":8080"), "{wrong:?}: {refusal}");
        }
    }
}
