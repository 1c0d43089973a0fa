//! kubectl prints the same for the test cluster and for the real server.

mod dry_run;
mod objects;
mod pods;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use anyhow::Context as _;
use drayman::testcluster::api::{ApiServer, ClusterMode, kubeconfig};
use drayman::testcluster::clock_and_rng::ClockAndRng;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use self::objects::{
    CHANGED, INVENTORY_STATUS, NAMESPACE, NODE_STATUS, NOT_OURS, OBJECTS, OURS, POD_STATUS, SHOWN, UNKNOWN,
};
use crate::parity::server::{real, run};

/// kubectl for one of the two servers.
struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
    cache: PathBuf,
    namespace: &'static str,
}

impl Kubectl {
    /// Output and exit code, normalized.
    async fn run(&self, command: &str, input: &str) -> anyhow::Result<String> {
        let uid = if input.contains(POD_UID) {
            self.uid_of_the_pod().await?
        } else {
            String::new()
        };
        let input = input.replace(POD_UID, &uid);
        let mut child = Command::new(&self.program)
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .arg("--cache-dir")
            .arg(&self.cache)
            .args(["--namespace", self.namespace])
            .args(words(command))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("running kubectl")?;
        let mut stdin = child.stdin.take().context("stdin")?;
        stdin.write_all(input.as_bytes()).await?;
        drop(stdin);
        let output = child.wait_with_output().await?;
        let text = |bytes: &[u8]| same_form(&String::from_utf8_lossy(bytes));
        Ok(format!(
            "$ kubectl {command}\n{}{}exit code {}\n",
            text(&output.stdout),
            text(&output.stderr),
            output.status.code().unwrap_or(-1)
        ))
    }

    async fn uid_of_the_pod(&self) -> anyhow::Result<String> {
        let output = Command::new(&self.program)
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .args(["--namespace", self.namespace, "get", "pod", "described-whole"])
            .args(["-o", "jsonpath={.metadata.uid}"])
            .output()
            .await?;
        anyhow::ensure!(output.status.success(), "the pod exists");
        Ok(String::from_utf8(output.stdout)?)
    }
}

/// Removes values that differ between any two runs: uids, versions, times and ages. Columns are separated by one space, because their width
/// depends on the ages.
fn same_form(text: &str) -> String {
    let word = |word: &str| -> String {
        let bare = word.trim_matches(|c: char| "\"',()".contains(c));
        let age = bare.len() > 1
            && bare.chars().all(|c| c.is_ascii_digit() || "smhdy".contains(c))
            && bare.starts_with(|c: char| c.is_ascii_digit())
            && bare.ends_with(|c: char| "smhdy".contains(c));
        let uid = bare.len() == 36 && bare.chars().filter(|c| *c == '-').count() == 4;
        let time = bare.parse::<jiff::Timestamp>().is_ok();
        // Temporary directory of `kubectl diff`.
        let place = bare.find("/LIVE-").or_else(|| bare.find("/MERGED-"));
        if let Some((_, file)) = place.and_then(|place| bare[place + 1..].split_once('/')) {
            return word.replace(bare, file);
        }
        match (age, uid, time) {
            (true, _, _) => word.replace(bare, "<age>"),
            (_, true, _) => word.replace(bare, "<uid>"),
            (_, _, true) => word.replace(bare, "<time>"),
            _ => word.to_owned(),
        }
    };
    let mut lines = String::new();
    for line in text.lines() {
        let mut words: Vec<String> = line.split_whitespace().map(word).collect();
        if let [name, version] = words.as_mut_slice()
            && name.to_lowercase().trim_end_matches(':').replace(' ', "") == "resourceversion"
        {
            "<version>".clone_into(version);
        }
        if let ["---" | "+++", _, ..] = words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
            // Removes the modification times of the files.
            words.truncate(2);
        }
        if let [first, second, version] = words.as_mut_slice()
            && first == "Resource"
            && second == "Version:"
        {
            "<version>".clone_into(version);
        }
        let indent = line.len() - line.trim_start().len();
        lines += &" ".repeat(indent);
        lines += &words.join(" ");
        lines.push('\n');
    }
    lines
}

/// A command, in which single quotes keep spaces, and its input.
type Step = (&'static str, &'static str);

fn words(command: &str) -> impl Iterator<Item = &str> {
    let parts = command.split('\'').enumerate();
    parts.flat_map(|(number, part)| match number % 2 {
        0 => part.split_whitespace().collect(),
        _ => vec![part],
    })
}

/// Runs commands on both servers and compares kubectl's output.
fn both(namespace: &'static str, steps: &[Step]) {
    run(async {
        let server = ApiServer::new(Arc::new(ClockAndRng::system()));
        let shutdown = CancellationToken::new();
        let _end = shutdown.clone().drop_guard();
        let address = server.listen(shutdown).await.expect("a port");
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("kubeconfig");
        std::fs::write(&file, kubeconfig(address)).expect("a file");
        let real = real(ClusterMode::Classic).await;
        let kubectl = |kubeconfig: &Path, cache: &str| Kubectl {
            program: real.kubectl_program().to_owned(),
            kubeconfig: kubeconfig.to_owned(),
            cache: directory.path().join(cache),
            namespace,
        };
        let (actual, expected) = (kubectl(&file, "actual"), kubectl(real.kubeconfig(), "expected"));
        let mut differences = Vec::new();
        // Classes have no namespace, and the tests share the real server.
        let class = format!("{namespace}-class");
        for (command, input) in steps {
            let command = command.replace("CLASS", &class).replace("CRDS", CRDS);
            let input = &input.replace("CLASS", &class).replace("NAMESPACE", namespace);
            let compared = command.trim_start_matches(SILENT);
            let actual = actual.run(compared, input).await.expect("kubectl runs");
            let expected = expected.run(compared, input).await.expect("kubectl runs");
            if actual != expected && compared == command {
                differences.push(format!(
                    "--- the test cluster:\n{actual}--- the real server:\n{expected}"
                ));
            }
        }
        assert!(differences.is_empty(), "{}", differences.join("\n"));
    });
}

/// Placeholder for the uid of the pod `described-whole`, which differs between the servers.
const POD_UID: &str = "POD_UID";
const APPLY: &str = "apply -f -";
/// Before a command: the output is not compared, because the tests share the real server.
const SILENT: &str = "(not compared) ";
/// Not through the symbolic link, which kubectl does not follow.
const CRDS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/drayman/crds");

#[test]
fn kubectl_applies_and_deletes_with_the_same_output() {
    both(
        "kubectl-words",
        &[
            (APPLY, NAMESPACE),
            (APPLY, OBJECTS),
            (APPLY, OBJECTS),
            (APPLY, CHANGED),
            ("get configmap map -o jsonpath={.data}", ""),
            ("apply --server-side -f -", CHANGED),
            (APPLY, "kind: ["),
            (APPLY, UNKNOWN),
            ("apply --validate=warn -f -", UNKNOWN),
            ("apply --validate=ignore -f -", UNKNOWN),
            ("apply --dry-run=client -f -", CHANGED),
            (APPLY, "apiVersion: v1\nkind: Unicorn\nmetadata: { name: u }\n"),
            ("delete configmap missing", ""),
            ("delete configmap missing --ignore-not-found", ""),
            ("delete configmap map", ""),
            ("delete --wait=true --timeout=20s -f -", OBJECTS),
            ("get resourceclaims", ""),
        ],
    );
}

#[test]
fn kubectl_gets_and_describes_the_same() {
    both(
        "kubectl-reads",
        &[
            (APPLY, NAMESPACE),
            (APPLY, OBJECTS),
            ("get resourceclaims,resourceclaimtemplates,configmaps/map", ""),
            ("get resourceclasses -l of=CLASS", ""),
            ("get resourceclaims -o wide", ""),
            ("get resourceclaims -o name", ""),
            ("get resourceclaims -l color=blue", ""),
            ("get resourceclaims --show-labels", ""),
            ("get resourceclaim claim -o jsonpath={.spec}", ""),
            ("get resourceclaim missing", ""),
            ("get unicorns", ""),
            ("get namespace kubectl-reads", ""),
            ("describe resourceclaim claim", ""),
            ("describe resourceclaimtemplate template", ""),
            ("describe resourceclass CLASS", ""),
            ("describe configmap map", ""),
            ("describe resourceclaim missing", ""),
        ],
    );
}

#[test]
fn kubectl_waits_the_same() {
    both(
        "kubectl-waits",
        &[
            (APPLY, NAMESPACE),
            (APPLY, OBJECTS),
            (
                "wait --for=jsonpath={.spec.resourceClassName}=CLASS resourceclaim/claim --timeout=20s",
                "",
            ),
            (
                "wait --for=jsonpath={.spec.resourceClassName}=other resourceclaim/claim --timeout=1s",
                "",
            ),
            ("wait --for=delete resourceclaim/missing --timeout=20s", ""),
            (
                "wait --for=condition=Ready resourceclaim/missing --timeout=1s",
                "",
            ),
            ("delete resourceclaim claim --wait=false", ""),
            ("wait --for=delete resourceclaim/claim --timeout=20s", ""),
        ],
    );
}

#[test]
fn kubectl_shows_pods_nodes_leases_and_events_the_same() {
    both(
        "kubectl-shows",
        &[
            (APPLY, NAMESPACE),
            (APPLY, SHOWN),
            ("get node CLASS -o wide", ""),
            (
                "patch node CLASS --subresource=status --type=merge --patch-file=/dev/stdin",
                NODE_STATUS,
            ),
            ("get nodes -l of=CLASS", ""),
            ("get nodes -l of=CLASS -o wide", ""),
            ("get pods", ""),
            ("get pods -o wide", ""),
            ("get pods -A -l of=CLASS", ""),
            ("get pods --field-selector spec.nodeName=CLASS -o name", ""),
            ("get pods --field-selector status.phase!=Pending", ""),
            ("get pods --field-selector spec.colour=red", ""),
            (
                "patch pod bound --subresource=status --type=merge --patch-file=/dev/stdin",
                POD_STATUS,
            ),
            ("wait --for=condition=Ready pod/bound --timeout=20s", ""),
            ("wait --for=condition=Ready pod/waiting --timeout=1s", ""),
            ("get pods -o wide", ""),
            ("get leases", ""),
            ("get events", ""),
            ("get events -o wide", ""),
            (
                "get events --field-selector involvedObject.name=bound -o name",
                "",
            ),
            ("get configmaps --field-selector metadata.name=missing", ""),
            ("delete pod waiting", ""),
            ("delete pod bound --wait=false", ""),
            ("get pods", ""),
            ("delete pod bound --grace-period=0 --force", ""),
            ("get pods", ""),
            ("delete node CLASS", ""),
        ],
    );
}

#[test]
fn kubectl_shows_our_own_kinds_the_same() {
    both(
        "kubectl-ours",
        &[
            ("(not compared) create -f 'CRDS'", ""),
            (
                "(not compared) wait --for=condition=Established --timeout=20s -f 'CRDS'",
                "",
            ),
            (APPLY, NAMESPACE),
            ("apply --dry-run=server -f -", OURS),
            ("create --dry-run=server -f -", NOT_OURS),
            ("get deviceclassparameters -l of=CLASS", ""),
            (APPLY, OURS),
            ("apply --dry-run=server -f -", OURS),
            (APPLY, OURS),
            (APPLY, NOT_OURS),
            ("get nodeinventory CLASS.drayman.dev", ""),
            (
                "patch nodeinventory CLASS.drayman.dev --subresource=status --type=merge --patch-file=/dev/stdin",
                INVENTORY_STATUS,
            ),
            // Commands that the demo suggests.
            ("get nodeinventories,pods,resourceclaims -l of=CLASS", ""),
            ("get nodeinventory CLASS.drayman.dev -o wide", ""),
            ("get nodeinventory CLASS.drayman.dev -o yaml", ""),
            ("get deviceclaimparameters", ""),
            ("get deviceclassparameters -l of=CLASS", ""),
            ("get deviceclaimparameters two -o yaml", ""),
            ("get resourceclaim claim -o yaml", ""),
            ("describe deviceclaimparameters two", ""),
            (
                "wait --for=condition=Ready nodeinventory/CLASS.drayman.dev --timeout=20s",
                "",
            ),
            ("delete --dry-run=server nodeinventory CLASS.drayman.dev", ""),
            ("delete nodeinventory CLASS.drayman.dev", ""),
            ("delete deviceclaimparameters --all", ""),
        ],
    );
}
