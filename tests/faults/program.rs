//! A program that is started, stopped, killed and restarted in its own thread.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::{Mutex, Once, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use drayman::testcluster::faults::{Faults, ProgramProcess};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Thread name of programs.
const THREAD: &str = "program";
/// Number of failures that counts as a crash loop.
const RESTARTS: usize = 20;
/// Limit for a graceful shutdown.
const END: Duration = Duration::from_secs(60);

/// Starts a program.
pub(crate) type Start =
    Box<dyn Fn(ProgramProcess) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>> + Send>;

static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Returns and clears the panics of programs, which the runtime hides.
pub(crate) fn panics() -> Vec<String> {
    std::mem::take(&mut PANICS.lock().unwrap_or_else(PoisonError::into_inner))
}

fn watch_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if std::thread::current().name() == Some(THREAD) {
                let mut panics = PANICS.lock().unwrap_or_else(PoisonError::into_inner);
                panics.push(panic.to_string());
            }
            usual(panic);
        }));
    });
}

enum End {
    Killed,
    Returned(Result<(), String>),
    TooLate,
}

/// Runs a program until the shutdown, and restarts it whenever it is killed, stopped or fails. Returns the violations.
pub(crate) fn run(
    faults: Faults,
    name: &'static str,
    shutdown: CancellationToken,
    start: Start,
) -> JoinHandle<Vec<String>> {
    watch_panics();
    std::thread::Builder::new()
        .name(THREAD.to_owned())
        .spawn(move || {
            let mut wrong = Vec::new();
            let mut restarts = 0;
            while !shutdown.is_cancelled() && restarts < RESTARTS {
                let process = faults.begin(name);
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .thread_name(THREAD)
                    .enable_all()
                    .build()
                    .unwrap();
                let run = AssertUnwindSafe(|| runtime.block_on(run_once(&process, &shutdown, &start)));
                let end = match catch_unwind(run) {
                    Ok(end) => end,
                    // A disk step in which the process is killed unwinds.
                    Err(_) if process.is_killed() => End::Killed,
                    Err(panic) => resume_unwind(panic),
                };
                process.mark_ended();
                runtime.shutdown_timeout(Duration::from_secs(10));
                match end {
                    End::Killed => {}
                    End::Returned(Ok(())) if process.stop().is_cancelled() => {}
                    End::Returned(Ok(())) => wrong.push(format!("I15: {name} has ended by itself")),
                    End::Returned(Err(error)) => {
                        faults.note(&format!("{name} has ended: {error}"));
                        // Many concurrent runs can exhaust this limit of the machine, which is not a fault of the program.
                        let crowded = error.contains("max_user_instances");
                        restarts += usize::from(!crowded);
                        // Kubelet restarts containers too, but later.
                        std::thread::sleep(Duration::from_millis(if crowded { 1000 } else { 100 }));
                    }
                    End::TooLate => wrong.push(format!("I15: {name} does not end when it is asked to")),
                }
            }
            if restarts == RESTARTS {
                wrong.push(format!("I15: {name} has ended {RESTARTS} times"));
            }
            wrong
        })
        .unwrap()
}

async fn run_once(process: &ProgramProcess, shutdown: &CancellationToken, start: &Start) -> End {
    let mut running = start(process.clone());
    tokio::select! {
        biased;
        () = process.killed() => return End::Killed,
        result = &mut running => return End::Returned(result),
        () = shutdown.cancelled() => process.stop().cancel(),
        () = process.stop().cancelled() => {}
    }
    // A program can be killed between SIGTERM and its exit.
    tokio::select! {
        biased;
        () = process.killed() => End::Killed,
        result = timeout(END, running) => result.map_or(End::TooLate, End::Returned),
    }
}

/// Waits until a condition holds.
pub(crate) async fn until(limit: Duration, holds: impl FnMut() -> bool) -> bool {
    until_seen(limit, Duration::from_millis(10), holds).await
}

/// As [`until`], with a poll interval.
pub(crate) async fn until_seen(limit: Duration, pause: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let waiting = async {
        while !holds() {
            sleep(pause).await;
        }
    };
    timeout(limit, waiting).await.is_ok()
}
