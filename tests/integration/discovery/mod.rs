//! What is found on machines of all sorts: trees of `/dev` and `/sys` that are built from listings of real hardware, and what
//! this machine itself can show.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

mod containers;
mod health;
mod host;
mod hotplug;
mod pci;
mod program;
mod usb;
