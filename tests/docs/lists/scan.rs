//! Finds words in the sources.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

/// Words with the files that contain them.
type Found = BTreeMap<String, BTreeSet<String>>;

/// The logging macros.
const LOG: [&str; 5] = ["debug", "error", "info", "trace", "warn"];

/// The product's files by path below `src`, without test code.
fn sources() -> Vec<(String, TokenStream)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut directories = vec![root.clone()];
    let mut files: Vec<PathBuf> = Vec::new();
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).expect("a directory of sources") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                directories.push(path);
            } else {
                files.push(path);
            }
        }
    }
    files.sort();
    let product = files.into_iter().filter_map(|path| {
        let name = path.strip_prefix(&root).expect("under src").display().to_string();
        let is_rust = path.extension().is_some_and(|extension| extension == "rs");
        let is_test =
            name.ends_with("tests.rs") || name.contains("/tests/") || name.starts_with("testcluster");
        if is_test || !is_rust {
            return None;
        }
        let text = std::fs::read_to_string(&path).expect("UTF-8");
        let tokens: TokenStream = text.parse().expect("Rust");
        Some((name, without_tests(tokens)))
    });
    product.collect()
}

/// Removes items with `#[cfg(test)]`.
fn without_tests(tokens: TokenStream) -> TokenStream {
    let mut kept: Vec<TokenTree> = Vec::new();
    let mut rest = tokens.into_iter();
    while let Some(token) = rest.next() {
        let is_test =
            matches!(&token, TokenTree::Group(group) if group.to_string().replace(' ', "") == "[cfg(test)]");
        if !is_test {
            kept.push(token);
            continue;
        }
        // Up to the end of the item: a block or a semicolon.
        for token in rest.by_ref() {
            match &token {
                TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => break,
                TokenTree::Punct(punct) if punct.as_char() == ';' => break,
                _ => {}
            }
        }
    }
    kept.into_iter().collect()
}

/// Calls `see` for each list of tokens, from outside to inside.
fn each_list(tokens: &TokenStream, see: &mut impl FnMut(&[TokenTree])) {
    let all: Vec<TokenTree> = tokens.clone().into_iter().collect();
    see(&all);
    for token in &all {
        if let TokenTree::Group(group) = token {
            each_list(&group.stream(), see);
        }
    }
}

fn ident(token: Option<&TokenTree>) -> Option<String> {
    match token {
        Some(TokenTree::Ident(ident)) => Some(ident.to_string()),
        _ => None,
    }
}

fn is_punct(token: Option<&TokenTree>, wanted: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == wanted)
}

fn group(token: Option<&TokenTree>) -> Option<&Group> {
    match token {
        Some(TokenTree::Group(group)) => Some(group),
        _ => None,
    }
}

/// The value of a string literal.
fn text(token: Option<&TokenTree>) -> Option<String> {
    let text = match token {
        Some(TokenTree::Literal(literal)) => literal.to_string(),
        _ => return None,
    };
    Some(text.strip_prefix('"')?.strip_suffix('"')?.to_owned())
}

/// Whether a text is a CamelCase word.
fn is_reason(text: &str) -> bool {
    text.len() > 3
        && text.starts_with(|first: char| first.is_ascii_uppercase())
        && text.chars().all(|c| c.is_ascii_alphanumeric())
        && text.chars().any(|c| c.is_ascii_lowercase())
}

/// The keys of every log line of the program.
pub(crate) fn log_keys() -> Found {
    let mut found = Found::new();
    for (file, tokens) in sources() {
        each_list(&tokens, &mut |list| {
            for (index, token) in list.iter().enumerate() {
                let name = ident(Some(token)).unwrap_or_default();
                let is_log = LOG.contains(&name.as_str()) || name.ends_with("_span");
                if !is_log || !is_punct(list.get(index + 1), '!') {
                    continue;
                }
                if let Some(arguments) = group(list.get(index + 2)) {
                    for key in keys(&arguments.stream()) {
                        found.entry(key).or_default().insert(file.clone());
                    }
                }
            }
        });
    }
    found
}

/// The keys of one call: `key = value`, `key`, `?key`, `%key`, up to the message.
fn keys(arguments: &TokenStream) -> Vec<String> {
    let all: Vec<TokenTree> = arguments.clone().into_iter().collect();
    let mut keys = Vec::new();
    for part in all.split(|token| is_punct(Some(token), ',')) {
        // The name of a span, or the message, whose arguments follow.
        if matches!(part.first(), Some(TokenTree::Literal(_))) {
            break;
        }
        let part = if is_punct(part.first(), '?') || is_punct(part.first(), '%') {
            part.get(1..).unwrap_or_default()
        } else {
            part
        };
        // `a.b` is logged under the key `a.b`; shorthand fields such as `self.a` do not occur.
        if let Some(key) = ident(part.first())
            && (part.len() == 1 || is_punct(part.get(1), '='))
        {
            keys.push(key);
        } else if let Some(last) = ident(part.last())
            && part.len() > 1
            && is_punct(part.get(1), '.')
        {
            keys.push(format!("{}.{last}", ident(part.first()).unwrap_or_default()));
        }
    }
    keys
}

/// Words returned by functions named `reason` in these files.
fn answered(files: &[&str]) -> Found {
    let mut found = Found::new();
    let mut seen = BTreeSet::new();
    for (file, tokens) in sources() {
        if !files.contains(&file.as_str()) {
            continue;
        }
        seen.insert(file.clone());
        each_list(&tokens, &mut |list| {
            for (index, token) in list.iter().enumerate() {
                if ident(Some(token)).as_deref() != Some("fn")
                    || ident(list.get(index + 1)).as_deref() != Some("reason")
                {
                    continue;
                }
                let body = list.iter().skip(index).find_map(|token| {
                    group(Some(token)).filter(|group| group.delimiter() == Delimiter::Brace)
                });
                let body = body.expect("a function has a body");
                each_list(&body.stream(), &mut |list| {
                    for word in list.iter().filter_map(|token| text(Some(token))) {
                        found.entry(word).or_default().insert(file.clone());
                    }
                });
            }
        });
    }
    assert_eq!(seen.len(), files.len(), "of {files:?} there are only {seen:?}");
    found
}

/// The reasons of all events that the product creates.
pub(crate) fn event_reasons() -> Found {
    // Errors that become events by their `reason()`.
    let mut found = answered(&[
        "core/allocation/allocator.rs",
        "core/allocation/parameters.rs",
        "node/config/error.rs",
    ]);
    // The other reasons are literals at these places.
    let places = [
        "core/allocation/",
        "core/claims/",
        "controller/",
        "host/",
        "core/prepare/claims_api.rs",
        "core/discovery/",
        "core/prepare/kubelet_apis.rs",
        "node/reload.rs",
        "node/orphans.rs",
        "node/publish/slices.rs",
    ];
    let says = [
        "report",
        "Report",
        "report_pod",
        "report_claim",
        "report_class",
        "retry",
        "invalid",
        "error",
        "new",
        "push",
        "write_event",
    ];
    for (file, tokens) in sources() {
        if !places.iter().any(|place| file.starts_with(place)) {
            continue;
        }
        let mut note = |word: Option<String>| {
            if let Some(word) = word.filter(|word| is_reason(word)) {
                found.entry(word).or_default().insert(file.clone());
            }
        };
        each_list(&tokens, &mut |list| {
            for (index, token) in list.iter().enumerate() {
                match ident(Some(token)).as_deref() {
                    // A field of a struct.
                    Some("reason") if is_punct(list.get(index + 1), ':') => note(text(list.get(index + 2))),
                    Some(name) if name.ends_with("REASON") => note(
                        list.iter()
                            .skip(index)
                            .take(8)
                            .find_map(|token| text(Some(token))),
                    ),
                    // An argument, among others or alone in a pair.
                    Some(name) if says.contains(&name) => {
                        if let Some(arguments) = group(list.get(index + 1)) {
                            each_list(&arguments.stream(), &mut |list| {
                                for part in list.split(|token| is_punct(Some(token), ',')) {
                                    if part.len() == 1 {
                                        note(text(part.first()));
                                    }
                                }
                            });
                        }
                    }
                    _ => {}
                }
            }
        });
    }
    found
}

/// Reasons for which the companion refuses a call.
pub(crate) fn refusal_reasons() -> Found {
    answered(&[
        "core/prepare/plan.rs",
        "node/driver.rs",
        "node/kubelet/dra/structured.rs",
        "node/service.rs",
        "node/state/storage/disk.rs",
    ])
}
