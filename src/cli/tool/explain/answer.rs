//! The subject of `drayman explain`, its answer and the answer's text, in both modes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use k8s_openapi::api::core::v1::{Event, Node};
use kube::api::{Api, ListParams};
use kube::{Client, Resource, ResourceExt as _};
use schemars::JsonSchema;
use serde::Serialize;

use crate::cli::diagnose::doctor::first;
use crate::cli::diagnose::explain::{ClaimExplanation, ClaimStep, DeviceExplanation, NodeExplanation};
use crate::cli::diagnose::extended_resources::{self, ExtendedResourceExplanation, ExtendedResourceStep};
use crate::cli::diagnose::qualified_name;
use crate::cli::error::Error;
use crate::cli::objects::{Condition, PartialPod};
use crate::cli::output::{Colour, Printable, Style, coloured, columns, one_line, row};
use crate::cli::tool::read;
use crate::cli::value;

/// Maximum number of events shown: the newest ones.
const EVENTS_MAX: usize = 8;

/// Maximum number of unavailable devices shown, unless all are asked for.
const DEVICES_MAX: usize = 10;

/// The object to explain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ObjectArgument {
    Pod(String),
    Claim(String),
    Either(String),
}

impl ObjectArgument {
    pub(super) fn read(words: &[String]) -> Result<Self, Error> {
        let (kind, name) = match words {
            [one] => match one.split_once('/') {
                Some((kind, name)) => (Some(kind), name),
                None => (None, one.as_str()),
            },
            [kind, name] => (Some(kind.as_str()), name.as_str()),
            _ => (Some(""), ""),
        };
        let subject = match kind {
            None => Self::Either(name.to_owned()),
            Some("pod" | "pods" | "po") => Self::Pod(name.to_owned()),
            Some("claim" | "claims" | "resourceclaim" | "resourceclaims") => Self::Claim(name.to_owned()),
            Some(other) => {
                return Err(Error::Configuration(format!(
                    "{other}/{name} cannot be explained: give pod/NAME or claim/NAME"
                )));
            }
        };
        value::object_name(name)
            .map_err(|error| Error::Configuration(format!("{}: {error}", words.join("/"))))?;
        Ok(subject)
    }
}

/// A pod or claim with everything that is known about its step.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Explained {
    /// The pod, if the question concerns one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<PodAnswer>,
    /// The pod's claims, or the claim itself.
    claims: Vec<ClaimExplanation>,
    /// Extended resources in the limits of the pod's containers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    limits: Vec<ExtendedResourceExplanation>,
    /// The newest events about these objects.
    events: Vec<EventAnswer>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodAnswer {
    name: String,
    phase: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    /// The scheduler's message, until the pod is bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    scheduler: Option<String>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct EventAnswer {
    about: String,
    reason: String,
    message: String,
    count: i32,
}

/// The claims of an answer.
pub(super) struct ExplainedClaims {
    pub(super) explanations: Vec<ClaimExplanation>,
    /// Name and uid of each claim, for its events.
    pub(super) about: Vec<(String, String)>,
}

impl Explained {
    /// Adds the pod, its extended resources and the events.
    pub(super) async fn of(
        client: &Client,
        namespace: &str,
        pod: Option<&PartialPod>,
        claims: ExplainedClaims,
    ) -> Result<Self, Error> {
        // Two entries may name one claim.
        let about: BTreeSet<_> = pod.map(about).into_iter().chain(claims.about).collect();
        Ok(Self {
            pod: pod.map(PodAnswer::of),
            claims: claims.explanations,
            limits: match pod {
                Some(pod) => explain_limits(client, pod).await?,
                None => Vec::new(),
            },
            events: events(client, namespace, about).await?,
        })
    }
}

/// Kind, name and uid of an object, for its events.
pub(super) fn about<K: Resource<DynamicType = ()>>(object: &K) -> (String, String) {
    let name = format!("{} {}", K::kind(&()), object.name_any());
    (name, object.uid().unwrap_or_default())
}

/// Reads the newest events about objects, given by name and uid; none if this is forbidden.
async fn events(
    client: &Client,
    namespace: &str,
    about: BTreeSet<(String, String)>,
) -> Result<Vec<EventAnswer>, Error> {
    let api = Api::<Event>::namespaced(client.clone(), namespace);
    let mut events = Vec::new();
    for (name, uid) in about {
        let selected = ListParams::default().fields(&format!("involvedObject.uid={uid}"));
        let found = unless_forbidden(read::list(&api, selected).await, "events: none are shown")?;
        let Some(found) = found else { break };
        for event in found {
            let last = event
                .series
                .as_ref()
                .and_then(|series| series.last_observed_time.as_ref().map(|time| time.0))
                .or_else(|| event.last_timestamp.as_ref().map(|time| time.0))
                .or_else(|| event.event_time.as_ref().map(|time| time.0))
                .or_else(|| event.metadata.creation_timestamp.as_ref().map(|time| time.0));
            let series = event.series.as_ref().and_then(|series| series.count);
            events.push((
                last,
                EventAnswer {
                    about: name.clone(),
                    reason: event.reason.unwrap_or_default(),
                    message: event.message.unwrap_or_default(),
                    count: series.or(event.count).unwrap_or(1).max(1),
                },
            ));
        }
    }
    events.sort_by_key(|(last, _)| *last);
    let skipped = events.len().saturating_sub(EVENTS_MAX);
    Ok(events.into_iter().skip(skipped).map(|(_, event)| event).collect())
}

/// Returns why the scheduler has not bound the pod.
fn scheduler_says(pod: &PartialPod) -> Option<String> {
    if pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()) {
        return None;
    }
    let unscheduled =
        |condition: &&Condition| condition.type_ == "PodScheduled" && condition.status == "False";
    let mut conditions = pod
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    conditions.find(unscheduled)?.message.clone()
}

impl PodAnswer {
    fn of(pod: &PartialPod) -> Self {
        let phase = pod.status.as_ref().and_then(|status| status.phase.clone());
        Self {
            name: qualified_name(pod),
            phase: phase.unwrap_or_else(|| "Pending".to_owned()),
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
            scheduler: scheduler_says(pod),
        }
    }
}

/// Explains each extended resource of a pod. Reads nodes and their pods only while the pod waits for a resource; if
/// this is forbidden, a note on stderr names the missing information.
async fn explain_limits(
    client: &Client,
    pod: &PartialPod,
) -> Result<Vec<ExtendedResourceExplanation>, Error> {
    let waits = pod.node_name().is_none() && !pod.has_ended();
    if !waits || extended_resources::requested(pod).is_empty() {
        return Ok(extended_resources::explain(pod, None, None));
    }
    let nodes = unless_forbidden(
        read::all::<Node>(client).await,
        "nodes: the nodes that offer an extended resource are unknown",
    )?;
    let pods = unless_forbidden(
        read::all::<PartialPod>(client).await,
        "pods of all namespaces: the amounts of extended resources in use are unknown",
    )?;
    Ok(extended_resources::explain(
        pod,
        nodes.as_deref(),
        pods.as_deref(),
    ))
}

pub(super) fn unless_forbidden<T>(read: Result<T, Error>, what: &str) -> Result<Option<T>, Error> {
    match read {
        Err(error) if read::is_forbidden(&error) => {
            eprintln!("note: you may not list {what}");
            Ok(None)
        }
        read => read.map(Some),
    }
}

impl Printable for Explained {
    const KIND: &'static str = "Explanation";

    fn text(&self, style: Style) -> String {
        let mut text = String::new();
        if let Some(pod) = &self.pod {
            let node = pod
                .node
                .as_ref()
                .map_or_else(|| "no node yet".to_owned(), |node| format!("on {node}"));
            let _ = writeln!(text, "Pod {}: {}, {node}", pod.name, pod.phase);
            if let Some(scheduler) = &pod.scheduler {
                let _ = writeln!(text, "  scheduler says: {}", one_line(scheduler));
            }
            if self.claims.is_empty() && self.limits.is_empty() {
                text += "  it requests no devices, neither by claims nor in resources.limits\n";
            }
        }
        for claim in &self.claims {
            if !text.is_empty() {
                text.push('\n');
            }
            text += &claim_text(claim, style.wide);
        }
        for limit in &self.limits {
            text.push('\n');
            text += &limit_text(limit, style.wide);
        }
        if !self.events.is_empty() {
            text += "\nEvents:\n";
            let rows: Vec<_> = self
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
            text += &columns(&rows);
        }
        text
    }

    fn names(&self) -> Vec<String> {
        let pod = self.pod.iter().map(|pod| format!("pod/{}", pod.name));
        let claims = self.claims.iter().filter_map(|claim| claim.claim.as_ref());
        pod.chain(claims.map(|claim| format!("resourceclaim/{claim}")))
            .collect()
    }
}

fn claim_text(claim: &ClaimExplanation, wide: bool) -> String {
    let name = match (&claim.entry, &claim.claim) {
        (Some(entry), Some(name)) => format!("Claim {entry} (ResourceClaim {name})"),
        (Some(entry), None) => format!("Claim {entry}"),
        (None, name) => format!("ResourceClaim {}", name.as_deref().unwrap_or_default()),
    };
    let colour = match claim.step {
        ClaimStep::InUse | ClaimStep::Allocated | ClaimStep::NotNeeded => Colour::Green,
        ClaimStep::ClaimMissing
        | ClaimStep::ClaimNotOwned
        | ClaimStep::ClassMissing
        | ClaimStep::NotServed
        | ClaimStep::ParametersInvalid => Colour::Red,
        _ => Colour::Yellow,
    };
    let step = coloured(&format!("{:?}", claim.step), colour);
    let mut text = format!("{name}: {step}\n  {}\n", one_line(&claim.because));
    if let Some(class) = &claim.class {
        let driver = claim.driver.as_ref().map(|driver| format!(", driver {driver}"));
        let _ = writeln!(text, "  class {class}{}", driver.unwrap_or_default());
    }
    if let Some(wants) = &claim.wants {
        let _ = writeln!(text, "  wants {}", one_line(wants));
    }
    text += &nodes_text(&claim.nodes, wide);
    text += &devices_text(&claim.devices, wide);
    if let Some(advice) = &claim.advice {
        let _ = writeln!(text, "  what to do: {}", one_line(advice));
    }
    text
}

fn limit_text(limit: &ExtendedResourceExplanation, wide: bool) -> String {
    let colour = match limit.step {
        ExtendedResourceStep::InUse | ExtendedResourceStep::Ended => Colour::Green,
        ExtendedResourceStep::NotOffered | ExtendedResourceStep::TurnedAway => Colour::Red,
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
fn nodes_text(fits: &[NodeExplanation], wide: bool) -> String {
    let mut by_reason: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for fit in fits {
        let reason = fit.reason.as_deref().unwrap_or("can serve it");
        by_reason.entry(reason).or_default().push(&fit.node);
    }
    let mut rows = Vec::new();
    for (reason, nodes) in by_reason {
        if wide {
            rows.extend(nodes.iter().map(|node| row([&format!("    {node}"), reason])));
        } else {
            // Two names are as short as one and a number.
            let max = if nodes.len() == 2 { 2 } else { 1 };
            rows.push(row([&format!("    {}", first(nodes, max)), reason]));
        }
    }
    if rows.is_empty() {
        String::new()
    } else {
        "  nodes:\n".to_owned() + &columns(&rows)
    }
}

/// Lists the matching devices: all if `wide`, otherwise the first that are not available.
fn devices_text(fits: &[DeviceExplanation], wide: bool) -> String {
    let shown: Vec<&DeviceExplanation> = fits
        .iter()
        .filter(|device| wide || device.reason.is_some())
        .collect();
    let most = if wide { shown.len() } else { DEVICES_MAX };
    let mut rows: Vec<_> = shown
        .iter()
        .take(most)
        .map(|device| {
            row([
                &format!("    {}/{}", device.node, device.device),
                &format!("request {}", device.request),
                device.reason.as_deref().unwrap_or("free"),
            ])
        })
        .collect();
    if shown.len() > most {
        rows.push(row([&format!("    and {} more (-o wide)", shown.len() - most)]));
    }
    if rows.is_empty() {
        String::new()
    } else {
        "  matching devices:\n".to_owned() + &columns(&rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_with_the_same_answer_share_a_line() {
        let fit = |node: &str, reason: Option<&str>| NodeExplanation {
            node: node.into(),
            reason: reason.map(Into::into),
        };
        let fits = [
            fit("a", Some("3 of 3 held")),
            fit("b", Some("3 of 3 held")),
            fit("c", Some("3 of 3 held")),
            fit("d", None),
        ];
        assert_eq!(
            nodes_text(&fits, false),
            "  nodes:\n    a and 2 more   3 of 3 held\n    d              can serve it\n"
        );
        assert_eq!(nodes_text(&fits, true).lines().count(), 5);
        assert_eq!(
            nodes_text(&fits[1..3], false),
            "  nodes:\n    b, c   3 of 3 held\n"
        );
    }
}
