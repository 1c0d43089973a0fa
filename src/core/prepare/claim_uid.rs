//! Validation of claim uids, which become part of file names and CDI ids.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The uid of a ResourceClaim: a UUID in the form that the API server writes, lower case with hyphens.
///
/// Other spellings are rejected, so that a claim has one name on this node and a uid cannot escape a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ClaimUid(String);

/// The text is not a valid claim uid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the claim uid {0:?} is not a UUID as the API server writes it (lower case, with hyphens)")]
pub struct ClaimUidError(String);

/// Maximum length, in characters, of a rejected text quoted in an error.
const SHOWN_MAX: usize = 64;

impl ClaimUid {
    /// Parses and validates a uid.
    pub fn parse(text: &str) -> Result<Self, ClaimUidError> {
        match Uuid::try_parse(text) {
            Ok(uuid) if uuid.hyphenated().to_string() == text => Ok(Self(text.to_owned())),
            _ => Err(ClaimUidError(text.chars().take(SHOWN_MAX).collect())),
        }
    }

    /// The uid as a string slice.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ClaimUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for ClaimUid {
    type Error = ClaimUidError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Self::parse(&text)
    }
}

impl From<ClaimUid> for String {
    fn from(uid: ClaimUid) -> Self {
        uid.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_form_of_the_api_server_is_taken() {
        let text = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10";
        assert_eq!(ClaimUid::parse(text).unwrap().as_str(), text);
    }

    #[test]
    fn every_other_spelling_of_a_uuid_is_refused() {
        for text in [
            "7D0A2F5E-0C5B-4F0E-9A53-6C3B1F1F2A10",
            "7d0a2f5e0c5b4f0e9a536c3b1f1f2a10",
            "{7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10}",
            "urn:uuid:7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10",
            "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10 ",
            "",
        ] {
            assert!(ClaimUid::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn an_error_repeats_only_the_beginning_of_a_long_text() {
        let error = ClaimUid::parse(&"x".repeat(1_000_000)).unwrap_err();
        assert!(error.to_string().len() < 200);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

        #[test]
        fn nothing_that_could_leave_a_directory_is_taken(text in r"(\.\./|[a-f0-9/.\\\x00-]){0,40}") {
            if let Ok(uid) = ClaimUid::parse(&text) {
                prop_assert!(uid.as_str().bytes().all(|b| b.is_ascii_hexdigit() || b == b'-'));
                prop_assert_eq!(uid.as_str().len(), 36);
            }
        }
    }
}
