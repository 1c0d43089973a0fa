//! Compiles kubelet's protocol files, in pure Rust (no `protoc`).

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

const PROTOCOLS: [&str; 11] = [
    "plugin_registration",
    "dra_v1alpha2",
    "dra_v1alpha3",
    "dra_v1beta1",
    "dra_v1",
    "dra_health_v1alpha1",
    "dra_health_v1",
    "device_plugin_v1beta1",
    "pod_resources_v1",
    "node_records",
    "cri_v1",
];

fn main() -> Result<(), Box<dyn Error>> {
    let sources = Path::new("src/api/proto");
    let generated = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    for protocol in PROTOCOLS {
        let source = sources.join(format!("{protocol}.proto"));
        println!("cargo::rerun-if-changed={}", source.display());
        // Packages of unrelated protocols share names ("v1beta1"), so each gets its own directory.
        let directory = generated.join(protocol);
        fs::create_dir_all(&directory)?;
        let compiler = tonic_prost_build::configure().out_dir(directory).btree_map(".");
        compiler.compile_fds(protox::compile([source.as_path()], [sources])?)?;
    }
    println!("cargo::rerun-if-changed=build.rs");
    Ok(())
}
