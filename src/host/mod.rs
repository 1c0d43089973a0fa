//! The built-in driver, for all host devices that the companions publish. It is the runtime of [`crate::core::allocation`]: it watches,
//! locks and translates, and makes no decisions itself.

mod capacity_changes;
mod driver;
#[cfg(not(feature = "internals"))]
pub(crate) mod selectors;
#[cfg(feature = "internals")]
pub mod selectors;
mod watch;

pub use driver::HostDriver;
