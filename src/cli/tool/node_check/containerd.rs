//! Checks whether containerd reads CDI files from the companion's directory.
//!
//! containerd 2 and later reads configuration files of every version, enables CDI by default, and merges sections of
//! one name setting by setting. containerd 1 reads versions 1 and 2, disables CDI by default, and uses the last section
//! of a name unmerged. The effect of a file of version 1 or 2 may therefore depend on containerd's version.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::files::{self, Broken, File, Section, VERSION_1, VERSION_2, VERSION_3};
use crate::cli::diagnose::doctor::Finding;

const CHECK: &str = "cdi";
/// containerd's default CDI directories.
const SPEC_DIRS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// Limit for `containerd --version`.
const PATIENCE: Duration = Duration::from_secs(5);

/// The containerd version that reads the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reader {
    /// containerd 1.
    One,
    /// containerd 2 and later.
    Later,
}

/// Checks containerd's configuration. Calls `major` for containerd's major version only if it matters.
pub(super) fn look(config: &Path, cdi_root: &Path, major: impl FnOnce() -> Option<u32>) -> Vec<Finding> {
    let (read, gone) = match files::read(config) {
        Ok(read) => (read, None),
        // containerd also runs without a configuration file.
        Err(Broken::Unread { path, error }) if path == config && error.kind() == io::ErrorKind::NotFound => {
            (Vec::new(), Some(Broken::Unread { path, error }))
        }
        Err(error) => return vec![broken(&error)],
    };
    let later = judge(&read, cdi_root, Reader::Later);
    if version(&read) >= 3 {
        return later;
    }
    let one = judge(&read, cdi_root, Reader::One);
    if one == later {
        return one;
    }
    match (major(), gone) {
        (Some(0 | 1), _) => one,
        (Some(_), _) => later,
        (None, Some(error)) => vec![elsewhere(&error)],
        (None, None) => both(one, &later),
    }
}

/// Returns the major version of the containerd in the PATH, or `None` after the limit.
pub(super) fn installed() -> Option<u32> {
    let mut command = Command::new("containerd");
    command.arg("--version").stdin(Stdio::null());
    let (answered, answer) = mpsc::channel();
    thread::spawn(move || answered.send(command.output()));
    let output = answer.recv_timeout(PATIENCE).ok()?.ok()?;
    major(&String::from_utf8_lossy(&output.stdout))
}

/// Parses the major version from `containerd --version`, which prints name, package, version and commit.
fn major(printed: &str) -> Option<u32> {
    let version = printed.split_whitespace().nth(2)?;
    let version = version.strip_prefix('v').unwrap_or(version);
    version.split_once('.')?.0.parse().ok()
}

fn broken(error: &Broken) -> Finding {
    match error {
        Broken::Unread { error: cause, .. } if cause.kind() == io::ErrorKind::PermissionDenied => {
            Finding::warning(
                CHECK,
                error.to_string(),
                "ask as root, who reads what containerd reads",
            )
        }
        _ => Finding::problem(
            CHECK,
            error.to_string(),
            "containerd does not start with that, or not its part for Kubernetes: mend it and restart containerd",
        ),
    }
}

fn elsewhere(error: &Broken) -> Finding {
    Finding::warning(
        CHECK,
        error.to_string(),
        "if the runtime is containerd, give its file by --containerd-config; CRI-O has CDI by default",
    )
}

/// Returns the findings common to both readers, and one finding that summarizes the rest.
fn both(one: Vec<Finding>, later: &[Finding]) -> Vec<Finding> {
    let only = |mine: &[Finding], others: &[Finding]| {
        let mine = mine.iter().filter(|finding| !others.contains(finding));
        let messages: Vec<&str> = mine.map(|finding| finding.message.as_str()).collect();
        if messages.is_empty() {
            "all is well".to_owned()
        } else {
            messages.join(", ")
        }
    };
    let message = format!(
        "`containerd --version` does not tell who reads this; containerd 1: {}; containerd 2 and later: {}",
        only(&one, later),
        only(later, &one)
    );
    let (same, differ): (Vec<_>, Vec<_>) = one.into_iter().partition(|finding| later.contains(finding));
    let fix = differ.iter().chain(later).find_map(|finding| finding.fix.clone());
    let warning = Finding {
        fix,
        ..Finding::warning(CHECK, message, "")
    };
    [vec![warning], same].concat()
}

/// Returns the version of the whole configuration: the last one given in any file.
fn version(files: &[File]) -> u32 {
    let mut given = files.iter().rev().filter_map(|file| file.version);
    given.find(|&version| version > 0).unwrap_or(1)
}

/// Returns the effective section names, in order of precedence.
fn names(version: u32, reader: Reader) -> &'static [&'static str] {
    match (version, reader) {
        (0 | 1, Reader::One) => &[VERSION_1],
        (_, Reader::One) => &[VERSION_2],
        (0 | 1, Reader::Later) => &[VERSION_3, VERSION_2, VERSION_1],
        (2, Reader::Later) => &[VERSION_3, VERSION_2],
        (_, Reader::Later) => &[VERSION_3],
    }
}

/// Merges the sections of one name. Also returns the file, if any, whose section discards an earlier
/// `enable_cdi = true`.
fn joined<'a>(files: &'a [File], name: &str, reader: Reader) -> (Section, Option<&'a Path>) {
    let mut joined = Section::default();
    let mut lost = None;
    for (file, section) in files
        .iter()
        .filter_map(|file| Some((file, file.sections.get(name)?)))
    {
        match reader {
            Reader::One => {
                let was_on = joined.enable_cdi == Some(true) || lost.is_some();
                lost = (was_on && section.enable_cdi.is_none()).then_some(file.path.as_path());
                joined = section.clone();
            }
            Reader::Later => {
                joined.enable_cdi = section.enable_cdi.or(joined.enable_cdi);
                joined.spec_dirs = section.spec_dirs.clone().or(joined.spec_dirs);
            }
        }
    }
    (joined, lost)
}

fn judge(files: &[File], cdi_root: &Path, reader: Reader) -> Vec<Finding> {
    let version = version(files);
    let counting = names(version, reader);
    let mut section = Section::default();
    let mut lost = None;
    for name in counting {
        let (found, by) = joined(files, name, reader);
        section.enable_cdi = section.enable_cdi.or(found.enable_cdi);
        section.spec_dirs = section.spec_dirs.or(found.spec_dirs);
        lost = lost.or(by);
    }
    let name = section_name(version);
    let fix = format!("set enable_cdi = true in {name} and restart containerd");
    let is_on = match (section.enable_cdi, reader, lost) {
        (Some(true), ..) => Finding::fine(CHECK, "containerd reads CDI files"),
        (Some(false), ..) => Finding::problem(CHECK, "CDI is switched off in containerd", fix),
        (None, Reader::Later, _) => Finding::fine(CHECK, "containerd 2 and later read CDI files by default"),
        (None, Reader::One, None) => {
            Finding::problem(CHECK, "containerd 1 does not read CDI files by default", fix)
        }
        (None, Reader::One, Some(by)) => Finding::problem(
            CHECK,
            format!(
                "containerd 1 takes {name} of {} alone, where enable_cdi is not",
                by.display()
            ),
            format!("set enable_cdi = true there too, or leave {name} out of it, and restart containerd"),
        ),
    };
    let mut findings = vec![is_on, spec_dirs(section.spec_dirs.as_deref(), cdi_root)];
    findings.extend(misplaced(files, version, counting, &section));
    findings
}

/// Formats the section's header for a configuration version.
fn section_name(version: u32) -> String {
    match version {
        0 | 1 => format!("[plugins.{VERSION_1}]"),
        2 => format!("[plugins.\"{VERSION_2}\"]"),
        _ => format!("[plugins.\"{VERSION_3}\"]"),
    }
}

/// Reports settings that appear only in a section of another version.
fn misplaced(files: &[File], version: u32, counting: &[&str], section: &Section) -> Option<Finding> {
    let of_others = |file: &File| {
        let mut others = file.sections.iter().filter(|(name, _)| !counting.contains(name));
        others.any(|(_, other)| {
            other.enable_cdi.is_some() && section.enable_cdi.is_none()
                || other.spec_dirs.is_some() && section.spec_dirs.is_none()
        })
    };
    let file = files.iter().find(|file| of_others(file))?;
    let name = section_name(version);
    let fix = if version < 2 {
        format!("files without a version are of version 1, where the section is {name}")
    } else {
        format!("in files of version {version} the section is {name}")
    };
    Some(Finding::warning(
        CHECK,
        format!(
            "{} has enable_cdi or cdi_spec_dirs in a section of another version, which not every containerd reads",
            file.path.display()
        ),
        fix,
    ))
}

/// Checks whether containerd's CDI directories include the companion's.
fn spec_dirs(listed: Option<&[String]>, cdi_root: &Path) -> Finding {
    let directories = match listed {
        Some(listed) => listed.to_vec(),
        None => SPEC_DIRS.map(str::to_owned).to_vec(),
    };
    // /var/run is usually a symlink to /run.
    let real = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if directories
        .iter()
        .any(|directory| real(Path::new(directory)) == real(cdi_root))
    {
        return Finding::fine(
            CHECK,
            format!("containerd reads CDI files in {}", cdi_root.display()),
        );
    }
    let directories = if directories.is_empty() {
        "no directory".to_owned()
    } else {
        directories.join(", ")
    };
    Finding::problem(
        CHECK,
        format!(
            "containerd reads CDI files in {directories}, and not in {}, where the companion writes them",
            cdi_root.display()
        ),
        "add the directory to cdi_spec_dirs and restart containerd, or give the companion one of these: --cdi-root, in the chart \
         node.cdiRoot",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::diagnose::doctor::Level;

    const OLD: &str = "[plugins.\"io.containerd.grpc.v1.cri\"]\n";
    const NEW: &str = "[plugins.\"io.containerd.cri.v1.runtime\"]\n";

    /// Returns the findings for a `config.toml` with this content and other files that it may import.
    fn said_of(content: &str, others: &[(&str, &str)], root: &str, major: Option<u32>) -> Vec<Finding> {
        let directory = tempfile::tempdir().unwrap();
        for (name, content) in others.iter().chain(&[("config.toml", content)]) {
            fs::write(directory.path().join(name), content).unwrap();
        }
        look(&directory.path().join("config.toml"), Path::new(root), || major)
    }

    fn worst(findings: &[Finding]) -> Level {
        findings.iter().map(|finding| finding.level).max().unwrap()
    }

    fn level(content: &str, major: Option<u32>) -> Level {
        worst(&said_of(content, &[], "/var/run/cdi", major))
    }

    #[test]
    fn files_of_version_3_and_later_have_cdi_on_unless_they_switch_it_off() {
        for version in [3, 4, 12] {
            let version = format!("version = {version}\n");
            // Only containerd 2 and later reads it, so the version does not matter.
            for (content, expected) in [
                (version.clone(), Level::Fine),
                (format!("{version}{NEW}enable_cdi = true # on"), Level::Fine),
                (format!("{version}{NEW}enable_cdi = false"), Level::Problem),
            ] {
                assert_eq!(level(&content, Some(1)), expected, "{content}");
                assert_eq!(level(&content, None), expected, "{content}");
            }
        }
    }

    #[test]
    fn older_files_are_judged_by_who_reads_them() {
        for content in [
            "",
            "version = 1\n",
            "version = 2\n",
            "version = 2 # of old\n[plugins]\n",
        ] {
            assert_eq!(level(content, Some(1)), Level::Problem, "{content}");
            assert_eq!(level(content, Some(2)), Level::Fine, "{content}");
            assert_eq!(level(content, Some(3)), Level::Fine, "{content}");
            let unknown = said_of(content, &[], "/var/run/cdi", None);
            assert_eq!(worst(&unknown), Level::Warning, "{content}");
            let told = unknown
                .iter()
                .find(|finding| finding.level == Level::Warning)
                .unwrap();
            for part in ["containerd 1 does not read", "containerd 2 and later read"] {
                assert!(told.message.contains(part), "{told:?}");
            }
            assert!(
                told.fix.as_ref().unwrap().contains("enable_cdi = true"),
                "{told:?}"
            );
        }
        let old = format!("version = 2\n{OLD}enable_cdi");
        for major in [Some(1), Some(2), None] {
            assert_eq!(level(&format!("{old} = true # comment"), major), Level::Fine);
            assert_eq!(level(&format!("{old} = false"), major), Level::Problem);
            assert_eq!(level("[plugins.cri]\nenable_cdi = true", major), Level::Fine);
            // The new section takes precedence if containerd reads both.
            let new = format!("{old} = true\n{NEW}enable_cdi = false");
            assert_eq!(level(&new, Some(2)), Level::Problem);
            assert_eq!(level(&new, Some(1)), Level::Fine);
        }
    }

    #[test]
    fn nothing_is_asked_if_every_containerd_reads_the_same() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("config.toml");
        for content in [
            "version = 3",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true",
        ] {
            fs::write(&file, content).unwrap();
            look(&file, Path::new("/etc/cdi"), || panic!("asked"));
        }
    }

    #[test]
    fn a_section_of_another_version_is_told() {
        // The default version is 1, and containerd 1 does not know this section.
        let unversioned = said_of(&format!("{OLD}enable_cdi = true"), &[], "/etc/cdi", Some(1));
        assert_eq!(worst(&unversioned), Level::Problem);
        let told = |findings: &[Finding]| {
            let mut warnings = findings.iter().filter(|finding| finding.level == Level::Warning);
            warnings.any(|finding| finding.message.contains("another version"))
        };
        assert!(told(&unversioned), "{unversioned:?}");
        let of_3 = said_of(
            &format!("version = 3\n{OLD}enable_cdi = false"),
            &[],
            "/etc/cdi",
            None,
        );
        assert_eq!(worst(&of_3), Level::Warning);
        assert!(told(&of_3), "{of_3:?}");
        // Both sections together are valid.
        let content = format!("version = 3\n{OLD}enable_cdi = true\n{NEW}enable_cdi = true");
        assert_eq!(level(&content, None), Level::Fine);
    }

    #[test]
    fn what_is_imported_later_counts_and_containerd_1_takes_sections_as_a_whole() {
        let main = format!("version = 2\nimports = ['*.drop']\n{OLD}enable_cdi = true\n");
        let said = |drops: &[(&str, &str)], major| said_of(&main, drops, "/var/run/cdi", major);
        let off = format!("{OLD}enable_cdi = false\n");
        assert_eq!(worst(&said(&[("1.drop", &off)], Some(2))), Level::Problem);
        let on = format!("{OLD}enable_cdi = true\n");
        assert_eq!(
            worst(&said(&[("1.drop", &off), ("2.drop", &on)], Some(1))),
            Level::Fine
        );
        let another = format!("{OLD}sandbox_image = 'pause'\n");
        let drops = [("1.drop", another.as_str())];
        assert_eq!(worst(&said(&drops, Some(2))), Level::Fine);
        let lost = said(&drops, Some(1));
        assert_eq!(worst(&lost), Level::Problem);
        assert!(lost[0].message.contains("1.drop alone"), "{lost:?}");
        // The last file with a version determines the version.
        assert_eq!(
            worst(&said(&[("1.drop", "version = 3")], Some(2))),
            Level::Warning
        );
    }

    #[test]
    fn a_file_that_is_broken_is_told_and_a_bad_value_too() {
        for content in [
            "version = 2\n[",
            "version = 2\n[plugins.cri]\nenable_cdi = 'yes'",
            "imports = ['gone.toml']",
        ] {
            let findings = said_of(content, &[], "/etc/cdi", Some(2));
            assert_eq!(findings.len(), 1);
            assert_eq!(findings[0].level, Level::Problem, "{content}");
        }
        let bad = said_of("\n\nversion = 'two'", &[], "/etc/cdi", Some(2));
        assert!(
            bad[0]
                .message
                .ends_with("config.toml, line 3: version must be a number"),
            "{bad:?}"
        );
    }

    #[test]
    fn containerd_needs_no_file() {
        let judge = |major| look(Path::new("/nowhere/config.toml"), Path::new("/etc/cdi"), || major);
        assert_eq!(worst(&judge(Some(2))), Level::Fine);
        assert_eq!(worst(&judge(Some(1))), Level::Problem);
        let unknown = judge(None);
        assert_eq!(worst(&unknown), Level::Warning);
        assert!(unknown[0].message.contains("/nowhere/config.toml"), "{unknown:?}");
        assert!(unknown[0].fix.as_ref().unwrap().contains("CRI-O"), "{unknown:?}");
    }

    #[test]
    fn the_runtime_must_read_cdi_files_where_they_are_written() {
        let judge = |text: &str, root: &str| worst(&said_of(text, &[], root, Some(2)));
        assert_eq!(judge("version = 3\n", "/etc/cdi"), Level::Fine);
        assert_eq!(judge("version = 3\n", "/opt/cdi"), Level::Problem);
        let listed = format!("version = 3\n{NEW}cdi_spec_dirs = [\n '/opt/cdi', # ours\n '/srv/cdi',\n]\n");
        assert_eq!(judge(&listed, "/srv/cdi"), Level::Fine);
        assert_eq!(judge(&listed, "/var/run/cdi"), Level::Problem);
        let none = format!("version = 3\n{NEW}cdi_spec_dirs = []\n");
        assert_eq!(judge(&none, "/etc/cdi"), Level::Problem);
    }

    #[test]
    fn containerd_s_version_is_read_as_each_distribution_prints_it() {
        for (printed, expected) in [
            (
                "containerd github.com/containerd/containerd v1.7.27 05044ec0a9a7\n",
                Some(1),
            ),
            (
                "containerd github.com/containerd/containerd/v2 v2.0.0 207ad711\n",
                Some(2),
            ),
            ("containerd containerd.io 1.7.27 05044ec0a9a7\n", Some(1)),
            (
                "containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+b1\n",
                Some(1),
            ),
            (
                "containerd github.com/containerd/containerd/v2 2.1.0+unknown \n",
                Some(2),
            ),
            ("containerd: unknown\n", None),
            ("", None),
        ] {
            assert_eq!(major(printed), expected, "{printed}");
        }
    }
}
