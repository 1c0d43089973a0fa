//! What must not be named where.

use std::fmt;
use std::path::Path;

use proc_macro2::TokenStream;

use crate::architecture::paths::{Mention, mentions};

/// The layers that each layer may name, itself apart. `driver` stands for `src/driver.rs`: a seam of plain data and one
/// trait, which both `core` and the shells speak. `main` is the program, and may name everything.
const LAYERS: [(&str, &[&str]); 9] = [
    ("api", &[]),
    ("driver", &["api"]),
    ("core", &["api", "driver"]),
    ("controller", &["api", "core", "driver"]),
    ("host", &["api", "core", "driver"]),
    ("node", &["api", "core"]),
    (
        "testcluster",
        &["api", "core", "driver", "controller", "host", "node"],
    ),
    (
        "testkit",
        &[
            "api",
            "core",
            "driver",
            "controller",
            "host",
            "node",
            "testcluster",
        ],
    ),
    (
        "cli",
        &[
            "api",
            "core",
            "driver",
            "controller",
            "host",
            "node",
            "testcluster",
        ],
    ),
];

/// Of the driver's seam, `core` may name the data of calls and answers, but neither the trait nor what is generic over it:
/// a call is a command for the shell.
const DRIVER_DATA: [&str; 8] = [
    "Verdict",
    "Finding",
    "Observation",
    "Holding",
    "CapacityChange",
    "CapacityCause",
    "DriverError",
    "DriverErrorKind",
];

/// What serves any driver, and what of the crate it may name within the layers that it may name at all: nothing that the built-in
/// driver knows of (its kinds, its resource handle, its devices). So a vendor's driver is no guest in somebody else's house.
const ANY_DRIVER: [(&[&str], &[&[&str]]); 3] = [
    (&["driver"], &[&["driver"], &["api", "resource"]]),
    (
        &["controller"],
        &[
            &["controller"],
            &["driver"],
            &["api", "resource"],
            &["core", "claims"],
            &["core", "distribution"],
            &["core", "lease"],
        ],
    ),
    (
        &["core", "claims"],
        &[
            &["driver"],
            &["api", "resource"],
            &["core", "claims"],
            &["core", "distribution"],
        ],
    ),
];

/// Paths that `core` must not name, nor anything below them.
const IMPURE_PATHS: [&str; 29] = [
    "futures",
    "glob",
    "inotify",
    "kube::Api",
    "kube::Client",
    "kube::Config",
    "kube::api::Api",
    "kube::client",
    "kube::config",
    "kube::runtime",
    "rand",
    "rustix",
    "std::collections::hash_map",
    "std::collections::hash_set",
    "std::env",
    "std::fs",
    "std::future",
    "std::hash::RandomState",
    "std::io",
    "std::net",
    "std::os",
    "std::process",
    "std::sync::atomic",
    "std::sync::mpsc",
    "std::thread",
    "tokio",
    "tokio_stream",
    "tokio_util",
    "tonic",
];

/// Names that `core` must not use, wherever they come from.
const IMPURE_NAMES: [&str; 16] = [
    "DefaultHasher",
    "HashMap",
    "HashSet",
    "Instant",
    "Mutex",
    "RandomState",
    "RwLock",
    "SystemTime",
    "async",
    "await",
    "dbg",
    "eprintln",
    "print",
    "println",
    "thread_local",
    "tracing",
];

/// The one place of the stage that may ask for the time or for randomness.
const SOURCE: [&str; 2] = ["testcluster", "source"];

/// Names that mean either, and maps whose order does. Waiting by tokio's clock, which a test can own, is no look at the time.
const CHANCE: [&str; 8] = [
    "DefaultHasher",
    "HashMap",
    "HashSet",
    "RandomState",
    "SystemTime",
    "Zoned",
    "new_v4",
    "now_v7",
];

/// Something that is named where it must not be.
#[derive(Debug)]
pub(crate) struct Violation {
    file: String,
    line: usize,
    what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "src/{}:{}: {}", self.file, self.line, self.what)
    }
}

/// Checks one file, given by its path from `src`.
pub(crate) fn check(file: &Path, source: &str) -> Vec<Violation> {
    let module = module_of(file);
    let violation = |line, what| Violation {
        file: file.display().to_string(),
        line,
        what,
    };
    let tokens: TokenStream = match source.parse() {
        Ok(tokens) => tokens,
        Err(error) => return vec![violation(1, format!("cannot be read as Rust: {error}"))],
    };
    let Some(layer) = module.first() else {
        return Vec::new();
    };
    mentions(tokens, &module)
        .iter()
        .filter_map(|mention| {
            let fault = fault(layer, mention)
                .or_else(|| leak(&module, mention))
                .or_else(|| chance(&module, mention));
            Some(violation(mention.line, fault?))
        })
        .collect()
}

/// `core/prepare/ledger.rs` and `core/prepare/mod.rs` -> their modules. The crate's roots have none and are not checked.
fn module_of(file: &Path) -> Vec<String> {
    let stem = file.with_extension("");
    let mut module: Vec<_> = stem
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    if module.last().is_some_and(|last| last == "mod") || module == ["lib"] || module == ["main"] {
        module.pop();
    }
    module
}

fn fault(layer: &str, mention: &Mention) -> Option<String> {
    let Some((_, allowed)) = LAYERS.iter().find(|(name, _)| *name == layer) else {
        return Some(format!(
            "layer {layer} is unknown: add it to LAYERS in tests/docs/architecture/rules.rs"
        ));
    };
    if let Some(fault) = wrong_direction(layer, allowed, mention) {
        return Some(fault);
    }
    if layer == "core" { impurity(mention) } else { None }
}

/// Time or randomness that the stage's source does not know of.
fn chance(module: &[String], mention: &Mention) -> Option<String> {
    if module.first().is_none_or(|layer| layer != "testcluster") || module.iter().take(2).eq(SOURCE) {
        return None;
    }
    let segments: Vec<&str> = mention.segments.iter().map(String::as_str).collect();
    let asks = segments.iter().any(|segment| CHANCE.contains(segment))
        || segments
            .windows(2)
            .any(|pair| matches!(pair, [of, "now"] if *of != "Instant"))
        || match segments.as_slice() {
            ["std", "time", "Instant", ..] => true,
            ["std"] | ["std", "*" | "time"] | ["std", "time", "*"] => mention.imported,
            ["rand" | "getrandom" | "fastrand", rest @ ..] => mention.imported || !rest.is_empty(),
            _ => false,
        };
    asks.then(|| {
        format!(
            "the stage names {}: time and randomness are those of testcluster::source",
            segments.join("::")
        )
    })
}

/// Something of the built-in driver in what serves any driver.
fn leak(module: &[String], mention: &Mention) -> Option<String> {
    let starts = |path: &[String], prefix: &[&str]| {
        path.len() >= prefix.len() && path.iter().zip(prefix).all(|(one, other)| one == other)
    };
    let (_, allowed) = ANY_DRIVER.iter().find(|(place, _)| starts(module, place))?;
    let path = mention.segments.strip_prefix(&["crate".to_owned()])?;
    if path.is_empty() || allowed.iter().any(|prefix| starts(path, prefix)) {
        return None;
    }
    Some(format!(
        "{} names {}: it serves any driver, and may name of the crate only {allowed:?}",
        module.join("::"),
        mention.segments.join("::")
    ))
}

fn wrong_direction(layer: &str, allowed: &[&str], mention: &Mention) -> Option<String> {
    let segments: Vec<_> = mention.segments.iter().map(String::as_str).collect();
    match segments.as_slice() {
        ["crate"] if mention.imported => Some("the crate's root is imported whole: name the item".to_owned()),
        ["crate", "*", ..] => Some("everything is imported: name the item".to_owned()),
        ["crate", "driver", rest @ ..] if layer == "core" => match rest {
            [item, ..] if DRIVER_DATA.contains(item) => None,
            _ => Some(format!(
                "core names {}: of the driver it may name data only",
                segments.join("::")
            )),
        },
        ["crate", other, ..] if *other != layer && !allowed.contains(other) => Some(format!(
            "{layer} names {}: it may name only {allowed:?}",
            segments.join("::")
        )),
        _ => None,
    }
}

fn impurity(mention: &Mention) -> Option<String> {
    let segments = &mention.segments;
    let fault = |why: &str| Some(format!("core names {}: {why}", segments.join("::")));
    if segments
        .iter()
        .any(|segment| IMPURE_NAMES.contains(&segment.as_str()))
    {
        return fault("decisions are functions of their arguments, in a fixed order");
    }
    if segments.len() > 1 && segments.iter().skip(1).any(|segment| segment == "now") {
        return fault("the time is an argument");
    }
    // A single name that is no import is a variable or a field of that name.
    if segments.len() == 1 && !mention.imported {
        return None;
    }
    for path in IMPURE_PATHS {
        let path: Vec<_> = path.split("::").collect();
        if segments.len() >= path.len() && segments.iter().zip(&path).all(|(segment, part)| segment == part) {
            return fault("effects belong into the shells");
        }
        // `use std::*`, or `use std as other`, would hide what is named later.
        let opens = mention.imported && segments.last().is_some_and(|last| last == "*");
        let prefix = &segments[..segments.len() - usize::from(opens)];
        let is_prefix =
            prefix.len() < path.len() && prefix.iter().zip(&path).all(|(segment, part)| segment == part);
        if is_prefix && (opens || mention.imported && prefix.len() == 1) {
            return fault("name the item, so that it can be checked");
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(file: &str, source: &str) -> Vec<String> {
        check(Path::new(file), source)
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn each_impurity_in_core_is_found() {
        for seed in [
            "use tokio::sync::mpsc;",
            "use tokio;",
            "async fn f() {}",
            "fn f(client: kube::Client) {}",
            "use kube::{Api, ResourceExt};",
            "use kube::runtime::watcher;",
            "fn f() { let _ = std::fs::read(\"/x\"); }",
            "use std::{collections::BTreeMap, fs};",
            "use std::net::TcpStream;",
            "use std::time::Instant;",
            "use std::time; fn f() { time::SystemTime::now(); }",
            "fn f() { jiff::Timestamp::now(); }",
            "use std::collections::HashMap;",
            "fn f() { std::collections::HashSet::<u8>::new(); }",
            "use std::collections::*;",
            "use std as other;",
            "fn f() { rand::random::<u8>(); }",
            "fn f() { std::thread::spawn(|| ()); }",
            "fn f() { ::std::env::var(\"HOME\").ok(); }",
            "fn f() { println!(\"x\"); }",
            "fn f() { tracing::info!(\"x\"); }",
            "fn f() { vec![std::process::id()]; }",
            "static A: std::sync::Mutex<u8> = todo!();",
            "#[cfg(test)] mod tests { use std::collections::HashMap; }",
        ] {
            assert_eq!(
                faults("core/allocation/fit.rs", seed).len().min(1),
                1,
                "not found: {seed}"
            );
            assert_eq!(faults("node/run.rs", seed), [""; 0], "found in a shell: {seed}");
        }
    }

    #[test]
    fn what_only_looks_impure_is_left_alone() {
        for source in [
            "//! Not tokio, not std::fs, no HashMap.\n",
            "const A: &str = \"std::fs tokio HashMap Instant::now()\";",
            "fn f(now: jiff::Timestamp, world: &ControllerState) { world.now; let glob = now; g(glob, rand); }",
            "use std::collections::{BTreeMap, BTreeSet}; use std::time::Duration;",
            "use kube::ResourceExt; use crate::api::resource::Pod; use crate::driver::{Verdict, Holding};",
            "use super::inventory; use crate::core::prepare::container_edits::ContainerEdits;",
        ] {
            assert_eq!(faults("core/allocation/view.rs", source), [""; 0], "{source}");
        }
    }

    #[test]
    fn each_layer_that_names_one_above_it_is_found() {
        for (file, seed) in [
            ("core/mod.rs", "use crate::controller::run;"),
            (
                "core/claims/decide.rs",
                "use super::super::super::host::HostDriver;",
            ),
            (
                "core/prepare/ledger.rs",
                "use crate::{api, node::companion::Companion};",
            ),
            ("core/claims/world.rs", "use crate::driver::Driver;"),
            (
                "core/claims/world.rs",
                "use crate::driver::{Verdict, ClaimRequest};",
            ),
            ("core/claims/world.rs", "use crate::driver;"),
            ("core/claims/world.rs", "use crate::*;"),
            ("core/claims/world.rs", "use crate as other;"),
            ("api/handle.rs", "use crate::core::allocation;"),
            ("driver.rs", "use crate::controller::Controller;"),
            ("controller/execute.rs", "fn f() { crate::host::start() }"),
            ("host/driver.rs", "use crate::controller::events;"),
            ("node/run.rs", "use crate::cli::Error;"),
            (
                "node/run.rs",
                "#[cfg(test)] mod tests { use super::super::super::driver::Holding; }",
            ),
            ("unheard/mod.rs", "use std::fmt;"),
        ] {
            assert_eq!(faults(file, seed).len(), 1, "{file}: {seed}");
        }
    }

    #[test]
    fn each_type_of_the_built_in_driver_in_what_serves_any_driver_is_found() {
        for (file, seed) in [
            ("driver.rs", "use crate::api::crd::Device;"),
            ("driver.rs", "fn f(handle: crate::api::handle::DeviceHandle) {}"),
            ("driver.rs", "use crate::api;"),
            (
                "controller/execute.rs",
                "use crate::core::allocation::allocator::DeviceAllocator;",
            ),
            (
                "controller/mod.rs",
                "use super::core::prepare::prepared_claims::PreparedClaims;",
            ),
            (
                "controller/write.rs",
                "use crate::api::{crd::GROUP, resource::VERSION};",
            ),
            (
                "core/claims/world.rs",
                "use crate::core::allocation::inventory::Node;",
            ),
            ("core/claims/claim.rs", "use super::super::devices::fit;"),
        ] {
            assert_eq!(faults(file, seed).len(), 1, "{file}: {seed}");
        }
        for (file, source) in [
            ("driver.rs", "use crate::api::resource::{AllocationResult, Pod};"),
            (
                "controller/execute.rs",
                "use crate::core::claims::Command; use crate::driver::Driver;",
            ),
            (
                "core/claims/claim.rs",
                "use super::world::ControllerState; use crate::api::resource::Pod;",
            ),
            (
                "host/driver.rs",
                "use crate::core::allocation::allocator::DeviceAllocator; use crate::api::crd::Device;",
            ),
        ] {
            assert_eq!(faults(file, source), [""; 0], "{file}: {source}");
        }
    }

    #[test]
    fn each_look_at_the_clock_and_each_chance_on_the_stage_is_found() {
        for seed in [
            "use std::time::Instant;",
            "use std::time::{Duration, SystemTime};",
            "use std::time; fn f() { time::Instant::now(); }",
            "use std::time::*;",
            "use std as other;",
            "fn f() { std::time::Instant::now(); }",
            "fn f() { jiff::Timestamp::now(); }",
            "use jiff::Timestamp; const CLOCK: fn() -> Timestamp = Timestamp::now;",
            "use std::hash::RandomState;",
            "use std::collections::HashMap;",
            "fn f() { uuid::Uuid::new_v4(); }",
            "fn f() { rand::random::<u8>(); }",
        ] {
            assert_ne!(
                faults("testcluster/api/watch.rs", seed),
                [""; 0],
                "not found: {seed}"
            );
            assert_eq!(
                faults("testcluster/source.rs", seed),
                [""; 0],
                "found in the source: {seed}"
            );
            assert_eq!(faults("node/run.rs", seed), [""; 0], "found elsewhere: {seed}");
        }
        for source in [
            "use tokio::time::{Instant, sleep_until}; fn f() { Instant::now(); }",
            "use std::time::Duration; fn f(source: &Source) { source.now(); }",
        ] {
            assert_eq!(faults("testcluster/api/watch.rs", source), [""; 0], "{source}");
        }
    }

    #[test]
    fn a_fault_is_told_with_file_line_and_reason() {
        let faults = faults("core/allocation/fit.rs", "//! Fit.\n\nuse std::fs::File;\n");

        assert_eq!(
            faults,
            ["src/core/allocation/fit.rs:3: core names std::fs::File: effects belong into the shells"]
        );
    }

    #[test]
    fn a_file_that_is_not_rust_is_no_free_pass() {
        assert_eq!(faults("core/allocation/fit.rs", "fn f( {").len(), 1);
    }
}
