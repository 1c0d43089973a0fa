//! The runtime of the program's components and commands, and its end by SIGTERM and SIGINT: the first requests a clean
//! shutdown, the second ends the process immediately.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use signal_hook::consts::{SIGINT, SIGTERM};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::error::Error;

/// Exit code after an unclean end.
const UNCLEAN: i32 = 1;

/// Runs a component on a single-threaded runtime. Does not wait for tasks that outlive the component.
pub(super) fn block_on<T>(component: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| anyhow::Error::from(error).context("cannot start the runtime"))?;
    let result = runtime.block_on(component);
    runtime.shutdown_background();
    result
}

/// Installs the process-wide TLS provider, so that no dependency makes the choice ambiguous.
pub(super) fn choose_tls_provider() {
    // An error means that a provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Returns a token that the first SIGTERM or SIGINT cancels. Must be called within a runtime.
///
/// The second signal ends the process in the signal handler with exit code 1, which works even if the runtime hangs.
pub(super) fn shutdown_on_signal() -> Result<CancellationToken, anyhow::Error> {
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
