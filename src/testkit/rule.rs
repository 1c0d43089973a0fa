//! The rules of the driver contracts.

use std::fmt;

/// Defines the rules from names and sentences, so that documentation and findings use the same text. The first list is for a `Driver`, the
/// second for both, the third for a `NodeDriver`.
macro_rules! rules {
    (@define $($name:ident: $sentence:literal)*) => {
        /// A rule of the contract of [`Driver`](crate::driver::Driver) or [`NodeDriver`](crate::node::driver::NodeDriver).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Rule {
            $(#[doc = $sentence] $name,)*
        }

        impl Rule {
            /// The rule as a sentence.
            pub fn sentence(self) -> &'static str {
                match self {
                    $(Self::$name => $sentence,)*
                }
            }
        }
    };
    ({ $($driver:ident: $a:literal)* } { $($both:ident: $b:literal)* } { $($node:ident: $c:literal)* }) => {
        rules!(@define $($driver: $a)* $($both: $b)* $($node: $c)*);

        impl Rule {
            /// Rules for a [`Driver`](crate::driver::Driver).
            pub const DRIVER: &[Self] = &[$(Self::$driver,)* $(Self::$both),*];

            /// Rules for a [`NodeDriver`](crate::node::driver::NodeDriver).
            pub const NODE_DRIVER: &[Self] = &[$(Self::$both,)* $(Self::$node),*];
        }
    };
}

rules! {
    {
        StableName: "`name` is a lower-case DNS subdomain of at most 63 characters, the same for every instance"
        BecomesReady: "`ready` succeeds after the first `observe`"
        ParametersAreRead: "`class_parameters` and `claim_parameters` accept the objects of the test on every call"
        OneEntryPerClaim: "`unsuitable_nodes` has one entry for each claim, also for unknown nodes and for none"
        EvaluationReservesNothing: "`unsuitable_nodes` reserves nothing: a repeated call has the same answer"
        FullIsUnsuitable: "a full node is unsuitable with a reason; `allocate` on it is an error of kind `Retry`"
        SuitableIsAllocatable: "`allocate` succeeds for the claims of a pod on a node that `unsuitable_nodes` has not rejected"
        OneAllocationPerClaim: "`allocate` returns one allocation for each claim, or an error"
        RecordableAllocation: "the API server accepts an allocation: at most 32 handles of at most 16 KiB, each with its driver"
        ReachableAllocation: "an allocation is available on the requested node"
        CapacityIsKept: "no more is allocated than the capacity, also by concurrent calls"
        AllocateIsIdempotent: "a repeated `allocate` for a claim returns the same allocation and takes no more capacity"
        UnrecordedIsReleased: "an allocation that was never recorded is free when `deallocate` returns"
        DeallocateIsIdempotent: "`deallocate` of a claim that holds nothing, or a repeated one, does nothing and returns `Ok`"
        RecordedIsHeld: "a recorded allocation stays held, also after `deallocate`, until `observe` shows that it is gone"
        ObservedIsReleased: "a recorded allocation is free when `observe` shows its claim without it, or gone"
        StateFromClaims: "a new instance holds exactly the allocations that `observe(All)` reports"
        LostAllocationIsReleased: "`deallocate` of a claim with finalizer and without allocation releases the work of an earlier instance"
        FailedAllocateIsReleased: "after an `allocate` for claims that do not fit together, `deallocate` of each leaves nothing held"
        DroppedAllocateIsReleased: "after an `allocate` that is dropped at an await point, `deallocate` leaves nothing held"
        FreedWakes: "`capacity_changes` does not end, and yields when capacity is released"
        NoFalseFinding: "`observe` reports no finding in an ordinary lifecycle"
        ReadableErrors: "an error has a CamelCase reason of at most 128 characters, and a message"
        SurvivesCrash: "a controller that is killed at any step and restarted serves the same pods and allocates nothing twice"
        SurvivesSlowCall: "a call or write that hangs, before or after its work, blocks nothing forever and loses nothing"
        SurvivesFailedCall: "a call or write that fails, before or after its work, is repaired"
    }
    {
        ReturnsInTime: "every call returns within the time limit"
        NoPanic: "no call panics"
        ServesPods: "with the real controller or companion, pods get their devices, and nothing is held in the end"
    }
    {
        FirstListComes: "the first list of devices comes within the limit and is not empty"
        ServableDevices: "names and kinds of devices are DNS labels, names are unique, and the limits of an inventory are kept"
        StableDevices: "a new instance lists the same devices under the same names"
        UsableContainerEdits: "container edits name existing files at absolute paths, with permissions of `rwm`"
        ContainerEditsAreStable: "a repeated `container_edits`, also of a new instance or while a claim has the device, has the same answer"
        UnknownDeviceIsRefused: "an unknown device is an error, and is never replaced by another"
        PrepareIsIdempotent: "a repeated `prepare` for a claim, also by a new instance, has the same result"
        UnprepareIsIdempotent: "`unprepare` of a claim that is not prepared, by a new instance, or of missing devices, is not an error"
        UnprepareIsForOneClaim: "`unprepare` makes the devices of its claim ready for another claim, and no others"
        FailedPrepareCanBeRolledBack: "`unprepare` rolls back a `prepare` that has failed halfway"
        DroppedPrepareCanBeRolledBack: "`unprepare` rolls back a `prepare` that was dropped at an await point"
        NothingIsLeft: "without prepared claims, nothing of any claim is left"
        NodeSurvivesCrash: "a companion that is killed at any step and restarted gives the pod the same devices, and unprepares its claim in the end"
        NodeSurvivesSlowCall: "a call that hangs, before or after its work, blocks nothing forever and is repaired"
        NodeSurvivesFailedCall: "a call that fails, before or after its work, is repaired"
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The variant's name is the rule's name.
        fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_rule_has_its_own_sentence() {
        let all: BTreeSet<Rule> = Rule::DRIVER.iter().chain(Rule::NODE_DRIVER).copied().collect();
        let sentences: BTreeSet<&str> = all.iter().map(|rule| rule.sentence()).collect();
        assert_eq!(sentences.len(), all.len());
    }
}
