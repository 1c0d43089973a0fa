//! Output of `kubectl describe pod`.

use super::objects::{CHANGED, DESCRIBED, DESCRIBED_STATUS, HAPPENED, NAMESPACE};
use super::{APPLY, both};

const WHOLE: &str = "describe pod described-whole";

#[test]
fn kubectl_describes_pods_the_same() {
    both(
        "kubectl-describes",
        &[
            (APPLY, NAMESPACE),
            (APPLY, CHANGED),
            (APPLY, DESCRIBED),
            (WHOLE, ""),
            ("describe pod described-waiting", ""),
            (APPLY, HAPPENED),
            (WHOLE, ""),
            (
                "patch pod described-whole --subresource=status --type=merge --patch-file=/dev/stdin",
                DESCRIBED_STATUS,
            ),
            (WHOLE, ""),
            ("describe pod described-whole --show-events=false", ""),
            // By name prefix, labels, file, all of them, and a missing one.
            ("describe pod described-w", ""),
            ("describe pods -l b=c", ""),
            ("describe pods -l b=nothing", ""),
            ("describe -f -", DESCRIBED),
            ("describe pods", ""),
            ("describe pod missing", ""),
            ("describe pod/missing pod/described-waiting", ""),
            ("delete pod described-whole --wait=false", ""),
            (WHOLE, ""),
            ("delete pods --all --grace-period=0 --force", ""),
            ("describe pods", ""),
        ],
    );
}
