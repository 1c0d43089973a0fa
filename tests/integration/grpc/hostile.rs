use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::Duration;

use drayman::api::proto::ClaimList;
use drayman::api::proto::bounded::Bounded;
use drayman::api::proto::dra_v1alpha3::node_client::NodeClient;
use drayman::api::proto::dra_v1alpha3::{Claim, NodePrepareResourcesResponse};
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::grpc::fixture::{DraDoor, RawClient, channel, soon};
use crate::not_run::is_root;

const PREPARE: &str = "/v1alpha3.Node/NodePrepareResources";

fn claim(uid: impl Into<String>) -> Claim {
    Claim {
        uid: uid.into(),
        ..Claim::default()
    }
}

/// The door still serves, on a connection of its own.
async fn assert_alive(door: &DraDoor) {
    let mut client = NodeClient::new(channel(&door.service()).await);
    let list = ClaimList::new(vec![claim("alive")]);
    let answer = soon(client.node_prepare_resources(list))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.claims.len(), 1);
}

/// Resident memory of this process in KiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_message_that_is_no_sane_request_is_refused_and_the_connection_lives() {
    let door = DraDoor::open().await;
    let mut client = RawClient::connect(&door.service()).await;
    let list = |claims: Vec<Claim>| ClaimList::new(claims).encode_to_vec();
    for (body, status, text) in [
        (list(vec![claim("")]), "3", "has no uid"),
        (list(vec![claim("u"), claim("v"), claim("u")]), "3", "comes twice"),
        (
            list(vec![claim("u".repeat(20_000)), claim("u".repeat(20_000))]),
            "3",
            "uuu%22... comes twice",
        ),
        (b"\x0a\x02\x12\xff".to_vec(), "13", ""),
        (b"\x0a\x03\x12\x01\xff".to_vec(), "13", ""),
        (vec![0xff; 1000], "13", ""),
    ] {
        let answer = client.call("localhost", PREPARE, &body).await;
        assert_eq!(answer.status, status, "{answer:?}");
        assert!(answer.message.replace("%20", " ").contains(text), "{answer:?}");
        assert!(door.companion.calls().is_empty(), "nothing reaches the companion");
    }
    // A uid with dots is the companion's to refuse; here it must only come back as it was.
    let answer = client
        .call("localhost", PREPARE, &list(vec![claim("../../etc")]))
        .await;
    assert_eq!(
        answer.body,
        b"\x0a\x1c\x0a\x09../../etc\x12\x0f\x0a\x0dv/c=../../etc"
    );
    door.close().await;
}

#[tokio::test]
async fn claims_are_counted_before_they_take_memory() {
    let door = DraDoor::open().await;
    // Two bytes per claim on the wire: an empty string and an empty message are the same there.
    for count in [1025, 10_000, 2 * 1024 * 1024] {
        let mut client = tonic::client::Grpc::new(channel(&door.service()).await);
        client.ready().await.unwrap();
        let list = Bounded::<String, 0>::new(vec![String::new(); count]);
        let codec = tonic_prost::ProstCodec::<_, NodePrepareResourcesResponse>::default();
        let answer = client.unary(tonic::Request::new(list), PREPARE.parse().unwrap(), codec);
        let error = soon(answer).await.unwrap_err();
        assert_eq!(error.code(), tonic::Code::InvalidArgument);
        assert_eq!(
            error.message(),
            format!("{count} claims in one call, 1024 are possible")
        );
    }
    assert!(door.companion.calls().is_empty(), "nothing reaches the companion");
    let most = (0..1024).map(|index| claim(index.to_string())).collect();
    let mut client = NodeClient::new(channel(&door.service()).await);
    let answer = soon(client.node_prepare_resources(ClaimList::new(most)))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.claims.len(), 1024);
    door.close().await;
}

#[tokio::test]
async fn a_message_above_four_mebibytes_is_refused_by_its_length() {
    let door = DraDoor::open().await;
    let above = vec![0; 4 * 1024 * 1024 + 1];
    let mut client = NodeClient::new(channel(&door.service()).await);
    let mut large = claim("u");
    large.resource_handle = String::from_utf8(above).unwrap();
    let error = soon(client.node_prepare_resources(ClaimList::new(vec![large])))
        .await
        .unwrap_err();
    assert_eq!(error.code(), tonic::Code::OutOfRange, "{error}");
    assert_alive(&door).await;
    door.close().await;
}

#[tokio::test]
async fn a_connection_that_breaks_the_protocol_ends_alone() {
    let door = DraDoor::open().await;
    let mut bystander = RawClient::connect(&door.service()).await;
    let interrupted: &[(u8, u8, u32, &[u8])] = &[(1, 0, 1, &[]), (0, 0, 1, b"x")];
    let table = [&[0x40, 1, b'x', 0x7f, 0xa1, 0x1e][..], &[b'v'; 4000]].concat();
    let bomb: &[(u8, u8, u32, &[u8])] = &[(1, 4, 1, &table), (1, 4, 3, &[0xbe; 16_000])];
    let huge = vec![0; 16_385];
    let oversized: &[(u8, u8, u32, &[u8])] = &[(0, 0, 1, &huge)];
    let padding: &[(u8, u8, u32, &[u8])] = &[(1, 0x0c, 1, &[200, 0x82])];
    let nonsense: &[(u8, u8, u32, &[u8])] = &[(1, 4, 1, &[0x80])];
    for frames in [interrupted, bomb, oversized, padding, nonsense] {
        let mut client = RawClient::connect(&door.service()).await;
        for (kind, flags, stream, payload) in frames {
            client.frame(*kind, *flags, *stream, payload).await;
        }
        client.begin("localhost", PREPARE, &[]).await;
        assert_eq!(soon(client.answer()).await, None);
    }
    let mut stream = UnixStream::connect(door.service()).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    soon(async { while !matches!(stream.read(&mut [0; 100]).await, Ok(0) | Err(_)) {} }).await;
    assert_eq!(bystander.call("localhost", PREPARE, &[]).await.status, "0");
    door.close().await;
}

/// A connection on which one call was answered.
async fn one_call(door: &DraDoor) -> UnixStream {
    let mut client = RawClient::connect(&door.service()).await;
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

#[tokio::test]
async fn a_thousand_idle_connections_cost_little_and_keep_nobody_out() {
    // Memory is a process's, and the other tests of this one take some too.
    const ALONE: &str = "DRAYMAN_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = "grpc::hostile::a_thousand_idle_connections_cost_little_and_keep_nobody_out";
        let mut test = tokio::process::Command::new(std::env::current_exe().unwrap());
        test.args(["--exact", name, "--nocapture"]).env(ALONE, "1");
        let output = test.output().await.unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        print!("{said}");
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && said.contains("1 passed"),
            "{said}{complaint}"
        );
        return;
    }
    let door = DraDoor::open().await;
    // A call that takes long, as a ListAndWatch does: its connection is silent, and is not idle.
    let mut waiting = RawClient::connect(&door.service()).await;
    let slow = ClaimList::new(vec![Claim {
        uid: "u".into(),
        name: "slow".into(),
        ..Claim::default()
    }]);
    let begun = std::time::Instant::now();
    waiting.begin("localhost", PREPARE, &slow.encode_to_vec()).await;
    while door.companion.calls().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // The first is what one costs that the program has never had before: pages of code, and what the allocator sets aside.
    let mut clients = vec![one_call(&door).await];
    let before = resident();
    for _ in 0..1000 {
        clients.push(one_call(&door).await);
    }
    // Of this process, so the clients' own part is in it.
    let cost = resident().saturating_sub(before);
    println!("{cost} KiB for a thousand connections");
    assert!(cost < 8 * 1024, "{cost} KiB for a thousand connections");
    let mut alive = 0;
    for client in &mut clients {
        alive += usize::from(soon(is_served(client)).await);
    }
    assert_eq!(alive, 63, "as many as there are places, and the one that waits");
    match tokio::time::timeout(Duration::from_millis(50), waiting.answer()).await {
        Err(_) => {}
        // On a machine that is busy enough the call's own limit has come meanwhile.
        Ok(Some(answer)) => assert!(begun.elapsed() > Duration::from_secs(60), "{answer:?}"),
        Ok(None) => panic!("a connection with a call is left alone"),
    }
    assert_alive(&door).await;
    drop(clients);
    drop(waiting);
    door.close().await;
}

#[tokio::test]
async fn connections_above_the_limit_are_refused_while_each_of_the_others_has_a_call() {
    let door = DraDoor::open().await;
    let slow = ClaimList::new(vec![Claim {
        uid: "u".into(),
        name: "slow".into(),
        ..Claim::default()
    }])
    .encode_to_vec();
    let mut clients = Vec::new();
    for _ in 0..64 {
        let mut client = RawClient::connect(&door.service()).await;
        client.begin("localhost", PREPARE, &slow).await;
        clients.push(client);
    }
    let mut calls = 0;
    soon(async {
        while calls < 64 {
            calls += door.companion.calls().len();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let mut refused = UnixStream::connect(door.service()).await.unwrap();
    assert!(matches!(soon(refused.read(&mut [0; 1])).await, Ok(0) | Err(_)));
    // One that is given up makes room.
    drop(clients.pop());
    soon(async {
        loop {
            let mut client = RawClient::connect(&door.service()).await;
            client.begin("localhost", PREPARE, &[]).await;
            if client.answer().await.is_some() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    drop(clients);
    door.close().await;
}

#[tokio::test]
async fn a_connection_has_a_limit_of_calls_at_a_time() {
    let door = DraDoor::open().await;
    let mut client = RawClient::connect(&door.service()).await;
    let slow = |number: usize| {
        ClaimList::new(vec![Claim {
            uid: number.to_string(),
            name: "slow".into(),
            ..Claim::default()
        }])
        .encode_to_vec()
    };
    for number in 0..100 {
        client.begin("localhost", PREPARE, &slow(number)).await;
    }
    client.begin("localhost", PREPARE, &slow(100)).await;
    // 7: REFUSED_STREAM.
    assert_eq!(soon(client.answer()).await.unwrap().status, "RST_STREAM 7");
    assert_alive(&door).await;
    drop(client);
    door.close().await;
}

#[tokio::test]
async fn sockets_are_for_their_owner_alone() {
    let door = DraDoor::open().await;
    for socket in [door.service(), door.registration()] {
        assert_eq!(
            std::fs::metadata(socket).unwrap().permissions().mode() & 0o777,
            0o600
        );
    }
    door.close().await;
}

/// Set in the process that connects as another user.
const AS_STRANGER: &str = "DRAYMAN_TEST_CONNECT_AS_STRANGER";

#[test]
fn the_connection_of_a_stranger() {
    let Ok(socket) = std::env::var(AS_STRANGER) else {
        return;
    };
    let mut stream = std::os::unix::net::UnixStream::connect(socket).expect("the mode lets everybody in");
    let _ = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    match stream.read(&mut [0; 1]) {
        Ok(0) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        other => panic!("the server has answered: {other:?}"),
    }
}

#[tokio::test]
async fn another_user_is_refused_even_if_the_mode_would_let_him_in() {
    if !is_root() {
        return;
    }
    let door = DraDoor::open().await;
    let open_to_all =
        |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    open_to_all(door.directory.path(), 0o777);
    open_to_all(&door.directory.path().join("plugins"), 0o777);
    open_to_all(door.service().parent().unwrap(), 0o777);
    open_to_all(&door.service(), 0o777);
    let program = door.directory.path().join("program");
    // By another process: what this one has open for writing, even in a child that is not yet another program, cannot be run.
    let mut copy = std::process::Command::new("cp");
    let copied = copy.arg(std::env::current_exe().unwrap()).arg(&program).status();
    assert!(copied.unwrap().success());
    open_to_all(&program, 0o755);
    let mut command = std::process::Command::new(&program);
    command
        .args(["--exact", "grpc::hostile::the_connection_of_a_stranger"])
        .env(AS_STRANGER, door.service());
    command.current_dir("/").uid(65534).gid(65534);
    let mut command = tokio::process::Command::from(command);
    let output = soon(command.output()).await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    assert_alive(&door).await;
    door.close().await;
}
