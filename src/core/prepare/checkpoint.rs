//! The text of the checkpoint: what a companion must know to go on where another left off.
//!
//! ```json
//! {"version":1,"checksum":3735928559,"data":{"nodeUid":"…","entries":{"<claim uid>":{"state":"done", …}}}}
//! ```
//!
//! `version`, `checksum` and `data` are there in every version, and the checksum (CRC-32) covers the version and the bytes
//! of the data, so that a newer checkpoint can be told from a damaged one. A field that is added to the data without a
//! new version can be left out and ignored without harm; anything else is a new version.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::claim_uid::ClaimUid;
use super::ledger::{Entry, Ledger};

/// The version that this release writes, and the newest that it reads.
pub const VERSION: u32 = 1;

/// What is stored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Checkpoint {
    /// What the API server told last.
    #[serde(default)]
    pub cluster: ClusterFacts,
    /// The claims that hold something.
    pub entries: BTreeMap<ClaimUid, Entry>,
}

/// What the API server told last: kept, so that a node can serve kubelet while the API server is away.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterFacts {
    /// The uid of the Node object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_uid: Option<String>,
    /// Whether the cluster serves `resource.k8s.io/v1alpha2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serves_claims: Option<bool>,
}

/// Why a text is not a checkpoint that this release can use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// Nothing in it.
    #[error("it is empty")]
    Empty,
    /// Not of the shape that every version has.
    #[error("it is not a checkpoint: {0}")]
    Shape(String),
    /// The bytes are not those that were written.
    #[error("its checksum is {found}, that of its content is {computed}")]
    Checksum {
        /// The checksum that is written in it.
        found: u32,
        /// The checksum of what is in it.
        computed: u32,
    },
    /// Written by a newer release, and undamaged.
    #[error("it has version {0}, this release reads up to {VERSION}")]
    Newer(u32),
    /// Undamaged, but not what this version says.
    #[error("its content cannot be read: {0}")]
    Content(String),
}

#[derive(Serialize, Deserialize)]
struct Envelope {
    version: u32,
    checksum: u32,
    data: Box<RawValue>,
}

fn checksum(version: u32, data: &str) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&version.to_le_bytes());
    hasher.update(data.as_bytes());
    hasher.finalize()
}

impl Checkpoint {
    /// The checkpoint of a ledger.
    pub fn of(ledger: &Ledger, cluster: &ClusterFacts) -> Self {
        Self {
            cluster: cluster.clone(),
            entries: ledger.entries().clone(),
        }
    }

    /// The text to be stored.
    pub fn encode(&self) -> Result<String, CheckpointError> {
        let content = |error: serde_json::Error| CheckpointError::Content(error.to_string());
        let data = serde_json::value::to_raw_value(self).map_err(content)?;
        let envelope = Envelope {
            version: VERSION,
            checksum: checksum(VERSION, data.get()),
            data,
        };
        serde_json::to_string(&envelope).map_err(content)
    }

    /// Reads what was stored.
    pub fn decode(text: &[u8]) -> Result<Self, CheckpointError> {
        if text.iter().all(|byte| byte.is_ascii_whitespace() || *byte == 0) {
            return Err(CheckpointError::Empty);
        }
        let envelope: Envelope =
            serde_json::from_slice(text).map_err(|error| CheckpointError::Shape(error.to_string()))?;
        let computed = checksum(envelope.version, envelope.data.get());
        if computed != envelope.checksum {
            return Err(CheckpointError::Checksum {
                found: envelope.checksum,
                computed,
            });
        }
        if envelope.version > VERSION {
            return Err(CheckpointError::Newer(envelope.version));
        }
        serde_json::from_str(envelope.data.get()).map_err(|error| CheckpointError::Content(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::injection::{DeviceNode, Injection};
    use super::super::ledger::{HeldDevice, Progress};
    use super::*;

    fn checkpoint() -> Checkpoint {
        let node = DeviceNode {
            host_path: "/dev/kvm".into(),
            container_path: "/dev/kvm".into(),
            permissions: "rw".into(),
        };
        let done = Entry {
            namespace: "default".into(),
            name: "camera".into(),
            boot_id: "7e1a".into(),
            devices: vec![HeldDevice {
                device: "kvm".into(),
                kind: "test".into(),
                ..HeldDevice::default()
            }],
            progress: Progress::Done {
                injection: Injection::of_device_node("kvm", node),
            },
        };
        let started = Entry {
            progress: Progress::Started { injection: None },
            ..done.clone()
        };
        let uid = |last: &str| ClaimUid::parse(&format!("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a{last}")).unwrap();
        Checkpoint {
            cluster: ClusterFacts {
                node_uid: Some("n-1".into()),
                serves_claims: Some(true),
            },
            entries: BTreeMap::from([(uid("10"), done), (uid("11"), started)]),
        }
    }

    #[test]
    fn a_checkpoint_reads_back_as_it_was_written() {
        let text = checkpoint().encode().unwrap();
        assert_eq!(Checkpoint::decode(text.as_bytes()), Ok(checkpoint()));
    }

    #[test]
    fn what_an_earlier_release_wrote_is_read() {
        let text = GOLDEN_V1;
        assert_eq!(Checkpoint::decode(text.as_bytes()), Ok(checkpoint()));
    }

    #[test]
    fn every_truncated_checkpoint_is_refused() {
        let text = checkpoint().encode().unwrap();
        for length in 0..text.len() {
            assert!(
                Checkpoint::decode(&text.as_bytes()[..length]).is_err(),
                "{length}"
            );
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed_and_never_taken_for_a_newer_release() {
        let text = checkpoint().encode().unwrap().into_bytes();
        for position in 0..text.len() * 8 {
            let mut damaged = text.clone();
            damaged[position / 8] ^= 1 << (position % 8);
            match Checkpoint::decode(&damaged) {
                Err(CheckpointError::Newer(version)) => {
                    panic!("bit {position} was taken for version {version}")
                }
                Err(_) => {}
                // The one harmless flip: the case of an exponent or a space does not occur, so nothing may pass.
                Ok(_) => panic!(
                    "bit {position} went unnoticed: {}",
                    String::from_utf8_lossy(&damaged)
                ),
            }
        }
    }

    #[test]
    fn a_newer_release_is_recognised_whatever_its_data_is() {
        let data = r#"{"anything":[]}"#;
        let text = format!(
            r#"{{"version":2,"checksum":{},"data":{data}}}"#,
            checksum(2, data)
        );
        assert_eq!(
            Checkpoint::decode(text.as_bytes()),
            Err(CheckpointError::Newer(2))
        );
    }

    #[test]
    fn a_field_added_within_a_version_is_ignored() {
        let data = r#"{"entries":{},"addedLater":1}"#;
        let text = format!(
            r#"{{"version":1,"checksum":{},"data":{data}}}"#,
            checksum(1, data)
        );
        assert_eq!(Checkpoint::decode(text.as_bytes()), Ok(Checkpoint::default()));
    }

    #[test]
    fn hostile_texts_are_refused() {
        let data = r#"{"entries":{"../../etc/passwd":{}}}"#;
        let traversal = format!(
            r#"{{"version":1,"checksum":{},"data":{data}}}"#,
            checksum(1, data)
        );
        assert!(matches!(
            Checkpoint::decode(traversal.as_bytes()),
            Err(CheckpointError::Content(_))
        ));
        assert_eq!(Checkpoint::decode(&[0; 4096]), Err(CheckpointError::Empty));
        for text in ["null", "[]", "{}", "{\"version\":1}", "\u{feff}", "x"] {
            assert!(
                matches!(
                    Checkpoint::decode(text.as_bytes()),
                    Err(CheckpointError::Shape(_))
                ),
                "{text}"
            );
        }
        let deep = "[".repeat(100_000);
        assert!(Checkpoint::decode(deep.as_bytes()).is_err());
    }

    const GOLDEN_V1: &str = concat!(
        r#"{"version":1,"checksum":591435388,"data":{"cluster":{"nodeUid":"n-1","servesClaims":true},"#,
        r#""entries":{"7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10":{"namespace":"default","name":"camera",""#,
        r#"bootId":"7e1a","devices":[{"device":"kvm","kind":"test"}],"state":"done","injection":{"dev"#,
        r#"iceNodes":[{"hostPath":"/dev/kvm","containerPath":"/dev/kvm","permissions":"rw"}],"environ"#,
        r#"ment":{"DRAYMAN_DEVICE_KVM":"/dev/kvm"}}},"7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a11":{"namespa"#,
        r#"ce":"default","name":"camera","bootId":"7e1a","devices":[{"device":"kvm","kind":"test"}],""#,
        r#"state":"started"}}}}"#
    );
}
