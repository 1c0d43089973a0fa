//! `drayman doctor` in structured mode.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice};
use kube::Client;

use crate::cli::diagnose::doctor::{DoctorFinding, api_server_minor, joined};
use crate::cli::diagnose::overlap;
use crate::cli::diagnose::qualified_name;
use crate::cli::diagnose::rights::Component;
use crate::cli::diagnose::structured::doctor::{classes, dropped_fields, kubelets, slices};
use crate::cli::error::Error;
use crate::cli::tool::read::{self, Namespaces, ServedApi};
use crate::cli::tool::{feature_gates, rights};
use crate::core::scheduler::allocated_devices::results;
use crate::host::selectors::with_selectors;

/// Runs all checks. Read errors become findings.
pub(super) async fn check(
    client: &Client,
    driver: &str,
    users: [(Component, Option<&str>); 2],
    version: (&str, &str),
) -> Vec<DoctorFinding> {
    let (major, number) = version;
    let api_server = api_server_minor(major, number);
    let version = DoctorFinding::fine(
        "version",
        format!(
            "Kubernetes {major}.{number} serves resource.k8s.io/v1: the scheduler allocates, and no controller is needed"
        ),
    );
    let mut checks = vec![
        Ok(vec![version]),
        Ok(feature_gates::check_structured(client, api_server).await),
        rights::check_pods(client, driver, users, ServedApi::Structured, false).await,
    ];
    match read::all::<ResourceSlice>(client).await {
        Ok(slices) => checks.extend([
            of_devices(client, driver, &slices, api_server).await,
            of_drivers(client, &slices).await,
        ]),
        Err(error) => checks.push(Err(error)),
    }
    joined(checks)
}

/// Checks for claims with devices of drivers that no node serves.
async fn of_drivers(client: &Client, slices: &[ResourceSlice]) -> Result<Vec<DoctorFinding>, Error> {
    let claims = read::structured_claims(client, &Namespaces::All).await?.items;
    let mut held: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for claim in &claims {
        for result in results(claim) {
            let claims = held.entry(&result.driver).or_default();
            claims.insert(qualified_name(claim));
        }
    }
    let served = slices.iter().map(|slice| slice.spec.driver.as_str()).collect();
    Ok(overlap::unserved(&held, &served))
}

async fn of_devices(
    client: &Client,
    driver: &str,
    all_slices: &[ResourceSlice],
    api_server: Option<u32>,
) -> Result<Vec<DoctorFinding>, Error> {
    let mut findings = dropped_fields(driver, all_slices);
    let mut unread = Vec::new();
    match read::all::<DeviceClass>(client).await {
        Ok(all_classes) => {
            let of_classes = with_selectors(|evaluate| classes(driver, &all_classes, all_slices, evaluate));
            findings.extend(of_classes.map_err(anyhow::Error::msg)?);
        }
        Err(error) => unread.push(DoctorFinding::unread(&error.to_string())),
    }
    match read::all::<Node>(client).await {
        Ok(nodes) => {
            findings.extend(kubelets(driver, all_slices, &nodes, api_server));
            findings.extend(slices(driver, all_slices, Some(&nodes)));
        }
        Err(error) => {
            findings.extend(slices(driver, all_slices, None));
            unread.push(DoctorFinding::unread(&error.to_string()));
        }
    }
    findings.extend(unread);
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cli::diagnose::doctor::Level;
    use crate::cli::diagnose::structured::tests::{camera, class, held, node, slice};
    use crate::cli::tool::tests::Server;

    async fn run(server: Server) -> Vec<(Level, String)> {
        let users = [
            (Component::Controller, Some("somebody")),
            (Component::Node, Some("system:serviceaccount:drayman:node")),
        ];
        let findings = check(&server.client(), "drayman.dev", users, ("1", "37")).await;
        findings
            .into_iter()
            .map(|finding| (finding.level, finding.message))
            .collect()
    }

    fn server() -> Server {
        let allowed = json!({ "spec": {}, "status": { "allowed": true } });
        Server::structured()
            .with_object("/apis/authorization.k8s.io/v1/subjectaccessreviews", allowed)
            .with("/api/v1/nodes", &[node("node-a")])
            .with("/apis/resource.k8s.io/v1/deviceclasses", &[class("cameras")])
            .with(
                "/apis/resource.k8s.io/v1/resourceslices",
                &[slice("node-a", json!([camera("a")]))],
            )
    }

    #[tokio::test]
    async fn a_healthy_structured_cluster_has_no_problem() {
        let findings = run(server()).await;
        let worst = findings.iter().map(|(level, _)| *level).max();
        // `Server` serves no metrics.
        assert_eq!(worst, Some(Level::Note), "{findings:?}");
        let says = |text: &str| findings.iter().any(|(_, message)| message.contains(text));
        assert!(says("Kubernetes 1.37 serves resource.k8s.io/v1"), "{findings:?}");
        assert!(says(
            "system:serviceaccount:drayman:node has all permissions that the companion needs"
        ));
        assert!(says("1 of 1 nodes offer 1 devices"));
        assert!(says(
            "somebody runs a controller, which structured mode does not use"
        ));
    }

    #[tokio::test]
    async fn missing_rights_are_named() {
        let denied = json!({ "spec": {}, "status": { "allowed": false } });
        let server = server()
            .with_object("/apis/authorization.k8s.io/v1/subjectaccessreviews", denied)
            .without_right("/apis/resource.k8s.io/v1/resourceslices");
        let findings = run(server).await;
        let slices = "system:serviceaccount:drayman:node may not create resourceslices.resource.k8s.io, which the companion needs";
        assert!(
            findings.contains(&(Level::Problem, slices.to_owned())),
            "{findings:?}"
        );
        let warns = |(level, message): &&(Level, String)| {
            *level == Level::Warning && message.contains("cannot list resourceslices")
        };
        assert_eq!(findings.iter().filter(warns).count(), 1, "{findings:?}");
    }

    #[tokio::test]
    async fn a_missing_right_hides_no_other_finding() {
        let mut incomplete = slice("node-a", json!([camera("a")]));
        incomplete["spec"]["pool"]["resourceSliceCount"] = json!(2);
        let mut pod = companion("drayman");
        let waiting = json!({ "reason": "ImagePullBackOff", "message": "back-off pulling image" });
        pod["status"] = json!({ "containerStatuses": [{ "state": { "waiting": waiting } }] });
        let server = server()
            .with("/apis/resource.k8s.io/v1/resourceslices", &[incomplete])
            .with("/api/v1/pods", &[pod]);
        for path in [
            "/api/v1/nodes",
            "/apis/resource.k8s.io/v1/deviceclasses",
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
        ] {
            let findings = run(server.clone().without_right(path)).await;
            let has = |expected: Level, text: &str| {
                let mut found = findings.iter();
                found.any(|(level, message)| *level == expected && message.contains(text))
            };
            assert!(
                has(Level::Problem, "pool node-a is incomplete"),
                "{path}: {findings:?}"
            );
            assert!(has(Level::Problem, "ImagePullBackOff"), "{path}: {findings:?}");
            assert!(has(Level::Warning, ""), "{path}: {findings:?}");
        }
    }

    /// A companion's pod.
    fn companion(namespace: &str) -> serde_json::Value {
        let labels = json!({ "app.kubernetes.io/part-of": "drayman", "app.kubernetes.io/component": "node" });
        let variable = json!({ "name": "DRAYMAN_DRIVER_NAME", "value": "drayman.dev" });
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "namespace": namespace, "name": "a", "labels": labels },
            "spec": { "serviceAccountName": "node", "containers": [{ "name": "node", "env": [variable] }] },
        })
    }

    #[tokio::test]
    async fn a_shared_driver_name_is_found_without_helm() {
        let says = |findings: &[(Level, String)], text: &str| {
            let problem =
                |(level, message): &(Level, String)| *level == Level::Problem && message.contains(text);
            findings.iter().any(problem)
        };
        let one = run(server().with("/api/v1/pods", &[companion("drayman")])).await;
        assert!(!says(&one, "several releases"), "{one:?}");
        let mut updated = [companion("drayman"), companion("drayman")];
        for (pod, account) in updated.iter_mut().zip(["old", "new"]) {
            pod["metadata"]["name"] = json!(account);
            pod["metadata"]["labels"]["app.kubernetes.io/instance"] = json!("drayman");
            pod["spec"]["serviceAccountName"] = json!(account);
        }
        let updated = run(server().with("/api/v1/pods", &updated)).await;
        assert!(!says(&updated, "several releases"), "{updated:?}");
        let two = run(server().with("/api/v1/pods", &[companion("drayman"), companion("other")])).await;
        assert!(
            says(
                &two,
                "companions of driver drayman.dev belong to several releases"
            ),
            "{two:?}"
        );
    }

    #[tokio::test]
    async fn a_companion_without_an_image_has_kubelets_reason() {
        let mut pods: Vec<_> = (0..5).map(|_| companion("drayman")).collect();
        for (number, pod) in pods.iter_mut().enumerate() {
            let waiting = if number == 0 {
                json!({ "reason": "ContainerCreating" })
            } else {
                json!({ "reason": "ImagePullBackOff", "message": "back-off pulling image" })
            };
            pod["metadata"]["name"] = json!(format!("node-{number}"));
            pod["status"] = json!({ "containerStatuses": [{ "state": { "waiting": waiting } }] });
        }
        let of_pods = async |pods: &[serde_json::Value]| {
            let findings = run(server().with("/api/v1/pods", pods)).await.into_iter();
            let mut found = findings.filter(|(_, message)| message.contains("do not run"));
            found.next()
        };
        assert_eq!(of_pods(&pods[..1]).await, None, "a new pod");
        let back_off = |number| format!("drayman/node-{number} (ImagePullBackOff: back-off pulling image)");
        let one = format!("pods of driver drayman.dev do not run: {}", back_off(1));
        assert_eq!(of_pods(&pods[..2]).await, Some((Level::Problem, one)));
        let named = [1, 2, 3].map(back_off).join(", ");
        let all = format!("pods of driver drayman.dev do not run: {named} and 1 more");
        assert_eq!(of_pods(&pods).await, Some((Level::Problem, all)));
    }

    #[tokio::test]
    async fn claims_of_an_earlier_driver_name_are_found_without_helm() {
        let claims = "/apis/resource.k8s.io/v1/resourceclaims";
        let mut renamed = held("till", "node-a", &["a"]);
        let findings = run(server().with(claims, std::slice::from_ref(&renamed))).await;
        assert!(
            !findings
                .iter()
                .any(|(_, message)| message.contains("no node serves")),
            "{findings:?}"
        );
        renamed["status"]["allocation"]["devices"]["results"][0]["driver"] = json!("old.example.com");
        let findings = run(server().with(claims, &[renamed])).await;
        let found = findings
            .iter()
            .find(|(_, message)| message.contains("no node serves driver old.example.com"));
        assert!(
            found.is_some_and(|(level, message)| *level == Level::Warning && message.contains("shop/till")),
            "{findings:?}"
        );
    }
}
