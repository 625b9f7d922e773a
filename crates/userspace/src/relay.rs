//! The state machine of one relayed connection. It does no I/O.
//!
//! The caller reports what the kernel announces ([`Relay::readable`], [`Relay::writable`],
//! [`Relay::expire`]). It then repeats two steps: it asks for an action ([`Relay::next`]), and
//! reports the outcome of that action ([`Relay::done`]). It stops at [`Action::Wait`] and at
//! [`Action::Finish`].
//!
//! The rules of the machine:
//!
//! - A direction takes bytes from its source only while the sink may accept bytes, and while all
//!   earlier bytes have reached the sink. The kernel's socket buffers give back-pressure.
//! - A FIN passes on after the last byte of its direction. HAProxy had the bug that a FIN overtook
//!   bytes in a pipe (haproxy/haproxy#2505).
//! - A side that fails is read until its error or its end. A server that closes a socket with
//!   unread input sends its answer and then a RST, and the client must get the answer.
//! - If bytes were lost, or if a side failed, the connection ends with a RST to both sides.

#[cfg(test)]
mod tests;

/// One of the two sockets of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The accepted socket.
    Client = 0,
    /// The connected socket.
    Endpoint = 1,
}

impl Side {
    /// Both sides.
    pub const BOTH: [Self; 2] = [Self::Client, Self::Endpoint];

    /// The opposite side.
    pub fn other(self) -> Self {
        match self {
            Self::Client => Self::Endpoint,
            Self::Endpoint => Self::Client,
        }
    }
}

/// What the caller does next. The side is the source of the bytes, unless said otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Read from the source and write to the opposite side, or splice between both. Bytes that the
    /// opposite side does not accept stay with the caller, in order.
    Carry(Side),
    /// Write the bytes that stayed with the caller.
    Flush(Side),
    /// Shut down the writing half of this side.
    Shut(Side),
    /// Wait for the next event.
    Wait,
    /// Close both sockets. The machine gives no more actions.
    Finish(End),
}

/// How a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Both directions ended with a FIN.
    Closed,
    /// A side failed, or the connection was idle for too long: both sides get a RST.
    Reset,
}

/// The outcome of [`Action::Carry`] or [`Action::Flush`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moved {
    /// The number of bytes that were taken from the source.
    pub taken: u32,
    /// The number of bytes that the sink accepted.
    pub given: u32,
    /// What the source reported after these bytes.
    pub source: SourceState,
    /// What the sink reported after these bytes.
    pub sink: SinkState,
}

/// The state of a source after an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SourceState {
    /// The source may have more bytes.
    #[default]
    Ready,
    /// The source has no bytes now. The kernel announces the next bytes.
    Empty,
    /// The source has sent a FIN, and all its bytes are taken.
    Ended,
    /// The source reported an error, such as ECONNRESET. It gives no more bytes.
    Failed,
}

/// The state of a sink after an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SinkState {
    /// The sink may accept more bytes.
    #[default]
    Ready,
    /// The sink accepts no bytes now. The kernel announces when it does.
    Full,
    /// The sink reported an error, such as EPIPE. It accepts no more bytes.
    Failed,
    /// The sink was shut down after the last byte.
    Shut,
}

/// One direction of a connection.
#[derive(Debug, Clone, Copy)]
struct Direction {
    source: SourceState,
    sink: SinkState,
    /// The bytes that were taken from the source and have not reached the sink.
    held_bytes: u32,
}

impl Direction {
    const NEW: Self = Self { source: SourceState::Empty, sink: SinkState::Full, held_bytes: 0 };

    fn has_sink(&self) -> bool {
        matches!(self.sink, SinkState::Ready | SinkState::Full)
    }

    /// Whether no action of this direction remains.
    fn is_settled(&self) -> bool {
        !self.has_sink() || (self.source == SourceState::Failed && self.held_bytes == 0)
    }

    fn next(&self, from: Side) -> Option<Action> {
        match (self.held_bytes, self.source, self.sink) {
            // The bytes have nowhere to go. Reading goes on only to find out that the source
            // failed or ended, see `Relay::next`.
            _ if !self.has_sink() => None,
            (0, SourceState::Ended, _) => Some(Action::Shut(from.other())),
            (0, SourceState::Ready, SinkState::Ready) => Some(Action::Carry(from)),
            (1.., _, SinkState::Ready) => Some(Action::Flush(from)),
            _ => None,
        }
    }
}

/// The state of one connection. A new connection waits for its first event.
#[derive(Debug, Clone, Copy)]
pub struct Relay {
    /// By the source's side.
    directions: [Direction; 2],
    end: Option<End>,
    /// The direction that acts first at the next call. The directions take turns.
    turn: Side,
}

impl Default for Relay {
    fn default() -> Self {
        Self { directions: [Direction::NEW; 2], end: None, turn: Side::Client }
    }
}

impl Relay {
    /// The kernel announced bytes, a FIN or an error of this side.
    pub fn readable(&mut self, side: Side) {
        let source = &mut self.directions[side as usize].source;
        if *source == SourceState::Empty {
            *source = SourceState::Ready;
        }
    }

    /// The kernel announced that this side accepts bytes, or that it failed.
    pub fn writable(&mut self, side: Side) {
        let sink = &mut self.directions[side.other() as usize].sink;
        if *sink == SinkState::Full {
            *sink = SinkState::Ready;
        }
    }

    /// The kernel announced that this side failed (EPOLLERR or EPOLLHUP). Its last bytes are still
    /// read. The read then reports the error, unless the FIN of this side was already read.
    pub fn failed(&mut self, side: Side) {
        self.readable(side);
        self.writable(side);
        if matches!(self.directions[side as usize].source, SourceState::Ended | SourceState::Failed) {
            self.fail_sink(side);
            self.settle();
        }
    }

    /// The connection was idle for too long. It ends with a RST.
    pub fn expire(&mut self) {
        self.end.get_or_insert(End::Reset);
    }

    /// The number of bytes of this source that wait for the opposite side.
    pub fn held_bytes(&self, from: Side) -> u32 {
        self.directions[from as usize].held_bytes
    }

    /// Whether this side has sent its last byte (FIN).
    pub fn has_ended(&self, side: Side) -> bool {
        self.directions[side as usize].source == SourceState::Ended
    }

    /// Whether the opposite side of this source failed, so that bytes of this source were dropped.
    pub fn is_sink_failed(&self, from: Side) -> bool {
        self.directions[from as usize].sink == SinkState::Failed
    }

    /// The next action. The caller carries it out and calls [`Self::done`], except after
    /// [`Action::Wait`] and [`Action::Finish`].
    pub fn next(&self) -> Action {
        if let Some(end) = self.end {
            return Action::Finish(end);
        }
        let ordered = [self.turn, self.turn.other()];
        let action = ordered.into_iter().find_map(|from| self.directions[from as usize].next(from));
        action.unwrap_or(Action::Wait)
    }

    /// Reports the outcome of the last action. For [`Action::Shut`], only `sink` has a meaning.
    pub fn done(&mut self, action: Action, moved: Moved) {
        match action {
            Action::Carry(from) | Action::Flush(from) => self.carried(from, moved),
            Action::Shut(to) => {
                if moved.sink == SinkState::Failed {
                    self.fail_sink(to);
                } else {
                    self.directions[to.other() as usize].sink = SinkState::Shut;
                }
            }
            Action::Wait | Action::Finish(_) => {}
        }
        self.settle();
    }

    fn carried(&mut self, from: Side, moved: Moved) {
        let direction = &mut self.directions[from as usize];
        direction.held_bytes = (direction.held_bytes + moved.taken).saturating_sub(moved.given);
        if moved.source != SourceState::Ready {
            direction.source = moved.source;
        }
        match moved.sink {
            SinkState::Full => direction.sink = SinkState::Full,
            SinkState::Failed => self.fail_sink(from.other()),
            SinkState::Ready | SinkState::Shut => {}
        }
        if moved.source == SourceState::Failed {
            // A socket that failed for reading also fails for writing.
            self.fail_sink(from);
        }
        self.turn = from.other();
    }

    /// Writing to this side failed. Bytes for this side are lost. Its last bytes are still read.
    fn fail_sink(&mut self, side: Side) {
        let into = &mut self.directions[side.other() as usize];
        if into.has_sink() {
            into.sink = SinkState::Failed;
            into.held_bytes = 0;
        }
        self.readable(side);
    }

    fn settle(&mut self) {
        if self.end.is_some() || !self.directions.iter().all(Direction::is_settled) {
            return;
        }
        let is_clean = self.directions.iter().all(|direction| direction.sink == SinkState::Shut);
        self.end = Some(if is_clean { End::Closed } else { End::Reset });
    }
}
