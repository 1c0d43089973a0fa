//! The node's brain: who holds which device on this node, and one plan of what a container gets for both doors.

pub mod injection;
pub mod name;
