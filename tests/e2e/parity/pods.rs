//! Pods: binding and graceful deletion, as far as the test cluster's scheduler and kubelet require them.

use serde_json::{Value, json};

use crate::parity::server::{JSON, MERGE, PODS, both};

fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name },
        "spec": { "schedulerName": "nobody", "containers": [{ "name": "c", "image": "i" }] },
    })
}

fn seen(answer: &(u16, Value)) -> Value {
    let object = &answer.1;
    json!({
        "code": answer.0, "kind": object["kind"], "reason": object["reason"], "message": object["message"],
        "node": object["spec"]["nodeName"], "phase": object["status"]["phase"],
        "deleting": object["metadata"]["deletionTimestamp"].is_string(),
        "grace": object["metadata"]["deletionGracePeriodSeconds"],
    })
}

#[test]
fn a_pod_is_bound_once() {
    both("pod-binding", async |server| {
        let bind = |node: &str| {
            json!({ "apiVersion": "v1", "kind": "Binding", "metadata": { "name": "p" },
                    "target": { "kind": "Node", "name": node } })
            .to_string()
            .into_bytes()
        };
        let mut answers = vec![
            server
                .send("POST", PODS, JSON, pod("p").to_string().into_bytes())
                .await?,
        ];
        let binding = format!("{PODS}/p/binding");
        answers.push(server.send("POST", &binding, JSON, bind("n")).await?);
        answers.push(server.send("GET", &format!("{PODS}/p"), JSON, Vec::new()).await?);
        answers.push(server.send("POST", &binding, JSON, bind("m")).await?);
        let move_it = json!({ "spec": { "nodeName": "m" } }).to_string().into_bytes();
        let (code, _) = server.send("PATCH", &format!("{PODS}/p"), MERGE, move_it).await?;
        server.note(json!([answers.iter().map(seen).collect::<Vec<_>>(), code]));
        Ok(())
    });
}

#[test]
fn a_running_pod_gets_a_grace_period_and_others_do_not() {
    both("pod-deletion", async |server| {
        server
            .send("POST", PODS, JSON, pod("waiting").to_string().into_bytes())
            .await?;
        let gone = server
            .send("DELETE", &format!("{PODS}/waiting"), JSON, Vec::new())
            .await?;
        let after = server
            .send("GET", &format!("{PODS}/waiting"), JSON, Vec::new())
            .await?;
        let mut running = pod("running");
        running["spec"]["nodeName"] = "n".into();
        // Other fields, such as tolerations, are out of scope.
        server
            .send("POST", PODS, JSON, running.to_string().into_bytes())
            .await?;
        let first = server
            .send("DELETE", &format!("{PODS}/running"), JSON, Vec::new())
            .await?;
        let shorter = server
            .send(
                "DELETE",
                &format!("{PODS}/running?gracePeriodSeconds=5"),
                JSON,
                Vec::new(),
            )
            .await?;
        let longer = server
            .send(
                "DELETE",
                &format!("{PODS}/running?gracePeriodSeconds=9"),
                JSON,
                Vec::new(),
            )
            .await?;
        let now = server
            .send(
                "DELETE",
                &format!("{PODS}/running?gracePeriodSeconds=0"),
                JSON,
                Vec::new(),
            )
            .await?;
        let last = server
            .send("GET", &format!("{PODS}/running"), JSON, Vec::new())
            .await?;
        let answers = [gone, after, first, shorter, longer, now, last];
        server.note(answers.iter().map(seen).collect());
        Ok(())
    });
}
