//! Rendered manifests: names, labels, optional parts, CRDs, alerts and the dashboard.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::{Value, json};

use crate::chart::helm::{
    MODES, arguments, chart, object, objects, one_kind, pod_spec, render, text, variants_and_modes,
};

#[test]
fn selectors_stay_the_same_from_release_to_release() {
    for (variant, mode) in &variants_and_modes() {
        for owner in render(Some(variant), mode) {
            if !["Deployment", "DaemonSet"].contains(&owner["kind"].as_str().unwrap_or_default()) {
                continue;
            }
            let selector = &owner["spec"]["selector"]["matchLabels"];
            let Some(selector) = selector.as_object() else {
                continue;
            };
            let mut keys = vec![
                "app.kubernetes.io/component",
                "app.kubernetes.io/instance",
                "app.kubernetes.io/name",
            ];
            let fullname = ["drayman-node", "devices-node"];
            let name = owner["metadata"]["name"].as_str().expect("a name");
            if owner["kind"] == "DaemonSet" && !fullname.contains(&name) {
                keys.push("drayman.dev/node-pool");
            }
            assert!(selector.keys().eq(keys), "{name} of {variant:?}: {selector:?}");
            if let Some(labels) = owner["spec"]["template"]["metadata"]["labels"].as_object() {
                for (key, value) in selector {
                    assert_eq!(labels.get(key), Some(value));
                }
            }
        }
    }
}

#[test]
fn every_object_belongs_to_its_release_and_namespace() {
    const CLUSTER_WIDE: [&str; 7] = [
        "ClusterRole",
        "ClusterRoleBinding",
        "DeviceClass",
        "DeviceClassParameters",
        "ResourceClass",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    ];
    for (variant, mode) in &variants_and_modes() {
        for object in render(Some(variant), mode) {
            let what = format!("{} {} of {variant:?}", object["kind"], object["metadata"]["name"]);
            let labels = &object["metadata"]["labels"];
            assert_eq!(labels["app.kubernetes.io/instance"], "drayman", "{what}");
            assert_eq!(labels["app.kubernetes.io/managed-by"], "Helm", "{what}");
            let kind = object["kind"].as_str().expect("a kind");
            let namespace = object["metadata"]["namespace"].as_str();
            // Events of Nodes are in the namespace default, and so is the Role to write them.
            let of_events = matches!(kind, "Role" | "RoleBinding")
                && object["metadata"]["name"]
                    .as_str()
                    .is_some_and(|name| name.contains("-node."));
            let expected = if of_events { "default" } else { "drayman" };
            let expected = (!CLUSTER_WIDE.contains(&kind)).then_some(expected);
            assert_eq!(namespace, expected, "{what}");
        }
    }
}

#[test]
fn releases_of_one_name_in_two_namespaces_share_nothing() {
    let names = |namespace: &str| -> BTreeSet<String> {
        render(None, &["--namespace", namespace])
            .iter()
            .filter(|object| {
                let namespace = &object["metadata"]["namespace"];
                namespace.is_null() || namespace == "default"
            })
            .map(|object| format!("{} {}", object["kind"], object["metadata"]["name"]))
            .collect()
    };
    let (one, other) = (names("one"), names("other"));
    assert!(one.len() > 5 && one.is_disjoint(&other), "{one:?} {other:?}");
}

/// The API server rejects a name or label that YAML reads as a number.
#[test]
fn names_of_digits_are_rendered_as_texts() {
    fn assert_texts(value: &Value, what: &str) {
        match value {
            Value::Object(map) => {
                for (key, value) in map {
                    let names = ["namespace", "app.kubernetes.io/name", "drayman.dev/node-pool"];
                    assert!(
                        !names.contains(&key.as_str()) || value.is_string(),
                        "{what}: {key}"
                    );
                    assert_texts(value, what);
                }
            }
            Value::Array(list) => {
                for value in list {
                    assert_texts(value, what);
                }
            }
            _ => {}
        }
    }
    let more = [
        "--set-string=namespaceOverride=1,nameOverride=2",
        "--set-json=nodePools=[{\"name\":\"3\",\"nodeSelector\":{\"example.com/pool\":\"a\"}}]",
    ];
    for mode in MODES {
        for object in one_kind(&[mode, &more].concat()) {
            assert_texts(
                &object,
                &format!("{} {}", object["kind"], object["metadata"]["name"]),
            );
        }
    }
}

/// The parser rejects duplicate keys, as kustomize does.
#[test]
fn a_label_of_one_object_overrides_the_common_label() {
    let mut set = vec!["--set=commonLabels.release=common".to_owned()];
    let parts = ["serviceMonitor", "prometheusRule", "dashboard"];
    for part in parts {
        set.push(format!(
            "--set=monitoring.{part}.enabled=true,monitoring.{part}.labels.release={part}"
        ));
    }
    let set: Vec<&str> = set.iter().map(String::as_str).collect();
    let rendered = one_kind(&set);
    for (kind, name, part) in [
        ("ServiceMonitor", "drayman", parts[0]),
        ("PrometheusRule", "drayman", parts[1]),
        ("ConfigMap", "drayman-dashboard", parts[2]),
    ] {
        assert_eq!(
            object(&rendered, kind, name)["metadata"]["labels"]["release"],
            part
        );
    }
    let daemon_set = object(&rendered, "DaemonSet", "drayman-node");
    assert_eq!(daemon_set["metadata"]["labels"]["release"], "common");
}

#[test]
fn without_a_lease_no_second_controller_runs_in_an_update() {
    let strategy = |elects: &str| {
        let rendered = render(
            None,
            &[&format!("--set=controller.leaderElection.enabled={elects}")],
        );
        let roles = rendered
            .iter()
            .filter(|object| object["kind"] == "Role" && object["metadata"]["namespace"] == "drayman")
            .count();
        let controller = object(&rendered, "Deployment", "drayman-controller");
        let elects = arguments(pod_spec(controller).expect("pods")).contains(&"--leader-elect".to_owned());
        (controller["spec"]["strategy"]["type"].clone(), elects, roles)
    };
    assert_eq!(strategy("true"), (json!("RollingUpdate"), true, 1));
    assert_eq!(strategy("false"), (json!("Recreate"), false, 0));
}

/// An affinity that keeps controllers apart would leave no node to a Job.
#[test]
fn a_job_runs_where_the_controller_or_else_a_companion_may() {
    let to = |key: &str| {
        let term = json!({ "matchExpressions": [{ "key": key, "operator": "Exists" }] });
        json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [term] } } })
    };
    let mut set = vec!["--set=crds.upgrade=true,controller.tolerations[0].key=controllers".to_owned()];
    for component in ["controller", "node"] {
        let affinity = &to(component)["nodeAffinity"];
        set.push(format!("--set-json={component}.affinity.nodeAffinity={affinity}"));
    }
    let set: Vec<&str> = set.iter().map(String::as_str).collect();
    let tolerated = |key: &str| json!({ "key": key, "operator": "Exists" });
    for (mode, jobs, selector, tolerations, component) in [
        (
            MODES[0],
            &["devices-crds", "devices-uninstall"][..],
            json!({ "kubernetes.io/os": "linux" }),
            json!([{ "key": "controllers" }]),
            "controller",
        ),
        (
            MODES[1],
            &["devices-uninstall"],
            json!({ "example.com/devices": "true", "kubernetes.io/os": "linux" }),
            json!([tolerated("example.com/devices"), tolerated("example.com/pool")]),
            "node",
        ),
    ] {
        let rendered = render(Some(&chart("ci/everything-values.yaml")), &[mode, &set].concat());
        for job in jobs {
            let spec = pod_spec(object(&rendered, "Job", job)).expect("pods");
            assert_eq!(spec["nodeSelector"], selector, "{job} {mode:?}");
            assert_eq!(spec["tolerations"], tolerations, "{job} {mode:?}");
            assert_eq!(spec["affinity"], to(component), "{job} {mode:?}");
        }
    }
    // By default, a companion tolerates everything, and a Job needs a node that is ready.
    let rendered = render(None, MODES[1]);
    let spec = pod_spec(object(&rendered, "Job", "drayman-uninstall")).expect("pods");
    let control_plane = "node-role.kubernetes.io/control-plane";
    assert_eq!(
        spec["tolerations"],
        json!([{ "key": control_plane, "operator": "Exists", "effect": "NoSchedule" }])
    );
}

#[test]
fn the_definitions_that_helm_installs_are_those_of_the_program() {
    let installed: Vec<Value> = render(None, &["--include-crds"])
        .into_iter()
        .filter(|object| object["kind"] == "CustomResourceDefinition")
        .collect();
    let printed = Command::new(env!("CARGO_BIN_EXE_drayman"))
        .arg("crds")
        .output()
        .expect("the program starts");
    let mut printed = objects(&String::from_utf8(printed.stdout).expect("UTF-8"));
    printed.sort_by_key(|definition| definition["metadata"]["name"].to_string());
    assert_eq!(installed, printed);
    let names: BTreeSet<&str> = printed
        .iter()
        .filter_map(|definition| definition["metadata"]["name"].as_str())
        .collect();
    // The Job that updates the CRDs has rights for these only.
    let rendered = one_kind(&[]);
    let role = object(&rendered, "ClusterRole", "drayman-crds.drayman");
    let rules = role["rules"].as_array().expect("rules");
    assert_eq!(rules.len(), 1);
    let allowed: BTreeSet<&str> = rules[0]["resourceNames"]
        .as_array()
        .expect("names")
        .iter()
        .filter_map(Value::as_str)
        .collect();
    assert_eq!(allowed, names);
}

#[test]
fn alerts_select_series_of_their_release_only() {
    let alerts = |rendered: &[Value], name: &str| -> Vec<String> {
        let rules = object(rendered, "PrometheusRule", name);
        let rules = rules["spec"]["groups"][0]["rules"].as_array().expect("rules");
        for rule in rules {
            let expression = rule["expr"].as_str().expect("an expression");
            let asked = expression.matches('{').count();
            let ours = expression.matches("namespace=\"drayman\"").count();
            assert!(asked > 0 && asked == ours, "{expression}");
            // Other programs have series of these names, too.
            if expression.contains("rest_client_") || expression.contains("workqueue_") {
                let of_pods = expression.matches(&format!("pod=~\"{name}-")).count();
                assert_eq!(asked, of_pods, "{expression}");
            }
        }
        let names = rules.iter().map(|rule| rule["alert"].as_str().expect("a name"));
        names.map(str::to_owned).collect()
    };
    let everything = render(Some(&chart("ci/everything-values.yaml")), &[]);
    assert_eq!(alerts(&everything, "devices").len(), 10);
    let without = |part: &str| {
        let rendered = render(None, &["--set=monitoring.prometheusRule.enabled=true", part]);
        alerts(&rendered, "drayman")
    };
    let of_node = without("--set=controller.enabled=false");
    let of_controller = without("--set=node.enabled=false");
    assert!(
        !of_node.contains(&"DraymanWithoutLeader".to_owned()),
        "{of_node:?}"
    );
    assert!(
        !of_controller
            .iter()
            .any(|alert| alert.contains("Companion") || alert == "DraymanDeviceUnhealthy"),
        "{of_controller:?}"
    );
}

/// The API server accepts label selectors that match nothing.
#[test]
fn every_pod_selector_matches_its_own_component() {
    for (variant, mode) in &variants_and_modes() {
        let rendered = render(Some(variant), mode);
        let labels = |owner: &Value| -> Value { owner["spec"]["selector"]["matchLabels"].clone() };
        for owner in &rendered {
            let component = &owner["metadata"]["labels"]["app.kubernetes.io/component"];
            let of_component = || {
                let mut owners = rendered.iter().filter(|owner| {
                    ["Deployment", "DaemonSet"].contains(&owner["kind"].as_str().unwrap_or_default())
                        && owner["metadata"]["labels"]["app.kubernetes.io/component"] == *component
                });
                labels(owners.next().expect("the owner of the pods"))
            };
            match owner["kind"].as_str() {
                Some("PodDisruptionBudget") => assert_eq!(labels(owner), of_component(), "{variant:?}"),
                Some("NetworkPolicy") if !owner["metadata"]["annotations"].is_null() => {
                    let jobs: Vec<&Value> = rendered
                        .iter()
                        .filter(|job| {
                            job["kind"] == "Job" && job["metadata"]["name"] == owner["metadata"]["name"]
                        })
                        .collect();
                    assert_eq!(jobs.len(), 1, "{variant:?}: {}", owner["metadata"]["name"]);
                    let selected = owner["spec"]["podSelector"]["matchLabels"].as_object();
                    for (key, value) in selected.expect("labels") {
                        assert_eq!(
                            &jobs[0]["spec"]["template"]["metadata"]["labels"][key], value,
                            "{variant:?}"
                        );
                    }
                    let hook = |object: &Value| object["metadata"]["annotations"]["helm.sh/hook"].clone();
                    assert_eq!(hook(owner), hook(jobs[0]), "it exists before the pod");
                }
                Some("NetworkPolicy") => {
                    assert_eq!(
                        owner["spec"]["podSelector"]["matchLabels"],
                        of_component(),
                        "{variant:?}"
                    );
                }
                Some("Service") => assert_eq!(owner["spec"]["selector"], of_component(), "{variant:?}"),
                _ => {}
            }
        }
    }
    let rendered = render(Some(&chart("values-ha.yaml")), &[]);
    object(&rendered, "PodDisruptionBudget", "drayman-controller");
    object(&rendered, "NetworkPolicy", "drayman-controller");
    object(&rendered, "NetworkPolicy", "drayman-node");
    let controller = object(&rendered, "Deployment", "drayman-controller");
    let spread = pod_spec(controller).expect("pods")["topologySpreadConstraints"]
        .as_array()
        .expect("constraints");
    assert_eq!(spread.len(), 2);
    // Otherwise a tainted node, which never has a controller, blocks a rolling update.
    assert_eq!(spread[0]["nodeTaintsPolicy"], "Honor");
    for constraint in spread {
        assert_eq!(
            constraint["labelSelector"]["matchLabels"], controller["spec"]["selector"]["matchLabels"],
            "{constraint}"
        );
    }
    // A setting of the operator is kept.
    let rendered = render(Some(&chart("ci/everything-values.yaml")), &[]);
    let controller = object(&rendered, "Deployment", "devices-controller");
    let spread = &pod_spec(controller).expect("pods")["topologySpreadConstraints"];
    assert_eq!(spread[0]["labelSelector"]["matchLabels"], json!({ "a": "b" }));
}

#[test]
fn policies_are_there_by_default_and_leave_egress_open() {
    let rendered = render(None, &[]);
    for name in [
        "drayman-controller",
        "drayman-node",
        "drayman-crds",
        "drayman-uninstall",
    ] {
        let policy = &object(&rendered, "NetworkPolicy", name)["spec"];
        assert_eq!(policy["policyTypes"], json!(["Ingress"]), "{name}");
        assert!(policy["egress"].is_null(), "{name}");
    }
    let from = |more: &[&str]| {
        let rendered = render(None, more);
        object(&rendered, "NetworkPolicy", "drayman-node")["spec"]["ingress"][0]["from"].clone()
    };
    assert_eq!(
        from(&[]),
        json!([{ "namespaceSelector": {} }]),
        "every pod of the cluster"
    );
    assert_eq!(
        from(&["--set-json=networkPolicy.metricsFrom=[]"]),
        Value::Null,
        "everyone"
    );
    let rendered = render(None, &["--set=networkPolicy.enabled=false"]);
    assert!(rendered.iter().all(|object| object["kind"] != "NetworkPolicy"));
}

#[test]
fn network_policies_allow_metrics_api_server_and_dns() {
    const PORTS: &str = "--set-json=networkPolicy.apiServerPorts=[443,6443]";
    let ports = |rules: &Value| -> Vec<Value> {
        let rules = rules.as_array().expect("rules").iter();
        rules
            .flat_map(|rule| rule["ports"].as_array().expect("ports").clone())
            .collect()
    };
    for more in [
        &[PORTS][..],
        &[
            PORTS,
            "--set=controller.metricsPort=9090",
            "--set=node.metricsPort=9191",
        ],
    ] {
        let rendered = render(Some(&chart("values-ha.yaml")), more);
        for (kind, name) in [
            ("Deployment", "drayman-controller"),
            ("DaemonSet", "drayman-node"),
        ] {
            let policy = &object(&rendered, "NetworkPolicy", name)["spec"];
            assert_eq!(policy["policyTypes"], json!(["Ingress", "Egress"]));
            let spec = pod_spec(object(&rendered, kind, name)).expect("pods");
            let served = spec["containers"][0]["ports"].as_array().expect("ports");
            let metrics = served.iter().find(|port| port["name"] == "metrics");
            let metrics = &metrics.expect("a port of metrics")["containerPort"];
            assert_eq!(
                ports(&policy["ingress"]),
                [json!({ "port": metrics, "protocol": "TCP" })]
            );
            assert_eq!(
                ports(&policy["egress"]),
                [
                    json!({ "port": 443, "protocol": "TCP" }),
                    json!({ "port": 6443, "protocol": "TCP" }),
                    json!({ "port": 53, "protocol": "UDP" }),
                    json!({ "port": 53, "protocol": "TCP" }),
                ]
            );
        }
    }
    let none = render(
        Some(&chart("values-ha.yaml")),
        &[
            PORTS,
            "--set=controller.metricsPort=0",
            "--set=node.metricsPort=0",
        ],
    );
    for name in [
        "drayman-controller",
        "drayman-node",
        "drayman-crds",
        "drayman-uninstall",
    ] {
        let policy = &object(&none, "NetworkPolicy", name)["spec"];
        assert_eq!(policy["ingress"], json!([]), "no ingress");
        assert_eq!(ports(&policy["egress"]).len(), 4, "{name}");
    }
}

#[test]
fn the_prometheus_operator_finds_both_services() {
    for (values, name) in [
        ("values-ha.yaml", "drayman"),
        ("ci/everything-values.yaml", "devices"),
    ] {
        let rendered = render(
            Some(&chart(values)),
            &["--set=monitoring.serviceMonitor.enabled=true"],
        );
        let monitor = &object(&rendered, "ServiceMonitor", name)["spec"];
        let wanted = monitor["selector"]["matchLabels"].as_object().expect("labels");
        assert!(!wanted.is_empty());
        let endpoint = &monitor["endpoints"][0];
        for component in ["controller", "node"] {
            let service = object(&rendered, "Service", &format!("{name}-{component}-metrics"));
            for (key, value) in wanted {
                assert_eq!(&service["metadata"]["labels"][key], value, "{component}");
            }
            let port = &service["spec"]["ports"][0];
            assert_eq!(port["name"], endpoint["port"]);
            let (kind, owner) = match component {
                "node" => ("DaemonSet", format!("{name}-node")),
                _ => ("Deployment", format!("{name}-controller")),
            };
            let spec = pod_spec(object(&rendered, kind, &owner)).expect("pods");
            let ports = spec["containers"][0]["ports"].as_array().expect("ports");
            let target = ports.iter().find(|at| at["name"] == port["targetPort"]);
            assert_eq!(target.expect("the port")["containerPort"], port["port"]);
        }
        assert_eq!(
            endpoint["relabelings"],
            json!([{ "sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node" }])
        );
    }
}

#[test]
fn the_dashboard_is_shipped_as_it_is_where_grafana_looks_for_it() {
    let none = render(None, &[]);
    assert!(
        none.iter()
            .all(|object| object["metadata"]["name"] != "drayman-dashboard")
    );
    let rendered = render(None, &["--set=monitoring.dashboard.enabled=true"]);
    let shipped = object(&rendered, "ConfigMap", "drayman-dashboard");
    assert_eq!(shipped["metadata"]["labels"]["grafana_dashboard"], "1");
    let parsed = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
    let ours = std::fs::read_to_string(chart("dashboards/drayman.json")).expect("the file");
    let ours = parsed(&ours);
    assert_eq!(
        parsed(shipped["data"]["drayman.json"].as_str().expect("a text")),
        ours
    );
    // Errors that Grafana rejects or displays wrongly.
    let panels = ours["panels"].as_array().expect("panels");
    let ids: BTreeSet<u64> = panels.iter().filter_map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len(), "each panel has a number of its own");
    for panel in panels {
        let place = &panel["gridPos"];
        let right = place["x"].as_u64().expect("x") + place["w"].as_u64().expect("w");
        assert!(right <= 24, "{} is wider than the page", panel["title"]);
        let explained =
            panel["type"] == "row" || panel["description"].as_str().is_some_and(|text| !text.is_empty());
        assert!(explained, "{} has no description", panel["title"]);
    }
}

#[test]
fn the_chart_has_the_version_of_the_program() {
    let about: Value = crate::chart::helm::yaml(&chart("Chart.yaml"));
    assert_eq!(about["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(about["appVersion"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn a_part_that_is_switched_off_leaves_nothing_of_it() {
    let node = text(None, &["--set=node.enabled=false"]);
    assert!(!node.contains("component: node") && node.contains("component: controller"));
    let controller = text(Some(&chart("ci/extended-resources-values.yaml")), &[]);
    assert!(controller.contains("component: node"));
    assert!(!controller.contains("component: controller"));
    assert!(!text(None, &["--set=crds.upgrade=false"]).contains("component: crds"));
    assert!(text(None, &[]).contains("component: uninstall"));
    assert!(!text(None, &["--set=uninstallCheck=false"]).contains("component: uninstall"));
    assert!(
        !controller.contains("component: uninstall"),
        "there are no claims of it"
    );
    let without_roles = render(None, &["--set=rbac.create=false"]);
    assert!(
        without_roles
            .iter()
            .all(|object| !object["kind"].as_str().unwrap_or_default().contains("Role"))
    );
}
