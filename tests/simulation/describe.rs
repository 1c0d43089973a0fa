//! One-line descriptions of events and commands.

use std::fmt::Write as _;

use drayman::api::resource::{PodSchedulingContext, ResourceClaim};
use drayman::core::claims::{Answer, ClaimWrite, Command, DriverRequest, Event, Outcome, Regarding};
use drayman::driver::Observation;

use crate::driver::hold_of;

pub(crate) fn describe_claim(claim: &ResourceClaim) -> String {
    let (metadata, status) = (&claim.metadata, &claim.status);
    let mut text = format!(
        "claim {} ({}, version {})",
        metadata.name.as_deref().unwrap_or_default(),
        metadata.uid.as_deref().unwrap_or_default(),
        metadata.resource_version.as_deref().unwrap_or_default()
    );
    if metadata.deletion_timestamp.is_some() {
        text.push_str(" deleting");
    }
    if let Some(finalizers) = &metadata.finalizers {
        let _ = write!(text, " finalizers {finalizers:?}");
    }
    if let Some(allocation) = &status.allocation {
        let hold = hold_of(allocation);
        let _ = write!(text, " allocated {}:{:?}", hold.node, hold.devices);
    }
    if !status.reserved_for.is_empty() {
        let uids: Vec<&String> = status.reserved_for.iter().map(|consumer| &consumer.uid).collect();
        let _ = write!(text, " reserved {uids:?}");
    }
    if status.deallocation_requested {
        text.push_str(" deallocation requested");
    }
    text
}

pub(crate) fn describe_context(context: &PodSchedulingContext) -> String {
    let entries: Vec<String> = context
        .status
        .resource_claims
        .iter()
        .map(|entry| format!("{} unsuitable {:?}", entry.name, entry.unsuitable_nodes))
        .collect();
    format!(
        "context {} ({}, version {}) selected {:?} potential {:?} entries {entries:?}",
        context.metadata.name.as_deref().unwrap_or_default(),
        context.metadata.uid.as_deref().unwrap_or_default(),
        context.metadata.resource_version.as_deref().unwrap_or_default(),
        context.spec.selected_node,
        context.spec.potential_nodes,
    )
}

fn outcome<T>(outcome: &Outcome<T>, done: impl Fn(&T) -> String) -> String {
    match outcome {
        Outcome::Done(object) => format!("done: {}", done(object)),
        Outcome::Refused(text) => format!("refused: {text}"),
        Outcome::Conflict(text) => format!("conflict: {text}"),
        Outcome::Busy(text) => format!("busy: {text}"),
        Outcome::Unknown(text) => format!("unknown: {text}"),
    }
}

pub(crate) fn describe_event(event: &Event) -> String {
    match event {
        Event::Classes(all) => format!("list of {} classes", all.len()),
        Event::Class(class) => format!(
            "class {} of {}",
            class.metadata.name.as_deref().unwrap_or_default(),
            class.driver_name
        ),
        Event::ClassGone(name) => format!("class {name} gone"),
        Event::Claims(all) => {
            let all: Vec<String> = all.iter().map(|claim| describe_claim(claim)).collect();
            format!("list of claims {all:?}")
        }
        Event::Claim(claim) => describe_claim(claim),
        Event::ClaimGone { key, uid } => format!("claim {} ({uid}) gone", key.name),
        Event::Contexts(all) => {
            let all: Vec<String> = all.iter().map(|context| describe_context(context)).collect();
            format!("list of contexts {all:?}")
        }
        Event::Context(context) => describe_context(context),
        Event::ContextGone { key, uid } => format!("context {} ({uid}) gone", key.name),
        Event::DriverReady => "driver ready".to_owned(),
        Event::Capacity(change) => format!("{change:?}"),
        Event::Found(findings) => format!("{findings:?}"),
        Event::ReportFailed(report) => format!("{report:?} was not written"),
        Event::Answer { id, answer } => format!("answer {}: {}", id.0, describe_answer(answer)),
    }
}

fn describe_answer(answer: &Answer) -> String {
    match answer {
        Answer::PodRead(Ok(Some(pod))) => format!("pod {}", pod.metadata.uid.as_deref().unwrap_or_default()),
        Answer::ClaimRead(Ok(Some(claim))) => describe_claim(claim),
        Answer::ClaimWritten(result) => outcome(result, |claim| describe_claim(claim)),
        Answer::ContextWritten(result) => outcome(result, |context| describe_context(context)),
        Answer::Allocated(Ok(allocations)) => {
            let holds: Vec<_> = allocations.iter().map(hold_of).collect();
            format!("allocated {holds:?}")
        }
        other => format!("{other:?}"),
    }
}

pub(crate) fn describe_command(command: &Command) -> String {
    match command {
        Command::ReadPod { key, .. } => format!("read pod {}", key.name),
        Command::ReadClaim { key, .. } => format!("read claim {}", key.name),
        Command::WriteClaim { key, write, .. } => match write {
            ClaimWrite::AddFinalizer { node } => format!("add finalizer to {} for {node}", key.name),
            ClaimWrite::RemoveFinalizer { .. } => format!("remove finalizer of {}", key.name),
            ClaimWrite::ClearAllocation { .. } => format!("clear allocation of {}", key.name),
            ClaimWrite::RollBackAllocation { .. } => format!("roll back {}", key.name),
            ClaimWrite::Allocate {
                allocation,
                reserved_for,
                ..
            } => {
                let hold = hold_of(allocation);
                let consumer = reserved_for
                    .as_ref()
                    .map_or("no pod", |consumer| consumer.name.as_str());
                let devices: Vec<String> = hold.devices.into_iter().collect();
                format!(
                    "record {}:{} in {} for {consumer}",
                    hold.node,
                    devices.join(","),
                    key.name
                )
            }
        },
        Command::WriteContext { key, entries, .. } => {
            let entries: Vec<String> = entries
                .iter()
                .map(|entry| format!("{} unsuitable {:?}", entry.name, entry.unsuitable_nodes))
                .collect();
            format!("answer {} {}", key.name, entries.join("; "))
        }
        Command::CallDriver { request, .. } => match request {
            DriverRequest::UnsuitableNodes { claims, nodes, .. } => {
                let claims: Vec<String> = claims.iter().map(|claim| claim_name(&claim.claim)).collect();
                format!("evaluate {} on {}", claims.join(","), nodes.join(","))
            }
            DriverRequest::Allocate { claims, node } => {
                let claims: Vec<String> = claims.iter().map(|claim| claim_name(&claim.claim)).collect();
                let node = node.as_deref().unwrap_or("any node");
                format!("allocate {} on {node}", claims.join(","))
            }
            DriverRequest::Deallocate { claim, .. } => format!("deallocate {}", claim_name(claim)),
        },
        Command::Observe(Observation::All(all)) => format!("observe {} holdings", all.len()),
        Command::Observe(Observation::Changed(holding)) => {
            format!("observe {}", describe_claim(&holding.claim))
        }
        Command::Observe(Observation::Gone { uid }) => format!("observe {uid} gone"),
        Command::AwaitDriver => "await driver".to_owned(),
        Command::Report(report) => {
            let on = match &report.regarding {
                Regarding::Pod { key, .. } => format!("pod {}", key.name),
                Regarding::Claim { key, .. } => format!("claim {}", key.name),
                Regarding::Class { name, .. } => format!("class {name}"),
            };
            format!("report on {on}: {}: {}", report.reason, report.message)
        }
    }
}

fn claim_name(claim: &ResourceClaim) -> String {
    claim.metadata.name.clone().unwrap_or_default()
}
