//! Reads the input to explain a pod with extended resources.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Client;

use super::super::read;
use crate::cli::Error;
use crate::cli::diagnose::limits::{Explanation, explain, wanted};

/// Explains each extended resource of a pod. Reads nodes and their pods only while the pod waits for a resource; if
/// this is forbidden, a note on stderr names the missing information.
pub(super) async fn explained(client: &Client, pod: &Pod) -> Result<Vec<Explanation>, Error> {
    let is_bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    if is_bound || wanted(pod).is_empty() {
        return Ok(explain(pod, None, None));
    }
    let nodes = unless_forbidden(
        read::all::<Node>(client).await,
        "nodes: which of them offer an extended resource is not known",
    )?;
    let pods = unless_forbidden(
        read::all::<Pod>(client).await,
        "pods of all namespaces: how many of an extended resource are in use is not known",
    )?;
    Ok(explain(pod, nodes.as_deref(), pods.as_deref()))
}

fn unless_forbidden<T>(read: Result<T, Error>, what: &str) -> Result<Option<T>, Error> {
    match read {
        Err(error) if read::is_forbidden(&error) => {
            eprintln!("note: you may not list {what}");
            Ok(None)
        }
        read => read.map(Some),
    }
}
