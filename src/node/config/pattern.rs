//! The shell patterns of device paths.

use glob::Pattern;

/// The length of a pattern, at most, in bytes.
const LENGTH_MAX: usize = 1024;

/// An absolute shell pattern below `/dev`, without a way out of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathPattern {
    relative: String,
}

/// Why a text is not such a pattern. Follows the pattern in a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// Not below `/dev`.
    #[error("must begin with /dev/: only device nodes there are handed out")]
    NotBelowDev,
    /// A part that is empty, `.` or `..`.
    #[error("must not have an empty part, \".\" or \"..\"; write the path without it")]
    Part,
    /// Over any number of directories.
    #[error("must not have \"**\"; name the directories, each with * where need be")]
    Recursive,
    /// Too long, or with a control character.
    #[error("must have at most {LENGTH_MAX} bytes and no control character")]
    Text,
    /// Not a pattern.
    #[error("is not a shell pattern: {0}")]
    Syntax(String),
}

impl PathPattern {
    /// Checks a pattern.
    pub fn parse(text: &str) -> Result<Self, PatternError> {
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
        for part in relative.split('/') {
            Pattern::new(part).map_err(|error| PatternError::Syntax(error.msg.to_owned()))?;
        }
        Ok(Self {
            relative: relative.to_owned(),
        })
    }

    /// The pattern, relative to `/dev`.
    pub fn relative(&self) -> &str {
        &self.relative
    }

    /// Whether the pattern is the name of one device: only then are devices taken that are dangerous to hand out, because
    /// somebody has written the very name down.
    pub fn is_literal(&self) -> bool {
        !self.relative.contains(['*', '?', '['])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_below_dev_are_taken() {
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
