//! Validates flag values. Each function parses a flag's text and returns the value or a message that names the allowed
//! values; clap prepends the flag's name.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http::HeaderValue;

use crate::core::names::{DriverName, is_dns_subdomain};

/// Maximum length of the name of an object (a DNS subdomain).
const NAME_MAX: usize = 253;
/// Maximum length of a namespace name (a DNS label).
const NAMESPACE_MAX: usize = 63;
/// Maximum time limit; a longer one suggests a wrong unit.
const TIME_LIMIT_MAX: Duration = Duration::from_secs(600);
/// Minimum time limit; a shorter one would expire on a healthy cluster.
const TIME_LIMIT_MIN: Duration = Duration::from_millis(100);

/// Parses a driver name that is valid as finalizer, directory and CDI vendor.
pub(super) fn driver_name(text: &str) -> Result<String, String> {
    let name = DriverName::parse(text).map_err(|error| error.to_string())?;
    Ok(name.to_string())
}

/// Parses a node name: a lower-case DNS subdomain of at most 253 characters.
pub(super) fn node_name(text: &str) -> Result<String, String> {
    if is_dns_subdomain(text, NAME_MAX) {
        return Ok(text.to_owned());
    }
    Err(format!(
        "must be a lower-case DNS subdomain of at most {NAME_MAX} characters, as kubectl get nodes shows it"
    ))
}

/// Checks the name of a pod or a claim: a lower-case DNS subdomain, which cannot be another path of the API.
pub(super) fn object_name(text: &str) -> Result<(), String> {
    if is_dns_subdomain(text, NAME_MAX) {
        return Ok(());
    }
    Err(format!(
        "a name must be a lower-case DNS subdomain of at most {NAME_MAX} characters"
    ))
}

/// Parses the name of a user or a group, which is sent in a header.
pub(super) fn header(text: &str) -> Result<String, String> {
    if text.is_empty() || HeaderValue::from_str(text).is_err() {
        return Err("must be a name without control characters".to_owned());
    }
    Ok(text.to_owned())
}

/// Parses a namespace name: a lower-case DNS label.
pub(super) fn namespace(text: &str) -> Result<String, String> {
    if is_dns_subdomain(text, NAMESPACE_MAX) && !text.contains('.') {
        return Ok(text.to_owned());
    }
    Err(format!(
        "must be a lower-case DNS label of at most {NAMESPACE_MAX} characters, as kubectl get namespaces shows it"
    ))
}

/// Parses an absolute path. A relative path would depend on the working directory.
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

/// Parses a time limit in Kubernetes duration syntax: `500ms`, `30s`, `1m30s`.
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

/// Parses kubectl's `--request-timeout`: a number alone means seconds.
pub(super) fn request_timeout(text: &str) -> Result<Duration, String> {
    match text.parse::<u32>() {
        Ok(seconds) => time_limit(&format!("{seconds}s")),
        Err(_) => time_limit(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_kubernetes_would_refuse_is_refused_at_once() {
        assert_eq!(driver_name("drayman.dev").as_deref(), Ok("drayman.dev"));
        assert_eq!(
            node_name("node-1.example.com").as_deref(),
            Ok("node-1.example.com")
        );
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
            assert!(driver_name(invalid).is_err(), "{invalid:?}");
            assert!(node_name(invalid).is_err(), "{invalid:?}");
        }
        assert!(driver_name(&format!("{}.dev", "a".repeat(60))).is_err_and(|error| error.contains("63")));
        assert!(node_name(&["a"; 128].join(".")).is_err_and(|error| error.contains("253")));
    }

    #[test]
    fn relative_paths_are_refused() {
        assert_eq!(absolute_path("/var/run/cdi"), Ok(PathBuf::from("/var/run/cdi")));
        for invalid in ["", "cdi", "./cdi", "../cdi", "/var/../cdi"] {
            assert!(absolute_path(invalid).is_err(), "{invalid:?}");
        }
    }

    #[test]
    fn time_limits_have_the_kubernetes_duration_syntax() {
        assert_eq!(time_limit("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(time_limit("1m30s"), Ok(Duration::from_secs(90)));
        assert_eq!(request_timeout("30"), Ok(Duration::from_secs(30)));
        assert_eq!(request_timeout("1m"), Ok(Duration::from_secs(60)));
        assert!(request_timeout("0").is_err() && request_timeout("-1").is_err());
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
