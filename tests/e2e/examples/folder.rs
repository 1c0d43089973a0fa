//! A folder of `examples/`: its objects, and the commands in its README.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};

/// A command and its expected output.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// Line in the README.
    pub(crate) line: usize,
    pub(crate) command: String,
    pub(crate) expected: Vec<String>,
}

/// A complete folder.
#[derive(Debug)]
pub(crate) struct Folder {
    pub(crate) name: String,
    pub(crate) steps: Vec<Step>,
}

/// The folder for clusters with `resource.k8s.io/v1`; the others are for `resource.k8s.io/v1alpha2`.
const STRUCTURED: &str = "structured";

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples")
}

/// The folder of structured mode.
pub(crate) fn structured_folder() -> anyhow::Result<Folder> {
    read(&examples().join(STRUCTURED))
}

/// All folders of classic mode, by name.
pub(crate) fn folders() -> anyhow::Result<Vec<Folder>> {
    let mut folders = Vec::new();
    for entry in std::fs::read_dir(examples())? {
        let path = entry?.path();
        if path.is_dir() {
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if name == STRUCTURED {
                continue;
            }
            folders.push(read(&path).with_context(|| format!("examples/{name}"))?);
        }
    }
    folders.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(folders)
}

fn read(path: &Path) -> anyhow::Result<Folder> {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let text = std::fs::read_to_string(path.join("README.md")).context("README.md")?;
    let steps = steps(&text)?;
    ensure!(
        !steps.is_empty(),
        "its README has no ```console block with commands"
    );
    let mut objects = 0;
    for entry in std::fs::read_dir(path)? {
        let file = entry?.file_name().to_string_lossy().into_owned();
        if Path::new(&file)
            .extension()
            .is_none_or(|extension| extension != "yaml")
        {
            continue;
        }
        objects += 1;
        let named = format!("-f examples/{name}/{file}");
        let used = steps.iter().any(|step| {
            let command = format!("{} ", step.command);
            command.starts_with("kubectl apply")
                && (command.contains(&named) || command.contains(&format!("-f examples/{name} ")))
        });
        ensure!(used, "no command of its README applies {file}");
    }
    ensure!(objects > 0, "it has no objects");
    Ok(Folder { name, steps })
}

/// The commands in ```` ```console ```` blocks, each with the following lines of output.
fn steps(text: &str) -> anyhow::Result<Vec<Step>> {
    let mut steps: Vec<Step> = Vec::new();
    let mut within = false;
    let mut fresh = false;
    for (index, line) in text.lines().enumerate() {
        match (within, line) {
            (false, "```console") => (within, fresh) = (true, true),
            (true, "```") => within = false,
            (true, line) => {
                if let Some(command) = line.strip_prefix("$ ") {
                    fresh = false;
                    steps.push(Step {
                        line: index + 1,
                        command: command.to_owned(),
                        expected: Vec::new(),
                    });
                } else if let Some(step) = steps.last_mut().filter(|_| !fresh) {
                    step.expected.push(line.to_owned());
                } else {
                    bail!("line {}: a block begins without a command", index + 1);
                }
            }
            (false, _) => {}
        }
    }
    ensure!(!within, "a block has no end");
    Ok(steps)
}

#[test]
fn every_folder_is_complete_and_in_the_table() -> anyhow::Result<()> {
    let table = std::fs::read_to_string(examples().join("README.md"))?;
    let mut folders = folders()?;
    folders.push(structured_folder()?);
    for folder in &folders {
        let name = &folder.name;
        ensure!(
            table.contains(&format!("| [{name}]({name}) | ")),
            "examples/README.md does not list {name}"
        );
    }
    let rows = table.lines().filter(|line| line.starts_with("| ["));
    assert_eq!(rows.count(), folders.len(), "the table lists a missing folder");
    Ok(())
}

#[test]
fn commands_are_distinguished_from_their_output() -> anyhow::Result<()> {
    let text = "# A\n\n```sh\nnot this\n```\n```console\n$ a | b\none\n  two\n$ c\n```\n";
    let step = |line, command: &str, expected: &[&str]| Step {
        line,
        command: command.to_owned(),
        expected: expected.iter().map(|&line| line.to_owned()).collect(),
    };
    assert_eq!(
        steps(text)?,
        [step(7, "a | b", &["one", "  two"]), step(10, "c", &[])]
    );
    assert!(steps("```console\nfirst\n$ a\n```\n").is_err());
    assert!(steps("```console\n$ a\n").is_err());
    Ok(())
}
