//! What the pages tell people to type on a cluster, typed on one: blocks that are marked `sh cluster` and `sh chart`, and every
//! object of a block marked `yaml object` (`tests/docs/blocks.rs` lists the marks).

mod installed;
mod objects;
mod tour;
