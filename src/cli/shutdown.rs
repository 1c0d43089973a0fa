//! SIGTERM and SIGINT: the first requests a clean shutdown, the second ends the process immediately.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use signal_hook::consts::{SIGINT, SIGTERM};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Exit code after an unclean end.
const UNCLEAN: i32 = 1;

/// Returns a token that the first SIGTERM or SIGINT cancels. Must be called within a runtime.
///
/// The second signal ends the process in the signal handler with exit code 1, which works even if the runtime hangs.
pub(super) fn on_signal() -> Result<CancellationToken, anyhow::Error> {
    let token = CancellationToken::new();
    let (mut terminate, mut interrupt) = register().context("cannot receive SIGTERM and SIGINT")?;
    let cancelled = token.clone();
    tokio::spawn(async move {
        let name = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        tracing::info!(
            signal = name,
            "stopping; a second signal ends the process at once"
        );
        cancelled.cancel();
    });
    Ok(token)
}

fn register() -> io::Result<(Signal, Signal)> {
    let asked_before = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // Order matters: the first handler checks the flag before the second sets it.
        signal_hook::flag::register_conditional_shutdown(signal, UNCLEAN, Arc::clone(&asked_before))?;
        signal_hook::flag::register(signal, Arc::clone(&asked_before))?;
    }
    Ok((signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?))
}
