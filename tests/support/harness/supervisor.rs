//! The connection to the supervisor of one cluster: requests and answers, one JSON object per line.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, anyhow, bail};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

/// The supervisor's first line, once the cluster is ready (`Cluster` in `tests/cluster/protocol`).
#[derive(Debug, Deserialize)]
pub struct Description {
    pub version: String,
    pub directory: PathBuf,
    pub server: String,
    pub kubeconfig: PathBuf,
    pub kubectl: PathBuf,
    pub audit: PathBuf,
    pub logs: BTreeMap<String, PathBuf>,
    pub nodes: Vec<NodeDescription>,
}

#[derive(Debug, Deserialize)]
pub struct NodeDescription {
    pub name: String,
    pub init: u32,
    pub gateway: String,
    pub link: String,
    pub ctr: PathBuf,
}

#[derive(Debug, Default, Serialize)]
pub struct Request {
    pub r#do: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

#[derive(Serialize)]
struct Numbered<'a> {
    id: u64,
    #[serde(flatten)]
    request: &'a Request,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Answer {
    id: u64,
    error: String,
    pub path: PathBuf,
    pub pid: u32,
}

/// A running supervisor. Dropping it stops the cluster and waits until nothing is left.
#[derive(Debug)]
pub struct Supervisor {
    child: Child,
    input: Option<Mutex<(u64, ChildStdin)>>,
    waiting: Arc<Mutex<Waiting>>,
    readers: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Waiting {
    ready: Option<oneshot::Sender<Description>>,
    answers: HashMap<u64, oneshot::Sender<Answer>>,
    closed: bool,
    /// The last lines of standard error, for error messages.
    last_lines: VecDeque<String>,
}

impl Supervisor {
    /// Starts a supervisor and waits until its cluster is ready.
    pub async fn start(mut command: Command) -> anyhow::Result<(Self, Description)> {
        // In its own process group, so that Ctrl-C in the terminal ends only the test, whose end then stops the cluster.
        command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .with_context(|| format!("starting {}", command.get_program().display()))?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = pipes else {
            bail!("a pipe is missing")
        };
        let (ready, described) = oneshot::channel();
        let waiting = Arc::new(Mutex::new(Waiting {
            ready: Some(ready),
            ..Waiting::default()
        }));
        // Threads, not tasks: a cluster may outlive the runtime of the test that started it.
        let (for_stderr, for_stdout) = (Arc::clone(&waiting), Arc::clone(&waiting));
        let readers = vec![
            std::thread::spawn(move || read_errors(BufReader::new(stderr), &for_stderr)),
            std::thread::spawn(move || read_answers(BufReader::new(stdout), &for_stdout)),
        ];
        let mut supervisor = Self {
            child,
            input: Some(Mutex::new((0, stdin))),
            waiting,
            readers,
        };
        if let Ok(description) = described.await {
            Ok((supervisor, description))
        } else {
            supervisor.end();
            bail!("{}", supervisor.last_lines().trim_start_matches("cluster: "))
        }
    }

    /// Sends a request and waits for its answer.
    pub async fn ask(&self, request: Request) -> anyhow::Result<Answer> {
        let (sender, answer) = oneshot::channel();
        let what = format!(
            "{} {}",
            request.r#do,
            request.process.as_deref().unwrap_or_default()
        );
        {
            let input = self.input.as_ref().context("the cluster has ended")?;
            let mut input = lock(input);
            input.0 += 1;
            let numbered = Numbered {
                id: input.0,
                request: &request,
            };
            {
                let mut waiting = lock(&self.waiting);
                if waiting.closed {
                    bail!("the cluster has ended");
                }
                waiting.answers.insert(numbered.id, sender);
            }
            let mut line = serde_json::to_vec(&numbered)?;
            line.push(b'\n');
            input
                .1
                .write_all(&line)
                .context("the supervisor of the cluster has ended")?;
        }
        let answer = answer
            .await
            .map_err(|_| anyhow!("the cluster ended meanwhile: {}", self.last_lines()))?;
        if !answer.error.is_empty() {
            bail!("{what}: {}", answer.error);
        }
        Ok(answer)
    }

    /// The process id of the supervisor.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Stops the cluster and waits until it is gone.
    pub fn end(&mut self) {
        drop(self.input.take());
        if let Err(error) = self.child.wait() {
            eprintln!("waiting for the end of a cluster: {error}");
        }
        for reader in self.readers.drain(..) {
            // A panic of the reader was already printed.
            let _ = reader.join();
        }
    }

    fn last_lines(&self) -> String {
        lock(&self.waiting)
            .last_lines
            .iter()
            .cloned()
            .collect::<Vec<_>>()
            .join("\n")
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.end();
    }
}

fn read_answers(lines: impl BufRead, waiting: &Mutex<Waiting>) {
    for line in lines.lines().map_while(Result::ok) {
        let ready = lock(waiting).ready.take();
        let understood = if let Some(ready) = ready {
            serde_json::from_str(&line).map(|description| ready.send(description).is_ok())
        } else {
            serde_json::from_str::<Answer>(&line).map(|answer| {
                let asked = lock(waiting).answers.remove(&answer.id);
                asked.is_some_and(|asked| asked.send(answer).is_ok())
            })
        };
        if let Err(error) = understood {
            eprintln!("the supervisor of a cluster printed {line:?}: {error}");
        }
    }
    // Waiting callers learn from the closed channels that there will be no answer.
    let mut waiting = lock(waiting);
    waiting.closed = true;
    waiting.ready = None;
    waiting.answers.clear();
}

/// Prints the supervisor's progress messages, because builds take minutes.
fn read_errors(lines: impl BufRead, waiting: &Mutex<Waiting>) {
    for line in lines.lines().map_while(Result::ok) {
        if line.starts_with("building ")
            || line.starts_with("installing ")
            || line.starts_with("another process ")
        {
            eprintln!("{line}");
        }
        let last_lines = &mut lock(waiting).last_lines;
        last_lines.push_back(line);
        if last_lines.len() > 60 {
            last_lines.pop_front();
        }
    }
}

/// Ignores poisoning: the connection is needed to stop the cluster.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
