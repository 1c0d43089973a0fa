//! The workflows of the public forge, which are not run anywhere else, use existing parts of the repository.

use serde_json::Value;

use crate::commands;
use crate::page::{repository, script};

fn workflow(name: &str) -> Value {
    let path = repository(".github/workflows").join(name);
    serde_saphyr::from_str(&std::fs::read_to_string(path).expect("UTF-8")).expect("YAML")
}

fn steps(workflow: &Value) -> Vec<Value> {
    let jobs = workflow["jobs"].as_object().expect("jobs");
    jobs.values()
        .flat_map(|job| job["steps"].as_array().expect("steps").clone())
        .collect()
}

fn scripts(workflow: &Value) -> Vec<String> {
    let runs = steps(workflow).into_iter();
    runs.filter_map(|step| Some(step["run"].as_str()?.to_owned()))
        .collect()
}

#[test]
fn each_workflow_runs_targets_of_the_makefile() {
    for name in ["ci.yml", "release.yml"] {
        let mut count = 0;
        for words in scripts(&workflow(name))
            .iter()
            .flat_map(|text| commands::commands(text))
        {
            if let Some(make) = words.iter().position(|word| word == "make") {
                count += 1;
                let fault = commands::check_targets(&words[make + 1..]);
                assert_eq!(fault, Ok(()), "{name}: {words:?}");
            }
        }
        assert!(count > 0, "{name} runs no target");
    }
}

#[test]
fn each_action_is_named_by_its_commit() {
    for name in ["ci.yml", "release.yml"] {
        for step in steps(&workflow(name)) {
            let Some(action) = step["uses"].as_str() else {
                continue;
            };
            // A tag can be moved.
            let commit = action.split_once('@').map(|(_, commit)| commit);
            let is_whole = commit.is_some_and(|commit| {
                commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit())
            });
            assert!(is_whole, "{name}: {action}");
        }
    }
}

#[test]
fn the_workflow_of_a_release_pushes_as_the_page_says() {
    let programs = |text: &str| -> Vec<Vec<String>> {
        let found = commands::commands(text).into_iter();
        found
            .filter(|words| ["skopeo", "helm"].contains(&words[0].as_str()))
            .collect()
    };
    let page = script("CONTRIBUTING.md", "sh", "release")
        .replace("registry.example.com/drayman", "$REGISTRY")
        .replace(env!("CARGO_PKG_VERSION"), "$version");
    let pushed = scripts(&workflow("release.yml")).join("\n");
    assert_eq!(programs(&page), programs(&pushed));
}
