use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::Duration;

use drayman::api::proto::MAX_REQUEST;
use drayman::api::proto::dra_v1alpha3::node_client::NodeClient;
use drayman::api::proto::dra_v1alpha3::{Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use drayman::node::kubelet::transport::MAX_CONNECTIONS;
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::Instant;

use crate::grpc::fixture::{DraEndpoint, RawClient, channel, soon};
use crate::not_run::is_root;

const PREPARE: &str = "/v1alpha3.Node/NodePrepareResources";

fn claim(uid: impl Into<String>) -> Claim {
    Claim {
        uid: uid.into(),
        ..Claim::default()
    }
}

fn claims(claims: Vec<Claim>) -> NodePrepareResourcesRequest {
    NodePrepareResourcesRequest { claims }
}

/// A request that is never answered.
fn slow(uid: &str) -> Vec<u8> {
    let claim = Claim {
        name: "slow".into(),
        ..claim(uid)
    };
    claims(vec![claim]).encode_to_vec()
}

/// Checks that the endpoint serves a new connection.
async fn assert_alive(dra: &DraEndpoint) {
    let mut client = NodeClient::new(channel(&dra.service()).await);
    let answer = soon(client.node_prepare_resources(claims(vec![claim("alive")])))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.claims.len(), 1);
}

/// A value of `/proc/self/status` in KiB.
fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Whether this process runs only the test of this name; otherwise runs it in a separate process. Memory is measured per process, and other
/// tests allocate too.
async fn is_alone(name: &str) -> bool {
    const ALONE: &str = "DRAYMAN_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut command = tokio::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(ALONE, "1");
    let output = command.output().await.unwrap();
    let (text, errors) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    print!("{text}");
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{errors}"
    );
    false
}

#[tokio::test]
async fn an_invalid_message_is_refused_and_the_connection_lives() {
    let dra = DraEndpoint::open().await;
    let mut client = RawClient::connect(&dra.service()).await;
    let list = |list: Vec<Claim>| claims(list).encode_to_vec();
    for (body, status, text) in [
        (list(vec![claim("")]), "3", "has no uid"),
        (
            list(vec![claim("u"), claim("v"), claim("u")]),
            "3",
            "is listed twice",
        ),
        (
            list(vec![claim("u".repeat(20_000)), claim("u".repeat(20_000))]),
            "3",
            "uuu%22... is listed twice",
        ),
        (b"\x0a\x02\x12\xff".to_vec(), "13", ""),
        (b"\x0a\x03\x12\x01\xff".to_vec(), "13", ""),
        (vec![0xff; 1000], "13", ""),
    ] {
        let answer = client.call("localhost", PREPARE, &body).await;
        assert_eq!(answer.status, status, "{answer:?}");
        assert!(answer.message.replace("%20", " ").contains(text), "{answer:?}");
        assert!(dra.companion.calls().is_empty(), "no call reaches the companion");
    }
    // The companion rejects such a UID; the endpoint returns it unchanged.
    let answer = client
        .call("localhost", PREPARE, &list(vec![claim("../../etc")]))
        .await;
    assert_eq!(
        answer.body,
        b"\x0a\x1c\x0a\x09../../etc\x12\x0f\x0a\x0dv/c=../../etc"
    );
    dra.close().await;
}

#[tokio::test]
async fn more_claims_than_the_limit_are_unprepared_only() {
    let dra = DraEndpoint::open().await;
    let mut client = NodeClient::new(channel(&dra.service()).await);
    let most = (0..1024).map(|index| claim(index.to_string()));
    let one_more = most.clone().chain([claim("u")]).collect();
    let error = client.node_prepare_resources(claims(one_more)).await.unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (
            tonic::Code::InvalidArgument,
            "1025 claims in one call, at most 1024 are allowed"
        )
    );
    assert!(dra.companion.calls().is_empty(), "no call reaches the companion");
    let answer = soon(client.node_prepare_resources(claims(most.collect())))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.claims.len(), 1024);
    // Kubelet also calls it after a Prepare that was refused, and does not end the pod before it succeeds.
    let all = (0..1025).map(|index| claim(index.to_string())).collect();
    let request = NodeUnprepareResourcesRequest { claims: all };
    let answer = soon(client.node_unprepare_resources(request)).await.unwrap();
    assert_eq!(answer.into_inner().claims.len(), 1025);
    dra.close().await;
}

#[tokio::test]
async fn decoding_the_worst_request_costs_less_than_32_mib() {
    if !is_alone("grpc::hostile::decoding_the_worst_request_costs_less_than_32_mib").await {
        return;
    }
    let dra = DraEndpoint::open().await;
    let mut client = RawClient::connect(&dra.service()).await;
    assert_eq!(client.call("localhost", PREPARE, &[]).await.status, "0");
    // Empty elements take two bytes each, and up to 104 bytes in memory.
    let worst = b"\x0a\x00".repeat(MAX_REQUEST / 2);
    let before = memory("VmHWM:");
    let answer = client.call("localhost", PREPARE, &worst).await;
    let cost = memory("VmHWM:").saturating_sub(before);
    println!("{cost} KiB for a request of {} bytes", worst.len());
    assert_eq!(answer.status, "3", "{answer:?}");
    assert!(cost < 32 * 1024, "{cost} KiB");
    dra.close().await;
}

#[tokio::test]
async fn a_message_above_the_limit_is_refused_by_its_length() {
    let dra = DraEndpoint::open().await;
    let mut client = NodeClient::new(channel(&dra.service()).await);
    let mut large = claim("u");
    large.resource_handle = "x".repeat(MAX_REQUEST);
    let error = soon(client.node_prepare_resources(claims(vec![large])))
        .await
        .unwrap_err();
    assert_eq!(error.code(), tonic::Code::OutOfRange, "{error}");
    assert_alive(&dra).await;
    dra.close().await;
}

#[tokio::test]
async fn a_connection_that_breaks_the_protocol_ends_alone() {
    let dra = DraEndpoint::open().await;
    let mut other = RawClient::connect(&dra.service()).await;
    let interrupted: &[(u8, u8, u32, &[u8])] = &[(1, 0, 1, &[]), (0, 0, 1, b"x")];
    let table = [&[0x40, 1, b'x', 0x7f, 0xa1, 0x1e][..], &[b'v'; 4000]].concat();
    let bomb: &[(u8, u8, u32, &[u8])] = &[(1, 4, 1, &table), (1, 4, 3, &[0xbe; 16_000])];
    let huge = vec![0; 16_385];
    let oversized: &[(u8, u8, u32, &[u8])] = &[(0, 0, 1, &huge)];
    let padding: &[(u8, u8, u32, &[u8])] = &[(1, 0x0c, 1, &[200, 0x82])];
    let nonsense: &[(u8, u8, u32, &[u8])] = &[(1, 4, 1, &[0x80])];
    for frames in [interrupted, bomb, oversized, padding, nonsense] {
        let mut client = RawClient::connect(&dra.service()).await;
        for (kind, flags, stream, payload) in frames {
            client.frame(*kind, *flags, *stream, payload).await;
        }
        client.begin("localhost", PREPARE, &[]).await;
        assert_eq!(soon(client.answer()).await, None);
    }
    let mut stream = UnixStream::connect(dra.service()).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    soon(async { while !matches!(stream.read(&mut [0; 100]).await, Ok(0) | Err(_)) {} }).await;
    assert_eq!(other.call("localhost", PREPARE, &[]).await.status, "0");
    dra.close().await;
}

/// A connection after one call.
async fn one_call(dra: &DraEndpoint) -> UnixStream {
    let mut client = RawClient::connect(&dra.service()).await;
    assert_eq!(client.call("localhost", PREPARE, &[]).await.status, "0");
    client.into_connection()
}

/// Whether a ping is answered.
async fn is_served(client: &mut UnixStream) -> bool {
    const PING: [u8; 17] = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    if client.write_all(&PING).await.is_err() {
        return false;
    }
    loop {
        let mut head = [0; 9];
        if client.read_exact(&mut head).await.is_err() {
            return false;
        }
        let mut payload = vec![0; usize::from(head[2]) | usize::from(head[1]) << 8];
        if client.read_exact(&mut payload).await.is_err() {
            return false;
        }
        if (head[3], head[4]) == (6, 1) {
            return true;
        }
    }
}

/// Waits until the server closes the connection.
async fn is_closed(mut client: UnixStream) -> bool {
    soon(async { while !matches!(client.read(&mut [0; 100]).await, Ok(0) | Err(_)) {} }).await;
    true
}

#[tokio::test]
async fn connections_above_the_limit_are_closed_at_once() {
    if !is_alone("grpc::hostile::connections_above_the_limit_are_closed_at_once").await {
        return;
    }
    let dra = DraEndpoint::open().await;
    // A long call, such as ListAndWatch.
    let mut waiting = RawClient::connect(&dra.service()).await;
    waiting.begin("localhost", PREPARE, &slow("u")).await;
    while dra.companion.calls().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // The first connection is excluded: it allocates memory once per process.
    let mut clients = vec![one_call(&dra).await];
    let before = memory("VmRSS:");
    for _ in 2..MAX_CONNECTIONS {
        clients.push(one_call(&dra).await);
    }
    let mut further = Vec::new();
    for _ in 0..1000 {
        further.push(UnixStream::connect(dra.service()).await.unwrap());
    }
    for client in further {
        assert!(is_closed(client).await);
    }
    // The memory of this process, including the clients.
    let cost = memory("VmRSS:").saturating_sub(before);
    println!("{cost} KiB for {MAX_CONNECTIONS} connections and a thousand refused ones");
    assert!(cost < 4 * 1024, "{cost} KiB");
    for client in &mut clients {
        assert!(soon(is_served(client)).await, "earlier connections stay open");
    }
    assert!(
        tokio::time::timeout(Duration::from_millis(50), waiting.answer())
            .await
            .is_err()
    );
    // A closed connection frees its slot.
    drop(clients.pop());
    soon(async {
        loop {
            let mut client = RawClient::connect(&dra.service()).await;
            client.begin("localhost", PREPARE, &[]).await;
            if client.answer().await.is_some() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    drop(clients);
    drop(waiting);
    dra.close().await;
}

#[tokio::test]
async fn silent_connections_are_closed_within_10_s() {
    let dra = DraEndpoint::open().await;
    let mut silent = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        silent.push(UnixStream::connect(dra.service()).await.unwrap());
    }
    assert!(is_closed(UnixStream::connect(dra.service()).await.unwrap()).await);
    let start = Instant::now();
    for client in silent {
        assert!(is_closed(client).await);
    }
    // The rest is a margin for slow machines.
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    assert_alive(&dra).await;
    dra.close().await;
}

#[tokio::test(start_paused = true)]
async fn only_a_client_that_answers_pings_is_kept() {
    let dra = DraEndpoint::open().await;
    let mut kept = NodeClient::new(channel(&dra.service()).await);
    kept.node_prepare_resources(claims(Vec::new())).await.unwrap();
    let mut silent = one_call(&dra).await;
    let start = Instant::now();
    while !matches!(silent.read(&mut [0; 100]).await, Ok(0) | Err(_)) {}
    let elapsed = start.elapsed().as_secs();
    assert!((300..=365).contains(&elapsed), "{elapsed} s");
    tokio::time::sleep(Duration::from_secs(3600)).await;
    kept.node_prepare_resources(claims(Vec::new())).await.unwrap();
    dra.close().await;
}

#[tokio::test]
async fn a_connection_has_a_limit_of_calls_at_a_time() {
    let dra = DraEndpoint::open().await;
    let mut client = RawClient::connect(&dra.service()).await;
    for number in 0..=100 {
        client
            .begin("localhost", PREPARE, &slow(&number.to_string()))
            .await;
    }
    // RST_STREAM code 7 is REFUSED_STREAM.
    assert_eq!(soon(client.answer()).await.unwrap().status, "RST_STREAM 7");
    assert_alive(&dra).await;
    drop(client);
    dra.close().await;
}

#[tokio::test]
async fn sockets_are_for_their_owner_alone() {
    let dra = DraEndpoint::open().await;
    for socket in [dra.service(), dra.registration()] {
        assert_eq!(
            std::fs::metadata(socket).unwrap().permissions().mode() & 0o777,
            0o600
        );
    }
    dra.close().await;
}

/// Variable of the process that connects as another user.
const AS_OTHER_USER: &str = "DRAYMAN_TEST_CONNECT_AS_OTHER_USER";

#[test]
fn the_connection_of_another_user() {
    let Ok(socket) = std::env::var(AS_OTHER_USER) else {
        return;
    };
    let mut stream = std::os::unix::net::UnixStream::connect(socket).expect("the mode allows all users");
    let _ = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    match stream.read(&mut [0; 1]) {
        Ok(0) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        other => panic!("the server answered: {other:?}"),
    }
}

#[tokio::test]
async fn another_user_is_refused_even_if_the_mode_permits_access() {
    if !is_root() {
        return;
    }
    let dra = DraEndpoint::open().await;
    let open_to_all =
        |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    open_to_all(dra.directory.path(), 0o777);
    open_to_all(&dra.directory.path().join("plugins"), 0o777);
    open_to_all(dra.service().parent().unwrap(), 0o777);
    open_to_all(&dra.service(), 0o777);
    let program = dra.directory.path().join("program");
    // Copied by another process: a file that this one, or a forked child, has open for writing cannot be executed.
    let mut copy = std::process::Command::new("cp");
    let copied = copy.arg(std::env::current_exe().unwrap()).arg(&program).status();
    assert!(copied.unwrap().success());
    open_to_all(&program, 0o755);
    let mut command = std::process::Command::new(&program);
    command
        .args(["--exact", "grpc::hostile::the_connection_of_another_user"])
        .env(AS_OTHER_USER, dra.service());
    command.current_dir("/").uid(65534).gid(65534);
    let mut command = tokio::process::Command::from(command);
    let output = soon(command.output()).await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    assert_alive(&dra).await;
    dra.close().await;
}
