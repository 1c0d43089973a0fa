//! HTTP server of metrics and probes.
//!
//! Any network peer may connect. [`connections`] bounds the number, the lifetime and the buffers of connections.

mod connections;

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use axum::Router;
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::{Bind, Error, Flags, Readiness};

/// Content type for clients that accept OpenMetrics, such as Prometheus.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Content type for all other clients.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Binds the addresses and serves them in the background until the token is cancelled.
pub(super) async fn serve(
    registry: Arc<Registry>,
    flags: Flags,
    ready: Readiness,
    shutdown: &CancellationToken,
) -> Result<(), Error> {
    let metrics = Router::new().route(
        "/metrics",
        get(move |headers: HeaderMap| async move { metrics(&registry, &headers) }),
    );
    let probes = Router::new()
        // A response at all proves liveness.
        .route("/livez", get(|| async { "ok" }))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(move || async move { readiness(&ready) }));
    let routes = match (flags.metrics_bind_address, flags.health_probe_bind_address) {
        (Bind::At(first), Bind::At(second)) if first == second => {
            vec![("--metrics-bind-address", first, metrics.merge(probes))]
        }
        (first, second) => [
            ("--metrics-bind-address", first, metrics),
            ("--health-probe-bind-address", second, probes),
        ]
        .into_iter()
        .filter_map(|(flag, bind, router)| match bind {
            Bind::Nowhere => None,
            Bind::At(address) => Some((flag, address, router)),
        })
        .collect(),
    };
    for (flag, address, router) in routes {
        let listener = listen(address)
            .await
            .with_context(|| format!("cannot listen at {address} ({flag})"))?;
        tokio::spawn(connections::serve(listener, router, shutdown.clone()));
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

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::sync::watch;

    use super::super::Observer;
    use super::*;
    use crate::node::publish::inventory::Standing;

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

    fn never() -> Readiness {
        Arc::new(|| Err("never".to_owned()))
    }

    #[tokio::test]
    async fn probes_and_metrics_are_served_at_their_addresses() {
        let flags = Flags {
            metrics_bind_address: Bind::At(free().await),
            health_probe_bind_address: Bind::At(free().await),
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
        let (sender, standing) = watch::channel(Standing::starting());
        let observer = Observer::of_node(Arc::default(), standing);
        observer.serve(flags, readiness, &shutdown).await.unwrap();

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
        sender.send_modify(|standing| standing.ready = true);
        assert!(ask(metrics, "/metrics").await.contains("drayman_node_ready 1"));
        shutdown.cancel();
    }

    #[tokio::test]
    async fn one_address_serves_both_and_one_in_use_is_named() {
        let address = free().await;
        let both = Flags {
            metrics_bind_address: Bind::At(address),
            health_probe_bind_address: Bind::At(address),
        };
        let shutdown = CancellationToken::new();
        Observer::new("controller")
            .serve(both, never(), &shutdown)
            .await
            .unwrap();
        assert!(ask(address, "/livez").await.starts_with("HTTP/1.1 200"));
        assert!(
            ask(address, "/metrics")
                .await
                .contains("component=\"controller\"")
        );
        let refusal = Observer::new("controller")
            .serve(both, never(), &shutdown)
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
    async fn nothing_is_served_unless_asked_for() {
        let nowhere = Flags {
            metrics_bind_address: Bind::Nowhere,
            health_probe_bind_address: Bind::Nowhere,
        };
        let shutdown = CancellationToken::new();
        Observer::new("node")
            .serve(nowhere, never(), &shutdown)
            .await
            .unwrap();
    }
}
