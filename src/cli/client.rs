//! Builds the Kubernetes API clients.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http::HeaderValue;
use http::header::USER_AGENT;
use kube::Client;
use kube::client::ClientBuilder;
use kube::config::{Config, KubeConfigOptions, Kubeconfig};

use super::Error;
use super::observe::Requests;

/// Limit for establishing a connection, including TLS.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit for sending a request. Callers that wait for a response set a limit shorter than [`READ_TIMEOUT`].
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum silence on a connection with a pending response. It must exceed 290 s, the duration of a watch. Without it,
/// a lost list response would block its watch forever.
const READ_TIMEOUT: Duration = Duration::from_secs(300);
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
    context: Option<&str>,
) -> Result<Config, Error> {
    let options = KubeConfigOptions {
        context: context.map(str::to_owned),
        ..KubeConfigOptions::default()
    };
    if let Some(file) = kubeconfig {
        return from_file(file, &options).await;
    }
    // `KUBECONFIG` and the home directory take precedence, as in kubectl.
    let from_home = Config::from_kubeconfig(&options).await;
    from_home.or_else(|error| {
        if context.is_none() && std::env::var_os(IN_CLUSTER).is_some() {
            Config::incluster().map_err(|error| Error::Configuration(format!("no credentials: {error}")))
        } else {
            Err(Error::Configuration(format!(
                "no API server: {error}; give --kubeconfig FILE or set KUBECONFIG"
            )))
        }
    })
}

async fn from_file(file: &Path, options: &KubeConfigOptions) -> Result<Config, Error> {
    let refused = |error: &dyn std::fmt::Display| {
        Error::Configuration(format!("--kubeconfig {}: {error}", file.display()))
    };
    // kube panics on a file that starts with a UTF-16 byte order mark but is not valid UTF-16; reading it as UTF-8
    // first rejects such files.
    std::fs::read_to_string(file).map_err(|error| refused(&error))?;
    let content = Kubeconfig::read_from(file).map_err(|error| refused(&error))?;
    let authority = authority_file(&content, options);
    let mut config = Config::from_custom_kubeconfig(content, options)
        .await
        .map_err(|error| refused(&error))?;
    config.root_cert_file = authority;
    Ok(config)
}

/// Returns the CA file that the kubeconfig names, if any. kube re-reads the file about once a minute, as in a pod, so
/// it can be replaced at run time. A CA embedded in the kubeconfig is read once.
fn authority_file(content: &Kubeconfig, options: &KubeConfigOptions) -> Option<PathBuf> {
    let name = options.context.as_ref().or(content.current_context.as_ref())?;
    let mut contexts = content.contexts.iter();
    let named = contexts.find(|context| context.name == *name)?;
    let wanted = &named.context.as_ref()?.cluster;
    let known = content.clusters.iter().find(|known| known.name == *wanted)?;
    let cluster = known.cluster.as_ref()?;
    match &cluster.certificate_authority_data {
        Some(_) => None,
        None => cluster.certificate_authority.as_ref().map(PathBuf::from),
    }
}

/// Builds a client that sends each request once. kube's own retries are off: a retried write may arrive after it has
/// become invalid, and a retried create may see its own success as a conflict.
///
/// `component` becomes the user agent (`drayman-controller/0.1.0`), which identifies the client in the audit log.
pub(super) fn build(config: Config, component: &str) -> Result<Client, Error> {
    let config = prepared(config, component)?;
    let server = config.cluster_url.clone();
    let builder = ClientBuilder::try_from(config).map_err(|error| no_client(&server, &error))?;
    Ok(builder.build())
}

/// Like [`build`], but counts requests.
pub(super) fn build_counted(config: Config, component: &str, requests: &Requests) -> Result<Client, Error> {
    let config = prepared(config, component)?;
    let server = config.cluster_url.clone();
    let builder = ClientBuilder::try_from(config).map_err(|error| no_client(&server, &error))?;
    Ok(builder.with_layer(requests).build())
}

fn no_client(server: &http::Uri, error: &kube::Error) -> Error {
    Error::Configuration(format!("no client for the API server {server}: {error}"))
}

fn prepared(mut config: Config, component: &str) -> Result<Config, Error> {
    config.default_retry = false;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.write_timeout = Some(WRITE_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
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
        let config = Config::new("http://127.0.0.1:1".parse().expect("a URL"));
        let config = prepared(config, "test").expect("prepared");
        let limit = config.read_timeout.expect("a limit");
        assert!(limit > Duration::from_secs(290) && limit < Duration::from_secs(600));
        assert!(config.reset_reader_on_write, "or an idle connection would count");
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
    async fn requests_are_sent_once_and_carry_the_component_s_name() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

        super::super::choose_tls_provider();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        let address = listener.local_addr().expect("an address");
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), GOOD.replace("127.0.0.1:1", &address.to_string())).expect("written");
        let served = tokio::spawn(async move {
            let mut requests = Vec::new();
            // Collects all requests within 300 ms; a retry would arrive at once or on a new connection.
            while let Ok(Ok((mut stream, _))) =
                tokio::time::timeout(Duration::from_millis(300), listener.accept()).await
            {
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
