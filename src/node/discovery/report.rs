//! Candidates of a search and their outcome, for display.

use schemars::JsonSchema;
use serde::Serialize;

/// A path, device or pattern that a kind may describe.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Candidate {
    /// Name of the kind.
    pub kind: String,
    /// The path, the USB or PCI device, or a pattern without matches.
    pub candidate: String,
    /// Name of the resulting device; absent if the candidate was rejected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Why it was rejected; empty if it was not.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Whether the operator probably meant this candidate to be a device, but it was rejected.
    pub problem: bool,
}
