//! The selectors of devices, compiled and evaluated where they can do no harm: on one thread of its own with a large stack,
//! within limits that are checked beforehand, and a deadline after which the thread is left to itself.

mod guard;
mod program;

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::core::allocation::facts::{Facts, Match};
pub use program::{Compiled, Ground};

/// Stack of the thread on which expressions are read and evaluated, in bytes. The limits of what is read keep an expression well
/// below it.
pub const STACK: usize = 16 << 20;
/// Devices that are judged in one turn, at most.
pub(crate) const CHUNK: usize = 256;
/// After which time no other device is judged in the same turn: others wait for theirs.
const TURN: Duration = Duration::from_millis(100);
/// How long a turn may take with an evaluation that does not end.
const DEADLINE: Duration = Duration::from_secs(5);
/// Expressions that are kept compiled: a few for each claim that waits for its turn. One more takes the place of the oldest.
const PROGRAMS_MAX: usize = 64;

/// Judges devices by expressions.
#[derive(Debug)]
pub(crate) struct Evaluator {
    driver: String,
    jobs: Mutex<Option<Sender<Job>>>,
}

struct Job {
    expression: Arc<str>,
    devices: Vec<Facts>,
    reply: oneshot::Sender<Result<Judged, String>>,
}

/// What an expression says of each device.
pub(crate) type Judged = Vec<(Facts, Match)>;

/// Why an expression says nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Something is wrong with it: only its author can help.
    Wrong(String),
    /// There was no time or no thread for it, which may be the fault of others: it may work later.
    Unfinished(String),
}

impl Evaluator {
    /// For the devices of `driver`. The thread starts when it is needed.
    pub(crate) fn new(driver: &str) -> Self {
        Self {
            driver: driver.to_owned(),
            jobs: Mutex::new(None),
        }
    }

    /// Judges the first of at most [`CHUNK`] devices by an expression: as many as fit into a turn, and at least one if there is one.
    pub(crate) async fn judge(&self, expression: &Arc<str>, devices: Vec<Facts>) -> Result<Judged, Refusal> {
        self.judge_within(DEADLINE, expression, devices).await
    }

    async fn judge_within(
        &self,
        limit: Duration,
        expression: &Arc<str>,
        devices: Vec<Facts>,
    ) -> Result<Judged, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(Job {
            expression: Arc::clone(expression),
            devices,
            reply,
        })
        .map_err(Refusal::Unfinished)?;
        match tokio::time::timeout(limit, answer).await {
            Ok(Ok(judged)) => judged.map_err(Refusal::Wrong),
            Ok(Err(_)) => {
                self.forget_thread();
                Err(Refusal::Wrong("it cannot be evaluated".to_owned()))
            }
            Err(_) => {
                self.forget_thread();
                Err(Refusal::Unfinished(format!(
                    "its evaluation takes longer than {limit:?}: make it simpler; it is tried again now and then"
                )))
            }
        }
    }

    fn send(&self, job: Job) -> Result<(), String> {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let job = match jobs.as_ref() {
            Some(sender) => match sender.send(job) {
                Ok(()) => return Ok(()),
                Err(unsent) => unsent.0,
            },
            None => job,
        };
        let (sender, receiver) = mpsc::channel();
        let driver = self.driver.clone();
        let thread = std::thread::Builder::new()
            .name("selectors".to_owned())
            .stack_size(STACK);
        // The thread ends with its sender, so there is nothing to join.
        thread
            .spawn(move || run(&driver, &receiver))
            .map_err(|error| format!("no thread to evaluate it on: {error}"))?;
        let sent = sender.send(job).map_err(|_| "it cannot be evaluated".to_owned());
        *jobs = Some(sender);
        sent
    }

    fn forget_thread(&self) {
        *self.jobs.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

fn run(driver: &str, jobs: &Receiver<Job>) {
    let ground = Ground::new(driver);
    let mut programs: BTreeMap<Arc<str>, Result<Compiled, String>> = BTreeMap::new();
    let mut ages: VecDeque<Arc<str>> = VecDeque::new();
    while let Ok(job) = jobs.recv() {
        if !programs.contains_key(&job.expression) {
            ages.push_back(Arc::clone(&job.expression));
            if ages.len() > PROGRAMS_MAX
                && let Some(oldest) = ages.pop_front()
            {
                programs.remove(&oldest);
            }
        }
        let compile = || Compiled::new(&job.expression);
        let compiled = programs
            .entry(Arc::clone(&job.expression))
            .or_insert_with(compile);
        let judge = |compiled: &Compiled| {
            let begun = Instant::now();
            let mut judged = Judged::new();
            for facts in job.devices {
                // If nobody waits any more, what is left would be for nothing.
                if job.reply.is_closed() || (!judged.is_empty() && begun.elapsed() >= TURN) {
                    break;
                }
                let said = compiled.judge(&ground, &facts);
                judged.push((facts, said));
            }
            judged
        };
        let judged = compiled.as_ref().map(judge).map_err(String::clone);
        let _ = job.reply.send(judged);
    }
}

#[cfg(test)]
mod tests;
