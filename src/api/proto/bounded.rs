//! Requests with one repeated field, decoded with a limit on its elements.
//!
//! An element may take two bytes on the wire and a hundred in memory, so a request within the message size limit could allocate
//! hundreds of MiB before its elements are counted. Elements beyond the limit are skipped and counted; the endpoint rejects the request
//! by that count.

use bytes::{Buf, BufMut};
use prost::encoding::{self, DecodeContext, WireType};
use prost::{DecodeError, Message};

use super::MAX_DEVICES_PER_CONTAINER;
use super::dra_v1alpha3::Claim;

/// The field number of the elements in all these messages.
const ELEMENTS: u32 = 1;

/// A message whose only field is `repeated T = 1`. Decoding keeps at most `MAX` elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bounded<T, const MAX: usize> {
    /// The elements, at most `MAX` after decoding.
    pub items: Vec<T>,
    /// The number of further elements received. Not encoded.
    pub beyond: usize,
}

impl<T, const MAX: usize> Bounded<T, MAX> {
    /// Returns a message to send; it is not truncated.
    pub const fn new(items: Vec<T>) -> Self {
        Self { items, beyond: 0 }
    }

    /// Returns the elements if at most `MAX` were received, otherwise their number.
    pub fn within_limit(self) -> Result<Vec<T>, usize> {
        if self.beyond == 0 {
            Ok(self.items)
        } else {
            Err(self.items.len().saturating_add(self.beyond))
        }
    }
}

impl<T, const MAX: usize> Default for Bounded<T, MAX> {
    fn default() -> Self {
        Self::new(Vec::new())
    }
}

impl<T: Element, const MAX: usize> Message for Bounded<T, MAX> {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        for item in &self.items {
            item.encode_element(buf);
        }
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        if tag != ELEMENTS {
            return encoding::skip_field(wire_type, tag, buf, context);
        }
        if self.items.len() >= MAX {
            self.beyond = self.beyond.saturating_add(1);
            return encoding::skip_field(wire_type, tag, buf, context);
        }
        let mut item = T::default();
        item.merge_element(wire_type, buf, context)?;
        self.items.push(item);
        Ok(())
    }

    fn encoded_len(&self) -> usize {
        self.items.iter().map(Element::element_len).sum()
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

/// `ContainerPreferredAllocationRequest` of the device plugin API. Decoding keeps at most [`MAX_DEVICES_PER_CONTAINER`] ids of each
/// list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreferenceRequest {
    /// Field 1: the ids of the available devices.
    pub available: Vec<String>,
    /// Field 2: the ids of devices that must be included.
    pub must_include: Vec<String>,
    /// Field 3: the number of devices to choose.
    pub size: i32,
    /// The number of further ids received. Not encoded.
    pub beyond: usize,
}

impl Message for PreferenceRequest {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        encoding::string::encode_repeated(1, &self.available, buf);
        encoding::string::encode_repeated(2, &self.must_include, buf);
        if self.size != 0 {
            encoding::int32::encode(3, &self.size, buf);
        }
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        let ids = match tag {
            1 => &mut self.available,
            2 => &mut self.must_include,
            3 => return encoding::int32::merge(wire_type, &mut self.size, buf, context),
            _ => return encoding::skip_field(wire_type, tag, buf, context),
        };
        if ids.len() >= MAX_DEVICES_PER_CONTAINER {
            self.beyond = self.beyond.saturating_add(1);
            return encoding::skip_field(wire_type, tag, buf, context);
        }
        encoding::string::merge_repeated(wire_type, ids, buf, context)
    }

    fn encoded_len(&self) -> usize {
        encoding::string::encoded_len_repeated(1, &self.available)
            + encoding::string::encoded_len_repeated(2, &self.must_include)
            + if self.size == 0 {
                0
            } else {
                encoding::int32::encoded_len(3, &self.size)
            }
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

/// An element of a [`Bounded`] message.
pub trait Element: Default + Send + Sync {
    /// Encodes it as field 1.
    fn encode_element(&self, buf: &mut impl BufMut);
    /// Decodes it.
    fn merge_element(
        &mut self,
        wire_type: WireType,
        buf: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError>;
    /// Its size in bytes as field 1.
    fn element_len(&self) -> usize;
}

macro_rules! element {
    ($codec:ident, [$($bound:tt)*], $type:ty) => {
        impl<$($bound)*> Element for $type {
            fn encode_element(&self, buf: &mut impl BufMut) {
                encoding::$codec::encode(ELEMENTS, self, buf);
            }

            fn merge_element(
                &mut self,
                wire_type: WireType,
                buf: &mut impl Buf,
                context: DecodeContext,
            ) -> Result<(), DecodeError> {
                encoding::$codec::merge(wire_type, self, buf, context)
            }

            fn element_len(&self) -> usize {
                encoding::$codec::encoded_len(ELEMENTS, self)
            }
        }
    };
}

element!(string, [], String);
element!(message, [], Claim);
element!(message, [], PreferenceRequest);
element!(message, [const MAX: usize], Bounded<String, MAX>);

#[cfg(test)]
mod tests {
    use super::*;

    type Few = Bounded<String, 2>;

    #[test]
    fn elements_up_to_the_limit_are_kept_and_the_others_counted() {
        let five = Bounded::<String, 9>::new(["a", "b", "c", "d", "e"].map(String::from).to_vec());
        let few = Few::decode(five.encode_to_vec().as_slice()).unwrap();
        assert_eq!(
            few,
            Few {
                items: vec!["a".into(), "b".into()],
                beyond: 3
            }
        );
        assert_eq!(few.within_limit(), Err(5));
    }

    #[test]
    fn a_list_within_the_limit_reads_back_as_it_was_written() {
        let list = Bounded::<Claim, 2>::new(vec![
            Claim {
                uid: "u".into(),
                ..Claim::default()
            },
            Claim::default(),
        ]);
        let bytes = list.encode_to_vec();
        assert_eq!(bytes, [0x0a, 3, 0x12, 1, b'u', 0x0a, 0]);
        assert_eq!(bytes.len(), list.encoded_len());
        assert_eq!(
            Bounded::<Claim, 2>::decode(bytes.as_slice())
                .unwrap()
                .within_limit(),
            Ok(list.items)
        );
    }

    #[test]
    fn an_unknown_field_is_skipped() {
        assert_eq!(
            Few::decode([0x10, 7, 0x0a, 1, b'x'].as_slice()).unwrap().items,
            ["x"]
        );
    }

    #[test]
    fn an_element_that_is_no_utf_8_or_of_another_type_is_an_error() {
        assert!(Few::decode([0x0a, 1, 0xff].as_slice()).is_err());
        assert!(Few::decode([0x08, 1].as_slice()).is_err());
        assert!(Few::decode([0x0a, 200].as_slice()).is_err());
    }

    #[test]
    fn a_request_for_a_preference_is_read_as_protobuf_has_it_and_bounded() {
        let request = PreferenceRequest {
            available: vec!["a".into(), "b".into()],
            must_include: vec!["b".into()],
            size: 2,
            beyond: 0,
        };
        let bytes = request.encode_to_vec();
        assert_eq!(bytes, b"\x0a\x01a\x0a\x01b\x12\x01b\x18\x02");
        assert_eq!(bytes.len(), request.encoded_len());
        assert_eq!(PreferenceRequest::decode(bytes.as_slice()), Ok(request));
        let many = PreferenceRequest {
            available: vec![String::new(); MAX_DEVICES_PER_CONTAINER + 3],
            ..PreferenceRequest::default()
        };
        let read = PreferenceRequest::decode(many.encode_to_vec().as_slice()).unwrap();
        assert_eq!(
            (read.available.len(), read.beyond),
            (MAX_DEVICES_PER_CONTAINER, 3)
        );
    }
}
