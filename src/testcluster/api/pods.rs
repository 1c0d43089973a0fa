//! Pod defaults of the real server that the test cluster or `kubectl describe` reads (`pkg/apis/core/v1/defaults.go`),
//! and the tolerations that admission adds to new pods (`DefaultTolerationSeconds`).

use serde_json::{Map, Value, json};

use super::object::list;

/// Fills in the defaults of a pod.
pub(crate) fn default(pod: &mut Value) {
    let defaults = [
        ("restartPolicy", json!("Always")),
        ("terminationGracePeriodSeconds", json!(30)),
        ("dnsPolicy", json!("ClusterFirst")),
        ("schedulerName", json!("default-scheduler")),
        ("enableServiceLinks", json!(true)),
        ("priority", json!(0)),
        ("preemptionPolicy", json!("PreemptLowerPriority")),
        ("securityContext", json!({})),
    ];
    let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut) else {
        return;
    };
    fill(spec, &defaults);
    each(spec.get_mut("volumes"), |volume| {
        if let Some(path) = volume.get_mut("hostPath").and_then(Value::as_object_mut) {
            fill(path, &[("type", json!(""))]);
        }
        for files in ["configMap", "secret"] {
            if let Some(files) = volume.get_mut(files).and_then(Value::as_object_mut) {
                fill(files, &[("defaultMode", json!(0o644))]);
            }
        }
    });
    for containers in ["initContainers", "containers"] {
        each(spec.get_mut(containers), default_container);
    }
}

fn default_container(container: &mut Map<String, Value>) {
    let image = container.get("image").and_then(Value::as_str).unwrap_or_default();
    let name = image.rsplit('/').next().unwrap_or_default();
    let is_latest = !image.contains('@') && name.split_once(':').is_none_or(|(_, tag)| tag == "latest");
    let pull = if is_latest { "Always" } else { "IfNotPresent" };
    let defaults = [
        ("imagePullPolicy", json!(pull)),
        ("resources", json!({})),
        ("terminationMessagePath", json!("/dev/termination-log")),
        ("terminationMessagePolicy", json!("File")),
    ];
    fill(container, &defaults);
    let resources = container.get_mut("resources").and_then(Value::as_object_mut);
    if let Some(resources) = resources
        && let Some(limits) = resources.get("limits").and_then(Value::as_object).cloned()
    {
        // Requests default to the limits.
        let requests = resources.entry("requests").or_insert_with(|| json!({}));
        if let Some(requests) = requests.as_object_mut() {
            for (name, limit) in limits {
                requests.entry(name).or_insert(limit);
            }
        }
    }
    each(container.get_mut("ports"), |port| {
        fill(port, &[("protocol", json!("TCP"))]);
    });
    each(container.get_mut("env"), |variable| {
        let field = variable
            .get_mut("valueFrom")
            .and_then(|from| from.get_mut("fieldRef"));
        if let Some(field) = field.and_then(Value::as_object_mut) {
            fill(field, &[("apiVersion", json!("v1"))]);
        }
    });
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        let Some(probe) = container.get_mut(probe).and_then(Value::as_object_mut) else {
            continue;
        };
        let defaults = [
            ("timeoutSeconds", json!(1)),
            ("periodSeconds", json!(10)),
            ("successThreshold", json!(1)),
            ("failureThreshold", json!(3)),
        ];
        fill(probe, &defaults);
        if let Some(get) = probe.get_mut("httpGet").and_then(Value::as_object_mut) {
            fill(get, &[("scheme", json!("HTTP")), ("path", json!("/"))]);
        }
    }
}

fn each(list: Option<&mut Value>, change: impl Fn(&mut Map<String, Value>)) {
    let list = list.and_then(Value::as_array_mut);
    for one in list.into_iter().flatten().filter_map(Value::as_object_mut) {
        change(one);
    }
}

fn fill(map: &mut Map<String, Value>, defaults: &[(&str, Value)]) {
    for (key, value) in defaults {
        map.entry(*key).or_insert_with(|| value.clone());
    }
}

/// Adds tolerations that keep a pod on an unavailable node for five minutes, unless it has its own.
pub(crate) fn tolerate(pod: &mut Value) {
    for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
        let has_toleration = list(pod, "/spec/tolerations").iter().any(|toleration| {
            let matches = |field: &str, any: &str, one: &str| {
                let value = toleration.get(field).and_then(Value::as_str).unwrap_or_default();
                value == any || value == one
            };
            matches("key", "", key) && matches("effect", "", "NoExecute")
        });
        let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut) else {
            return;
        };
        let tolerations = spec.entry("tolerations").or_insert_with(|| json!([]));
        if let (false, Some(tolerations)) = (has_toleration, tolerations.as_array_mut()) {
            let toleration =
                json!({ "key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300 });
            tolerations.push(toleration);
        }
    }
}

/// Returns the QoS class (`GetPodQOS`).
pub(crate) fn quality(pod: &Value) -> &'static str {
    let containers = || {
        let init = list(pod, "/spec/initContainers").iter();
        init.chain(list(pod, "/spec/containers"))
    };
    let of = |container: &Value, part: &str, resource: &str| {
        let amount = container
            .pointer(&format!("/resources/{part}/{resource}"))?
            .as_str()?;
        (amount != "0").then(|| amount.to_owned())
    };
    let asks = |container: &Value| {
        ["limits", "requests"].into_iter().any(|part| {
            ["cpu", "memory"]
                .into_iter()
                .any(|name| of(container, part, name).is_some())
        })
    };
    let sure = |container: &Value| {
        ["cpu", "memory"].into_iter().all(|name| {
            let limit = of(container, "limits", name);
            limit.is_some() && limit == of(container, "requests", name)
        })
    };
    if !containers().any(asks) {
        "BestEffort"
    } else if containers().all(sure) {
        "Guaranteed"
    } else {
        "Burstable"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(resources: &Value) -> Value {
        let mut pod = json!({ "spec": { "containers": [{ "name": "c", "resources": resources }] } });
        default(&mut pod);
        pod
    }

    #[test]
    fn a_limit_without_a_request_sets_the_request() {
        let pod = pod(&json!({ "limits": { "a/b": "1", "cpu": "2" }, "requests": { "cpu": "1" } }));
        let requests = &pod["spec"]["containers"][0]["resources"]["requests"];
        assert_eq!(*requests, json!({ "a/b": "1", "cpu": "1" }));
    }

    #[test]
    fn devices_do_not_affect_the_quality_of_service() {
        for (resources, quality) in [
            (json!({}), "BestEffort"),
            (json!({ "limits": { "a/b": "1" } }), "BestEffort"),
            (json!({ "limits": { "cpu": "1", "memory": "1Gi" } }), "Guaranteed"),
            (json!({ "limits": { "cpu": "1" } }), "Burstable"),
            (json!({ "requests": { "memory": "1Gi" } }), "Burstable"),
        ] {
            assert_eq!(super::quality(&pod(&resources)), quality, "{resources}");
        }
    }

    #[test]
    fn a_toleration_of_the_pod_is_not_overridden() {
        let seconds = |toleration: Value| {
            let mut pod = json!({ "spec": { "tolerations": [toleration] } });
            tolerate(&mut pod);
            list(&pod, "/spec/tolerations").len()
        };
        assert_eq!(seconds(json!({ "operator": "Exists" })), 1);
        assert_eq!(
            seconds(json!({ "key": "node.kubernetes.io/not-ready", "tolerationSeconds": 1 })),
            2
        );
        assert_eq!(seconds(json!({ "key": "other", "effect": "NoSchedule" })), 3);
    }
}
