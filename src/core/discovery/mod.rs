//! Which of the things that a machine has are devices, what identifies them, and how they are.
//!
//! Everything here is a function of facts that a shell has read from `/dev`, `/sys` and `/proc`: whether something matches what the
//! operator described, what name it has whatever the kernel numbers it this time, and why it is not taken.

pub mod attributes;
pub mod events;
pub mod group;
pub mod health;
pub mod mounts;
pub mod pci;
pub mod uevent;
pub mod usb;
