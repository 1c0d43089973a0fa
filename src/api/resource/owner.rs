//! Ownership of objects: the pod for which a claim was made, and the driver of an allocation.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::{AllocationResult, ResourceClaimStatus, controller_of};

/// The pod that owns an object, if its controller is a pod. A claim may also belong to a Job or to a custom resource; any pod may then
/// use it.
pub fn pod_owner_of(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    controller_of(metadata).filter(|owner| owner.kind == "Pod" && owner.api_version == "v1")
}

impl AllocationResult {
    /// Whether a resource handle is for this driver's kubelet plugin. A handle without a driver name belongs to the driver in the
    /// claim's status.
    pub fn has_handle_of(&self, driver: &str) -> bool {
        let mut handles = self.resource_handles.iter();
        handles.any(|handle| handle.driver_name.as_deref() == Some(driver))
    }
}

impl ResourceClaimStatus {
    /// The allocation, if it contains something of `driver`: it is recorded with the driver's name, or has a resource handle of the
    /// driver. The API server permits changes of `driverName` while a pod uses the claim, and kubelet uses the handle's driver.
    pub fn allocation_of(&self, driver: &str) -> Option<&AllocationResult> {
        let is_recorded = self.driver_name.as_deref() == Some(driver);
        let allocation = self.allocation.as_ref();
        allocation.filter(|allocation| is_recorded || allocation.has_handle_of(driver))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_is_a_driver_s_by_its_status_or_by_a_resource_handle() {
        let of = |name: &str, handle: &str| {
            let status = ResourceClaimStatus {
                driver_name: Some(name.to_owned()),
                allocation: Some(AllocationResult::new(handle, "{}")),
                ..ResourceClaimStatus::default()
            };
            status.allocation_of("ours").is_some()
        };
        assert!(of("ours", "ours") && of("ours", "theirs") && of("renamed", "ours"));
        assert!(!of("theirs", "theirs") && !of("theirs", ""));
        assert_eq!(ResourceClaimStatus::default().allocation_of("ours"), None);
    }

    #[test]
    fn only_a_pod_of_the_core_group_is_a_pod() {
        let owned = |api_version: &str, kind: &str, controller: bool| {
            let owner = OwnerReference {
                api_version: api_version.to_owned(),
                kind: kind.to_owned(),
                controller: Some(controller),
                ..OwnerReference::default()
            };
            let metadata = ObjectMeta {
                owner_references: Some(vec![owner]),
                ..ObjectMeta::default()
            };
            pod_owner_of(&metadata).is_some()
        };
        assert!(owned("v1", "Pod", true));
        assert!(!owned("v1", "Pod", false) && !owned("batch/v1", "Job", true));
        assert!(!owned("example.com/v1", "Pod", true));
    }
}
