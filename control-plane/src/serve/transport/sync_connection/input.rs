//! Parses the frames that a client sends on a connection of one stream (RFC 9113, sections 4 to 6).
//! The bytes may arrive in pieces of any size.
//!
//! The parser stores only the received part of an incomplete frame. It does not decode header
//! blocks, and so needs no dynamic table of HPACK:
//! the port has a single method, so the headers of the request say nothing. Of later header blocks
//! only the stream's trailers matter, and only because they end the stream.

use super::frame::{Code, DEFAULT_WINDOW, FrameHeader, MAX_PAYLOAD_BYTES, MAX_WINDOW, PREFACE, flag, kind};

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

#[cfg(test)]
#[path = "input_tests.rs"]
mod tests;
