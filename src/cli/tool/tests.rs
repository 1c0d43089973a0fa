//! Flags, and an API server that gives fixed answers, for tests of commands.

use std::collections::BTreeMap;
use std::sync::Arc;

use http::{Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

use super::as_kubectl_plugin;

/// The API of claims.
const CLAIMS: &str = "/apis/resource.k8s.io/";

/// The arguments of a command.
pub(super) fn parsed<A: clap::Args>(flags: &[&str]) -> A {
    let command = A::augment_args(clap::Command::new("drayman"));
    let words = ["drayman"].iter().chain(flags);
    A::from_arg_matches(&command.try_get_matches_from(words).unwrap()).unwrap()
}

/// The objects of a server, by path of their list, with or without its query.
#[derive(Clone, Debug, Default)]
pub(super) struct Server {
    answers: BTreeMap<String, (u16, Value)>,
}

impl Server {
    /// A server of Kubernetes 1.37 without objects.
    pub(super) fn structured() -> Self {
        let mut server = Self::default();
        let version = json!({
            "major": "1", "minor": "37", "gitVersion": "v1.37.2", "gitCommit": "", "gitTreeState": "", "buildDate": "",
            "goVersion": "", "compiler": "", "platform": "",
        });
        server.answers.insert("/version".to_owned(), (200, version));
        let resources = json!({
            "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "resource.k8s.io/v1", "resources": [],
        });
        server
            .answers
            .insert("/apis/resource.k8s.io/v1".to_owned(), (200, resources));
        for path in [
            "/api/v1/nodes",
            "/api/v1/pods",
            "/api/v1/namespaces/shop/events",
            "/apis/resource.k8s.io/v1/deviceclasses",
            "/apis/resource.k8s.io/v1/resourceclaims",
            "/apis/resource.k8s.io/v1/resourceslices",
        ] {
            server = server.with(path, &[]);
        }
        server
    }

    /// Sets the objects of a list.
    pub(super) fn with(mut self, path: &str, items: &[Value]) -> Self {
        let metadata = json!({ "resourceVersion": "1" });
        let list = json!({ "kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items });
        self.answers.insert(path.to_owned(), (200, list));
        self
    }

    /// Adds one object.
    pub(super) fn with_object(mut self, path: &str, object: Value) -> Self {
        self.answers.insert(path.to_owned(), (200, object));
        self
    }

    /// Forbids a list.
    pub(super) fn without_right(self, path: &str) -> Self {
        self.failing(path, 403)
    }

    /// Answers with an error.
    pub(super) fn failing(mut self, path: &str, code: u16) -> Self {
        self.answers
            .insert(path.to_owned(), (code, status(code, "Refused")));
        self
    }

    pub(super) fn client(self) -> Client {
        let answers = Arc::new(self.answers);
        let serve = move |request: Request<Body>| {
            let (uri, path) = (request.uri().to_string(), request.uri().path());
            // A path of an API that is not served has no Status as its answer.
            let is_served =
                !path.starts_with(CLAIMS) || answers.keys().any(|known| known.starts_with(CLAIMS));
            let (code, body) = match answers.get(&uri).or_else(|| answers.get(path)) {
                Some((code, body)) => (*code, body.to_string()),
                None if is_served => (404, status(404, "NotFound").to_string()),
                None => (404, "404 page not found\n".to_owned()),
            };
            let response = Response::builder().status(code);
            let body = Body::from(body.into_bytes());
            async move { response.body(body) }
        };
        Client::new(tower::service_fn(serve), "shop")
    }
}

fn status(code: u16, reason: &str) -> Value {
    json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": reason, "code": code })
}

#[test]
fn the_programs_name_makes_it_a_kubectl_plugin() {
    let name = |program: &str| as_kubectl_plugin(vec![program.into()]).remove(0);
    assert_eq!(name("/usr/local/bin/kubectl-drayman"), "kubectl drayman");
    assert_eq!(name("/usr/local/bin/drayman"), "/usr/local/bin/drayman");
    assert!(as_kubectl_plugin(Vec::new()).is_empty());
}
