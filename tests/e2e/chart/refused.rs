//! Invalid combinations of values are rejected with one sentence that names the fix.

use crate::chart::helm::{STRUCTURED, chart, helm, refusal, template};
use crate::harness;

const KIND: [&str; 2] = [
    "--set=deviceKinds[0].name=a",
    "--set=deviceKinds[0].paths[0]=/dev/a",
];

/// One byte more than the limit for a socket path, with the default driver name, and in a device plugin directory.
const LONG_ROOT: &str =
    "--set=node.kubeletRoot=/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
const LONG_DIRECTORY: &str = "--set=node.devicePluginDir=/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

/// Arguments, and in the line after them the cause and the way out that the sentence names.
const REFUSED: &str = r#"
--set=controller.enabled=false --set=node.enabled=false
    nothing to install ... enable one
--namespace default
    The namespace default ... allowDefaultNamespace=true
--set=controller.replicas=2 --set=controller.leaderElection.enabled=false
    controller.replicas is 2 without controller.leaderElection.enabled ... controller.replicas=1
KIND --set=controller.enabled=false --set=classes[0].name=a --set=classes[0].kind=a
    no controller allocates their claims ... enable the controller
KIND --set=controller.enabled=false
    The kind a has the mode claims, but controller.enabled is false ... enable the controller
--set=controller.enabled=false --set-json=deviceKinds=[{"name":"a","mode":"extended-resource","resourceName":"example.com/x","paths":["/dev/a"]},{"name":"b","mode":"both","resourceName":"example.com/y","paths":["/dev/b"]}]
    The kind b has the mode both ... give the kind mode=extended-resource
--set=controller.enabled=false --set=tests.className=a
    tests.className is set, but controller.enabled is false ... remove tests.className
--set=node.serviceAccount.create=false
    node.serviceAccount.create is false and node.serviceAccount.name is empty ... set the name of the account
--set=controller.serviceAccount.create=false
    controller.serviceAccount.create is false ... set the name of the account
--set=controller.serviceAccount.name=x --set=node.serviceAccount.name=x
    would give every node the rights of the controller ... give each its own
KIND --set=deviceKinds[1].name=a --set=deviceKinds[1].paths[0]=/dev/b
    two entries with the name a ... give each kind its own name
--set-json=deviceKinds=[{"name":"a","mode":"extended-resource","resourceName":"example.com/x","paths":["/dev/a"]},{"name":"b","mode":"extended-resource","resourceName":"example.com/x","paths":["/dev/b"]}]
    two entries with the resourceName example.com/x ... put all paths of a resource into one kind
KIND --set=classes[0].name=c --set=classes[0].kind=a --set=classes[1].name=c --set=classes[1].kind=a
    classes has two entries with the name c ... give each class its own name
KIND --set=classes[0].name=c --set=classes[0].kind=b
    The class c is of kind b, which deviceKinds does not describe ... add the kind
--set-json=deviceKinds=[{"name":"a","mode":"extended-resource","resourceName":"example.com/x","paths":["/dev/a"]}] --set=classes[0].name=c --set=classes[0].kind=a
    whose mode is extended-resource ... set the kind's mode to claims
--set=monitoring.serviceMonitor.enabled=true --set=monitoring.service=false
    it finds the pods by their Service ... enable the Service
--set=monitoring.authentication.enabled=true
    monitoring.authentication.secretName is empty ... name a Secret
--set=monitoring.prometheusRule.enabled=true --set=monitoring.service=false
    alerts detect an absent companion by its Service ... enable the Service
--set=monitoring.serviceMonitor.enabled=true --set=controller.metricsPort=0 --set=node.metricsPort=0
    no component has a metricsPort ... give it one
--set=controller.driverCallTimeout=99ms
    controller.driverCallTimeout is 99ms ... from 100ms to 10m
--set=controller.leaderElection.leaseDuration=10m1ms
    controller.leaderElection.leaseDuration is 10m1ms ... from 100ms to 10m
--set=controller.leaderElection.leaseDuration=14999ms
    leaseDuration (14999ms) is less than renewDeadline (10s) and 5s ... set a longer leaseDuration
--set=controller.leaderElection.retryPeriod=10s
    retryPeriod (10s) is not less than renewDeadline (10s) ... set a shorter retryPeriod
KIND --set=node.enabled=false
    deviceKinds are set, but node.enabled is false ... enable the node companion
--set=node.enabled=false --set=admissionPolicy.enabled=always
    admissionPolicy.enabled is always, but node.enabled is false ... set it to auto
--set=controller.env[0].name=TZ
    controller.env has another name now ... set controller.extraEnv
--set=node.env[0].name=TZ
    node.env has another name now ... set node.extraEnv
--set=node.extraEnv[0].name=DRAYMAN_CONFIG
    node.extraEnv has DRAYMAN_CONFIG, which the chart sets from deviceKinds ... remove it
--set=controller.extraEnv[0].name=DRAYMAN_ORPHAN_GRACE_PERIOD
    which the controller does not read ... correct it
--set=node.extraArgs={--driver-name=a.example.com}
    node.extraArgs has --driver-name, which the chart sets from driverName ... remove it
--set=controller.extraArgs={--orphan-grace-period=1m}
    which the controller does not know ... correct it
--set=namespaceOverride=default
    The namespace default ... allowDefaultNamespace=true
--set-json=nodePools=[{"name":"a","nodeSelector":{"x":"1"}},{"name":"b","nodeSelector":{"y":"2"}}]
    A node can match the nodeSelectors of both pools a and b ... by the same label, with different values
--set-json=nodePools=[{"name":"a","nodeSelector":{"x":"1"}},{"name":"a","nodeSelector":{"x":"2"}}]
    nodePools has two entries with the name a ... give each pool its own name
--set-json=nodePools=[{"name":"a","nodeSelector":{"x":"1"},"deviceKinds":[{"preset":"kvm"},{"preset":"kvm"}]}]
    deviceKinds of the pool a has two entries with the name kvm ... give each kind its own name
--set-json=nodePools=[{"name":"a","nodeSelector":{"x":"1"}}] --set=node.enabled=false
    nodePools are set, but node.enabled is false ... enable the node companion
--set=node.updateStrategy.maxSurge=1
    node.updateStrategy has maxSurge and maxUnavailable ... set the other to 0
--set=node.updateStrategy.maxUnavailable=0
    neither maxSurge nor maxUnavailable ... set maxUnavailable=1
--set=node.updateStrategy.maxSurge=1 --set=node.updateStrategy.maxUnavailable=0 --set=node.healthPort=0
    node.updateStrategy has maxSurge, but node.healthPort is 0 ... set node.healthPort
--kube-version=1.34.0
    Kubernetes v1.34.0 has no classic DRA ... --api-versions=resource.k8s.io/v1
STRUCTURED --kube-version=1.35.4 --set=deviceKinds[0].preset=kvm --set=classes[0].name=vm --set=classes[0].kind=kvm
    The class vm is of kind kvm, whose devices are shared by up to 110 claims, which needs Kubernetes 1.36 (this is rendered for v1.35.4) ... set the kind's shares to 1
STRUCTURED --kube-version=1.34.4 KIND --set=deviceKinds[0].shares=2 --set=classes[0].name=c --set=classes[0].kind=a
    whose devices are shared by up to 2 claims ... or remove the class
STRUCTURED --set=node.enabled=false
    node.enabled is false and there are no classes ... enable the companion
LONG_ROOT
    would have 108 bytes, and a socket's path has at most 107 ... set a shorter driverName
LONG_DIRECTORY --set-json=deviceKinds=[{"name":"a","mode":"both","resourceName":"example.com/x","paths":["/dev/a"]}]
    would have 108 bytes below node.devicePluginDir ... set a shorter node.devicePluginDir
--set=monitoring.prometheusRule.enabled=true --set=controller.metricsPort=0
    controller.metricsPort is 0 ... give it a port
--set=node.metricsPort=8081
    node.metricsPort and node.healthPort are the same ... give each its own
KIND --set=deviceKinds[0].health.open=read
    a companion without privileges cannot open devices ... set node.privileged=true
--set=deviceKinds[0].preset=kvm --set=deviceKinds[1].name=kvm --set=deviceKinds[1].paths[0]=/dev/b
    two entries with the name kvm ... give each kind its own name
--set=admissionPolicy.enabled=always --kube-version 1.29.9
    Kubernetes v1.29.9 lacks ValidatingAdmissionPolicy ... set it to auto
"#;

/// The arguments of a line, in which some words stand for several or long ones.
fn words(line: &'static str) -> Vec<&'static str> {
    let expanded = line.split(' ').map(|word| match word {
        "KIND" => KIND.to_vec(),
        "STRUCTURED" => STRUCTURED.to_vec(),
        "LONG_ROOT" => vec![LONG_ROOT],
        "LONG_DIRECTORY" => vec![LONG_DIRECTORY],
        other => vec![other],
    });
    expanded.flatten().collect()
}

#[test]
fn a_combination_that_cannot_work_is_refused_with_one_sentence() {
    let mut lines = REFUSED.trim().lines();
    while let (Some(arguments), Some(expected)) = (lines.next(), lines.next()) {
        let arguments = words(arguments);
        let (cause, way_out) = expected
            .trim()
            .split_once(" ... ")
            .expect("a cause and a way out");
        let message = refusal(None, &arguments);
        let sentence = message
            .split_once("validation.yaml:")
            .unwrap_or_else(|| panic!("{arguments:?} is refused by something else: {message}"))
            .1
            // Helm's own advice follows.
            .split("

Use --debug")
            .next()
            .unwrap_or_default();
        assert!(
            sentence.contains(cause) && sentence.contains(way_out),
            "{arguments:?}: {message}"
        );
        assert_eq!(sentence.trim_end().lines().count(), 1, "one sentence: {message}");
        assert!(sentence.trim_end().ends_with('.'), "{message}");
    }
}

/// The suffix of a Service makes its name longer than that of the release.
#[test]
fn a_release_whose_service_names_are_too_long_is_refused() {
    for (release, ours) in [("3com", "3com-drayman"), ("a.b", "a.b-drayman")] {
        let home = tempfile::tempdir().expect("a directory");
        let render = |more: &[&str]| {
            let output = helm(home.path())
                .args(["template", release])
                .arg(chart(""))
                .args(["--namespace=drayman", "--kube-version", harness::VERSION])
                .args(more)
                .output()
                .expect("Helm runs");
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            (output.status.success(), message)
        };
        let (taken, message) = render(&[]);
        assert!(!taken, "{release}");
        assert!(
            message.contains(&format!("The Services of the metrics would be called {ours}-"))
                && message.contains("fullnameOverride"),
            "{message}"
        );
        for way_out in [
            "--set=fullnameOverride=three-com",
            "--set=monitoring.service=false",
            // No Service is left.
            "--set=controller.metricsPort=0,node.metricsPort=0",
            "--set=monitoring.service=false,fullnameOverride=3com",
        ] {
            let (taken, message) = render(&[way_out]);
            assert!(taken, "{message}");
        }
    }
}

/// Kubernetes allows capitals in annotation keys, but not in the prefix of label keys.
#[test]
fn an_annotation_may_have_capitals_where_a_label_may_not() {
    let capital = "node.podAnnotations.Example\\.com/Name=x";
    let output = template(None, &[&format!("--set={capital}")]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let message = refusal(
        None,
        &[&format!("--set={}", capital.replace("Annotations", "Labels"))],
    );
    assert!(message.contains("podLabels"), "{message}");
}

#[test]
fn an_unsupported_version_of_kubernetes_is_refused() {
    // Without a cluster, Helm reports all API groups that it knows, so the version decides.
    let output = template(None, &["--kube-version", "1.26.0"]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && message.contains("kubeVersion"),
        "{message}"
    );
    let fine = template(
        Some(&chart("ci/one-kind-values.yaml")),
        &["--kube-version", "1.30.4-gke.1348000"],
    );
    assert!(fine.status.success(), "{}", String::from_utf8_lossy(&fine.stderr));
}

/// The chart and the program accept the same durations.
#[test]
fn the_chart_and_the_program_take_the_same_durations() {
    use drayman::core::lease::LeaseSettings;
    use std::process::Command;
    use std::time::Duration;

    let values = [
        ["15s", "10s", "2s"],
        ["15s", "10s", "10s"],
        ["14s", "10s", "2s"],
        ["14999ms", "9999ms", "9s999ms"],
        ["10m", "9m55s", "9m54s999ms"],
        ["10m", "9m55s1ms", "1s"],
        ["601s", "10s", "2s"],
        ["15s", "10s", "99ms"],
        ["15s", "10s", "0s"],
        ["1m30s", "1m", "100ms"],
        ["30s1m", "10s", "2s"],
        ["15", "10s", "2s"],
        ["15S", "10s", "2s"],
        ["007s", "1s", "500ms"],
        ["", "10s", "2s"],
    ];
    for [lease, renew, retry] in values {
        let set =
            |field: &str, value: &str| format!("--set-string=controller.leaderElection.{field}={value}");
        let arguments = [
            set("leaseDuration", lease),
            set("renewDeadline", renew),
            set("retryPeriod", retry),
        ];
        let chart = template(None, &arguments.each_ref().map(String::as_str));
        let output = Command::new(env!("CARGO_BIN_EXE_drayman"))
            .args(["controller", "--leader-elect"])
            .arg(format!("--leader-elect-lease-duration={lease}"))
            .arg(format!("--leader-elect-renew-deadline={renew}"))
            .arg(format!("--leader-elect-retry-period={retry}"))
            .env_clear()
            .output()
            .expect("the program starts");
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        // Flags are parsed first; their combination is checked once there is an API server.
        let parsed = message.contains("no API server");
        let duration = |text: &str| {
            let signed: Option<jiff::SignedDuration> = text.parse().ok();
            signed
                .and_then(|signed| Duration::try_from(signed).ok())
                .unwrap_or_default()
        };
        let together = LeaseSettings {
            identity: "x".into(),
            ended: std::collections::BTreeSet::new(),
            duration: duration(lease),
            renew_deadline: duration(renew),
            retry_period: duration(retry),
            request_timeout: Duration::from_secs(5),
        };
        // "007s" is a valid duration for the program, but not for the chart.
        if lease == "007s" {
            assert!(parsed && !chart.status.success());
            continue;
        }
        assert_eq!(
            chart.status.success(),
            parsed && together.check().is_ok(),
            "{lease} {renew} {retry}: {message} {}",
            String::from_utf8_lossy(&chart.stderr)
        );
    }
}

/// The chart sets a program's variable or flag and rejects it in `extraEnv` and `extraArgs`, or it accepts it there.
#[test]
fn a_flag_is_refused_exactly_if_the_chart_sets_it() {
    let free = [
        "DRAYMAN_KUBECONFIG",
        "DRAYMAN_ORPHAN_GRACE_PERIOD",
        "DRAYMAN_DEVICE_PLUGIN_REGISTRATION",
        "DRAYMAN_SYSFS_ROOT",
    ];
    let program = drayman::cli::command();
    for component in ["controller", "node"] {
        let command = program.find_subcommand(component).expect("the command");
        let variables = command
            .get_arguments()
            .filter_map(|flag| Some((flag.get_env()?.to_str()?, flag.get_long()?)));
        let variables: Vec<(&str, &str)> = variables.collect();
        assert!(variables.len() > 8, "{variables:?}");
        for (variable, flag) in variables {
            for set in [
                format!("--set={component}.extraEnv[0].name={variable}"),
                format!("--set={component}.extraArgs[0]=--{flag}"),
            ] {
                let output = template(None, &[&set]);
                let message = String::from_utf8_lossy(&output.stderr).into_owned();
                assert_eq!(
                    output.status.success(),
                    free.contains(&variable),
                    "{set}: {message}"
                );
                assert!(
                    output.status.success() || message.contains("which the chart sets from"),
                    "{message}"
                );
            }
        }
    }
}
