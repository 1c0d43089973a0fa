//! OpenAPI v3, as far as kubectl reads it before a write: which kinds support server-side field validation and dry run
//! (`QueryParamVerifierV3` of cli-runtime). Without schemas, `kubectl explain` does not work.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::kinds::ResourceKind;

/// Content type of the OpenAPI v2 document, which kubectl requests if v3 lacks a kind. An empty document (zero bytes)
/// means that v2 lacks it as well.
pub(crate) const PROTOBUF: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";

/// Returns `api/v1` or `apis/<group>/<version>`.
fn path_of(kind: &ResourceKind) -> String {
    let root = if kind.group.is_empty() { "api" } else { "apis" };
    format!("{root}/{}", kind.api_version())
}

/// `/openapi/v3`: the URL of each group version's document.
pub(crate) fn index(kinds: &[Arc<ResourceKind>]) -> Value {
    let paths: BTreeMap<String, Value> = kinds
        .iter()
        .map(|kind| {
            let path = path_of(kind);
            let url = format!("/openapi/v3/{path}");
            (path, json!({ "serverRelativeURL": url }))
        })
        .collect();
    json!({ "paths": paths })
}

/// `/openapi/v3/<path>`: declares that each kind accepts `fieldValidation` and `dryRun` on PATCH; `None` if the version
/// does not exist.
pub(crate) fn document(kinds: &[Arc<ResourceKind>], path: &str) -> Option<Value> {
    let mut paths = Map::new();
    let version = kinds.first().map(|kind| kind.mode.kubernetes());
    let parameter = |name: &str| json!({ "name": name, "in": "query", "schema": { "type": "string", "uniqueItems": true } });
    for kind in kinds.iter().filter(|kind| path_of(kind) == path) {
        let within = if kind.namespaced {
            "namespaces/{namespace}/"
        } else {
            ""
        };
        let patch = json!({
            "x-kubernetes-action": "patch",
            "x-kubernetes-group-version-kind": { "group": kind.group, "version": kind.version, "kind": kind.kind },
            "parameters": [parameter("fieldValidation"), parameter("dryRun")],
            "responses": { "200": { "description": "OK" } },
        });
        let place = format!("/{path}/{within}{}/{{name}}", kind.plural);
        paths.insert(place, json!({ "patch": patch }));
    }
    let info = json!({ "title": "Kubernetes", "version": version });
    (!paths.is_empty()).then(|| json!({ "openapi": "3.0.0", "info": info, "paths": paths }))
}

#[cfg(test)]
mod tests {
    use super::super::kinds::{ClusterMode, built_in};
    use super::*;

    #[test]
    fn every_openapi_group_version_names_its_kinds() {
        let kinds = built_in(ClusterMode::Classic);
        let index = index(&kinds);
        let paths = index["paths"].as_object().unwrap();
        assert_eq!(paths["api/v1"]["serverRelativeURL"], "/openapi/v3/api/v1");
        let named: usize = paths
            .keys()
            .map(|path| {
                let document = document(&kinds, path).unwrap();
                document["paths"].as_object().unwrap().len()
            })
            .sum();
        assert_eq!(named, kinds.len());
        assert_eq!(document(&kinds, "apis/nobody/v1"), None);
    }
}
