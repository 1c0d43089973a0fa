//! Formats the explanation as text.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::super::output::{Colour, coloured, one_line, row, table};
use super::Answer;
use crate::cli::diagnose::explain::{Explanation, NodeVerdict, Step};
use crate::cli::diagnose::limits::{self, Explanation as ByLimit};

/// Formats the complete answer; `wide` gives each node its own line.
pub(super) fn whole(answer: &Answer, wide: bool) -> String {
    let mut text = String::new();
    if let Some(pod) = &answer.pod {
        let node = pod
            .node
            .as_ref()
            .map_or_else(|| "no node yet".to_owned(), |node| format!("on {node}"));
        let _ = writeln!(text, "Pod {}: {}, {node}", pod.name, pod.phase);
        if let Some(scheduler) = &pod.scheduler {
            let _ = writeln!(text, "  scheduler says: {}", one_line(scheduler));
        }
        if answer.claims.is_empty() && answer.limits.is_empty() {
            text += "  it asks for no devices, neither by claims nor in resources.limits\n";
        }
    }
    for claim in &answer.claims {
        if !text.is_empty() {
            text.push('\n');
        }
        text += &claim_text(claim, wide);
    }
    for limit in &answer.limits {
        text.push('\n');
        text += &limit_text(limit, wide);
    }
    if !answer.events.is_empty() {
        text += "\nEvents:\n";
        let rows: Vec<_> = answer
            .events
            .iter()
            .map(|event| {
                let count = if event.count > 1 {
                    format!(" (x{})", event.count)
                } else {
                    String::new()
                };
                row([
                    &format!("  {}", event.about),
                    &event.reason,
                    &format!("{}{count}", event.message),
                ])
            })
            .collect();
        text += &table(&rows);
    }
    text
}

fn claim_text(claim: &Explanation, wide: bool) -> String {
    let name = match (&claim.entry, &claim.claim) {
        (Some(entry), Some(name)) => format!("Claim {entry} (ResourceClaim {name})"),
        (Some(entry), None) => format!("Claim {entry}"),
        (None, name) => format!("ResourceClaim {}", name.as_deref().unwrap_or_default()),
    };
    let colour = match claim.step {
        Step::InUse | Step::Allocated | Step::NotNeeded => Colour::Green,
        Step::ClaimMissing
        | Step::ClaimNotOwned
        | Step::ClassMissing
        | Step::NotServed
        | Step::ParametersInvalid => Colour::Red,
        _ => Colour::Yellow,
    };
    let step = coloured(&format!("{:?}", claim.step), colour);
    let mut text = format!("{name}: {step}\n  {}\n", one_line(&claim.because));
    if let Some(class) = &claim.class {
        let driver = claim.driver.as_deref().unwrap_or("unknown");
        let _ = writeln!(text, "  class {class}, driver {driver}");
    }
    if let Some(wants) = &claim.wants {
        let _ = writeln!(text, "  wants {wants}");
    }
    text += &nodes_text(&claim.nodes, wide);
    if let Some(advice) = &claim.advice {
        let _ = writeln!(text, "  what to do: {}", one_line(advice));
    }
    text
}

fn limit_text(limit: &ByLimit, wide: bool) -> String {
    let colour = match limit.step {
        limits::Step::InUse | limits::Step::Ended => Colour::Green,
        limits::Step::NotOffered | limits::Step::TurnedAway => Colour::Red,
        _ => Colour::Yellow,
    };
    let step = coloured(&format!("{:?}", limit.step), colour);
    let (resource, amount) = (&limit.resource, limit.amount);
    let mut text = format!(
        "Limit {resource}: {amount}: {step}\n  {}\n",
        one_line(&limit.because)
    );
    text += &nodes_text(&limit.nodes, wide);
    if let Some(advice) = &limit.advice {
        let _ = writeln!(text, "  what to do: {}", one_line(advice));
    }
    text
}

/// Groups nodes with the same result on one line, unless `wide`.
fn nodes_text(verdicts: &[NodeVerdict], wide: bool) -> String {
    let mut by_reason: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for verdict in verdicts {
        let reason = verdict.reason.as_deref().unwrap_or("can serve it");
        by_reason.entry(reason).or_default().push(&verdict.node);
    }
    let mut rows = Vec::new();
    for (reason, nodes) in by_reason {
        match nodes.as_slice() {
            _ if wide => rows.extend(nodes.iter().map(|node| row([&format!("    {node}"), reason]))),
            [one] => rows.push(row([&format!("    {one}"), reason])),
            [first, second] => rows.push(row([&format!("    {first}, {second}"), reason])),
            [first, ..] => rows.push(row([
                &format!("    {first} and {} more", nodes.len().saturating_sub(1)),
                reason,
            ])),
            [] => {}
        }
    }
    if rows.is_empty() {
        String::new()
    } else {
        "  nodes:\n".to_owned() + &table(&rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_with_the_same_answer_share_a_line() {
        let verdict = |node: &str, reason: Option<&str>| NodeVerdict {
            node: node.into(),
            reason: reason.map(Into::into),
        };
        let verdicts = [
            verdict("a", Some("3 of 3 held")),
            verdict("b", Some("3 of 3 held")),
            verdict("c", Some("3 of 3 held")),
            verdict("d", None),
        ];
        assert_eq!(
            nodes_text(&verdicts, false),
            "  nodes:\n    a and 2 more   3 of 3 held\n    d              can serve it\n"
        );
        assert_eq!(nodes_text(&verdicts, true).lines().count(), 5);
    }
}
