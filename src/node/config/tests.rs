use std::collections::BTreeSet;

use super::*;
use crate::api::crd::{Mode, TaintEffect};

const HEADER: &str = "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\n";

fn refusal(text: impl AsRef<[u8]>) -> String {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("node.yaml");
    std::fs::write(&path, text).unwrap();
    let error = NodeConfiguration::read(&path).unwrap_err();
    assert_eq!(error.reason(), "ConfigurationInvalid");
    let message = error.to_string();
    assert!(message.len() < 700, "{message}");
    message
        .split_once("node.yaml:")
        .expect("the file is named")
        .1
        .to_owned()
}

/// The error for a file with one invalid kind, which begins on line 4.
fn kind_refusal(kind: &str) -> String {
    refusal(format!("{HEADER}kinds:\n{kind}"))
}

/// A kind with default values.
fn kind(name: &str, paths: Vec<PathPattern>) -> DeviceKind {
    DeviceKind {
        name: name.into(),
        apis: KindApis::default(),
        source: Source::Paths(paths),
        permissions: "rw".into(),
        shares: None,
        container_paths: BTreeMap::new(),
        mounts: Vec::new(),
        environment: BTreeMap::new(),
        dangerous_paths: BTreeSet::new(),
        probe: Probe::default(),
    }
}

fn parsed(kinds: &str) -> DeviceKind {
    let configuration = NodeConfiguration::parse(&format!("{HEADER}kinds:\n{kinds}")).unwrap();
    DeviceKind::clone(&configuration.kinds[0])
}

#[test]
fn a_file_is_read_with_its_defaults() {
    let text = format!(
        "{HEADER}kinds:\n- name: test\n  paths: [\"/dev/drayman-test-*\"]\n- name: camera\n  mode: extended-resource\n  resourceName: example.com/camera\n  paths: [/dev/video0, /dev/video1]\n  permissions: mr\n"
    );
    let path = |text| PathPattern::parse(text).unwrap();
    assert_eq!(
        NodeConfiguration::parse(&text),
        Ok(NodeConfiguration {
            kinds: [
                kind("test", vec![path("/dev/drayman-test-*")]),
                DeviceKind {
                    apis: KindApis {
                        mode: KindMode::ExtendedResource {
                            resource_name: "example.com/camera".into(),
                        },
                        ..KindApis::default()
                    },
                    permissions: "rm".into(),
                    ..kind("camera", vec![path("/dev/video0"), path("/dev/video1")])
                },
            ]
            .map(Arc::new)
            .into(),
        })
    );
}

#[test]
fn the_modes_of_a_kind_are_read() {
    let text = format!(
        "{HEADER}kinds:\n- {{name: a, mode: both, resourceName: x.dev/a, cdiDevices: true, preStartCheck: true, paths: [/dev/a]}}\n\
         - {{name: b, mode: split, resourceName: x.dev/b, extendedResourceDevices: [b1], shares: 3, paths: [\"/dev/b*\"]}}\n"
    );
    let kinds = NodeConfiguration::parse(&text).unwrap().kinds;
    let (name, resource) = kinds[0].apis.extended_resource("a").unwrap();
    assert_eq!((name.as_str(), resource.kind.as_str()), ("x.dev/a", "a"));
    assert!(resource.also_by_claims && resource.cdi_devices && resource.pre_start_check);
    assert_eq!((kinds[0].apis.mode_of("a"), kinds[0].shares), (Mode::Both, None));
    let split = &kinds[1].apis;
    assert!(!split.extended_resource("b").unwrap().1.also_by_claims);
    assert_eq!(
        (split.mode_of("b1"), split.mode_of("b2"), kinds[1].shares),
        (Mode::ExtendedResource, Mode::Claims, Some(3))
    );
}

#[test]
fn a_file_without_kinds_is_a_node_without_devices() {
    assert_eq!(
        NodeConfiguration::parse(&format!("{HEADER}kinds: []\n")),
        Ok(NodeConfiguration::default())
    );
}

#[test]
fn a_missing_file_is_named() {
    let error = NodeConfiguration::read(Path::new("/nonexistent/node.yaml")).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/node.yaml"), "{error}");
}

#[test]
fn a_wrong_value_is_refused_with_line_field_and_fix() {
    for (kind, position, words) in [
        (
            "- {name: A, paths: [/dev/x]}",
            "4:10:",
            ["kinds[0].name \"A\"", "a-z"],
        ),
        ("- {name: a, paths: []}", "4:20:", ["kinds[0].paths", "1 to 64"]),
        (
            "- {name: a, paths: [/etc/passwd]}",
            "4:21:",
            ["kinds[0].paths[0] \"/etc/passwd\"", "/dev/"],
        ),
        (
            "- {name: a, paths: [/dev/x, /dev/../etc]}",
            "4:29:",
            ["kinds[0].paths[1] \"/dev/../etc\"", "\"..\""],
        ),
        (
            "- name: a\n  mode: pigeon\n  paths: [/dev/x]",
            "5:9:",
            ["kinds[0].mode \"pigeon\"", "extended-resource, split or both"],
        ),
        (
            "- name: a\n  mode: both\n  paths: [/dev/x]",
            "5:9:",
            ["kinds[0].resourceName is missing", "mode both"],
        ),
        (
            "- {name: a, mode: both, resourceName: x.dev/a, shares: 2, paths: [/dev/x]}",
            "4:56:",
            ["kinds[0].shares must be 1", "exclusive"],
        ),
        (
            "- {name: a, shares: 0, paths: [/dev/x]}",
            "4:21:",
            ["kinds[0].shares 0", "1 to 1024"],
        ),
        (
            "- {name: a, mode: split, resourceName: x.dev/a, paths: [/dev/x]}",
            "4:19:",
            ["kinds[0].extendedResourceDevices is missing", "lists them"],
        ),
        (
            "- {name: a, mode: split, resourceName: x.dev/a, extendedResourceDevices: [../x], paths: [/dev/x]}",
            "4:75:",
            ["kinds[0].extendedResourceDevices[0] \"../x\"", "is not the name"],
        ),
        (
            "- {name: a, extendedResourceDevices: [x], paths: [/dev/x]}",
            "4:38:",
            ["kinds[0].extendedResourceDevices", "mode: split"],
        ),
        (
            "- {name: a, cdiDevices: true, paths: [/dev/x]}",
            "4:25:",
            ["kinds[0].cdiDevices", "another mode"],
        ),
        (
            "- name: a\n  mode: extended-resource\n  paths: [/dev/x]",
            "5:9:",
            ["kinds[0].resourceName is missing", "drayman.dev/a"],
        ),
        (
            "- name: a\n  resourceName: x.dev/a\n  paths: [/dev/x]",
            "5:17:",
            ["kinds[0].resourceName", "mode: extended-resource"],
        ),
        (
            "- name: a\n  mode: extended-resource\n  resourceName: cpu\n  paths: [/dev/x]",
            "6:17:",
            ["kinds[0].resourceName", "\"cpu\""],
        ),
        (
            "- {name: a, permissions: rx, paths: [/dev/x]}",
            "4:26:",
            ["kinds[0].permissions \"rx\"", "r, w and m"],
        ),
        (
            "- {name: a, permissions: rr, paths: [/dev/x]}",
            "4:26:",
            ["kinds[0].permissions \"rr\"", "each once"],
        ),
        (
            "- {name: a, permissions: '', paths: [/dev/x]}",
            "4:26:",
            ["kinds[0].permissions \"\"", "rw"],
        ),
        (
            "- {name: a, paths: [/dev/x]}\n- {name: a, paths: [/dev/y]}",
            "5:10:",
            ["kinds[1].name \"a\"", "line 4"],
        ),
    ] {
        let message = kind_refusal(kind);
        assert!(message.starts_with(position), "{message}");
        for word in words {
            assert!(message.contains(word), "{word} in {message}");
        }
    }
}

#[test]
fn one_resource_belongs_to_one_kind() {
    let kind = |name| {
        format!("- {{name: {name}, mode: extended-resource, resourceName: x.dev/r, paths: [/dev/x]}}\n")
    };
    let message = kind_refusal(&(kind("a") + &kind("b")));
    assert!(
        message.starts_with("5:") && message.contains("already used on line 4"),
        "{message}"
    );
}

#[test]
fn unknown_duplicate_and_mistyped_fields_are_refused_by_line() {
    for (kind, line, word) in [
        ("- name: a\n  path: [/dev/x]", "5:", "path"),
        ("- name: a\n  name: b\n  paths: [/dev/x]", "5:", "name"),
        ("- name: a\n  paths: /dev/x", "5:", "sequence"),
        ("- name: [a]\n  paths: [/dev/x]", "4:", "string"),
        ("- name: a", "4:", "paths, groups, usb, pci or preset"),
    ] {
        let message = kind_refusal(kind);
        assert!(message.starts_with(line), "{message}");
        assert!(message.contains(word), "{word} in {message}");
    }
    let message = refusal(format!("{HEADER}kinds: []\nsets: []\n"));
    assert!(message.starts_with("4:") && message.contains("sets"), "{message}");
}

#[test]
fn another_version_is_refused_before_its_fields_are_read() {
    let message = refusal("apiVersion: drayman.dev/v1\nkind: NodeConfiguration\ngroups: {}\n");
    assert!(
        message.starts_with("1:13:") && message.contains("drayman.dev/v1alpha1"),
        "{message}"
    );
    let message = refusal("apiVersion: drayman.dev/v1alpha1\nkind: Pod\n");
    assert!(
        message.starts_with("2:7:") && message.contains("NodeConfiguration"),
        "{message}"
    );
    let message = refusal("kinds: []\n");
    assert!(message.contains("apiVersion"), "{message}");
}

#[test]
fn files_without_a_configuration_are_refused() {
    for text in [
        "",
        "  \n\n",
        "# only a comment\n",
        "null",
        "[]",
        "just text",
        "a: b: c",
        "\t",
        "--- {}\n--- {}\n",
        "{",
    ] {
        refusal(text);
    }
    assert!(refusal("").contains("empty"));
}

#[test]
fn invalid_utf8_is_refused_with_its_position() {
    let message = refusal([HEADER.as_bytes(), b"kinds:\n- name: \xff\n"].concat());
    assert!(
        message.starts_with("4:9:") && message.contains("UTF-8"),
        "{message}"
    );
}

#[test]
fn bombs_are_refused_quickly() {
    assert!(refusal("a".repeat(300_000)).contains("262144 bytes"));
    let mut bomb = String::from("a0: &a0 [x, x]\n");
    for level in 1..30 {
        use std::fmt::Write;
        let below = level - 1;
        writeln!(bomb, "a{level}: &a{level} [*a{below}, *a{below}, *a{below}]").unwrap();
    }
    refusal(format!("{HEADER}{bomb}kinds: []\n"));
    refusal(format!("{HEADER}kinds: {}", "[".repeat(100_000)));
    refusal(format!("{HEADER}kinds: [{}]", "x,".repeat(100_000)));
    let entries = |entry: &str| vec![entry; 65].join(", ");
    for (kind, field) in [
        (
            format!(
                "groups: [{{required: [/dev/a], optional: [{}]}}]",
                entries("/dev/b")
            ),
            "kinds[0].groups[0].optional",
        ),
        (
            format!(
                "groups: [{{required: [/dev/a], shared: [{}]}}]",
                entries("/dev/b")
            ),
            "kinds[0].groups[0].shared",
        ),
        (
            format!(
                "usb: {{match: [{{vendor: \"0403\"}}], optionalNodes: [{}]}}",
                entries("tty")
            ),
            "kinds[0].usb.optionalNodes",
        ),
        (
            format!(
                "pci: {{match: [{{vendor: \"10de\"}}], optionalNodes: [{}]}}",
                entries("drm")
            ),
            "kinds[0].pci.optionalNodes",
        ),
    ] {
        let refusal = kind_refusal(&format!("- {{name: k, {kind}}}"));
        assert!(
            refusal.contains(&format!("{field} has 65 entries; at most 64 are allowed")),
            "{refusal}"
        );
    }
    let many = "- {name: k, paths: [/dev/x]}\n".repeat(65);
    assert!(kind_refusal(&many).contains("at most 64"));
}

#[test]
fn every_source_is_read() {
    let Source::Usb(usb) = parsed(
        "- name: modem\n  usb:\n    match:\n    - {vendor: \"12d1\", product: \"1506\"}\n    - {port: 1-1.4}\n    nodes: [bus, tty]\n    optionalNodes: [sound]\n    hubs: true\n    identity: port",
    )
    .source
    else {
        panic!("not a usb source")
    };
    assert_eq!(
        (usb.matching[0].vendor, usb.matching[0].product),
        (Some(0x12d1), Some(0x1506))
    );
    assert_eq!(usb.matching[1].port.as_deref(), Some("1-1.4"));
    assert_eq!(
        (usb.nodes, usb.optional_nodes, usb.hubs),
        (vec!["bus".into(), "tty".into()], vec!["sound".into()], true)
    );
    let Source::Pci(pci) = parsed("- {name: gpu, pci: {match: [{class: \"03\", driver: vfio-pci}]}}").source
    else {
        panic!("not a pci source")
    };
    assert_eq!(pci.nodes, [NODE_VFIO]);
    let Source::Groups(groups) = parsed(
        "- name: media\n  groups:\n  - required: [\"/dev/video{key}\"]\n    optional: [\"/dev/media{key}\"]\n    shared: [/dev/ctl]",
    )
    .source
    else {
        panic!("not groups")
    };
    assert!(groups[0].required[0].has_key() && !groups[0].shared[0].has_key());
}

#[test]
fn a_preset_is_a_kind_of_its_name_whose_fields_can_be_changed() {
    let kvm = parsed("- preset: kvm");
    assert_eq!(
        (kvm.name.as_str(), kvm.permissions.as_str(), kvm.shares),
        ("kvm", "rw", Some(110))
    );
    assert_eq!(kvm.source.entries(), ["/dev/kvm"]);
    let own =
        parsed("- {name: random, preset: hwrng, shares: 2, mode: extended-resource, resourceName: x.dev/r}");
    assert_eq!(
        (own.name.as_str(), own.permissions.as_str(), own.shares),
        ("random", "r", Some(2))
    );
    assert!(kind_refusal("- preset: kvn").contains("must be one of dri, fuse, hwrng, kvm"));
    assert!(kind_refusal("- preset: kvm\n- preset: kvm").contains("already used on line 4"));
    let both = kind_refusal("- {preset: kvm, paths: [/dev/kvm]}");
    assert!(
        both.contains("preset and paths") && both.starts_with("4:"),
        "{both}"
    );
}

#[test]
fn presets_alone_are_a_configuration() {
    let [kvm, hwrng] = ["kvm", "hwrng"].map(|name| Preset::named(name).unwrap());
    let kinds = NodeConfiguration::of_presets(&[kvm, hwrng]).unwrap().kinds;
    assert_eq!(*kinds[0], parsed("- preset: kvm"));
    assert_eq!(*kinds[1], parsed("- preset: hwrng"));
    let twice = NodeConfiguration::of_presets(&[kvm, kvm]).unwrap_err();
    assert!(twice.contains("\"kvm\" is already used"), "{twice}");
}

#[test]
fn extra_container_edits_come_from_the_configuration_only() {
    let kind = parsed(
        "- name: a\n  paths: [/dev/x*]\n  shares: 4\n  containerPaths: {\"/dev/x*\": \"/dev/y-{device}\"}\n  mounts:\n  - {hostPath: /opt/lib}\n  - {hostPath: /run/a, containerPath: /run/b, readOnly: false}\n  environment: {MODE: fast}\n  health: {open: read, sysfs: [{file: power/state, in: [on, active]}], recoverAfter: 2, taintEffect: NoExecute}",
    );
    assert_eq!(kind.container_paths["/dev/x*"], "/dev/y-{device}");
    assert_eq!(
        (kind.mounts[0].container_path.as_str(), kind.mounts[0].read_only),
        ("/opt/lib", true)
    );
    assert_eq!(
        (kind.mounts[1].container_path.as_str(), kind.mounts[1].read_only),
        ("/run/b", false)
    );
    assert_eq!(kind.environment["MODE"], "fast");
    assert_eq!(
        (kind.probe.open, kind.probe.recover_after, kind.probe.taint_effect,),
        (Some(ProbeOpen::Read), 2, TaintEffect::NoExecute)
    );
    assert_eq!(kind.probe.sysfs[0].values.len(), 2);
}

#[test]
fn wrong_sources_and_extras_are_refused_with_field_and_fix() {
    for (kind, words) in [
        ("usb: {match: []}", ["kinds[0].usb.match", "1 to 64"]),
        (
            "usb: {match: [{}]}",
            ["kinds[0].usb.match[0]", "vendor, product, serial or port"],
        ),
        (
            "usb: {match: [{vendor: \"403\"}]}",
            ["kinds[0].usb.match[0].vendor \"403\"", "four hexadecimal"],
        ),
        (
            "usb: {match: [{vendor: \"0403\"}], nodes: [vfio]}",
            ["kinds[0].usb.nodes[0] \"vfio\"", "tty"],
        ),
        (
            "usb: {match: [{vendor: \"0403\"}], nodes: [../x]}",
            ["kinds[0].usb.nodes[0]", "subsystem"],
        ),
        (
            "usb: {match: [{vendor: \"0403\"}], identity: name}",
            ["kinds[0].usb.identity", "serial or port"],
        ),
        ("usb: {match: [{vendr: \"0403\"}]}", ["vendr", "vendor"]),
        (
            "pci: {match: [{class: \"3\"}]}",
            ["kinds[0].pci.match[0].class", "two, four or six"],
        ),
        (
            "pci: {match: [{address: \"65:00.0\"}]}",
            ["kinds[0].pci.match[0].address", "0000:65:00.0"],
        ),
        (
            "groups: [{required: [\"/dev/a\", \"/dev/b{key}\"]}]",
            ["kinds[0].groups[0].required[0]", "must contain {key}"],
        ),
        (
            "groups: [{required: [/dev/a], optional: [\"/dev/b{key}\"]}]",
            ["kinds[0].groups[0].optional[0]", "required"],
        ),
        (
            "groups: [{required: [/etc/passwd]}]",
            ["kinds[0].groups[0].required[0]", "/dev/"],
        ),
        ("paths: [\"/dev/a{key}\"]", ["kinds[0].paths[0]", "groups only"]),
        ("shares: 0, paths: [/dev/a]", ["kinds[0].shares 0", "1 to 1024"]),
        (
            "paths: [/dev/a], containerPaths: {/dev/b: /dev/c}",
            [
                "kinds[0].containerPaths",
                "\"/dev/b\", which is not one of /dev/a",
            ],
        ),
        (
            "paths: [/dev/a], containerPaths: {/dev/a: /etc/passwd}",
            ["kinds[0].containerPaths", "below /dev/"],
        ),
        (
            "paths: [/dev/a], containerPaths: {/dev/a: /dev/../etc}",
            ["kinds[0].containerPaths", "\"..\""],
        ),
        (
            "paths: [/dev/a], containerPaths: {/dev/a: \"/dev/{x}\"}",
            ["kinds[0].containerPaths", "{device}"],
        ),
        (
            "paths: [/dev/a], mounts: [{hostPath: ../x}]",
            ["kinds[0].mounts[0].hostPath", "absolute"],
        ),
        (
            "paths: [/dev/a], mounts: [{hostPath: /a}, {hostPath: /b, containerPath: /a}]",
            ["kinds[0].mounts[1].containerPath", "is listed twice"],
        ),
        (
            "paths: [/dev/a], environment: {1A: x}",
            ["kinds[0].environment: \"1A\"", "digit"],
        ),
        (
            "paths: [/dev/a], environment: {DRAYMAN_DEVICE_X: x}",
            ["kinds[0].environment", "reserved prefix DRAYMAN_DEVICE_;"],
        ),
        (
            "paths: [/dev/a], dangerousPaths: [\"/dev/*\"]",
            ["kinds[0].dangerousPaths[0]", "wildcard"],
        ),
        (
            "paths: [/dev/a], health: {open: always}",
            ["kinds[0].health.open", "readWrite"],
        ),
        ("paths: [/dev/a], health: {command: [rm]}", ["command", "open"]),
        (
            "paths: [/dev/a], health: {sysfs: [{file: ../../x, equals: a}]}",
            ["kinds[0].health.sysfs[0].file", "below"],
        ),
        (
            "paths: [/dev/a], health: {sysfs: [{file: x}]}",
            ["kinds[0].health.sysfs[0]", "equals, or in"],
        ),
        (
            "paths: [/dev/a], health: {taintEffect: noexecute}",
            ["kinds[0].health.taintEffect", "NoSchedule or NoExecute"],
        ),
        (
            "paths: [/dev/a], health: {recoverAfter: 0}",
            ["kinds[0].health.recoverAfter 0", "1 to 100"],
        ),
    ] {
        let message = kind_refusal(&format!("- {{name: a, {kind}}}"));
        assert!(message.starts_with("4:"), "{message}");
        for word in words {
            assert!(message.contains(word), "{word} in {message}");
        }
    }
}
