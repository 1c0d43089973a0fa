//! Compares docs/reference/metrics.md with the tables that its lists are generated from; the tests fail if they differ.
//!
//! `make generate` regenerates the lists.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::MetricType;
use tokio::sync::watch;

use super::reasons::{By, EVENTS, REFUSALS};
use super::table::{self, ALL, LabelValues, Of, Series};
use super::{Observer, encode};
use crate::node::publish::inventory::RegistrationStatus;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/metrics.md");

fn labels(series: &Series) -> String {
    let names: Vec<&str> = series.labels.iter().map(|label| label.name).collect();
    if names.is_empty() {
        String::new()
    } else {
        format!("{{{}}}", names.join(","))
    }
}

fn series_list() -> String {
    let mut list = String::from("| series | of | sort | meaning |\n|---|---|---|---|\n");
    for series in ALL {
        let of = match series.of {
            Of::Both => "both",
            Of::Controller => "controller",
            Of::Companion => "companion",
        };
        let sort = series.kind.as_str();
        writeln!(
            list,
            "| `{}{}` | {of} | {sort} | {} |",
            series.name,
            labels(series),
            series.help
        )
        .expect("a text takes it");
    }
    list
}

fn label_list() -> String {
    let mut values: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for label in ALL.iter().flat_map(|series| series.labels) {
        let text = match label.values {
            LabelValues::These(these)
                if std::ptr::fn_addr_eq(these, table::waiting as fn() -> Vec<&'static str>) =>
            {
                format!(
                    "the reasons of the controller's [events](#events) on pods, and `{}`: some nodes are unsuitable, and the scheduler selects another",
                    crate::core::claims::Statistics::SOME_NODES
                )
            }
            LabelValues::These(_) if label.name == "reason" => {
                "the [reasons of a companion](#refusals)".to_owned()
            }
            LabelValues::These(these) => these()
                .iter()
                .map(|value| format!("`{value}`"))
                .collect::<Vec<_>>()
                .join(", "),
            LabelValues::Such(text) => text.to_owned(),
        };
        values.entry(label.name).or_default().insert(text);
    }
    let mut list = String::from("| label | values |\n|---|---|\n");
    for (name, values) in values {
        let values: Vec<String> = values.into_iter().collect();
        writeln!(list, "| `{name}` | {} |", values.join("; ")).expect("a text takes it");
    }
    list
}

fn event_list() -> String {
    let mut list = String::from("| reason | by | on | meaning |\n|---|---|---|---|\n");
    for event in EVENTS {
        let by = match event.by {
            By::Controller => "controller",
            By::Companion => "companion",
        };
        writeln!(
            list,
            "| `{}` | {by} | {} | {} |",
            event.word, event.on, event.means
        )
        .expect("a text takes it");
    }
    list
}

fn refusal_list() -> String {
    let mut list = String::from("| reason | meaning |\n|---|---|\n");
    for (word, means) in REFUSALS {
        writeln!(list, "| `{word}` | {means} |").expect("a text takes it");
    }
    list
}

/// Returns the page with regenerated lists.
fn renewed(page: &str) -> String {
    let mut page = page.to_owned();
    for (name, list) in [
        ("series", series_list()),
        ("labels", label_list()),
        ("events", event_list()),
        ("refusals", refusal_list()),
    ] {
        let (begin, end) = (
            format!("<!-- {name}: made from the code -->\n"),
            format!("<!-- end of {name} -->"),
        );
        let from = page.find(&begin).expect(name) + begin.len();
        let to = page.find(&end).expect(name);
        page.replace_range(from..to, &format!("\n{list}\n"));
    }
    page
}

#[test]
fn the_metrics_page_has_every_series_label_and_reason() {
    let page = std::fs::read_to_string(PAGE).expect("docs/reference/metrics.md");
    let renewed = renewed(&page);
    if std::env::var_os("DRAYMAN_GENERATE").is_some() {
        std::fs::write(PAGE, &renewed).expect("docs/reference/metrics.md");
        return;
    }
    let missing: Vec<&str> = renewed.lines().filter(|line| !page.contains(line)).collect();
    assert!(
        page == renewed,
        "docs/reference/metrics.md differs from the tables; run `make generate`: missing: {missing:#?}"
    );
}

#[test]
fn words_are_sorted_and_unique() {
    let events: Vec<&str> = EVENTS.iter().map(|event| event.word).collect();
    assert!(events.is_sorted_by(|a, b| a < b), "{events:?}");
    assert!(REFUSALS.is_sorted_by(|a, b| a.0 < b.0));
    let names: BTreeSet<&str> = ALL.iter().map(|series| series.name).collect();
    assert_eq!(names.len(), ALL.len());
    for series in ALL {
        let is_counter = series.name.ends_with("_total");
        assert_eq!(
            is_counter,
            matches!(series.kind, MetricType::Counter),
            "{}",
            series.name
        );
        assert!(
            !matches!(series.kind, MetricType::Histogram) || series.name.ends_with("_seconds"),
            "{}",
            series.name
        );
    }
}

/// Returns the metrics of a freshly started component.
fn metrics_of(observer: &Observer) -> String {
    let mut text = String::new();
    encode(&mut text, &observer.registry).expect("it can be written");
    text
}

fn observers() -> [(Of, Observer); 2] {
    let (_, metrics) = watch::channel(crate::controller::Metrics::default());
    let (_, leads) = watch::channel(false);
    let (_, registration_status) = watch::channel(RegistrationStatus::starting());
    [
        (
            Of::Controller,
            Observer::of_controller("drayman.dev".into(), metrics, leads),
        ),
        (
            Of::Companion,
            Observer::of_node(Arc::default(), registration_status),
        ),
    ]
}

#[test]
fn each_component_has_exactly_its_series_from_the_start() {
    for (of, observer) in observers() {
        let text = metrics_of(&observer);
        let described: BTreeSet<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
            .collect();
        let of_table: BTreeSet<&str> = ALL
            .iter()
            .filter(|series| series.of == Of::Both || series.of == of)
            .map(|series| encode::base(series))
            .collect();
        assert_eq!(described, of_table, "{of:?}");
        for series in ALL
            .iter()
            .filter(|series| series.of == Of::Both || series.of == of)
        {
            // The kinds of a node appear with its first device.
            if series.name == table::DEVICES.name {
                continue;
            }
            let begins = |line: &&str| {
                line.strip_prefix(series.name).is_some_and(|rest| {
                    rest.starts_with(['{', ' '])
                        || (matches!(series.kind, MetricType::Histogram) && rest.starts_with("_count"))
                })
            };
            let lines: Vec<&str> = text.lines().filter(begins).collect();
            assert!(!lines.is_empty(), "{} has no value from the start", series.name);
            // Every value of the label is present.
            for label in series.labels {
                let LabelValues::These(these) = label.values else {
                    continue;
                };
                for value in these() {
                    let is_of_other = label.name == "component";
                    let wanted = format!("{}=\"{value}\"", label.name);
                    assert!(
                        is_of_other || lines.iter().any(|line| line.contains(&wanted)),
                        "{} has no {wanted} from the start: {lines:#?}",
                        series.name
                    );
                }
            }
        }
    }
}

#[test]
fn each_event_reason_starts_at_zero_at_its_component() {
    for (of, observer) in observers() {
        let text = metrics_of(&observer);
        for event in EVENTS {
            let line = format!("drayman_events_total{{reason=\"{}\"}} 0\n", event.word);
            let own = (of == Of::Controller) == (event.by == By::Controller);
            assert_eq!(text.contains(&line), own, "{of:?} {line}");
        }
    }
}
