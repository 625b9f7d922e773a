//! HTTP/2 frames (RFC 9113, sections 4 and 6): the frame header, and writers for the frames that a
//! server of one gRPC stream sends.

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
