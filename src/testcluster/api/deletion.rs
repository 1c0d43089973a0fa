//! Decodes and validates `DeleteOptions`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, Preconditions};
use serde_json::Value;

use super::field_error::FieldError;
use super::query::Query;
use super::status_error::StatusError;

#[derive(Clone, Debug, Default)]
pub(crate) struct Deletion {
    /// Grace period in seconds; only pods have one.
    pub(crate) grace: Option<i64>,
    /// Required uid; empty matches any.
    pub(crate) uid: String,
    /// Required resource version; empty matches any.
    pub(crate) version: String,
    /// Whether the request is a dry run.
    pub(crate) dry_run: bool,
}

impl Deletion {
    /// Reads the options from the body, or from the query parameters if there is no body.
    pub(crate) fn read(body: Option<Value>, query: &Query) -> Result<Self, StatusError> {
        let options = match body {
            Some(body) => from_body(body)?,
            None => DeleteOptions {
                grace_period_seconds: query.number("gracePeriodSeconds")?,
                propagation_policy: query.given("propagationPolicy").map(str::to_owned),
                orphan_dependents: query
                    .given("orphanDependents")
                    .map(|_| query.is("orphanDependents")),
                dry_run: query.given("dryRun").map(|given| vec![given.to_owned()]),
                ..DeleteOptions::default()
            },
        };
        let dry_run = options.dry_run.unwrap_or_default();
        let policy = options.propagation_policy.as_deref();
        let errors = wrong(&dry_run, policy, options.orphan_dependents);
        if !errors.is_empty() {
            return Err(StatusError::options("DeleteOptions", &errors));
        }
        if options.orphan_dependents == Some(true) || !matches!(policy, None | Some("Background")) {
            return Err(StatusError::bad_request(format!(
                "propagationPolicy {:?} is not played on this stage: dependents are deleted in the background",
                policy.unwrap_or("Orphan")
            )));
        }
        let Preconditions {
            uid,
            resource_version,
        } = options.preconditions.unwrap_or_default();
        Ok(Self {
            // A negative grace period means one second.
            grace: options
                .grace_period_seconds
                .map(|seconds| if seconds < 0 { 1 } else { seconds }),
            uid: uid.unwrap_or_default(),
            version: resource_version.unwrap_or_default(),
            dry_run: !dry_run.is_empty(),
        })
    }
}

fn from_body(body: Value) -> Result<DeleteOptions, StatusError> {
    match &body {
        Value::Null => return Ok(DeleteOptions::default()),
        Value::Object(_) => {}
        _ => {
            return Err(StatusError::internal(
                "couldn't get version/kind; json parse error: json: cannot unmarshal it into an object",
            ));
        }
    }
    let options: DeleteOptions =
        serde_json::from_value(body).map_err(|error| StatusError::internal(format!("json: {error}")))?;
    match options.kind.as_deref() {
        None | Some("" | "DeleteOptions") => Ok(options),
        Some(kind) => Err(StatusError::internal(format!(
            "no kind {kind:?} is registered for version {:?} in scheme \"pkg/runtime/scheme.go:100\"",
            options.api_version.unwrap_or_default()
        ))),
    }
}

/// Mirrors `ValidateDeleteOptions`.
fn wrong(dry_run: &[String], policy: Option<&str>, orphan: Option<bool>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let supported = ["Foreground", "Background", "Orphan", "nil"];
    match policy {
        Some(policy) if orphan.is_some() => errors.push(FieldError::invalid(
            "propagationPolicy",
            policy,
            "orphanDependents and deletionPropagation cannot be both set",
        )),
        Some(policy) if !matches!(policy, "Foreground" | "Background" | "Orphan") => {
            errors.push(FieldError::not_supported("propagationPolicy", policy, &supported));
        }
        _ => {}
    }
    errors.extend(wrong_dry_run(dry_run));
    errors
}

/// Mirrors `ValidateDryRun`.
pub(crate) fn wrong_dry_run(dry_run: &[String]) -> Option<FieldError> {
    let shown: Vec<String> = dry_run.iter().map(|each| format!("{each:?}")).collect();
    dry_run.iter().any(|each| each != "All").then(|| FieldError {
        cause: "FieldValueNotSupported",
        field: "dryRun".to_owned(),
        message: format!(
            "Unsupported value: []string{{{}}}: supported values: \"All\"",
            shown.join(", ")
        ),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: Value) -> Result<Deletion, StatusError> {
        Deletion::read(Some(body), &Query::read(""))
    }

    #[test]
    fn invalid_delete_options_are_refused() {
        for body in [
            json!([]),
            json!(7),
            json!({ "gracePeriodSeconds": "x" }),
            json!({ "preconditions": 7 }),
            json!({ "kind": "Pod", "apiVersion": "v1" }),
        ] {
            assert_eq!(read(body.clone()).unwrap_err().code, 500, "{body}");
        }
        assert!(read(Value::Null).is_ok());
    }

    #[test]
    fn dry_run_is_read_from_the_body_or_the_parameter() {
        assert!(read(json!({ "dryRun": ["All"] })).unwrap().dry_run);
        assert_eq!(read(json!({ "dryRun": ["Some"] })).unwrap_err().code, 422);
        let query = Query::read("dryRun=All");
        assert!(Deletion::read(None, &query).unwrap().dry_run);
        // Same as the real server.
        assert!(!Deletion::read(Some(json!({})), &query).unwrap().dry_run);
    }

    #[test]
    fn a_negative_grace_period_becomes_one_second() {
        assert_eq!(read(json!({ "gracePeriodSeconds": -5 })).unwrap().grace, Some(1));
        assert_eq!(
            read(json!({ "gracePeriodSeconds": i64::MAX })).unwrap().grace,
            Some(i64::MAX)
        );
    }
}
