//! Every folder of `examples/`, run as its README says, on one real cluster.

mod folder;
mod pattern;
mod person;
mod run;
