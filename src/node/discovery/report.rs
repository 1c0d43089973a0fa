//! What a search has looked at and what became of it, for people.

use serde::Serialize;

/// Something that a kind describes, or might have described.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Candidate {
    /// The kind of the configuration.
    pub kind: String,
    /// The path, the USB or PCI device, or the pattern if nothing matched it.
    pub candidate: String,
    /// The name of the device that it became; absent if it was not taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Why it was not taken; empty if it was.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Whether somebody should know: it looks as if it was meant, and was not taken.
    pub problem: bool,
}
