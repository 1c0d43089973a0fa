//! Groups of device nodes, and their container edits.

use crate::discovery::host::{Host, text};

fn cameras() -> Option<Host> {
    let host = Host::new()?;
    for number in 0..3 {
        host.character(&format!("video{number}"), 81, number);
        host.link(
            &format!("v4l/by-path/cam-{number}-index0"),
            &format!("../../video{number}"),
        );
    }
    host.character("media0", 240, 0);
    host.link("v4l/by-path/cam-0-index1", "../../media0");
    host.character("ctl", 240, 9);
    Some(host)
}

#[tokio::test]
async fn nodes_with_one_key_are_one_device_with_shared_nodes() {
    let Some(host) = cameras() else { return };
    let found = host
        .survey(
            "- name: camera\n  groups:\n  - required: [\"/dev/v4l/by-path/{key}-index0\"]\n    optional: [\"/dev/v4l/by-path/{key}-index1\"]\n    shared: [/dev/ctl]\n  containerPaths: {\"/dev/v4l/by-path/{key}-index0\": \"/dev/video-{key}\"}\n  mounts: [{hostPath: /opt/lib, containerPath: /lib/vendor}]\n  environment: {CAMERA_MODE: fast}\n  shares: 2",
        )
        .await;
    assert_eq!(found.names().len(), 3, "{:#?}", found.0.candidates);
    let first = found.names()[0].to_owned();
    assert!(first.starts_with("v4l-by-path-cam-0-index0-"), "{first}");
    assert_eq!(
        found.nodes(&first),
        [
            ("/dev/video0", "/dev/video-cam-0"),
            ("/dev/media0", "/dev/v4l/by-path/cam-0-index1"),
            ("/dev/ctl", "/dev/ctl")
        ]
    );
    let container_edits = found.container_edits(&first);
    assert_eq!(container_edits.environment["CAMERA_MODE"], "fast");
    let variable = container_edits
        .environment
        .iter()
        .find(|(name, _)| name.starts_with("DRAYMAN_DEVICE_"))
        .unwrap();
    assert_eq!(variable.1, "/dev/video-cam-0,/dev/v4l/by-path/cam-0-index1");
    assert_eq!(container_edits.mounts[0].container_path, "/lib/vendor");
    assert!(container_edits.mounts[0].read_only);
    let device = found.device(&first);
    assert_eq!(device.shares, Some(2));
    assert_eq!(text(device, "drayman.dev/nodes"), "/dev/video0,/dev/media0");
    assert_eq!(
        found.nodes(found.names()[1]).len(),
        2,
        "without the optional node"
    );
}

#[tokio::test]
async fn an_incomplete_group_is_reported_with_its_missing_node() {
    let Some(host) = cameras() else { return };
    let found = host
        .survey("- {name: camera, groups: [{required: [\"/dev/video{key}\", \"/dev/media{key}\"]}]}")
        .await;
    assert_eq!(found.names(), ["video0"]);
    assert!(
        found.why("\"1\"").contains("there is no /dev/media1"),
        "{}",
        found.why("\"1\"")
    );
}

#[tokio::test]
async fn a_list_without_a_key_is_one_device_without_directories() {
    let Some(host) = cameras() else { return };
    host.character("snd/controlC0", 116, 1);
    host.character("snd/pcmC0D0p", 116, 2);
    host.link("snd/by-path/card", "../controlC0");
    let found = host.survey("- preset: sound").await;
    assert_eq!(found.names(), ["sound"]);
    assert_eq!(found.nodes("sound").len(), 2, "{:?}", found.nodes("sound"));
    let found = host
        .survey("- {name: set, groups: [{required: [/dev/video0, /dev/media0]}]}")
        .await;
    assert_eq!(found.names(), ["video0"]);
}

#[tokio::test]
async fn a_list_of_nodes_is_an_attribute_only_as_a_whole() {
    let Some(host) = Host::new() else { return };
    for number in 0..20 {
        host.character(&format!("snd/pcmC0D{number}p"), 116, number);
    }
    let found = host
        .survey("- {name: sound, groups: [{required: [\"/dev/snd/*\"]}]}")
        .await;
    assert_eq!(found.nodes("sound").len(), 20);
    let device = found.only();
    assert_eq!(text(device, "drayman.dev/path"), "/dev/snd/pcmC0D0p");
    assert_eq!(text(device, "drayman.dev/nodes"), "");
}

#[tokio::test]
async fn a_key_never_leads_out_of_a_container_directory() {
    let Some(host) = cameras() else { return };
    for (number, serial) in ["A1", ".", ".."].into_iter().enumerate() {
        host.link(
            &format!("serial/by-id/usb-{serial}-if00"),
            &format!("../../video{number}"),
        );
    }
    let pattern = "/dev/serial/by-id/usb-{key}-if00";
    let kind = format!(
        "- {{name: port, groups: [{{required: [\"{pattern}\"]}}], containerPaths: {{\"{pattern}\": \"/dev/ports/{{key}}\"}}}}"
    );
    let found = host.survey(&kind).await;
    let name = &found.only().name;
    assert_eq!(found.nodes(name), [("/dev/video0", "/dev/ports/A1")]);
    for serial in [".", ".."] {
        let why = found.why(&format!("usb-{serial}-if00"));
        assert!(why.contains(&format!("would be /dev/ports/{serial} in")), "{why}");
    }
    // Only a group has a key.
    let found = host
        .survey("- {name: port, paths: [/dev/ctl], containerPaths: {/dev/ctl: \"/dev/ports/{key}\"}}")
        .await;
    let why = found.why("/dev/ctl");
    assert!(why.contains("would be /dev/ports/ in"), "{why}");
}

#[tokio::test]
async fn every_link_leads_to_a_device_or_an_explanation() {
    let Some(host) = cameras() else { return };
    host.link("serial/by-id/loop-a", "loop-b");
    host.link("serial/by-id/loop-b", "loop-a");
    host.link("serial/by-id/dangling", "../../ttyUSB9");
    host.link("serial/by-id/outside", "/etc/passwd");
    host.link("serial/by-id/climbs", "../../../../../../../../etc/passwd");
    host.link("serial/by-id/twice", "../../v4l/by-path/cam-0-index0");
    host.link("serial/by-id/again", "../../video0");
    host.link("serial/by-id/long", &"x/../".repeat(2000)[..4000]);
    let found = host
        .survey("- {name: serial, paths: [\"/dev/serial/by-id/*\"]}")
        .await;
    assert_eq!(found.names().len(), 1, "{:#?}", found.0.candidates);
    assert_eq!(found.nodes(found.names()[0])[0].0, "/dev/video0");
    for (link, word) in [
        ("by-id/loop-a", "symbolic links"),
        ("by-id/dangling", "No such file"),
        ("by-id/outside", "leads out of /dev"),
        ("by-id/climbs", "leads out of /dev"),
        ("by-id/twice", "same device as /dev/serial/by-id/again"),
    ] {
        assert!(found.why(link).contains(word), "{link}: {}", found.why(link));
    }
}

#[tokio::test]
async fn devices_above_the_limit_of_1024_are_reported() {
    let Some(host) = Host::new() else { return };
    for number in 0..1100 {
        host.character(&format!("port-{number}"), 240, number);
    }
    let found = host.survey("- {name: port, paths: [\"/dev/port-*\"]}").await;
    assert_eq!(found.names().len(), 1024);
    assert!(
        found
            .0
            .candidates
            .iter()
            .any(|one| one.why.contains("already has 1024 devices"))
    );
    let discovery = crate::discovery::host::RunningDiscovery::start(
        host.configuration("- {name: port, paths: [\"/dev/port-*\"]}"),
        host.paths(),
    )
    .await;
    let devices = discovery.now();
    let size = serde_json::to_vec(&devices.values().collect::<Vec<_>>())
        .unwrap()
        .len();
    println!("an inventory of {} devices has {size} bytes", devices.len());
    assert!(size < 1_200_000, "{size} bytes");
    assert!(
        devices
            .values()
            .all(|device| !text(device, "drayman.dev/path").is_empty())
    );
}
