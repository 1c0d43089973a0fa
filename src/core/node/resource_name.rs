//! The names of extended resources, checked as kubelet and the API server check them.
//!
//! Upstream: `IsExtendedResourceName` in `pkg/apis/core/v1/helper/helpers.go`, and `IsQualifiedName` in
//! `k8s.io/apimachinery/pkg/util/validation`.

use super::naming::is_dns_subdomain;

/// What kubelet puts before the name when it makes a quota of it; the result must still be a qualified name.
const QUOTA_PREFIX: &str = "requests.";
/// The length of the prefix of a qualified name, at most.
const PREFIX_MAX: usize = 253;
/// The length of the name part, at most.
const NAME_MAX: usize = 63;

/// Why a text cannot be the name of an extended resource.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResourceNameError {
    /// There is no domain before the name.
    #[error("has no domain: write it as <domain>/<name>, for instance example.com/camera")]
    NoDomain,
    /// The domain belongs to Kubernetes.
    #[error(
        "has a domain that ends in kubernetes.io, which is kept for Kubernetes itself: use a domain of your own"
    )]
    KubernetesDomain,
    /// Kubernetes uses that beginning for quotas.
    #[error("begins with \"requests.\", which Kubernetes keeps for quotas: use another domain")]
    QuotaPrefix,
    /// The domain is not a DNS subdomain, or too long.
    #[error("has a domain that is not a lower-case DNS name of at most {} characters", PREFIX_MAX - QUOTA_PREFIX.len())]
    Domain,
    /// The part after the slash is not a name.
    #[error(
        "has a name that is not 1 to {NAME_MAX} letters, digits, '-', '_' or '.' with a letter or digit at both ends"
    )]
    Name,
}

/// Says whether a text can be the name of an extended resource.
pub fn check_resource_name(text: &str) -> Result<(), ResourceNameError> {
    let (domain, name) = text.split_once('/').ok_or(ResourceNameError::NoDomain)?;
    // The upstream check is a search for "kubernetes.io/", which refuses notkubernetes.io as well.
    if domain.ends_with("kubernetes.io") {
        return Err(ResourceNameError::KubernetesDomain);
    }
    if domain.starts_with(QUOTA_PREFIX) {
        return Err(ResourceNameError::QuotaPrefix);
    }
    if !is_dns_subdomain(domain, PREFIX_MAX - QUOTA_PREFIX.len()) {
        return Err(ResourceNameError::Domain);
    }
    let ends = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let named = name.len() <= NAME_MAX
        && name.bytes().all(inner)
        && ends(name.bytes().next())
        && ends(name.bytes().next_back());
    if named {
        Ok(())
    } else {
        Err(ResourceNameError::Name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_kubernetes_takes_are_taken() {
        let longest = format!("{}.example.com/{}", ["a"; 115].join("."), "n".repeat(63));
        for name in [
            "drayman.dev/test",
            "example.com/Camera_2.x-y",
            "vendor/gpu",
            "1.io/x",
            &longest,
        ] {
            assert_eq!(check_resource_name(name), Ok(()), "{name}");
        }
    }

    #[test]
    fn names_that_kubernetes_refuses_are_refused_with_the_reason() {
        use ResourceNameError as E;

        let long_domain = format!("{}.example.com/x", ["a"; 118].join("."));
        for (name, error) in [
            ("cpu", E::NoDomain),
            ("", E::NoDomain),
            ("kubernetes.io/x", E::KubernetesDomain),
            ("sub.kubernetes.io/x", E::KubernetesDomain),
            ("notkubernetes.io/x", E::KubernetesDomain),
            ("requests.example.com/x", E::QuotaPrefix),
            ("/x", E::Domain),
            ("Example.com/x", E::Domain),
            ("a..b/x", E::Domain),
            (&long_domain, E::Domain),
            ("example.com/", E::Name),
            ("example.com/a/b", E::Name),
            ("example.com/-x", E::Name),
            ("example.com/x\n", E::Name),
            (&format!("example.com/{}", "n".repeat(64)), E::Name),
        ] {
            assert_eq!(check_resource_name(name), Err(error), "{name}");
        }
    }
}
