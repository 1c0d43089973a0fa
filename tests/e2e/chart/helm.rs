//! The chart, rendered by Helm.
#![expect(
    clippy::panic,
    reason = "helpers of every chart test: a failure fails the test"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

use crate::harness;

/// The namespace of the releases in these tests.
pub(crate) const NAMESPACE: &str = "drayman";

/// Arguments for a cluster of each mode: the defaults of [`template`] are classic.
pub(crate) const MODES: [&[&str]; 2] = [&[], &STRUCTURED];

/// Arguments for a cluster of structured mode.
pub(crate) const STRUCTURED: [&str; 2] = ["--kube-version=1.37.2", "--api-versions=resource.k8s.io/v1"];

/// A path below the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A path below the chart.
pub(crate) fn chart(path: &str) -> PathBuf {
    repository("charts/drayman").join(path)
}

/// Value files in the chart's `ci` directory. Each must render a working release.
pub(crate) fn variants() -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(chart("ci"))
        .expect("the directory ci")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.push(chart("values-ha.yaml"));
    files.sort();
    assert!(files.len() > 4, "{files:?}");
    files
}

/// Each value file, with the arguments of each mode.
pub(crate) fn variants_and_modes() -> Vec<(PathBuf, &'static [&'static str])> {
    let with_modes = |variant: PathBuf| MODES.map(|mode| (variant.clone(), mode));
    variants().into_iter().flat_map(with_modes).collect()
}

/// Helm with its files in one directory.
pub(crate) fn helm(home: &Path) -> Command {
    let mut command = Command::new(harness::helm().expect("Helm"));
    for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        command.env(variable, home);
    }
    // The shell's own cluster must not be used.
    command
        .env_remove("KUBECONFIG")
        .env_remove("KUBERNETES_SERVICE_HOST");
    command
}

/// Runs `helm template` with a value file and further arguments.
pub(crate) fn template(values: Option<&Path>, arguments: &[&str]) -> Output {
    let home = tempfile::tempdir().expect("a directory");
    let mut command = helm(home.path());
    command.args(["template", "drayman"]).arg(chart(""));
    if !arguments.contains(&"--namespace") {
        command.args(["--namespace", NAMESPACE]);
    }
    if !arguments
        .iter()
        .any(|argument| argument.starts_with("--kube-version"))
    {
        command.args(["--kube-version", harness::VERSION]);
    }
    if let Some(values) = values {
        command.arg("--values").arg(values);
    }
    command.args(arguments).output().expect("Helm runs")
}

/// Renders the chart as YAML text; panics with Helm's error.
pub(crate) fn text(values: Option<&Path>, arguments: &[&str]) -> String {
    let output = template(values, arguments);
    let refusal = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{values:?} {arguments:?}: {refusal}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Renders the chart as objects.
pub(crate) fn render(values: Option<&Path>, arguments: &[&str]) -> Vec<Value> {
    objects(&text(values, arguments))
}

/// Renders these values and arguments for a cluster of structured mode.
pub(crate) fn structured(values: &str, arguments: &[&str]) -> Vec<Value> {
    render(Some(&chart(values)), &[&STRUCTURED, arguments].concat())
}

/// Renders the defaults with one kind, and these arguments.
pub(crate) fn one_kind(arguments: &[&str]) -> Vec<Value> {
    render(Some(&chart("ci/one-kind-values.yaml")), arguments)
}

/// The error of `helm template`; panics if rendering succeeds.
pub(crate) fn refusal(values: Option<&Path>, arguments: &[&str]) -> String {
    let output = template(values, arguments);
    assert!(
        !output.status.success(),
        "{values:?} {arguments:?} is not refused: {}",
        String::from_utf8_lossy(&output.stdout)
    );
    String::from_utf8(output.stderr).expect("UTF-8")
}

/// The objects of a stream of YAML documents.
pub(crate) fn objects(text: &str) -> Vec<Value> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).expect("YAML");
    documents
        .into_iter()
        .filter(|document| !document.is_null())
        .collect()
}

/// A YAML file with one document.
pub(crate) fn yaml(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).expect("a file");
    serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The one object of this kind and name.
pub(crate) fn object<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let mut found = objects
        .iter()
        .filter(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    let first = found.next().unwrap_or_else(|| panic!("no {kind} {name}"));
    assert!(found.next().is_none(), "two of {kind} {name}");
    first
}

/// An object with other fields beside, or instead of, its own, and without those that are null.
pub(crate) fn merged(plain: &Value, fields: &Value) -> Value {
    let mut object = plain.as_object().cloned().unwrap_or_default();
    object.extend(fields.as_object().cloned().unwrap_or_default());
    object.retain(|_, value| !value.is_null());
    Value::Object(object)
}

/// The pod spec in a workload object.
pub(crate) fn pod_spec(object: &Value) -> Option<&Value> {
    match object["kind"].as_str()? {
        "Pod" => Some(&object["spec"]),
        "Deployment" | "DaemonSet" | "Job" => Some(&object["spec"]["template"]["spec"]),
        _ => None,
    }
}

/// The arguments of the only container.
pub(crate) fn arguments(spec: &Value) -> Vec<String> {
    let containers = spec["containers"].as_array().expect("containers");
    assert_eq!(containers.len(), 1);
    let arguments = containers[0]["args"].as_array().expect("arguments");
    arguments
        .iter()
        .map(|argument| argument.as_str().expect("a text").to_owned())
        .collect()
}
