//! The built-in driver: any host device that the nodes' companions publish as a claimable device. A shell over
//! [`crate::core::allocation`]: it watches, locks and translates, and decides nothing itself.

mod changes;
mod driver;
pub mod selectors;
mod state;
mod turns;
mod watch;

pub use driver::HostDriver;
