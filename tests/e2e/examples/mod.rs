//! Runs the commands of every README in `examples/` on one real cluster.

mod folder;
mod pattern;
mod run;
mod user;
