//! Shared by the tests of this module and of its runtime.

pub(crate) mod fixture;
