//! Checks the commands of the pages: every word that can be checked without running them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::names;
use crate::page::{Block, Page, pages, repository};

/// Other programs that pages may run; their arguments are not checked.
const OTHERS: [&str; 20] = [
    "cat", "cd", "chmod", "cp", "ctr", "docker", "export", "git", "go", "grep", "install", "kind", "ln",
    "podman", "rm", "rustup", "scp", "skopeo", "tail", "true",
];

/// Flags of other programs in sentences.
const FOREIGN_FLAGS: [&str; 23] = [
    "--api-versions",
    "--dry-run",
    "--feature-gates",
    "--force",
    "--image",
    "--kube-api-qps",
    "--load",
    "--locked",
    "--no-default-features",
    "--node-monitor-grace-period",
    "--platform",
    "--preserve-digests",
    "--program",
    "--request-timeout",
    "--root-dir",
    "--runtime-config",
    "--set",
    "--service-accounts",
    "--skip-crds",
    "--test",
    "--validate",
    "--wait",
    "--hook",
];

/// The words of a command, without leading assignments and redirections.
pub(crate) type Words = Vec<String>;

/// The commands of a script in order, without the bodies of here-documents.
pub(crate) fn commands(script: &str) -> Vec<Words> {
    let mut commands = Vec::new();
    let mut lines = script.lines();
    while let Some(line) = lines.next() {
        let mut line = line.to_owned();
        while let Some(begun) = line.strip_suffix('\\') {
            line = format!("{begun} {}", lines.next().unwrap_or_default());
        }
        let words = shlex::split(&line).unwrap_or_else(|| panic!("a quotation is not closed: {line}"));
        let end = words.iter().find_map(|word| {
            let word = word.strip_prefix("<<")?;
            Some(word.trim_matches(['\'', '"']).to_owned())
        });
        if let Some(end) = end {
            assert!(lines.by_ref().any(|line| line == end), "<<{end} has no end");
        }
        let parts = words.split(|word| ["|", "||", "&&", ";", "&"].contains(&word.as_str()));
        commands.extend(parts.map(plain).filter(|words| !words.is_empty()));
    }
    commands
}

fn plain(words: &[String]) -> Words {
    let is_assignment = |word: &&String| {
        word.split_once('=').is_some_and(|(name, _)| {
            !name.is_empty() && name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_')
        })
    };
    let mut plain = Vec::new();
    let mut words = words.iter().skip_while(is_assignment);
    while let Some(word) = words.next() {
        if word.starts_with(['<', '>']) || word.starts_with("2>") {
            // `> file`: the file is the next word.
            if [">", ">>", "<", "2>"].contains(&word.as_str()) {
                words.next();
            }
        } else {
            plain.push(word.clone());
        }
    }
    plain
}

/// The arguments of drayman if the command runs it, directly or through cargo or kubectl.
fn of_drayman(words: &[String]) -> Option<Vec<String>> {
    let rest = match words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["cargo", "run", ..] => {
            let start = words.iter().position(|word| word == "--")?;
            &words[start + 1..]
        }
        ["kubectl", "drayman", ..] => &words[2..],
        [program, ..]
            if Path::new(program)
                .file_name()
                .is_some_and(|name| name == "drayman") =>
        {
            &words[1..]
        }
        _ => return None,
    };
    Some([&["drayman".to_owned()], rest].concat())
}

fn check_path(path: &str, made: &BTreeSet<String>) -> Result<(), String> {
    if made.contains(path) || path == "-" || path.starts_with("target/") || repository(path).exists() {
        return Ok(());
    }
    Err(format!(
        "{path} is neither in the repository, nor made on the page, nor built"
    ))
}

/// Values of the flags, as `FLAG VALUE` or `FLAG=VALUE`.
fn values<'a>(words: &'a [String], flags: &'a [&str]) -> impl Iterator<Item = &'a str> {
    words.iter().enumerate().filter_map(move |(index, word)| {
        let (flag, value) = word
            .split_once('=')
            .map_or((word.as_str(), None), |(flag, value)| (flag, Some(value)));
        if !flags.contains(&flag) {
            return None;
        }
        value.or_else(|| words.get(index + 1).map(String::as_str))
    })
}

fn check(words: &[String], made: &BTreeSet<String>) -> Result<(), String> {
    if let Some(arguments) = of_drayman(words) {
        return drayman::cli::command()
            .try_get_matches_from(arguments)
            .map(drop)
            .or_else(|refusal| {
                if refusal.use_stderr() {
                    Err(refusal.to_string())
                } else {
                    Ok(())
                }
            });
    }
    let (program, arguments) = words.split_first().ok_or("no words")?;
    match program.as_str() {
        "make" => check_targets(arguments),
        "cargo" => check_cargo(arguments),
        "helm" => {
            values(arguments, &["--values", "-f"]).try_for_each(|path| check_path(path, made))?;
            values(arguments, &["--set"]).try_for_each(check_value)?;
            let chart = arguments
                .iter()
                .find(|word| word.contains('/') && !word.starts_with('-') && !word.contains('='));
            chart.map_or(Ok(()), |path| check_path(path, made))
        }
        "kubectl" => {
            values(arguments, &["-f", "--filename", "-k"]).try_for_each(|path| check_path(path, made))
        }
        // These run the command in their arguments.
        "xargs" | "sudo" => check(arguments, made),
        path if path.contains('/') => check_path(path, made),
        other if OTHERS.contains(&other) => Ok(()),
        other => Err(format!(
            "{other} is a program that the tests do not know: see OTHERS in tests/docs/commands.rs"
        )),
    }
}

pub(crate) fn check_targets(arguments: &[String]) -> Result<(), String> {
    let makefile = std::fs::read_to_string(repository("Makefile")).expect("the Makefile");
    arguments
        .iter()
        .filter(|word| !word.contains('='))
        .try_for_each(|target| {
            let rule = format!("{target}:");
            makefile
                .lines()
                .any(|line| line.starts_with(&rule))
                .then_some(())
                .ok_or_else(|| format!("make has no target {target}"))
        })
}

fn check_cargo(arguments: &[String]) -> Result<(), String> {
    let own = arguments.split(|word| word == "--").next().unwrap_or_default();
    let [command, rest @ ..] = own else {
        return Err("cargo without a command".to_owned());
    };
    // A word in capitals is a placeholder.
    let stands_for = |word: &str| word.bytes().all(|byte| byte.is_ascii_uppercase());
    for name in values(rest, &["--test", "--bench"]).filter(|name| !stands_for(name)) {
        let places = [
            format!("tests/{name}.rs"),
            format!("tests/{name}/main.rs"),
            format!("benches/{name}.rs"),
            format!("benches/{name}/main.rs"),
        ];
        if !places.iter().any(|path| repository(path).exists()) {
            return Err(format!("there is no {name}"));
        }
    }
    if command != "test" {
        return ["bench", "build", "clippy", "doc", "fmt", "install"]
            .contains(&command.as_str())
            .then_some(())
            .ok_or_else(|| format!("cargo {command}"));
    }
    let flags_with_values = ["--test", "--bench", "--features"];
    let mut words = rest.iter();
    while let Some(word) = words.next() {
        if flags_with_values.contains(&word.as_str()) {
            words.next();
        } else if !word.starts_with('-') {
            let path = |test: &names::Test| test.path().contains(word.trim_start_matches("::"));
            if !names::tests().iter().any(path) {
                return Err(format!("no test has {word} in its name"));
            }
        }
    }
    Ok(())
}

/// A chart value that is set: `a.b[0].c=d`.
fn check_value(setting: &str) -> Result<(), String> {
    let (path, _) = setting
        .split_once('=')
        .ok_or_else(|| format!("--set {setting}"))?;
    let text = std::fs::read_to_string(repository("charts/drayman/values.yaml")).expect("the values");
    let values: serde_json::Value = serde_saphyr::from_str(&text).expect("YAML");
    let mut at = &values;
    for name in path.split('.') {
        let (name, is_list) = name
            .split_once('[')
            .map_or((name, false), |(name, _)| (name, true));
        at = at
            .get(name)
            .ok_or_else(|| format!("the chart has no value {path}"))?;
        // Helm checks entries of lists, and of maps that are empty by default, by the schema.
        if is_list || at.as_object().is_some_and(serde_json::Map::is_empty) {
            return Ok(());
        }
    }
    Ok(())
}

/// Files that a script creates: `cat >values.yaml <<EOF`.
fn made(script: &str) -> impl Iterator<Item = String> + '_ {
    script
        .lines()
        .filter(|line| line.contains("<<"))
        .filter_map(|line| line.split_once('>'))
        .filter_map(|(_, rest)| rest.split_whitespace().next().map(str::to_owned))
}

fn scripts() -> Vec<Block> {
    pages()
        .into_iter()
        .flat_map(|page| page.blocks)
        .filter(|block| block.language == "sh")
        .collect()
}

#[test]
fn every_command_in_the_pages_names_existing_things() {
    let (mut count, mut faults) = (0, Vec::new());
    let pages = pages();
    let scripts = |page: &Page| {
        let blocks = page.blocks.clone().into_iter();
        blocks.filter(|block| block.language == "sh")
    };
    // The pages of a folder are read in order.
    let mut files: BTreeMap<Option<&Path>, BTreeSet<String>> = BTreeMap::new();
    for page in &pages {
        let made_here: Vec<String> = scripts(page)
            .flat_map(|block| made(&block.text).collect::<Vec<_>>())
            .collect();
        files.entry(page.path.parent()).or_default().extend(made_here);
    }
    for page in &pages {
        for block in scripts(page) {
            for words in commands(&block.text) {
                count += 1;
                if let Err(fault) = check(&words, &files[&page.path.parent()]) {
                    faults.push(format!("{}: {}: {fault}", block.place, words.join(" ")));
                }
            }
        }
    }
    assert!(faults.is_empty(), "\n  {}", faults.join("\n  "));
    assert!(count > 40, "{count} commands were found");
}

#[test]
fn a_shell_can_read_every_script() {
    for block in scripts() {
        let output = Command::new("bash")
            .args(["-n", "-c", &block.text])
            .stdin(Stdio::null())
            .output()
            .expect("bash");
        assert!(
            output.status.success(),
            "{}: {}",
            block.place,
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

/// All flags of a command and its subcommands.
fn flags(command: &clap::Command, found: &mut BTreeSet<String>) {
    found.extend(
        command
            .get_arguments()
            .filter_map(clap::Arg::get_long)
            .map(|name| format!("--{name}")),
    );
    for below in command.get_subcommands() {
        flags(below, found);
    }
}

/// Checks commands and flags in a sentence, such as `drayman node release --force UID`.
fn check_mention(words: &[&str]) -> Result<(), String> {
    let command = &drayman::cli::command();
    let mut at = command;
    let mut known: BTreeSet<String> = ["--help".to_owned(), "--version".to_owned()].into();
    for word in words {
        if let Some(below) = at.get_subcommands().find(|below| below.get_name() == *word) {
            at = below;
        } else if std::ptr::eq(at, command) && !word.starts_with('-') {
            return Err(format!("there is no drayman {word}"));
        }
        known.extend(
            at.get_arguments()
                .filter_map(clap::Arg::get_long)
                .map(|name| format!("--{name}")),
        );
        if word.starts_with("--") && !known.contains(word.split('=').next().unwrap_or_default()) {
            return Err(format!("{} has no {word}", at.get_name()));
        }
    }
    Ok(())
}

#[test]
fn every_command_and_flag_within_a_sentence_exists() {
    let mut known: BTreeSet<String> = FOREIGN_FLAGS.map(str::to_owned).into();
    flags(&drayman::cli::command(), &mut known);
    known.extend(["--help", "--version"].map(str::to_owned));
    let (mut count, mut faults) = (0, Vec::new());
    for page in pages().iter().filter(|page| !page.path.starts_with("tests")) {
        for span in &page.spans {
            let words = span.text.split_whitespace().take_while(|word| *word != "|");
            let words: Vec<&str> = words.collect();
            let fault = match words.as_slice() {
                ["drayman", rest @ ..] if !rest.is_empty() => check_mention(rest).err(),
                [flag, ..] if flag.starts_with("--") => {
                    let flag = flag.split('=').next().unwrap_or_default();
                    (!known.contains(flag))
                        .then(|| format!("{flag} is no flag of drayman, nor in FOREIGN_FLAGS"))
                }
                _ => continue,
            };
            count += 1;
            faults.extend(fault.map(|fault| format!("{}: {}: {fault}", span.place, span.text)));
        }
    }
    assert!(faults.is_empty(), "\n  {}", faults.join("\n  "));
    assert!(count > 50, "{count} were found");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(script: &str) -> Option<String> {
        let made = made(script).collect();
        commands(script)
            .iter()
            .find_map(|words| check(words, &made).err())
    }

    #[test]
    fn valid_commands_pass() {
        for script in [
            "make check # before",
            "cargo run -- devices -o json",
            "kubectl drayman explain pod/radio | grep -v x",
            "A=1 cargo test --test docs core_and -- --nocapture",
            "cat >v.yaml <<EOF\nnonsense here\nEOF\nhelm install a charts/drayman --values v.yaml --set driverName=a \\\n  --wait",
            "drayman --help",
        ] {
            assert_eq!(fault(script), None, "{script}");
        }
    }

    #[test]
    fn each_word_without_a_target_is_found() {
        for (script, word) in [
            ("make nothing", "nothing"),
            ("drayman devices --colour", "--colour"),
            ("drayman gadgets", "gadgets"),
            ("cargo run --locked -- who", "DEVICE"),
            ("cargo test --test nowhere", "nowhere"),
            ("cargo test --lib no_such_test", "no_such_test"),
            ("helm install a charts/other", "charts/other"),
            ("helm install a charts/drayman --set driver=a", "driver"),
            ("helm install a charts/drayman --values w.yaml", "w.yaml"),
            ("kubectl apply -f examples/none", "examples/none"),
            ("hack/none", "hack/none"),
            ("frobnicate", "frobnicate"),
            ("true && make nothing", "nothing"),
        ] {
            assert!(
                fault(script).is_some_and(|fault| fault.contains(word)),
                "{script}"
            );
        }
    }
}
