//! What kubelet has recorded of grants of this driver, whatever the extended resource was called then.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use tracing::warn;

use super::super::KubeletPaths;
use crate::core::node::containers::Containers;
use crate::core::node::device_manager::{self, granted_by};
use crate::core::node::driver_name::DriverName;
use crate::core::node::former::Former;

/// The size of kubelet's file that is read, at most.
const SIZE_MAX: u64 = 64 * 1024 * 1024;

/// What containers may have of the extended resources of earlier processes: the configuration may have changed since. `None` where the
/// directory of kubelet's PodResources API is not there (kubelet makes it, but it may not be mounted): then nobody would ever hear
/// that the containers have ended.
pub(in crate::node) fn former(paths: &KubeletPaths, driver: &DriverName) -> Option<Former> {
    if !paths.pod_resources_socket().parent().is_some_and(Path::is_dir) {
        return None;
    }
    let file = paths.device_plugin_dir.join(device_manager::FILE);
    let granted = match File::open(&file) {
        Ok(file) => granted(file, driver),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(error),
    };
    let granted: BTreeMap<String, BTreeSet<String>> = granted.unwrap_or_else(|error| {
        let file = file.display();
        warn!("{file} cannot be read, so what containers have under names that extended resources no longer have is not known: {error}");
        BTreeMap::new()
    });
    let mut former = Former::default();
    for (resource, devices) in granted {
        former.left(&resource, devices, Containers::default());
    }
    Some(former)
}

fn granted(file: File, driver: &DriverName) -> io::Result<BTreeMap<String, BTreeSet<String>>> {
    let mut text = Vec::new();
    file.take(SIZE_MAX).read_to_end(&mut text)?;
    let grants = device_manager::parse(&text).map_err(io::Error::other)?;
    Ok(granted_by(driver, &grants))
}
