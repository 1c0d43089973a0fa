//! Tests cited in pages exist in the cited module.

use std::path::Path;
use std::sync::OnceLock;

use proc_macro2::{TokenStream, TokenTree};

use crate::page::{Page, Span, pages, repository};

/// A test: its modules, starting with the test program or the top module of `src`, and its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Test {
    modules: Vec<String>,
    pub(crate) name: String,
}

impl Test {
    /// Whether a citation such as `contexts::a_sentence` or `tests/e2e` ... `contexts::a_sentence` means this test: the last word is the
    /// test's name, and the words before it are consecutive modules.
    pub(crate) fn is(&self, path: &str) -> bool {
        let words: Vec<&str> = path.split("::").collect();
        let [modules @ .., name] = words.as_slice() else {
            return false;
        };
        self.name == *name
            && (modules.is_empty()
                || self
                    .modules
                    .windows(modules.len())
                    .any(|window| window == modules))
    }

    /// The path that `cargo test` matches its filter against.
    pub(crate) fn path(&self) -> String {
        [self.modules.as_slice(), std::slice::from_ref(&self.name)]
            .concat()
            .join("::")
    }
}

/// Every test of the repository.
pub(crate) fn tests() -> &'static [Test] {
    static TESTS: OnceLock<Vec<Test>> = OnceLock::new();
    TESTS.get_or_init(find_tests)
}

fn find_tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for top in ["src", "tests"] {
        let mut directories = vec![repository(top)];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(&directory).expect("a directory") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    directories.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let text = std::fs::read_to_string(&path).expect("UTF-8");
                    let file = path.strip_prefix(repository(top)).expect("below it");
                    tests.extend(tests_of(file, &text));
                }
            }
        }
    }
    assert!(tests.len() > 500, "{} tests", tests.len());
    tests
}

fn tests_of(file: &Path, text: &str) -> Vec<Test> {
    let mut modules: Vec<String> = file
        .with_extension("")
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    if modules.last().is_some_and(|last| last == "mod" || last == "main") {
        modules.pop();
    }
    let mut tests = Vec::new();
    let tokens: TokenStream = text
        .parse()
        .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    collect(tokens, &modules, &mut tests);
    tests
}

/// Also searches macros, because property tests are defined in them.
fn collect(tokens: TokenStream, modules: &[String], tests: &mut Vec<Test>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut rest = tokens.as_slice();
    let mut marked = false;
    while let [token, after @ ..] = rest {
        rest = after;
        match (token, after) {
            (TokenTree::Punct(hash), [TokenTree::Group(attribute), after @ ..]) if hash.as_char() == '#' => {
                marked |= is_test(&attribute.stream());
                rest = after;
            }
            (TokenTree::Ident(word), [TokenTree::Ident(name), after @ ..]) if word == "fn" => {
                if std::mem::take(&mut marked) {
                    tests.push(Test {
                        modules: modules.to_vec(),
                        name: name.to_string(),
                    });
                }
                rest = after;
            }
            (TokenTree::Ident(word), [TokenTree::Ident(name), TokenTree::Group(body), after @ ..])
                if word == "mod" =>
            {
                collect(body.stream(), &[modules, &[name.to_string()]].concat(), tests);
                rest = after;
            }
            (TokenTree::Group(group), _) => {
                collect(group.stream(), modules, tests);
                marked = false;
            }
            _ => {}
        }
    }
}

/// `test`, `tokio::test`, `tokio::test(...)`, but not `cfg(test)`.
fn is_test(attribute: &TokenStream) -> bool {
    let words = attribute.clone().into_iter();
    let path = words.take_while(|token| !matches!(token, TokenTree::Group(_)));
    let last = path.filter_map(|token| match token {
        TokenTree::Ident(word) => Some(word.to_string()),
        _ => None,
    });
    last.last().is_some_and(|word| word == "test")
}

fn is_word(text: &str) -> bool {
    !text.is_empty()
        && text
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

/// The lists of tests by topic.
const COVERAGE: &str = "tests/docs/coverage";

/// One of these lists.
pub(crate) fn coverage(name: &str) -> Page {
    crate::page::page(&format!("{COVERAGE}/{name}.md"))
}

/// Whether code in a sentence cites a test: `contexts::a_sentence_of_words`, or in a coverage list a test name alone.
pub(crate) fn is_test_name(page: &Page, span: &Span) -> bool {
    let words: Vec<&str> = span.text.split("::").collect();
    let Some(name) = words.last() else { return false };
    let underscores = name.matches('_').count();
    let about_tests = page.path.starts_with(COVERAGE);
    words.iter().all(|word| is_word(word))
        && ((words.len() > 1 && underscores >= 2) || (about_tests && underscores >= 4))
}

#[test]
fn every_test_named_by_a_page_exists_in_its_module() {
    let tests = tests();
    let (mut named, mut missing) = (0, Vec::new());
    let coverage = ["conformance", "faults", "security"].map(coverage);
    for page in pages().into_iter().chain(coverage) {
        for span in page.spans.iter().filter(|span| is_test_name(&page, span)) {
            named += 1;
            if !tests.iter().any(|test| test.is(&span.text)) {
                missing.push(format!("{}: {}", span.place, span.text));
            }
        }
    }
    assert!(missing.is_empty(), "no such test:\n  {}", missing.join("\n  "));
    assert!(named > 100, "{named} names were found in the pages");
}

/// Reasons of Kubernetes itself.
const REASONS_OF_KUBERNETES: [&str; 5] = [
    "ErrImagePull",
    "FailedPrepareDynamicResources",
    "FailedScheduling",
    "ImagePullBackOff",
    "UnexpectedAdmissionError",
];

#[test]
fn every_reason_among_the_symptoms_is_in_the_code() {
    let is_reason = |text: &str| {
        text.starts_with(|first: char| first.is_ascii_uppercase())
            && text.bytes().filter(u8::is_ascii_uppercase).count() > 1
            && text.bytes().all(|byte| byte.is_ascii_alphabetic())
            && text.bytes().any(|byte| byte.is_ascii_lowercase())
    };
    // `tests/docs/lists` compares these lists with the sources.
    let listed = crate::page::page("docs/reference/metrics.md");
    // Steps of `explain` and states of `devices` look the same.
    let mut others: Vec<String> = STEPS.iter().flat_map(|(file, step)| steps(file, step)).collect();
    others.extend(states());
    let symptoms = ["docs/operator/troubleshoot.md", "docs/user/waiting.md"].map(crate::page::page);
    let spans: Vec<&Span> = symptoms.iter().flat_map(|page| &page.spans).collect();
    let mut reasons = spans.iter().filter(|span| is_reason(&span.text)).peekable();
    assert!(reasons.peek().is_some());
    for reason in reasons {
        let is_listed = listed.spans.iter().any(|span| span.text == reason.text);
        assert!(
            is_listed
                || others.contains(&reason.text)
                || REASONS_OF_KUBERNETES.contains(&reason.text.as_str()),
            "{}: unknown reason {}",
            reason.place,
            reason.text
        );
    }
}

/// The files and enums with the steps of `drayman explain`.
const STEPS: [(&str, &str); 2] = [
    ("src/cli/diagnose/explain.rs", "ClaimStep"),
    ("src/cli/diagnose/extended_resources.rs", "ExtendedResourceStep"),
];

/// The states of `drayman devices`.
fn states() -> Vec<String> {
    let command = drayman::cli::command();
    let devices = command.find_subcommand("devices").expect("the command");
    let state = devices
        .get_arguments()
        .find(|argument| argument.get_long() == Some("state"));
    let values = state.expect("the flag").get_possible_values();
    values.iter().map(|value| value.get_name().to_owned()).collect()
}

/// The variants of an enum of a file, which have no fields.
fn steps(file: &str, step: &str) -> Vec<String> {
    let text = std::fs::read_to_string(repository(file)).expect("UTF-8");
    let tokens: TokenStream = text.parse().expect("tokens");
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let body = tokens.windows(3).find_map(|three| match three {
        [
            TokenTree::Ident(word),
            TokenTree::Ident(name),
            TokenTree::Group(body),
        ] if word == "enum" && name == step => Some(body.stream()),
        _ => None,
    });
    let variants = body.expect("the enum").into_iter();
    variants
        .filter_map(|token| match token {
            TokenTree::Ident(variant) => Some(variant.to_string()),
            _ => None,
        })
        .collect()
}

#[test]
fn every_step_that_explain_may_name_is_on_its_page() {
    let page = crate::page::page("docs/user/waiting.md");
    for (file, step) in STEPS {
        let steps = steps(file, step);
        assert!(steps.len() > 5, "{file}: {steps:?}");
        for step in steps {
            assert!(
                page.spans.iter().any(|span| span.text == step),
                "{} does not name the step {step} of {file}",
                page.path.display()
            );
        }
    }
}

/// The table at the beginning of the page has the correct counts.
#[test]
fn the_counts_of_conformance_are_those_of_its_rows() {
    let page = crate::page::page("docs/reference/conformance.md");
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|')
            .split('|')
            .map(|cell| cell.trim().to_owned())
            .collect()
    };
    let of = |word: &str| {
        let rows = page.text.lines().map(cells);
        rows.filter(|cells| {
            cells[0].parse::<usize>().is_ok() && cells.get(2).is_some_and(|cell| cell == word)
        })
        .count()
    };
    let stated = page
        .text
        .lines()
        .find(|line| line.starts_with("| the 78 points |"))
        .expect("the table");
    let counted = [of("kept"), of("bettered"), of("not yet")].map(|count| count.to_string());
    assert_eq!(cells(stated)[1..], counted);
    assert_eq!(of("kept") + of("bettered") + of("not yet"), 78);
}

#[test]
fn each_point_of_conformance_has_a_test() {
    let list = coverage("conformance");
    for point in 1..=78 {
        let mut rows = list
            .text
            .lines()
            .filter(|line| line.starts_with(&format!("| {point} |")));
        let row = rows.next().unwrap_or_default();
        assert!(
            row.contains("::") && rows.next().is_none(),
            "point {point}: {row:?}"
        );
    }
}

#[test]
fn every_state_of_a_device_is_on_its_page() {
    let page = crate::page::page("docs/operator/troubleshoot.md");
    for state in states() {
        assert!(page.spans.iter().any(|span| span.text == state), "{state}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tests_are_found_in_modules_and_macros() {
        let source = "#[test] fn one() {} #[tokio::test(flavor = \"x\")] #[ignore] async fn two() {} fn three() {} \
                      #[cfg(test)] mod inner { #[test] fn four() { fn five() {} } } \
                      proptest! { #[test] fn six(a in 0..1) {} }";
        let tests = tests_of(Path::new("conformance/queue.rs"), source);
        let paths: Vec<String> = tests.iter().map(Test::path).collect();
        assert_eq!(
            paths,
            [
                "conformance::queue::one",
                "conformance::queue::two",
                "conformance::queue::inner::four",
                "conformance::queue::six"
            ]
        );
        assert!(tests[0].is("queue::one") && tests[0].is("conformance::queue::one") && tests[0].is("one"));
        assert!(!tests[0].is("release::one") && !tests[0].is("queue::two"));
    }
}

/// Expands `a/{b,c}.rs`. A partial path is sufficient, because pages name files below a folder named before.
fn sources_of(span: &str) -> Vec<String> {
    let Some((before, rest)) = span.split_once('{') else {
        return vec![span.to_owned()];
    };
    let (names, after) = rest.split_once('}').expect("a closing brace");
    names
        .split(',')
        .map(|name| format!("{before}{name}{after}"))
        .collect()
}

#[test]
fn each_source_that_the_architecture_names_exists() {
    let files = std::process::Command::new("find")
        .args(["src", "tests", "build.rs", "-name", "*.rs"])
        .current_dir(repository(""))
        .output()
        .expect("find");
    let files = String::from_utf8(files.stdout).expect("UTF-8");
    let exists = |source: &str| {
        files
            .lines()
            .any(|file| format!("/{file}").ends_with(&format!("/{source}")))
    };
    let page = pages()
        .into_iter()
        .find(|page| page.path.ends_with("architecture.md"));
    let spans = page.expect("docs/dev/architecture.md").spans;
    let named: Vec<String> = spans
        .iter()
        .filter(|span| {
            Path::new(&span.text)
                .extension()
                .is_some_and(|extension| extension == "rs")
        })
        .flat_map(|span| sources_of(&span.text))
        .collect();
    let missing: Vec<&String> = named.iter().filter(|source| !exists(source)).collect();
    assert!(missing.is_empty(), "no such source: {missing:?}");
    assert!(named.len() > 50, "{named:?}");
}
