//! Encoding of netlink requests and decoding of the kernel's messages (`linux/netlink.h`).

use std::net::IpAddr;

use super::{
    Malformed, NetlinkError, Refusal,
    attribute::{self, align, attributes},
    read_text, read_u32,
};

/// An error, or an acknowledgement when its code is 0.
pub(super) const ERROR: u16 = libc::NLMSG_ERROR as u16;
/// The end of a dump.
pub(super) const DONE: u16 = libc::NLMSG_DONE as u16;

pub(super) const HEADER_BYTES: usize = 16;
const FLAG_DUMP_INTERRUPTED: u16 = libc::NLM_F_DUMP_INTR as u16;
/// The error repeats only the header of the rejected request.
const FLAG_CAPPED: u16 = libc::NLM_F_CAPPED as u16;
/// Attributes with details follow.
const FLAG_EXTENDED: u16 = libc::NLM_F_ACK_TLVS as u16;
/// `NLMSGERR_ATTR_MSG`.
const ERROR_MESSAGE: u16 = 1;
/// `NLMSGERR_ATTR_OFFS`.
const ERROR_OFFSET: u16 = 2;

/// A request under construction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    kind: u16,
    flags: u16,
    payload: Vec<u8>,
    /// True if an attribute was longer than its 16-bit length field allows.
    is_too_long: bool,
}

impl Request {
    /// Begins a request with a message type, the fixed header of its family, and flags in addition
    /// to `NLM_F_REQUEST`.
    #[must_use]
    pub fn new(kind: u16, flags: u16, family_header: &[u8]) -> Self {
        let mut payload = family_header.to_vec();
        payload.resize(align(payload.len()), 0);
        Self { kind, flags: libc::NLM_F_REQUEST as u16 | flags, payload, is_too_long: false }
    }

    /// Adds an attribute.
    #[must_use]
    pub fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        self.put_parts(kind, value, &[]);
        self
    }

    /// Adds a text attribute and appends the terminating zero byte.
    #[must_use]
    pub fn text(mut self, kind: u16, value: &str) -> Self {
        self.put_parts(kind, value.as_bytes(), &[0]);
        self
    }

    /// Adds an address of 4 or 16 bytes.
    #[must_use]
    pub fn ip(self, kind: u16, address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => self.attribute(kind, &address.octets()),
            IpAddr::V6(address) => self.attribute(kind, &address.octets()),
        }
    }

    /// Adds a nested attribute. `fill` adds the attributes inside it.
    #[must_use]
    pub fn nested(mut self, kind: u16, fill: impl FnOnce(Self) -> Self) -> Self {
        let start = self.payload.len();
        self.put_parts(kind | libc::NLA_F_NESTED as u16, &[], &[]);
        let mut filled = fill(self);
        let length = filled.attribute_length(filled.payload.len() - start);
        if let Some(field) = filled.payload.get_mut(start..start + 2) {
            field.copy_from_slice(&length.to_ne_bytes());
        }
        filled
    }

    fn put_parts(&mut self, kind: u16, value: &[u8], end: &[u8]) {
        let length = self.attribute_length(attribute::HEADER_BYTES + value.len() + end.len());
        self.payload.extend(length.to_ne_bytes());
        self.payload.extend(kind.to_ne_bytes());
        self.payload.extend(value);
        self.payload.extend(end);
        self.payload.resize(align(self.payload.len()), 0);
    }

    fn attribute_length(&mut self, length: usize) -> u16 {
        u16::try_from(length).unwrap_or_else(|_| {
            self.is_too_long = true;
            u16::MAX
        })
    }

    /// The number of bytes encoded so far, including the header.
    #[must_use]
    pub fn length(&self) -> usize {
        HEADER_BYTES + self.payload.len()
    }

    /// Appends this request to `bytes`, which holds earlier requests of the same send.
    /// `acknowledged` sets `NLM_F_ACK`: the kernel acknowledges the request.
    pub(super) fn append_to(&self, bytes: &mut Vec<u8>, sequence: u32, acknowledged: bool) -> Result<(), NetlinkError> {
        let length = u32::try_from(self.length()).ok().filter(|_| !self.is_too_long);
        bytes.extend(length.ok_or(NetlinkError::RequestTooLong)?.to_ne_bytes());
        bytes.extend(self.kind.to_ne_bytes());
        bytes.extend((self.flags | if acknowledged { libc::NLM_F_ACK as u16 } else { 0 }).to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(&self.payload);
        Ok(())
    }

    /// The message's type.
    #[must_use]
    pub fn kind(&self) -> u16 {
        self.kind
    }

    /// The bytes after the message header.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }
}

/// A message from the kernel: a part of an answer, or a notification of a multicast group.
#[derive(Debug, Clone, Copy)]
pub struct Message<'a> {
    /// The message's type.
    pub kind: u16,
    flags: u16,
    pub(super) sequence: u32,
    /// The port of the socket whose request caused this message ([`super::Connection::port`]), or 0
    /// for a change by the kernel.
    pub port: u32,
    /// The bytes after the message header.
    pub payload: &'a [u8],
}

impl Message<'_> {
    pub(super) fn is_interrupted(&self) -> bool {
        self.flags & FLAG_DUMP_INTERRUPTED != 0
    }

    /// The result of the request that this `NLMSG_ERROR` answers.
    pub(super) fn error_status(&self) -> Result<Result<(), Refusal>, Malformed> {
        let code = self.status()?;
        // After the error number, the kernel repeats the whole request or only its header.
        let repeated = match self.flags & FLAG_CAPPED {
            0 => self.payload.get(4..8).map(read_u32).transpose()?.unwrap_or_default(),
            _ => u32::try_from(HEADER_BYTES).unwrap_or_default(),
        };
        Ok(self.outcome(code, 4 + align(usize::try_from(repeated).unwrap_or(usize::MAX - 8))))
    }

    /// The result of the dump that this `NLMSG_DONE` ends. The code is nonzero if the dump failed
    /// part-way.
    pub(super) fn done_status(&self) -> Result<(), Refusal> {
        self.outcome(self.status().unwrap_or_default(), 4)
    }

    fn status(&self) -> Result<i32, Malformed> {
        let code = self.payload.get(..4).ok_or(Malformed("an error without its number"))?;
        read_u32(code).map(u32::cast_signed)
    }

    fn outcome(&self, code: i32, extension: usize) -> Result<(), Refusal> {
        if code == 0 {
            return Ok(());
        }
        let mut refusal = Refusal::of_code(code.saturating_neg());
        if self.flags & FLAG_EXTENDED != 0 {
            for (kind, value) in attributes(self.payload.get(extension..).unwrap_or_default()) {
                match kind {
                    ERROR_MESSAGE => refusal.message = read_text(value).ok(),
                    ERROR_OFFSET => refusal.offset_bytes = read_u32(value).ok(),
                    _ => {}
                }
            }
        }
        Err(refusal)
    }
}

/// Splits received bytes into messages. A truncated message yields an error and ends the iteration.
pub(super) fn messages(bytes: &[u8]) -> impl Iterator<Item = Result<Message<'_>, Malformed>> {
    attribute::checked(bytes, split_message, Malformed("a truncated message"))
}

fn split_message<'a>(bytes: &mut &'a [u8]) -> Option<Message<'a>> {
    let all: &'a [u8] = bytes;
    let length = usize::try_from(u32::from_ne_bytes(all.get(..4)?.try_into().ok()?)).ok()?;
    let message = Message {
        kind: u16::from_ne_bytes(all.get(4..6)?.try_into().ok()?),
        flags: u16::from_ne_bytes(all.get(6..8)?.try_into().ok()?),
        sequence: u32::from_ne_bytes(all.get(8..12)?.try_into().ok()?),
        port: u32::from_ne_bytes(all.get(12..16)?.try_into().ok()?),
        payload: all.get(HEADER_BYTES..length)?,
    };
    *bytes = all.get(align(length)..).unwrap_or_default();
    Some(message)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn sent(request: &Request, sequence: u32, acknowledged: bool) -> Result<Vec<u8>, NetlinkError> {
        let mut bytes = Vec::new();
        request.append_to(&mut bytes, sequence, acknowledged).map(|()| bytes)
    }

    #[test]
    fn an_encoded_request_is_decoded_unchanged() {
        let request = Request::new(0x102, 0x300, &[2, 0, 0, 0])
            .attribute(5, &[1])
            .nested(7, |nested| nested.attribute(1, &[9, 9, 9, 9, 9]).attribute(2, &[8]));
        let bytes = sent(&request, 77, true).unwrap();
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
    fn messages_before_a_truncated_message_are_decoded() {
        let mut bytes = sent(&Request::new(1, 0, &[1, 2, 3]), 1, false).unwrap();
        bytes.extend(sent(&Request::new(2, 0, &[]), 2, false).unwrap());
        bytes.extend([200, 0, 0, 0, 1]);
        let kinds: Vec<_> = messages(&bytes).map(|message| message.ok().map(|message| message.kind)).collect();
        assert_eq!(kinds, [Some(1), Some(2), None]);
        assert_eq!(messages(&[3]).count(), 1);
        assert!(messages(&[8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).next().unwrap().is_err());
    }

    fn refused(flags: u16, payload: &[u8]) -> Result<(), Refusal> {
        Message { kind: ERROR, flags, sequence: 1, port: 0, payload }.error_status().unwrap()
    }

    #[test]
    fn extended_acknowledgements_are_read_after_the_repeated_request() {
        let extension =
            Request::new(0, 0, &[]).text(ERROR_MESSAGE, "no").attribute(ERROR_OFFSET, &20_u32.to_ne_bytes());
        let repeated = sent(&Request::new(7, 0, &[1, 2, 3, 4]), 1, false).unwrap();
        let expected = Refusal { code: 2, message: Some("no".into()), offset_bytes: Some(20) };
        for (flags, repeated) in
            [(FLAG_EXTENDED, &repeated[..]), (FLAG_EXTENDED | FLAG_CAPPED, &repeated[..HEADER_BYTES])]
        {
            let payload = [&(-2_i32).to_ne_bytes()[..], repeated, extension.payload()].concat();
            assert_eq!(refused(flags, &payload), Err(expected.clone()));
        }
        assert_eq!(refused(0, &(-2_i32).to_ne_bytes()), Err(Refusal::of_code(2)));
        assert_eq!(refused(0, &[0; 4]), Ok(()));
        assert!(Message { kind: ERROR, flags: 0, sequence: 1, port: 0, payload: &[1] }.error_status().is_err());
    }

    #[test]
    fn attributes_that_are_too_long_are_refused_before_they_are_sent() {
        let long = vec![0; 65_532];
        let is_refused = |request: Request| matches!(sent(&request, 1, false), Err(NetlinkError::RequestTooLong));
        assert!(is_refused(Request::new(1, 0, &[]).attribute(1, &long)));
        assert!(is_refused(
            Request::new(1, 0, &[])
                .nested(1, |inner| inner.attribute(1, &long[..40_000]).attribute(2, &long[..40_000]))
        ));
        assert!(!is_refused(Request::new(1, 0, &[]).attribute(1, &long[..65_531])));
    }

    proptest! {
        #[test]
        fn any_bytes_give_messages_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
            for message in messages(&bytes).flatten() {
                let _ = message.error_status();
                let _ = message.done_status();
            }
        }
    }
}
