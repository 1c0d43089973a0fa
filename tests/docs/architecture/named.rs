//! The tables of the documentation name tests, and a name in a table cannot rot: the test is there.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::str::FromStr as _;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

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

/// A test: where it is, below the repository, and what it is called.
type Test = (PathBuf, String);

/// All functions under `src` and `tests` that are marked as tests and are run.
fn tests_of_the_repository() -> BTreeSet<Test> {
    let mut tests = BTreeSet::new();
    let mut directories = vec![repository("src"), repository("tests")];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).expect("a directory").flatten() {
            let path = entry.path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let below = path.strip_prefix(repository("")).expect("below").to_owned();
                let text = std::fs::read_to_string(path).expect("UTF-8");
                tests.extend(tests_of(&text).into_iter().map(|name| (below.clone(), name)));
            }
        }
    }
    tests
}

/// The functions of a file that are marked as tests, also those within `proptest!`. What stands in a text or in a comment is none, and
/// what is ignored is none either: nobody runs it.
fn tests_of(text: &str) -> Vec<String> {
    let tokens = TokenStream::from_str(text).expect("Rust");
    let mut names = Vec::new();
    tests_among(tokens, &mut names);
    names
}

fn tests_among(tokens: TokenStream, names: &mut Vec<String>) {
    let (mut marked, mut ignored) = (false, false);
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(punct) if punct.as_char() == '#' => {
                if let Some(TokenTree::Group(attribute)) = tokens.peek() {
                    let attribute: String = attribute
                        .stream()
                        .into_iter()
                        .map(|token| token.to_string())
                        .collect();
                    marked |= attribute == "test" || attribute.starts_with("tokio::test");
                    ignored |= attribute.starts_with("ignore");
                    tokens.next();
                }
            }
            TokenTree::Ident(word) if word == "fn" => {
                if let (true, false, Some(TokenTree::Ident(name))) = (marked, ignored, tokens.peek()) {
                    names.push(name.to_string());
                }
                (marked, ignored) = (false, false);
            }
            // The body of a function, a module, a macro.
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => {
                tests_among(group.stream(), names);
                (marked, ignored) = (false, false);
            }
            TokenTree::Punct(punct) if punct.as_char() == ';' => (marked, ignored) = (false, false),
            _ => {}
        }
    }
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

/// The tests of a scenario's line, each with the program that it is said to be in, or what is wrong with the line.
fn tests_of_scenario(line: &str) -> Result<Vec<(String, String)>, String> {
    let cells: Vec<&str> = line.trim().trim_matches('|').split(" | ").collect();
    let [_, tests] = cells.as_slice() else {
        return Err("it has not two columns".to_owned());
    };
    if tests.contains("not tried") {
        return Err("something of it is not tried".to_owned());
    }
    let (mut program, mut named) = (String::new(), Vec::new());
    for (number, part) in tests.split('`').enumerate() {
        if number % 2 == 1 {
            let name = part.rsplit("::").next().unwrap_or_default();
            if names_in(&format!("`{part}`")).is_empty() {
                return Err(format!("`{part}` has not the form of a test"));
            }
            named.push((program.clone(), name.to_owned()));
        } else if let Some((before, _)) = part.rsplit_once(':') {
            let last = before.rsplit([' ', ';']).next();
            last.unwrap_or_default().clone_into(&mut program);
        }
    }
    match named.iter().find(|(program, _)| program.is_empty()) {
        Some((_, name)) => Err(format!("`{name}` is in no program")),
        None if named.is_empty() => Err("it names no test".to_owned()),
        None => Ok(named),
    }
}

/// Whether a file belongs to a program of the table.
fn is_of(path: &Path, program: &str) -> bool {
    match program {
        "unit" => path.starts_with("src"),
        _ => path.starts_with(format!("tests/{program}")),
    }
}

#[test]
fn every_test_that_a_document_names_is_there() {
    let tests: BTreeSet<String> = tests_of_the_repository()
        .into_iter()
        .map(|(_, name)| name)
        .collect();
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

/// Each scenario has one line, every test in it is there, in the program that is said, is run, and one of them is no other scenario's.
#[test]
fn every_scenario_has_a_test_of_its_own_name() {
    let tests = tests_of_the_repository();
    let text = document("docs/testing.md");
    let (_, table) = text.split_once(SCENARIOS).expect("the table of scenarios");
    let table = table.split("\n## ").next().unwrap_or_default();
    let (mut wrong, mut scenarios) = (Vec::new(), BTreeMap::new());
    for number in 1..=SCENARIO_COUNT {
        let begin = format!("| F{number} ");
        let lines: Vec<&str> = table.lines().filter(|line| line.starts_with(&begin)).collect();
        let [line] = lines.as_slice() else {
            wrong.push(format!("F{number} has {} lines", lines.len()));
            continue;
        };
        match tests_of_scenario(line) {
            Ok(named) => drop(scenarios.insert(number, named)),
            Err(problem) => wrong.push(format!("F{number}: {problem}")),
        }
    }
    for (number, named) in &scenarios {
        for (program, name) in named {
            if !tests
                .iter()
                .any(|(path, test)| test == name && is_of(path, program))
            {
                wrong.push(format!("F{number}: {program} has no test `{name}`"));
            }
        }
        let is_own = |name: &String| {
            let mut others = scenarios.iter().filter(|(other, _)| *other != number);
            !others.any(|(_, named)| named.iter().any(|(_, other)| other == name))
        };
        if !named.iter().any(|(_, name)| is_own(name)) {
            wrong.push(format!("F{number} has no test of its own: {named:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_line_without_a_test_that_can_be_found_is_wrong() {
    let named = tests_of_scenario(
        "| F1 a: b | unit: `m::it_is_a_long_enough_name`, `another_name_of_a_test`; at once: cli: `and_one_more_of_the_tests` |",
    );
    let named: Vec<String> = named
        .unwrap()
        .into_iter()
        .map(|(program, name)| format!("{program} {name}"))
        .collect();
    assert_eq!(
        named,
        [
            "unit it_is_a_long_enough_name",
            "unit another_name_of_a_test",
            "cli and_one_more_of_the_tests"
        ]
    );
    for line in [
        "| F1 a | |",
        "| F1 a | unit: nothing |",
        "| F1 a | `it_is_a_long_enough_name` |",
        "| F1 a | unit: `short` |",
        "| F1 a | unit: `it_is_a_long_enough_name`; the rest: not tried |",
    ] {
        assert!(tests_of_scenario(line).is_err(), "{line}");
    }
    assert!(is_of(Path::new("src/core/a.rs"), "unit") && is_of(Path::new("tests/e2e/pods.rs"), "e2e"));
    assert!(
        is_of(Path::new("tests/faults/node/a.rs"), "faults/node")
            && !is_of(Path::new("tests/faults/a.rs"), "unit")
    );
}

#[test]
fn a_test_is_known_by_its_mark_and_a_name_by_its_form() {
    let text = "#[tokio::test(start_paused = true)]\n#[expect(x)]\nasync fn it_holds() {}\nfn helper() {}\nmod m {\n    #[test]\n    fn within() {}\n}\n\
        proptest! {\n    #[test]\n    fn by_chance(a in 0..1) {}\n}\n\
        #[test]\n#[ignore = \"slow\"]\nfn never_run() {}\n// #[test]\n// fn in_a_comment() {}\n\
        fn text() { let a = \"#[test] fn in_a_text() {}\"; }\n#[test]\nconst NOT: u8 = 1;\nfn after_it() {}\n";
    assert_eq!(tests_of(text), ["it_holds", "within", "by_chance"]);
    let text = "see `module::a_sentence_that_is_long_enough` and `--flag`, `kube::Client`, `short_one`";
    assert_eq!(names_in(text), ["a_sentence_that_is_long_enough"]);
}
