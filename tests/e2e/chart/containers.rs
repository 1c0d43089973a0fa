//! The containers of the rendered pods: image, mounts, variables, flags, ports and the configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::{Value, json};

use crate::chart::helm::{arguments, object, one_kind, pod_spec, render, variants};

/// Host paths in the companion's pods, and whether they are writable.
fn host_paths(daemon_set: &Value) -> BTreeSet<String> {
    let spec = pod_spec(daemon_set).expect("pods");
    let mounts = spec["containers"][0]["volumeMounts"].as_array().expect("mounts");
    let volumes = spec["volumes"].as_array().expect("volumes");
    volumes
        .iter()
        .filter_map(|volume| {
            let path = volume["hostPath"]["path"].as_str()?;
            let mount = mounts
                .iter()
                .find(|mount| mount["name"] == volume["name"])
                .expect("a mount for each volume");
            let mode = if mount["readOnly"] == true {
                "read"
            } else {
                "write"
            };
            Some(format!(
                "{mode} {path} at {}",
                mount["mountPath"].as_str().expect("a path")
            ))
        })
        .collect()
}

#[test]
fn dev_is_recursively_read_only_where_the_field_exists() {
    let dev = |version: &str| {
        let arguments = ["--kube-version", version, "--api-versions=resource.k8s.io/v1"];
        let rendered = render(None, &arguments);
        let spec = pod_spec(object(&rendered, "DaemonSet", "drayman-node")).expect("pods");
        let mounts = spec["containers"][0]["volumeMounts"].as_array().expect("mounts");
        let dev = mounts.iter().find(|mount| mount["name"] == "dev").expect("/dev");
        // The API server rejects the field together with a mount propagation.
        assert!(dev["mountPropagation"].is_null() && dev["readOnly"] == true);
        dev["recursiveReadOnly"].clone()
    };
    assert_eq!(dev("1.29.9"), serde_json::Value::Null);
    for version in ["1.30.0", "1.37.1"] {
        assert_eq!(dev(version), "IfPossible", "{version}");
    }
}

#[test]
fn mounts_and_flags_follow_from_one_root_of_kubelet() {
    let usual = one_kind(&[]);
    let usual = object(&usual, "DaemonSet", "drayman-node");
    assert_eq!(
        host_paths(usual),
        [
            "read /dev at /host/dev",
            "read /proc/1/mountinfo at /host/mountinfo",
            // These do not depend on the kinds: an extended resource can be added without an upgrade, and the last one can leave devices in
            // use.
            "read /var/lib/kubelet/pod-resources at /var/lib/kubelet/pod-resources",
            "write /var/lib/kubelet/device-plugins at /var/lib/kubelet/device-plugins",
            "write /var/lib/kubelet/plugins/drayman.dev at /var/lib/kubelet/plugins/drayman.dev",
            "write /var/lib/kubelet/plugins_registry/drayman.dev at /var/lib/kubelet/plugins_registry/drayman.dev",
            "write /var/run/cdi at /var/run/cdi",
        ]
        .map(str::to_owned)
        .into()
    );
    let moved = one_kind(&[
        "--set=node.kubeletRoot=/var/lib/k0s/kubelet",
        "--set=node.cdiRoot=/etc/cdi",
        "--set=driverName=other.example.com",
        "--set=deviceKinds[1].name=camera",
        "--set=deviceKinds[1].mode=extended-resource",
        "--set=deviceKinds[1].resourceName=example.com/camera",
        "--set=deviceKinds[1].paths[0]=/dev/video0",
    ]);
    let moved = object(&moved, "DaemonSet", "drayman-node");
    assert_eq!(
        host_paths(moved),
        [
            "read /dev at /host/dev",
            "read /proc/1/mountinfo at /host/mountinfo",
            "read /var/lib/k0s/kubelet/pod-resources at /var/lib/k0s/kubelet/pod-resources",
            "write /etc/cdi at /etc/cdi",
            "write /var/lib/k0s/kubelet/plugins/other.example.com at /var/lib/k0s/kubelet/plugins/other.example.com",
            "write /var/lib/k0s/kubelet/plugins_registry/other.example.com at /var/lib/k0s/kubelet/plugins_registry/other.example.com",
            // This directory does not follow the kubelet root.
            "write /var/lib/kubelet/device-plugins at /var/lib/kubelet/device-plugins",
        ]
        .map(str::to_owned)
        .into()
    );
    let usual = host_paths(usual);
    let more = |arguments: &[&str]| -> Vec<String> {
        let paths = host_paths(object(&one_kind(arguments), "DaemonSet", "drayman-node"));
        assert!(paths.is_superset(&usual), "{paths:?}");
        paths.difference(&usual).cloned().collect()
    };
    let both = [
        "--set=deviceKinds[1].name=camera",
        "--set=deviceKinds[1].mode=both",
        "--set=deviceKinds[1].resourceName=example.com/camera",
        "--set=deviceKinds[1].paths[0]=/dev/video0",
    ];
    assert_eq!(
        more(&both),
        ["read /var/lib/kubelet/pods at /var/lib/kubelet/pods"]
    );
    let trusted = "--set=node.readKubeletState=true";
    assert_eq!(more(&[trusted]), ["read /var/lib/kubelet at /var/lib/kubelet"]);
    // This directory contains the pods' directory.
    assert_eq!(
        more(&[&both[..], &[trusted]].concat()),
        ["read /var/lib/kubelet at /var/lib/kubelet"]
    );
    // As variables, so that other commands in the container use them too.
    let variables = environment(pod_spec(moved).expect("pods"));
    for (name, value) in [
        ("DRAYMAN_DRIVER_NAME", "other.example.com"),
        ("DRAYMAN_CONFIG", "/etc/drayman/node.yaml"),
        ("DRAYMAN_KUBELET_ROOT_DIR", "/var/lib/k0s/kubelet"),
        ("DRAYMAN_DEVICE_PLUGIN_DIR", "/var/lib/kubelet/device-plugins"),
        ("DRAYMAN_CDI_ROOT", "/etc/cdi"),
        ("DRAYMAN_DEV_ROOT", "/host/dev"),
        ("DRAYMAN_MOUNTINFO", "/host/mountinfo"),
    ] {
        assert_eq!(variables.get(name).map(String::as_str), Some(value), "{name}");
    }
}

/// A mount of kubelet's volume directory without propagation would keep volumes of deleted pods mounted.
#[test]
fn an_unmount_on_the_node_reaches_the_companion() {
    for (arguments, name) in [
        (
            &[
                "--set=deviceKinds[0].mode=both",
                "--set=deviceKinds[0].resourceName=example.com/x",
            ][..],
            "pods",
        ),
        (&["--set=node.readKubeletState=true"][..], "kubelet"),
    ] {
        let rendered = one_kind(arguments);
        let spec = pod_spec(object(&rendered, "DaemonSet", "drayman-node")).expect("pods");
        let mounts = spec["containers"][0]["volumeMounts"].as_array().expect("mounts");
        let mount = mounts
            .iter()
            .find(|mount| mount["name"] == name)
            .expect("the mount");
        assert_eq!(mount["mountPropagation"], "HostToContainer", "{mount}");
        assert_eq!(mount["readOnly"], true, "{mount}");
    }
}

/// The variables of the only container that have a literal value.
fn environment(spec: &Value) -> BTreeMap<String, String> {
    let variables = spec["containers"][0]["env"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    variables
        .iter()
        .filter_map(|variable| Some((text(&variable["name"])?, text(&variable["value"])?)))
        .collect()
}

/// Runs the program with these arguments and variables, without a cluster, and returns its output.
fn program(arguments: &[String], environment: &BTreeMap<String, String>) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_drayman"))
        .args(arguments)
        .env_clear()
        .envs(environment.iter().filter(|(name, _)| !name.starts_with("KUBERNETES_")))
        .env("NODE_NAME", "node")
        // A kubeconfig in the home directory must not be found.
        .env("HOME", "/nonexistent")
        .output()
        .expect("the program starts");
    String::from_utf8(output.stderr).expect("UTF-8")
}

#[test]
fn the_program_accepts_flags_and_configuration_of_variants() {
    let mut seen = BTreeSet::new();
    for variant in variants() {
        let rendered = render(Some(&variant), &[]);
        let directory = tempfile::tempdir().expect("a directory");
        for owner in &rendered {
            // The other ConfigMap contains the dashboard.
            if let Some(configuration) = owner["data"]["node.yaml"].as_str() {
                let name = owner["metadata"]["name"].as_str().expect("a name");
                std::fs::write(directory.path().join(name), configuration).expect("written");
            }
        }
        for owner in &rendered {
            let Some(spec) = pod_spec(owner) else { continue };
            let mut arguments = arguments(spec);
            // A file of the variant that does not exist on this machine.
            arguments.retain(|argument| !argument.starts_with("--kubeconfig="));
            seen.insert(arguments[0].clone());
            if arguments[0] == "version" {
                continue;
            }
            let mut environment = environment(spec);
            if let Some(name) = spec["volumes"][0]["configMap"]["name"].as_str() {
                let file = directory.path().join(name);
                environment.insert(
                    "DRAYMAN_CONFIG".to_owned(),
                    file.to_str().expect("UTF-8").to_owned(),
                );
            }
            // The program reads the configuration before it looks for the API server, so this error means that the configuration is valid.
            let message = program(&arguments, &environment);
            assert!(
                message.starts_with("error: no API server"),
                "{variant:?}: {arguments:?}: {message}"
            );
        }
    }
    assert_eq!(
        seen,
        ["controller", "crds", "leftovers", "node", "version"]
            .map(str::to_owned)
            .into()
    );
    let wrong = program(&["node".into(), "--config=/nowhere".into()], &BTreeMap::new());
    assert!(wrong.contains("/nowhere"), "{wrong}");
}

#[test]
fn a_new_configuration_restarts_companions_only_for_mounts() {
    let with = |arguments: &[&str]| {
        let rendered = one_kind(arguments);
        let daemon_set = object(&rendered, "DaemonSet", "drayman-node");
        let configuration = object(&rendered, "ConfigMap", "drayman-node");
        (
            daemon_set["spec"]["template"].clone(),
            configuration["data"].clone(),
        )
    };
    let before = with(&[]);
    let other = with(&["--set=deviceKinds[0].permissions=r"]);
    assert_eq!(other.0, before.0, "the companion reloads its file");
    assert_ne!(other.1, before.1);
    let other_api = with(&[
        "--set=deviceKinds[0].mode=both",
        "--set=deviceKinds[0].resourceName=example.com/x",
    ]);
    assert_ne!(other_api.0, before.0);
}

#[test]
fn the_image_is_named_by_digest_or_by_tag() {
    let image = |arguments: &[&str]| {
        let rendered = render(None, arguments);
        let pods = pod_spec(object(&rendered, "Deployment", "drayman-controller")).expect("pods");
        pods["containers"][0]["image"]
            .as_str()
            .expect("an image")
            .to_owned()
    };
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(image(&[]), format!("localhost/drayman:{version}"));
    assert_eq!(image(&["--set=image.tag=v2"]), "localhost/drayman:v2");
    let digest = format!("sha256:{}", "0".repeat(64));
    assert_eq!(
        image(&["--set=image.tag=v2", &format!("--set=image.digest={digest}")]),
        format!("localhost/drayman@{digest}")
    );
}

#[test]
fn port_0_is_omitted_and_other_ports_are_consistent() {
    for (component, kind) in [("controller", "Deployment"), ("node", "DaemonSet")] {
        let with = |metrics: u16, health: u16| {
            render(
                None,
                &[
                    &format!("--set={component}.metricsPort={metrics}"),
                    &format!("--set={component}.healthPort={health}"),
                ],
            )
        };
        let name = format!("drayman-{component}");
        let service = |rendered: &[Value]| {
            rendered
                .iter()
                .find(|object| {
                    object["kind"] == "Service" && object["metadata"]["name"] == format!("{name}-metrics")
                })
                .cloned()
        };
        let rendered = with(9090, 9091);
        let spec = pod_spec(object(&rendered, kind, &name)).expect("pods");
        let flags = arguments(spec);
        assert!(
            flags.contains(&"--metrics-bind-address=:9090".to_owned()),
            "{flags:?}"
        );
        assert!(
            flags.contains(&"--health-probe-bind-address=:9091".to_owned()),
            "{flags:?}"
        );
        let container = &spec["containers"][0];
        assert_eq!(
            container["ports"],
            json!([{ "name": "metrics", "containerPort": 9090 }, { "name": "health", "containerPort": 9091 }])
        );
        assert_eq!(
            container["livenessProbe"]["httpGet"],
            json!({ "path": "/livez", "port": "health" })
        );
        assert_eq!(
            container["readinessProbe"]["httpGet"],
            json!({ "path": "/readyz", "port": "health" })
        );
        assert_eq!(
            service(&rendered).expect("a Service")["spec"]["ports"][0]["port"],
            9090
        );

        let rendered = with(0, 0);
        let spec = pod_spec(object(&rendered, kind, &name)).expect("pods");
        assert!(arguments(spec).iter().all(|flag| !flag.contains("bind-address")));
        let container = &spec["containers"][0];
        for field in ["ports", "livenessProbe", "readinessProbe"] {
            assert!(container[field].is_null(), "{field}");
        }
        assert!(service(&rendered).is_none());
    }
}

/// YAML reads some words as booleans or numbers.
#[test]
fn a_name_that_yaml_could_misread_stays_a_name() {
    let rendered = render(
        None,
        &[
            "--set-json=deviceKinds=[{\"name\":\"on\",\"paths\":[\"/dev/x\"]}]",
            "--set-json=classes=[{\"name\":\"123\",\"kind\":\"on\"}]",
            "--set-string=driverName=true",
        ],
    );
    let class = object(&rendered, "ResourceClass", "123");
    assert_eq!(class["driverName"], "true");
    assert_eq!(class["parametersRef"]["name"], "123");
    assert_eq!(
        object(&rendered, "DeviceClassParameters", "123")["spec"]["kind"],
        "on"
    );
    let daemon_set = object(&rendered, "DaemonSet", "drayman-node");
    let variables = environment(pod_spec(daemon_set).expect("pods"));
    assert_eq!(variables["DRAYMAN_DRIVER_NAME"], "true");
}
