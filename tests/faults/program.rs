//! A program in lives of its own: killed from one moment to the next, asked to end, and started again.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, Once, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use drayman::testcluster::faults::{Faults, Life};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// What the threads of programs are called.
const THREAD: &str = "program";
/// A program that ends by itself more often than that is in a crash loop.
const RESTARTS: usize = 20;
/// How long a program may take to end when it is asked to.
const END: Duration = Duration::from_secs(60);

/// A program, as it is started in each life.
pub(crate) type Start = Box<dyn Fn(Life) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>> + Send>;

static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Every panic of a program since the last look; the runtime hides them.
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

/// Runs a program until the shutdown, as often as it is killed, stopped or ends with an error. The answer is what was wrong with it.
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
                let life = faults.begin(name);
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .thread_name(THREAD)
                    .enable_all()
                    .build()
                    .unwrap();
                let end = runtime.block_on(one_life(&life, &shutdown, &start));
                life.bury();
                runtime.shutdown_timeout(Duration::from_secs(10));
                match end {
                    End::Killed => {}
                    End::Returned(Ok(())) if life.stop().is_cancelled() => {}
                    End::Returned(Ok(())) => wrong.push(format!("I15: {name} has ended by itself")),
                    End::Returned(Err(error)) => {
                        faults.note(&format!("{name} has ended: {error}"));
                        // Many lives at once can use up what the machine has of these for all users; that is no fault of the life.
                        let crowded = error.contains("max_user_instances");
                        restarts += usize::from(!crowded);
                        // As kubelet does, if sooner.
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

async fn one_life(life: &Life, shutdown: &CancellationToken, start: &Start) -> End {
    let mut running = start(life.clone());
    tokio::select! {
        biased;
        () = life.killed() => return End::Killed,
        result = &mut running => return End::Returned(result),
        () = shutdown.cancelled() => life.stop().cancel(),
        () = life.stop().cancelled() => {}
    }
    // Between SIGTERM and its end a program can be killed all the same.
    tokio::select! {
        biased;
        () = life.killed() => End::Killed,
        result = timeout(END, running) => result.map_or(End::TooLate, End::Returned),
    }
}

/// Waits until something holds.
pub(crate) async fn until(limit: Duration, holds: impl FnMut() -> bool) -> bool {
    until_seen(limit, Duration::from_millis(10), holds).await
}

/// The same with a look now and then.
pub(crate) async fn until_seen(limit: Duration, pause: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let waiting = async {
        while !holds() {
            sleep(pause).await;
        }
    };
    timeout(limit, waiting).await.is_ok()
}
