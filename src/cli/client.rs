//! Builds the Kubernetes API clients.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use http::header::USER_AGENT;
use http::{HeaderValue, Request, Response, Uri};
use hyper::body::Incoming;
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::{Connect, HttpConnector};
use hyper_util::rt::TokioExecutor;
use kube::Client;
use kube::client::{Body, ClientBuilder, ConfigExt as _};
use kube::config::{Cluster, Config, Context, KubeConfigOptions, Kubeconfig};
use tower::util::{BoxService, MapErrLayer};
use tower::{BoxError, ServiceBuilder};

use super::error::Error;
use super::observe::Requests;

/// Limit for establishing a connection, including TLS.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit for sending a request. Callers that wait for a response set a limit shorter than [`READ_TIMEOUT`].
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum silence on a connection with a pending response. It must exceed 290 s, the duration of a watch. Without it,
/// a lost list response would block its watch forever.
const READ_TIMEOUT: Duration = Duration::from_secs(300);
/// Target of the log of requests: `--v=6` shows it, as it does kube's own.
const LOG_TARGET: &str = "kube_client::request";
/// Maximum size of a kubeconfig file. One with the certificates of a thousand clusters has 5 MiB.
const KUBECONFIG_MAX: u64 = 16 << 20;
/// Set by kubelet in every container, even with `enableServiceLinks: false`.
const IN_CLUSTER: &str = "KUBERNETES_SERVICE_HOST";

/// Loads the client configuration from the file, or else from the pod's service account. Sends nothing.
///
/// Ignores `KUBECONFIG` and `~/.kube/config`, so that a component never works on whichever cluster the user's shell
/// selects.
pub(super) async fn configuration(kubeconfig: Option<&Path>) -> Result<Config, Error> {
    match kubeconfig {
        Some(file) => from_file(file, &KubeConfigOptions::default()).await,
        None if std::env::var_os(IN_CLUSTER).is_some() => Config::incluster().map_err(|error| {
            Error::Configuration(format!(
                "no credentials: {error}; let the pod mount its service account's token, or give --kubeconfig FILE"
            ))
        }),
        None => Err(Error::Configuration(format!(
            "no API server: --kubeconfig is not set, and this is not a pod ({IN_CLUSTER} is not set); \
             give --kubeconfig FILE or set DRAYMAN_KUBECONFIG"
        ))),
    }
}

/// Loads the client configuration as kubectl does: from the file, `KUBECONFIG`, `~/.kube/config`, or else the pod's
/// service account. Only for interactive commands; components never read a home directory.
pub(super) async fn configuration_of_person(
    kubeconfig: Option<&Path>,
    options: &KubeConfigOptions,
) -> Result<Config, Error> {
    if let Some(file) = kubeconfig {
        return from_file(file, options).await;
    }
    let files = files_of_person();
    let names: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    let names = names.join(", ");
    if let Some(content) = kubeconfig_of_person()? {
        return selected(content, options)
            .await
            .map_err(|error| Error::Configuration(format!("kubeconfig {names}: {error}")));
    }
    let selects = options.context.is_some() || options.cluster.is_some() || options.user.is_some();
    if !selects && std::env::var_os(IN_CLUSTER).is_some() {
        return Config::incluster().map_err(|error| Error::Configuration(format!("no credentials: {error}")));
    }
    Err(Error::Configuration(format!(
        "no API server: {names}: No such file; give --kubeconfig FILE or set KUBECONFIG"
    )))
}

/// Returns the files that kubectl reads without `--kubeconfig`: those in `KUBECONFIG`, or `~/.kube/config`.
fn files_of_person() -> Vec<PathBuf> {
    let listed = std::env::var_os("KUBECONFIG").unwrap_or_default();
    let mut files: Vec<PathBuf> = std::env::split_paths(&listed)
        .filter(|file| !file.as_os_str().is_empty())
        .collect();
    if files.is_empty() {
        files.extend(std::env::home_dir().map(|home| home.join(".kube/config")));
    }
    files
}

/// Reads and merges these files. Skips files that do not exist, as kubectl does; returns `None` if none exists.
pub(super) fn kubeconfig_of_person() -> Result<Option<Kubeconfig>, Error> {
    let mut merged: Option<Kubeconfig> = None;
    for file in files_of_person() {
        if matches!(file.try_exists(), Ok(false)) {
            continue;
        }
        let content = read_kubeconfig(&file).and_then(|content| match merged.take() {
            Some(before) => before.merge(content).map_err(|error| error.to_string()),
            None => Ok(content),
        });
        let refused = |error| Error::Configuration(format!("kubeconfig {}: {error}", file.display()));
        merged = Some(content.map_err(refused)?);
    }
    Ok(merged)
}

/// Reads one file. kube alone reads files of any size, and panics on some that begin with a UTF-16 byte order mark.
fn read_kubeconfig(file: &Path) -> Result<Kubeconfig, String> {
    let mut text = Vec::new();
    let opened = File::open(file).map_err(|error| error.to_string())?;
    let is_pipe = !opened.metadata().is_ok_and(|metadata| metadata.is_file());
    opened
        .take(KUBECONFIG_MAX + 1)
        .read_to_end(&mut text)
        .map_err(|error| error.to_string())?;
    if text.len() as u64 > KUBECONFIG_MAX {
        return Err(format!("the file has more than {KUBECONFIG_MAX} bytes"));
    }
    let text = String::from_utf8(text).map_err(|_| "the file is not UTF-8 text".to_owned())?;
    // A pipe can be read once. In a file, paths are relative to its directory.
    let content = if is_pipe {
        Kubeconfig::from_yaml(&text)
    } else {
        Kubeconfig::read_from(file)
    };
    content.map_err(|error| error.to_string())
}

async fn from_file(file: &Path, options: &KubeConfigOptions) -> Result<Config, Error> {
    let refused = |error| Error::Configuration(format!("--kubeconfig {}: {error}", file.display()));
    let content = read_kubeconfig(file).map_err(refused)?;
    let authority = authority_file(&content, options);
    let mut config = selected(content, options).await.map_err(refused)?;
    config.root_cert_file = authority;
    Ok(config)
}

/// Returns the configuration for the cluster and the user that the options select.
async fn selected(mut content: Kubeconfig, options: &KubeConfigOptions) -> Result<Config, String> {
    if content.current_context.is_none() && options.context.is_none() {
        return Err("it has no current context; set one with `kubectl config use-context`".to_owned());
    }
    has_user(&content, options)?;
    let proxy = cluster(&content, options).and_then(|cluster| cluster.proxy_url.as_deref());
    let has_proxy = proxy.is_some_and(|url| !url.is_empty());
    if !has_proxy {
        // Otherwise kube takes the proxy of HTTPS_PROXY, even an invalid one, or if NO_PROXY excludes the server.
        for cluster in content.clusters.iter_mut().flat_map(|named| &mut named.cluster) {
            cluster.proxy_url = Some("http://unused".to_owned());
        }
    }
    let mut config = Config::from_custom_kubeconfig(content, options)
        .await
        .map_err(|error| error.to_string())?;
    if !has_proxy {
        config.proxy_url = None;
    }
    has_scheme(&config.cluster_url).map_err(|error| format!("the server {}: {error}", config.cluster_url))?;
    Ok(config)
}

/// Refuses a URL without `https://` or `http://`; kube would panic.
pub(super) fn has_scheme(server: &Uri) -> Result<(), &'static str> {
    match server.scheme_str() {
        Some("https" | "http") => Ok(()),
        _ => Err("the URL must begin with https:// or http://"),
    }
}

/// Returns the selected context.
fn context<'a>(content: &'a Kubeconfig, options: &KubeConfigOptions) -> Option<&'a Context> {
    let name = options.context.as_ref().or(content.current_context.as_ref())?;
    let named = content.contexts.iter().find(|context| context.name == *name)?;
    named.context.as_ref()
}

/// Refuses a user that is not in the kubeconfig; kube would send requests without credentials. A context without a user has none, as for
/// kubectl.
fn has_user(content: &Kubeconfig, options: &KubeConfigOptions) -> Result<(), String> {
    let of_context = || context(content, options)?.user.as_ref();
    match options.user.as_ref().or_else(of_context) {
        Some(user) if user.is_empty() => Ok(()),
        Some(user) if !content.auth_infos.iter().any(|known| known.name == *user) => {
            Err(format!("it has no user {user}"))
        }
        _ => Ok(()),
    }
}

/// Returns the selected cluster.
fn cluster<'a>(content: &'a Kubeconfig, options: &KubeConfigOptions) -> Option<&'a Cluster> {
    let named = context(content, options)?;
    let cluster = options.cluster.as_ref().unwrap_or(&named.cluster);
    let known = content.clusters.iter().find(|known| known.name == *cluster)?;
    known.cluster.as_ref()
}

/// Returns the CA file that the kubeconfig names, if any. kube re-reads the file about once a minute, as in a pod, so
/// it can be replaced at run time. A CA embedded in the kubeconfig is read once.
fn authority_file(content: &Kubeconfig, options: &KubeConfigOptions) -> Option<PathBuf> {
    let cluster = cluster(content, options)?;
    match &cluster.certificate_authority_data {
        Some(_) => None,
        None => cluster.certificate_authority.as_ref().map(PathBuf::from),
    }
}

/// Builds a client that sends each request once. kube's own retries are off: a retried write may arrive after it has
/// become invalid, and a retried create may see its own success as a conflict.
///
/// `component` becomes the user agent (`drayman-controller/0.1.0`), which identifies the client in the audit log.
pub(super) fn build(mut config: Config, component: &str) -> Result<Client, Error> {
    limit_requests(&mut config, READ_TIMEOUT);
    build_limited(config, component)
}

/// Like [`build`], but keeps the limits of `config`.
pub(super) fn build_limited(config: Config, component: &str) -> Result<Client, Error> {
    let server = config.cluster_url.clone();
    let no_answer = MapErrLayer::new(move |cause: BoxError| NoAnswer {
        server: server.clone(),
        cause,
    });
    let config = prepared(config, component)?;
    Ok(builder(&config)?.with_layer(&no_answer).build())
}

/// A request without an answer.
#[derive(Debug, thiserror::Error)]
#[error("no answer from {server}")]
struct NoAnswer {
    server: Uri,
    #[source]
    cause: BoxError,
}

/// Like [`build`], but counts requests.
pub(super) fn build_counted(
    mut config: Config,
    component: &str,
    requests: &Requests,
) -> Result<Client, Error> {
    limit_requests(&mut config, READ_TIMEOUT);
    let config = prepared(config, component)?;
    Ok(builder(&config)?.with_layer(requests).build())
}

fn builder(config: &Config) -> Result<ClientBuilder<ApiService>, Error> {
    if let Some(proxy) = &config.proxy_url {
        let proxy = proxy.host().unwrap_or_default();
        return Err(Error::Configuration(format!(
            "the kubeconfig has the proxy {proxy}: drayman connects to {} without a proxy; remove proxy-url",
            config.cluster_url
        )));
    }
    let service = service(config).map_err(no_client(config))?;
    Ok(ClientBuilder::new(service, config.default_namespace.clone()))
}

/// Sends requests to the API server.
type ApiService = BoxService<Request<Body>, Response<Incoming>, BoxError>;

/// Like kube's own service, but sets `TCP_NODELAY`. Otherwise, the first request on a new connection waits 40 ms for the server's
/// acknowledgement of the TLS handshake, and a request of several packets for that of its first (kube-rs/kube#2056).
fn service(config: &Config) -> Result<ApiService, kube::Error> {
    let mut connector = HttpConnector::new();
    // TLS is the layer above.
    connector.enforce_http(false);
    connector.set_nodelay(true);
    let mut connector = TimeoutConnector::new(config.rustls_https_connector_with_connector(connector)?);
    connector.set_connect_timeout(config.connect_timeout);
    connector.set_read_timeout(config.read_timeout);
    connector.set_write_timeout(config.write_timeout);
    connector.set_reset_reader_on_write(config.reset_reader_on_write);
    let client = HttpClient::builder(TokioExecutor::new()).build(connector);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .service_fn(move |request| send(client.clone(), request));
    Ok(BoxService::new(service))
}

/// Sends a request and logs it.
async fn send(
    client: HttpClient<impl Connect + Clone + Send + Sync + 'static, Body>,
    request: Request<Body>,
) -> Result<Response<Incoming>, BoxError> {
    let asked = format!("{} {}", request.method(), request.uri());
    let since = Instant::now();
    let answer = client.request(request).await;
    let milliseconds = since.elapsed().as_millis();
    match &answer {
        Ok(answer) => {
            let status = answer.status();
            tracing::debug!(target: LOG_TARGET, "{asked}: {status} in {milliseconds} ms");
        }
        Err(error) => {
            tracing::debug!(target: LOG_TARGET, %error, "{asked}: no answer after {milliseconds} ms");
        }
    }
    answer.map_err(BoxError::from)
}

fn no_client(config: &Config) -> impl FnOnce(kube::Error) -> Error + use<> {
    let server = config.cluster_url.clone();
    let plugin = config
        .auth_info
        .exec
        .as_ref()
        .and_then(|exec| exec.command.clone());
    move |error| {
        let plugin = match (&error, plugin) {
            (kube::Error::Auth(_), Some(plugin)) => format!(" (exec plugin {plugin} of the kubeconfig)"),
            _ => String::new(),
        };
        Error::Configuration(format!("no client for the API server {server}: {error}{plugin}"))
    }
}

/// Limits each request: connecting, sending, and each silence while the answer arrives.
pub(super) fn limit_requests(config: &mut Config, limit: Duration) {
    config.connect_timeout = Some(limit.min(CONNECT_TIMEOUT));
    config.write_timeout = Some(limit.min(WRITE_TIMEOUT));
    config.read_timeout = Some(limit.min(READ_TIMEOUT));
}

fn prepared(mut config: Config, component: &str) -> Result<Config, Error> {
    config.default_retry = false;
    config.reset_reader_on_write = true;
    let agent = format!("drayman-{component}/{}", env!("CARGO_PKG_VERSION"));
    let agent = HeaderValue::from_str(&agent).map_err(anyhow::Error::from)?;
    config.headers.push((USER_AGENT, agent));
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn refusal(content: &str) -> String {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), content).expect("written");
        let error = configuration(Some(file.path())).await.expect_err("refused");
        assert_eq!(error.reason(), "ConfigurationInvalid");
        error.to_string()
    }

    const GOOD: &str = "
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: here, user: me}}]
clusters: [{name: here, cluster: {server: 'http://127.0.0.1:1'}}]
users: [{name: me, user: {token: secret}}]
";

    #[tokio::test]
    async fn requests_without_answer_time_out_and_silent_watches_do_not() {
        let mut config = Config::new("http://127.0.0.1:1".parse().expect("a URL"));
        limit_requests(&mut config, READ_TIMEOUT);
        let config = prepared(config, "test").expect("prepared");
        let limit = config.read_timeout.expect("a limit");
        assert!(limit > Duration::from_secs(290) && limit < Duration::from_secs(600));
        assert!(config.reset_reader_on_write, "or an idle connection would count");
    }

    #[tokio::test]
    async fn connections_send_packets_without_waiting() {
        use tokio::io::AsyncReadExt as _;

        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        let server = listener.local_addr().expect("an address");
        let config = Config::new(format!("http://{server}").parse().expect("a URL"));
        crate::cli::runtime::choose_tls_provider();
        let client = build(config, "test").expect("a client");
        let request = tokio::spawn(async move { client.apiserver_version().await });
        let (mut accepted, _) = listener.accept().await.expect("a connection");
        accepted.read_u8().await.expect("a request");
        let this =
            rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty())
                .expect("this process");
        let sockets = std::fs::read_dir("/proc/self/fd")
            .expect("the open files")
            .filter_map(|file| file.ok()?.file_name().to_str()?.parse().ok())
            .filter_map(|file| {
                rustix::process::pidfd_getfd(&this, file, rustix::process::PidfdGetfdFlags::empty()).ok()
            })
            .map(std::net::TcpStream::from);
        let to_server: Vec<bool> = sockets
            .filter(|socket| socket.peer_addr().is_ok_and(|peer| peer == server))
            .map(|socket| socket.nodelay().expect("the option"))
            .collect();
        assert_eq!(to_server, [true]);
        request.abort();
    }

    #[tokio::test]
    async fn a_proxy_is_refused_by_name_without_its_password() {
        let mut config = Config::new("https://127.0.0.1:1".parse().expect("a URL"));
        config.proxy_url = Some("http://me:secret@proxy.example:3128".parse().expect("a URL"));
        let refused = build(config, "test").map(drop).expect_err("refused").to_string();
        assert!(refused.contains("the proxy proxy.example:"), "{refused}");
        assert!(!refused.contains("secret"), "{refused}");
    }

    #[tokio::test]
    async fn an_unusable_kubeconfig_is_refused_with_its_name_and_error() {
        let missing = configuration(Some(Path::new("/nowhere/kubeconfig")))
            .await
            .expect_err("refused")
            .to_string();
        assert!(
            missing.starts_with("--kubeconfig /nowhere/kubeconfig: "),
            "{missing}"
        );
        assert!(missing.contains("No such file"), "{missing}");

        assert!(refusal("").await.contains("current context"));
        assert!(refusal("clusters: 7\n").await.contains("line 1"));
        assert!(
            refusal(&GOOD.replace("current-context: here", "current-context: there"))
                .await
                .contains("there")
        );
        assert!(
            refusal(&GOOD.replace("http://127.0.0.1:1", "not a url"))
                .await
                .contains("cluster url")
        );
    }

    #[tokio::test]
    async fn only_a_certificate_authority_in_a_file_is_read_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let certified = rcgen::generate_simple_self_signed(Vec::new()).expect("a certificate");
        let pem = certified.cert.pem();
        std::fs::write(directory.path().join("ca.crt"), pem).expect("written");
        let file = directory.path().join("kubeconfig");
        for (cluster, expected) in [
            (
                "server: 'https://127.0.0.1:1', certificate-authority: ca.crt",
                true,
            ),
            ("server: 'https://127.0.0.1:1'", false),
        ] {
            std::fs::write(&file, GOOD.replace("server: 'http://127.0.0.1:1'", cluster)).expect("written");
            let config = configuration(Some(&file)).await.expect("valid");
            let wanted = expected.then(|| directory.path().join("ca.crt"));
            assert_eq!(config.root_cert_file, wanted);
            assert_eq!(config.root_cert.is_some(), expected);
        }
    }

    #[tokio::test]
    async fn requests_are_sent_once_and_carry_the_components_name() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

        crate::cli::runtime::choose_tls_provider();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        let address = listener.local_addr().expect("an address");
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), GOOD.replace("127.0.0.1:1", &address.to_string())).expect("written");
        let served = tokio::spawn(async move {
            let mut requests = Vec::new();
            // Waits for the first request, and collects all others within 300 ms; a retry would arrive at once or on
            // a new connection.
            let mut limit = Duration::from_secs(60);
            while let Ok(Ok((mut stream, _))) = tokio::time::timeout(limit, listener.accept()).await {
                limit = Duration::from_millis(300);
                let mut buffer = vec![0; 4096];
                let read = stream.read(&mut buffer).await.unwrap_or_default();
                requests.push(String::from_utf8_lossy(&buffer[..read]).to_lowercase());
                let answer =
                    "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                stream.write_all(answer.as_bytes()).await.expect("answered");
            }
            requests
        });

        let client = build(
            configuration(Some(file.path())).await.expect("valid"),
            "controller",
        )
        .expect("a client");
        client.apiserver_version().await.expect_err("the server refuses");

        let requests = served.await.expect("served");
        assert_eq!(requests.len(), 1);
        assert!(requests[0].contains(concat!(
            "user-agent: drayman-controller/",
            env!("CARGO_PKG_VERSION")
        )));
        assert!(requests[0].contains("authorization: bearer secret"));
    }
}
