//! Discovery on test machines: `/dev` and `/sys` trees built from listings of real hardware, and the devices of this machine.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

mod containers;
mod health;
mod host;
mod hotplug;
mod pci;
mod program;
mod usb;
