//! The chart's schema and the program accept and reject the same kinds.

use std::path::Path;
use std::process::Command;

use drayman::node::config::PRESETS;
use serde_json::{Map, Value, json};

use crate::chart::helm::{merged, template};

/// Validates a kind with the chart and with the program. Each result has the error output.
fn validate(directory: &Path, kind: &Value) -> ((bool, String), (bool, String)) {
    let (values, file) = (directory.join("values.json"), directory.join("node.yaml"));
    std::fs::write(&values, json!({ "deviceKinds": [kind] }).to_string()).expect("written");
    let configuration =
        json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": "NodeConfiguration", "kinds": [kind] });
    std::fs::write(&file, configuration.to_string()).expect("written");
    let chart = template(Some(&values), &[]);
    let program = Command::new(env!("CARGO_BIN_EXE_drayman"))
        .args(["config", "check"])
        .arg(&file)
        .output()
        .expect("the program starts");
    let result = |output: std::process::Output| {
        (
            output.status.success(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    (result(chart), result(program))
}

/// A kind with one device node and more.
fn kind_with(more: &Value) -> Value {
    merged(&json!({ "name": "a", "paths": ["/dev/x"] }), more)
}

/// Valid fields for a kind with one device node.
fn valid_kinds() -> Vec<Value> {
    vec![
        json!({ "paths": ["/dev/x[!a]", "/dev/[]]", "/dev/[a-z]b/c?", "/dev/{x}", "/dev/x]"] }),
        json!({ "containerPaths": { "/dev/x": "/dev/{device}/{key}-{n}" } }),
        json!({ "environment": { "_A1": "", "PATH": "/bin" } }),
        json!({ "dangerousPaths": ["/dev/mem"] }),
        json!({ "mounts": [{ "hostPath": "/a b" }, { "hostPath": "/a b", "containerPath": "/c" }] }),
        json!({ "health": { "sysfs": [{ "file": "power/x", "equals": "" }, { "file": "y", "in": ["", "1"] }] } }),
        json!({ "mode": "both", "resourceName": "a.b/C_d", "shares": 1 }),
    ]
}

/// Invalid fields for a kind with one device node.
fn invalid_kinds() -> Vec<Value> {
    let long = "x".repeat(129);
    let (label, domain) = ("n".repeat(64), "d".repeat(245));
    vec![
        json!({ "paths": ["/dev/[a"] }),
        json!({ "paths": ["/dev/[]"] }),
        json!({ "paths": ["/dev/[!]"] }),
        json!({ "paths": ["/dev/[a/b]"] }),
        json!({ "paths": ["/dev/a/"] }),
        json!({ "paths": ["/dev/a//b"] }),
        json!({ "paths": ["/dev/a\u{7}"] }),
        json!({ "paths": ["/dev/{key}"] }),
        json!({ "containerPaths": { "/dev/y": "/dev/z" } }),
        json!({ "containerPaths": { "/dev/x": "/etc/x" } }),
        json!({ "containerPaths": { "/dev/x": "/dev/../x" } }),
        json!({ "containerPaths": { "/dev/x": "/dev/{other}" } }),
        json!({ "containerPaths": { "/dev/x": "/dev/a:b" } }),
        json!({ "environment": { "DRAYMAN_DEVICE_X": "1" } }),
        json!({ "environment": { "1A": "1" } }),
        json!({ "environment": { "A-B": "1" } }),
        json!({ "environment": { "A": "a\nb" } }),
        json!({ "environment": { long: "1" } }),
        json!({ "dangerousPaths": ["/dev/*"] }),
        json!({ "dangerousPaths": ["/dev/[m]em"] }),
        json!({ "mounts": [{ "hostPath": "/a/../b" }] }),
        json!({ "mounts": [{ "hostPath": "/a:b" }] }),
        json!({ "mounts": [{ "hostPath": "/a,b" }] }),
        json!({ "mounts": [{ "hostPath": "/" }] }),
        json!({ "mounts": [{ "hostPath": "/a/" }] }),
        json!({ "mounts": [{ "hostPath": "/a" }, { "hostPath": "/b", "containerPath": "/a" }] }),
        json!({ "health": { "sysfs": [{ "file": "x" }] } }),
        json!({ "health": { "sysfs": [{ "file": "x", "equals": "1", "in": ["1"] }] } }),
        json!({ "health": { "sysfs": [{ "file": "../x", "equals": "1" }] } }),
        json!({ "health": { "sysfs": [{ "file": "/x", "equals": "1" }] } }),
        json!({ "health": { "sysfs": [{ "file": "a//x", "equals": "1" }] } }),
        json!({ "mode": "both", "resourceName": "a.b/c", "shares": 2 }),
        json!({ "mode": "both", "resourceName": "kubernetes.io/c" }),
        json!({ "mode": "both", "resourceName": "requests.a/c" }),
        json!({ "mode": "both", "resourceName": "a..b/c" }),
        json!({ "mode": "both", "resourceName": format!("a/{label}") }),
        json!({ "mode": "both", "resourceName": format!("{domain}/a") }),
    ]
}

/// Kinds with other sources of devices; each entry says whether it is valid.
fn other_sources() -> Vec<Value> {
    let usb = |one: Value| json!({ "name": "a", "usb": { "match": [one] } });
    let pci = |one: Value| json!({ "name": "a", "pci": { "match": [one] } });
    let group = |group: Value| json!({ "name": "a", "groups": [group] });
    let usb_nodes = |nodes: Value, optional: Value| json!({ "name": "a", "usb": { "match": [{ "vendor": "1050" }], "nodes": nodes, "optionalNodes": optional } });
    let pci_nodes =
        |nodes: Value| json!({ "name": "a", "pci": { "match": [{ "vendor": "1050" }], "nodes": nodes } });
    vec![
        usb(json!({ "vendor": "ABcd", "serial": "x y", "port": "1-4" })),
        usb(json!({ "vendor": "105" })),
        usb(json!({ "product": "0x10" })),
        usb(json!({ "serial": "" })),
        usb(json!({ "serial": "a\u{1}" })),
        pci(json!({ "vendor": "10de", "class": "03", "driver": "vfio-pci", "address": "0000:65:00.0" })),
        pci(json!({ "device": "10deh" })),
        pci(json!({ "class": "030" })),
        pci(json!({ "class": "0A" })),
        pci(json!({ "address": "65:00.0" })),
        pci(json!({ "address": "0000:65:00:0" })),
        usb_nodes(json!(["bus", "tty"]), json!(["hidraw"])),
        usb_nodes(json!(["vfio"]), json!([])),
        usb_nodes(json!([]), json!([])),
        usb_nodes(json!(["tty", "tty"]), json!([])),
        usb_nodes(json!(["tty"]), json!(["tty"])),
        usb_nodes(json!(["a/b"]), json!([])),
        pci_nodes(json!(["drm"])),
        pci_nodes(json!(["bus"])),
        group(json!({ "required": ["/dev/{key}"], "optional": ["/dev/a*/{key}"], "shared": ["/dev/c*"] })),
        group(json!({ "required": ["/dev/a", "/dev/{key}"] })),
        group(json!({ "required": ["/dev/a"], "optional": ["/dev/{key}"] })),
        group(json!({ "required": ["/dev/a"], "shared": ["/dev/{key}"] })),
        group(json!({ "required": ["/dev/{key}{key}"] })),
        group(json!({ "required": ["/dev/{key}*"] })),
        group(json!({ "required": ["/dev/[a]{key}"] })),
    ]
}

#[test]
fn the_chart_and_the_program_draw_the_same_line_around_a_kind() {
    let directory = tempfile::tempdir().expect("a directory");
    let all = vec![
        json!({ "name": "a", "paths": ["/dev/x"] }),
        json!({ "name": "a", "paths": ["/dev/a-[0-9]/*.b?"], "permissions": "mr" }),
        json!({ "name": "a", "paths": ["/dev/../x"] }),
        json!({ "name": "a", "paths": ["/dev/**"] }),
        json!({ "name": "a", "paths": ["/dev/"] }),
        json!({ "name": "a", "paths": ["/x"] }),
        json!({ "name": "A", "paths": ["/dev/x"] }),
        json!({ "name": "a", "paths": ["/dev/x"], "permissions": "" }),
        json!({ "name": "a", "paths": ["/dev/x"], "permissions": "rwr" }),
        json!({ "name": "a", "paths": ["/dev/x"], "mode": "claims" }),
        json!({ "name": "a", "paths": ["/dev/x"], "mode": "extended-resource" }),
        json!({ "name": "a", "paths": ["/dev/x"], "mode": "extended-resource", "resourceName": "example.com/x" }),
        json!({ "name": "a", "paths": ["/dev/x"], "resourceName": "example.com/x" }),
        json!({ "name": "a", "paths": ["/dev/x"], "mode": "extended-resource", "resourceName": "nodomain" }),
        json!({ "preset": "kvm" }),
        json!({ "preset": "nothing" }),
        json!({ "preset": "kvm", "paths": ["/dev/x"] }),
        json!({ "paths": ["/dev/x"] }),
        json!({ "name": "a" }),
        json!({ "name": "a", "groups": [{ "required": ["/dev/{key}-a"], "optional": ["/dev/{key}-b"] }] }),
        json!({ "name": "a", "groups": [{ "optional": ["/dev/b"] }] }),
        json!({ "name": "a", "usb": { "match": [{ "vendor": "1050", "product": "0407" }] } }),
        json!({ "name": "a", "usb": { "match": [] } }),
        json!({ "name": "a", "usb": { "match": [{}] } }),
        json!({ "name": "a", "usb": { "match": [{ "vendor": "1050" }], "identity": "bus" } }),
        json!({ "name": "a", "pci": { "match": [{ "vendor": "10de" }], "nodes": ["vfio"] } }),
        json!({ "name": "a", "paths": ["/dev/x"], "shares": 0 }),
        json!({ "name": "a", "paths": ["/dev/x"], "shares": 1025 }),
        json!({ "name": "a", "paths": ["/dev/x"], "health": { "recoverAfter": 3 } }),
        json!({ "name": "a", "paths": ["/dev/x"], "health": { "recoverAfter": 0 } }),
        json!({ "name": "a", "paths": ["/dev/x"], "mounts": [{ "containerPath": "/x" }] }),
        json!({ "name": "a", "paths": ["/dev/x"], "unknown": true }),
    ];
    let valid: Vec<Value> = valid_kinds().iter().map(kind_with).collect();
    let invalid: Vec<Value> = invalid_kinds().iter().map(kind_with).collect();
    let all = all.iter().chain(&valid).chain(&invalid);
    let others = other_sources();
    let mut differ = Vec::new();
    for kind in all.chain(&others) {
        let (chart, program) = validate(directory.path(), kind);
        if chart.0 != program.0 {
            differ.push(format!(
                "{kind}: the chart says {:?}, the program {:?}",
                chart.1, program.1
            ));
        }
        let expected = (valid.contains(kind), invalid.contains(kind));
        if expected == (true, false) && !program.0 || expected == (false, true) && program.0 {
            differ.push(format!("unexpected result for {kind}: {}", program.1));
        }
    }
    assert!(differ.is_empty(), "{differ:#?}");
}

/// A shareable preset must be made exclusive for mode `both`.
#[test]
fn a_shared_preset_serves_both_apis_with_one_share_only() {
    let directory = tempfile::tempdir().expect("a directory");
    for preset in &PRESETS {
        for shares in [None, Some(1), Some(2)] {
            let mut kind = Map::new();
            kind.insert("preset".into(), json!(preset.name));
            kind.insert("mode".into(), json!("both"));
            kind.insert("resourceName".into(), json!("example.com/x"));
            kind.extend(shares.map(|shares| ("shares".to_owned(), json!(shares))));
            let kind = Value::Object(kind);
            let fits = shares.or(preset.shares).is_none_or(|shares| shares == 1);
            let (chart, program) = validate(directory.path(), &kind);
            assert_eq!(
                (chart.0, program.0),
                (fits, fits),
                "{kind}: {chart:?} {program:?}"
            );
        }
    }
}

/// Errors that only the program detects; docs/operator/troubleshoot.md describes how operators see them.
#[test]
fn errors_that_only_the_program_detects_pass_the_chart() {
    let directory = tempfile::tempdir().expect("a directory");
    for (kind, word) in [
        (
            json!({ "name": "a", "groups": [{ "required": ["/dev/a", "/dev/b"] }],
                "containerPaths": { "/dev/a": "/dev/x", "/dev/b": "/dev/x" } }),
            "would both be",
        ),
        (
            kind_with(&json!({ "mounts": [{ "hostPath": "/a", "containerPath": "/dev/x" }] })),
            "is where a container sees",
        ),
        (
            json!({ "preset": "kvm", "containerPaths": { "/dev/other": "/dev/x" } }),
            "which is not one of /dev/kvm",
        ),
    ] {
        let (chart, program) = validate(directory.path(), &kind);
        assert!(
            chart.0,
            "the chart can tell by now, and the documentation is wrong: {kind}"
        );
        assert!(!program.0 && program.1.contains(word), "{kind}: {program:?}");
    }
}
