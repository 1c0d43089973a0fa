//! Checks what the compiler does not within one crate: `src/core` is pure, layers name only those below them, import circles
//! between files and folders do not exist, and no two types share a name.
//!
//! Sources are read as rustfmt writes them. Unit tests take part in the check for purity, but their imports do not count.

use std::collections::{BTreeMap, BTreeSet};

use crate::page::repository;

/// The layers that each layer may name, besides itself.
const LAYERS: [(&str, &str); 9] = [
    ("api", ""),
    ("driver", "api"),
    ("core", "api driver"),
    ("controller", "api core driver"),
    ("host", "api core driver"),
    ("node", "api core"),
    ("testcluster", "api core driver controller host node"),
    ("testkit", "api core driver controller host node testcluster"),
    ("cli", "api core driver controller host node testcluster"),
];

/// Modules that must not know the built-in driver, and all that they may name.
const ANY_DRIVER: [(&str, &[&str]); 3] = [
    ("driver", &["driver", "api::resource"]),
    (
        "controller",
        &[
            "controller",
            "driver",
            "api::resource",
            "core::claims",
            "core::distribution",
            "core::lease",
            "core::names",
        ],
    ),
    (
        "core::claims",
        &[
            "core::claims",
            "core::distribution",
            "core::names",
            "driver",
            "api::resource",
        ],
    ),
];

/// Effects, and values that depend on the clock, on randomness or on an order that varies. `crate::driver::Driver` is an effect, too:
/// a call is a command.
const IMPURE: &str = "DefaultHasher HashMap HashSet Instant Mutex RandomState RwLock SystemTime Timestamp::now Zoned::now async \
    atomic await axum crate::driver::Driver dbg eprintln fastrand futures getrandom hash_map hyper inotify kube::Api kube::Client \
    kube::client kube::config kube::runtime new_v4 now_v7 print println rand rustix std::env std::fs std::future std::io std::net \
    std::os std::process std::sync::mpsc std::thread thread_local tokio tokio_stream tokio_util tonic tracing";

/// The test cluster has its time and its randomness from `testcluster/clock_and_rng.rs`. Tokio's clock is allowed: tests control it.
const CHANCE: &str = "DefaultHasher HashMap HashSet RandomState SystemTime Timestamp::now Zoned::now fastrand getrandom new_v4 now_v7 \
    rand std::time::Instant";

/// The largest number of files and of folders that import each other in a circle.
const FILES_IN_CIRCLES: usize = 0;
const FOLDERS_IN_CIRCLES: usize = 0;

/// Names that several types may have, with the reason.
const SHARED_NAMES: [(&str, &str); 7] = [
    ("Arguments", "clap: the flags of a command, private to its module"),
    (
        "Command",
        "clap: the subcommands of a command; in the core a command to the runtime",
    ),
    (
        "ContainerEdits",
        "the CDI file's form, and the one that is also rendered for device plugins",
    ),
    ("Device", "the CDI file's, and ours"),
    ("DeviceNode", "as ContainerEdits"),
    ("Metrics", "public: of the controller and of the companion"),
    ("Mount", "as ContainerEdits"),
];

/// The product's files without comments, by module path: `core::claims::state`.
fn modules() -> BTreeMap<String, String> {
    let mut modules = BTreeMap::new();
    let mut directories = vec![repository("src")];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let below = path.strip_prefix(repository("src")).expect("below src");
                let name = below.with_extension("").display().to_string().replace('/', "::");
                let text = std::fs::read_to_string(&path).expect("UTF-8");
                let code = text
                    .lines()
                    .map(|line| line.split("//").next().unwrap_or_default());
                let code = code.collect::<Vec<_>>().join("\n");
                modules.insert(name.trim_end_matches("::mod").to_owned(), code);
            }
        }
    }
    modules
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

fn is_below(path: &str, module: &str) -> bool {
    path.strip_prefix(module)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// All paths in a text, from their first word on, with the trees of `use` expanded. Re-exports are left out.
fn paths(code: &str) -> BTreeSet<String> {
    fn tree<'a>(prefix: &str, mut rest: &'a str, paths: &mut BTreeSet<String>) -> &'a str {
        let mut path = prefix.to_owned();
        loop {
            if let Some(mut list) = rest.strip_prefix('{') {
                loop {
                    list = list.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
                    if list.is_empty() || list.starts_with('}') {
                        return list.get(1..).unwrap_or_default();
                    }
                    let after = tree(&path, list, paths);
                    // `{A as B}`, and braces that are not a list of imports.
                    list = after.trim_start_matches(|c| c != ',' && c != '}');
                }
            }
            let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            path.push_str(&rest[..end]);
            rest = &rest[end..];
            let Some(after) = rest.strip_prefix("::") else {
                break;
            };
            if end == 0 {
                break;
            }
            path.push_str("::");
            rest = after;
        }
        paths.insert(path.trim_end_matches("::self").trim_end_matches("::").to_owned());
        rest
    }
    let (mut found, mut rest) = (BTreeSet::new(), code);
    while let Some(start) = rest.find(is_word) {
        rest = &rest[start..];
        if let Some(after) = rest.strip_prefix("pub use ") {
            rest = after.split_once(';').map_or("", |(_, after)| after);
        } else {
            let length = rest.len();
            rest = tree("", rest, &mut found);
            assert!(rest.len() < length, "no progress at {:?}", rest.get(..40));
        }
    }
    found
}

/// The paths within the crate that a module names, from the crate's root.
fn imports(module: &str, code: &str, modules: &BTreeMap<String, String>) -> BTreeSet<String> {
    let product = code.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let resolve = |path: String| {
        let (mut base, mut path) = (module, path.as_str());
        if let Some(path) = path.strip_prefix("crate::") {
            return Some(path.to_owned());
        }
        let relative = path.starts_with("super::") || path.starts_with("self::");
        while let Some((first @ ("self" | "super"), rest)) = path.split_once("::") {
            if first == "super" {
                base = base.rsplit_once("::").map_or("", |(parent, _)| parent);
            }
            path = rest;
        }
        let full = format!("{base}::{path}");
        let child = format!("{module}::{}", path.split("::").next().unwrap_or_default());
        (relative || path.contains("::") && modules.contains_key(&child))
            .then(|| full.trim_start_matches("::").to_owned())
    };
    paths(product).into_iter().filter_map(resolve).collect()
}

fn is_test(part: &str) -> bool {
    ["tests", "model", "fixture"].contains(&part)
}

/// The modules that each module of the product imports, without those of unit tests.
fn graph(modules: &BTreeMap<String, String>) -> BTreeMap<String, BTreeSet<String>> {
    let is_product = |module: &str| !["lib", "main"].contains(&module) && !module.split("::").any(is_test);
    let file_of = |path: &str| {
        let mut path = path;
        while !modules.contains_key(path) {
            path = path.rsplit_once("::")?.0;
        }
        Some(path.to_owned())
    };
    let product = modules.iter().filter(|(module, _)| is_product(module));
    let imported = |module: &String, code: &String| {
        let paths = imports(module, code, modules).into_iter();
        paths
            .filter_map(|path| file_of(&path))
            .filter(|other| other != module && is_product(other))
            .collect()
    };
    product
        .map(|(module, code)| (module.clone(), imported(module, code)))
        .collect()
}

/// The groups of nodes that reach each other.
fn circles(graph: &BTreeMap<String, BTreeSet<String>>) -> Vec<Vec<&str>> {
    let reachable: BTreeMap<&str, BTreeSet<&str>> = graph
        .keys()
        .map(|start| {
            let (mut seen, mut next) = (BTreeSet::new(), vec![start.as_str()]);
            while let Some(node) = next.pop() {
                let new = graph.get(node).into_iter().flatten();
                next.extend(new.filter(|node| seen.insert(node.as_str())).map(String::as_str));
            }
            (start.as_str(), seen)
        })
        .collect();
    let mut groups: Vec<Vec<&str>> = Vec::new();
    for (node, seen) in &reachable {
        if seen.contains(node) && !groups.iter().any(|group| group.contains(node)) {
            let group = seen.iter().filter(|other| reachable[*other].contains(node));
            groups.push(group.copied().collect());
        }
    }
    groups
}

#[test]
fn core_and_the_test_cluster_are_free_of_effects() {
    let wrong = |module: &str, code: &str, forbidden: &str| -> Vec<String> {
        let named = paths(code).into_iter();
        named
            .filter(|path| {
                let path = format!("::{path}::");
                forbidden
                    .split_whitespace()
                    .any(|word| path.contains(&format!("::{word}::")))
            })
            .map(|path| format!("{module} names {path}"))
            .collect()
    };
    let mut all = Vec::new();
    for (module, code) in modules() {
        if is_below(&module, "core") {
            all.extend(wrong(&module, &code, IMPURE));
        } else if is_below(&module, "testcluster") && module != "testcluster::clock_and_rng" {
            all.extend(wrong(&module, &code, CHANCE));
        }
    }
    assert!(all.is_empty(), "{all:#?}");
    assert_eq!(
        wrong("core", "use std::{collections::{BTreeMap, HashMap}, fs};", IMPURE).len(),
        2
    );
    assert_eq!(
        wrong("core", "fn f() { jiff::Timestamp::now() }", IMPURE).len(),
        1
    );
    assert!(wrong("core", "use std::time::Duration; use kube::ResourceExt;", IMPURE).is_empty());
}

#[test]
fn no_layer_names_one_above_it() {
    let modules = modules();
    let wrong = |module: &str, code: &str| -> Vec<String> {
        let layer = module.split("::").next().unwrap_or_default();
        let Some((_, below)) = LAYERS.iter().find(|(name, _)| *name == layer) else {
            assert!(["lib", "main"].contains(&layer), "add layer {layer} to LAYERS");
            return Vec::new();
        };
        let strict = ANY_DRIVER.iter().find(|(place, _)| is_below(module, place));
        let is_allowed = |path: &str| {
            let other = path.split("::").next().unwrap_or_default();
            (other == layer || below.split(' ').any(|name| name == other))
                && strict.is_none_or(|(_, allowed)| allowed.iter().any(|name| is_below(path, name)))
        };
        let named = imports(module, code, &modules).into_iter();
        named
            .filter(|path| !is_allowed(path))
            .map(|path| format!("{module} names {path}"))
            .collect()
    };
    let all: Vec<String> = modules
        .iter()
        .flat_map(|(module, code)| wrong(module, code))
        .collect();
    assert!(all.is_empty(), "{all:#?}");
    // A layer above, a list, a relative path, and a module that knows the built-in driver.
    for (module, code, named) in [
        ("core::names", "use crate::cli::Arguments;", "cli::Arguments"),
        (
            "node::run",
            "use crate::{api::crd, host::HostDriver};",
            "host::HostDriver",
        ),
        (
            "host::paths",
            "fn f() { super::super::node::run::run() }",
            "node::run::run",
        ),
        (
            "controller::leader",
            "use crate::core::prepare::plan;",
            "core::prepare::plan",
        ),
    ] {
        assert_eq!(wrong(module, code), [format!("{module} names {named}")]);
    }
}

fn check(what: &str, graph: &BTreeMap<String, BTreeSet<String>>, most: usize) {
    let circles = circles(graph);
    let number: usize = circles.iter().map(Vec::len).sum();
    assert!(
        number <= most,
        "{number} {what} import each other, at most {most} may: {circles:#?}"
    );
}

#[test]
fn import_circles_do_not_become_larger() {
    let files = graph(&modules());
    assert!(files.len() > 100, "{} files", files.len());
    let found: usize = files.values().map(BTreeSet::len).sum();
    assert!(found > 500, "{found} imports");
    check("files", &files, FILES_IN_CIRCLES);
    // The folders in which a file and its import are, below the last one that has both. A folder has all files below it.
    let mut folders: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let is_folder = |module: &str| files.keys().any(|file| file != module && is_below(file, module));
    for (file, imported) in &files {
        let of_file: Vec<&str> = file.split("::").collect();
        for other in imported {
            let of_other: Vec<&str> = other.split("::").collect();
            let pairs = of_file.iter().zip(&of_other);
            let shared = pairs.take_while(|(one, other)| one == other).count();
            let folder =
                |names: &[&str]| Some(names.get(..=shared)?.join("::")).filter(|name| is_folder(name));
            if let (Some(own), Some(other)) = (folder(&of_file), folder(&of_other)) {
                folders.entry(own).or_default().insert(other);
            }
        }
    }
    assert!(folders.len() > 10, "{} folders", folders.len());
    check("folders", &folders, FOLDERS_IN_CIRCLES);
}

/// The types that a module defines outside functions and nested modules: rustfmt writes these without indentation.
fn types(code: &str) -> impl Iterator<Item = &str> {
    code.lines().filter_map(|line| {
        let mut words = line.split(|c| !is_word(c)).filter(|word| !word.is_empty());
        words.find(|word| ["struct", "enum", "trait", "type"].contains(word))?;
        (!line.starts_with(' ')).then(|| words.next()).flatten()
    })
}

#[test]
fn no_two_types_share_a_name() {
    let modules = modules();
    let mut places: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (module, code) in &modules {
        if !module.split("::").any(is_test) {
            for name in types(code) {
                places.entry(name).or_default().push(module);
            }
        }
    }
    assert!(places.len() > 500, "{} types", places.len());
    let is_shared = |name: &str| SHARED_NAMES.iter().any(|(shared, _)| *shared == name);
    places.retain(|name, modules| (modules.len() > 1) != is_shared(name));
    assert!(
        places.is_empty(),
        "rename one, or change SHARED_NAMES: {places:#?}"
    );
    let found: Vec<_> =
        types("pub struct A(u8);\npub(in crate::x) enum B {}\n    struct C;\ntype D<T> = E<T>;").collect();
    assert_eq!(found, ["A", "B", "D"]);
}
