//! The client's side of one HTTP/2 connection with one gRPC stream (RFC 9113). Frames are parsed in
//! place, and each message is passed to its handler when it is complete.
//!
//! The client does not use h2, which allocates buffers of 16, 8 and 4 KB for each connection: a
//! connection took 38 KB instead of 13 KB at the server, and a message 20 µs of CPU instead of 8 µs
//! (docs/decisions/005-own-http2-for-sync.md). With 15,000 agents, this would be 400 MB, and one
//! core could not check the messages as fast as the replica sends them.

use headgate_proto::{MAX_SERVER_MESSAGE_BYTES, PREFIX_BYTES};

use super::hpack::{self, Status};

const HEADER_BYTES: usize = 9;
/// The stream of the only request.
const STREAM: u32 = 1;
/// The stream's window, as in the real agent's HTTP library.
const STREAM_WINDOW: u32 = 2 << 20;
/// The connection's window, as in the real agent's HTTP library.
const CONNECTION_WINDOW: u32 = 5 << 20;
/// The default window of connections and streams.
const DEFAULT_WINDOW: u32 = 65_535;
/// The largest payload of a frame. Both sides keep this default value.
const MAX_FRAME_BYTES: usize = 16_384;

mod kind {
    pub(super) const DATA: u8 = 0;
    pub(super) const HEADERS: u8 = 1;
    pub(super) const RST_STREAM: u8 = 3;
    pub(super) const SETTINGS: u8 = 4;
    pub(super) const PING: u8 = 6;
    pub(super) const GOAWAY: u8 = 7;
    pub(super) const WINDOW_UPDATE: u8 = 8;
    pub(super) const CONTINUATION: u8 = 9;
}

mod flag {
    pub(super) const ACK: u8 = 1;
    pub(super) const END_STREAM: u8 = 1;
    pub(super) const END_HEADERS: u8 = 4;
    pub(super) const PADDED: u8 = 8;
    pub(super) const PRIORITY: u8 = 0x20;
}

/// Why bytes of the server are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Broken {
    /// An invalid HTTP/2 frame.
    #[error("HTTP/2: {0}")]
    Http2(&'static str),
    /// An invalid header block.
    #[error("HTTP/2: {0}")]
    Headers(#[from] hpack::Malformed),
    /// An invalid prefix of a gRPC message.
    #[error("gRPC: {0}")]
    Grpc(String),
    /// An invalid message. The text is the error of the message's handler.
    #[error("{0}")]
    Message(String),
}

/// How the server ended the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    /// The server sent trailers.
    Status { code: u32, message: String },
    /// The server sent RST_STREAM with this error code.
    Reset(u32),
}

/// A frame whose payload is not complete yet.
#[derive(Debug, Clone, Copy, Default)]
struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    remaining: usize,
}

/// One connection.
#[derive(Debug, Default)]
pub(crate) struct Http2 {
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    frame: Frame,
    /// The received payload of an incomplete frame. DATA frames are processed in place and do not
    /// use this buffer.
    control: Vec<u8>,
    prefix: [u8; PREFIX_BYTES],
    prefix_bytes: usize,
    /// The number of bytes of the present message that have not arrived yet. The number is valid
    /// only after the message's prefix is complete.
    lacking: usize,
    /// The received part of an incomplete message.
    message: Vec<u8>,
    unacknowledged: u32,
    send_window: i64,
    stream_send_window: i64,
    /// The server's SETTINGS_INITIAL_WINDOW_SIZE.
    initial_send_window: i64,
    /// Whether the server has confirmed that it uses no dynamic header table.
    table_is_disabled: bool,
    pub(super) end: Option<End>,
    pub(super) goes_away: bool,
}

impl Http2 {
    pub(crate) fn new() -> Self {
        let window = DEFAULT_WINDOW.into();
        Self { send_window: window, stream_send_window: window, initial_send_window: window, ..Self::default() }
    }

    /// Appends the connection preface, SETTINGS and the request's headers.
    pub(crate) fn open(authority: &str, out: &mut Vec<u8>) {
        out.extend_from_slice(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        // SETTINGS_HEADER_TABLE_SIZE, SETTINGS_ENABLE_PUSH and SETTINGS_INITIAL_WINDOW_SIZE.
        let settings: [(u16, u32); 3] = [(1, 0), (2, 0), (4, STREAM_WINDOW)];
        put_header(out, settings.len() * 6, kind::SETTINGS, 0, 0);
        for (identifier, value) in settings {
            out.extend_from_slice(&identifier.to_be_bytes());
            out.extend_from_slice(&value.to_be_bytes());
        }
        put_window_update(out, 0, CONNECTION_WINDOW - DEFAULT_WINDOW);
        let mut block = Vec::new();
        hpack::put_request(&mut block, authority);
        put_header(out, block.len(), kind::HEADERS, flag::END_HEADERS, STREAM);
        out.extend_from_slice(&block);
    }

    /// Appends a message with its gRPC prefix. Returns false and appends nothing if the server's
    /// windows are too small now.
    pub(crate) fn send(&mut self, message: &[u8], out: &mut Vec<u8>) -> bool {
        let mut framed = [0; PREFIX_BYTES];
        let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
        framed[1..].copy_from_slice(&length.to_be_bytes());
        let needed = i64::try_from(PREFIX_BYTES + message.len()).unwrap_or(i64::MAX);
        if self.send_window.min(self.stream_send_window) < needed {
            return false;
        }
        self.send_window -= needed;
        self.stream_send_window -= needed;
        let (mut rest, mut prefix) = (message, &framed[..]);
        loop {
            let (now, later) = rest.split_at(rest.len().min(MAX_FRAME_BYTES - prefix.len()));
            put_header(out, prefix.len() + now.len(), kind::DATA, 0, STREAM);
            out.extend_from_slice(prefix);
            out.extend_from_slice(now);
            (rest, prefix) = (later, &[]);
            if rest.is_empty() {
                return true;
            }
        }
    }

    /// Processes bytes of the connection. Calls `on_message` for each message, and appends frames
    /// that answer the server to `replies`.
    pub(super) fn feed(
        &mut self,
        mut bytes: &[u8],
        replies: &mut Vec<u8>,
        on_message: &mut impl FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<(), Broken> {
        while !bytes.is_empty() {
            if self.header_bytes < HEADER_BYTES {
                let (now, rest) = bytes.split_at(bytes.len().min(HEADER_BYTES - self.header_bytes));
                self.header[self.header_bytes..self.header_bytes + now.len()].copy_from_slice(now);
                self.header_bytes += now.len();
                bytes = rest;
                if self.header_bytes < HEADER_BYTES {
                    return Ok(());
                }
                self.begin_frame()?;
            }
            let (now, rest) = bytes.split_at(bytes.len().min(self.frame.remaining));
            bytes = rest;
            self.frame.remaining -= now.len();
            let is_data = self.frame.kind == kind::DATA;
            if is_data {
                self.take_data(now, on_message)?;
            } else {
                self.control.extend_from_slice(now);
            }
            if self.frame.remaining == 0 {
                self.header_bytes = 0;
                if !is_data {
                    self.end_frame(replies)?;
                } else if self.frame.flags & flag::END_STREAM != 0 {
                    return Err(Broken::Http2("a response without trailers"));
                }
            }
        }
        self.grant(replies);
        Ok(())
    }

    fn begin_frame(&mut self) -> Result<(), Broken> {
        let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = self.header;
        let length = u32::from_be_bytes([0, l0, l1, l2]);
        let stream = u32::from_be_bytes([s0 & 0x7f, s1, s2, s3]);
        self.frame = Frame { kind, flags, stream, remaining: usize::try_from(length).unwrap_or(usize::MAX) };
        if self.frame.remaining > MAX_FRAME_BYTES {
            return Err(Broken::Http2("a frame is larger than 16,384 bytes"));
        }
        if kind == kind::DATA {
            if stream != STREAM || flags & flag::PADDED != 0 {
                return Err(Broken::Http2("DATA for a stream that does not exist, or with padding"));
            }
            self.unacknowledged += length;
            if self.unacknowledged > STREAM_WINDOW {
                return Err(Broken::Http2("more DATA than the window allows"));
            }
        }
        Ok(())
    }

    /// Processes a complete frame, except a DATA frame.
    fn end_frame(&mut self, replies: &mut Vec<u8>) -> Result<(), Broken> {
        let Frame { kind, flags, stream, .. } = self.frame;
        let is_header = kind == kind::HEADERS || kind == kind::CONTINUATION;
        if is_header && flags & flag::END_HEADERS == 0 {
            // CONTINUATION frames follow. The block is decoded when it is complete.
            return if self.control.len() > 4 * MAX_FRAME_BYTES {
                Err(Broken::Http2("the headers are too long"))
            } else {
                Ok(())
            };
        }
        let payload = std::mem::take(&mut self.control);
        let word = |at: usize| Some(u32::from_be_bytes(payload.get(at..at + 4)?.try_into().ok()?));
        let short = Broken::Http2("a frame is too short");
        match kind {
            kind::HEADERS | kind::CONTINUATION => {
                if kind == kind::HEADERS && flags & (flag::PADDED | flag::PRIORITY) != 0 {
                    return Err(Broken::Http2("headers with padding or priority are not supported"));
                }
                if !std::mem::replace(&mut self.table_is_disabled, true) && !hpack::disables_dynamic_table(&payload) {
                    return Err(Broken::Http2("the first headers do not set the size of the dynamic table to 0"));
                }
                let Status { grpc_status, grpc_message } = hpack::read(&payload)?;
                self.end = grpc_status.map(|code| End::Status { code, message: grpc_message }).or(self.end.take());
            }
            // After trailers, RST_STREAM only means that the server does not need the rest of the
            // request (RFC 9113, 8.1). The trailers have already set `end`.
            kind::RST_STREAM if stream == STREAM => {
                let reset = End::Reset(word(0).ok_or(short)?);
                self.end.get_or_insert(reset);
            }
            kind::SETTINGS if flags & flag::ACK == 0 => {
                self.take_settings(&payload)?;
                put_header(replies, 0, kind::SETTINGS, flag::ACK, 0);
            }
            kind::PING if flags & flag::ACK == 0 => {
                put_header(replies, payload.len(), kind::PING, flag::ACK, 0);
                replies.extend_from_slice(&payload);
            }
            kind::GOAWAY => self.goes_away = true,
            kind::WINDOW_UPDATE => {
                let more = i64::from(word(0).ok_or(short)? & 0x7fff_ffff);
                if stream == 0 { self.send_window += more } else { self.stream_send_window += more }
            }
            // The client ignores acknowledgements and all other kinds of frames.
            _ => {}
        }
        Ok(())
    }

    fn take_settings(&mut self, payload: &[u8]) -> Result<(), Broken> {
        for setting in payload.chunks(6) {
            let [i0, i1, v0, v1, v2, v3] = *setting else { return Err(Broken::Http2("a setting is incomplete")) };
            // SETTINGS_INITIAL_WINDOW_SIZE also changes windows in use (RFC 9113, 6.9.2).
            if u16::from_be_bytes([i0, i1]) == 4 {
                let window = i64::from(u32::from_be_bytes([v0, v1, v2, v3]));
                self.stream_send_window += window - self.initial_send_window;
                self.initial_send_window = window;
            }
        }
        Ok(())
    }

    fn take_data(
        &mut self,
        mut bytes: &[u8],
        on_message: &mut impl FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<(), Broken> {
        while !bytes.is_empty() {
            if self.prefix_bytes < PREFIX_BYTES {
                let (now, rest) = bytes.split_at(bytes.len().min(PREFIX_BYTES - self.prefix_bytes));
                self.prefix[self.prefix_bytes..self.prefix_bytes + now.len()].copy_from_slice(now);
                self.prefix_bytes += now.len();
                bytes = rest;
                if self.prefix_bytes < PREFIX_BYTES {
                    return Ok(());
                }
                self.lacking = self.read_prefix()?;
            }
            let (now, rest) = bytes.split_at(bytes.len().min(self.lacking));
            bytes = rest;
            self.lacking -= now.len();
            if self.lacking > 0 {
                self.message.extend_from_slice(now);
                return Ok(());
            }
            self.prefix_bytes = 0;
            let taken = if self.message.is_empty() {
                on_message(now)
            } else {
                self.message.extend_from_slice(now);
                // Drop the buffer. Otherwise each of thousands of connections would keep a buffer
                // for its largest message.
                let message = std::mem::take(&mut self.message);
                on_message(&message)
            };
            taken.map_err(Broken::Message)?;
        }
        Ok(())
    }

    fn read_prefix(&self) -> Result<usize, Broken> {
        let [compressed, length @ ..] = self.prefix;
        if compressed != 0 {
            return Err(Broken::Grpc("a message is compressed, which the client does not allow".to_owned()));
        }
        let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        if length > MAX_SERVER_MESSAGE_BYTES {
            return Err(Broken::Grpc(format!(
                "a message has {length} bytes; at most {MAX_SERVER_MESSAGE_BYTES} are allowed"
            )));
        }
        Ok(length)
    }

    /// Sends window updates when half of the stream's window is used.
    fn grant(&mut self, replies: &mut Vec<u8>) {
        if self.unacknowledged > STREAM_WINDOW / 2 {
            put_window_update(replies, 0, self.unacknowledged);
            put_window_update(replies, STREAM, self.unacknowledged);
            self.unacknowledged = 0;
        }
    }
}

fn put_header(out: &mut Vec<u8>, length: usize, kind: u8, flags: u8, stream: u32) {
    let length = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    out.extend_from_slice(&length[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
}

fn put_window_update(out: &mut Vec<u8>, stream: u32, more: u32) {
    put_header(out, 4, kind::WINDOW_UPDATE, 0, stream);
    out.extend_from_slice(&more.to_be_bytes());
}
