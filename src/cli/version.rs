//! `drayman version`: prints the program's version and the APIs it supports.

use super::error::Error;
use super::output::write_all;
use crate::api::crd;

/// Print the versions of this program and of its protocols
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Arguments {}

pub(super) fn run(_: Arguments) -> Result<(), Error> {
    Ok(write_all(&text())?)
}

fn text() -> String {
    let name = env!("CARGO_PKG_NAME");
    let version = env!("CARGO_PKG_VERSION");
    let (own_group, own_version) = (crd::GROUP, crd::VERSION);
    let (system, machine) = (std::env::consts::OS, std::env::consts::ARCH);
    let build = if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    };
    format!("{name} {version}\nbuilt for {system}/{machine} ({build})\nowns {own_group}/{own_version}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_is_name_and_version() {
        let text = text();

        assert_eq!(
            text.lines().next(),
            Some(concat!("drayman ", env!("CARGO_PKG_VERSION")))
        );
        assert!(text.contains("drayman.dev/v1alpha1"));
        assert!(text.ends_with('\n'));
    }
}
