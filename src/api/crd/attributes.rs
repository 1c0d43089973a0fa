//! The facts about a device.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use litemap::LiteMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::AttributeValue;

/// What [`DeviceAttributes`] are.
type Map = LiteMap<String, AttributeValue>;

/// Attributes of a device by qualified name, as a copy-on-write map.
///
/// Most devices have one to five attributes, a node may have a thousand devices, and several lists of them exist at the same time
/// (discovered, offered, published). A sorted vector takes a tenth of a tree's memory, and copies share it until one changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceAttributes(Arc<Map>);

impl Deref for DeviceAttributes {
    type Target = Map;

    fn deref(&self) -> &Map {
        &self.0
    }
}

impl DerefMut for DeviceAttributes {
    fn deref_mut(&mut self) -> &mut Map {
        Arc::make_mut(&mut self.0)
    }
}

impl FromIterator<(String, AttributeValue)> for DeviceAttributes {
    fn from_iter<T: IntoIterator<Item = (String, AttributeValue)>>(attributes: T) -> Self {
        Map::from_iter(attributes).into()
    }
}

impl From<Map> for DeviceAttributes {
    fn from(map: Map) -> Self {
        // They are kept, and hardly ever grow.
        let mut exact = map.into_tuple_vec();
        exact.shrink_to_fit();
        Self(Arc::new(Map::from_sorted_store_unchecked(exact)))
    }
}

impl<'a> IntoIterator for &'a DeviceAttributes {
    type Item = <&'a Map as IntoIterator>::Item;
    type IntoIter = <&'a Map as IntoIterator>::IntoIter;

    fn into_iter(self) -> Self::IntoIter {
        (&*self.0).into_iter()
    }
}

impl Serialize for DeviceAttributes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // A LiteMap alone writes none as an empty list.
        serializer.collect_map(self.0.iter())
    }
}

impl<'de> Deserialize<'de> for DeviceAttributes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Map::deserialize(deserializer).map(Self::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_one_until_one_of_them_is_changed() {
        let first: DeviceAttributes = [("a".to_owned(), AttributeValue::int(1))].into_iter().collect();
        let mut second = first.clone();
        assert!(Arc::ptr_eq(&first.0, &second.0));
        second.insert("b".to_owned(), AttributeValue::string("x"));
        assert_eq!((first.len(), second.len()), (1, 2));
        assert_ne!(first, second);
    }

    #[test]
    fn they_are_read_and_written_as_a_map() {
        let text = r#"{"a":{"int":1},"b":{"string":"x"}}"#;
        let read: DeviceAttributes = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
        assert_eq!(serde_json::to_string(&DeviceAttributes::default()).unwrap(), "{}");
    }
}
