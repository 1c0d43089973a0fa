//! Evaluates the cluster objects that `drayman doctor` has read.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use jiff::{SignedDuration, Timestamp};
use schemars::JsonSchema;
use serde::Serialize;

use crate::api::resource::ResourceClass;
use crate::cli::objects::CustomResourceDefinition;
use crate::core::allocation::parameters::class_reference;
use crate::core::prepare::claims_api::{FIRST_STRUCTURED_MINOR, minor_of};

/// Minor versions of Kubernetes 1 that serve classic DRA as drayman uses it (`resource.k8s.io/v1alpha2`).
pub const MINORS: std::ops::RangeInclusive<u32> = 27..=30;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
pub enum Level {
    /// No problem found.
    Fine,
    /// Not checked, or possibly intended; no evidence of a problem.
    Note,
    /// Works, but needs attention.
    Warning,
    /// Prevents pods from getting devices.
    Problem,
}

/// A check and its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DoctorFinding {
    /// Severity.
    pub level: Level,
    /// Name of the check.
    pub check: &'static str,
    /// Result of the check.
    pub message: String,
    /// Suggested fix; absent if no action is needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl DoctorFinding {
    /// Returns a finding without a problem.
    pub fn fine(check: &'static str, message: impl Into<String>) -> Self {
        Self {
            level: Level::Fine,
            check,
            message: message.into(),
            fix: None,
        }
    }

    /// Returns a finding whose result is unknown, for the given reason, or possibly intended.
    pub fn note(check: &'static str, message: impl Into<String>) -> Self {
        Self {
            level: Level::Note,
            ..Self::fine(check, message)
        }
    }

    /// Returns a finding that needs attention.
    pub fn warning(check: &'static str, message: impl Into<String>, fix: impl Into<String>) -> Self {
        Self {
            level: Level::Warning,
            check,
            message: message.into(),
            fix: Some(fix.into()),
        }
    }

    /// Returns a finding that prevents pods from getting devices.
    pub fn problem(check: &'static str, message: impl Into<String>, fix: impl Into<String>) -> Self {
        Self {
            level: Level::Problem,
            ..Self::warning(check, message, fix)
        }
    }

    /// Returns the finding for an object that cannot be read.
    pub fn unread(error: &str) -> Self {
        Self::warning(
            "rights",
            error,
            "if a permission is missing, ask for it, or run the command with an account that has it; otherwise run the command again",
        )
    }
}

/// Joins the findings of checks. Read errors come last, each once: several checks read the same objects.
pub fn joined<E: Display>(checks: Vec<Result<Vec<DoctorFinding>, E>>) -> Vec<DoctorFinding> {
    let (mut findings, mut unread) = (Vec::new(), Vec::new());
    for check in checks {
        match check {
            Ok(found) => findings.extend(found),
            Err(error) => {
                let finding = DoctorFinding::unread(&error.to_string());
                if !unread.contains(&finding) {
                    unread.push(finding);
                }
            }
        }
    }
    findings.extend(unread);
    findings
}

/// Lists three names and counts the others.
pub(super) fn some(names: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    first(names, 3)
}

/// Lists the first names and counts the others.
pub fn first(names: impl IntoIterator<Item = impl AsRef<str>>, max: usize) -> String {
    let mut names: Vec<String> = names.into_iter().map(|name| name.as_ref().to_owned()).collect();
    names.dedup();
    match names.get(..max) {
        Some(shown) if names.len() > max => format!("{} and {} more", shown.join(", "), names.len() - max),
        _ => names.join(", "),
    }
}

/// The minor version of an API server of Kubernetes 1. Managed clusters append a plus sign.
pub fn api_server_minor(major: &str, minor: &str) -> Option<u32> {
    minor_of(&format!("v{major}.{minor}"))
}

/// Checks the API server's version and, if claims are needed, whether it serves classic DRA. The error of
/// `serves_resource` says that this is unknown, and why.
pub fn server(
    major: &str,
    minor: &str,
    serves_resource: Result<bool, &str>,
    needs_claims: bool,
) -> Vec<DoctorFinding> {
    let number = api_server_minor(major, minor).unwrap_or_default();
    let version = format!("Kubernetes {major}.{minor}");
    let classic = MINORS.contains(&number);
    let newest = MINORS.end();
    let check = "version";
    let can_claim = classic && serves_resource != Ok(false);
    if !needs_claims && !can_claim {
        let what = "does not serve classic Dynamic Resource Allocation, which no device here needs: all are extended resources";
        return vec![DoctorFinding::fine(check, format!("{version} {what}"))];
    }
    let unknown = |error| {
        DoctorFinding::warning(
            "api",
            error,
            "if you may not read the path /apis, ask for the ClusterRole system:discovery; otherwise see the API server's log",
        )
    };
    if !classic {
        let problem = DoctorFinding::problem(
            check,
            format!(
                "{version} serves neither resource.k8s.io/v1 nor v1alpha2 in the form of 1.27 to 1.{newest}"
            ),
            "claims need 1.27 to 1.30, or 1.34 and later; devices of mode extended-resource are served through the device plugin API: if \
             you have no others, ignore this",
        );
        return match serves_resource {
            Ok(_) => vec![problem],
            // A later version may serve v1.
            Err(error) if number >= FIRST_STRUCTURED_MINOR => vec![unknown(error)],
            Err(error) => vec![problem, unknown(error)],
        };
    }
    let mut findings = vec![DoctorFinding::fine(
        check,
        format!("{version} has classic Dynamic Resource Allocation"),
    )];
    let check = "api";
    findings.push(match serves_resource {
        Ok(true) => DoctorFinding::fine(check, "resource.k8s.io/v1alpha2 is served"),
        Ok(false) => DoctorFinding::problem(
            check,
            "resource.k8s.io/v1alpha2 is not served",
            "start kube-apiserver with --feature-gates=DynamicResourceAllocation=true and \
             --runtime-config=resource.k8s.io/v1alpha2=true, and set the gate in kube-controller-manager, kube-scheduler \
             and every kubelet too",
        ),
        Err(error) => unknown(error),
    });
    findings
}

/// Checks our CRDs.
pub fn definitions<'a>(
    required: impl IntoIterator<Item = &'a str>,
    version: &str,
    found: &[CustomResourceDefinition],
) -> Vec<DoctorFinding> {
    let check = "definitions";
    let fix = "drayman crds | kubectl apply --server-side --force-conflicts -f -";
    let is_served = |definition: &CustomResourceDefinition| {
        let mut versions = definition.spec.versions.iter();
        versions.any(|of| of.served && of.name == version)
    };
    let wrong: Vec<DoctorFinding> = required
        .into_iter()
        .filter_map(|name| {
            let mut found = found.iter();
            match found.find(|definition| definition.metadata.name.as_deref() == Some(name)) {
                None => Some(format!("CustomResourceDefinition {name} is missing")),
                Some(definition) if !is_served(definition) => Some(format!(
                    "CustomResourceDefinition {name} does not serve {version}"
                )),
                Some(_) => None,
            }
        })
        .map(|problem| DoctorFinding::problem(check, problem, fix))
        .collect();
    if wrong.is_empty() {
        vec![DoctorFinding::fine(
            check,
            format!("all kinds of drayman.dev/{version} are defined"),
        )]
    } else {
        wrong
    }
}

/// Checks the controller's Lease. `lease` holds its renewal time, duration and holder, if a Lease with the driver's
/// name exists.
pub fn lease(
    lease: Option<(Timestamp, SignedDuration, &str)>,
    now: Timestamp,
    needs_claims: bool,
) -> DoctorFinding {
    let check = "controller";
    match lease {
        Some((renewed, duration, holder))
            if !holder.is_empty() && now.duration_since(renewed) <= duration =>
        {
            DoctorFinding::fine(check, format!("{holder} leads"))
        }
        _ if !needs_claims => DoctorFinding::fine(check, "no controller leads; extended resources need none"),
        None => DoctorFinding::warning(
            check,
            "the driver has no Lease, so it is unknown whether a controller runs",
            "check that its Deployment is ready; with --leader-elect it holds a Lease",
        ),
        Some((_, _, "")) => DoctorFinding::problem(
            check,
            "no controller leads",
            "start one: kubectl get deployments -A",
        ),
        Some((renewed, _, holder)) => {
            let seconds = now.duration_since(renewed).as_secs();
            DoctorFinding::problem(
                check,
                format!("{holder} stopped leading {seconds} s ago, and no controller has taken over"),
                "check the controller's pods and logs",
            )
        }
    }
}

/// Checks the classes of `driver`. `parameters` maps the name of each DeviceClassParameters object to its kind; `kinds`
/// are the kinds in any inventory.
pub fn classes(
    driver: &str,
    classes: &[ResourceClass],
    parameters: &BTreeMap<String, String>,
    kinds: &BTreeSet<String>,
) -> Vec<DoctorFinding> {
    let check = "classes";
    let mut findings = Vec::new();
    let mut ours = 0;
    for class in classes {
        let name = class.metadata.name.as_deref().unwrap_or_default();
        if class.driver_name != driver {
            if class.driver_name.eq_ignore_ascii_case(driver) {
                findings.push(DoctorFinding::problem(
                    check,
                    format!(
                        "ResourceClass {name} has driverName {}, which is not {driver}",
                        class.driver_name
                    ),
                    format!("recreate the class with driverName {driver}"),
                ));
            }
            continue;
        }
        ours += 1;
        if class.structured_parameters == Some(true) {
            findings.push(DoctorFinding::problem(
                check,
                format!("ResourceClass {name} has structuredParameters, which drayman ignores"),
                "recreate the class without structuredParameters",
            ));
            continue;
        }
        match class_reference(class) {
            Err(error) => findings.push(DoctorFinding::problem(
                check,
                error.to_string(),
                "recreate the class with this correction",
            )),
            Ok(reference) => match parameters.get(reference) {
                None => findings.push(DoctorFinding::problem(
                    check,
                    format!("ResourceClass {name}: there is no DeviceClassParameters {reference}"),
                    "create it",
                )),
                Some(kind) if !kinds.contains(kind) => findings.push(DoctorFinding::warning(
                    check,
                    format!("ResourceClass {name}: no node has a device of kind {kind}"),
                    "check the kinds of the nodes' configuration, and run `drayman node discover` on a node",
                )),
                Some(_) => {}
            },
        }
    }
    if ours == 0 {
        findings.push(DoctorFinding::warning(
            check,
            format!("no ResourceClass has driverName {driver}"),
            "create one; until then no claim can ask for a device",
        ));
    } else if findings.is_empty() {
        findings.push(DoctorFinding::fine(
            check,
            format!("{ours} of driver {driver}, all usable"),
        ));
    }
    findings
}

/// Returns the worst level, for tests.
#[cfg(test)]
pub(super) fn worst(findings: &[DoctorFinding]) -> Level {
    let levels = findings.iter().map(|finding| finding.level);
    levels.max().unwrap_or(Level::Fine)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::allocation::tests::fixture::DRIVER;

    #[test]
    fn a_read_error_of_several_checks_is_one_finding() {
        let fine = || Ok(vec![DoctorFinding::fine("a", "fine")]);
        let findings = joined(vec![Err("no right"), fine(), Err("no right"), fine()]);
        let levels: Vec<Level> = findings.iter().map(|finding| finding.level).collect();
        assert_eq!(levels, [Level::Fine, Level::Fine, Level::Warning]);
    }

    #[test]
    fn a_server_is_fine_only_if_it_has_and_serves_the_api() {
        assert_eq!(worst(&server("1", "30", Ok(true), true)), Level::Fine);
        assert_eq!(worst(&server("1", "27+", Ok(true), true)), Level::Fine);
        assert_eq!(worst(&server("1", "30", Ok(false), true)), Level::Problem);
        assert_eq!(worst(&server("1", "32", Ok(true), true)), Level::Problem);
        assert_eq!(worst(&server("2", "30", Ok(true), true)), Level::Problem);
        for (minor, serves) in [("32", false), ("30", false), ("32", true)] {
            assert_eq!(worst(&server("1", minor, Ok(serves), false)), Level::Fine);
        }
    }

    #[test]
    fn an_unknown_answer_is_not_a_missing_api() {
        let worst_of = |minor| worst(&server("1", minor, Err("forbidden: nobody"), true));
        assert_eq!((worst_of("33"), worst_of("37")), (Level::Problem, Level::Warning));
        let findings = server("1", "30", Err("forbidden: nobody"), true);
        assert_eq!(worst(&findings), Level::Warning);
        let unknown = findings.iter().find(|finding| finding.check == "api").unwrap();
        assert!(
            unknown.message.contains("forbidden: nobody"),
            "{}",
            unknown.message
        );
    }

    #[test]
    fn a_definition_that_is_missing_or_of_another_version_is_named() {
        let found = |version: &str, served: bool| -> CustomResourceDefinition {
            let versions = serde_json::json!([{ "name": version, "served": served }]);
            let object = serde_json::json!({ "metadata": { "name": "a.drayman.dev" }, "spec": { "versions": versions } });
            serde_json::from_value(object).unwrap()
        };
        let level = |found: &[_]| worst(&definitions(["a.drayman.dev"], "v1alpha1", found));
        assert_eq!(level(&[found("v1alpha1", true)]), Level::Fine);
        assert_eq!(level(&[found("v1alpha1", false)]), Level::Problem);
        assert_eq!(level(&[found("v2", true)]), Level::Problem);
        assert_eq!(level(&[]), Level::Problem);
    }

    #[test]
    fn a_lease_shows_whether_a_controller_leads() {
        let now = Timestamp::from_second(1000).unwrap();
        let renewed = |ago: i64| Timestamp::from_second(1000 - ago).unwrap();
        let level = |ago, holder| {
            lease(
                Some((renewed(ago), SignedDuration::from_secs(15), holder)),
                now,
                true,
            )
            .level
        };
        assert_eq!(level(3, "pod-a"), Level::Fine);
        assert_eq!(level(60, "pod-a"), Level::Problem);
        assert_eq!(level(3, ""), Level::Problem);
        assert_eq!(lease(None, now, true).level, Level::Warning);
        assert_eq!(lease(None, now, false).level, Level::Fine);
        // Extended resources need no controller, even if one has run before.
        let ended = |holder| Some((renewed(60), SignedDuration::from_secs(15), holder));
        assert_eq!(lease(ended("pod-a"), now, false).level, Level::Fine);
        assert_eq!(lease(ended(""), now, false).level, Level::Fine);
    }

    #[test]
    fn a_class_needs_existing_parameters_and_a_published_kind() {
        let class: ResourceClass = serde_json::from_value(serde_json::json!({
            "metadata": { "name": "radio" }, "driverName": DRIVER,
            "parametersRef": { "apiGroup": "drayman.dev", "kind": "DeviceClassParameters", "name": "radio" },
        }))
        .unwrap();
        let parameters = BTreeMap::from([("radio".to_owned(), "test".to_owned())]);
        let kinds = BTreeSet::from(["test".to_owned()]);
        let all = std::slice::from_ref(&class);
        assert_eq!(worst(&classes(DRIVER, all, &parameters, &kinds)), Level::Fine);
        assert_eq!(
            worst(&classes(DRIVER, all, &parameters, &BTreeSet::new())),
            Level::Warning
        );
        assert_eq!(
            worst(&classes(DRIVER, all, &BTreeMap::new(), &kinds)),
            Level::Problem
        );
        assert_eq!(worst(&classes("other", all, &parameters, &kinds)), Level::Warning);
        assert_eq!(
            worst(&classes(&DRIVER.to_uppercase(), all, &parameters, &kinds)),
            Level::Problem
        );
    }
}
