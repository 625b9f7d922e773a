//! Parses the frames that a client sends on a connection of one stream (RFC 9113, sections 4 to 6).
//! The bytes may arrive in pieces of any size.
//!
//! The parser stores no payload of `DATA` frames or header blocks: it passes the bytes on or skips
//! them as they arrive. It does not decode header blocks, and so needs no dynamic table of HPACK:
//! the port has a single method, so the headers of the request say nothing. Of later header blocks
//! only the stream's trailers matter, and only because they end the stream.

use super::frame::{Code, DEFAULT_WINDOW, HEADER_BYTES, Header, MAX_PAYLOAD_BYTES, MAX_WINDOW, PREFACE, flag, kind};

/// The maximum numbers of frames and of bytes of one header block. Larger blocks are refused
/// (RFC 9113, 10.5.1).
const MAX_BLOCK: (u32, u32) = (64, 64 << 10);

/// The meaning of a frame, or of a part of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event<'a> {
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
    /// The part of a frame's header that has arrived.
    header: [u8; HEADER_BYTES],
    header_bytes: u8,
    frame: Option<Frame>,
    /// The number of the stream; 0 until its headers have arrived.
    stream: u32,
    /// The highest number of a stream that the client has opened.
    highest: u32,
    /// True after the client has ended its half of the stream.
    has_ended: bool,
    /// The header block that is not complete: its stream, and the numbers of its frames and bytes.
    block: Option<(u32, u32, u32)>,
}

/// A frame whose payload has not arrived completely.
#[derive(Debug)]
struct Frame {
    header: Header,
    /// The bytes of payload that have not arrived.
    left: u32,
    /// The number of bytes of padding; known once `has_padding_length` is true.
    padding: u32,
    has_padding_length: bool,
    /// The bytes of the current field that have arrived, for frames with fields of fixed size.
    fields: [u8; 8],
    field_bytes: u8,
}

impl Input {
    /// Parses bytes of the connection, which begins with the preface, and passes events to `take`.
    ///
    /// # Errors
    ///
    /// The error of `take`, or [`Violation`]. `feed` must not be called again after an error.
    pub(super) fn feed<E: From<Violation>>(
        &mut self,
        mut bytes: &[u8],
        mut take: impl FnMut(Event<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let preface = &PREFACE[self.preface_bytes..];
        let (begin, rest) = bytes.split_at(preface.len().min(bytes.len()));
        if !preface.starts_with(begin) {
            return Ok(violation(Code::ProtocolError, "the connection does not begin with the preface of HTTP/2")?);
        }
        self.preface_bytes += begin.len();
        bytes = rest;
        while !bytes.is_empty() {
            let Some(mut frame) = self.frame.take() else {
                bytes = self.feed_header(bytes)?;
                self.finish_if_empty(&mut take)?;
                continue;
            };
            let length = usize::try_from(frame.left).unwrap_or(usize::MAX).min(bytes.len());
            let (payload, rest) = bytes.split_at(length);
            self.feed_payload(&mut frame, payload, &mut take)?;
            bytes = rest;
            self.frame = Some(frame);
            self.finish_if_empty(&mut take)?;
        }
        Ok(())
    }

    fn feed_header<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], Violation> {
        let have = usize::from(self.header_bytes);
        let (part, rest) = bytes.split_at(bytes.len().min(HEADER_BYTES - have));
        self.header[have..have + part.len()].copy_from_slice(part);
        self.header_bytes += u8::try_from(part.len()).unwrap_or(0);
        if usize::from(self.header_bytes) == HEADER_BYTES {
            self.header_bytes = 0;
            let header = Header::parse(&self.header);
            self.begin(&header)?;
            self.frame = Some(Frame {
                header,
                left: header.length,
                padding: 0,
                has_padding_length: false,
                fields: [0; 8],
                field_bytes: 0,
            });
        }
        Ok(rest)
    }

    fn finish_if_empty<E: From<Violation>>(
        &mut self,
        take: &mut impl FnMut(Event<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        match self.frame.take_if(|frame| frame.left == 0) {
            Some(frame) => self.finish(&frame, take),
            None => Ok(()),
        }
    }

    /// Checks the header of a frame.
    fn begin(&mut self, header: &Header) -> Result<(), Violation> {
        let Header { length, stream, .. } = *header;
        if length > MAX_PAYLOAD_BYTES {
            return violation(Code::FrameSizeError, "a frame is larger than SETTINGS_MAX_FRAME_SIZE allows");
        }
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

    fn begin_data(&self, header: &Header) -> Result<(), Violation> {
        if header.stream > self.highest {
            return violation(Code::ProtocolError, "DATA on a stream that was never opened");
        }
        if header.stream == self.stream && self.has_ended {
            return violation(Code::StreamClosed, "DATA on a stream that the client has ended");
        }
        if header.has(flag::PADDED) && header.length == 0 {
            return violation(Code::FrameSizeError, "a padded frame has no padding length");
        }
        Ok(())
    }

    fn begin_headers(&mut self, header: &Header) -> Result<(), Violation> {
        let Header { stream, length, .. } = *header;
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

    fn continue_block(&mut self, header: &Header) -> Result<(), Violation> {
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

    fn feed_payload<E: From<Violation>>(
        &self,
        frame: &mut Frame,
        payload: &[u8],
        take: &mut impl FnMut(Event<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let left = frame.left;
        // `payload` has at most `left` bytes.
        frame.left -= u32::try_from(payload.len()).unwrap_or(left);
        match frame.header.kind {
            kind::DATA => self.feed_data(frame, left, payload, take),
            kind::SETTINGS | kind::PING | kind::WINDOW_UPDATE => {
                let fields = if frame.header.kind == kind::SETTINGS { 6 } else { frame.header.length };
                for byte in payload {
                    frame.fields[usize::from(frame.field_bytes) % 8] = *byte;
                    frame.field_bytes += 1;
                    if frame.header.kind == kind::SETTINGS && u32::from(frame.field_bytes) == fields {
                        frame.field_bytes = 0;
                        setting(&frame.fields, take)?;
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn feed_data<E: From<Violation>>(
        &self,
        frame: &mut Frame,
        left: u32,
        mut payload: &[u8],
        take: &mut impl FnMut(Event<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut left = left;
        if frame.header.has(flag::PADDED)
            && !frame.has_padding_length
            && let Some((length, rest)) = payload.split_first()
        {
            frame.has_padding_length = true;
            frame.padding = u32::from(*length);
            payload = rest;
            left -= 1;
            if frame.padding > left {
                return Ok(violation(Code::ProtocolError, "the padding is longer than the payload")?);
            }
        }
        let data = usize::try_from(left.saturating_sub(frame.padding)).unwrap_or(usize::MAX).min(payload.len());
        if data > 0 && frame.header.stream == self.stream {
            take(Event::Data(&payload[..data]))?;
        }
        Ok(())
    }

    /// Handles a frame whose payload is complete.
    fn finish<E: From<Violation>>(
        &mut self,
        frame: &Frame,
        take: &mut impl FnMut(Event<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let header = &frame.header;
        let is_ours = header.stream != 0 && header.stream == self.stream;
        match header.kind {
            kind::DATA => {
                take(Event::Received { is_ours, bytes: header.length })?;
                if is_ours && header.has(flag::END_STREAM) {
                    self.has_ended = true;
                    take(Event::EndStream)?;
                }
            }
            kind::HEADERS => {
                if self.stream == 0 {
                    self.stream = header.stream;
                    take(Event::Opened { stream: header.stream })?;
                } else if header.stream > self.highest {
                    take(Event::OtherStream)?;
                }
                self.highest = self.highest.max(header.stream);
                if header.stream == self.stream && header.has(flag::END_STREAM) {
                    self.has_ended = true;
                    take(Event::EndStream)?;
                }
            }
            kind::RST_STREAM if is_ours => take(Event::Reset)?,
            kind::SETTINGS if !header.has(flag::ACK) => take(Event::Settings)?,
            kind::PING if !header.has(flag::ACK) => take(Event::Ping(frame.fields))?,
            kind::WINDOW_UPDATE => {
                let [b0, b1, b2, b3, ..] = frame.fields;
                let bytes = u32::from_be_bytes([b0, b1, b2, b3]) & MAX_WINDOW;
                if bytes == 0 {
                    return Ok(violation(Code::ProtocolError, "WINDOW_UPDATE with an increment of 0")?);
                }
                if is_ours || header.stream == 0 {
                    take(Event::WindowUpdate { is_ours, bytes })?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

fn setting<E: From<Violation>>(fields: &[u8; 8], take: &mut impl FnMut(Event<'_>) -> Result<(), E>) -> Result<(), E> {
    let [i0, i1, v0, v1, v2, v3, ..] = *fields;
    let value = u32::from_be_bytes([v0, v1, v2, v3]);
    match u16::from_be_bytes([i0, i1]) {
        // SETTINGS_ENABLE_PUSH
        2 if value > 1 => Ok(violation(Code::ProtocolError, "SETTINGS_ENABLE_PUSH is neither 0 nor 1")?),
        // SETTINGS_INITIAL_WINDOW_SIZE
        4 if value > MAX_WINDOW => Ok(violation(Code::FlowControlError, "SETTINGS_INITIAL_WINDOW_SIZE is too large")?),
        4 => take(Event::InitialWindow(value)),
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
