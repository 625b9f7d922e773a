//! The server's half of an HTTP/2 connection with one stream. [`Http2`] does no input or output:
//! its methods take the bytes that were read and return the bytes to write.

use std::sync::Arc;

use bytes::{Buf as _, Bytes};
use headgate_proto::{AGENTS_ONLY, v1};
use prost::Message as _;
use tokio::time::Instant;
use tonic::Status;

use super::frame::{
    Code, DEFAULT_WINDOW, FrameEvent, HEADER_BYTES, Input, MAX_WINDOW, Malformed, Messages, ReceiveWindow, Violation,
    put_data, put_go_away, put_ping, put_reset, put_response_headers, put_settings, put_settings_ack, put_trailers,
    put_window_update,
};
use crate::{
    identity::Peer,
    serve::{
        context::{Lifecycle, Signal},
        fleet::End,
        stream::{self, Session, Streams},
        transport::{KEEPALIVE, LINGER},
    },
};

/// The maximum size of unsent answers to pings, settings and other streams, in bytes. A client that
/// causes more answers without reading them is refused (RFC 9113, 10.5).
const MAX_ANSWER_BYTES: usize = 4 << 10;

/// The maximum number of other streams that a client may try to open.
const MAX_OTHER_STREAMS: u32 = 100;

/// The free space, in bytes, that the output buffer needs before a `DATA` frame is begun.
const MIN_ROOM_BYTES: usize = 256;

/// The state of one connection.
pub(super) struct Http2 {
    input: Input,
    streams: Arc<Streams>,
    peer: Peer,
    signal: Arc<Signal>,
    /// The stream's number; 0 until the request has arrived.
    id: u32,
    phase: StreamPhase,
    messages: Messages,
    /// Frames to write before further messages, such as answers to pings.
    answers: Vec<u8>,
    /// The part of the current message that has not been written yet.
    unsent: Bytes,
    /// The bytes that the server may send before the client enlarges the connection's window.
    connection_room: i64,
    /// The bytes that the server may send before the client enlarges the stream's window. A change
    /// of the client's settings can make this number negative.
    stream_room: i64,
    initial_window: u32,
    connection_window: ReceiveWindow,
    stream_window: ReceiveWindow,
    /// How many other streams the client has tried to open.
    other_streams: u32,
    /// True after the client has ended its half of the stream.
    client_has_ended: bool,
    /// When the client last sent or read something.
    last_heard: Instant,
    /// When the last ping without an answer was sent.
    pinged: Option<Instant>,
    /// Since when the client has accepted nothing of the stream; `None` while it may accept more.
    stalled_since: Option<Instant>,
    /// The time of the present call.
    now: Instant,
}

/// The phase of the stream.
enum StreamPhase {
    /// The server waits for `Hello`.
    Opening { until: Instant },
    /// The session decides what is sent.
    Open(Box<Session>),
    /// The server writes the rest of the current message, and then the status.
    Ending { status: Box<Status>, until: Instant },
    /// Everything is written. The server waits for the client to close the connection.
    Closing { until: Instant },
    /// The connection has ended.
    Over,
}

impl Http2 {
    /// Returns the state of a connection on which nothing has been sent or received yet.
    pub(super) fn new(streams: Arc<Streams>, peer: Peer, signal: Arc<Signal>, now: Instant) -> Self {
        // The server's preface (RFC 9113, 3.4) comes first, because some clients wait for it.
        let mut answers = Vec::new();
        put_settings(&mut answers);
        Self {
            input: Input::default(),
            phase: StreamPhase::Opening { until: now + streams.context.settings.hello_timeout },
            streams,
            peer,
            signal,
            id: 0,
            messages: Messages::default(),
            answers,
            unsent: Bytes::new(),
            connection_room: DEFAULT_WINDOW.into(),
            stream_room: DEFAULT_WINDOW.into(),
            initial_window: DEFAULT_WINDOW,
            connection_window: ReceiveWindow::default(),
            stream_window: ReceiveWindow::default(),
            other_streams: 0,
            client_has_ended: false,
            last_heard: now,
            pinged: None,
            stalled_since: None,
            now,
        }
    }

    /// Returns true if the connection can be dropped.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.phase, StreamPhase::Over)
    }

    /// Returns true if nothing more will be written after the bytes that [`Http2::fill`] returns.
    pub(super) fn is_closing(&self) -> bool {
        matches!(self.phase, StreamPhase::Closing { .. })
    }

    /// Records that the client has sent or read something.
    pub(super) fn heard(&mut self, now: Instant) {
        (self.last_heard, self.pinged) = (now, None);
    }

    /// Ends the stream after the connection broke or the client closed it.
    pub(super) fn disconnected(&mut self, error: &std::io::Error, now: Instant) {
        self.now = now;
        self.finish(&End::plain("disconnected", Status::cancelled(error.to_string())));
        self.phase = StreamPhase::Over;
    }

    /// Handles bytes that the client has sent.
    pub(super) fn receive(&mut self, bytes: &[u8], now: Instant) {
        self.now = now;
        if self.is_closing() || self.is_over() {
            // The bytes are read but ignored. With unread bytes the kernel would reset the
            // connection on close, and the client might not see the status.
            return;
        }
        let mut input = std::mem::take(&mut self.input);
        if let Err(violation) = input.feed(bytes, |event| self.take(event)) {
            self.violated(violation);
        }
        self.input = input;
    }

    /// Returns true if the agent is late in answering the versions that were sent.
    pub(super) fn is_late(&mut self, now: Instant) -> bool {
        let StreamPhase::Open(session) = &mut self.phase else { return false };
        session.is_late(now)
    }

    fn take(&mut self, event: FrameEvent<'_>) -> Result<(), Violation> {
        match event {
            FrameEvent::Opened { stream } => {
                self.id = stream;
                put_response_headers(&mut self.answers, stream);
            }
            FrameEvent::Data(bytes) => self.data(bytes),
            FrameEvent::Received { is_ours, bytes } => self.received(is_ours, bytes)?,
            FrameEvent::EndStream => self.client_ended(),
            FrameEvent::Reset => {
                self.finish(&End::plain("disconnected", Status::cancelled("the client reset the stream")));
                self.send_go_away(Code::NoError, "");
                // Nothing may be sent on a stream that was reset (RFC 9113, 5.1).
                self.close();
            }
            FrameEvent::OtherStream => self.other_stream()?,
            FrameEvent::InitialWindow(window) => {
                self.stream_room += i64::from(window) - i64::from(self.initial_window);
                self.initial_window = window;
                self.check_room()?;
            }
            FrameEvent::Settings => put_settings_ack(&mut self.answers),
            FrameEvent::Ping(payload) => put_ping(&mut self.answers, true, payload),
            FrameEvent::WindowUpdate { is_ours, bytes } => {
                let room = if is_ours { &mut self.stream_room } else { &mut self.connection_room };
                *room += i64::from(bytes);
                self.check_room()?;
            }
        }
        if self.answers.len() > MAX_ANSWER_BYTES {
            return Err(Violation {
                code: Code::EnhanceYourCalm,
                text: "too many frames that need an answer, and the answers are not read",
            });
        }
        Ok(())
    }

    fn check_room(&self) -> Result<(), Violation> {
        if self.stream_room.max(self.connection_room) > i64::from(MAX_WINDOW) {
            return Err(Violation { code: Code::FlowControlError, text: "a window is larger than 2^31-1" });
        }
        Ok(())
    }

    fn received(&mut self, is_ours: bool, bytes: u32) -> Result<(), Violation> {
        if let Some(room) = self.connection_window.receive(bytes)? {
            put_window_update(&mut self.answers, 0, room);
        }
        if is_ours && let Some(room) = self.stream_window.receive(bytes)? {
            put_window_update(&mut self.answers, self.id, room);
        }
        Ok(())
    }

    /// Handles a further request: the server tells the client with GOAWAY to use another
    /// connection.
    fn other_stream(&mut self) -> Result<(), Violation> {
        self.other_streams += 1;
        if self.other_streams > MAX_OTHER_STREAMS {
            return Err(Violation {
                code: Code::EnhanceYourCalm,
                text: "the client tried to open too many other streams",
            });
        }
        if self.other_streams == 1 {
            self.send_go_away(
                Code::NoError,
                "this connection carries only one stream; open another connection for other requests",
            );
        }
        Ok(())
    }

    fn send_go_away(&mut self, code: Code, text: &str) {
        put_go_away(&mut self.answers, self.id, code, text);
    }

    fn data(&mut self, bytes: &[u8]) {
        if !matches!(self.phase, StreamPhase::Opening { .. } | StreamPhase::Open(_)) {
            return;
        }
        let mut messages = std::mem::take(&mut self.messages);
        let result = messages.feed(bytes, |message| self.message(message));
        self.messages = messages;
        if let Err(end) = result {
            self.finish(&end);
        }
    }

    fn message(&mut self, bytes: &[u8]) -> Result<(), End> {
        let message = v1::AgentMessage::decode(bytes).map_err(|error| stream::malformed(&error.to_string()))?;
        if let StreamPhase::Open(session) = &self.phase {
            return session.take(message, self.now);
        }
        if let Some(v1::agent_message::Body::Standing(request)) = &message.body {
            self.unsent = stream::standing(&self.streams, &self.peer, request, self.now)?;
            return Err(End::plain(stream::ANSWERED, Status::ok("")));
        }
        let session = Session::open(&self.streams, &self.peer, &message, &self.signal, self.now)?;
        self.phase = StreamPhase::Open(Box::new(session));
        Ok(())
    }

    fn client_ended(&mut self) {
        self.client_has_ended = true;
        let end = match (&self.phase, self.messages.end()) {
            (_, Err(malformed)) => malformed.into(),
            (StreamPhase::Open(_), Ok(())) => stream::closed_by_agent(),
            (_, Ok(())) => stream::closed_before_hello(),
        };
        self.finish(&end);
    }

    /// Ends the stream, if it has not ended yet. The rest of the current message is still written,
    /// and then the status.
    fn finish(&mut self, end: &End) {
        if !matches!(self.phase, StreamPhase::Opening { .. } | StreamPhase::Open(_)) {
            return;
        }
        let mut status = end.status.clone();
        let is_no_agent = status.code() == tonic::Code::InvalidArgument && end.reason != "invalid_hello";
        if matches!(self.phase, StreamPhase::Opening { .. }) && is_no_agent {
            // The client may have taken this port for the other one.
            let (text, port) = (status.message(), self.streams.context.settings.ports.inspect.port());
            status = Status::invalid_argument(format!(
                "{text} ({AGENTS_ONLY}: Inspect, health and reflection are on port {port}, --inspect-listen)"
            ));
        }
        let ending = StreamPhase::Ending { status: Box::new(status), until: self.now + LINGER };
        match std::mem::replace(&mut self.phase, ending) {
            // When the session is dropped, it records this end.
            StreamPhase::Open(session) => session.agent().end(end.clone()),
            // A probe of the port, or a question of another replica's agent, is no stream.
            _ if !end.is_refusal && (self.id == 0 || end.reason == stream::ANSWERED) => {
                tracing::debug!(address = %self.peer.address, reason = end.reason, "the connection ended without a stream");
            }
            _ => end.record(&self.streams.context, self.peer.address, ""),
        }
        self.messages = Messages::default();
    }

    fn violated(&mut self, violation: Violation) {
        let Violation { code, text } = violation;
        self.finish(&End::refusal("http2_violation", Status::internal(text)));
        tracing::debug!(address = %self.peer.address, ?code, text, "the client violated HTTP/2");
        // The connection ends, so answers that have not been sent are dropped.
        self.answers = Vec::new();
        self.send_go_away(code, text);
        self.close();
    }

    fn close(&mut self) {
        self.phase = StreamPhase::Closing { until: self.now + LINGER };
        self.unsent = Bytes::new();
    }

    /// Enforces time limits. Sends a ping if the client has sent and read nothing for `KEEPALIVE`.
    pub(super) fn keep_time(&mut self, now: Instant) {
        self.now = now;
        match &self.phase {
            StreamPhase::Opening { until } => {
                if self.streams.context.lifecycle() == Lifecycle::Ended {
                    self.finish(&stream::stopping());
                } else if *until <= now {
                    self.finish(&stream::no_hello_in_time(&self.streams.context));
                }
            }
            StreamPhase::Open(session) => {
                // This function also checks whether the session has ended, because `fill` calls the
                // session only if there is room for a message.
                if let Some(end) = session.end(now) {
                    self.finish(&end);
                }
            }
            StreamPhase::Ending { until, .. } | StreamPhase::Closing { until } if *until <= now => {
                self.phase = StreamPhase::Over;
            }
            StreamPhase::Ending { .. } | StreamPhase::Closing { .. } | StreamPhase::Over => return,
        }
        match self.pinged {
            None if self.last_heard + KEEPALIVE <= now => {
                self.pinged = Some(now);
                put_ping(&mut self.answers, false, *b"headgate");
            }
            Some(pinged) if pinged + KEEPALIVE <= now => {
                self.finish(&End::plain(
                    "disconnected",
                    Status::unavailable("the client sent nothing and did not answer a ping"),
                ));
                self.phase = StreamPhase::Over;
            }
            _ => {}
        }
    }

    /// Records that the client has accepted bytes of the stream.
    pub(super) fn flows(&mut self) {
        self.stalled_since = None;
    }

    /// Ends the connection of a client that accepts nothing of its stream for as long as the
    /// general server would wait: its windows have no room, or the kernel accepts nothing
    /// (`is_blocked`). Such a client may still answer pings. Heartbeats are always due, so a client
    /// that reads enlarges its windows.
    pub(super) fn keep_flowing(&mut self, is_blocked: bool, now: Instant) {
        let is_stalled = is_blocked || self.connection_room.min(self.stream_room) <= 0;
        if !is_stalled || !matches!(self.phase, StreamPhase::Open(_)) {
            return self.flows();
        }
        let context = &self.streams.context;
        if *self.stalled_since.get_or_insert(now) + context.settings.stalled_response_timeout <= now {
            context.metrics.stalled_responses.inc();
            self.finish(&End::plain("untaken", Status::unavailable("the client does not read the stream")));
            self.phase = StreamPhase::Over;
        }
    }

    /// Appends bytes to write to `out`, up to about `max_bytes`. Appends nothing if there is
    /// nothing to write. Returns true if the stream is open and has nothing more to write now.
    pub(super) fn fill(&mut self, out: &mut Vec<u8>, max_bytes: usize, now: Instant) -> bool {
        if matches!(self.phase, StreamPhase::Over) {
            return false;
        }
        self.now = now;
        // `take` frees the memory of the answers.
        out.append(&mut std::mem::take(&mut self.answers));
        while self.fill_data(out, max_bytes) {
            let StreamPhase::Open(session) = &mut self.phase else { break };
            match session.next(now) {
                Ok(Some(bytes)) => self.unsent = bytes,
                Ok(None) => return true,
                Err(end) => self.finish(&end),
            }
        }
        if let StreamPhase::Ending { status, .. } = &self.phase
            && self.unsent.is_empty()
        {
            if self.id != 0 {
                put_trailers(out, self.id, status);
                if !self.client_has_ended {
                    // Tells the client that it need not send the rest of its request (RFC 9113,
                    // 8.1).
                    put_reset(out, self.id, Code::NoError);
                }
            }
            put_go_away(out, self.id, Code::NoError, "");
            self.close();
        }
        false
    }

    /// Writes the rest of a message. Returns true if the message is complete and there is room for
    /// another.
    fn fill_data(&mut self, out: &mut Vec<u8>, max_bytes: usize) -> bool {
        let room = max_bytes.saturating_sub(out.len() + HEADER_BYTES);
        let window = usize::try_from(self.connection_room.min(self.stream_room)).unwrap_or(0);
        if room < MIN_ROOM_BYTES || window == 0 {
            return false;
        }
        let bytes = self.unsent.len().min(room).min(window);
        if bytes == 0 {
            return true;
        }
        put_data(out, self.id, &self.unsent[..bytes]);
        self.flows();
        self.unsent.advance(bytes);
        if self.unsent.is_empty() {
            // Releases the message's bytes, which all streams share.
            self.unsent = Bytes::new();
        }
        self.connection_room -= i64::try_from(bytes).unwrap_or(i64::MAX);
        self.stream_room -= i64::try_from(bytes).unwrap_or(i64::MAX);
        self.fill_data(out, max_bytes)
    }
}

impl From<Malformed> for End {
    fn from(malformed: Malformed) -> Self {
        match malformed {
            Malformed::TooLarge => stream::too_large(),
            Malformed::Compressed => {
                stream::malformed("the message is compressed, but this server reads only uncompressed messages")
            }
            Malformed::Incomplete => stream::malformed("the stream ended in the middle of the message"),
        }
    }
}

#[cfg(test)]
#[path = "http2_tests.rs"]
mod tests;
