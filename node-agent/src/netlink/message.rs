//! Netlink messages and attributes, as bytes.

use std::io;

use super::NetlinkError;

/// `NLMSG_ERROR`, which is also an acknowledgement.
pub(super) const ERROR: u16 = 2;
/// `NLMSG_DONE`: the end of a dump.
pub(super) const DONE: u16 = 3;

const HEADER_BYTES: usize = 16;
const ATTRIBUTE_HEADER_BYTES: usize = 4;
/// Attribute types carry two flags above.
const ATTRIBUTE_TYPE_MASK: u16 = 0x3fff;
const NESTED: u16 = 0x8000;

const FLAG_REQUEST: u16 = 0x1;
const FLAG_ACK: u16 = 0x4;
const FLAG_DUMP_INTERRUPTED: u16 = 0x10;

fn align(length: usize) -> usize {
    length.next_multiple_of(4)
}

/// A request under construction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    bytes: Vec<u8>,
}

impl Request {
    /// A request of a type, with flags besides `NLM_F_REQUEST`, and the fixed header of its family.
    #[must_use]
    pub fn new(kind: u16, flags: u16, family_header: &[u8]) -> Self {
        let mut bytes = vec![0; 4];
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((FLAG_REQUEST | flags).to_ne_bytes());
        bytes.extend([0; 8]);
        bytes.extend(family_header);
        bytes.resize(align(bytes.len()), 0);
        Self { bytes }
    }

    /// Adds an attribute.
    #[must_use]
    pub fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        self.put(kind, value);
        self
    }

    /// Adds an attribute that holds those that `fill` adds.
    #[must_use]
    pub fn nested(mut self, kind: u16, fill: impl FnOnce(Self) -> Self) -> Self {
        let start = self.bytes.len();
        self.put(kind | NESTED, &[]);
        let mut filled = fill(self);
        let length = u16::try_from(filled.bytes.len() - start).unwrap_or(u16::MAX);
        if let Some(field) = filled.bytes.get_mut(start..start + 2) {
            field.copy_from_slice(&length.to_ne_bytes());
        }
        filled
    }

    fn put(&mut self, kind: u16, value: &[u8]) {
        let length = u16::try_from(ATTRIBUTE_HEADER_BYTES + value.len()).unwrap_or(u16::MAX);
        self.bytes.extend(length.to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(value);
        self.bytes.resize(align(self.bytes.len()), 0);
    }

    /// Asks for an acknowledgement.
    pub(super) fn acknowledged(mut self) -> Self {
        if let Some(flags) = self.bytes.get_mut(6..8) {
            let value = u16::from_ne_bytes([flags[0], flags[1]]) | FLAG_ACK;
            flags.copy_from_slice(&value.to_ne_bytes());
        }
        self
    }

    /// The bytes to send.
    pub(super) fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        if let Some(header) = self.bytes.get_mut(..HEADER_BYTES) {
            header[..4].copy_from_slice(&length.to_ne_bytes());
            header[8..12].copy_from_slice(&sequence.to_ne_bytes());
        }
        self.bytes
    }

    /// The bytes after the message's header, for tests of encoders.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        self.bytes.get(HEADER_BYTES..).unwrap_or_default()
    }
}

/// A message from the kernel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Message<'a> {
    pub(super) kind: u16,
    flags: u16,
    pub(super) sequence: u32,
    pub(super) payload: &'a [u8],
}

impl Message<'_> {
    pub(super) fn is_interrupted(&self) -> bool {
        self.flags & FLAG_DUMP_INTERRUPTED != 0
    }

    /// Of an `NLMSG_ERROR`: what became of the request.
    pub(super) fn error_status(&self) -> Result<io::Result<()>, NetlinkError> {
        self.status().map(as_result).ok_or(NetlinkError::Malformed)
    }

    /// Of an `NLMSG_DONE`: dumps that failed half-way end with an error code in it.
    pub(super) fn done_status(&self) -> io::Result<()> {
        as_result(self.status().unwrap_or_default())
    }

    fn status(&self) -> Option<i32> {
        Some(i32::from_ne_bytes(self.payload.get(..4)?.try_into().ok()?))
    }
}

fn as_result(code: i32) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code.saturating_neg())) }
}

/// The messages in what was received. A message that is cut short is `None`, and the last.
pub(super) fn messages(mut bytes: &[u8]) -> impl Iterator<Item = Option<Message<'_>>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let message = split_message(&mut bytes);
        if message.is_none() {
            bytes = &[];
        }
        Some(message)
    })
}

fn split_message<'a>(bytes: &mut &'a [u8]) -> Option<Message<'a>> {
    let all: &'a [u8] = bytes;
    let length = usize::try_from(u32::from_ne_bytes(all.get(..4)?.try_into().ok()?)).ok()?;
    let message = Message {
        kind: u16::from_ne_bytes(all.get(4..6)?.try_into().ok()?),
        flags: u16::from_ne_bytes(all.get(6..8)?.try_into().ok()?),
        sequence: u32::from_ne_bytes(all.get(8..12)?.try_into().ok()?),
        payload: all.get(HEADER_BYTES..length)?,
    };
    *bytes = all.get(align(length)..).unwrap_or_default();
    Some(message)
}

/// Attributes with their types; ends at the first that is cut short.
#[derive(Debug, Clone)]
pub struct Attributes<'a>(&'a [u8]);

/// The attributes in a payload after its fixed header, or in a nested attribute.
#[must_use]
pub fn attributes(bytes: &[u8]) -> Attributes<'_> {
    Attributes(bytes)
}

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let length = usize::from(u16::from_ne_bytes(self.0.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(self.0.get(2..4)?.try_into().ok()?) & ATTRIBUTE_TYPE_MASK;
        let value = self.0.get(ATTRIBUTE_HEADER_BYTES..length)?;
        self.0 = self.0.get(align(length)..).unwrap_or_default();
        Some((kind, value))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_written_reads_back() {
        let request = Request::new(0x102, 0x300, &[2, 0, 0, 0])
            .attribute(5, &[1])
            .nested(7, |nested| nested.attribute(1, &[9, 9, 9, 9, 9]).attribute(2, &[8]));
        let bytes = request.acknowledged().finish(77);
        let message = messages(&bytes).next().unwrap().unwrap();
        assert_eq!((message.kind, message.flags, message.sequence), (0x102, 0x305, 77));
        let found: Vec<_> = attributes(&message.payload[4..]).collect();
        assert_eq!(found[0], (5, &[1][..]));
        assert_eq!(found[1].0, 7);
        let inner: Vec<_> = attributes(found[1].1).collect();
        assert_eq!(inner, [(1, &[9, 9, 9, 9, 9][..]), (2, &[8][..])]);
        assert_eq!(bytes.len() % 4, 0);
    }

    #[test]
    fn several_messages_and_a_broken_one() {
        let mut bytes = Request::new(1, 0, &[1, 2, 3]).finish(1);
        bytes.extend(Request::new(2, 0, &[]).finish(2));
        bytes.extend([200, 0, 0, 0, 1]);
        let kinds: Vec<_> = messages(&bytes).map(|message| message.map(|message| message.kind)).collect();
        assert_eq!(kinds, [Some(1), Some(2), None]);
    }

    #[test]
    fn nonsense_ends_the_list() {
        assert_eq!(attributes(&[0, 0, 1, 0]).count(), 0);
        assert_eq!(attributes(&[9, 0, 1, 0, 1]).count(), 0);
        assert_eq!(messages(&[3]).count(), 1);
        assert!(messages(&[8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).next().unwrap().is_none());
    }
}
