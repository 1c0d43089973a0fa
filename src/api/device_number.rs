//! The identity of a device on its node, independent of the path of its device node.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The type and the device number of a device node: `c120:6` for character device 120:6, `b8:0` for block device 8:0. Two device nodes
/// with the same number are the same device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeviceNumber {
    /// The type of the device node.
    pub kind: DeviceNodeKind,
    /// The major number.
    pub major: u32,
    /// The minor number.
    pub minor: u32,
}

/// The type of a device node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceNodeKind {
    /// A character device.
    Character,
    /// A block device.
    Block,
}

/// The string is not a device number.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a device number such as c120:6 or b8:0")]
pub struct DeviceNumberError(String);

impl fmt::Display for DeviceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            DeviceNodeKind::Character => 'c',
            DeviceNodeKind::Block => 'b',
        };
        write!(f, "{kind}{}:{}", self.major, self.minor)
    }
}

impl FromStr for DeviceNumber {
    type Err = DeviceNumberError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = || {
            let (kind, numbers) = if let Some(numbers) = text.strip_prefix('c') {
                (DeviceNodeKind::Character, numbers)
            } else {
                (DeviceNodeKind::Block, text.strip_prefix('b')?)
            };
            let (major, minor) = numbers.split_once(':')?;
            Some(Self {
                kind,
                major: major.parse().ok()?,
                minor: minor.parse().ok()?,
            })
        };
        parsed().ok_or_else(|| DeviceNumberError(text.chars().take(64).collect()))
    }
}

impl TryFrom<String> for DeviceNumber {
    type Error = DeviceNumberError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<DeviceNumber> for String {
    fn from(number: DeviceNumber) -> Self {
        number.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_number_is_read_as_it_is_written() {
        for text in ["c120:6", "b8:0", "c0:4294967295"] {
            assert_eq!(text.parse::<DeviceNumber>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "120:6",
            "x1:2",
            "c1",
            "c1:",
            "c-1:2",
            "c1:2:3",
            "c4294967296:0",
        ] {
            let error = text.parse::<DeviceNumber>().unwrap_err();
            assert!(error.to_string().contains("c120:6"), "{text}");
        }
    }
}
