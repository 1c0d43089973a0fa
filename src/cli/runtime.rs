//! The runtime of the program's components and commands.

use std::future::Future;

use super::error::Error;

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
