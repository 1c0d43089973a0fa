//! kubectl with client-side and server-side dry run, and `kubectl diff`.

use super::objects::{CHANGED, DESCRIBED, NAMESPACE, OBJECTS, UNKNOWN};
use super::{APPLY, both};

const ALL: &str =
    "get resourceclasses,resourceclaims,resourceclaimtemplates,configmaps,pods -l 'of in (CLASS)'";
const MAP: &str = "get configmap map -o yaml";
const OTHER_NAMESPACE: &str = "apiVersion: v1\nkind: Namespace\nmetadata: { name: kubectl-pretends-other }\n";
const CONFLICTING: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata: { name: map, annotations: { why: otherwise } }\ndata: { a: z }\n";
const GENERATED: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata: { name: \"\", generateName: some- }\n";

#[test]
fn kubectl_dry_runs_are_the_same() {
    both(
        "kubectl-pretends",
        &[
            (APPLY, NAMESPACE),
            // For missing objects.
            ("apply --dry-run=server -f -", OBJECTS),
            ("apply --dry-run=client -f -", OBJECTS),
            ("create --dry-run=server -f -", OBJECTS),
            ("create --dry-run=client -f -", OBJECTS),
            ("create --dry-run=server -o yaml -f -", OBJECTS),
            ("create --dry-run=client -o yaml -f -", OBJECTS),
            ("create --dry-run=server -o yaml -f -", DESCRIBED),
            ("create --dry-run=server -f -", OTHER_NAMESPACE),
            ("create --dry-run=server -f -", UNKNOWN),
            ("create --dry-run=client -f -", UNKNOWN),
            ("create --dry-run=client -f -", GENERATED),
            ("delete --dry-run=server -f -", OBJECTS),
            ("delete --dry-run=client -f -", OBJECTS),
            ("delete --dry-run=server --ignore-not-found -f -", OBJECTS),
            (
                "create configmap other --from-literal=a=b --dry-run=server -o yaml",
                "",
            ),
            (
                "create configmap other --from-literal=a=b --dry-run=client -o yaml",
                "",
            ),
            ("diff -f -", CHANGED),
            (ALL, ""),
            ("get namespace kubectl-pretends-other", ""),
            ("apply --dry-run=maybe -f -", OBJECTS),
            // For existing objects.
            (APPLY, OBJECTS),
            ("create --dry-run=server -f -", OBJECTS),
            ("create --dry-run=client -f -", OBJECTS),
            ("apply --dry-run=server -f -", OBJECTS),
            ("apply --dry-run=client -f -", OBJECTS),
            ("apply --dry-run=server -f -", CHANGED),
            ("apply --dry-run=client -f -", CHANGED),
            ("apply --dry-run=server -o yaml -f -", CHANGED),
            ("apply --dry-run=client -o yaml -f -", CHANGED),
            ("apply --dry-run=server -f -", UNKNOWN),
            ("apply --server-side --dry-run=server -f -", CHANGED),
            (
                "apply --server-side --force-conflicts --dry-run=server -o yaml -f -",
                CHANGED,
            ),
            (
                "apply --server-side --field-manager=other --dry-run=server -f -",
                CONFLICTING,
            ),
            ("diff -f -", CHANGED),
            ("diff -f -", OBJECTS),
            ("diff --server-side -f -", CHANGED),
            ("diff -f -", UNKNOWN),
            ("replace --dry-run=server -f -", CHANGED),
            ("replace --dry-run=client -f -", CHANGED),
            (
                r#"patch configmap map --dry-run=server --type=merge -p {"data":{"a":"z"}}"#,
                "",
            ),
            ("label configmap map l=m --dry-run=server", ""),
            ("label configmap map l=m --dry-run=client", ""),
            ("annotate configmap map l=m --dry-run=server", ""),
            (MAP, ""),
            ("delete --dry-run=server -f -", OBJECTS),
            ("delete --dry-run=client -f -", OBJECTS),
            ("delete configmap map --dry-run=server", ""),
            ("delete configmap map --dry-run=client", ""),
            ("delete configmap missing --dry-run=server", ""),
            ("delete configmap missing --dry-run=client", ""),
            ("delete resourceclaims --all --dry-run=server", ""),
            ("delete resourceclaim claim --dry-run=server -o name", ""),
            ("delete resourceclaim claim --dry-run=server --wait", ""),
            ("get resourceclaims,configmaps/map", ""),
            (MAP, ""),
            ("delete pod missing --dry-run=server --force", ""),
        ],
    );
}
