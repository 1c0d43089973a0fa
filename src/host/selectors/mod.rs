//! Compiles and evaluates device selectors without risk for the process: on one separate thread with a large stack, within limits that
//! are checked beforehand, and with a deadline after which the thread is abandoned.

mod device;
mod guard;
mod program;

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::core::allocation::inventory::AttributeSet;
use crate::core::allocation::selectors::Match;
pub use device::{DeviceSelectors, with_selectors};
pub use program::{Compiled, Environment};

/// Stack size in bytes of the thread that parses and evaluates expressions. The limits on expressions keep their stack usage well
/// below it.
pub const STACK: usize = 16 << 20;
/// Maximum number of devices evaluated in one turn.
pub(crate) const CHUNK: usize = 256;
/// Time after which a turn starts no further device, so that others get theirs.
const TURN: Duration = Duration::from_millis(100);
/// Time limit of a turn, in case an evaluation does not end.
const DEADLINE: Duration = Duration::from_secs(5);
/// Number of compiled programs in the cache: a few for each claim that waits for its turn. The oldest is evicted.
const PROGRAMS_MAX: usize = 64;

/// Evaluates expressions against devices.
#[derive(Debug)]
pub(crate) struct Evaluator {
    driver: String,
    jobs: Mutex<Option<Sender<Job>>>,
}

struct Job {
    expression: Arc<str>,
    devices: Vec<AttributeSet>,
    reply: oneshot::Sender<Result<Results, String>>,
}

/// The result of an expression for each device.
pub(crate) type Results = Vec<(AttributeSet, Match)>;

/// Why an expression has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The expression is invalid: only its author can fix it.
    Wrong(String),
    /// There was no time or no thread for it, possibly because of other expressions: a retry may succeed.
    Unfinished(String),
}

impl Evaluator {
    /// Returns an evaluator for the devices of `driver`. The thread starts on first use.
    pub(crate) fn new(driver: &str) -> Self {
        Self {
            driver: driver.to_owned(),
            jobs: Mutex::new(None),
        }
    }

    /// Evaluates an expression against the first of at most [`CHUNK`] devices: as many as fit into a turn, and at least one if any.
    pub(crate) async fn evaluate(
        &self,
        expression: &Arc<str>,
        devices: Vec<AttributeSet>,
    ) -> Result<Results, Refusal> {
        self.evaluate_within(DEADLINE, expression, devices).await
    }

    async fn evaluate_within(
        &self,
        limit: Duration,
        expression: &Arc<str>,
        devices: Vec<AttributeSet>,
    ) -> Result<Results, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(Job {
            expression: Arc::clone(expression),
            devices,
            reply,
        })
        .map_err(Refusal::Unfinished)?;
        match tokio::time::timeout(limit, answer).await {
            Ok(Ok(evaluated)) => evaluated.map_err(Refusal::Wrong),
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
        // The thread ends when its sender is dropped, so it need not be joined.
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
    let environment = Environment::new(driver);
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
        let evaluate = |compiled: &Compiled| {
            let begun = Instant::now();
            let mut evaluated = Results::new();
            for attributes in job.devices {
                // If the caller is gone, the remaining evaluations are useless.
                if job.reply.is_closed() || (!evaluated.is_empty() && begun.elapsed() >= TURN) {
                    break;
                }
                let results = compiled.evaluate(&environment, &attributes);
                evaluated.push((attributes, results));
            }
            evaluated
        };
        let evaluated = compiled.as_ref().map(evaluate).map_err(String::clone);
        let _ = job.reply.send(evaluated);
    }
}

#[cfg(test)]
mod tests;
