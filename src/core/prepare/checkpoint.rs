//! The checkpoint format: the state a companion needs to continue after a restart.
//!
//! ```json
//! {"version":1,"checksum":3735928559,"data":{"cluster":{"nodeUid":"…", …},"entries":{"<claim uid>":{"state":"done","injection":{…}, …}}}}
//! ```
//!
//! An entry is an [`Entry`] (in `prepared_claims`): names, boot id, devices and state; `injection` has its container edits. `cluster` is
//! [`ClusterFacts`]; `unknownContainers` is [`UnknownContainers`]. Version 2 is written if a claim of structured mode is in it.
//! `node::state::storage` writes the text to `checkpoint.json` in the state directory, at each
//! [`PlanStep::Save`](super::plan::PlanStep::Save): before the driver prepares a claim and after its CDI file is written, before that file
//! is written again, when a claim is removed or its devices become known, at a start, and when the facts of the cluster change. An
//! unchanged text is not written again while its file is in place.
//!
//! Every version has `version`, `checksum` and `data`. The checksum (CRC-32) covers the version and the bytes of the data, so that a newer
//! checkpoint is distinguishable from a damaged one. A field may be added without a new version only if a reader can ignore it and a writer
//! can omit it without harm; any other change needs a new version.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::claims_api::ClaimsApi;
use super::prepared_claims::{Entry, PreparedClaims};
use super::runtime_containers::UnknownContainers;
use crate::core::names::ClaimUid;

/// The newest version that this release reads. It is written only for a checkpoint with a claim of structured mode, so that an earlier
/// release can read all others.
pub const VERSION: u32 = 2;
/// The version of a checkpoint with classic claims only.
const VERSION_CLASSIC: u32 = 1;

/// The content of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Checkpoint {
    /// The last known facts about the cluster.
    #[serde(default)]
    pub cluster: ClusterFacts,
    /// The prepared claims.
    pub entries: BTreeMap<ClaimUid, Entry>,
    /// The containers whose status the runtime cannot send. Earlier releases drop this field: they refuse all exclusive devices while such a
    /// container runs. After a return to this release, each such container that then runs may have any device.
    #[serde(default, skip_serializing_if = "super::prepared_claims::is_default")]
    pub unknown_containers: UnknownContainers,
}

/// The last known facts about the cluster, stored so that the node can serve kubelet while the API server is unavailable.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "StoredFacts", into = "StoredFacts")]
pub struct ClusterFacts {
    /// The uid of the Node object.
    pub node_uid: Option<String>,
    /// The API for claims; `None` until an API server has answered.
    pub claims: Option<ClaimsApi>,
    /// The minor version by which features are chosen: of the API server, or of this node's kubelet if that is older. Builds before this
    /// rule stored that of the API server.
    pub minor: Option<u32>,
}

impl ClusterFacts {
    /// Whether an API server has said that the cluster serves this API for claims.
    pub fn serves(&self, api: ClaimsApi) -> bool {
        self.claims == Some(api)
    }
}

/// The facts as stored. Releases without structured mode read `servesClaims` only.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct StoredFacts {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    node_uid: Option<String>,
    /// Whether the cluster serves `resource.k8s.io/v1alpha2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    serves_claims: Option<bool>,
    /// Whether the cluster serves `resource.k8s.io/v1`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    serves_structured_claims: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    minor: Option<u32>,
}

impl From<StoredFacts> for ClusterFacts {
    fn from(stored: StoredFacts) -> Self {
        let claims = stored.serves_claims.map(|classic| match classic {
            true => ClaimsApi::Classic,
            false if stored.serves_structured_claims => ClaimsApi::Structured,
            false => ClaimsApi::None,
        });
        Self {
            node_uid: stored.node_uid,
            claims,
            minor: stored.minor,
        }
    }
}

impl From<ClusterFacts> for StoredFacts {
    fn from(facts: ClusterFacts) -> Self {
        Self {
            serves_claims: facts.claims.map(|api| api == ClaimsApi::Classic),
            serves_structured_claims: facts.serves(ClaimsApi::Structured),
            node_uid: facts.node_uid,
            minor: facts.minor,
        }
    }
}

/// Why this release cannot use a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// The file is empty.
    #[error("it is empty")]
    Empty,
    /// The envelope cannot be parsed.
    #[error("it is not a checkpoint: {0}")]
    Shape(String),
    /// The checksum does not match: the file is damaged.
    #[error("its checksum is {found}, that of its content is {computed}")]
    Checksum {
        /// The stored checksum.
        found: u32,
        /// The checksum of the stored content.
        computed: u32,
    },
    /// The file is undamaged but written by a newer release.
    #[error("it has version {0}, this release reads up to {VERSION}")]
    Newer(u32),
    /// The file is undamaged, but its content does not fit its version.
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
    /// Builds a checkpoint.
    pub fn of(
        prepared_claims: &PreparedClaims,
        cluster: &ClusterFacts,
        unknown_containers: &UnknownContainers,
    ) -> Self {
        Self {
            cluster: cluster.clone(),
            entries: prepared_claims.entries().clone(),
            unknown_containers: unknown_containers.clone(),
        }
    }

    /// Serializes the checkpoint, with its checksum.
    pub fn encode(&self) -> Result<String, CheckpointError> {
        let content = |error: serde_json::Error| CheckpointError::Content(error.to_string());
        let data = serde_json::value::to_raw_value(self).map_err(content)?;
        let version = if self.entries.values().any(Entry::is_structured) {
            VERSION
        } else {
            VERSION_CLASSIC
        };
        let envelope = Envelope {
            version,
            checksum: checksum(version, data.get()),
            data,
        };
        serde_json::to_string(&envelope).map_err(content)
    }

    /// Parses and verifies a stored checkpoint.
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
    use std::time::Duration;

    use super::super::container_edits::{ContainerEdits, DeviceNode};
    use super::super::device_metadata::DeviceMetadata;
    use super::super::prepared_claims::{HeldDevice, Progress, Structured};
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
                container_edits: ContainerEdits::of_device_node("kvm", node),
            },
        };
        let started = Entry {
            progress: Progress::Started {
                container_edits: None,
            },
            ..done.clone()
        };
        let uid = |last: &str| ClaimUid::parse(&format!("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a{last}")).unwrap();
        Checkpoint {
            cluster: ClusterFacts {
                node_uid: Some("n-1".into()),
                claims: Some(ClaimsApi::Classic),
                minor: None,
            },
            entries: BTreeMap::from([(uid("10"), done), (uid("11"), started)]),
            unknown_containers: UnknownContainers::default(),
        }
    }

    #[test]
    fn unknown_containers_are_stored_if_there_are_any() {
        let mut checkpoint = checkpoint();
        let is_named = |text: &str| text.contains("unknownContainers");
        assert!(!is_named(&checkpoint.encode().unwrap()));
        let mut unknown = UnknownContainers::of_boot("7e1a");
        for entry in checkpoint.entries.values() {
            unknown.released(entry, Duration::ZERO);
        }
        checkpoint.unknown_containers = unknown.to_store();
        let text = checkpoint.encode().unwrap();
        assert!(is_named(&text));
        assert_eq!(Checkpoint::decode(text.as_bytes()), Ok(checkpoint));
    }

    #[test]
    fn a_checkpoint_reads_back_as_it_was_written() {
        let text = checkpoint().encode().unwrap();
        assert_eq!(Checkpoint::decode(text.as_bytes()), Ok(checkpoint()));
    }

    #[test]
    fn checkpoints_of_earlier_releases_are_read() {
        let text = GOLDEN_V1;
        assert_eq!(Checkpoint::decode(text.as_bytes()), Ok(checkpoint()));
    }

    #[test]
    fn only_claims_of_structured_mode_need_version_2() {
        assert!(checkpoint().encode().unwrap().starts_with(r#"{"version":1,"#));
        let mut structured = checkpoint();
        for entry in structured.entries.values_mut() {
            entry.devices[0].structured = Some(Structured {
                share_ids: vec!["s-1".into()],
                admin_access: true,
                container_edits: ContainerEdits::default(),
                metadata: DeviceMetadata::new("node-a", "r/s", Some("camera")),
            });
        }
        let text = structured.encode().unwrap();
        assert!(text.starts_with(r#"{"version":2,"#));
        assert_eq!(Checkpoint::decode(text.as_bytes()), Ok(structured));
    }

    #[test]
    fn facts_about_the_cluster_are_kept() {
        for claims in [
            None,
            Some(ClaimsApi::None),
            Some(ClaimsApi::Classic),
            Some(ClaimsApi::Structured),
        ] {
            let mut written = checkpoint();
            written.cluster.claims = claims;
            written.cluster.minor = Some(37);
            let text = written.encode().unwrap();
            assert_eq!(Checkpoint::decode(text.as_bytes()), Ok(written));
        }
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
    fn every_flipped_bit_is_detected_and_is_not_a_newer_release() {
        let text = checkpoint().encode().unwrap().into_bytes();
        for position in 0..text.len() * 8 {
            let mut damaged = text.clone();
            damaged[position / 8] ^= 1 << (position % 8);
            match Checkpoint::decode(&damaged) {
                Err(CheckpointError::Newer(version)) => {
                    panic!("bit {position} was taken for version {version}")
                }
                Err(_) => {}
                // No flip is harmless: the text has no exponent and no optional space, so every one must be detected.
                Ok(_) => panic!(
                    "bit {position} went unnoticed: {}",
                    String::from_utf8_lossy(&damaged)
                ),
            }
        }
    }

    #[test]
    fn a_newer_release_is_recognised_with_any_data() {
        let data = r#"{"anything":[]}"#;
        let text = format!(
            r#"{{"version":3,"checksum":{},"data":{data}}}"#,
            checksum(3, data)
        );
        assert_eq!(
            Checkpoint::decode(text.as_bytes()),
            Err(CheckpointError::Newer(3))
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
    fn a_taint_effect_of_a_newer_release_is_harmless() {
        let data = concat!(
            r#"{"entries":{"7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10":{"namespace":"default","name":"camera","bootId":"7e1a","#,
            r#""devices":[{"device":"kvm","kind":"test","taintEffect":"Later"}],"state":"started"}}}"#
        );
        let text = format!(
            r#"{{"version":1,"checksum":{},"data":{data}}}"#,
            checksum(1, data)
        );
        let entries = Checkpoint::decode(text.as_bytes()).unwrap().entries;
        let held = HeldDevice {
            kind: "test".into(),
            ..HeldDevice::named("kvm")
        };
        assert!(entries.values().all(|entry| entry.devices == [held.clone()]));
        assert_eq!(entries.len(), 1);
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
