//! kubelet's gRPC protocols: trimmed copies of its protocol files, compiled by `build.rs`. Each has its own module, because
//! unrelated packages share names.

/// Maximum number of claims that one call prepares: kubelet sends those of one pod, and a pod has a few.
pub const MAX_CLAIMS: usize = 1024;
/// Maximum number of containers per Allocate: kubelet sends one.
pub const MAX_CONTAINERS: usize = 64;
/// Maximum number of devices per container of an Allocate.
pub const MAX_DEVICES_PER_CONTAINER: usize = 4096;
/// Largest request in bytes that the services for kubelet decode.
///
/// Kubelet's largest requests are those for a preferred allocation: two lists of up to [`MAX_DEVICES_PER_CONTAINER`] ids. Ids of 60
/// bytes fit, as do the claims of a pod that fill 31 resource handles of 16 KiB. Decoding costs at most 52 times the size, for
/// claims without content: 27 MB, within the companion's usual memory limit of 64 MiB.
pub const MAX_REQUEST: usize = 512 * 1024;

macro_rules! generated {
    ($(#[$doc:meta])* $module:ident, $package:literal) => {
        $(#[$doc])*
        #[allow(
            missing_docs,
            missing_debug_implementations,
            unreachable_pub,
            clippy::pedantic,
            clippy::or_fun_call,
            clippy::use_self,
            reason = "generated code"
        )]
        pub mod $module {
            include!(concat!(env!("OUT_DIR"), "/", stringify!($module), "/", $package, ".rs"));
        }
    };
}

generated!(
    /// Plugin registration, v1.
    plugin_registration,
    "pluginregistration"
);
generated!(
    /// The DRA kubelet plugin API of kubelet 1.27, and the fallback of 1.28 to 1.30.
    dra_v1alpha2,
    "v1alpha2"
);
generated!(
    /// The DRA kubelet plugin API of kubelet 1.28 to 1.30.
    dra_v1alpha3,
    "v1alpha3"
);
generated!(
    /// The DRA kubelet plugin API of kubelet 1.32 and 1.33, and a fallback of later ones.
    dra_v1beta1,
    "k8s.io.kubelet.pkg.apis.dra.v1beta1"
);
generated!(
    /// The DRA kubelet plugin API of kubelet 1.34 and later.
    dra_v1,
    "k8s.io.kubelet.pkg.apis.dra.v1"
);
generated!(
    /// Health of DRA devices, for kubelet 1.34 to 1.36.
    dra_health_v1alpha1,
    "v1alpha1"
);
generated!(
    /// Health of DRA devices, for kubelet 1.37 and later.
    dra_health_v1,
    "v1"
);
generated!(
    /// The container runtime interface, limited to the calls that show the devices of containers.
    cri_v1,
    "runtime.v1"
);
generated!(
    /// Our own API of a running companion, for users on the node.
    node_records,
    "drayman.node.v1alpha1"
);
generated!(
    /// The device plugin API, v1beta1.
    device_plugin_v1beta1,
    "v1beta1"
);
generated!(
    /// The pod resources API, v1.
    pod_resources_v1,
    "v1"
);
