//! The rules of the driver contracts.

use std::fmt;

/// Defines the rules from names and sentences, so that documentation and findings use the same text.
macro_rules! rules {
    ($($name:ident: $sentence:literal)*) => {
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
}

rules! {
    StableName: "`name` is a lower-case DNS subdomain of at most 63 characters, the same for every instance"
    BecomesReady: "`ready` succeeds after the first `observe`"
    ParametersAreRead: "the parameters of the class and the claims of the test are read, each time anew"
    OneVerdictPerClaim: "`unsuitable_nodes` has one entry for each claim, also for nodes that do not exist and for none"
    JudgingReservesNothing: "`unsuitable_nodes` reserves nothing: asked again, it answers the same"
    FullIsAVerdict: "a full node is unsuitable with a reason, and in `allocate` an error of the kind `Retry`"
    VerdictHolds: "`allocate` takes the claims of a pod on a node that `unsuitable_nodes` did not object to"
    OneResultPerClaim: "`allocate` has one allocation for each claim, or is an error"
    RecordableAllocation: "the API server takes an allocation: at most 32 handles of at most 16 KiB, each with its driver"
    ReachableAllocation: "an allocation can be used on the node for which it was asked"
    NeverMoreThanThereIs: "no more is allocated than there is, also by calls at the same time"
    AllocateAgainIsTheSame: "`allocate` again for a claim returns the same and takes nothing more"
    UnrecordedIsFreeAgain: "what was allocated and not recorded is free when `deallocate` returns"
    DeallocateNothingDoesNothing: "`deallocate` of a claim that holds nothing, or again, does nothing and returns `Ok`"
    RecordedIsHeld: "what a claim records stays held, also after `deallocate`, until `observe` shows that it does not any more"
    ObservedIsFree: "what a claim recorded is free when `observe` shows it without allocation, or gone"
    BooksFromClaims: "a new instance holds what `observe(All)` shows that the claims record, no more and no less"
    LostAllocationIsGivenBack: "a new instance that is told to `deallocate` a claim with finalizer and without allocation has everything free"
    BatchCanBeUndone: "after an `allocate` for several claims that do not fit together, `deallocate` of each leaves nothing held"
    DroppedCallCanBeUndone: "an `allocate` that is dropped where it awaits, and `deallocate` after it, leave nothing held"
    FreedWakes: "`capacity_changes` does not end, and yields when something becomes free"
    NoFalseFinding: "`observe` finds nothing wrong in an ordinary life"
    ReadableErrors: "an error has a CamelCase reason of at most 128 characters and a message"
    ReturnsInTime: "every call returns within the time limit"
    NoPanic: "no call panics"
    ServesPods: "with the real controller or companion on the stage, pods get what they ask for, and in the end nothing is held"
    SurvivesCrash: "a controller that is killed at any step and started anew serves the same pods, and loses and doubles nothing"
    SurvivesSlowCall: "a call or write that hangs, before or after its work, holds nothing up for good and loses nothing"
    SurvivesFailedCall: "a call or write that fails, before or after its work, is made good"
    FirstListComes: "the first list of devices comes soon, and is not empty"
    ServableDevices: "names and kinds of devices are DNS labels, no name comes twice, and the limits of an inventory are kept"
    StableDevices: "a new instance lists the same devices under the same names"
    UsableInjection: "what a container gets exists on the node, at absolute paths, with permissions of `rwm`"
    InjectionRepeats: "`injection` again, also of a new instance and while a claim has the device, answers the same"
    UnknownDeviceIsRefused: "a device that is not there is an error, and is never replaced by another"
    PrepareAgainIsTheSame: "`prepare` again for a claim, also by a new instance, leads to the same"
    UnprepareAgainIsFine: "`unprepare` of a claim that is not prepared, again, by a new instance, or of devices that are gone, is no error"
    UnprepareIsForOneClaim: "`unprepare` makes the devices of its claim ready for another, and leaves those of others alone"
    FailedPrepareCanBeUndone: "a `prepare` that fails in the middle can be undone"
    DroppedPrepareCanBeUndone: "a `prepare` that is dropped where it awaits can be undone"
    NothingIsLeft: "when no claim is prepared, nothing of any claim is left"
    NodeSurvivesCrash: "a companion that is killed at any step and started anew gives the same to the pod, and undoes it in the end"
    NodeSurvivesSlowCall: "a call that hangs, before or after its work, holds nothing up for good and is made good"
    NodeSurvivesFailedCall: "a call that fails, before or after its work, is made good"
}

impl Rule {
    /// Rules for a [`Driver`](crate::driver::Driver).
    pub const DRIVER: [Self; 29] = [
        Self::StableName,
        Self::BecomesReady,
        Self::ParametersAreRead,
        Self::OneVerdictPerClaim,
        Self::JudgingReservesNothing,
        Self::FullIsAVerdict,
        Self::VerdictHolds,
        Self::OneResultPerClaim,
        Self::RecordableAllocation,
        Self::ReachableAllocation,
        Self::NeverMoreThanThereIs,
        Self::AllocateAgainIsTheSame,
        Self::UnrecordedIsFreeAgain,
        Self::DeallocateNothingDoesNothing,
        Self::RecordedIsHeld,
        Self::ObservedIsFree,
        Self::BooksFromClaims,
        Self::LostAllocationIsGivenBack,
        Self::BatchCanBeUndone,
        Self::DroppedCallCanBeUndone,
        Self::FreedWakes,
        Self::NoFalseFinding,
        Self::ReadableErrors,
        Self::ReturnsInTime,
        Self::NoPanic,
        Self::ServesPods,
        Self::SurvivesCrash,
        Self::SurvivesSlowCall,
        Self::SurvivesFailedCall,
    ];

    /// Rules for a [`NodeDriver`](crate::node::driver::NodeDriver).
    pub const NODE_DRIVER: [Self; 18] = [
        Self::FirstListComes,
        Self::ServableDevices,
        Self::StableDevices,
        Self::UsableInjection,
        Self::InjectionRepeats,
        Self::UnknownDeviceIsRefused,
        Self::PrepareAgainIsTheSame,
        Self::UnprepareAgainIsFine,
        Self::UnprepareIsForOneClaim,
        Self::FailedPrepareCanBeUndone,
        Self::DroppedPrepareCanBeUndone,
        Self::NothingIsLeft,
        Self::ReturnsInTime,
        Self::NoPanic,
        Self::ServesPods,
        Self::NodeSurvivesCrash,
        Self::NodeSurvivesSlowCall,
        Self::NodeSurvivesFailedCall,
    ];
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
    fn every_rule_has_a_sentence_of_its_own() {
        let all: BTreeSet<Rule> = Rule::DRIVER.into_iter().chain(Rule::NODE_DRIVER).collect();
        let sentences: BTreeSet<&str> = all.iter().map(|rule| rule.sentence()).collect();
        // Three rules apply to both.
        assert_eq!(all.len(), Rule::DRIVER.len() + Rule::NODE_DRIVER.len() - 3);
        assert_eq!(sentences.len(), all.len());
    }
}
