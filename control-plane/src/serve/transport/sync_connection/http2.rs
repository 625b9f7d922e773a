//! The server's half of an HTTP/2 connection with one stream, without input and output: bytes in,
//! bytes out.

use std::sync::Arc;

use bytes::{Buf as _, Bytes};
use headgate_proto::v1;
use prost::Message as _;
use tokio::time::Instant;
use tonic::Status;

use super::{
    frame::{
        Code, DEFAULT_WINDOW, HEADER_BYTES, MAX_WINDOW, put_data, put_go_away, put_ping, put_reset,
        put_response_headers, put_settings_ack, put_trailers, put_window_update,
    },
    input::{Event, Input, ReceiveWindow, Violation},
    message::{Malformed, Messages},
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

/// Bytes of answers (to pings, settings, other streams) that wait for a peer to read; one that asks
/// for more without reading is refused (RFC 9113, 10.5).
const MAX_ANSWER_BYTES: usize = 4 << 10;

/// Other streams that a client may try to open.
const MAX_OTHER_STREAMS: u32 = 100;

/// Room in an output buffer below which no message is begun.
const MIN_ROOM_BYTES: usize = 256;

/// See the module.
pub(super) struct Http2 {
    input: Input,
    stream: Stream,
}

/// Everything but the parser.
struct Stream {
    streams: Arc<Streams>,
    peer: Peer,
    signal: Arc<Signal>,
    /// The stream's number; 0 until its request.
    id: u32,
    phase: Phase,
    messages: Messages,
    /// Answers and the like, in order.
    answers: Vec<u8>,
    /// The rest of a message that has not been written.
    unsent: Bytes,
    /// Room that the client has given to the connection, and to the stream; a change of its
    /// settings may put the latter below zero.
    connection_room: i64,
    stream_room: i64,
    initial_window: u32,
    connection_window: ReceiveWindow,
    stream_window: ReceiveWindow,
    other_streams: u32,
    client_has_ended: bool,
    last_heard: Instant,
    pinged: Option<Instant>,
}

enum Phase {
    /// Until `Hello`.
    Opening {
        until: Instant,
    },
    Open(Box<Session>),
    /// What has been begun is written, then the status.
    Ending {
        status: Box<Status>,
        until: Instant,
    },
    /// Everything has been said; the client closes.
    Closing {
        until: Instant,
    },
    /// Nobody is there any more.
    Over,
}

impl Http2 {
    /// A connection on which nothing has been received yet, and the server's part of the preface
    /// has been sent.
    pub(super) fn new(streams: Arc<Streams>, peer: Peer, signal: Arc<Signal>) -> Self {
        let now = Instant::now();
        let stream = Stream {
            phase: Phase::Opening { until: now + streams.context.settings.hello_timeout },
            streams,
            peer,
            signal,
            id: 0,
            messages: Messages::default(),
            answers: Vec::new(),
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
        };
        Self { input: Input::default(), stream }
    }

    /// True when the connection can be dropped.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.stream.phase, Phase::Over)
    }

    /// True when nothing more is going to be written, once what [`Http2::fill`] gives has been.
    pub(super) fn is_closing(&self) -> bool {
        matches!(self.stream.phase, Phase::Closing { .. })
    }

    /// The peer has shown that it is there.
    pub(super) fn heard(&mut self, now: Instant) {
        self.stream.last_heard = now;
        self.stream.pinged = None;
    }

    /// The connection broke, or the client closed it.
    pub(super) fn disconnected(&mut self, error: &std::io::Error) {
        self.stream.finish(&End::plain("disconnected", Status::cancelled(error.to_string())));
        self.stream.phase = Phase::Over;
    }

    /// Takes in what has come after the preface.
    pub(super) fn receive(&mut self, bytes: &[u8]) {
        let Self { input, stream } = self;
        if stream.has_finished() {
            // All has been said. What comes is read so that the client gets to see it.
            return;
        }
        if let Err(violation) = input.feed(bytes, |event| stream.take(event)) {
            stream.violated(violation);
        }
    }

    /// Does what it is time for.
    pub(super) fn keep_time(&mut self, now: Instant) {
        self.stream.keep_time(now);
    }

    /// True while the agent does not keep up with what is sent.
    pub(super) fn is_late(&mut self, now: Instant) -> bool {
        let Phase::Open(session) = &mut self.stream.phase else { return false };
        session.is_late(now)
    }

    /// Appends what there is to write, up to about `max_bytes`; nothing when there is nothing.
    pub(super) fn fill(&mut self, out: &mut Vec<u8>, max_bytes: usize, now: Instant) {
        self.stream.fill(out, max_bytes, now);
    }
}

impl Stream {
    fn has_finished(&self) -> bool {
        matches!(self.phase, Phase::Closing { .. } | Phase::Over)
    }

    fn take(&mut self, event: Event<'_>) -> Result<(), Violation> {
        match event {
            Event::Opened { stream } => {
                self.id = stream;
                put_response_headers(&mut self.answers, stream);
            }
            Event::Data(bytes) => self.data(bytes),
            Event::Received { is_ours, bytes } => self.received(is_ours, bytes)?,
            Event::EndStream => self.client_ended(),
            Event::Reset => {
                self.finish(&End::plain("disconnected", Status::cancelled("the client reset the stream")));
                self.say_go_away(Code::NoError, "");
                // Nothing may be sent on a stream that was reset (RFC 9113, 5.1).
                self.close();
            }
            Event::OtherStream => self.other_stream()?,
            Event::InitialWindow(window) => {
                self.stream_room += i64::from(window) - i64::from(self.initial_window);
                self.initial_window = window;
                self.check_room()?;
            }
            Event::Settings => put_settings_ack(&mut self.answers),
            Event::Ping(payload) => put_ping(&mut self.answers, true, payload),
            Event::Room { is_ours, bytes } => {
                let room = if is_ours { &mut self.stream_room } else { &mut self.connection_room };
                *room += i64::from(bytes);
                self.check_room()?;
            }
        }
        if self.answers.len() > MAX_ANSWER_BYTES {
            return Err(Violation { code: Code::EnhanceYourCalm, text: "answers are asked for and not read" });
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

    /// A client that has another request is sent to another connection: it opens one when told that
    /// this one takes no more streams.
    fn other_stream(&mut self) -> Result<(), Violation> {
        self.other_streams += 1;
        if self.other_streams > MAX_OTHER_STREAMS {
            return Err(Violation { code: Code::EnhanceYourCalm, text: "this connection takes no more streams" });
        }
        if self.other_streams == 1 {
            self.say_go_away(Code::NoError, "one stream a connection; open another for other requests");
        }
        Ok(())
    }

    fn say_go_away(&mut self, code: Code, text: &str) {
        put_go_away(&mut self.answers, self.id, code, text);
    }

    fn data(&mut self, bytes: &[u8]) {
        if !matches!(self.phase, Phase::Opening { .. } | Phase::Open(_)) {
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
        if let Phase::Open(session) = &self.phase {
            return session.take(message);
        }
        let session = Session::open(&self.streams, &self.peer, &message, &self.signal)?;
        self.phase = Phase::Open(Box::new(session));
        Ok(())
    }

    fn client_ended(&mut self) {
        self.client_has_ended = true;
        let end = match (&self.phase, self.messages.end()) {
            (_, Err(malformed)) => malformed.into(),
            (Phase::Open(_), Ok(())) => stream::closed_by_agent(),
            (_, Ok(())) => stream::closed_before_hello(),
        };
        self.finish(&end);
    }

    /// Ends the stream, if it has not been ended: what has been begun is still written, then the
    /// status.
    fn finish(&mut self, end: &End) {
        if !matches!(self.phase, Phase::Opening { .. } | Phase::Open(_)) {
            return;
        }
        let ending = Phase::Ending { status: Box::new(end.status.clone()), until: Instant::now() + LINGER };
        match std::mem::replace(&mut self.phase, ending) {
            // Leaving, it says why.
            Phase::Open(session) => session.agent().end(end.clone()),
            _ => end.record(&self.streams.context, self.peer.address, ""),
        }
        self.messages = Messages::default();
    }

    fn violated(&mut self, violation: Violation) {
        let Violation { code, text } = violation;
        self.finish(&End::refusal("http2_violation", Status::internal(text)));
        tracing::debug!(address = %self.peer.address, ?code, text, "HTTP/2");
        // Answers are of no use any more.
        self.answers = Vec::new();
        self.say_go_away(code, text);
        self.close();
    }

    fn close(&mut self) {
        self.phase = Phase::Closing { until: Instant::now() + LINGER };
        self.unsent = Bytes::new();
    }

    fn keep_time(&mut self, now: Instant) {
        match &self.phase {
            Phase::Opening { until } => {
                if self.streams.context.lifecycle() == Lifecycle::Ended {
                    self.finish(&stream::stopping());
                } else if *until <= now {
                    self.finish(&stream::no_hello_in_time(&self.streams.context));
                }
            }
            Phase::Open(session) => {
                // Also where there is no room to ask it for a message.
                if let Some(end) = session.end(now) {
                    self.finish(&end);
                }
            }
            Phase::Ending { until, .. } | Phase::Closing { until } if *until <= now => self.phase = Phase::Over,
            Phase::Ending { .. } | Phase::Closing { .. } | Phase::Over => return,
        }
        match self.pinged {
            None if self.last_heard + KEEPALIVE <= now => {
                self.pinged = Some(now);
                put_ping(&mut self.answers, false, *b"headgate");
            }
            Some(pinged) if pinged + KEEPALIVE <= now => {
                self.finish(&End::plain(
                    "disconnected",
                    Status::unavailable("nothing heard, not even answers to pings"),
                ));
                self.phase = Phase::Over;
            }
            _ => {}
        }
    }

    fn fill(&mut self, out: &mut Vec<u8>, max_bytes: usize, now: Instant) {
        if matches!(self.phase, Phase::Over) {
            return;
        }
        // Taken whole, so that no memory is kept for them.
        out.append(&mut std::mem::take(&mut self.answers));
        while self.fill_data(out, max_bytes) {
            let Phase::Open(session) = &mut self.phase else { break };
            match session.next(now) {
                Ok(Some(bytes)) => self.unsent = bytes,
                Ok(None) => return,
                Err(end) => self.finish(&end),
            }
        }
        if let Phase::Ending { status, .. } = &self.phase
            && self.unsent.is_empty()
        {
            put_trailers(out, self.id, status);
            if !self.client_has_ended {
                // It need not send the rest (RFC 9113, 8.1).
                put_reset(out, self.id, Code::NoError);
            }
            put_go_away(out, self.id, Code::NoError, "");
            self.close();
        }
    }

    /// Writes what is left of a message. True when there is room for another.
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
        self.unsent.advance(bytes);
        if self.unsent.is_empty() {
            // Lets go of the shared bytes.
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
            Malformed::Compressed => stream::malformed("it is compressed, which this server does not read"),
            Malformed::Incomplete => stream::malformed("the stream ended in the middle of it"),
        }
    }
}

#[cfg(test)]
#[path = "http2_tests.rs"]
mod tests;
