//! Metrics over HTTPS for accounts with the right to read them, as at the secure ports of Kubernetes' components.
//!
//! A request has a bearer token. The API server authenticates its account (TokenReview) and authorizes it for the path `/metrics`
//! (SubjectAccessReview). A token is sent over TLS only, with a certificate that the scraper can verify: there is no self-signed one,
//! because a scraper that accepts any certificate gives its token to anyone.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, StatusCode};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::Client;
use kube::api::{Api, PostParams};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_rustls::TlsAcceptor;

/// Cache time of a positive review, the same as for kubelet's metrics.
const ALLOWED_FOR: Duration = Duration::from_secs(120);
/// Maximum number of cached tokens. A cluster has one or two scrapers.
const ALLOWED_MAX: usize = 8;
/// Maximum size of a token in bytes. The tokens of service accounts have about 1,000.
const TOKEN_MAX: usize = 6 * 1024;
/// Time limit of the two reviews, below the lifetime of a connection.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(8);
/// Pause after a review that admits no account: a peer with wrong tokens causes at most ten requests a second. A scraper waits for the
/// reviews of at most 64 other connections, which takes less than [`REVIEW_TIMEOUT`].
const REFUSAL_PAUSE: Duration = Duration::from_millis(100);
/// Interval at which the certificate is read again. Kubelet updates a mounted Secret within two minutes.
const RELOAD: Duration = Duration::from_secs(60);

/// The certificate in a directory, as in a Secret of type `kubernetes.io/tls`.
#[derive(Clone)]
pub(super) struct Certificate {
    directory: Arc<Path>,
    read: Arc<Mutex<(Instant, TlsAcceptor)>>,
}

impl Certificate {
    pub(super) fn read(directory: &Path) -> Result<Self, anyhow::Error> {
        Ok(Self {
            directory: directory.into(),
            read: Arc::new(Mutex::new((Instant::now(), acceptor(directory)?))),
        })
    }

    /// Returns the acceptor of connections. Keeps the last valid certificate if the files are damaged.
    pub(super) fn acceptor(&self) -> TlsAcceptor {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, current) = &mut *read;
        if at.elapsed() >= RELOAD {
            *at = Instant::now();
            match acceptor(&self.directory) {
                Ok(newer) => *current = newer,
                Err(error) => tracing::warn!(
                    reason = "CertificateInvalid",
                    "the metrics keep their earlier certificate: {error:#}"
                ),
            }
        }
        current.clone()
    }
}

fn acceptor(directory: &Path) -> Result<TlsAcceptor, anyhow::Error> {
    let path = |name: &str| -> PathBuf { directory.join(name) };
    let (chain, key) = (path("tls.crt"), path("tls.key"));
    let of = |path: &Path| format!("--metrics-cert-dir: cannot read {}", path.display());
    let certificates: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(&chain)
        .and_then(Iterator::collect)
        .with_context(|| of(&chain))?;
    let private = PrivateKeyDer::from_pem_file(&key).with_context(|| of(&key))?;
    let config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(certificates, private)
        .with_context(|| {
            format!(
                "--metrics-cert-dir: {} and {} do not belong together",
                chain.display(),
                key.display()
            )
        })?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Admits accounts that the API server allows to read the metrics.
pub(super) struct Guard {
    client: Client,
    /// Admitted tokens, each with the time of its review; oldest first.
    allowed: Mutex<VecDeque<(String, Instant)>>,
    /// When the next review may begin. One at a time: a peer with many tokens must not crowd out the component's own requests.
    turn: tokio::sync::Mutex<Instant>,
    /// Whether the last review failed; the log says it once.
    failed: AtomicBool,
}

impl Guard {
    pub(super) fn new(client: Client) -> Self {
        Self {
            client,
            allowed: Mutex::default(),
            turn: tokio::sync::Mutex::new(Instant::now()),
            failed: AtomicBool::new(false),
        }
    }

    /// Returns why a request is refused: 401 without a valid token, 403 without the right, 503 if the API server does not review the token.
    pub(super) async fn check(&self, headers: &HeaderMap) -> Result<(), StatusCode> {
        let token = bearer(headers).ok_or(StatusCode::UNAUTHORIZED)?;
        if self.is_allowed(token) {
            return Ok(());
        }
        let reviewed = timeout(REVIEW_TIMEOUT, async {
            let mut turn = self.turn.lock().await;
            sleep_until(*turn).await;
            // Another request may have had the same token.
            if self.is_allowed(token) {
                return Ok(None);
            }
            // Set before the review, whose caller may go away.
            *turn = Instant::now() + REFUSAL_PAUSE;
            let refusal = self.review(token).await?;
            if refusal.is_none() {
                *turn = Instant::now();
            }
            Ok::<_, anyhow::Error>(refusal)
        });
        let error = match reviewed.await {
            Ok(Ok(refusal)) => {
                self.failed.store(false, Ordering::Relaxed);
                return refusal.map_or(Ok(()), Err);
            }
            Ok(Err(error)) => error,
            Err(elapsed) => elapsed.into(),
        };
        if !self.failed.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                reason = "ReviewFailed",
                "the API server did not review a token for the metrics: {error:#}"
            );
        }
        Err(StatusCode::SERVICE_UNAVAILABLE)
    }

    fn is_allowed(&self, token: &str) -> bool {
        let mut allowed = self.allowed.lock().unwrap_or_else(PoisonError::into_inner);
        allowed.retain(|(_, at)| at.elapsed() < ALLOWED_FOR);
        allowed.iter().any(|(known, _)| known == token)
    }

    /// Returns why the token is refused; `None` if it is not.
    async fn review(&self, token: &str) -> Result<Option<StatusCode>, anyhow::Error> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: Some(token.to_owned()),
                audiences: None,
            },
            ..TokenReview::default()
        };
        let post = PostParams::default();
        let reviews = Api::<TokenReview>::all(self.client.clone());
        let status = reviews.create(&post, &review).await?.status.unwrap_or_default();
        let Some(user) = status.user.filter(|_| status.authenticated == Some(true)) else {
            return Ok(Some(StatusCode::UNAUTHORIZED));
        };
        let reviews = Api::<SubjectAccessReview>::all(self.client.clone());
        let answer = reviews.create(&post, &access(user)).await?.status;
        if !answer.is_some_and(|status| status.allowed) {
            return Ok(Some(StatusCode::FORBIDDEN));
        }
        let mut allowed = self.allowed.lock().unwrap_or_else(PoisonError::into_inner);
        if allowed.len() >= ALLOWED_MAX {
            allowed.pop_front();
        }
        allowed.push_back((token.to_owned(), Instant::now()));
        Ok(None)
    }
}

fn access(user: UserInfo) -> SubjectAccessReview {
    SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: user.username,
            uid: user.uid,
            groups: user.groups,
            extra: user.extra,
            non_resource_attributes: Some(NonResourceAttributes {
                path: Some("/metrics".to_owned()),
                verb: Some("get".to_owned()),
            }),
            resource_attributes: None,
        },
        ..SubjectAccessReview::default()
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty() && token.len() <= TOKEN_MAX).then_some(token)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;
    use kube::client::Body;
    use serde_json::json;

    use super::*;

    /// An API server that knows one token.
    fn guard() -> Guard {
        let service = tower::service_fn(|request: http::Request<Body>| async move {
            let is_access = request.uri().path().ends_with("/subjectaccessreviews");
            let body = request.into_body().collect_bytes().await.unwrap_or_default();
            let is_known = String::from_utf8_lossy(&body).contains("known");
            let status = if is_access {
                json!({ "allowed": true })
            } else {
                json!({ "authenticated": is_known, "user": { "username": "known" } })
            };
            let answer = json!({ "spec": {}, "status": status }).to_string();
            Ok::<_, kube::Error>(http::Response::new(Body::from(answer.into_bytes())))
        });
        Guard::new(Client::new(service, "default"))
    }

    fn bearer(token: &str) -> HeaderMap {
        let value = HeaderValue::from_str(&format!("Bearer {token}")).unwrap();
        HeaderMap::from_iter([(AUTHORIZATION, value)])
    }

    #[tokio::test(start_paused = true)]
    async fn wrong_tokens_cause_ten_reviews_a_second_at_most() {
        let guard = guard();
        let start = Instant::now();
        for number in 0..20 {
            let refused = guard.check(&bearer(&format!("wrong-{number}"))).await;
            assert_eq!(refused, Err(StatusCode::UNAUTHORIZED));
        }
        let expected = 19 * REFUSAL_PAUSE;
        assert!(
            (expected..expected * 11 / 10).contains(&start.elapsed()),
            "{:?}",
            start.elapsed()
        );
        guard.check(&bearer("known")).await.unwrap();
        let start = Instant::now();
        guard.check(&bearer("known")).await.unwrap();
        assert_eq!(start.elapsed(), Duration::ZERO, "a known token waits for nothing");
    }
}
