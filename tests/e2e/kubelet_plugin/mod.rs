//! Both kubelet APIs on a real node: no device is granted through both, and a vendor's driver works like the built-in one.

mod apiserver_outage;
mod both_apis;
mod changes;
mod companion_update;
mod force_delete;
mod health;
mod helper;
mod paths;
mod plugin;
mod sensors_on_a_node;
mod two_releases;
