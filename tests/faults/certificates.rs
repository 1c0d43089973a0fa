//! The API server's certificate or certificate authority is replaced while a controller runs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::serve::Listener;
use drayman::testcluster::api::ApiServer;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use crate::lasting::{control_plane, has_device, make_claim, serve};
use crate::program::until;

const TIMEOUT: Duration = Duration::from_secs(300);

/// A certificate authority.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// The CA certificate for clients.
    pem: String,
}

impl Authority {
    fn new(name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut parameters = CertificateParams::new(Vec::new()).unwrap();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.distinguished_name.push(DnType::CommonName, name);
        let pem = parameters.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(parameters, key);
        Self { issuer, pem }
    }

    /// A local TLS server with a new certificate and key.
    fn server(&self) -> TlsAcceptor {
        let key = KeyPair::generate().unwrap();
        let parameters = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let certificate = parameters.signed_by(&key, &self.issuer).unwrap();
        let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
        let config = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key);
        TlsAcceptor::from(Arc::new(config.unwrap()))
    }
}

/// Counters of connections.
#[derive(Clone, Debug, Default)]
struct Connections {
    /// Connections that the client rejected.
    refused: Arc<AtomicUsize>,
    requests: Arc<AtomicUsize>,
}

struct TlsListener {
    listener: TcpListener,
    acceptor: TlsAcceptor,
    connections: Connections,
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let (stream, address) = self.listener.accept().await.unwrap();
            let handshake = timeout(Duration::from_secs(10), self.acceptor.accept(stream)).await;
            match handshake {
                Ok(Ok(stream)) => return (stream, address),
                _ => self.connections.refused.fetch_add(1, Ordering::Relaxed),
            };
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A TLS proxy in proxy of the API server. Dropping it closes its connections.
struct TlsProxy {
    runtime: Option<Runtime>,
    address: SocketAddr,
    connections: Connections,
}

impl TlsProxy {
    fn start(server: &ApiServer, address: Option<SocketAddr>, acceptor: TlsAcceptor) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let (connections, router) = (Connections::default(), server.router());
        let counted = connections.clone();
        let router = router.layer(axum::middleware::map_request(
            move |request: axum::extract::Request| {
                counted.requests.fetch_add(1, Ordering::Relaxed);
                async move { request }
            },
        ));
        let (sender, receiver) = std::sync::mpsc::channel();
        let counters = connections.clone();
        runtime.spawn(async move {
            let wanted = address.unwrap_or_else(|| ([127, 0, 0, 1], 0).into());
            // The previous proxy may not have closed its socket yet.
            let listener = loop {
                match TcpListener::bind(wanted).await {
                    Ok(listener) => break listener,
                    Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                }
            };
            let _ = sender.send(listener.local_addr().unwrap());
            let listener = TlsListener {
                listener,
                acceptor,
                connections: counters,
            };
            axum::serve(listener, router).await
        });
        let address = receiver.recv_timeout(Duration::from_secs(60)).unwrap();
        Self {
            runtime: Some(runtime),
            address,
            connections,
        }
    }

    /// Replaces the proxy by one with this certificate at the same address.
    fn replace(self, server: &ApiServer, acceptor: TlsAcceptor) -> Self {
        let address = self.address;
        drop(self);
        Self::start(server, Some(address), acceptor)
    }

    async fn is_refused(&self) -> bool {
        let refused = || self.connections.refused.load(Ordering::Relaxed) >= 2;
        until(TIMEOUT, refused).await && self.connections.requests.load(Ordering::Relaxed) == 0
    }
}

impl Drop for TlsProxy {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A client as in a pod: it trusts the authorities in the file, which it rereads about once a minute.
fn client(address: SocketAddr, authorities: &std::path::Path) -> kube::Client {
    let mut config = kube::Config::new(format!("https://{address}").parse().unwrap());
    config.default_retry = false;
    config.root_cert_file = Some(authorities.to_owned());
    // As in a pod: the initial content of the file.
    config.root_cert = Some(Vec::new());
    kube::Client::try_from(config).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewed_certificate_is_trusted_and_a_foreign_one_is_not() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let cluster = control_plane(3).await;
    let (authority, other_authority) = (Authority::new("authority"), Authority::new("authority"));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ca.crt");
    std::fs::write(&file, &authority.pem).unwrap();
    let proxy = TlsProxy::start(cluster.server(), None, authority.server());
    let stop = CancellationToken::new();
    let serving = serve(client(proxy.address, &file), stop.clone());
    make_claim(&cluster, "first");
    assert!(until(TIMEOUT, || has_device(cluster.server(), "first")).await);

    // Another server answers at the address; its certificate has the same name but another issuer.
    let proxy = proxy.replace(cluster.server(), other_authority.server());
    make_claim(&cluster, "second");
    assert!(
        proxy.is_refused().await,
        "the client talks to an untrusted server: {:?}",
        proxy.connections
    );
    assert!(!has_device(cluster.server(), "second"));

    let proxy = proxy.replace(cluster.server(), authority.server());
    assert!(until(TIMEOUT, || has_device(cluster.server(), "second")).await);
    // Another replacement immediately after it.
    let proxy = proxy.replace(cluster.server(), authority.server());
    make_claim(&cluster, "third");
    assert!(until(TIMEOUT, || has_device(cluster.server(), "third")).await);
    assert!(!serving.is_finished());
    stop.cancel();
    assert!(serving.await.unwrap());
    drop(proxy);
    cluster.stop().await;
}

/// As kubelet replaces `ca.crt` in a pod when the cluster's CA is replaced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replaced_certificate_authority_is_trusted_from_then_on() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let cluster = control_plane(2).await;
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ca.crt");
    std::fs::write(&file, &old.pem).unwrap();
    let proxy = TlsProxy::start(cluster.server(), None, old.server());
    let stop = CancellationToken::new();
    let serving = serve(client(proxy.address, &file), stop.clone());
    make_claim(&cluster, "first");
    assert!(until(TIMEOUT, || has_device(cluster.server(), "first")).await);

    // The server is replaced before the file.
    let proxy = proxy.replace(cluster.server(), new.server());
    make_claim(&cluster, "second");
    assert!(
        proxy.is_refused().await,
        "the new authority is not known yet: {:?}",
        proxy.connections
    );
    assert!(!has_device(cluster.server(), "second"));
    // An incomplete file, as during a write, changes nothing.
    std::fs::write(&file, "-----BEGIN CERTIFICATE-----\n").unwrap();
    std::fs::write(&file, format!("{}{}", old.pem, new.pem)).unwrap();
    assert!(until(TIMEOUT, || has_device(cluster.server(), "second")).await);
    assert!(!serving.is_finished());
    stop.cancel();
    assert!(serving.await.unwrap());
    drop(proxy);
    cluster.stop().await;
}
