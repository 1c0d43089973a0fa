//! The documentation is true as far as a machine can tell: what it tells people to type exists and works, links lead somewhere,
//! tests that it names exist, and what is generated from the code is as the code is.

#![expect(clippy::panic, reason = "a helper of a test fails the test")]

mod architecture;
mod blocks;
mod book;
mod commands;
mod examples;
mod links;
mod lists;
mod names;
mod page;
mod reference;
mod scenarios;
mod schema;
mod security;
mod shell;
mod workflows;
