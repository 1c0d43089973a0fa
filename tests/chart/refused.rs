//! Combinations that cannot work are refused with one sentence that says the way out.

use crate::chart::{chart, refusal, template};

const KIND: [&str; 2] = [
    "--set=deviceKinds[0].name=a",
    "--set=deviceKinds[0].paths[0]=/dev/a",
];

#[test]
fn a_combination_that_cannot_work_is_refused_with_one_sentence() {
    let with_kind = |more: &[&'static str]| [&KIND[..], more].concat();
    let cases: Vec<(Vec<&str>, &str, &str)> = vec![
        (
            vec!["--set=controller.enabled=false", "--set=node.enabled=false"],
            "nothing to install",
            "enable one",
        ),
        (
            vec!["--namespace", "default"],
            "The namespace default",
            "allowDefaultNamespace=true",
        ),
        (
            vec![
                "--set=controller.replicas=2",
                "--set=controller.leaderElection.enabled=false",
            ],
            "controller.replicas is 2 without controller.leaderElection.enabled",
            "controller.replicas=1",
        ),
        (
            with_kind(&[
                "--set=controller.enabled=false",
                "--set=classes[0].name=a",
                "--set=classes[0].kind=a",
            ]),
            "nobody would allocate their claims",
            "enable the controller",
        ),
        (
            vec!["--set=controller.enabled=false", "--set=tests.className=a"],
            "tests.className is set, but controller.enabled is false",
            "remove tests.className",
        ),
        (
            vec!["--set=node.serviceAccount.create=false"],
            "node.serviceAccount.create is false and node.serviceAccount.name is empty",
            "say whose rights",
        ),
        (
            vec!["--set=controller.serviceAccount.create=false"],
            "controller.serviceAccount.create is false",
            "say whose rights",
        ),
        (
            vec![
                "--set=controller.serviceAccount.name=x",
                "--set=node.serviceAccount.name=x",
            ],
            "would give every node the rights of the controller",
            "give each its own",
        ),
        (
            with_kind(&[
                "--set=deviceKinds[1].name=a",
                "--set=deviceKinds[1].paths[0]=/dev/b",
            ]),
            "two entries with the name a",
            "give each kind its own name",
        ),
        (
            vec![
                "--set-json=deviceKinds=[{\"name\":\"a\",\"mode\":\"extended-resource\",\"resourceName\":\"example.com/x\",\"paths\":[\"/dev/a\"]},{\"name\":\"b\",\"mode\":\"extended-resource\",\"resourceName\":\"example.com/x\",\"paths\":[\"/dev/b\"]}]",
            ],
            "two entries with the resourceName example.com/x",
            "put all paths of a resource into one kind",
        ),
        (
            with_kind(&[
                "--set=classes[0].name=c",
                "--set=classes[0].kind=a",
                "--set=classes[1].name=c",
                "--set=classes[1].kind=a",
            ]),
            "classes has two entries with the name c",
            "give each class its own name",
        ),
        (
            with_kind(&["--set=classes[0].name=c", "--set=classes[0].kind=b"]),
            "The class c is of kind b, which deviceKinds does not describe",
            "add the kind",
        ),
        (
            vec![
                "--set-json=deviceKinds=[{\"name\":\"a\",\"mode\":\"extended-resource\",\"resourceName\":\"example.com/x\",\"paths\":[\"/dev/a\"]}]",
                "--set=classes[0].name=c",
                "--set=classes[0].kind=a",
            ],
            "whose mode is extended-resource",
            "set the kind's mode to claims",
        ),
        (
            with_kind(&["--set=deviceKinds[0].health.open=read"]),
            "a companion without privileges cannot open devices",
            "set node.privileged=true",
        ),
        (
            vec![
                "--set=deviceKinds[0].preset=kvm",
                "--set=deviceKinds[1].name=kvm",
                "--set=deviceKinds[1].paths[0]=/dev/b",
            ],
            "two entries with the name kvm",
            "give each kind its own name",
        ),
        (
            vec!["--set=admissionPolicy.enabled=always", "--kube-version", "1.29.9"],
            "Kubernetes v1.29.9 lacks ValidatingAdmissionPolicy",
            "set it to auto",
        ),
    ];
    for (arguments, cause, way_out) in cases {
        let said = refusal(None, &arguments);
        let sentence = said
            .split_once("validation.yaml:")
            .unwrap_or_else(|| panic!("{arguments:?} is refused by something else: {said}"))
            .1
            // Helm's own advice follows.
            .split("

Use --debug")
            .next()
            .unwrap_or_default();
        assert!(
            sentence.contains(cause) && sentence.contains(way_out),
            "{arguments:?}: {said}"
        );
        assert_eq!(sentence.trim_end().lines().count(), 1, "one sentence: {said}");
        assert!(sentence.trim_end().ends_with('.'), "{said}");
    }
}

#[test]
fn what_the_server_cannot_do_is_refused_if_it_is_demanded() {
    // Helm without a cluster says that it has all API groups that Helm knows, so the version has to say it.
    let output = template(None, &["--kube-version", "1.26.0"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("kubeVersion"), "{said}");
    let fine = template(
        Some(&chart("ci/one-kind-values.yaml")),
        &["--kube-version", "1.30.4-gke.1348000"],
    );
    assert!(fine.status.success(), "{}", String::from_utf8_lossy(&fine.stderr));
}
