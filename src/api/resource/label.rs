//! The label of a claim that says on which node it is to be allocated: `<driver>/node`. Whatever runs on a node can so watch the claims
//! of this node alone.

/// The label's name, after the driver's name and a slash.
pub const NODE_LABEL: &str = "node";
/// The value on a claim that is allocated without a node in mind. No node can have this name.
pub const LABEL_OF_ANY_NODE: &str = "Any";
/// The length of a label's value, at most.
const VALUE_MAX: usize = 63;
/// The length of a checksum in hexadecimal digits, and the hyphen before it.
const CHECKSUM_LENGTH: usize = 9;

/// The value by which the label names a node: the node's name or, as a label's value is shorter than a node's name can be, its
/// beginning and a checksum of the whole.
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
