//! A real Prometheus and promtool.

use std::io::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Duration, Instant, sleep};

use crate::harness::{self, TIMEOUT};
use crate::setup::{Program, Setup};

/// A free port.
pub(crate) fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Runs promtool in a directory and returns its output.
pub(crate) fn promtool(directory: &Path, arguments: &[&str], input: Option<&str>) -> anyhow::Result<String> {
    let mut child = Command::new(harness::prometheus()?.join("promtool"))
        .args(arguments)
        .current_dir(directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("starting promtool")?;
    let mut stdin = child.stdin.take().context("its input")?;
    stdin.write_all(input.unwrap_or_default().as_bytes())?;
    drop(stdin);
    let output = child.wait_with_output()?;
    let message = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    ensure!(
        output.status.success(),
        "promtool {}: {}",
        arguments.join(" "),
        message.trim()
    );
    Ok(message)
}

/// The metrics of a program for a client without an Accept header.
pub(crate) async fn scrape(port: u16) -> anyhow::Result<String> {
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
    stream
        .write_all(b"GET /metrics HTTP/1.0\r\nhost: a\r\n\r\n")
        .await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let (head, text) = answer.split_once("\r\n\r\n").context("an answer")?;
    ensure!(head.contains("200 OK") && head.contains("text/plain"), "{head}");
    Ok(text.to_owned())
}

/// A Prometheus that scrapes every second.
#[derive(Debug)]
pub(crate) struct Prometheus {
    address: String,
    _program: Program,
}

impl Prometheus {
    /// Starts Prometheus for these pods and ports, with the labels that a ServiceMonitor would set.
    pub(crate) fn start(setup: &Setup, directory: &Path, pods: &[(&str, u16)]) -> anyhow::Result<Self> {
        Self::start_with(setup, directory, pods, "")
    }

    /// Starts Prometheus with further fields of the scrape job, as lines of YAML.
    pub(crate) fn start_with(
        setup: &Setup,
        directory: &Path,
        pods: &[(&str, u16)],
        more: &str,
    ) -> anyhow::Result<Self> {
        let port = free_port()?;
        let targets: Vec<String> = pods
            .iter()
            .map(|(pod, port)| {
                format!(
                    "  - targets: [\"127.0.0.1:{port}\"]\n    labels: {{namespace: drayman, pod: {pod}}}\n"
                )
            })
            .collect();
        let configuration = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [rules.json]\nscrape_configs:\n- job_name: drayman-node-metrics\n{more}  static_configs:\n{}",
            targets.concat()
        );
        let file = directory.join("prometheus.yaml");
        std::fs::write(&file, configuration)?;
        let mut command = setup.cluster.command(harness::prometheus()?.join("prometheus"));
        command
            .arg(format!("--config.file={}", file.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                directory.join("data").display()
            ))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"));
        Ok(Self {
            address: format!("http://127.0.0.1:{port}"),
            _program: setup.program("prometheus", command)?,
        })
    }

    /// The current series of a query; an error if there are none.
    pub(crate) fn ask(&self, query: &str) -> anyhow::Result<Vec<String>> {
        let message = promtool(Path::new("/"), &["query", "instant", &self.address, query], None)?;
        // promtool prints an empty line if there are none.
        let found = message.lines().filter(|line| !line.is_empty());
        Ok(found.map(str::to_owned).collect())
    }

    /// Waits until a query returns a series.
    pub(crate) async fn until(&self, query: &str) -> anyhow::Result<()> {
        let end = Instant::now() + TIMEOUT;
        loop {
            let found = self.ask(query);
            if found.as_ref().is_ok_and(|found| !found.is_empty()) {
                return Ok(());
            }
            if Instant::now() > end {
                let selector = query.split(" ==").next().unwrap_or(query);
                bail!("not seen: {query}; {found:?}, but {:?}", self.ask(selector));
            }
            sleep(Duration::from_millis(500)).await;
        }
    }
}
