//! The program in its image, which contains no other file: DNS lookups and certificate checks work.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tokio::net::UdpSocket;

use crate::chart::lifecycle::pod;
use crate::chart::setup::ChartSetup;

/// The cluster IP of the API server.
const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// A name in the API server's certificate.
const NAME: &str = "kubernetes.default.svc";

/// A DNS reply with the API server's address if the query is for its name, and the queried name.
fn reply(query: &[u8]) -> Option<(Vec<u8>, String)> {
    let (mut at, mut labels) = (12, Vec::new());
    loop {
        let length = usize::from(*query.get(at)?);
        at += 1;
        if length == 0 {
            break;
        }
        labels.push(String::from_utf8_lossy(query.get(at..at + length)?).into_owned());
        at += length;
    }
    let name = labels.join(".");
    let question = query.get(12..at + 4)?;
    let is_address = query.get(at..at + 2)? == [0, 1];
    let found = name == NAME;
    let answers = u8::from(found && is_address);
    // An authoritative reply; code 3 is NXDOMAIN.
    let mut reply = [
        query.get(..2)?,
        &[
            0x85,
            if found { 0x80 } else { 0x83 },
            0,
            1,
            0,
            answers,
            0,
            0,
            0,
            0,
        ],
        question,
    ]
    .concat();
    if answers > 0 {
        // A pointer to the queried name, type A, class IN, TTL 5 s, length 4.
        reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4]);
        reply.extend(SERVICE.octets());
    }
    Some((reply, name))
}

/// A DNS server on an address of this machine that pods can reach, and the names queried so far.
async fn name_server(
    address: &str,
) -> anyhow::Result<(tokio::task::JoinHandle<()>, Arc<Mutex<BTreeSet<String>>>)> {
    let socket = UdpSocket::bind((address, 53))
        .await
        .with_context(|| format!("the port of a name server at {address}"))?;
    let asked = Arc::new(Mutex::new(BTreeSet::new()));
    let seen = Arc::clone(&asked);
    let task = tokio::spawn(async move {
        let mut query = [0; 512];
        while let Ok((length, from)) = socket.recv_from(&mut query).await {
            if let Some((reply, name)) = reply(&query[..length]) {
                seen.lock().unwrap_or_else(PoisonError::into_inner).insert(name);
                let _ = socket.send_to(&reply, from).await;
            }
        }
    });
    Ok((task, asked))
}

/// Runs `drayman crds --apply` in the image against the API server's DNS name. Returns the exit state and the log.
async fn run(
    setup: &ChartSetup,
    name: &str,
    server: &str,
    more: &[(&str, Value)],
) -> anyhow::Result<(String, String)> {
    let mut pod = pod(name, &[]);
    let spec = &mut pod["spec"];
    spec["restartPolicy"] = json!("Never");
    spec["automountServiceAccountToken"] = json!(true);
    spec["containers"][0] = json!({
        "name": "main", "image": crate::chart::image::NAME, "imagePullPolicy": "Never", "args": ["crds", "--apply"],
        "env": [{ "name": "KUBERNETES_SERVICE_HOST", "value": server }],
    });
    for (field, value) in more {
        spec[*field] = value.clone();
    }
    setup.apply(&pod).await?;
    setup
        .until("the pod has ended", async || {
            let phase = setup.field(&["pod", name], ".status.phase").await?;
            Ok(phase == "Succeeded" || phase == "Failed")
        })
        .await?;
    let phase = setup.field(&["pod", name], ".status.phase").await?;
    Ok((phase, setup.kubectl(&["logs", name]).await?))
}

#[tokio::test]
async fn the_image_resolves_the_name_of_the_api_server() -> anyhow::Result<()> {
    let setup = ChartSetup::start(1).await?;
    let binding = [
        "create",
        "clusterrolebinding",
        "all",
        "--clusterrole=cluster-admin",
        "--serviceaccount=default:default",
    ];
    setup.kubectl(&binding).await?;
    let served = "nodeinventories.drayman.dev is served\ndeviceclassparameters.drayman.dev is served\n\
                  deviceclaimparameters.drayman.dev is served\n";
    let went_well = ("Succeeded".to_owned(), served.to_owned());

    // A static program resolves names with its own part of the C library: first from the hosts file that kubelet writes, ...
    let aliases = ("hostAliases", json!([{ "ip": SERVICE, "hostnames": [NAME] }]));
    assert_eq!(run(&setup, "by-file", NAME, &[aliases]).await?, went_well);

    // ... then from a DNS server.
    let address = setup
        .field(&["endpoints", "kubernetes"], ".subsets[0].addresses[0].ip")
        .await?;
    let (answering, asked) = name_server(&address).await?;
    let servers = ("dnsConfig", json!({ "nameservers": [address] }));
    let none = ("dnsPolicy", json!("None"));
    let by_server = run(&setup, "by-server", NAME, &[none, servers]).await?;
    answering.abort();
    let asked = asked.lock().unwrap_or_else(PoisonError::into_inner).clone();
    assert_eq!(by_server, went_well, "the name server was asked for {asked:?}");
    ensure!(asked.contains(NAME), "{asked:?}");

    // The server must have a certificate for this name.
    let aliases = (
        "hostAliases",
        json!([{ "ip": SERVICE, "hostnames": ["other.example"] }]),
    );
    let (phase, message) = run(&setup, "by-another-name", "other.example", &[aliases]).await?;
    println!("{message}");
    assert_eq!(phase, "Failed");
    ensure!(
        message.contains("certificate") && message.contains("other.example"),
        "{message}"
    );
    setup.cluster.stop().await
}
