//! The tables of the documentation name tests, and a name in a table cannot rot: the test is there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The documents that say what is shown by which test.
const DOCUMENTS: [&str; 2] = ["docs/testing.md", "docs/conformance.md"];
/// The heading of the table of scenarios, F1 to F44.
const SCENARIOS: &str = "## Faults, and who shows what becomes of them";
const SCENARIO_COUNT: usize = 44;
/// The shortest name of a test that the documents mention; what is shorter, in the same type, is a command or a field.
const NAME_MIN: usize = 20;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn document(path: &str) -> String {
    std::fs::read_to_string(repository(path)).expect("a document")
}

/// The names of all functions under `src` and `tests` that are marked as tests.
fn tests_of_the_repository() -> BTreeSet<String> {
    let mut tests = BTreeSet::new();
    let mut directories = vec![repository("src"), repository("tests")];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).expect("a directory").flatten() {
            let path = entry.path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                tests.extend(tests_of(&std::fs::read_to_string(path).expect("UTF-8")));
            }
        }
    }
    tests
}

/// The functions of a file that are marked as tests, also those within `proptest!`.
fn tests_of(text: &str) -> Vec<String> {
    let mut marked = false;
    let mut names = Vec::new();
    for line in text.lines().map(str::trim) {
        let attribute = line.starts_with("#[");
        marked |= attribute && (line.starts_with("#[test]") || line.starts_with("#[tokio::test"));
        let declared = line.trim_start_matches("pub ").trim_start_matches("async ");
        if let Some(rest) = declared.strip_prefix("fn ") {
            let name: String = rest
                .chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect();
            if marked {
                names.push(name);
            }
            marked = false;
        }
    }
    names
}

/// What a text names in the type of code and in the form of a test: `a_sentence`, `module::a_sentence`.
fn names_in(text: &str) -> Vec<String> {
    let is_test = |word: &&str| {
        let letters = word
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        letters && word.len() >= NAME_MIN && word.contains('_')
    };
    let code = text.split('`').skip(1).step_by(2);
    code.filter_map(|code| code.rsplit("::").next())
        .filter(is_test)
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_test_that_a_document_names_is_there() {
    let tests = tests_of_the_repository();
    for path in DOCUMENTS {
        let named = names_in(&document(path));
        assert!(named.len() > 40, "{path} names {} tests", named.len());
        let missing: Vec<_> = named.into_iter().filter(|name| !tests.contains(name)).collect();
        assert!(
            missing.is_empty(),
            "{path} names tests that are not there: {missing:#?}"
        );
    }
}

#[test]
fn every_scenario_has_a_test_of_its_own_name() {
    let text = document("docs/testing.md");
    let (_, table) = text.split_once(SCENARIOS).expect("the table of scenarios");
    let table = table.split("\n## ").next().unwrap_or_default();
    for number in 1..=SCENARIO_COUNT {
        let line = table
            .lines()
            .find(|line| line.starts_with(&format!("| F{number} ")));
        let line = line.unwrap_or_else(|| panic!("F{number} has no line in docs/testing.md"));
        assert!(!names_in(line).is_empty(), "F{number} names no test: {line}");
    }
}

#[test]
fn a_test_is_known_by_its_mark_and_a_name_by_its_form() {
    let text = "#[tokio::test]\n#[expect(x)]\nasync fn it_holds() {}\nfn helper() {}\n    #[test]\n    fn within() {}\n";
    assert_eq!(tests_of(text), ["it_holds", "within"]);
    let text = "see `module::a_sentence_that_is_long_enough` and `--flag`, `kube::Client`, `short_one`";
    assert_eq!(names_in(text), ["a_sentence_that_is_long_enough"]);
}
