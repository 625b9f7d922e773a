//! Encoding of netlink requests and decoding of the kernel's messages (`linux/netlink.h`).

use std::{fmt, io, net::IpAddr};

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
    pub fn new(kind: u16, flags: u16, family_header: &[u8]) -> Self {
        let mut payload = family_header.to_vec();
        payload.resize(align(payload.len()), 0);
        Self { kind, flags: libc::NLM_F_REQUEST as u16 | flags, payload, is_too_long: false }
    }

    /// Begins a request to a netfilter subsystem such as [`libc::NFNL_SUBSYS_IPSET`], with flags in
    /// addition to `NLM_F_REQUEST`. `family` is an `NFPROTO_…` number such as `NFPROTO_IPV4`. Such
    /// requests begin with `struct nfgenmsg` (`linux/netfilter/nfnetlink.h`).
    #[must_use]
    pub fn netfilter(subsystem: libc::c_int, command: u8, flags: u16, family: u8) -> Self {
        Self::new((subsystem as u16) << 8 | u16::from(command), flags, &[family, 0, 0, 0])
    }

    /// The message that opens or closes a transaction of a netfilter subsystem. The message holds
    /// the subsystem in network byte order.
    pub(super) fn batch_limit(kind: libc::c_int, subsystem: libc::c_int) -> Self {
        let [high, low] = (subsystem as u16).to_be_bytes();
        Self::new(kind as u16, 0, &[0, 0, high, low])
    }

    /// Adds an attribute.
    pub fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        self.put_parts(kind, value, &[]);
        self
    }

    /// Adds a text attribute and appends the terminating zero byte.
    pub fn text(mut self, kind: u16, value: &str) -> Self {
        self.put_parts(kind, value.as_bytes(), &[0]);
        self
    }

    /// Adds an address of 4 or 16 bytes.
    pub fn ip(self, kind: u16, address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => self.attribute(kind, &address.octets()),
            IpAddr::V6(address) => self.attribute(kind, &address.octets()),
        }
    }

    /// Adds a nested attribute. `fill` adds the attributes inside it.
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
        let length = self.attribute_length(ATTRIBUTE_HEADER_BYTES + value.len() + end.len());
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
    pub fn kind(&self) -> u16 {
        self.kind
    }

    /// The bytes after the message header.
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

    /// The result of the dump that this `NLMSG_DONE` ends. Nonzero: the dump failed part-way.
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
    checked(bytes, split_message, Malformed("a truncated message"))
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

// Decoding of netlink attributes and their values.

const ATTRIBUTE_HEADER_BYTES: usize = 4;
/// The mask that removes the two flags in the upper bits of an attribute type.
const TYPE_MASK: u16 = libc::NLA_TYPE_MASK as u16;
/// One more than the highest attribute type that the clients of this crate read.
const MAX_TYPES: usize = 26;

pub(super) fn align(length: usize) -> usize {
    length.next_multiple_of(4)
}

/// Declares modules with the kernel's numbers, as a table.
#[macro_export]
macro_rules! constants {
    ($($(#[$doc:meta])* $module:ident: $number:ty { $($name:ident = $value:expr),+ $(,)? })+) => { $(
        $(#[$doc])*
        pub(crate) mod $module {
            $(pub(crate) const $name: $number = $value;)+
        }
    )+ };
}

/// Iterates over the attributes after a fixed header, or inside a nested attribute, with their
/// types. A truncated attribute ends the iteration without an error.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || split(&mut bytes))
}

/// The attributes of the payload of a netfilter message.
///
/// # Errors
/// The payload is truncated.
pub fn netfilter_attributes(payload: &[u8]) -> Result<&[u8], Malformed> {
    payload.get(4..).ok_or(Malformed("a netfilter message is shorter than its header"))
}

/// Like [`attributes`], but a truncated attribute yields an error and ends the iteration.
pub fn checked_attributes(bytes: &[u8]) -> impl Iterator<Item = Result<(u16, &[u8]), Malformed>> {
    checked(bytes, split, Malformed("a truncated attribute"))
}

/// The attributes after a fixed header, or inside a nested attribute, by their types. If a type
/// occurs several times, the last attribute counts.
#[derive(Debug)]
pub struct Fields<'a>([Option<&'a [u8]>; MAX_TYPES]);

impl<'a> Fields<'a> {
    /// Splits bytes into attributes. Ignores attributes of types above 25, which no message of the
    /// clients of this crate needs. Errors: an attribute is truncated.
    pub fn of(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut fields = [None; MAX_TYPES];
        for attribute in checked_attributes(bytes) {
            let (kind, value) = attribute?;
            if let Some(field) = fields.get_mut(usize::from(kind)) {
                *field = Some(value);
            }
        }
        Ok(Self(fields))
    }

    /// The bytes of an attribute.
    pub fn bytes(&self, kind: u16) -> Option<&'a [u8]> {
        self.0.get(usize::from(kind)).copied().flatten()
    }

    /// The value of an attribute, which `read` decodes. Errors: the error of `read`.
    pub fn get<T>(
        &self,
        kind: u16,
        read: impl FnOnce(&'a [u8]) -> Result<T, Malformed>,
    ) -> Result<Option<T>, Malformed> {
        self.bytes(kind).map(read).transpose()
    }

    /// The value of an attribute that must be there.
    /// Errors: the error of `read`, or `missing` if there is no such attribute.
    pub fn need<T>(
        &self,
        kind: u16,
        read: impl FnOnce(&'a [u8]) -> Result<T, Malformed>,
        missing: &'static str,
    ) -> Result<T, Malformed> {
        read(self.bytes(kind).ok_or(Malformed(missing))?)
    }
}

/// Iterates over the parts that `split` takes from the front of `bytes`. If `split` returns `None`
/// before the end, the iterator yields the error `truncated` and ends.
pub(super) fn checked<'a, T>(
    mut bytes: &'a [u8],
    split: impl Fn(&mut &'a [u8]) -> Option<T>,
    truncated: Malformed,
) -> impl Iterator<Item = Result<T, Malformed>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let part = split(&mut bytes).ok_or(truncated);
        if part.is_err() {
            bytes = &[];
        }
        Some(part)
    })
}

fn split<'a>(bytes: &mut &'a [u8]) -> Option<(u16, &'a [u8])> {
    let all: &'a [u8] = bytes;
    let length = usize::from(u16::from_ne_bytes(all.get(..2)?.try_into().ok()?));
    let kind = u16::from_ne_bytes(all.get(2..4)?.try_into().ok()?) & TYPE_MASK;
    let value = all.get(ATTRIBUTE_HEADER_BYTES..length)?;
    *bytes = all.get(align(length)..).unwrap_or_default();
    Some((kind, value))
}

fn array<const N: usize>(value: &[u8]) -> Result<[u8; N], Malformed> {
    value.try_into().map_err(|_| Malformed("an attribute of the wrong length"))
}

macro_rules! readers {
    ($($(#[$doc:meta])* $name:ident: $number:ty = $convert:ident;)+) => { $(
        $(#[$doc])*
        /// Errors: the value has the wrong length.
        pub fn $name(value: &[u8]) -> Result<$number, Malformed> {
            array(value).map(<$number>::$convert)
        }
    )+ };
}

readers! {
    /// Reads one byte.
    read_u8: u8 = from_ne_bytes;
    /// Reads 16 bits in the machine's byte order.
    read_u16: u16 = from_ne_bytes;
    /// Reads 32 bits in the machine's byte order.
    read_u32: u32 = from_ne_bytes;
    /// Reads 16 bits in network byte order.
    read_be16: u16 = from_be_bytes;
    /// Reads 32 bits in network byte order.
    read_be32: u32 = from_be_bytes;
    /// Reads 64 bits in network byte order.
    read_be64: u64 = from_be_bytes;
}

/// Reads an IPv4 address from 4 bytes or an IPv6 address from 16 bytes.
/// Errors: the value has the wrong length.
pub fn read_ip(value: &[u8]) -> Result<IpAddr, Malformed> {
    let address = array::<4>(value).map(IpAddr::from).or_else(|_| array::<16>(value).map(IpAddr::from));
    address.map_err(|_| Malformed("an address that is neither 4 nor 16 bytes long"))
}

/// Reads a text up to the first zero byte or the end of the value. Errors: the text is not UTF-8.
pub fn read_text(value: &[u8]) -> Result<String, Malformed> {
    let text = value.split(|byte| *byte == 0).next().unwrap_or_default();
    str::from_utf8(text).map(str::to_owned).map_err(|_| Malformed("a text is not UTF-8"))
}

// Errors of netlink requests.

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The socket could not be opened.
    #[error("cannot open a netlink socket: {0}")]
    Open(#[source] io::Error),
    /// Sending failed.
    #[error("cannot send to netlink: {0}")]
    Send(#[source] io::Error),
    /// Receiving failed: `ENOBUFS` if answers were lost, `EAGAIN` after the timeout.
    #[error("cannot receive from netlink: {0}")]
    Receive(#[source] io::Error),
    /// The kernel rejected the request.
    #[error("the kernel rejects a netlink request: {0}")]
    Kernel(#[source] Refusal),
    /// The answer has an unexpected format.
    #[error("the kernel's answer is malformed: {0}")]
    Malformed(#[from] Malformed),
    /// An attribute of the request, with its header, exceeds 65,535 bytes. Its batch was not sent.
    #[error("a netlink request is too long: an attribute holds 65,531 bytes at most")]
    RequestTooLong,
}

impl NetlinkError {
    /// Returns whether a retry of the same request may succeed at once: answers were lost or late,
    /// or the kernel was interrupted or busy.
    pub fn is_transient(&self) -> bool {
        let code = match self {
            Self::Send(error) | Self::Receive(error) => error.raw_os_error(),
            Self::Kernel(refusal) => Some(refusal.code),
            Self::Open(_) | Self::Malformed(_) | Self::RequestTooLong => None,
        };
        matches!(code, Some(libc::EINTR | libc::ENOBUFS | libc::EAGAIN | libc::EBUSY))
    }

    /// The kernel's error number, if the kernel rejected the request.
    pub fn refusal_code(&self) -> Option<i32> {
        match self {
            Self::Kernel(refusal) => Some(refusal.code),
            _ => None,
        }
    }
}

/// The kernel's answer to a request that it rejects.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Refusal {
    /// The positive error number: an `errno` value, or a subsystem's own number above 4095.
    pub code: i32,
    /// The kernel's error text, if it sent one (extended acknowledgement, `NLMSGERR_ATTR_MSG`).
    pub message: Option<String>,
    /// The position of the faulty attribute, in bytes from the start of the request's header
    /// (`NLMSGERR_ATTR_OFFS`).
    pub offset_bytes: Option<u32>,
}

impl Refusal {
    /// A rejection with an error number and no details.
    pub fn of_code(code: i32) -> Self {
        Self { code, message: None, offset_bytes: None }
    }

    /// The error number as [`std::io::Error`]. It has no text for a subsystem's own numbers.
    pub fn to_io_error(&self) -> io::Error {
        io::Error::from_raw_os_error(self.code)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.message {
            Some(message) => write!(f, "{} ({message})", self.to_io_error()),
            None => write!(f, "{}", self.to_io_error()),
        }
    }
}

/// A message from the kernel has an unexpected format. The text describes the fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub &'static str);

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

#[cfg(test)]
mod attribute_tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn malformed_attributes_end_the_iteration_and_are_an_error_for_checked_attributes() {
        assert_eq!(attributes(&[0, 0, 1, 0]).count(), 0);
        assert_eq!(attributes(&[9, 0, 1, 0, 1]).count(), 0);
        let bytes = [5, 0, 1, 0, 7, 0, 0, 0, 9, 0, 2, 0, 1];
        let found: Vec<_> = checked_attributes(&bytes).collect();
        assert_eq!(found, [Ok((1, &[7][..])), Err(Malformed("a truncated attribute"))]);
        assert_eq!(checked_attributes(&[1]).collect::<Vec<_>>().len(), 1);
        assert_eq!(checked_attributes(&[]).count(), 0);
    }

    proptest! {
        #[test]
        fn the_iteration_over_any_bytes_ends(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            prop_assert!(attributes(&bytes).count() <= 20);
            let checked: Vec<_> = checked_attributes(&bytes).collect();
            prop_assert!(checked.iter().rev().skip(1).all(Result::is_ok));
        }
    }
}
