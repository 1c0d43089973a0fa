//! values.yaml, its schema and its documentation agree, and the error for an invalid value names it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::chart::helm::{chart, merged, refusal, template, yaml};

pub(crate) fn schema() -> Value {
    let text = std::fs::read_to_string(chart("values.schema.json")).expect("the schema");
    serde_json::from_str(&text).expect("JSON")
}

/// Resolves a `$ref`.
pub(crate) fn resolve<'a>(root: &'a Value, schema: &'a Value) -> &'a Value {
    let reference = schema["allOf"][0]["$ref"]
        .as_str()
        .or_else(|| schema["$ref"].as_str());
    reference.map_or(schema, |reference| {
        let name = reference.trim_start_matches("#/definitions/");
        let found = &root["definitions"][name];
        assert!(found.is_object(), "{reference}");
        found
    })
}

/// Every value with its schema, by path (`node/cdiRoot`).
fn described(root: &Value) -> BTreeMap<String, Value> {
    fn walk(root: &Value, schema: &Value, path: &str, found: &mut BTreeMap<String, Value>) {
        let Some(properties) = schema["properties"].as_object() else {
            return;
        };
        // A parent chart sets `global` for all its subcharts.
        assert!(
            schema["additionalProperties"] == false || path == "/global",
            "{path} takes unknown values"
        );
        for (name, property) in properties {
            let path = format!("{path}/{name}");
            let description = property["description"].as_str().unwrap_or_default();
            assert!(description.ends_with('.'), "{path} has no description");
            found.insert(path.clone(), property.clone());
            // Kubernetes defines the fields of its own types.
            if resolve(root, property)["$comment"].is_null() {
                walk(root, resolve(root, property), &path, found);
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(root, root, "", &mut found);
    found
}

/// Every value of a file by path. A map with arbitrary keys counts as one value.
fn given(values: &Value, known: &BTreeMap<String, Value>) -> BTreeMap<String, Value> {
    fn walk(
        values: &Value,
        path: &str,
        known: &BTreeMap<String, Value>,
        found: &mut BTreeMap<String, Value>,
    ) {
        let has_names = path.is_empty() || known.keys().any(|name| name.starts_with(&format!("{path}/")));
        match values {
            Value::Object(map) if has_names => {
                for (name, value) in map {
                    let path = format!("{path}/{name}");
                    found.insert(path.clone(), value.clone());
                    walk(value, &path, known, found);
                }
            }
            _ => {}
        }
    }
    let mut found = BTreeMap::new();
    walk(values, "", known, &mut found);
    found
}

#[test]
fn every_value_has_a_default_a_schema_and_an_explanation() {
    let root = schema();
    let known = described(&root);
    let mut given: BTreeSet<String> = given(&yaml(&chart("values.yaml")), &known).into_keys().collect();
    // The default limits have no CPU, and lists are empty, so these have no entries below them.
    given.extend(
        known
            .keys()
            .filter(|path| path.starts_with("/node/seLinuxOptions/"))
            .cloned(),
    );
    let known: BTreeSet<String> = known.into_keys().collect();
    assert_eq!(
        (
            known.difference(&given).collect::<Vec<_>>(),
            given.difference(&known).collect::<Vec<_>>()
        ),
        (vec![], vec![]),
        "in the schema alone, in values.yaml alone"
    );

    // A comment precedes every value in values.yaml, except pure groups.
    let text = std::fs::read_to_string(chart("values.yaml")).expect("values.yaml");
    let mut comment = false;
    for line in text.lines() {
        let name = line.trim_start().split_once(':').map(|(name, _)| name);
        if line.trim_start().starts_with("# --") {
            comment = true;
            continue;
        }
        let ignored = line.trim_start().starts_with('#') || line.trim().is_empty() || line.contains("- ");
        if let Some(name) = name.filter(|_| !ignored) {
            let group = line.trim_end().ends_with(':');
            let of_resources = [
                "cpu",
                "memory",
                "effect",
                "operator",
                "topologyKey",
                "whenUnsatisfiable",
            ];
            assert!(
                comment || group || of_resources.contains(&name),
                "no comment before {line}"
            );
            comment = false;
        }
    }
}

#[test]
fn one_variant_gives_every_value() {
    let root = schema();
    let known = described(&root);
    let everything = given(&yaml(&chart("ci/everything-values.yaml")), &known);
    let missing: Vec<_> = known
        .keys()
        .filter(|path| !everything.contains_key(*path) && !path.starts_with("/node/seLinuxOptions/"))
        .collect();
    assert!(
        missing
            .iter()
            .all(|path| path.ends_with("/requests") || path.ends_with("/limits")),
        "{missing:?}"
    );
}

/// Sets a value at a path of an object.
fn put(values: &mut Value, path: &str, value: Value) {
    let mut at = values;
    for name in path.trim_start_matches('/').split('/') {
        if !at.is_object() {
            *at = Value::Object(Map::new());
        }
        at = &mut at[name];
    }
    *at = value;
}

/// Renders these values and asserts that Helm's error names each path.
pub(crate) fn assert_each_refused(values: &Value, paths: &[String], what: &str) {
    let file = tempfile::NamedTempFile::with_suffix(".json").expect("a file");
    std::fs::write(file.path(), values.to_string()).expect("written");
    let message = refusal(Some(file.path()), &[]);
    for path in paths {
        assert!(
            message.contains(&format!("at '{path}")),
            "{what} at {path} is not refused: {message}"
        );
    }
    println!("{} values refused as {what}", paths.len());
}

#[test]
fn a_value_of_another_type_is_refused_by_name() {
    let root = schema();
    let known = described(&root);
    let mut values = json!({});
    let mut paths = Vec::new();
    for path in known.keys() {
        // For a group, its members are tried instead.
        let group = known.keys().any(|other| other.starts_with(&format!("{path}/")));
        if group {
            continue;
        }
        // No value is a list of lists.
        put(&mut values, path, json!([[]]));
        paths.push(path.clone());
    }
    assert!(paths.len() > 60, "{}", paths.len());
    assert_each_refused(&values, &paths, "a list of lists");
}

#[test]
fn an_unknown_value_is_refused_at_any_depth() {
    let root = schema();
    let known = described(&root);
    let mut values = json!({});
    let mut groups: BTreeSet<String> = known
        .keys()
        .filter_map(|path| path.rsplit_once('/').map(|(group, _)| group.to_owned()))
        .collect();
    groups.retain(|group| !group.is_empty() && group != "/global");
    for group in &groups {
        put(&mut values, &format!("{group}/unknown"), json!(1));
    }
    assert!(groups.len() > 12, "{groups:?}");
    let groups: Vec<String> = groups.into_iter().collect();
    assert_each_refused(&values, &groups, "unknown");
    let message = refusal(None, &["--set=unknown=1"]);
    assert!(
        message.contains("additional properties 'unknown' not allowed"),
        "{message}"
    );
}

/// Fields unknown to Kubernetes, which would be dropped and so make an object less restrictive than intended.
fn of_kubernetes() {
    let term = |field: &str, value: Value| json!({ "nodeSelectorTerms": [{ field: [value] }] });
    let exists_with_values = json!({ "key": "a", "operator": "Exists", "values": ["b"] });
    let in_nothing = json!({ "key": "a", "operator": "In" });
    let peers = json!([
        { "namespaceSelector": { "matchLabel": { "a": "b" } } },
        { "ipBlock": { "cidr": "10.0.0.256/8" } },
        { "ipBlock": { "cidr": "10.0.0.0/8" }, "podSelector": {} },
        { "podSelector": { "matchExpressions": [in_nothing] } },
        { "ipBlock": { "cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"] } },
        { "ipBlock": { "cidr": "fe80::/10" } },
    ]);
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    let preferred = "preferredDuringSchedulingIgnoredDuringExecution";
    let values = json!({
        "networkPolicy": { "metricsFrom": peers },
        "classes": [
            { "name": "a", "kind": "a", "suitableNodes": term("matchExpression", json!({})) },
            { "name": "b", "kind": "a", "suitableNodes": term("matchExpressions", exists_with_values) },
            { "name": "c", "kind": "a", "suitableNodes": term("matchFields", json!({
                "key": "metadata.name", "operator": "In", "values": ["node-0"] })) },
        ],
        "controller": {
            "affinity": { "nodeAfinity": {}, "podAntiAffinity": { preferred: [{ "weight": 101, "podAffinityTerm": {} }] } },
            "topologySpreadConstraints": [{
                "maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": { "matchLabel": {} },
            }],
            "extraEnv": [
                { "name": "A", "valueFrom": { "feldRef": {} } },
                { "name": "B", "value": "", "valueFrom": { "fieldRef": { "fieldPath": "spec.nodeName" } } },
                { "name": "C", "valueFrom": { "secretKeyRef": { "name": "c", "key": "c" } } },
            ],
        },
        "node": { "affinity": { "nodeAffinity": { required: term("matchExpressions", json!({ "key": "a", "operator": "Like" })) } } },
    });
    let terms = "suitableNodes/nodeSelectorTerms/0";
    let wrong = [
        "/networkPolicy/metricsFrom/0/namespaceSelector".to_owned(),
        "/networkPolicy/metricsFrom/1/ipBlock/cidr".to_owned(),
        "/networkPolicy/metricsFrom/2'".to_owned(),
        "/networkPolicy/metricsFrom/3/podSelector/matchExpressions/0'".to_owned(),
        format!("/classes/0/{terms}'"),
        format!("/classes/1/{terms}/matchExpressions/0/values"),
        "/controller/affinity'".to_owned(),
        format!("/controller/affinity/podAntiAffinity/{preferred}/0/weight"),
        format!("/controller/affinity/podAntiAffinity/{preferred}/0/podAffinityTerm"),
        "/controller/topologySpreadConstraints/0/labelSelector".to_owned(),
        "/controller/extraEnv/0/valueFrom'".to_owned(),
        "/controller/extraEnv/1'".to_owned(),
        format!("/node/affinity/nodeAffinity/{required}/nodeSelectorTerms/0/matchExpressions/0/operator"),
    ];
    assert_each_refused(&values, &wrong, "unknown to Kubernetes");
    let file = tempfile::NamedTempFile::with_suffix(".json").expect("a file");
    std::fs::write(file.path(), values.to_string()).expect("written");
    let message = refusal(Some(file.path()), &[]);
    for right in [
        "metricsFrom/4",
        "metricsFrom/5",
        "classes/2",
        "controller/extraEnv/2",
    ] {
        assert!(!message.contains(right), "{right} is refused: {message}");
    }
}

#[test]
fn values_invalid_for_program_or_kubernetes_are_refused() {
    let wrong = [
        ("/driverName", json!("3com.example")),
        ("/commonLabels", json!({ "app.kubernetes.io/name": "mine" })),
        (
            "/controller/podLabels",
            json!({ "app.kubernetes.io/instance": "x" }),
        ),
        ("/node/podLabels/a", json!({ "a": "no label" })),
        ("/fullnameOverride", json!("a.b")),
        ("/image/repository", json!("has spaces")),
        ("/image/tag", json!("has/slash")),
        ("/image/digest", json!("sha256:short")),
        ("/image/pullPolicy", json!("Sometimes")),
        ("/logging/format", json!("xml")),
        ("/logging/verbosity", json!(10)),
        ("/admissionPolicy/enabled", json!("maybe")),
        ("/networkPolicy/apiServerPorts/0", json!([70000])),
        ("/controller/replicas", json!(0)),
        ("/controller/driverCallTimeout", json!("30")),
        ("/controller/leaderElection/leaseDuration", json!("soon")),
        ("/controller/podDisruptionBudget/maxUnavailable", json!(0)),
        ("/controller/extraEnv/0", json!([{ "value": "x" }])),
        (
            "/controller/tolerations/0/operator",
            json!([{ "operator": "Like" }]),
        ),
        (
            "/controller/topologySpreadConstraints/0",
            json!([{ "maxSkew": 1 }]),
        ),
        ("/controller/resources/limits/memory", json!({ "memory": "much" })),
        ("/node/nodeSelector", json!({ "a b": "c" })),
        ("/node/podAnnotations", json!({ "a b": "c" })),
        ("/monitoring/serviceMonitor/labels/a", json!({ "a": "c d!" })),
        ("/node/kubeletRoot", json!("/var/../etc")),
        ("/node/cdiRoot", json!("relative")),
        ("/node/devicePluginDir", json!("/")),
        ("/node/updateStrategy/type", json!("Recreate")),
        ("/node/updateStrategy/maxUnavailable", json!("0%")),
    ];
    let mut values = json!({});
    let mut paths = Vec::new();
    for (path, value) in wrong {
        let place = path
            .trim_end_matches("/operator")
            .trim_end_matches("/memory")
            .trim_end_matches("/a")
            .trim_end_matches("/0");
        put(&mut values, place, value);
        paths.push(path.to_owned());
    }
    assert_each_refused(&values, &paths, "wrong");

    of_kubernetes();

    // A kind with these fields beside, or instead of, its name and paths.
    let kinds = [
        ("/name", json!({ "name": "No" })),
        ("/paths", json!({ "paths": [] })),
        ("/paths/0", json!({ "paths": ["/etc/passwd"] })),
        ("/paths/0", json!({ "paths": ["/dev/../etc/passwd"] })),
        ("/paths/0", json!({ "paths": ["/dev/**"] })),
        ("/mode", json!({ "mode": "neither" })),
        ("", json!({ "mode": "both" })),
        (
            "",
            json!({ "mode": "both", "resourceName": "example.com/x", "shares": 2 }),
        ),
        ("", json!({ "mode": "split", "resourceName": "example.com/x" })),
        ("", json!({ "extendedResourceDevices": ["x"] })),
        ("", json!({ "cdiDevices": true })),
        ("", json!({ "mode": "extended-resource" })),
        ("", json!({ "resourceName": "example.com/x" })),
        (
            "/resourceName",
            json!({ "mode": "extended-resource", "resourceName": "x" }),
        ),
        ("/permissions", json!({ "permissions": "rr" })),
        ("/permissions", json!({ "permissions": "x" })),
        ("", json!({ "unknown": 1 })),
    ];
    assert_entries_refused(
        "deviceKinds",
        &json!({ "name": "a", "paths": ["/dev/x"] }),
        &kinds,
    );

    let classes = [
        ("/name", json!({ "name": "No_Name" })),
        ("", json!({ "kind": null })),
        ("/policy", json!({ "policy": "Best" })),
        ("/selectors/0", json!({ "selectors": ["true"] })),
        (
            "/suitableNodes",
            json!({ "suitableNodes": { "matchLabels": {} } }),
        ),
    ];
    assert_entries_refused("classes", &json!({ "name": "a", "kind": "a" }), &classes);
}

/// Only kilo is lower case, and it alone has another letter for its power of two.
#[test]
fn a_quantity_has_a_suffix_of_kubernetes() {
    for (quantity, is_valid) in [
        ("65536Ki", true),
        ("65536ki", false),
        ("64k", true),
        ("64K", false),
        ("64Mi", true),
        ("1.5G", true),
        ("1Ei", true),
        ("100m", true),
        ("100mi", false),
        ("2", true),
    ] {
        let limit = format!("--set-string=node.resources.limits.memory={quantity}");
        let source = "node.extraEnv[0].valueFrom.resourceFieldRef";
        let divisor = format!(
            "--set-string=node.extraEnv[0].name=A,{source}.resource=limits.memory,{source}.divisor={quantity}"
        );
        for set in [&limit, &divisor] {
            let output = template(None, &[set]);
            let message = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.success(), is_valid, "{set}: {message}");
        }
    }
}

/// Renders a list of such entries, each with other fields, and asserts that Helm's error names the place in each.
fn assert_entries_refused(list: &str, plain: &Value, entries: &[(&str, Value)]) {
    let (mut paths, mut values) = (Vec::new(), Vec::new());
    for (index, (place, fields)) in entries.iter().enumerate() {
        paths.push(format!("/{list}/{index}{place}"));
        values.push(merged(plain, fields));
    }
    assert_each_refused(&json!({ list: values }), &paths, "an invalid entry");
}
