//! Selectors of structured mode.

use serde_json::json;

use super::super::*;

fn device() -> Device {
    serde_json::from_value(json!({
        "name": "camera-1",
        "attributes": {
            "drayman.dev/kind": { "string": "cameras" },
            "vendor": { "string": "0403" },
            "firmware": { "version": "1.10.0" },
            "spare": { "bool": false },
            "resource.kubernetes.io/numaNode": { "int": 1 },
        },
        "capacity": { "memory": { "value": "40Gi" }, "drayman.dev/shares": { "value": "4" } },
        "allowMultipleAllocations": true,
    }))
    .unwrap()
}

fn evaluate(expression: &str) -> Result<Match, Arc<str>> {
    with_selectors(|evaluate| evaluate(expression, "a.example", &device())).unwrap()
}

#[test]
fn devices_are_selected_as_by_the_scheduler() {
    for expression in [
        r#"device.driver == "a.example" && device.attributes["drayman.dev"].kind == "cameras""#,
        r#"device.attributes["a.example"].vendor == "0403""#,
        r#"device.attributes["a.example"].firmware.isGreaterThan(semver("1.9.0"))"#,
        r#"!device.attributes["a.example"].spare"#,
        r#"device.attributes["resource.kubernetes.io"].numaNode == 1"#,
        r#"!has(device.attributes["other.example"].model)"#,
        r#"device.capacity["a.example"].memory.compareTo(quantity("40Gi")) == 0"#,
        r#"device.capacity["a.example"].memory.isGreaterThan(quantity("1Gi"))"#,
        r#"device.capacity["drayman.dev"].shares.compareTo(quantity("4")) == 0"#,
        r#"!has(device.capacity["a.example"].bandwidth)"#,
        "device.allowMultipleAllocations",
    ] {
        assert_eq!(evaluate(expression), Ok(Match::Yes), "{expression}");
    }
    assert_eq!(evaluate(r#"device.driver == "drayman.dev""#), Ok(Match::No));
}

#[test]
fn a_selector_fails_with_the_error_that_the_scheduler_has() {
    for (expression, says) in [
        (r#"device.attributes["a.example"].model == "x""#, "model"),
        (r#"device.attributes["a.example"].vendor > 1"#, "such overload"),
    ] {
        let Ok(Match::Failed(error)) = evaluate(expression) else {
            panic!("{expression}")
        };
        assert!(error.contains(says), "{expression}: {error}");
    }
}

#[test]
fn a_selector_beyond_our_limits_is_not_evaluated() {
    // The last pattern is too large for a text of this length.
    let long_text = format!("'{}'.matches('(a{{1,99}}){{1,30}}b')", "a".repeat(640));
    for (expression, says) in [
        (
            "device.kind == 'x'",
            "only driver, attributes, capacity and allowMultipleAllocations",
        ),
        ("device.driver ==", "ERROR"),
        ("[1].all(x, [2].all(y, x < y))", "more than one of all"),
        (
            "device.driver.replace('a', 'b') == 'b'",
            "no function \"replace\"",
        ),
        (long_text.as_str(), "too large"),
    ] {
        let error = evaluate(expression).unwrap_err();
        assert!(error.contains(says), "{expression}: {error}");
    }
}
