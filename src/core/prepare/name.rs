//! Validates names by the rules of kubelet and the API server, so that a bad name is rejected early and with a reason.

use thiserror::Error;

/// Maximum length of a DNS subdomain, in bytes.
const MAX_SUBDOMAIN: usize = 253;
/// Maximum length of a label, of the name part of a qualified name, and of a driver name, in bytes.
const MAX_LABEL: usize = 63;
/// Prefix of an extended resource in a quota; the prefixed name must be valid, too.
const QUOTA_PREFIX: &str = "requests.";
/// The domain of Kubernetes' native resources.
const NATIVE: &str = "kubernetes.io/";

/// Why a name is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NameError {
    /// Not a valid extended resource name.
    #[error("{name:?} is not the name of an extended resource, such as example.com/serial-port: {problem}")]
    ExtendedResource {
        /// The rejected name.
        name: String,
        /// The violated rule.
        problem: &'static str,
    },
    /// Not a valid driver name.
    #[error("{name:?} is not the name of a driver, such as devices.example.com: {problem}")]
    Driver {
        /// The rejected name.
        name: String,
        /// The violated rule.
        problem: &'static str,
    },
}

impl NameError {
    /// CamelCase reason for logs, conditions and metrics.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::ExtendedResource { .. } => "InvalidResourceName",
            Self::Driver { .. } => "InvalidDriverName",
        }
    }
}

/// Checks the name of an extended resource by the rules of kubelet and the API server (`IsExtendedResourceName` in pkg/apis/core/v1/helper
/// of Kubernetes 1.30).
pub fn check_extended_resource(name: &str) -> Result<(), NameError> {
    extended_resource_problem(name).map_or(Ok(()), |problem| {
        Err(NameError::ExtendedResource {
            name: name.to_owned(),
            problem,
        })
    })
}

/// Checks the name of a DRA driver: a DNS subdomain of at most 63 characters (`driverName` in resource.k8s.io/v1alpha2).
pub fn check_driver(name: &str) -> Result<(), NameError> {
    let problem = if name.len() > MAX_LABEL {
        Some("it is longer than 63 characters")
    } else {
        subdomain_problem(name)
    };
    problem.map_or(Ok(()), |problem| {
        Err(NameError::Driver {
            name: name.to_owned(),
            problem,
        })
    })
}

fn extended_resource_problem(name: &str) -> Option<&'static str> {
    let Some((domain, rest)) = name.split_once('/') else {
        return Some("it has no domain before a slash");
    };
    if name.contains(NATIVE) {
        return Some("the domain kubernetes.io belongs to Kubernetes");
    }
    if name.starts_with(QUOTA_PREFIX) {
        return Some("it begins with \"requests.\", like a quota");
    }
    if domain.len() + QUOTA_PREFIX.len() > MAX_SUBDOMAIN {
        return Some("the part before the slash is longer than 244 characters");
    }
    if let Some(problem) = subdomain_problem(domain) {
        return Some(problem);
    }
    let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = rest.as_bytes();
    if bytes.len() > MAX_LABEL {
        Some("the part after the slash is longer than 63 characters")
    } else if !edge(bytes.first()) || !edge(bytes.last()) {
        Some("the part after the slash must begin and end with a letter or digit")
    } else if !bytes
        .iter()
        .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
    {
        Some("the part after the slash may have letters, digits and -_. only")
    } else {
        None
    }
}

/// Returns the violated rule of DNS subdomains (RFC 1123, as Kubernetes applies it), if any.
fn subdomain_problem(domain: &str) -> Option<&'static str> {
    let edge =
        |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    if domain.len() > MAX_SUBDOMAIN {
        return Some("the domain is longer than 253 characters");
    }
    domain.split('.').find_map(|label| {
        let bytes = label.as_bytes();
        if !edge(bytes.first()) || !edge(bytes.last()) {
            Some("each part of the domain must begin and end with a lowercase letter or digit")
        } else if !bytes.iter().all(|byte| edge(Some(byte)) || *byte == b'-') {
            Some("the domain may have lowercase letters, digits, - and . only")
        } else {
            None
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_extended_resources_that_kubelet_takes_are_taken() {
        let longest = format!(
            "{}.{}.{}.{}/{}",
            "a".repeat(63),
            "b".repeat(63),
            "c".repeat(63),
            "d".repeat(52),
            "N".repeat(63)
        );
        for name in [
            "example.com/serial-port",
            "a/B",
            "drayman.dev/x_y.z",
            "1.2/3",
            longest.as_str(),
        ] {
            assert_eq!(check_extended_resource(name), Ok(()), "{name}");
        }
        assert_eq!(longest.split('/').next().unwrap().len(), 244);
    }

    #[test]
    fn names_of_extended_resources_that_kubelet_refuses_are_refused_with_a_reason() {
        let too_long = format!(
            "{}.{}.{}.{}/x",
            "a".repeat(63),
            "b".repeat(63),
            "c".repeat(63),
            "d".repeat(53)
        );
        let long_name = format!("a/{}", "x".repeat(64));
        for (name, problem) in [
            ("", "no domain"),
            ("cpu", "no domain"),
            ("kubernetes.io/x", "belongs to Kubernetes"),
            ("foo.kubernetes.io/x", "belongs to Kubernetes"),
            ("requests.example.com/x", "like a quota"),
            ("/x", "each part of the domain"),
            ("Example.com/x", "each part of the domain"),
            ("exAmple.com/x", "lowercase letters"),
            ("a..b/x", "each part of the domain"),
            ("../../etc/x", "each part of the domain"),
            ("a/", "begin and end"),
            ("a/-x", "begin and end"),
            ("a/b/c", "only"),
            ("a/b c", "only"),
            ("a/b\0c", "only"),
            (&too_long, "244"),
            (&long_name, "63"),
        ] {
            let refused = check_extended_resource(name).unwrap_err();
            assert!(refused.to_string().contains(problem), "{name}: {refused}");
            assert_eq!(refused.reason(), "InvalidResourceName");
        }
    }

    #[test]
    fn a_driver_has_the_name_of_a_short_domain() {
        assert_eq!(check_driver("drayman.dev"), Ok(()));
        assert_eq!(check_driver(&"a".repeat(63)), Ok(()));
        for name in [
            "",
            ".",
            "..",
            "a/b",
            "../x",
            "A",
            "a_b",
            "-a",
            "a-",
            "a..b",
            "é",
            &"a".repeat(64),
        ] {
            assert_eq!(
                check_driver(name).unwrap_err().reason(),
                "InvalidDriverName",
                "{name}"
            );
        }
    }
}
