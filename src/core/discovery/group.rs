//! Device nodes that belong together and form one device.

use std::collections::BTreeSet;

/// A path that matched a pattern of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matched {
    /// The pattern as configured.
    pub pattern: String,
    /// The value of `{key}`; `None` if the pattern has no key.
    pub key: Option<String>,
    /// The path, relative to `/dev`.
    pub path: String,
}

/// All paths that matched the patterns of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupMatches {
    /// One list per pattern, in the order of the configuration: without a match there is no device.
    pub required: Vec<(String, Vec<Matched>)>,
    /// Added to a device if present.
    pub optional: Vec<Matched>,
    /// Added to every device of the group, and owned by none.
    pub shared: Vec<Matched>,
}

/// Device nodes that form one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceGroup {
    /// The value of `{key}`; `None` if the group has no key and is one device.
    pub key: Option<String>,
    /// The nodes of this device only; the first one identifies the device. Never empty.
    pub own: Vec<Matched>,
    /// The nodes shared with other devices.
    pub shared: Vec<Matched>,
}

/// Assembles the groups, one per value of the key, in order.
///
/// A pattern without a key, in a group that has one, belongs to each value of it. For an incomplete group the error has its key and
/// the missing part.
pub fn assemble(matches: &GroupMatches) -> Vec<Result<DeviceGroup, (Option<String>, String)>> {
    let all = || {
        let required = matches.required.iter().flat_map(|(_, matched)| matched);
        required.chain(&matches.optional)
    };
    let keys: BTreeSet<&String> = all().filter_map(|matched| matched.key.as_ref()).collect();
    let shared_paths: BTreeSet<&str> = matches.shared.iter().map(|shared| shared.path.as_str()).collect();
    // A key that only optional nodes have makes no device: they may belong to another one. Nor does a shared node, which belongs to
    // none: `nvidia{key}` matches `nvidiactl` too.
    let keys = keys.into_iter().filter(|key| {
        let mut required = matches.required.iter().flat_map(|(_, matched)| matched);
        required
            .any(|matched| matched.key.as_ref() == Some(key) && !shared_paths.contains(matched.path.as_str()))
    });
    let mut keys: Vec<Option<&String>> = keys.map(Some).collect();
    let keyed = matches.required.iter().any(|(pattern, _)| pattern.contains(KEY));
    if keys.is_empty() && !keyed {
        keys.push(None);
    }
    let group = |key: Option<&String>| {
        let belongs = |matched: &&Matched| matched.key.is_none() || matched.key.as_ref() == key;
        let mut seen: BTreeSet<&str> = BTreeSet::new();
        let mut ordered = Vec::new();
        let mut missing = Vec::new();
        for (pattern, matched) in &matches.required {
            let before = ordered.len();
            for matched in matched.iter().filter(belongs) {
                if seen.insert(&matched.path) {
                    ordered.push(matched.clone());
                }
            }
            if ordered.len() == before && !matched.iter().any(|matched| belongs(&matched)) {
                missing.push(key.map_or_else(|| pattern.clone(), |key| pattern.replace(KEY, key)));
            }
        }
        if !missing.is_empty() {
            return Err((
                key.cloned(),
                format!("it is not complete: there is no {}", missing.join(" and no ")),
            ));
        }
        for matched in matches.optional.iter().filter(belongs) {
            if seen.insert(&matched.path) {
                ordered.push(matched.clone());
            }
        }
        let mut shared = Vec::new();
        for matched in matches.shared.iter().filter(belongs) {
            if seen.insert(&matched.path) {
                shared.push(matched.clone());
            }
        }
        Ok(DeviceGroup {
            key: key.cloned(),
            own: ordered,
            shared,
        })
    };
    keys.into_iter().map(group).collect()
}

/// The placeholder of the key in a pattern.
pub const KEY: &str = "{key}";

#[cfg(test)]
mod tests {
    use super::*;

    fn matched(pattern: &str, key: Option<&str>) -> Matched {
        Matched {
            pattern: pattern.into(),
            key: key.map(Into::into),
            path: key.map_or_else(|| pattern.to_owned(), |key| pattern.replace(KEY, key)),
        }
    }

    fn required(pattern: &str, keys: &[&str]) -> (String, Vec<Matched>) {
        (
            pattern.into(),
            keys.iter().map(|key| matched(pattern, Some(key))).collect(),
        )
    }

    fn paths(group: &DeviceGroup) -> Vec<&str> {
        group.own.iter().map(|matched| matched.path.as_str()).collect()
    }

    #[test]
    fn nodes_with_one_key_are_one_device_with_optional_nodes() {
        let matches = GroupMatches {
            required: vec![
                required("video{key}", &["0", "1"]),
                required("media{key}", &["0", "1"]),
            ],
            optional: vec![matched("sub{key}", Some("1")), matched("sub{key}", Some("7"))],
            shared: vec![matched("ctl", None)],
        };
        let groups: Vec<DeviceGroup> = assemble(&matches).into_iter().map(Result::unwrap).collect();
        assert_eq!(groups.len(), 2);
        assert_eq!(paths(&groups[0]), ["video0", "media0"]);
        assert_eq!(paths(&groups[1]), ["video1", "media1", "sub1"]);
        assert!(groups.iter().all(|group| group.shared == [matched("ctl", None)]));
    }

    #[test]
    fn a_group_that_is_not_complete_says_what_is_missing() {
        let matches = GroupMatches {
            required: vec![
                required("video{key}", &["0", "1"]),
                required("media{key}", &["0"]),
            ],
            ..GroupMatches::default()
        };
        let groups = assemble(&matches);
        assert!(groups[0].is_ok());
        assert_eq!(
            groups[1],
            Err((Some("1".into()), "it is not complete: there is no media1".into()))
        );
    }

    #[test]
    fn a_group_without_a_key_is_one_device() {
        let matches = GroupMatches {
            required: vec![
                ("a".into(), vec![matched("a", None)]),
                ("b".into(), vec![matched("b", None)]),
            ],
            ..GroupMatches::default()
        };
        let groups = assemble(&matches);
        assert_eq!(paths(groups[0].as_ref().unwrap()), ["a", "b"]);
        let matches = GroupMatches {
            required: vec![("a".into(), Vec::new())],
            ..GroupMatches::default()
        };
        assert_eq!(
            assemble(&matches),
            [Err((None, "it is not complete: there is no a".into()))]
        );
    }

    #[test]
    fn a_key_without_required_nodes_is_ignored() {
        let matches = GroupMatches {
            required: vec![("video{key}".into(), Vec::new())],
            optional: vec![matched("sub{key}", Some("7"))],
            ..GroupMatches::default()
        };
        assert_eq!(assemble(&matches), []);
    }

    #[test]
    fn a_shared_node_that_matches_the_key_makes_no_device() {
        let matches = GroupMatches {
            required: vec![required("nvidia{key}", &["0", "ctl"])],
            shared: vec![matched("nvidiactl", None)],
            ..GroupMatches::default()
        };
        let groups = assemble(&matches);
        assert_eq!(groups.len(), 1, "{groups:?}");
        let group = groups[0].as_ref().unwrap();
        assert_eq!(paths(group), ["nvidia0"]);
        assert_eq!(group.shared, [matched("nvidiactl", None)]);
    }

    #[test]
    fn a_node_that_two_patterns_match_is_there_once() {
        let matches = GroupMatches {
            required: vec![("snd/control".into(), vec![matched("snd/control", None)])],
            optional: vec![matched("snd/control", None), matched("snd/pcm", None)],
            shared: vec![
                matched("snd/pcm", None),
                matched("snd/timer", None),
                matched("snd/timer", None),
            ],
        };
        let groups = assemble(&matches);
        let group = groups[0].as_ref().unwrap();
        assert_eq!(paths(group), ["snd/control", "snd/pcm"]);
        assert_eq!(group.shared, [matched("snd/timer", None)]);
    }
}
