//! Shell patterns of device paths.

use glob::Pattern;

use crate::core::discovery::group::KEY;

/// Largest pattern, in bytes.
pub(super) const LENGTH_MAX: usize = 1024;

/// An absolute shell pattern that cannot match outside `/dev`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathPattern {
    /// The original text.
    text: String,
    /// The pattern relative to `/dev`, with `*` in place of the key.
    relative: String,
    key: Option<KeyPosition>,
}

/// Position of `{key}` in a pattern: the path component, and the text before and after it in that component.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KeyPosition {
    part: usize,
    prefix: String,
    suffix: String,
}

/// Why a text is not a valid pattern. The message continues a sentence that begins with the pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum PatternError {
    #[error("must begin with /dev/: only device nodes there are handed out")]
    NotBelowDev,
    #[error("must not have an empty part, \".\" or \"..\"; write the path without it")]
    Part,
    #[error("must not have \"**\"; name each directory, with * where needed")]
    Recursive,
    #[error("must have at most {LENGTH_MAX} bytes and no control character")]
    Text,
    #[error(
        "must have {{key}} in groups only, once in a pattern, and in a part of the path without another wildcard"
    )]
    Key,
    #[error("is not a shell pattern: {0}")]
    Syntax(String),
}

impl PathPattern {
    /// Parses a pattern without a key.
    pub fn parse(text: &str) -> Result<Self, PatternError> {
        let pattern = Self::parse_of_group(text)?;
        if pattern.has_key() {
            return Err(PatternError::Key);
        }
        Ok(pattern)
    }

    /// Parses a pattern of a group, which may contain `{key}`.
    pub fn parse_of_group(text: &str) -> Result<Self, PatternError> {
        if text.len() > LENGTH_MAX || text.chars().any(char::is_control) {
            return Err(PatternError::Text);
        }
        let relative = text.strip_prefix("/dev/").ok_or(PatternError::NotBelowDev)?;
        if relative.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(PatternError::Part);
        }
        if relative.contains("**") {
            return Err(PatternError::Recursive);
        }
        let mut key = None;
        for (part, content) in relative.split('/').enumerate() {
            if let Some((prefix, suffix)) = content.split_once(KEY) {
                let wild = |text: &str| text.contains(['*', '?', '[']) || text.contains(KEY);
                if key.is_some() || wild(prefix) || wild(suffix) {
                    return Err(PatternError::Key);
                }
                key = Some(KeyPosition {
                    part,
                    prefix: prefix.to_owned(),
                    suffix: suffix.to_owned(),
                });
            }
            Pattern::new(content).map_err(|error| PatternError::Syntax(error.msg.to_owned()))?;
        }
        Ok(Self {
            text: text.to_owned(),
            relative: relative.replace(KEY, "*"),
            key,
        })
    }

    /// The original text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the pattern contains `{key}`.
    pub fn has_key(&self) -> bool {
        self.key.is_some()
    }

    /// The value of the key in a matching path; `None` if the pattern has no key or the value would be empty.
    pub fn key_of(&self, path: &str) -> Option<String> {
        let key = self.key.as_ref()?;
        let inner = path
            .split('/')
            .nth(key.part)?
            .strip_prefix(key.prefix.as_str())?
            .strip_suffix(key.suffix.as_str())?;
        (!inner.is_empty()).then(|| inner.to_owned())
    }

    /// The pattern relative to `/dev`, with `*` in place of the key.
    pub fn relative(&self) -> &str {
        &self.relative
    }

    /// Whether the pattern has no wildcard. Only a literal path may name a dangerous device, because the operator then wrote that
    /// exact name.
    pub fn is_literal(&self) -> bool {
        !self.relative.contains(['*', '?', '['])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_below_dev_are_accepted() {
        for (text, literal) in [
            ("/dev/kvm", true),
            ("/dev/ttyUSB*", false),
            ("/dev/serial/by-id/usb-[0-9]?", false),
        ] {
            assert_eq!(PathPattern::parse(text).unwrap().is_literal(), literal, "{text}");
        }
    }

    #[test]
    fn every_way_out_of_dev_is_refused() {
        for text in [
            "/etc/passwd",
            "dev/kvm",
            "/dev",
            "/dev/",
            "/device/x",
            "/",
            "",
            "*",
            "/*/kvm",
            "/de[v]/kvm",
        ] {
            assert!(PathPattern::parse(text).is_err(), "{text}");
        }
        for text in [
            "/dev/../etc/passwd",
            "/dev/a/../../etc",
            "/dev/./kvm",
            "/dev//kvm",
            "/dev/a/",
            "/dev/*/..",
        ] {
            assert_eq!(PathPattern::parse(text), Err(PatternError::Part), "{text}");
        }
    }

    #[test]
    fn a_key_is_the_text_at_its_placeholder() {
        let pattern = PathPattern::parse_of_group("/dev/dri/by-path/{key}-render").unwrap();
        assert_eq!(pattern.relative(), "dri/by-path/*-render");
        assert!(pattern.has_key() && !pattern.is_literal());
        assert_eq!(
            pattern.key_of("dri/by-path/pci-0000:00:02.0-render").as_deref(),
            Some("pci-0000:00:02.0")
        );
        for path in ["dri/by-path/-render", "dri/by-path/x-card", "dri"] {
            assert_eq!(pattern.key_of(path), None, "{path}");
        }
        assert_eq!(PathPattern::parse("/dev/video{key}"), Err(PatternError::Key));
        for text in ["/dev/{key}{key}", "/dev/{key}/x{key}", "/dev/video{key}*"] {
            assert_eq!(
                PathPattern::parse_of_group(text),
                Err(PatternError::Key),
                "{text}"
            );
        }
    }

    #[test]
    fn patterns_that_mean_too_much_or_nothing_are_refused() {
        assert_eq!(PathPattern::parse("/dev/**/x"), Err(PatternError::Recursive));
        assert!(matches!(
            PathPattern::parse("/dev/[a"),
            Err(PatternError::Syntax(_))
        ));
        assert_eq!(PathPattern::parse("/dev/a\0"), Err(PatternError::Text));
        assert_eq!(
            PathPattern::parse(&format!("/dev/{}", "x".repeat(2000))),
            Err(PatternError::Text)
        );
    }
}
