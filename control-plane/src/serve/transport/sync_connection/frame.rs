//! HTTP/2 frames (RFC 9113, sections 4 and 6): the frame header, and writers for the frames that a
//! server of one gRPC stream sends.

#[cfg(test)]
#[path = "input_tests.rs"]
mod input_tests;

use headgate_proto::{MAX_AGENT_MESSAGE_BYTES, PREFIX_BYTES};
use tonic::Status;

/// The length of a frame's header.
pub(super) const HEADER_BYTES: usize = 9;

/// The largest payload of a frame in both directions. It is the default of
/// `SETTINGS_MAX_FRAME_SIZE` (RFC 9113, 4.2).
pub(super) const MAX_PAYLOAD_BYTES: u32 = 16_384;

/// The first bytes that a client sends (RFC 9113, 3.4).
pub(in super::super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The default window of a connection and of a stream, in bytes (RFC 9113, 6.9.2).
pub(super) const DEFAULT_WINDOW: u32 = 65_535;

/// The largest window, in bytes (RFC 9113, 6.9.1).
pub(super) const MAX_WINDOW: u32 = (1 << 31) - 1;

/// Types of frames (RFC 9113, section 6).
pub(super) mod kind {
    pub(in super::super) const DATA: u8 = 0;
    pub(in super::super) const HEADERS: u8 = 1;
    pub(in super::super) const PRIORITY: u8 = 2;
    pub(in super::super) const RST_STREAM: u8 = 3;
    pub(in super::super) const SETTINGS: u8 = 4;
    pub(in super::super) const PUSH_PROMISE: u8 = 5;
    pub(in super::super) const PING: u8 = 6;
    pub(in super::super) const GOAWAY: u8 = 7;
    pub(in super::super) const WINDOW_UPDATE: u8 = 8;
    pub(in super::super) const CONTINUATION: u8 = 9;
}

/// Flags of frames.
pub(super) mod flag {
    pub(in super::super) const ACK: u8 = 0x1;
    pub(in super::super) const END_STREAM: u8 = 0x1;
    pub(in super::super) const END_HEADERS: u8 = 0x4;
    pub(in super::super) const PADDED: u8 = 0x8;
}

/// Error codes (RFC 9113, section 7).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Code {
    NoError = 0x0,
    ProtocolError = 0x1,
    FlowControlError = 0x3,
    StreamClosed = 0x5,
    FrameSizeError = 0x6,
    EnhanceYourCalm = 0xb,
}

/// A frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrameHeader {
    pub(super) length: u32,
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) stream: u32,
}

impl FrameHeader {
    /// Reads a header. The reserved bit before the stream's number is ignored (RFC 9113, 4.1).
    pub(super) fn parse(bytes: &[u8; HEADER_BYTES]) -> Self {
        let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = *bytes;
        Self {
            length: u32::from_be_bytes([0, l0, l1, l2]),
            kind,
            flags,
            stream: u32::from_be_bytes([s0, s1, s2, s3]) & MAX_WINDOW,
        }
    }

    /// Returns true if a flag is set.
    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    fn put(self, out: &mut Vec<u8>) {
        let [_, l0, l1, l2] = self.length.to_be_bytes();
        out.extend_from_slice(&[l0, l1, l2, self.kind, self.flags]);
        out.extend_from_slice(&self.stream.to_be_bytes());
    }
}

fn put(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    // A payload has at most `MAX_PAYLOAD_BYTES`, so its length fits into the 24 bits of the field.
    FrameHeader { length: u32::try_from(payload.len()).unwrap_or(u32::MAX), kind, flags, stream }.put(out);
    out.extend_from_slice(payload);
}

/// Writes `SETTINGS` that change nothing: the server's preface.
pub(super) fn put_settings(out: &mut Vec<u8>) {
    put(out, kind::SETTINGS, 0, 0, &[]);
}

pub(super) fn put_settings_ack(out: &mut Vec<u8>) {
    put(out, kind::SETTINGS, flag::ACK, 0, &[]);
}

pub(super) fn put_ping(out: &mut Vec<u8>, is_ack: bool, payload: [u8; 8]) {
    put(out, kind::PING, if is_ack { flag::ACK } else { 0 }, 0, &payload);
}

pub(super) fn put_window_update(out: &mut Vec<u8>, stream: u32, increment: u32) {
    put(out, kind::WINDOW_UPDATE, 0, stream, &increment.to_be_bytes());
}

pub(super) fn put_reset(out: &mut Vec<u8>, stream: u32, code: Code) {
    put(out, kind::RST_STREAM, 0, stream, &(code as u32).to_be_bytes());
}

pub(super) fn put_go_away(out: &mut Vec<u8>, last_stream: u32, code: Code, text: &str) {
    let mut payload = Vec::with_capacity(8 + text.len());
    payload.extend_from_slice(&last_stream.to_be_bytes());
    payload.extend_from_slice(&(code as u32).to_be_bytes());
    payload.extend_from_slice(text.as_bytes());
    put(out, kind::GOAWAY, 0, 0, &payload);
}

pub(super) fn put_data(out: &mut Vec<u8>, stream: u32, payload: &[u8]) {
    put(out, kind::DATA, 0, stream, payload);
}

/// Writes the response's headers, which are the first header block of the server.
///
/// The block begins with a size update of HPACK's dynamic table to 0, because the server never uses
/// the table. A client whose settings reduce the table's size requires the update (RFC 9113, 4.3.1;
/// RFC 7541, 4.2 and 6.3). Without the update, the client reports an error.
///
/// Next is the field `:status: 200`, entry 8 of the static table (RFC 7541, 6.1). The last field is
/// the content type, a literal that is not indexed, with the name of entry 31 (RFC 7541, 6.2.2).
pub(super) fn put_response_headers(out: &mut Vec<u8>, stream: u32) {
    let mut block = vec![0x20, 0x88, 0x0f, 31 - 15];
    put_string(&mut block, b"application/grpc");
    put(out, kind::HEADERS, flag::END_HEADERS, stream, &block);
}

/// Writes the trailers that end a gRPC stream.
pub(super) fn put_trailers(out: &mut Vec<u8>, stream: u32, status: &Status) {
    let mut headers = http::HeaderMap::new();
    if let Err(status) = status.add_header(&mut headers) {
        // Only metadata can be invalid as a header, and these statuses have no metadata.
        tracing::error!(%status, "the status of a stream cannot be written");
    }
    let mut block = Vec::new();
    for (name, value) in &headers {
        // Each field is a literal that is not indexed and has a literal name (RFC 7541, 6.2.2).
        block.push(0x00);
        put_string(&mut block, name.as_str().as_bytes());
        put_string(&mut block, value.as_bytes());
    }
    put(out, kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, stream, &block);
}

/// Writes a string literal without Huffman coding (RFC 7541, 5.2).
fn put_string(out: &mut Vec<u8>, text: &[u8]) {
    // The length is an integer with a prefix of seven bits (RFC 7541, 5.1).
    let mut rest = text.len();
    if rest < 127 {
        out.extend(u8::try_from(rest));
    } else {
        out.push(127);
        rest -= 127;
        while rest >= 128 {
            out.extend(u8::try_from(rest % 128 + 128));
            rest /= 128;
        }
        out.extend(u8::try_from(rest));
    }
    out.extend_from_slice(text);
}

// Parses the frames that a client sends on a connection of one stream (RFC 9113, sections 4 to 6).
// The bytes may arrive in pieces of any size.
//
// The parser stores only the received part of an incomplete frame. It does not decode header
// blocks, and so needs no dynamic table of HPACK:
// the port has a single method, so the headers of the request say nothing. Of later header blocks
// only the stream's trailers matter, and only because they end the stream.

/// The maximum numbers of frames and of bytes of one header block. Larger blocks are refused
/// (RFC 9113, 10.5.1).
const MAX_BLOCK: (u32, u32) = (64, 64 << 10);

/// The meaning of a frame, or of a part of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameEvent<'a> {
    /// The headers of the stream's request have begun. Nothing in them is decoded.
    Opened { stream: u32 },
    /// The client sent bytes of the stream.
    Data(&'a [u8]),
    /// A `DATA` frame is complete. `bytes` is the size of its payload including padding. The
    /// payload counts against the window of the connection and, if `is_ours`, of the stream.
    Received { is_ours: bool, bytes: u32 },
    /// The client has ended its half of the stream.
    EndStream,
    /// The client has reset the stream.
    Reset,
    /// The client has opened another stream.
    OtherStream,
    /// The client has changed the initial window of streams.
    InitialWindow(u32),
    /// A `SETTINGS` frame is complete and needs an acknowledgement.
    Settings,
    /// The client sent a ping that needs an answer.
    Ping([u8; 8]),
    /// The client has enlarged a window: of the stream if `is_ours`, otherwise of the connection.
    WindowUpdate { is_ours: bool, bytes: u32 },
}

/// An error of the client that ends the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Violation {
    pub(super) code: Code,
    pub(super) text: &'static str,
}

fn violation<T>(code: Code, text: &'static str) -> Result<T, Violation> {
    Err(Violation { code, text })
}

/// The parser of a connection's frames.
#[derive(Debug, Default)]
pub(super) struct Input {
    /// The number of bytes of the preface that have arrived.
    preface_bytes: usize,
    /// The part of a frame that has arrived.
    partial: Vec<u8>,
    /// The number of the stream; 0 until its headers have arrived.
    stream: u32,
    /// The highest number of a stream that the client has opened.
    highest: u32,
    /// True after the client has ended its half of the stream.
    has_ended: bool,
    /// The header block that is not complete: its stream, and the numbers of its frames and bytes.
    block: Option<(u32, u32, u32)>,
}

impl Input {
    /// Parses bytes of the connection, which begins with the preface, and passes events to `take`.
    ///
    /// # Errors
    ///
    /// The error of `take`, or [`Violation`]. `feed` must not be called again after an error.
    pub(super) fn feed<E: From<Violation>>(
        &mut self,
        bytes: &[u8],
        mut take: impl FnMut(FrameEvent<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let preface = &PREFACE[self.preface_bytes..];
        let (begin, rest) = bytes.split_at(preface.len().min(bytes.len()));
        if !preface.starts_with(begin) {
            return Ok(violation(Code::ProtocolError, "the connection does not begin with the preface of HTTP/2")?);
        }
        self.preface_bytes += begin.len();
        let mut partial = std::mem::take(&mut self.partial);
        let mut bytes = if partial.is_empty() {
            rest
        } else {
            partial.extend_from_slice(rest);
            &partial
        };
        while let Some((header, rest)) = bytes.split_first_chunk() {
            let header = FrameHeader::parse(header);
            if header.length > MAX_PAYLOAD_BYTES {
                let text = "a frame is larger than SETTINGS_MAX_FRAME_SIZE allows";
                return Ok(violation(Code::FrameSizeError, text)?);
            }
            let length = usize::try_from(header.length).unwrap_or(usize::MAX);
            let Some((payload, rest)) = rest.split_at_checked(length) else { break };
            self.check(&header)?;
            self.frame(&header, payload, &mut take)?;
            bytes = rest;
        }
        // While a frame is incomplete, its vector only grows.
        if bytes.len() != partial.len() {
            partial = bytes.to_vec();
        }
        self.partial = partial;
        Ok(())
    }

    /// Checks the header of a frame.
    fn check(&mut self, header: &FrameHeader) -> Result<(), Violation> {
        let FrameHeader { length, stream, .. } = *header;
        if self.block.is_some() != (header.kind == kind::CONTINUATION) {
            return violation(Code::ProtocolError, "CONTINUATION is missing or out of place");
        }
        let is_on_connection = matches!(header.kind, kind::SETTINGS | kind::PING | kind::GOAWAY);
        let is_on_stream = matches!(header.kind, kind::DATA | kind::HEADERS | kind::PRIORITY | kind::RST_STREAM);
        if (is_on_connection && stream != 0) || (is_on_stream && stream == 0) {
            return violation(Code::ProtocolError, "a frame of this type must not be on this stream");
        }
        let has_wrong_size = match header.kind {
            kind::SETTINGS => length % 6 != 0 || (header.has(flag::ACK) && length > 0),
            kind::PING => length != 8,
            kind::WINDOW_UPDATE | kind::RST_STREAM => length != 4,
            kind::PRIORITY => length != 5,
            kind::GOAWAY => length < 8,
            _ => false,
        };
        if has_wrong_size {
            return violation(Code::FrameSizeError, "the length of a frame is wrong for its type");
        }
        match header.kind {
            kind::DATA => self.begin_data(header),
            kind::HEADERS => self.begin_headers(header),
            kind::CONTINUATION => self.continue_block(header),
            kind::RST_STREAM | kind::WINDOW_UPDATE if stream > self.highest => {
                violation(Code::ProtocolError, "a frame is on a stream that was never opened")
            }
            kind::PUSH_PROMISE => violation(Code::ProtocolError, "a client must not push"),
            _ => Ok(()),
        }
    }

    fn begin_data(&self, header: &FrameHeader) -> Result<(), Violation> {
        if header.stream > self.highest {
            return violation(Code::ProtocolError, "DATA on a stream that was never opened");
        }
        if header.stream == self.stream && self.has_ended {
            return violation(Code::StreamClosed, "DATA on a stream that the client has ended");
        }
        Ok(())
    }

    fn begin_headers(&mut self, header: &FrameHeader) -> Result<(), Violation> {
        let FrameHeader { stream, length, .. } = *header;
        if stream % 2 == 0 || (stream < self.stream) {
            return violation(Code::ProtocolError, "HEADERS on a stream that a client must not open");
        }
        if stream == self.stream {
            if self.has_ended {
                return violation(Code::StreamClosed, "HEADERS on a stream that the client has ended");
            }
            if !header.has(flag::END_STREAM) {
                return violation(Code::ProtocolError, "HEADERS in the middle of a stream without END_STREAM");
            }
        }
        if !header.has(flag::END_HEADERS) {
            self.block = Some((stream, 1, length));
        }
        Ok(())
    }

    fn continue_block(&mut self, header: &FrameHeader) -> Result<(), Violation> {
        let Some((stream, frames, bytes)) = self.block.take() else { return Ok(()) };
        if stream != header.stream {
            return violation(Code::ProtocolError, "CONTINUATION and its HEADERS are on different streams");
        }
        let (frames, bytes) = (frames + 1, bytes + header.length);
        if frames > MAX_BLOCK.0 || bytes > MAX_BLOCK.1 {
            return violation(Code::EnhanceYourCalm, "a header block is too large");
        }
        if !header.has(flag::END_HEADERS) {
            self.block = Some((stream, frames, bytes));
        }
        Ok(())
    }

    /// Handles a frame whose header is valid.
    fn frame<E: From<Violation>>(
        &mut self,
        header: &FrameHeader,
        payload: &[u8],
        take: &mut impl FnMut(FrameEvent<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let is_ours = header.stream != 0 && header.stream == self.stream;
        match header.kind {
            kind::DATA => {
                let data = without_padding(header, payload)?;
                if is_ours && !data.is_empty() {
                    take(FrameEvent::Data(data))?;
                }
                take(FrameEvent::Received { is_ours, bytes: header.length })?;
                if is_ours && header.has(flag::END_STREAM) {
                    self.has_ended = true;
                    take(FrameEvent::EndStream)?;
                }
            }
            kind::HEADERS => {
                if self.stream == 0 {
                    self.stream = header.stream;
                    take(FrameEvent::Opened { stream: header.stream })?;
                } else if header.stream > self.highest {
                    take(FrameEvent::OtherStream)?;
                }
                self.highest = self.highest.max(header.stream);
                if header.stream == self.stream && header.has(flag::END_STREAM) {
                    self.has_ended = true;
                    take(FrameEvent::EndStream)?;
                }
            }
            kind::RST_STREAM if is_ours => take(FrameEvent::Reset)?,
            kind::SETTINGS if !header.has(flag::ACK) => {
                for [i0, i1, value @ ..] in payload.as_chunks::<6>().0 {
                    setting(u16::from_be_bytes([*i0, *i1]), u32::from_be_bytes(*value), take)?;
                }
                take(FrameEvent::Settings)?;
            }
            kind::PING if !header.has(flag::ACK) => {
                take(FrameEvent::Ping(payload.try_into().unwrap_or_default()))?;
            }
            kind::WINDOW_UPDATE => {
                let bytes = u32::from_be_bytes(payload.try_into().unwrap_or_default()) & MAX_WINDOW;
                if bytes == 0 {
                    return Ok(violation(Code::ProtocolError, "WINDOW_UPDATE with an increment of 0")?);
                }
                if is_ours || header.stream == 0 {
                    take(FrameEvent::WindowUpdate { is_ours, bytes })?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

fn without_padding<'a>(header: &FrameHeader, payload: &'a [u8]) -> Result<&'a [u8], Violation> {
    if !header.has(flag::PADDED) {
        return Ok(payload);
    }
    let Some((padding, rest)) = payload.split_first() else {
        return violation(Code::FrameSizeError, "a padded frame has no padding length");
    };
    match rest.len().checked_sub(usize::from(*padding)) {
        Some(length) => Ok(&rest[..length]),
        None => violation(Code::ProtocolError, "the padding is longer than the payload"),
    }
}

fn setting<E: From<Violation>>(
    name: u16,
    value: u32,
    take: &mut impl FnMut(FrameEvent<'_>) -> Result<(), E>,
) -> Result<(), E> {
    match name {
        // SETTINGS_ENABLE_PUSH
        2 if value > 1 => Ok(violation(Code::ProtocolError, "SETTINGS_ENABLE_PUSH is neither 0 nor 1")?),
        // SETTINGS_INITIAL_WINDOW_SIZE
        4 if value > MAX_WINDOW => Ok(violation(Code::FlowControlError, "SETTINGS_INITIAL_WINDOW_SIZE is too large")?),
        4 => take(FrameEvent::InitialWindow(value)),
        // SETTINGS_MAX_FRAME_SIZE. The value is not stored, because the server never sends frames
        // larger than the default.
        5 if !(MAX_PAYLOAD_BYTES..1 << 24).contains(&value) => {
            Ok(violation(Code::ProtocolError, "SETTINGS_MAX_FRAME_SIZE is out of its range")?)
        }
        // Other settings forbid things that the server never does: pushes, use of the dynamic
        // table, and large headers.
        _ => Ok(()),
    }
}

/// A flow-control window for data from the client (RFC 9113, 6.9). The server enlarges the window
/// as soon as half of it is used.
#[derive(Debug, Default)]
pub(super) struct ReceiveWindow {
    used: u32,
}

impl ReceiveWindow {
    /// Counts bytes that have arrived. Returns the increment for a `WINDOW_UPDATE`, if it is time
    /// to send one.
    ///
    /// # Errors
    ///
    /// [`Violation`], if the bytes exceed the window.
    pub(super) fn receive(&mut self, bytes: u32) -> Result<Option<u32>, Violation> {
        self.used += bytes;
        if self.used > DEFAULT_WINDOW {
            return violation(Code::FlowControlError, "DATA exceeds the flow-control window");
        }
        Ok((self.used > DEFAULT_WINDOW / 2).then(|| std::mem::take(&mut self.used)))
    }
}

// Assembles gRPC messages from the bytes of a stream. The bytes may arrive in pieces of any size.

/// Why bytes are not valid messages of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Malformed {
    /// A message is longer than discovery.proto allows.
    TooLarge,
    /// A message is compressed, which the server does not support.
    Compressed,
    /// The stream ended in the middle of a message.
    Incomplete,
}

/// Assembles messages. This type stores only the received part of an incomplete message.
#[derive(Debug, Default)]
pub(super) struct Messages(Vec<u8>);

impl Messages {
    /// Adds bytes, and passes each message that they complete to `take`.
    ///
    /// # Errors
    ///
    /// The error of `take`, or [`Malformed`]. `feed` must not be called again after an error.
    pub(super) fn feed<E: From<Malformed>>(
        &mut self,
        bytes: &[u8],
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut arrived = std::mem::take(&mut self.0);
        arrived.extend_from_slice(bytes);
        let mut taken = 0;
        while let Some(([compressed, length @ ..], rest)) = arrived[taken..].split_first_chunk::<PREFIX_BYTES>() {
            let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
            if length > MAX_AGENT_MESSAGE_BYTES {
                return Err(Malformed::TooLarge.into());
            }
            if *compressed != 0 {
                return Err(Malformed::Compressed.into());
            }
            let Some(message) = rest.get(..length) else { break };
            take(message)?;
            taken += PREFIX_BYTES + length;
        }
        if taken < arrived.len() {
            arrived.drain(..taken);
            self.0 = arrived;
        }
        Ok(())
    }

    /// Checks that the stream may end here.
    ///
    /// # Errors
    ///
    /// [`Malformed::Incomplete`] in the middle of a message.
    pub(super) fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed::Incomplete) }
    }
}

#[cfg(test)]
mod message_tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn framed(message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap();
        [&[0][..], &length.to_be_bytes(), message].concat()
    }

    fn read(pieces: &[&[u8]]) -> (Vec<Vec<u8>>, Result<(), Malformed>) {
        let (mut messages, mut taken) = (Messages::default(), Vec::new());
        for piece in pieces {
            let result = messages.feed(piece, |message| {
                taken.push(message.to_vec());
                Ok::<_, Malformed>(())
            });
            if result.is_err() {
                return (taken, result);
            }
        }
        (taken, messages.end())
    }

    #[test]
    fn large_and_compressed_messages_are_refused_by_their_prefix() {
        let large = u32::try_from(MAX_AGENT_MESSAGE_BYTES + 1).unwrap().to_be_bytes();
        assert_eq!(read(&[&[0], &large]).1, Err(Malformed::TooLarge));
        assert_eq!(read(&[&[1, 0, 0, 0, 4]]).1, Err(Malformed::Compressed));
        assert_eq!(read(&[&framed(b"ab"), &[0, 0]]), (vec![b"ab".to_vec()], Err(Malformed::Incomplete)));
    }

    proptest! {
        #[test]
        fn messages_are_the_same_wherever_the_bytes_are_cut(
            sent in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..8),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let bytes: Vec<u8> = sent.iter().flat_map(|message| framed(message)).collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]]).collect();
            prop_assert_eq!(read(&pieces), (sent, Ok(())));
        }

        #[test]
        fn memory_is_proportional_to_the_bytes_that_arrived(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..64), 0..16),
        ) {
            let mut messages = Messages::default();
            let mut total = 0;
            for piece in &pieces {
                total += piece.len();
                if messages.feed(piece, |_| Ok::<_, Malformed>(())).is_err() {
                    break;
                }
                prop_assert!(messages.0.capacity() <= 2 * total.max(64));
            }
        }
    }
}
