//! Reads the CDI settings of containerd's configuration: the file and its imports.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Section of the plugin that reads CDI files, in version 1.
pub(super) const VERSION_1: &str = "cri";
/// The same in version 2.
pub(super) const VERSION_2: &str = "io.containerd.grpc.v1.cri";
/// The same in version 3 and later.
pub(super) const VERSION_3: &str = "io.containerd.cri.v1.runtime";

/// Contents of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct File {
    /// Path of the file.
    pub(super) path: PathBuf,
    /// Configuration version; 1 if absent.
    pub(super) version: Option<u32>,
    /// Sections of the plugin that reads CDI files, by name.
    pub(super) sections: BTreeMap<&'static str, Section>,
    imports: Vec<String>,
}

/// Settings of a section.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Section {
    /// Whether containerd reads CDI files.
    pub(super) enable_cdi: Option<bool>,
    /// Directories of CDI files.
    pub(super) spec_dirs: Option<Vec<String>>,
}

/// Why a configuration cannot be checked.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    /// A file cannot be read.
    #[error("{}: {error}", path.display())]
    Unread {
        /// Path of the file.
        path: PathBuf,
        error: io::Error,
    },
    /// containerd rejects the file's content.
    #[error("{}, line {line}: {cause}", path.display())]
    Wrong {
        path: PathBuf,
        /// Line number, counted from 1.
        line: usize,
        cause: String,
    },
}

/// Reads a file and its imports in containerd's order: each file before its imports, each file once.
pub(super) fn read(path: &Path) -> Result<Vec<File>, Broken> {
    let mut seen = BTreeSet::new();
    let mut files = Vec::new();
    let mut pending = VecDeque::from([clean(path)]);
    while let Some(path) = pending.pop_front() {
        if !seen.insert(path.clone()) {
            continue;
        }
        let text = fs::read_to_string(&path).map_err(|error| Broken::Unread {
            path: path.clone(),
            error,
        })?;
        let file = parse(&path, &text)?;
        let directory = path.parent().unwrap_or(&path);
        for import in &file.imports {
            pending.extend(found(directory, import)?);
        }
        files.push(file);
    }
    Ok(files)
}

/// Resolves an import: a path or, with an asterisk, a pattern. Relative imports start at the importing file's
/// directory.
fn found(directory: &Path, import: &str) -> Result<Vec<PathBuf>, Broken> {
    let path = clean(&directory.join(import));
    let Some(pattern) = path.to_str().filter(|path| path.contains('*')) else {
        return Ok(vec![path]);
    };
    let mut pattern = pattern.to_owned();
    // In containerd's patterns, an asterisk never matches a slash, and `**` equals `*`.
    while pattern.contains("**") {
        pattern = pattern.replace("**", "*");
    }
    let Ok(paths) = glob::glob(&pattern) else {
        return Ok(Vec::new());
    };
    // containerd skips directories that it cannot list. It runs as root, so it has none; this process may not, so the
    // error is reported.
    let unread = |error: glob::GlobError| Broken::Unread {
        path: error.path().to_owned(),
        error: error.into(),
    };
    paths.map(|path| path.map_err(unread)).collect()
}

/// Normalizes a path lexically, so that no file is read twice under different names.
fn clean(path: &Path) -> PathBuf {
    let mut cleaned = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                cleaned.pop();
            }
            other => cleaned.push(other),
        }
    }
    cleaned
}

/// Byte range of an error in the text, and its cause.
type Wrong = (Range<usize>, String);

fn parse(path: &Path, text: &str) -> Result<File, Broken> {
    let parsed = DeTable::parse(text).map_err(|error| {
        let cause = format!("not TOML: {}", error.message());
        (error.span().unwrap_or_default(), cause)
    });
    let file = parsed.and_then(|table| understood(path, table.get_ref()));
    file.map_err(|(place, cause)| Broken::Wrong {
        path: path.to_owned(),
        line: 1 + text
            .bytes()
            .take(place.start)
            .filter(|&byte| byte == b'\n')
            .count(),
        cause,
    })
}

fn understood(path: &Path, table: &DeTable<'_>) -> Result<File, Wrong> {
    let mut file = File {
        path: path.to_owned(),
        ..File::default()
    };
    if let Some(value) = table.get("version") {
        let number = value.get_ref().as_integer();
        let number = number.and_then(|number| u32::from_str_radix(number.as_str(), number.radix()).ok());
        file.version = Some(number.ok_or_else(|| wrong("version", "a number", value))?);
    }
    if let Some(value) = table.get("imports") {
        file.imports = strings("imports", value)?;
    }
    let Some(plugins) = table.get("plugins") else {
        return Ok(file);
    };
    let plugins = as_table("plugins", plugins)?;
    for name in [VERSION_1, VERSION_2, VERSION_3] {
        let Some(section) = plugins.get(name) else {
            continue;
        };
        let section = as_table(name, section)?;
        let (on, directories) = (section.get("enable_cdi"), section.get("cdi_spec_dirs"));
        let boolean = |value: &Spanned<DeValue<'_>>| {
            let boolean = value.get_ref().as_bool();
            boolean.ok_or_else(|| wrong("enable_cdi", "true or false", value))
        };
        let read = Section {
            enable_cdi: on.map(boolean).transpose()?,
            spec_dirs: directories
                .map(|value| strings("cdi_spec_dirs", value))
                .transpose()?,
        };
        file.sections.insert(name, read);
    }
    Ok(file)
}

fn as_table<'a, 'i>(name: &str, value: &'a Spanned<DeValue<'i>>) -> Result<&'a DeTable<'i>, Wrong> {
    let table = value.get_ref().as_table();
    table.ok_or_else(|| wrong(name, "a table", value))
}

fn strings(name: &str, value: &Spanned<DeValue<'_>>) -> Result<Vec<String>, Wrong> {
    let list = value.get_ref().as_array();
    let list = list.and_then(|list| {
        let strings = list.iter().map(|item| item.get_ref().as_str());
        strings.map(|item| item.map(str::to_owned)).collect()
    });
    list.ok_or_else(|| wrong(name, "a list of strings", value))
}

fn wrong(name: &str, must: &str, value: &Spanned<DeValue<'_>>) -> Wrong {
    (value.span(), format!("{name} must be {must}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(directory: &Path, name: &str, content: &str) -> PathBuf {
        let file = directory.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, content).unwrap();
        file
    }

    fn one(content: &str) -> Result<File, String> {
        parse(Path::new("/c.toml"), content).map_err(|error| error.to_string())
    }

    #[test]
    fn the_section_of_each_version_is_read_and_comments_are_not() {
        let file = one(concat!(
            "version = 2 # as ever\n",
            "enable_cdi = true\n",
            "[plugins.\"io.containerd.grpc.v1.cri\"]\n",
            "  enable_cdi = true # on\n",
            "  cdi_spec_dirs = [\n    \"/opt/cdi\", # ours, and not \"/x\"\n    '/srv/cdi',\n  ]\n",
            "[plugins.'io.containerd.cri.v1.runtime']\n  # enable_cdi = true\n",
            "[plugins.\"io.containerd.cri.v1.runtime\".cni]\n  enable_cdi = true\n",
            "[plugins.opt]\n  enable_cdi = \"of another plugin\"\n",
        ))
        .unwrap();
        assert_eq!(file.version, Some(2));
        let section = Section {
            enable_cdi: Some(true),
            spec_dirs: Some(vec!["/opt/cdi".into(), "/srv/cdi".into()]),
        };
        let expected = BTreeMap::from([(VERSION_2, section), (VERSION_3, Section::default())]);
        assert_eq!(file.sections, expected);
        let old = one("[plugins]\n[plugins.cri]\nenable_cdi = false\n").unwrap();
        assert_eq!(old.sections[VERSION_1].enable_cdi, Some(false));
        assert_eq!(old.version, None);
        assert_eq!(one("version = 0x3").unwrap().version, Some(3));
        assert_eq!(one("").unwrap().sections, BTreeMap::new());
    }

    #[test]
    fn what_containerd_does_not_take_is_named_by_file_and_line() {
        let said = |content: &str| one(content).unwrap_err();
        assert!(said("version = 2\n[plugins\n").starts_with("/c.toml, line 2: not TOML: "));
        assert!(said("version = 2\n\nversion = 3\n").starts_with("/c.toml, line 3: not TOML: "));
        let cri = "[plugins.cri]\n";
        for (content, expected) in [
            ("version = \"2\"".to_owned(), "line 1: version must be a number"),
            ("version = -1".to_owned(), "line 1: version must be a number"),
            (
                "imports = \"a\"".to_owned(),
                "line 1: imports must be a list of strings",
            ),
            ("\nplugins = 1".to_owned(), "line 2: plugins must be a table"),
            ("[[plugins.cri]]".to_owned(), "line 1: cri must be a table"),
            (
                format!("{cri}enable_cdi = \"yes\""),
                "line 2: enable_cdi must be true or false",
            ),
            (
                format!("{cri}cdi_spec_dirs = \"/etc/cdi\""),
                "line 2: cdi_spec_dirs must be a list of strings",
            ),
            (
                format!("{cri}\ncdi_spec_dirs = [1]"),
                "line 3: cdi_spec_dirs must be a list of strings",
            ),
        ] {
            assert_eq!(said(&content), format!("/c.toml, {expected}"));
        }
    }

    #[test]
    fn imports_are_read_after_the_file_that_names_them_each_once_and_in_order() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let elsewhere = write(root, "elsewhere/c.toml", "imports = ['../main.toml', './c.toml']");
        let imports = format!(
            "imports = ['conf.d/*.toml', 'nothing/*', 'last.toml', '{}', './conf.d/../main.toml']",
            elsewhere.display()
        );
        let main = write(root, "main.toml", &imports);
        write(root, "conf.d/20.toml", "version = 2");
        write(root, "conf.d/10.toml", "imports = ['../conf.d/deep/**.toml']");
        write(root, "conf.d/deep/x.toml", "");
        write(root, "conf.d/deep/deeper/y.toml", "");
        write(root, "conf.d/readme", "no TOML");
        write(root, "last.toml", "");
        let names: Vec<PathBuf> = read(&main).unwrap().into_iter().map(|file| file.path).collect();
        let expected = [
            "main.toml",
            "conf.d/10.toml",
            "conf.d/20.toml",
            "last.toml",
            "elsewhere/c.toml",
            "conf.d/deep/x.toml",
        ];
        assert_eq!(names, expected.map(|name| root.join(name)));
    }

    #[test]
    fn a_file_that_is_imported_and_not_there_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let main = write(directory.path(), "main.toml", "imports = ['gone.toml']");
        let error = read(&main).unwrap_err();
        let gone = directory.path().join("gone.toml");
        assert!(
            matches!(&error, Broken::Unread { path, .. } if *path == gone),
            "{error}"
        );
        let broken = write(directory.path(), "gone.toml", "\n=");
        let error = read(&main).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("{}, line 2: ", broken.display())),
            "{error}"
        );
    }

    #[test]
    fn links_that_lead_in_a_circle_end() {
        let directory = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(directory.path(), directory.path().join("round")).unwrap();
        let main = write(directory.path(), "main.toml", "imports = ['round/main.toml']");
        // The kernel's limit on symlinks ends the loop; containerd fails as well.
        assert!(matches!(read(&main), Err(Broken::Unread { .. })));
    }
}
