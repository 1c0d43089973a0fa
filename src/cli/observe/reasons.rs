//! All event reasons and all reasons why a companion rejects a request. The docs are generated from them, and they are
//! label values of metrics from the start.

/// Component that writes an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum By {
    Controller,
    Companion,
}

/// An event reason.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reason {
    pub(super) word: &'static str,
    pub(super) by: By,
    /// Kinds of objects that the event is about.
    pub(super) on: &'static str,
    /// Meaning and fix.
    pub(super) means: &'static str,
}

const fn controller(word: &'static str, on: &'static str, means: &'static str) -> Reason {
    Reason {
        word,
        by: By::Controller,
        on,
        means,
    }
}

const fn companion(word: &'static str, means: &'static str) -> Reason {
    Reason {
        word,
        by: By::Companion,
        on: "node",
        means,
    }
}

/// All event reasons, in alphabetical order.
pub(super) const EVENTS: [Reason; 42] = [
    controller(
        "AllocationMadeForAnother",
        "claim",
        "the claim contains another claim's allocation; recreate the claim",
    ),
    controller(
        "AllocationNotRecorded",
        "pod, claim",
        "the API server rejects the allocation or fails repeatedly, with the reason; the write is retried",
    ),
    controller(
        "AnswerRefused",
        "pod",
        "the API server rejects or alters the update of the pod's scheduling context",
    ),
    controller(
        "ClaimNotOwned",
        "pod",
        "a claim with the name of the pod's claim was not created for this pod; delete the claim or rename the pod",
    ),
    companion(
        "ClaimQuarantined",
        "the devices of a claim are withheld because a container may still use them; an operator must release them",
    ),
    companion(
        "ClaimsNotServed",
        "the API server no longer serves resource.k8s.io/v1 or v1alpha2; the node does not serve claims",
    ),
    companion(
        "ClaimsServed",
        "the API server serves resource.k8s.io/v1 or v1alpha2; the node serves claims",
    ),
    companion("ConfigurationChanged", "the device configuration was reloaded"),
    companion(
        "ConfigurationInvalid",
        "the device configuration is invalid; the previous one stays in force",
    ),
    companion(
        "ConfigurationUnreadable",
        "the device configuration cannot be read; the previous one stays in force",
    ),
    controller(
        "DeviceHeldTwice",
        "claim, pod",
        "two claims have the same device allocated; the older keeps it, the younger is not prepared",
    ),
    companion("DeviceRecovered", "an unhealthy device is healthy again"),
    companion(
        "DeviceUnhealthy",
        "a device is unhealthy and not allocated, with the reason",
    ),
    companion(
        "DeviceWithdrawn",
        "a device is gone, or the configuration no longer describes it",
    ),
    companion("DevicesChanged", "more than ten devices changed at once"),
    companion(
        "DevicesNotPublished",
        "devices with shares are not published, since this Kubernetes version or its feature gates do not allow it",
    ),
    controller(
        "DriverMisbehaved",
        "pod, claim",
        "the driver returned an invalid result; this is a bug of the driver",
    ),
    controller(
        "DriverNameNotLowerCase",
        "class",
        "driverName contains upper case letters, which the API server rejects in a finalizer",
    ),
    controller(
        "DriverNameShared",
        "lease",
        "a controller of another release serves the same driver name, and both allocate the same devices; uninstall one of them",
    ),
    controller(
        "DriverPanicked",
        "pod, claim",
        "a driver call panicked; it is retried",
    ),
    controller(
        "DriverTimeout",
        "pod, claim",
        "a driver call timed out (--driver-call-timeout); it is retried",
    ),
    controller(
        "HandleInvalid",
        "pod, claim",
        "the devices of the claim do not fit into a resource handle",
    ),
    controller(
        "HoldingUnreadable",
        "claim, pod",
        "the claim's allocation cannot be read, for example one of a newer release; no device of its node is allocated meanwhile",
    ),
    companion(
        "KubeletApiDown",
        "a kubelet API cannot be served, with the reason; it is retried, the others continue",
    ),
    companion("KubeletApiUp", "a kubelet API is served again"),
    companion(
        "KubeletTooOld",
        "kubelet is older than 1.34 and would start pods without the devices of their claims, so none is offered to claims",
    ),
    controller(
        "NoSuitableDevice",
        "pod",
        "the pod fits on no node, with the counts per node; it waits until that changes",
    ),
    controller(
        "NotSynced",
        "pod, claim",
        "the controller's cache does not contain the object yet; transient",
    ),
    controller(
        "OtherDriverSilent",
        "pod",
        "the pod has a claim of another driver that has not answered the scheduler",
    ),
    controller(
        "ParametersInvalid",
        "pod, claim, class",
        "the parameters of the claim or class are invalid; the message names the field",
    ),
    controller(
        "ParametersNotFound",
        "pod, claim, class",
        "the parameters that the claim or class refers to do not exist",
    ),
    controller(
        "ParametersReferenceInvalid",
        "pod, claim, class",
        "parametersRef refers to a kind that this driver does not read",
    ),
    controller(
        "ReleaseRefused",
        "claim",
        "the API server rejects the deallocation or fails repeatedly; the write is retried",
    ),
    controller(
        "ResourceClassMissing",
        "pod, claim",
        "the class that the claim names does not exist",
    ),
    companion(
        "ResourceSliceAltered",
        "the API server or an admission webhook stored a ResourceSlice in another form than written; the message names the feature gate",
    ),
    companion(
        "ResourceSliceRejected",
        "the API server rejects a ResourceSlice of the node, with the reason; the write is retried",
    ),
    controller(
        "ResourcesExhausted",
        "pod, claim",
        "too few devices are free on the selected node",
    ),
    controller(
        "SelectorInvalid",
        "pod, claim, class",
        "a selector is not a valid CEL expression",
    ),
    controller(
        "SelectorUnfinished",
        "pod, claim",
        "the selectors are not evaluated for all devices yet; transient",
    ),
    controller(
        "SuitableNodesUnsupported",
        "pod, claim",
        "an immediate claim whose class has suitableNodes with label selectors, which the controller does not support",
    ),
    controller(
        "TooManyClaims",
        "pod",
        "the pod has more claims than a controller supports; split it into several pods",
    ),
    controller(
        "TooManySelectors",
        "pod, claim",
        "the number of different selector expressions exceeds the limit of a namespace or of the cluster",
    ),
];

/// Reasons why a companion rejects kubelet's requests. Kubelet writes the message into the pod's events.
pub(super) const REFUSALS: [(&str, &str); 27] = [
    (
        "AllocationChanged",
        "the claim was prepared with other devices than it has now, or has more shares than the device",
    ),
    ("AlreadyRunning", "another companion holds the lock of this node"),
    (
        "CheckpointFailed",
        "the checkpoint cannot be encoded or is too large",
    ),
    (
        "ClaimGone",
        "the claim was deleted, or another claim has its name; delete the pod",
    ),
    (
        "ClaimUnreadable",
        "the API server does not show the claim; kubelet asks again",
    ),
    (
        "ContainerPathTaken",
        "two devices of a container have the same container path; change the configuration",
    ),
    (
        "ContainerRuntimeUnavailable",
        "the container runtime does not answer, or cannot send the status of a container that may have the device; kubelet asks again",
    ),
    ("DeviceChanged", "another device replaced the allocated one"),
    ("DeviceFailed", "the driver failed to prepare the device"),
    ("DeviceGone", "the device is not on the node"),
    ("DeviceHeld", "another claim or container holds the device"),
    (
        "DeviceInUse",
        "the node itself uses the device: it is mounted, or the kernel has a volume on it",
    ),
    ("DeviceSlow", "the driver timed out; kubelet retries"),
    ("DeviceUnhealthy", "the device is unhealthy, with the reason"),
    (
        "DiscoveryEnded",
        "device discovery has ended; restart the companion",
    ),
    (
        "HoldingsUnknown",
        "the checkpoint was lost and the devices of a claim are not yet recovered",
    ),
    (
        "InvalidClaim",
        "kubelet's request contains an invalid claim, or the claim is larger than 2 MiB",
    ),
    (
        "InvalidHandle",
        "the claim's resource handle is invalid or belongs to another claim",
    ),
    (
        "InvalidParameters",
        "the claim or its class has opaque parameters for this driver; remove them",
    ),
    (
        "InvalidResource",
        "kubelet requests an unknown extended resource, or a device of another one",
    ),
    (
        "NodeUnknown",
        "the companion has not read its Node from the API server yet",
    ),
    (
        "NotAllocated",
        "the claim is not allocated or reserved, or has no device of this driver; delete the pod",
    ),
    (
        "PodResourcesUnavailable",
        "kubelet does not report the devices of its containers",
    ),
    (
        "Stopping",
        "the companion is shutting down; kubelet retries with its successor",
    ),
    (
        "StorageFailed",
        "the checkpoint or CDI file cannot be written: the disk is full, read-only or broken",
    ),
    ("WrongMode", "the mode of the device does not permit this API"),
    (
        "WrongNode",
        "the claim was allocated for another node, or for an earlier node of this name",
    ),
];
