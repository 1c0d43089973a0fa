//! Hostile selectors.

use proptest::prelude::*;

use super::*;

mod fair_queue;
mod program;
mod structured;

impl Expressions {
    pub(crate) fn is_empty(&self) -> bool {
        self.uses.is_empty() && self.used.is_empty() && self.statuses.is_empty()
    }
}

fn attributes(value: i64) -> AttributeSet {
    [("drayman.dev/x".into(), Attribute::Int(value))]
        .into_iter()
        .collect()
}

async fn evaluate(evaluator: &Evaluator, expression: &str) -> Result<Results, SelectorError> {
    evaluator.evaluate(&expression.into(), vec![attributes(1)]).await
}

/// Checks that each expression is refused soon, and that another one is evaluated afterwards.
async fn assert_refused(expressions: impl IntoIterator<Item = (&'static str, String)>) {
    let evaluator = Evaluator::new("drayman.dev");
    for (what, expression) in expressions {
        let started = Instant::now();
        let SelectorError::Wrong(error) = evaluate(&evaluator, &expression).await.unwrap_err() else {
            panic!("{what}")
        };
        assert!(started.elapsed() < DEADLINE, "{what}: {error}");
        assert!(error.len() < 300, "{what}: {error}");
        assert_eq!(
            evaluate(&evaluator, "device.attributes['drayman.dev'].x == 1").await,
            Ok(vec![(attributes(1), Match::Yes)]),
            "after {what}"
        );
    }
}

#[tokio::test]
async fn hostile_expressions_are_refused_and_others_go_on() {
    assert_refused([
        (
            "nested brackets",
            format!("{}1{} == 1", "(".repeat(1000), ")".repeat(1000)),
        ),
        (
            "nested lists",
            format!("{}1{} == 1", "[".repeat(1000), "]".repeat(1000)),
        ),
        (
            "a bracket in a text",
            format!("{}\"{}\"", "(".repeat(500), ")".repeat(500)),
        ),
        ("a long chain", format!("a{} == 1", ".b".repeat(5000))),
        ("a long sum", format!("1{} == 1", "+1".repeat(3000))),
        ("many negations", format!("{}true", "!".repeat(5000))),
        ("many choices", "true?".repeat(500) + "1:1"),
        ("many memberships", format!("1{}", " in 1".repeat(1500))),
        ("too long", "1".repeat(20_000)),
        (
            "nested negations",
            format!("{}true{}", "! // twice\n !(".repeat(20), ")".repeat(20)),
        ),
        (
            "nested numbers",
            format!("{}1{} == 1", "- -(".repeat(20), ")".repeat(20)),
        ),
        (
            "negations around a wrong character",
            format!("{}true{}", "!#!(".repeat(30), ")".repeat(30)),
        ),
        (
            "negations around a string without an end",
            format!("{}true{}", "!'x\n!(".repeat(30), ")".repeat(30)),
        ),
        (
            "negations around a wrong token",
            format!("{}true{}", "!:!(".repeat(30), ")".repeat(30)),
        ),
        (
            "numbers around a wrong character",
            format!("{}1{} == 1", "-#-(".repeat(30), ")".repeat(30)),
        ),
        ("nothing but noise", "\u{0}\u{1}{{{]]]".to_owned()),
        ("noise without end", "#".repeat(EXPRESSION_MAX)),
    ])
    .await;
}

#[tokio::test]
async fn costly_expressions_are_refused_and_others_go_on() {
    let list = vec!["1"; 100].join(",");
    assert_refused([
        (
            "three loops",
            format!("[{list}].all(a, [{list}].all(b, [{list}].all(c, a+b+c > 0)))"),
        ),
        (
            "one loop after the other",
            format!("[{list}].map(a, [{list}]).map(a, [a, a]) == []"),
        ),
        (
            "a loop that is too long",
            format!("[{list}].all(a, [{list}] == [{list}])"),
        ),
        (
            "a text that grows",
            "'a'".to_owned() + &".replace('','aaaaaaaaa')".repeat(12) + " == ''",
        ),
        (
            "a regular expression that grows",
            format!(
                "['{}'].exists(a, 'b'.matches({}))",
                "[^a]".repeat(20),
                ["a"; 100].join("+")
            ),
        ),
        (
            "nested calls",
            format!("{}'a'{} == 0", "indexOf(string(".repeat(12), "))".repeat(12)),
        ),
        (
            "many copies of the device",
            format!(
                "[{}].map(a, [{}]) == []",
                vec!["1"; 200].join(","),
                ["device"; 7].join(",")
            ),
        ),
        (
            "a long text in a longer one",
            format!(
                "['{}'].exists(a, ({}).indexOf({} + 'b') == 0)",
                "a".repeat(3_000),
                vec!["a"; 45].join("+"),
                vec!["a"; 20].join("+")
            ),
        ),
    ])
    .await;
}

#[tokio::test]
async fn optional_values_are_those_of_kubernetes() {
    let evaluator = Evaluator::new("drayman.dev");
    for (expression, expected) in [
        ("device.attributes['drayman.dev'].?x.orValue(0) == 1", Match::Yes),
        ("device.attributes['drayman.dev'].?y.orValue(7) == 7", Match::Yes),
        ("device.attributes['drayman.dev'].?y.hasValue()", Match::No),
        (
            "device.attributes['other.example'].?x.orValue(0) == 0",
            Match::Yes,
        ),
        ("device.attributes['drayman.dev'][?'x'].value() == 1", Match::Yes),
        (
            "[7].exists(a, device.attributes['drayman.dev'].?y.orValue(7) == a)",
            Match::Yes,
        ),
        (
            "device.attributes['drayman.dev'].?y.or(device.attributes['drayman.dev'].?x).orValue(0) == 1",
            Match::Yes,
        ),
    ] {
        let results = evaluate(&evaluator, expression).await;
        assert_eq!(results, Ok(vec![(attributes(1), expected)]), "{expression}");
    }
    let Err(SelectorError::Wrong(error)) = evaluate(&evaluator, "device.?attribute.hasValue()").await else {
        panic!("an unknown field")
    };
    assert!(error.contains("device has no \"attribute\""), "{error}");
}

#[tokio::test]
async fn the_largest_selector_fits_the_stack_and_the_time_limit() {
    let evaluator = Evaluator::new("drayman.dev");
    for expression in [
        format!("{}1{} == 1", "(".repeat(64), ")".repeat(64)),
        format!("{}1{} == 1", "[".repeat(64), "]".repeat(64)),
        format!("device{} == 1", ".b".repeat(158)),
        format!("1{} == 1", "+1".repeat(158)),
        format!("1{} == 1", " in [1]".repeat(63)),
        format!("1{} == 1", " in 1".repeat(64)),
        format!("{}true", "!".repeat(160)),
        format!("{}1 == 1", "-".repeat(158)),
        "true?".repeat(16) + "true" + &":true".repeat(16),
        format!(
            "{}{}1{}{}",
            "true?1:".repeat(16),
            "(1+".repeat(64),
            ".b".repeat(160),
            "+1".repeat(90) + &" in 1".repeat(64) + &")".repeat(64)
        ),
        format!(
            "{}1{}",
            "[-".repeat(64),
            "]".repeat(64) + &".b".repeat(160) + &"+1".repeat(90) + &" in 1".repeat(64)
        ),
        format!("true{}", " && true".repeat(80)),
        format!("[{}] == []", vec!["[1]"; 62].join(",")),
        format!("'{}'.matches('{}')", "a".repeat(4000), "(a{1,99}){1,99}"),
        format!("[{}].all(a, a + a + a > 0)", vec!["1"; 400].join(",")),
    ] {
        // Rejected or not: there must be an answer, and the process must survive.
        let started = Instant::now();
        let _ = evaluate(&evaluator, &expression).await;
        assert!(started.elapsed() < DEADLINE, "{expression}");
    }
}

#[tokio::test]
async fn an_expression_is_checked_even_if_there_are_no_devices() {
    let evaluator = Evaluator::new("drayman.dev");
    assert_eq!(evaluator.evaluate(&"true".into(), vec![]).await, Ok(vec![]));
    assert!(
        evaluator
            .evaluate(&"device.driver ==".into(), vec![])
            .await
            .is_err()
    );
}

#[tokio::test]
async fn a_selector_that_timed_out_can_be_evaluated_later() {
    let evaluator = Evaluator::new("drayman.dev");
    let heavy: Arc<str> = format!("[{}].all(a, a + a + a > 0)", vec!["1"; 400].join(",")).into();
    let many: Vec<AttributeSet> = (0..).take(CHUNK).map(attributes).collect();
    let refusal = evaluator
        .evaluate_within(Duration::ZERO, &heavy, many.clone())
        .await;
    assert!(
        matches!(refusal, Err(SelectorError::Unfinished(_))),
        "{refusal:?}"
    );
    let evaluated = evaluator
        .evaluate(&heavy, many)
        .await
        .map(|evaluated| evaluated.len());
    assert!(
        evaluated
            .as_ref()
            .is_ok_and(|evaluated| (1..=CHUNK).contains(evaluated)),
        "on a thread of its own: {evaluated:?}"
    );
}

#[tokio::test]
async fn many_devices_are_evaluated_in_several_turns() {
    let evaluator = Evaluator::new("drayman.dev");
    let heavy: Arc<str> = format!("[{}].all(a, a + a + a > 0)", vec!["1"; 400].join(",")).into();
    let mut left: Vec<AttributeSet> = (0..).take(CHUNK).map(attributes).collect();
    let mut turns = 0;
    while !left.is_empty() {
        let evaluated = evaluator.evaluate(&heavy, left.clone()).await.unwrap();
        assert!(!evaluated.is_empty(), "each turn evaluates at least one device");
        for (attributes, results) in evaluated {
            assert_eq!(results, Match::Yes);
            left.retain(|other| *other != attributes);
        }
        turns += 1;
    }
    // Each takes at least a millisecond, even in a release build.
    assert!(turns > 1, "in one turn");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn random_sequences_of_tokens_get_an_answer(
        words in prop::collection::vec(prop::sample::select(vec![
            "device", ".", "attributes", "[", "]", "(", ")", "'drayman.dev'", "x", "==", "&&", "||", "!", "-", "1", "0u",
            "1.5", "\"", "'", "?", ":", ",", "{", "}", "has", "all", "map", "in", "true", "null", "semver", "b'", "r'",
            "\\u", "9223372036854775808", "//", "\n", "+", "%", "ä", "exists_one", "size", "matches", "0x", "1e999",
        ]), 0..24)
    ) {
        let text = words.join(" ");
        let environment = CelEnvironment::new("drayman.dev");
        let thread = std::thread::Builder::new().stack_size(STACK);
        let evaluated = thread.spawn(move || {
            if let Ok(compiled) = Compiled::new(&text) {
                compiled.evaluate(&environment, &attributes(1));
            }
        });
        prop_assert!(evaluated.unwrap().join().is_ok(), "{words:?}");
    }
}
