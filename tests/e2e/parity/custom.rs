//! Our CRDs in `charts/drayman/crds`.

use serde_json::{Value, json};

use crate::parity::server::{APPLY, JSON, MERGE, STRATEGIC, Server, both, merged};

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const CLAIM_PARAMETERS: &str = "/apis/drayman.dev/v1alpha1/namespaces/{ns}/deviceclaimparameters";
pub(crate) const INVENTORIES: &str = "/apis/drayman.dev/v1alpha1/nodeinventories";

/// Creates the CRDs, once per cluster, and waits until they are established.
pub(crate) async fn define(server: &Server) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/crds"))? {
        let text = std::fs::read_to_string(entry?.path())?;
        let definition: Value = serde_saphyr::from_str(&text)?;
        let name = definition["metadata"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let (code, answer) = server.send("POST", DEFINITIONS, JSON, &definition).await?;
        anyhow::ensure!(code == 201 || code == 409, "{answer}");
        let (group, plural) = ("drayman.dev", name.split('.').next().unwrap_or_default());
        let list = format!("/apis/{group}/v1alpha1/{plural}");
        while server.peek(&list).await?.0 != 200 {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }
    Ok(())
}

fn parameters(name: &str, spec: Value) -> Value {
    json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClaimParameters", "metadata": { "name": name }, "spec": spec })
}

#[test]
fn objects_of_a_defined_kind_are_checked_by_its_schema() {
    both("custom-schema", async |server| {
        define(server).await?;
        let request = |fields: Value| json!({ "requests": [merged(json!({ "name": "a" }), &fields)] });
        let sum = json!({ "requests": [{ "name": "a", "count": 40 }, { "name": "b", "count": 40 }] });
        for (name, spec) in [
            ("good", request(json!({ "count": 2 }))),
            (
                "pruned",
                merged(request(json!({ "color": "red" })), &json!({ "taste": 1 })),
            ),
            ("missing", json!({})),
            ("empty", json!({ "requests": [] })),
            ("typed", json!({ "requests": "many" })),
            ("pattern", request(json!({ "name": "Upper" }))),
            ("range", request(json!({ "count": 65 }))),
            ("options", request(json!({ "allocationMode": "Some" }))),
            ("rule", request(json!({ "count": 2, "allocationMode": "All" }))),
            ("sum", sum),
        ] {
            let body = parameters(name, spec);
            let (code, answer) = server.send("POST", CLAIM_PARAMETERS, JSON, &body).await?;
            let causes = answer["details"]["causes"].as_array().into_iter().flatten();
            let fields: Vec<&Value> = causes.map(|cause| &cause["field"]).collect();
            server.note(json!({ name: code, "fields": fields, "spec": answer["spec"] }));
        }
        Ok(())
    });
}

#[test]
fn only_a_changed_spec_increments_the_generation() {
    both("custom-generation", async |server| {
        define(server).await?;
        let name = "stage-promises.drayman.dev";
        let inventory = json!({
            "apiVersion": "drayman.dev/v1alpha1", "kind": "NodeInventory",
            "metadata": { "name": name },
            "spec": { "driverName": "drayman.dev", "nodeName": "n", "nodeUid": "u", "devices": [] },
        });
        let at = format!("{INVENTORIES}/{name}");
        let apply = format!("{at}?fieldManager=drayman-node&force=true");
        server.patch(&apply, APPLY, &inventory).await?;
        server.patch(&apply, APPLY, &inventory).await?;
        let status = json!({ "status": { "devices": 3, "unhealthy": 0, "conditions": [] } });
        server.patch(&format!("{at}/status"), MERGE, &status).await?;
        let mut changed = inventory.clone();
        changed["spec"]["devices"] = json!([{ "name": "d", "kind": "k", "mode": "claims" }]);
        server.patch(&apply, APPLY, &changed).await?;
        server.patch(&at, STRATEGIC, &json!({})).await?;
        server.delete(&at).await?;
        server.get(&at).await.map(drop)
    });
}
