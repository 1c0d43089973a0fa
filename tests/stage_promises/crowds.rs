//! Many watchers, and one that does not read.

use std::time::Duration;

use drayman::sim::api::ApiServer;
use drayman::sim::source::Source;
use futures::future::try_join_all;
use http::Request;
use kube::client::Body;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use crate::ground::{CLAIMS, JSON, both, version};

const WATCHERS: usize = 1000;

#[test]
fn a_thousand_watchers_are_told_the_same() {
    both("crowd", async |ground| {
        let claim =
            |name: &str| json!({ "metadata": { "name": name }, "spec": { "resourceClassName": "t" } });
        let since = version(&ground.create(CLAIMS, &claim("a")).await?);
        let path = format!("{CLAIMS}?watch=true&resourceVersion={since}&timeoutSeconds=120");
        let clients = ground.clients(WATCHERS).await?;
        let watching = try_join_all(clients.iter().map(|client| ground.look_by(client, &path, 3)));
        let changing = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            for name in ["b", "c"] {
                let body = claim(name).to_string().into_bytes();
                ground.send("POST", CLAIMS, JSON, body).await?;
            }
            ground
                .send("DELETE", &format!("{CLAIMS}/b"), JSON, Vec::new())
                .await
        };
        let (seen, changed) = tokio::join!(watching, changing);
        changed?;
        let seen = seen?;
        let short = |events: &Vec<Value>| -> Vec<String> {
            let of = |event: &Value| format!("{} {}", event["type"], event["object"]["metadata"]["name"]);
            events.iter().map(of).collect()
        };
        let first = short(&seen[0]);
        let same = seen.iter().filter(|events| short(events) == first).count();
        assert_eq!(same, WATCHERS);
        ground.note(json!([first, same]));
        Ok(())
    });
}

/// Resident memory of this process in MiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kibibytes.unwrap_or_default() / 1024
}

/// The stage alone, since this is about its own memory: a thousand connections would be the real server's business.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_never_reads_makes_nothing_grow_and_is_told_in_the_end_what_it_has_missed()
-> anyhow::Result<()> {
    const CHANGES: usize = 1500;
    let server = ApiServer::new(Arc::new(Source::system()));
    let shutdown = CancellationToken::new();
    let _end = shutdown.clone().drop_guard();
    let address = server.listen(shutdown).await?;
    let mut slow = Vec::new();
    for _ in 0..20 {
        let mut connection = TcpStream::connect(address).await?;
        let request = "GET /api/v1/namespaces/default/configmaps?watch=true HTTP/1.1\r\nhost: stage\r\n\r\n";
        connection.write_all(request.as_bytes()).await?;
        // So that it is watching before anything changes.
        let mut head = [0; 15];
        connection.read_exact(&mut head).await?;
        assert_eq!(&head, b"HTTP/1.1 200 OK");
        slow.push(connection);
    }
    let client = server.client();
    let text = "x".repeat(200 << 10);
    let before = resident();
    for number in 0..CHANGES {
        let map =
            json!({ "metadata": { "name": "a" }, "data": { "number": number.to_string(), "text": text } });
        let (method, path) = match number {
            0 => ("POST", "/api/v1/namespaces/default/configmaps"),
            _ => ("PUT", "/api/v1/namespaces/default/configmaps/a"),
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", "application/json");
        let answer = client
            .send(request.body(Body::from(map.to_string().into_bytes()))?)
            .await?;
        assert!(answer.status().is_success(), "{}", answer.status());
    }
    let grown = resident().saturating_sub(before);
    println!("{CHANGES} changes of 200 KiB each with 20 watchers that do not read: {grown} MiB more");
    assert!(
        grown < 150,
        "{grown} MiB more, of {} MiB that were written",
        CHANGES * 200 / 1024
    );

    // What it reads at last is whole lines, and the last one says that it has missed something.
    let mut slow = slow.remove(0);
    let mut all = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    let end = b"\"type\":\"ERROR\"";
    while !all
        .windows(end.len())
        .rev()
        .take(2048)
        .any(|window| window == end)
    {
        let read = tokio::time::timeout(Duration::from_secs(30), slow.read(&mut buffer)).await??;
        anyhow::ensure!(read > 0, "it ends without a word");
        all.extend_from_slice(&buffer[..read]);
    }
    let last = String::from_utf8_lossy(&all[all.len().saturating_sub(1024)..]).into_owned();
    assert!(
        last.contains("\"code\":410") && last.contains("too old resource version"),
        "{last}"
    );
    Ok(())
}
