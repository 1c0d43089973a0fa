//! The claim label `<driver>/node` with the node on which the claim is to be allocated. It lets programs on a node watch only the claims
//! of that node.

/// The label's name, after the driver's name and a slash.
pub const NODE_LABEL: &str = "node";
/// The value on a claim that is allocated without a selected node. It is not a valid node name.
pub const LABEL_OF_ANY_NODE: &str = "Any";
/// Maximum length of a label value.
const VALUE_MAX: usize = 63;
/// The length of the suffix: a hyphen and a checksum in hexadecimal digits.
const CHECKSUM_LENGTH: usize = 9;

/// Returns the label value for a node: the node's name, or a prefix of it with a checksum of the whole name, since a label value
/// has a lower length limit than a node name.
pub fn label_of_node(node_name: &str) -> String {
    if node_name.len() <= VALUE_MAX {
        return node_name.to_owned();
    }
    let start: String = node_name.chars().take(VALUE_MAX - CHECKSUM_LENGTH).collect();
    let start = start.trim_end_matches(['-', '.']);
    format!("{start}-{:08x}", crc32fast::hash(node_name.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_has_a_label_of_its_own_however_long_its_name_is() {
        assert_eq!(label_of_node("node-a.example.com"), "node-a.example.com");
        let long = |last: char| format!("{}{last}", "node-".repeat(40));
        assert!(label_of_node(&long('a')).len() <= VALUE_MAX);
        assert_ne!(label_of_node(&long('a')), label_of_node(&long('b')));
    }
}
