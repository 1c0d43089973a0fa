//! Metrics and probes of the program while connections send unfinished requests.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit, setrlimit};

use crate::cli::program::{RunningProgram, TIMEOUT, companion, drayman, silent_server};

/// Number of connections.
const CONNECTIONS: usize = 1_000;
/// Bytes of the unfinished header of each connection.
const HEADER: usize = 380 * 1024;
/// Maximum growth of memory in kB: two addresses with 64 connections each, in a debug build.
const GROWTH_MAX: u64 = 3 * 1024;
/// Maximum latency of a probe on a loaded machine. A silent endpoint fails the test by the timeout of the read.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// A free address.
fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a port")
}

/// Sends a request. Returns the response and its latency.
fn get(address: SocketAddr, path: &str) -> std::io::Result<(String, Duration)> {
    let start = Instant::now();
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok((answer, start.elapsed()))
}

/// Resident memory of a process in kB, without its code, of which each request may load more.
fn resident(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok())
        .expect("a number")
}

/// The number of open sockets of a process.
fn sockets(process: u32) -> usize {
    let all = std::fs::read_dir(format!("/proc/{process}/fd")).expect("it runs");
    all.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter(|target| target.as_os_str().as_encoded_bytes().starts_with(b"socket:"))
        .count()
}

/// Sends an unfinished header until the program stops reading.
fn unfinished(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("connected");
    stream.set_nonblocking(true).expect("a socket");
    let header = format!("GET /metrics HTTP/1.1\r\nx: {}", "a".repeat(HEADER));
    let mut rest = header.as_bytes();
    while !rest.is_empty() {
        match stream.write(rest) {
            Ok(sent) => rest = &rest[sent..],
            // The program does not read, or has closed the connection.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
                ) =>
            {
                break;
            }
            Err(error) => panic!("{error}"),
        }
    }
    stream
}

#[test]
fn unfinished_requests_neither_block_others_nor_fill_memory() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).expect("more files");

    let directory = tempfile::tempdir().expect("a directory");
    let (_server, url) = silent_server();
    let (metrics, probes) = (free_address(), free_address());
    // The companion listens on every address of its node with 64 MiB of memory; the controller uses the same server.
    let kinds = "\n- {name: a, paths: [/dev/drayman-none-*]}";
    let mut program = RunningProgram::start(
        drayman()
            .args(companion(directory.path(), &url, kinds))
            .args(["--driver-name", "test.example"])
            .arg(format!("--metrics-bind-address={metrics}"))
            .arg(format!("--health-probe-bind-address={probes}")),
    );
    program.line("drayman node starts");
    let deadline = Instant::now() + TIMEOUT;
    while get(probes, "/livez").is_err() {
        assert!(Instant::now() < deadline, "no response: {:#?}", program.seen);
        std::thread::yield_now();
    }
    // Excludes memory that the first response allocates once.
    get(metrics, "/metrics").expect("an answer");
    let process = program.child.id();
    let (memory, open) = (resident(process), sockets(process));

    let mut connections = Vec::new();
    let mut longest = Duration::ZERO;
    let mut check = || {
        for (address, path) in [(probes, "/livez"), (metrics, "/metrics")] {
            let (answer, time) = get(address, path).expect(path);
            assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
            assert!(time < ANSWER_MAX, "{path} answered after {time:?}");
            longest = longest.max(time);
        }
    };
    for number in 0..CONNECTIONS {
        connections.push(unfinished(if number % 2 == 0 { metrics } else { probes }));
        if number % 100 == 0 {
            check();
        }
    }
    check();
    // Connections with short headers stay until the limit evicts them.
    for _ in 0..CONNECTIONS {
        let mut stream = TcpStream::connect(metrics).expect("connected");
        stream.write_all(b"GET /metrics HTTP/1.1\r\nx: ").expect("sent");
        connections.push(stream);
    }
    check();
    let growth = resident(process).saturating_sub(memory);
    let more = sockets(process).saturating_sub(open);
    println!(
        "{CONNECTIONS} connections with {HEADER} bytes of unfinished header and {CONNECTIONS} with 26: {growth} kB more memory, {more} more \
         sockets, longest answer {longest:?}"
    );
    assert!(growth <= GROWTH_MAX, "{growth} kB more memory");
    assert!(more <= 2 * 64, "{more} more sockets");
}
