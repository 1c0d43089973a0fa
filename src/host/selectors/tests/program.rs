//! Expressions of classic mode, evaluated and refused.

use super::super::*;

fn attributes() -> AttributeSet {
    let attribute = |name: &str, value| (Box::from(name), value);
    [
        attribute("drayman.dev/firmware", Attribute::Version("1.10.0".into())),
        attribute("drayman.dev/numaNode", Attribute::Int(1)),
        attribute("drayman.dev/spare", Attribute::Bool(false)),
        attribute("drayman.dev/vendor", Attribute::String("0403".into())),
    ]
    .into_iter()
    .collect()
}

fn evaluate(expression: &str) -> Match {
    let compiled = Compiled::new(expression).unwrap_or_else(|error| panic!("{expression}: {error}"));
    compiled.evaluate(&CelEnvironment::new("drayman.dev"), &attributes())
}

#[test]
fn devices_are_selected_as_in_kubernetes() {
    for expression in [
        r#"device.driver == "drayman.dev""#,
        r#"device.attributes["drayman.dev"].vendor == "0403""#,
        r#"device.attributes["drayman.dev"].vendor.startsWith("04") && device.attributes["drayman.dev"].numaNode > 0"#,
        r#"device.attributes["drayman.dev"].vendor in ["0403", "10de"]"#,
        r#"has(device.attributes["drayman.dev"].vendor)"#,
        r#"!has(device.attributes["drayman.dev"].model)"#,
        r#"!has(device.attributes["other.example"].model)"#,
        r#"!("model" in device.attributes["other.example"])"#,
        r#"!has(device.capacity["drayman.dev"].memory)"#,
        r#"device.attributes["drayman.dev"].firmware.isGreaterThan(semver("1.9.0"))"#,
        r#"device.attributes["drayman.dev"].firmware.compareTo(semver("1.10.0")) == 0"#,
        r#"quantity("40Gi").isGreaterThan(quantity("1Gi"))"#,
        r#"device.attributes["drayman.dev"].vendor.matches("^04..$")"#,
        r#"["0403"].exists(vendor, vendor == device.attributes["drayman.dev"].vendor)"#,
        r#"["x", "^04"].exists(pattern, device.attributes["drayman.dev"].vendor.matches(pattern))"#,
        r#"device.attributes["drayman.dev"].filter(name, device.attributes["drayman.dev"][name] == 1) == ["numaNode"]"#,
        r#"device.attributes["drayman.dev"].map(name, device.attributes["drayman.dev"][name]).size() == 4"#,
        r#"device.driver != "a--b!!----------" && !(1 - -1 == 0) // !!"#,
        r#"!(device.driver in ['''a"b''', r'\', "\"!!"])"#,
        r#"b"\x61\142" == b'ab' && "\u0061\U0001f600" == 'a😀' && 1.5e+3 > 0x1fu && .5 < 1"#,
        "!device.attributes[\"drayman.dev\"].spare",
        "true",
    ] {
        assert_eq!(evaluate(expression), Match::Yes, "{expression}");
    }
    assert_eq!(evaluate("device.driver == 'other.example'"), Match::No);
}

#[test]
fn empty_bytes_are_contained_in_bytes_only() {
    assert_eq!(evaluate("b'a'.contains(b'') && !'a'.contains(b'')"), Match::Yes);
    assert_eq!(
        evaluate("b'ab'.contains(b'b') && !b'a'.contains(b'b')"),
        Match::Yes
    );
}

#[test]
fn regular_expressions_have_a_maximum_size() {
    for pattern in [r"^dray[a-z]{1,9}\.dev$", r"^\w{7}\.\w{3}$", "(?i)^DRAYMAN"] {
        let expression = format!("device.driver.matches(r'{pattern}')");
        assert_eq!(evaluate(&expression), Match::Yes, "{pattern}");
    }
    // The time of a search grows with the pattern and with the text.
    let search = |length| {
        evaluate(&format!(
            "'{}'.matches('(a{{1,99}}){{1,30}}b')",
            "a".repeat(length)
        ))
    };
    assert_eq!(search(64), Match::No);
    assert!(matches!(search(640), Match::Failed(error) if error.contains("too large")));
    // A search with this pattern would take seconds.
    let (text, pattern) = ("a".repeat(9_800), "(a{1,99}){1,999}[^a]");
    let error = Compiled::new(&format!("'{text}'.matches('{pattern}')"))
        .err()
        .unwrap_or_default();
    assert!(error.contains(pattern) && error.contains("too large"), "{error}");
    // The pattern is known only during the evaluation.
    let Match::Failed(error) = evaluate(&format!("'{text}'.matches('{pattern}' + '')")) else {
        panic!("not refused")
    };
    assert!(error.contains(pattern) && error.contains("too large"), "{error}");
}

#[test]
fn a_missing_or_mistyped_attribute_is_an_error() {
    for (expression, says) in [
        ("device.attributes['drayman.dev'].model == 'x'", "model"),
        ("device.attributes['drayman.dev'].vendor > 1", "No such overload"),
        (
            "device.attributes['drayman.dev'].vendor",
            "neither true nor false",
        ),
        ("1 / 0 == 1", "zero"),
    ] {
        let Match::Failed(error) = evaluate(expression) else {
            panic!("{expression}")
        };
        assert!(error.contains(says), "{expression}: {error}");
    }
}

#[test]
fn an_error_about_a_map_is_short_and_the_same_each_time() {
    let expression = "device.attributes + 'x' == 'x'";
    let Match::Failed(error) = evaluate(expression) else {
        panic!("{expression}")
    };
    assert!(error.contains("a map and \"x\""), "{error}");
    for _ in 0..20 {
        assert_eq!(evaluate(expression), Match::Failed(error.clone()));
    }
}

#[test]
fn errors_quote_only_a_part_of_long_names() {
    let long = "i".repeat(2_400);
    let made = format!("{long}{{}}.x");
    for expression in [
        &long,
        &format!("device.{long}"),
        &format!("device.{long}()"),
        &made,
    ] {
        let error = Compiled::new(expression).err().unwrap();
        assert!(error.contains("iii") && error.len() < 300, "{error}");
    }
}

#[test]
fn an_invalid_selector_is_refused_with_the_reason() {
    for (expression, says) in [
        ("", "0 bytes"),
        ("devices.driver == 'x'", "no variable \"devices\""),
        ("device.atributes['x'].y", "device has no \"atributes\""),
        ("device.driver ==", "ERROR"),
        ("device.driver.replace('', 'x') == 'x'", "no function \"replace\""),
        ("[1].all(x, [2].all(y, x < y))", "more than one of all"),
        ("[1].map(x, x).map(y, y) == [1]", "more than one of all"),
        ("Thing{name: 1} == 1", "selectors do not support"),
        ("device.driver.matches('(')", "unclosed group"),
        ("!!device.driver.contains('x')", r#""!" is followed by "!""#),
        ("1 - - - - - -1 == 0", r#""-" is followed by "-""#),
        ("device.driver == 'x", r#""'x" cannot be read"#),
        (r"device.driver == '\d'", "wrong escape"),
        ("device.driver = 'x'", r#""= 'x'" cannot be read"#),
    ] {
        let error = Compiled::new(expression).err().unwrap_or_default();
        assert!(error.contains(says), "{expression}: {error}");
    }
}
