//! The built-in driver, for all host devices that the companions publish. It is the runtime of [`crate::core::allocation`]: it watches,
//! locks and translates, and makes no decisions itself.

mod changes;
mod driver;
pub mod selectors;
mod state;
mod turns;
mod watch;

pub use driver::HostDriver;
