//! Both APIs on a real node: one device never leaves by two of them, and a vendor's own devices go through them like the built-in.

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
