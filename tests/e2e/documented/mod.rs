//! What the pages tell people to type on a cluster, typed on one: blocks that are marked `sh demo`, `sh cluster`, `sh chart`,
//! `sh terminal` and `sh release`, and every object of a block marked `yaml object` (`tests/docs/blocks.rs` lists the marks).

mod embedded;
mod installed;
mod objects;
mod released;
mod terminal;
mod tour;
