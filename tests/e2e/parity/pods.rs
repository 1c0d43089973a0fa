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
        };
        let (path, binding) = (format!("{PODS}/p"), format!("{PODS}/p/binding"));
        let answers = [
            server.send("POST", PODS, JSON, &pod("p")).await?,
            server.send("POST", &binding, JSON, &bind("n")).await?,
            server.peek(&path).await?,
            server.send("POST", &binding, JSON, &bind("m")).await?,
        ];
        let move_it = json!({ "spec": { "nodeName": "m" } });
        let (code, _) = server.send("PATCH", &path, MERGE, &move_it).await?;
        server.note(json!([answers.each_ref().map(seen), code]));
        Ok(())
    });
}

#[test]
fn a_running_pod_gets_a_grace_period_and_others_do_not() {
    both("pod-deletion", async |server| {
        server.send("POST", PODS, JSON, &pod("waiting")).await?;
        let waiting = format!("{PODS}/waiting");
        let mut answers = vec![server.remove(&waiting).await?, server.peek(&waiting).await?];
        let mut pod = pod("running");
        pod["spec"]["nodeName"] = "n".into();
        // Other fields, such as tolerations, are out of scope.
        server.send("POST", PODS, JSON, &pod).await?;
        let running = format!("{PODS}/running");
        answers.push(server.remove(&running).await?);
        for seconds in [5, 9, 0] {
            let path = format!("{running}?gracePeriodSeconds={seconds}");
            answers.push(server.remove(&path).await?);
        }
        answers.push(server.peek(&running).await?);
        server.note(answers.iter().map(seen).collect());
        Ok(())
    });
}
