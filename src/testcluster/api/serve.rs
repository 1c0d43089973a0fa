//! HTTP layer: decodes requests and encodes responses.

use std::net::SocketAddr;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderValue, USER_AGENT, WARNING};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::deletion::{Deletion, wrong_dry_run};
use super::discovery;
use super::field_error::FieldError;
use super::kinds::ResourcePath;
use super::openapi;
use super::patch::{JSON_PATCH, MERGE_PATCH, Patch};
use super::query::{self, Query, list_query};
use super::server::{ApiResponse, ApiServer, Unknown, WriteOptions, list_of};
use super::status_error::StatusError;
use super::table::table;
use super::watch::{WatchQuery, watch};

/// Maximum size of a request body in bytes (`MaxRequestBodyBytes`).
const BODY_MAX: usize = 3 * 1024 * 1024;

impl ApiServer {
    /// Returns the server as a service, which a [`kube::Client`] can use without a socket.
    pub fn router(&self) -> Router {
        Router::new().fallback(handle).with_state(self.clone())
    }

    /// Returns an in-process client of this server.
    pub fn client(&self) -> kube::Client {
        kube::Client::new(self.router(), "default")
    }

    /// Serves over TCP on a free loopback port until the token is cancelled. There is no authentication: any local user
    /// has full access.
    pub async fn listen(&self, shutdown: CancellationToken) -> std::io::Result<SocketAddr> {
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let router = self.router();
        tokio::spawn(async move {
            tokio::select! {
                // Never fails: failed connections are dropped.
                _ = axum::serve(listener, router) => {}
                () = shutdown.cancelled() => {}
            }
        });
        Ok(address)
    }
}

/// Returns a kubeconfig for a server that listens on an address.
pub fn kubeconfig(address: SocketAddr) -> String {
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "stage", "cluster": { "server": format!("http://{address}") } }],
        "users": [{ "name": "stage", "user": {} }],
        "contexts": [{ "name": "stage", "context": { "cluster": "stage", "user": "stage", "namespace": "default" } }],
        "current-context": "stage",
    });
    // JSON is valid YAML.
    format!("{config:#}\n")
}

async fn handle(State(server): State<ApiServer>, request: Request) -> Response {
    match answer(&server, request).await {
        Ok(response) => response,
        Err(refusal) => respond(refusal.code, &refusal.status()),
    }
}

fn respond(code: u16, body: &Value) -> Response {
    let code = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let json = [(CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    (code, json, body.to_string()).into_response()
}

async fn answer(server: &ApiServer, request: Request) -> Result<Response, StatusError> {
    let (parts, body) = request.into_parts();
    let path: Vec<&str> = parts
        .uri
        .path()
        .split('/')
        .filter(|part| !part.is_empty())
        .collect();
    let query = Query::read(parts.uri.query().unwrap_or_default());
    if let ["healthz" | "readyz" | "livez", ..] = path.as_slice() {
        return Ok("ok".into_response());
    }
    if let ["openapi", "v2"] = path.as_slice() {
        let protobuf = HeaderValue::from_static(openapi::PROTOBUF);
        return Ok(([(CONTENT_TYPE, protobuf)], Body::empty()).into_response());
    }
    if let Some(found) = discovered(server, &path) {
        return found
            .map(|found| respond(200, &found))
            .ok_or_else(StatusError::no_path);
    }
    let target = target(server, &path).ok_or_else(StatusError::no_path)?;
    let as_table = header(&parts.headers, &ACCEPT).contains("as=Table");
    if parts.method == Method::GET {
        return read(server, target, &query, as_table);
    }
    let body = to_bytes(body, BODY_MAX)
        .await
        .map_err(|_| StatusError::too_large(BODY_MAX))?;
    let content_type = header(&parts.headers, &CONTENT_TYPE);
    let options = WriteOptions {
        manager: match query.text("fieldManager") {
            "" => header(&parts.headers, &USER_AGENT)
                .split('/')
                .next()
                .unwrap_or_default()
                .to_owned(),
            manager => manager.to_owned(),
        },
        force: query.is("force"),
        strict: query.text("fieldValidation") == "Strict",
        patches: matches!(content_type, JSON_PATCH | MERGE_PATCH),
        applies: false,
        dry_run: query.given("dryRun").is_some(),
        unknown: Unknown::default(),
    };
    let validation = query.text("fieldValidation");
    if parts.method != Method::DELETE {
        let dry_run: Vec<String> = query.given("dryRun").map(str::to_owned).into_iter().collect();
        let mut errors: Vec<FieldError> = wrong_dry_run(&dry_run).into_iter().collect();
        if !matches!(validation, "" | "Ignore" | "Strict" | "Warn") {
            let supported = ["", "Ignore", "Strict", "Warn"];
            errors.push(FieldError::not_supported(
                "fieldValidation",
                validation,
                &supported,
            ));
        }
        if !errors.is_empty() {
            return Err(StatusError::write_options(parts.method.as_str(), &errors));
        }
    }
    let warns = matches!(validation, "" | "Warn");
    let (code, body) = write(
        server,
        &parts.method,
        &target,
        &query,
        content_type,
        &body,
        &options,
    )?;
    let mut response = respond(code, &body);
    for warning in options.unknown.take().iter().filter(|_| warns) {
        // Formats `299 - "unknown field \"spec.color\""`; omits warnings that are not valid header values.
        if let Ok(value) = HeaderValue::from_str(&format!("299 - {warning:?}")) {
            response.headers_mut().append(WARNING, value);
        }
    }
    Ok(response)
}

fn write(
    server: &ApiServer,
    method: &Method,
    target: &ResourcePath,
    query: &Query,
    content_type: &str,
    body: &[u8],
    options: &WriteOptions,
) -> Result<ApiResponse, StatusError> {
    let named = !target.name.is_empty();
    if !named && (target.kind.namespaced && target.namespace.is_empty()) {
        // A cluster-wide collection of a namespaced kind is read-only.
        return Err(match target.kind.definition {
            Some(_) => StatusError::no_path(),
            None => StatusError::method_not_allowed(),
        });
    }
    if named && !target.kind.has(&target.subresource) {
        return Err(StatusError::no_path());
    }
    match method.as_str() {
        "POST" if !named || !target.subresource.is_empty() => {
            server.create(target, object(content_type, body)?, options)
        }
        "PUT" if named => server.replace(target, object(content_type, body)?, options),
        "PATCH" if named => {
            let patch = Patch::read(&target.kind, content_type, body)?;
            let applies = matches!(patch, Patch::Apply(_));
            if applies && query.text("fieldManager").is_empty() {
                return Err(StatusError::patch_options(
                    "fieldManager",
                    "is required for apply patch",
                ));
            }
            if !applies && !query.text("force").is_empty() {
                return Err(StatusError::patch_options(
                    "force",
                    "may not be specified for non-apply patch",
                ));
            }
            server.patch(target, &patch, options)
        }
        "DELETE" if target.subresource.is_empty() && (named || !target.kind.is("", "namespaces")) => {
            let options = (!body.is_empty())
                .then(|| object(content_type, body))
                .transpose()
                .map_err(|refusal| match refusal.code {
                    // The real server returns an internal error here instead of a bad request.
                    400 => StatusError::internal(refusal.message),
                    _ => refusal,
                })?;
            let asked = Deletion::read(options, query)?;
            if named {
                server.delete(target, &asked)
            } else {
                let among = list_query(target, query)?;
                query::version(&among.version).map_err(|refusal| {
                    StatusError::bad_request(format!("invalid resource version: {}", refusal.message))
                })?;
                server.delete_collection(target, &among, &asked)
            }
        }
        _ => Err(StatusError::method_not_allowed()),
    }
}

/// Decodes the object in a body.
fn object(content_type: &str, body: &[u8]) -> Result<Value, StatusError> {
    let refused = |error: &dyn std::fmt::Display| {
        StatusError::bad_request(format!(
            "the object provided is unrecognized (must be of type JSON): {error}"
        ))
    };
    match content_type.split(';').next().unwrap_or_default().trim() {
        "application/json" | "" => serde_json::from_slice(body).map_err(|error| refused(&error)),
        "application/yaml" => {
            let text = std::str::from_utf8(body).map_err(|error| refused(&error))?;
            serde_saphyr::from_str(text).map_err(|error| refused(&error))
        }
        _ => Err(StatusError::unsupported_media_type(
            "application/json, application/yaml",
        )),
    }
}

fn read(
    server: &ApiServer,
    target: ResourcePath,
    query: &Query,
    as_table: bool,
) -> Result<Response, StatusError> {
    if query.is("watch") {
        let asked = list_query(&target, query)?;
        let stream = watch(
            server,
            target,
            WatchQuery {
                selector: asked.selector,
                version: asked.version,
                bookmarks: query.is("allowWatchBookmarks"),
                timeout: query.number("timeoutSeconds")?,
                table: as_table,
            },
        )?;
        let json = [(CONTENT_TYPE, HeaderValue::from_static("application/json"))];
        return Ok((json, Body::from_stream(stream)).into_response());
    }
    if !target.name.is_empty() {
        if !matches!(target.subresource.as_str(), "" | "status") {
            return Err(StatusError::no_path());
        }
        query::version(query.text("resourceVersion"))?;
        let (code, found) = server.get(&target)?;
        let found = if as_table {
            let metadata = json!({ "resourceVersion": found["metadata"]["resourceVersion"] });
            table(&target.kind, metadata, &[found], server.time())
        } else {
            found
        };
        return Ok(respond(code, &found));
    }
    let (metadata, items) = server.list(&target, &list_query(&target, query)?)?;
    Ok(respond(
        200,
        &if as_table {
            table(&target.kind, metadata, &items, server.time())
        } else {
            list_of(&target.kind, metadata, items)
        },
    ))
}

/// Answers discovery requests; `None` if the path refers to objects.
fn discovered(server: &ApiServer, path: &[&str]) -> Option<Option<Value>> {
    let state = server.state();
    match path {
        ["version"] => Some(Some(discovery::version(server.mode()))),
        ["api"] => Some(Some(discovery::core())),
        ["openapi", "v3"] => Some(Some(openapi::index(&state.kinds))),
        ["openapi", "v3", rest @ ..] => Some(openapi::document(&state.kinds, &rest.join("/"))),
        ["apis"] => Some(Some(discovery::groups(&state.kinds))),
        ["apis", group] => Some(discovery::group(&state.kinds, group)),
        ["api", version] => Some(discovery::resources(&state.kinds, "", version)),
        ["apis", group, version] => Some(discovery::resources(&state.kinds, group, version)),
        _ => None,
    }
}

/// Resolves a path to a target.
fn target(server: &ApiServer, path: &[&str]) -> Option<ResourcePath> {
    let (group, version, rest) = match path {
        ["api", version, rest @ ..] => ("", *version, rest),
        ["apis", group, version, rest @ ..] => (*group, *version, rest),
        _ => return None,
    };
    let (namespace, rest) = match rest {
        ["namespaces", _, "status" | "finalize"] | ["namespaces"] | ["namespaces", _] => ("", rest),
        ["namespaces", namespace, rest @ ..] => (*namespace, rest),
        rest => ("", rest),
    };
    let (plural, name, subresource) = match rest {
        [plural] => (*plural, "", ""),
        [plural, name] => (*plural, *name, ""),
        [plural, name, subresource] => (*plural, *name, *subresource),
        _ => return None,
    };
    let kind = server.kind(group, version, plural)?;
    // A namespaced object requires a namespace, and a cluster-scoped one must not have any.
    if kind.namespaced == namespace.is_empty() && !(kind.namespaced && name.is_empty()) {
        return None;
    }
    Some(ResourcePath::new(kind, namespace, name, subresource))
}

fn header<'a>(headers: &'a HeaderMap, name: &axum::http::HeaderName) -> &'a str {
    headers
        .get(name)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
}
