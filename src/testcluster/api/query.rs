//! Decodes query parameters like the real server (`k8s.io/apimachinery/pkg/runtime/converter`, and the validation of
//! `ListOptions`).

use std::collections::BTreeMap;
use std::num::IntErrorKind;

use super::field_error::FieldError;
use super::kinds::ResourcePath;
use super::selector::ObjectSelector;
use super::status_error::StatusError;

/// Query parameters of a request.
pub(crate) struct Query(BTreeMap<String, String>);

impl Query {
    pub(crate) fn read(query: &str) -> Self {
        Self(
            query
                .split('&')
                .filter(|pair| !pair.is_empty())
                .map(|pair| {
                    let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
                    let text = |text: &str| percent_decoded(&text.replace('+', " "));
                    (text(key), text(value))
                })
                .collect(),
        )
    }

    /// Returns a string, empty if missing.
    pub(crate) fn text(&self, key: &str) -> &str {
        self.0.get(key).map(String::as_str).unwrap_or_default()
    }

    /// Returns a string, if present.
    pub(crate) fn given(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// Returns a boolean: a present value is true unless it is `false` or `0`.
    pub(crate) fn is(&self, key: &str) -> bool {
        self.given(key).is_some_and(|text| !matches!(text, "false" | "0"))
    }

    /// Returns a number.
    pub(crate) fn number(&self, key: &str) -> Result<Option<i64>, StatusError> {
        let Some(text) = self.given(key) else {
            return Ok(None);
        };
        text.parse().map(Some).map_err(|error: std::num::ParseIntError| {
            StatusError::bad_request(format!("strconv.ParseInt: parsing {text:?}: {}", why(&error)))
        })
    }
}

/// Formats a parse error like Go.
fn why(error: &std::num::ParseIntError) -> &'static str {
    match error.kind() {
        IntErrorKind::PosOverflow | IntErrorKind::NegOverflow => "value out of range",
        _ => "invalid syntax",
    }
}

/// Parses a resource version; `None` if any version will do.
pub(crate) fn version(text: &str) -> Result<Option<u64>, StatusError> {
    match text {
        "" | "0" => Ok(None),
        text => text.parse().map(Some).map_err(|error| {
            StatusError::internal(format!(
                "resourceVersion: Invalid value: {text:?}: strconv.ParseUint: parsing {text:?}: {}",
                why(&error)
            ))
        }),
    }
}

/// Parameters of a list or watch.
#[derive(Clone, Debug, Default)]
pub(crate) struct ListQuery {
    pub(crate) selector: ObjectSelector,
    pub(crate) limit: Option<usize>,
    /// Version of the first page (0 for the current one), and the last returned object.
    pub(crate) continued: Option<(u64, (String, String))>,
    pub(crate) version: String,
    pub(crate) exact: bool,
}

impl ListQuery {
    /// Returns the version of the list.
    pub(super) fn version(&self, current: u64) -> Result<u64, StatusError> {
        match version(&self.version)? {
            Some(asked) if asked > current => Err(StatusError::from_the_future(asked, current)),
            Some(asked) if self.exact => Ok(asked),
            _ => Ok(current),
        }
    }
}

/// Decodes the parameters of a list, or of a watch's initial list.
pub(crate) fn list_query(target: &ResourcePath, query: &Query) -> Result<ListQuery, StatusError> {
    let limit = query.number("limit")?.unwrap_or(0);
    // Only validated: a list never blocks.
    query.number("timeoutSeconds")?;
    let errors = wrong_match(query);
    if !errors.is_empty() {
        return Err(StatusError::options("ListOptions", &errors));
    }
    let continued = match query.text("continue") {
        "" => None,
        text => {
            let token: Result<(u64, String, String), _> = serde_json::from_str(text);
            let (version, namespace, name) = token.map_err(|_| {
                StatusError::bad_request("continue key is not valid: it is not one that was given out")
            })?;
            if !matches!(query.text("resourceVersion"), "" | "0") {
                return Err(StatusError::bad_request(
                    "specifying resource version is not allowed when using continue",
                ));
            }
            Some((version, (namespace, name)))
        }
    };
    Ok(ListQuery {
        selector: ObjectSelector::read(
            &target.kind,
            query.text("labelSelector"),
            query.text("fieldSelector"),
        )?,
        limit: usize::try_from(limit).ok().filter(|limit| *limit > 0),
        continued,
        version: query.text("resourceVersion").to_owned(),
        exact: query.text("resourceVersionMatch") == "Exact",
    })
}

/// Mirrors `ValidateListOptions`.
fn wrong_match(query: &Query) -> Vec<FieldError> {
    const FIELD: &str = "resourceVersionMatch";
    const INITIAL: &str = "sendInitialEvents";
    let asked = query.text(FIELD);
    let mut errors = Vec::new();
    let watches = query.is("watch");
    let version = query.text("resourceVersion");
    let initial = query.given(INITIAL).is_some();
    if initial && watches {
        if asked != "NotOlderThan" {
            let detail = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan";
            errors.push(FieldError::forbidden(FIELD, detail));
        }
        let detail = "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled";
        errors.push(FieldError::forbidden(INITIAL, detail));
    } else if initial {
        errors.push(FieldError::forbidden(
            INITIAL,
            "sendInitialEvents is forbidden for list",
        ));
    }
    if asked.is_empty() {
        return errors;
    }
    if watches && !initial {
        let detail = "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided";
        errors.push(FieldError::forbidden(FIELD, detail));
    }
    if !watches && version.is_empty() {
        let detail = "resourceVersionMatch is forbidden unless resourceVersion is provided";
        errors.push(FieldError::forbidden(FIELD, detail));
    }
    if !query.text("continue").is_empty() {
        let detail = "resourceVersionMatch is forbidden when continue is provided";
        errors.push(FieldError::forbidden(FIELD, detail));
    }
    let supported: &[&str] = if watches {
        &["NotOlderThan"]
    } else {
        &["Exact", "NotOlderThan", ""]
    };
    if !supported.contains(&asked) {
        errors.push(FieldError::not_supported(FIELD, asked, supported));
    }
    if !watches && asked == "Exact" && version == "0" {
        let detail = "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"";
        errors.push(FieldError::forbidden(FIELD, detail));
    }
    errors
}

/// Decodes percent escapes.
pub(crate) fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    loop {
        rest = match rest {
            [] => break,
            [b'%', high, low, rest @ ..] => {
                let digits = [*high, *low];
                let byte = std::str::from_utf8(&digits)
                    .ok()
                    .and_then(|digits| u8::from_str_radix(digits, 16).ok());
                match byte {
                    Some(byte) => bytes.push(byte),
                    None => bytes.extend_from_slice(&[b'%', *high, *low]),
                }
                rest
            }
            [byte, rest @ ..] => {
                bytes.push(*byte);
                rest
            }
        };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_numbers_or_refused() {
        let query = Query::read("a=7&b=-1&c=abc&d=18446744073709551615&e=&f=1.5");
        assert_eq!(query.number("a").unwrap(), Some(7));
        assert_eq!(query.number("b").unwrap(), Some(-1));
        assert_eq!(query.number("missing").unwrap(), None);
        for key in ["c", "d", "e", "f"] {
            assert_eq!(query.number(key).unwrap_err().code, 400, "{key}");
        }
    }

    #[test]
    fn only_false_values_are_false() {
        let query = Query::read("a=true&b=1&c&d=&e=maybe&f=false&g=0");
        for key in ["a", "b", "c", "d", "e"] {
            assert!(query.is(key), "{key}");
        }
        for key in ["f", "g", "missing"] {
            assert!(!query.is(key), "{key}");
        }
    }

    #[test]
    fn escaped_parameters_are_decoded() {
        let query = Query::read("a=a%2Fb+c%2B%zz%");
        assert_eq!(query.text("a"), "a/b c+%zz%");
    }
}
