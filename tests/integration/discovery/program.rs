//! Commands for discovery, which need no cluster.

use std::process::{Command, Output};

use crate::discovery::host::{Host, file};
use crate::discovery::usb::DESKTOP;

fn drayman(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_drayman"));
    command.env_clear().args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn discover(host: &Host, kinds: &str, more: &[&str]) -> Output {
    std::fs::write(host.path("node.yaml"), file(kinds)).unwrap();
    let path = |path: &str| host.path(path).to_str().unwrap().to_owned();
    let (config, dev, sys) = (path("node.yaml"), path("dev"), path("sys"));
    let arguments = [
        "node",
        "discover",
        "--config",
        &config,
        "--dev-root",
        &dev,
        "--sysfs-root",
        &sys,
    ];
    drayman(&[&arguments[..], more].concat())
}

const KINDS: &str = "- {name: serial, usb: {match: [{vendor: \"0403\"}], nodes: [tty]}}\n- preset: kvm\n";

#[test]
fn the_table_has_a_line_for_each_candidate_with_its_result() {
    let Some(host) = Host::with(DESKTOP) else { return };
    let output = discover(&host, KINDS, &[]);
    let table = text(&output.stdout);
    let line = |part: &str| {
        table
            .lines()
            .find(|line| line.contains(part))
            .unwrap_or_default()
            .to_owned()
    };
    assert!(line("1-1.4 ").contains("usb-0403-6001-a50285bi"), "{table}");
    assert!(line("1-1.4 ").contains("/dev/ttyUSB0 (rw)"), "{table}");
    assert!(line("1-8 ").contains("its vendor is 046d, not 0403"), "{table}");
    assert!(line("/dev/kvm").contains("is not there"), "{table}");
    assert_eq!(output.status.code(), Some(1), "a kind has no device");
    assert!(
        text(&output.stderr).contains("no device of kind kvm"),
        "{}",
        text(&output.stderr)
    );
    host.character("kvm", 10, 232);
    let output = discover(&host, KINDS, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn programs_get_everything_as_json_and_yaml() {
    let Some(host) = Host::with(DESKTOP) else { return };
    let json: serde_json::Value =
        serde_json::from_slice(&discover(&host, KINDS, &["-o", "json"]).stdout).unwrap();
    let device = &json["devices"][0];
    assert_eq!(device["kind"], "serial");
    assert_eq!(device["attributes"]["drayman.dev/serial"]["string"], "A50285BI");
    assert_eq!(device["container"]["deviceNodes"][0]["hostPath"], "/dev/ttyUSB0");
    assert!(json["candidates"].as_array().unwrap().len() > 5);
    let yaml = text(&discover(&host, KINDS, &["-o", "yaml"]).stdout);
    assert!(yaml.contains("hostPath: /dev/ttyUSB0"), "{yaml}");
}

#[test]
fn a_configuration_for_the_machine_is_proposed() {
    let Some(host) = Host::with(DESKTOP) else { return };
    host.character("kvm", 10, 232);
    let path = |path: &str| host.path(path).to_str().unwrap().to_owned();
    let (config, dev, sys) = (path("proposed.yaml"), path("dev"), path("sys"));
    let roots = ["--dev-root", &dev, "--sysfs-root", &sys];
    let output = drayman(&[&["node", "discover", "--propose"], &roots[..]].concat());
    let proposed = text(&output.stdout);
    println!("{proposed}");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    for part in [
        "for claims on Kubernetes 1.34 and 1.35, add shares: 1.\n",
        "- preset: kvm\n",
        "# FTDI FT232R_USB_UART (usb-0403-6001)\n# Devices: usb-0403-6001-a50285bi",
        "- name: \"ftdi-ft232r-usb-uart\"\n",
        "  usb:\n    match: [{vendor: \"0403\", product: \"6001\"}]\n    nodes: [tty]\n",
        "nodes: [video4linux]",
    ] {
        assert!(proposed.contains(part), "{part}: {proposed}");
    }
    for absent in ["05e3", "fuse", "xHCI"] {
        assert!(!proposed.contains(absent), "{absent}: {proposed}");
    }
    // The companion accepts the file and finds each device in it.
    std::fs::write(&config, &proposed).unwrap();
    let check = drayman(&["config", "check", &config]);
    assert_eq!(check.status.code(), Some(0), "{}", text(&check.stderr));
    let found = drayman(&[&["node", "discover", "--config", &config], &roots[..]].concat());
    assert_eq!(found.status.code(), Some(0), "{}", text(&found.stderr));
    let empty = host.path("nothing").to_str().unwrap().to_owned();
    let roots = ["--dev-root", &empty, "--sysfs-root", &empty];
    let nothing = drayman(&[&["node", "discover", "--propose"], &roots[..]].concat());
    assert_eq!(nothing.status.code(), Some(1), "{}", text(&nothing.stdout));
}

#[test]
fn a_ready_made_kind_is_tried_without_a_file() {
    let Some(host) = Host::new() else { return };
    host.character("kvm", 10, 232);
    let dev = host.path("dev").to_str().unwrap().to_owned();
    let try_preset = |more: &[&str]| drayman(&[&["node", "discover", "--dev-root", &dev], more].concat());
    let output = try_preset(&["--preset", "kvm"]);
    let table = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{table}");
    assert!(
        table.contains("/dev/kvm (rw)") && table.contains("virtual machines"),
        "{table}"
    );
    assert_eq!(
        try_preset(&["--preset", "kvm", "--preset", "fuse"]).status.code(),
        Some(1)
    );
    let everything = try_preset(&[]);
    assert_eq!(everything.status.code(), Some(0), "{}", text(&everything.stderr));
    assert!(text(&everything.stdout).contains("/dev/hwrng"));
    let unknown = try_preset(&["--preset", "kvn"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(
        text(&unknown.stderr).contains("dri, fuse, hwrng, kvm"),
        "{}",
        text(&unknown.stderr)
    );
}

#[test]
fn both_commands_refuse_a_wrong_file_with_line_and_fix() {
    let Some(host) = Host::new() else { return };
    let wrong = "- {name: serial, usb: {match: [{vendor: \"403\"}]}}";
    let output = discover(&host, wrong, &[]);
    assert_eq!(output.status.code(), Some(2));
    let config = host.path("node.yaml").to_str().unwrap().to_owned();
    let check = drayman(&["config", "check", &config]);
    assert_eq!(check.status.code(), Some(2));
    for output in [output, check] {
        let error = text(&output.stderr);
        assert!(
            error.contains("node.yaml:4:") && error.contains("usb.match[0].vendor"),
            "{error}"
        );
        assert!(error.contains("four hexadecimal digits"), "{error}");
    }
    std::fs::write(&config, file(KINDS)).unwrap();
    let check = drayman(&["config", "check", &config]);
    assert_eq!(check.status.code(), Some(0));
    assert!(
        text(&check.stdout).ends_with("valid; kinds: serial, kvm\n"),
        "{}",
        text(&check.stdout)
    );
    assert_eq!(
        drayman(&["config", "check", "/nonexistent"]).status.code(),
        Some(2)
    );
}
