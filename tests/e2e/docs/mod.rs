//! Runs the scripts of the documentation on a cluster: blocks marked `sh demo`, `sh cluster`, `sh chart`, `sh terminal` and `sh release`;
//! and validates every object of a block marked `yaml object` (`tests/docs/blocks.rs` lists the marks).

mod embedded;
mod installed;
mod objects;
mod released;
mod terminal;
mod tour;
