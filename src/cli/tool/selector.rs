//! Selectors of devices by attribute, in the syntax of kubectl's `--selector`.

use std::collections::BTreeMap;
use std::str::FromStr;

use crate::api::crd::GROUP;

/// Maximum number of requirements; each is compared with every device.
const REQUIREMENTS_MAX: usize = 32;

/// Requirements on the attributes of a device; all must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct AttributeSelector(Vec<AttributeRequirement>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum AttributeRequirement {
    Equals(String, String),
    /// Also holds without the attribute, as for labels.
    Differs(String, String),
    Exists(String),
    Missing(String),
}

impl FromStr for AttributeSelector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let requirements: Vec<AttributeRequirement> = text
            .split(',')
            .map(AttributeRequirement::read)
            .collect::<Result<_, _>>()?;
        if requirements.len() > REQUIREMENTS_MAX {
            return Err(format!("more than {REQUIREMENTS_MAX} requirements"));
        }
        Ok(Self(requirements))
    }
}

impl AttributeSelector {
    /// Returns whether the attributes of a device of `driver` match. A name without a domain is an attribute of the driver, or else one of
    /// ours: the configuration's devices have our domain under every driver name.
    pub(super) fn matches(&self, driver: &str, attributes: &BTreeMap<String, String>) -> bool {
        let value = |name: &str| {
            let qualified = || attributes.get(&format!("{driver}/{name}"));
            let unqualified = || attributes.get(name.strip_prefix(driver)?.strip_prefix('/')?);
            let ours = || attributes.get(&format!("{GROUP}/{name}"));
            attributes
                .get(name)
                .or_else(qualified)
                .or_else(unqualified)
                .or_else(ours)
        };
        self.0.iter().all(|requirement| match requirement {
            AttributeRequirement::Equals(name, expected) => value(name) == Some(expected),
            AttributeRequirement::Differs(name, excluded) => value(name) != Some(excluded),
            AttributeRequirement::Exists(name) => value(name).is_some(),
            AttributeRequirement::Missing(name) => value(name).is_none(),
        })
    }
}

impl AttributeRequirement {
    fn read(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is none of NAME=VALUE, NAME!=VALUE, NAME and !NAME, separated by commas");
        let (name, requirement): (&str, fn(String, String) -> Self) =
            match (text.split_once("!="), text.split_once('=')) {
                (Some((name, _)), _) => (name, Self::Differs),
                (None, Some((name, _))) => (name, Self::Equals),
                (None, None) => match text.trim().strip_prefix('!') {
                    Some(name) => (name, |name, _| Self::Missing(name)),
                    None => (text, |name, _| Self::Exists(name)),
                },
            };
        let value = text.get(name.len()..).unwrap_or_default();
        let value = value.trim_start_matches(['!', '=']).trim().to_owned();
        let name = name.trim();
        let is_part_of_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '/');
        if name.is_empty() || !name.chars().all(is_part_of_name) {
            return Err(wrong());
        }
        Ok(requirement(name.to_owned(), value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(attributes: &[(&str, &str)], cases: &[(&str, bool)]) {
        let attributes = attributes
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        for (text, expected) in cases {
            let matches = text
                .parse()
                .map(|selector: AttributeSelector| selector.matches("a.example", &attributes));
            assert_eq!(matches, Ok(*expected), "{text}");
        }
    }

    #[test]
    fn selectors_of_attributes_match_as_those_of_labels() {
        let attributes = [("a.example/vendorId", "046d"), ("serial", "x=1")];
        let cases = [
            ("vendorId=046d", true),
            ("vendorId==046d", true),
            ("a.example/vendorId = 046d", true),
            ("vendorId=046d,serial=x=1", true),
            ("a.example/serial", true),
            ("vendorId=046d,serial=other", false),
            ("vendorId!=046d", false),
            ("productId!=1", true),
            ("productId", false),
            ("!productId,vendorId", true),
            ("!vendorId", false),
        ];
        check(&attributes, &cases);
    }

    #[test]
    fn a_name_without_a_domain_is_of_the_driver_or_ours() {
        let attributes = [
            ("a.example/model", "theirs"),
            ("drayman.dev/model", "ours"),
            ("drayman.dev/vendor", "046d"),
        ];
        let cases = [
            ("vendor=046d", true),
            ("vendor!=046d", false),
            ("!vendor", false),
            ("drayman.dev/vendor=046d", true),
            ("a.example/vendor", false),
            ("model=theirs", true),
            ("model=ours", false),
            ("drayman.dev/model=ours", true),
        ];
        check(&attributes, &cases);
    }

    #[test]
    fn an_invalid_selector_is_refused_with_its_part() {
        for invalid in ["", "a=b,", "=b", "a b=c", "!", "a in (b)"] {
            let error = invalid.parse::<AttributeSelector>().unwrap_err();
            assert!(error.contains("NAME!=VALUE"), "{invalid}: {error}");
        }
        assert!(
            vec!["a"; 33]
                .join(",")
                .parse::<AttributeSelector>()
                .unwrap_err()
                .contains("32")
        );
    }
}
