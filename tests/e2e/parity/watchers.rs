//! Many watchers, and one that does not read.

use std::time::Duration;

use drayman::testcluster::api::ApiServer;
use drayman::testcluster::clock_and_rng::ClockAndRng;
use futures::future::try_join_all;
use http::Request;
use kube::client::Body;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use crate::parity::server::{CLAIMS, JSON, both, version};

const WATCHERS: usize = 1000;

#[test]
fn a_thousand_watchers_receive_the_same_events() {
    both("crowd", async |server| {
        let claim =
            |name: &str| json!({ "metadata": { "name": name }, "spec": { "resourceClassName": "t" } });
        let since = version(&server.create(CLAIMS, &claim("a")).await?);
        let path = format!("{CLAIMS}?watch=true&resourceVersion={since}&timeoutSeconds=120");
        let clients = server.clients(WATCHERS).await?;
        let watching = try_join_all(
            clients
                .iter()
                .map(|client| server.read_events_by(client, &path, 3)),
        );
        let changing = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            for name in ["b", "c"] {
                server.send("POST", CLAIMS, JSON, &claim(name)).await?;
            }
            server.remove(&format!("{CLAIMS}/b")).await
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
        server.note(json!([first, same]));
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

/// Tells this program that it runs as the measured process.
const MEASURED: &str = "DRAYMAN_TEST_MEASURED";
/// Watchers that do not read.
const SLOW: usize = 20;
/// Existing objects of 200 KiB each: 30 MiB.
const OBJECTS: usize = 150;
/// Limit in MiB for the watchers and all changes: a history of 32 MiB, one object of 200 KiB in transit for each watcher, and temporary
/// memory.
const GROWTH_MAX: u64 = 80;

/// Only the test cluster, because this is about its memory, and in its own process, because other tests use memory too.
#[test]
fn a_client_that_never_reads_is_cut_off_and_costs_little() {
    if std::env::var_os(MEASURED).is_some() {
        crate::parity::server::run(slow_clients()).expect("slow clients");
        return;
    }
    let program = std::env::current_exe().expect("this program");
    let name = "parity::watchers::a_client_that_never_reads_is_cut_off_and_costs_little";
    let output = std::process::Command::new(program)
        .args(["--exact", name, "--nocapture"])
        .env(MEASURED, "1")
        .output()
        .expect("this program starts");
    let message = String::from_utf8_lossy(&output.stdout);
    println!("{message}");
    assert!(
        output.status.success() && message.contains("1 passed"),
        "{message}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

async fn slow_clients() -> anyhow::Result<()> {
    const CHANGES: usize = 1500;
    const MAPS: &str = "/api/v1/namespaces/default/configmaps";
    let server = ApiServer::new(Arc::new(ClockAndRng::system()));
    let shutdown = CancellationToken::new();
    let _end = shutdown.clone().drop_guard();
    let address = server.listen(shutdown).await?;
    let client = server.client();
    let text = "x".repeat(200 << 10);
    let write = async |method: &str, path: &str, name: &str, number: usize| {
        let map =
            json!({ "metadata": { "name": name }, "data": { "number": number.to_string(), "text": text } });
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", "application/json");
        let answer = client
            .send(request.body(Body::from(map.to_string().into_bytes()))?)
            .await?;
        anyhow::ensure!(answer.status().is_success(), "{}", answer.status());
        anyhow::Ok(())
    };
    for number in 0..OBJECTS {
        write("POST", MAPS, &format!("old-{number}"), number).await?;
    }
    write("POST", MAPS, "a", 0).await?;
    let before = resident();
    let mut slow = Vec::new();
    for _ in 0..SLOW {
        let mut connection = TcpStream::connect(address).await?;
        let request = format!("GET {MAPS}?watch=true HTTP/1.1\r\nhost: test\r\n\r\n");
        connection.write_all(request.as_bytes()).await?;
        // The watch must be open before the first change.
        let mut head = [0; 15];
        connection.read_exact(&mut head).await?;
        assert_eq!(&head, b"HTTP/1.1 200 OK");
        slow.push(connection);
    }
    let begun = resident().saturating_sub(before);
    for number in 1..CHANGES {
        write("PUT", &format!("{MAPS}/a"), "a", number).await?;
    }
    let grown = resident().saturating_sub(before);
    println!(
        "{SLOW} watchers that do not read, of {OBJECTS} objects of 200 KiB each: {begun} MiB more; after {CHANGES} changes: {grown} MiB more"
    );
    assert!(
        begun < GROWTH_MAX && grown < GROWTH_MAX,
        "{begun} and {grown} MiB more, of {} MiB that there were for all of them, and {} MiB that were written",
        SLOW * OBJECTS * 200 / 1024,
        CHANGES * 200 / 1024
    );

    // Finally, the client reads complete lines; the last one reports missed events.
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
        anyhow::ensure!(read > 0, "it ends without an error event");
        all.extend_from_slice(&buffer[..read]);
    }
    let last = String::from_utf8_lossy(&all[all.len().saturating_sub(1024)..]).into_owned();
    assert!(
        last.contains("\"code\":410") && last.contains("too old resource version"),
        "{last}"
    );
    Ok(())
}
