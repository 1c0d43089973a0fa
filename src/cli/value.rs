//! The checks of flag values. Each takes the text of a flag and gives a valid value or a sentence that says what is
//! allowed; clap puts the flag's name in front.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// A driver's name, at most: the API server refuses longer ones.
const DRIVER_NAME_MAX: usize = 63;
/// A node's name, at most, as for every DNS subdomain.
const NODE_NAME_MAX: usize = 253;
/// The longest time limit that is accepted. Whoever wants more has mistaken the unit.
const TIME_LIMIT_MAX: Duration = Duration::from_secs(600);
/// The shortest one: below it the limit would strike on a healthy cluster.
const TIME_LIMIT_MIN: Duration = Duration::from_millis(100);

/// A driver's name: a lower-case DNS subdomain of at most 63 characters.
pub(super) fn driver_name(text: &str) -> Result<String, String> {
    dns_subdomain(text, DRIVER_NAME_MAX)
}

/// A node's name: a lower-case DNS subdomain of at most 253 characters.
pub(super) fn node_name(text: &str) -> Result<String, String> {
    dns_subdomain(text, NODE_NAME_MAX)
}

/// A path from the root. A relative one would depend on where the program is started.
pub(super) fn absolute_path(text: &str) -> Result<PathBuf, String> {
    let path = Path::new(text);
    if !path.is_absolute() {
        return Err("the path must be absolute".to_owned());
    }
    if path
        .components()
        .any(|component| component == std::path::Component::ParentDir)
    {
        return Err("the path must not contain '..'".to_owned());
    }
    Ok(path.to_owned())
}

/// A time limit in the way Kubernetes writes durations: `500ms`, `30s`, `1m30s`.
pub(super) fn time_limit(text: &str) -> Result<Duration, String> {
    let wrong =
        || "must be a duration from 100ms to 10m with its unit, such as 500ms, 30s or 1m30s".to_owned();
    let signed: jiff::SignedDuration = text.parse().map_err(|_| wrong())?;
    let duration = Duration::try_from(signed).map_err(|_| wrong())?;
    if (TIME_LIMIT_MIN..=TIME_LIMIT_MAX).contains(&duration) {
        Ok(duration)
    } else {
        Err(wrong())
    }
}

/// RFC 1123: labels of lower-case letters, digits and hyphens, which begin and end with a letter or digit, joined by dots.
fn dns_subdomain(text: &str, max: usize) -> Result<String, String> {
    let label_is_valid = |label: &str| {
        let bytes = label.as_bytes();
        let is_alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        bytes.len() <= 63
            && bytes.first().is_some_and(is_alphanumeric)
            && bytes.last().is_some_and(is_alphanumeric)
            && bytes.iter().all(|byte| is_alphanumeric(byte) || *byte == b'-')
    };
    if text.len() > max {
        return Err(format!(
            "has {} characters, but at most {max} are allowed",
            text.len()
        ));
    }
    if text.split('.').all(label_is_valid) {
        return Ok(text.to_owned());
    }
    Err(
        "must be a lower-case DNS subdomain: lower-case letters, digits, '-' and '.', \
         where each part begins and ends with a letter or digit"
            .to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_name_is_a_lower_case_dns_subdomain_of_at_most_63_characters() {
        for valid in [
            "drayman.dev",
            "a",
            "gpu.example.com",
            "3d-printer.example",
            &"a".repeat(63),
        ] {
            assert_eq!(driver_name(valid).as_deref(), Ok(valid));
        }
        for invalid in [
            "",
            ".",
            "Drayman.dev",
            "a..b",
            "-a",
            "a-",
            "a_b",
            "a/b",
            "../a",
            "ä.dev",
            "a.dev.",
            "a b",
        ] {
            assert!(
                driver_name(invalid).is_err_and(|error| error.contains("lower-case DNS subdomain")),
                "{invalid:?}"
            );
        }
        let too_long = format!("{}.dev", "a".repeat(60));
        assert_eq!(
            driver_name(&too_long),
            Err("has 64 characters, but at most 63 are allowed".to_owned())
        );
    }

    #[test]
    fn a_node_name_may_be_longer_but_not_its_labels() {
        assert!(node_name(&["a".repeat(63), "b".repeat(63)].join(".")).is_ok());
        assert!(node_name(&"a".repeat(64)).is_err());
        assert!(node_name(&["a"; 128].join(".")).is_err());
    }

    #[test]
    fn a_path_that_depends_on_the_place_of_the_start_is_refused() {
        assert_eq!(absolute_path("/var/run/cdi"), Ok(PathBuf::from("/var/run/cdi")));
        for invalid in ["", "cdi", "./cdi", "../cdi", "/var/../cdi"] {
            assert!(absolute_path(invalid).is_err(), "{invalid:?}");
        }
    }

    #[test]
    fn a_time_limit_is_written_as_kubernetes_writes_durations() {
        assert_eq!(time_limit("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(time_limit("1m30s"), Ok(Duration::from_secs(90)));
        for invalid in [
            "",
            "30",
            "0s",
            "-30s",
            "99ms",
            "601s",
            "999999999999999h",
            "soon",
            "1e9s",
        ] {
            assert!(
                time_limit(invalid).is_err_and(|error| error.contains("100ms to 10m")),
                "{invalid:?}"
            );
        }
    }
}
