//! Checks the documentation: commands exist and work, links have targets, cited tests exist, and generated pages are up to date.

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
