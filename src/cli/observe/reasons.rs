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
pub(super) const EVENTS: [Reason; 38] = [
    controller(
        "AllocationMadeForAnother",
        "claim",
        "what the claim records was made for another claim; the claim must be made again",
    ),
    controller(
        "AllocationNotRecorded",
        "pod, claim",
        "the API server refuses to record the allocation, or fails again and again, and says why; it is tried again",
    ),
    controller(
        "AnswerRefused",
        "pod",
        "the scheduler cannot be told of the pod's nodes, because the API server refuses the answer",
    ),
    controller(
        "ClaimNotOwned",
        "pod",
        "a claim has the name of the pod's claim and was not made for it; delete it, or rename the pod",
    ),
    companion(
        "ClaimQuarantined",
        "the devices of a claim are withheld, because it is not certain that no container uses them; a person releases them",
    ),
    companion(
        "ClaimsNotServed",
        "the API server no longer serves resource.k8s.io/v1alpha2: claims are not offered on the node",
    ),
    companion(
        "ClaimsServed",
        "the API server serves resource.k8s.io/v1alpha2 now: claims are offered on the node",
    ),
    companion("ConfigurationChanged", "the file of device kinds was taken up"),
    companion(
        "ConfigurationInvalid",
        "the file of device kinds is wrong; the one before stays in force",
    ),
    companion(
        "ConfigurationUnreadable",
        "the file of device kinds cannot be read; the one before stays in force",
    ),
    controller(
        "DeviceHeldTwice",
        "claim, pod",
        "two claims record the same device; the older keeps it, and the younger is not prepared",
    ),
    companion(
        "DeviceRecovered",
        "a device that was unhealthy can be given again",
    ),
    companion("DeviceUnhealthy", "a device is given to nobody, and why"),
    companion(
        "DeviceWithdrawn",
        "a device has gone, or the configuration no longer describes it",
    ),
    companion(
        "DevicesChanged",
        "more devices have changed at once than are told one by one",
    ),
    controller(
        "DriverMisbehaved",
        "pod, claim",
        "the driver's answer cannot be used; this is a bug of the driver",
    ),
    controller(
        "DriverNameNotLowerCase",
        "class",
        "driverName is in upper case, which the API server refuses in a finalizer",
    ),
    controller(
        "DriverNameShared",
        "lease",
        "a controller of another release serves the same driver name, and both allocate the same devices; uninstall one of them",
    ),
    controller(
        "DriverPanicked",
        "pod, claim",
        "a call of the driver has panicked; it is tried again",
    ),
    controller(
        "DriverTimeout",
        "pod, claim",
        "a call of the driver took too long (--driver-call-timeout); it is tried again",
    ),
    controller(
        "HandleInvalid",
        "pod, claim",
        "the devices of the claim do not fit into a resource handle",
    ),
    controller(
        "HoldingUnreadable",
        "claim, pod",
        "what the claim records cannot be read, by a newer release perhaps; nothing else is given on its node meanwhile",
    ),
    companion(
        "KubeletApiDown",
        "claims or extended resources cannot be offered to kubelet, and why; each is tried again alone, the others go on",
    ),
    companion("KubeletApiUp", "what was down is offered to kubelet again"),
    controller(
        "NoSuitableDevice",
        "pod",
        "the pod fits on no node, with the numbers for each: it waits, and is woken by what it waits for",
    ),
    controller(
        "NotSynced",
        "pod, claim",
        "the controller does not know the object yet; it passes by itself",
    ),
    controller(
        "OtherClaimDoesNotFit",
        "pod, claim",
        "another claim of the pod does not fit on the same node, so none is allocated",
    ),
    controller(
        "OtherDriverSilent",
        "pod",
        "the pod has a claim of another driver that has not answered the scheduler",
    ),
    controller(
        "ParametersInvalid",
        "pod, claim, class",
        "the parameters of the claim or class make no sense; the text says which field",
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
        "the API server refuses to let the claim go, or fails again and again; it is tried again",
    ),
    controller(
        "ResourceClassMissing",
        "pod, claim",
        "the class that the claim names does not exist",
    ),
    controller(
        "ResourcesExhausted",
        "pod, claim",
        "too few devices are free where the claim is to be allocated",
    ),
    controller(
        "SelectorInvalid",
        "pod, claim, class",
        "a selector is no CEL expression about a device",
    ),
    controller(
        "SelectorUnfinished",
        "pod, claim",
        "the selectors have not been tried on all devices yet; it passes by itself",
    ),
    controller(
        "SuitableNodesUnsupported",
        "pod, claim",
        "an immediate claim of a class whose suitableNodes select by label, which the controller does not see",
    ),
    controller(
        "TooManySelectors",
        "pod, claim",
        "more different expressions of selectors are in use than a namespace, or all namespaces together, may have",
    ),
];

/// Reasons why a companion rejects kubelet's requests. Kubelet writes the message into the pod's events.
pub(super) const REFUSALS: [(&str, &str); 23] = [
    (
        "AllocationChanged",
        "the claim was prepared with other devices than it has now",
    ),
    ("AlreadyRunning", "another companion has the records of this node"),
    (
        "CheckpointFailed",
        "the records cannot be put into a form that can be stored",
    ),
    (
        "CheckpointUnusable",
        "the checkpoint is damaged or of a newer release, so nothing can be released without the companion",
    ),
    (
        "ContainerPathTaken",
        "two devices of one container would be seen at the same path; the configuration gives them paths",
    ),
    (
        "DeviceChanged",
        "the device is another than the one that was allocated",
    ),
    ("DeviceFailed", "the device cannot be made ready"),
    ("DeviceGone", "the device is not on the node"),
    ("DeviceHeld", "somebody else holds the device"),
    (
        "DeviceInUse",
        "the node itself uses the device: it is mounted, or the kernel has a volume on it",
    ),
    ("DeviceSlow", "the driver took too long; kubelet tries again"),
    ("DeviceUnhealthy", "the device is unhealthy, and why"),
    (
        "DiscoveryEnded",
        "the search for devices has ended; the companion is to be restarted",
    ),
    (
        "HoldingsUnknown",
        "after the loss of the checkpoint it is not known yet which devices a claim has",
    ),
    ("InvalidClaim", "kubelet names a claim that cannot be one"),
    (
        "InvalidHandle",
        "the claim's resource handle cannot be read, or is that of another claim",
    ),
    (
        "InvalidResource",
        "kubelet asks for an extended resource that there is not, or for a device of another",
    ),
    (
        "NodeUnknown",
        "the API server has not said yet which Node this is",
    ),
    (
        "PodResourcesUnavailable",
        "kubelet does not show what its containers hold",
    ),
    (
        "Stopping",
        "the companion is about to end; kubelet asks its successor",
    ),
    (
        "StorageFailed",
        "the records cannot be written: the disk is full, read-only or broken",
    ),
    (
        "WrongMode",
        "the device does not leave the node through this door",
    ),
    (
        "WrongNode",
        "the claim was allocated for another node, or an earlier one of this name",
    ),
];
