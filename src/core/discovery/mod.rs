//! Device discovery: which host objects are devices, their identity and their health.
//!
//! Everything here is a function of facts that the runtime has read from `/dev`, `/sys` and `/proc`: whether an object matches the
//! operator's configuration, the identity that it keeps across kernel renumbering
//! ([`device_name`](crate::core::names::device_name) makes the device's name from it), and why it is rejected.

pub mod attributes;
pub mod device_events;
pub mod group;
pub mod health;
pub mod mounts;
pub mod pci;
pub mod uevent;
pub mod usb;
