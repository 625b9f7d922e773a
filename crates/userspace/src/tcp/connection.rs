//! One TCP connection: it carries out the actions of its [`Relay`] on the sockets.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::Instant,
};

use rustix::{
    event::epoll::EventFlags,
    io::{Errno, write},
    net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown, sockopt},
    pipe::{SpliceFlags, splice},
};

use super::pipes::{MIN_CAPACITY_BYTES, Pipe, Pipes};
use crate::{
    balance::EndpointKey,
    carried::{Carried, Listed},
    list::ConnectionState,
    relay::{Action, End, Moved, Relay, Side, SinkState, SourceState},
    services::Protocol,
};

/// The size of the buffer that the connections of a thread share. A read that fills the buffer
/// switches its direction to `splice`. One page of a pipe for each 4 KiB must fit into the smallest
/// pipe.
pub(super) const BUFFER_BYTES: usize = 16 * 1024;
const _: () = assert!(BUFFER_BYTES <= MIN_CAPACITY_BYTES);
const SPLICE_BYTES: usize = 1 << 20;
/// After a `splice` of fewer bytes, the direction returns to the buffer.
const BULK_BYTES: u32 = 8 * 1024;
/// The actions of one visit. Other connections act before the next visit.
const ACTIONS_PER_VISIT: usize = 32;
/// The most endpoints that one connection tries.
pub(super) const ATTEMPTS: usize = 4;

/// What the connections of a thread share.
#[derive(Debug)]
pub(super) struct Tools {
    pub(super) pipes: Pipes,
    pub(super) buffer: Box<[u8]>,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) carried: Carried,
    /// Boxed parts would cost more than they save: most connections need everything.
    pub(super) client: OwnedFd,
    /// The endpoint's socket, once `connect` was called.
    pub(super) endpoint: Option<OwnedFd>,
    pub(super) tried: Vec<EndpointKey>,
    pub(super) relay: Relay,
    pipes: [Option<Pipe>; 2],
    /// Whether the direction uses `splice`, by the source's side.
    is_bulk: [bool; 2],
    /// Whether the kernel announced a FIN or an error. A short read then says nothing.
    is_ending: [bool; 2],
    /// Whether this side has sent urgent data. Reads then end before the urgent byte, and `splice`
    /// never passes it.
    is_urgent: [bool; 2],
    pub(super) is_connected: bool,
    pub(super) has_keepalive: bool,
    /// Whether the idle timeout has passed.
    pub(super) is_expired: bool,
    pub(super) connect_began: Instant,
}

impl Listed for Connection {
    const PROTOCOL: Protocol = Protocol::Tcp;

    fn carried(&self) -> &Carried {
        &self.carried
    }

    fn state(&self) -> ConnectionState {
        match Side::BOTH.map(|side| self.relay.has_ended(side)) {
            _ if !self.is_connected => ConnectionState::Connecting,
            [false, false] => ConnectionState::Open,
            [true, false] => ConnectionState::ClientDone,
            [false, true] => ConnectionState::EndpointDone,
            [true, true] => ConnectionState::Closing,
        }
    }
}

/// What a visit found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Visit {
    /// The connection waits for an event.
    Waits,
    /// The connection has more to do.
    Continues,
    /// The connection ended.
    Ended(End),
}

impl Connection {
    pub(super) fn new(carried: Carried, client: OwnedFd) -> Self {
        Self {
            carried,
            client,
            endpoint: None,
            tried: Vec::new(),
            relay: Relay::default(),
            pipes: [None, None],
            is_bulk: [false; 2],
            is_ending: [false; 2],
            is_urgent: [false; 2],
            is_connected: false,
            has_keepalive: false,
            is_expired: false,
            connect_began: Instant::now(),
        }
    }

    /// Notes what the kernel announced of this side. `recv` drops the urgent byte, as for every
    /// program that does not ask for it.
    pub(super) fn announce(&mut self, side: Side, flags: EventFlags) {
        let has_failed = flags.intersects(EventFlags::ERR | EventFlags::HUP);
        self.is_ending[side as usize] |= has_failed || flags.contains(EventFlags::RDHUP);
        self.is_urgent[side as usize] |= flags.contains(EventFlags::PRI);
        if flags.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::PRI) {
            self.relay.readable(side);
        }
        if flags.contains(EventFlags::OUT) {
            self.relay.writable(side);
        }
        if has_failed {
            self.relay.failed(side);
        }
    }

    /// Carries out actions until the connection waits, ends, or has had its share of the thread.
    pub(super) fn visit(&mut self, tools: &mut Tools, now_ms: u64) -> Visit {
        let before = self.carried.bytes;
        let mut result = Visit::Continues;
        for _ in 0..ACTIONS_PER_VISIT {
            let action = self.relay.next();
            let moved = match action {
                Action::Wait => {
                    result = Visit::Waits;
                    break;
                }
                Action::Finish(end) => {
                    result = Visit::Ended(end);
                    break;
                }
                Action::Shut(to) => self.shut(to),
                Action::Carry(from) if self.is_bulk[from as usize] => self.splice_in(from, tools),
                Action::Carry(from) => self.copy(from, tools),
                Action::Flush(from) => {
                    let (given, sink) = self.splice_out(from);
                    Moved { given, sink, ..Moved::default() }
                }
            };
            if let Action::Carry(from) | Action::Flush(from) = action {
                self.carried.bytes[from as usize] += u64::from(moved.given);
            }
            self.relay.done(action, moved);
            self.return_pipes(tools);
        }
        if self.carried.bytes != before {
            self.carried.active_ms = now_ms;
            let stats = self.carried.stats();
            let [to_endpoint, to_client] = [0, 1].map(|side| self.carried.bytes[side] - before[side]);
            if to_endpoint > 0 {
                stats.bytes_to_endpoints.add(to_endpoint);
            }
            if to_client > 0 {
                stats.bytes_to_clients.add(to_client);
            }
        }
        result
    }

    /// Closes pipes that still hold bytes, at the end of the connection.
    pub(super) fn discard_pipes(&mut self, tools: &mut Tools) {
        for pipe in &mut self.pipes {
            if let Some(pipe) = pipe.take() {
                tools.pipes.discard(pipe);
            }
        }
    }

    /// Sends keepalive probes on both sockets. A connection gets them when it has existed for a
    /// while, so that short connections save the system calls.
    pub(super) fn keep_alive(&mut self, settings: &super::TcpSettings) {
        self.has_keepalive = true;
        for fd in [Some(&self.client), self.endpoint.as_ref()].into_iter().flatten() {
            // A socket that just failed refuses options. Its next event ends the connection.
            let _ = sockopt::set_tcp_keepidle(fd, settings.keepalive)
                .and_then(|()| sockopt::set_tcp_keepintvl(fd, settings.keepalive / 4))
                .and_then(|()| sockopt::set_socket_keepalive(fd, true));
        }
    }

    /// Renews the affinity of a client that used its connection since the last check.
    pub(super) fn renew_affinity(&mut self, now_ms: u64) {
        let Carried { service, picked, client, active_ms, .. } = &self.carried;
        let mut state = service.state();
        if let Some(seconds) = state.settings.affinity_seconds
            && state.pool.contains(picked.key)
        {
            let timeout_ms = u64::from(seconds) * 1000;
            if active_ms.saturating_add(timeout_ms) > now_ms {
                state.pool.renew(client.ip(), picked.address, timeout_ms, *active_ms);
            }
        }
    }

    fn socket(&self, side: Side) -> rustix::io::Result<&OwnedFd> {
        match side {
            Side::Client => Ok(&self.client),
            Side::Endpoint => self.endpoint.as_ref().ok_or(Errno::NOTCONN),
        }
    }

    fn shut(&mut self, to: Side) -> Moved {
        let result = self.socket(to).and_then(|fd| shutdown(fd, Shutdown::Write));
        Moved { sink: sink_state(result.map(|()| 1)).1, ..Moved::default() }
    }

    /// Reads into the shared buffer and writes to the sink. Bytes that the sink does not accept go
    /// into a pipe. If no pipe is left, they stay in the source's socket.
    fn copy(&mut self, from: Side, tools: &mut Tools) -> Moved {
        let Tools { pipes, buffer } = tools;
        // A pipe that stays empty returns after this action.
        self.pipes[from as usize] = pipes.borrow();
        let has_pipe = self.pipes[from as usize].is_some();
        let flags = if has_pipe { RecvFlags::empty() } else { RecvFlags::PEEK };
        let read = self.socket(from).and_then(|fd| recv(fd, &mut buffer[..], flags)).map(|(count, _)| count);
        let (taken, mut source) = source_state(read);
        if taken == 0 {
            return Moved { source, ..Moved::default() };
        }
        let count = taken as usize;
        let sent = self.socket(from.other()).and_then(|fd| send(fd, &buffer[..count], SendFlags::NOSIGNAL));
        let (given, mut sink) = sink_state(sent);
        let is_exact = !self.is_ending[from as usize] && !self.is_urgent[from as usize];
        if count < buffer.len() && is_exact && source == SourceState::Ready {
            source = SourceState::Empty;
        }
        self.is_bulk[from as usize] = count == buffer.len() && !self.is_urgent[from as usize];
        if !has_pipe {
            return self.take_peeked(from, buffer, given, source, sink);
        }
        if given < taken && sink != SinkState::Failed {
            let rest = &buffer[given as usize..count];
            let kept = self.pipes[from as usize].as_ref().map_or(Ok(0), |pipe| write(&pipe.writer, rest));
            if kept != Ok(rest.len()) {
                // The pipe is empty and larger than the buffer, so the kernel is out of memory.
                source = SourceState::Failed;
                sink = SinkState::Failed;
            }
        }
        Moved { taken, given, source, sink }
    }

    /// Removes the peeked bytes that the sink accepted from the source's socket.
    fn take_peeked(
        &mut self,
        from: Side,
        buffer: &mut [u8],
        given: u32,
        source: SourceState,
        sink: SinkState,
    ) -> Moved {
        let mut moved = Moved { taken: given, given, source, sink };
        if sink != SinkState::Failed && given == 0 {
            moved.sink = SinkState::Full;
        }
        // Bytes that were not taken remain readable.
        moved.source = if source == SourceState::Empty { SourceState::Ready } else { source };
        if given > 0 {
            let dropped = &mut buffer[..given as usize];
            let taken = self.socket(from).and_then(|fd| recv(fd, dropped, RecvFlags::empty()));
            if taken.map(|(count, _)| count) != Ok(given as usize) {
                moved.source = SourceState::Failed;
            }
        }
        moved
    }

    /// Moves bytes from the source into a pipe, and from the pipe to the sink.
    fn splice_in(&mut self, from: Side, tools: &mut Tools) -> Moved {
        let Some(pipe) = tools.pipes.borrow() else { return self.copy(from, tools) };
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let read = self.socket(from).and_then(|fd| splice(fd, None, &pipe.writer, None, SPLICE_BYTES, flags));
        self.pipes[from as usize] = Some(pipe);
        let (taken, source) = source_state(read);
        if taken == 0 {
            // At an urgent byte, `splice` reports an end, or no bytes. The event of this byte may
            // come later, so `recv` confirms each end.
            let is_certain = source != SourceState::Ended && !self.is_urgent[from as usize];
            self.is_bulk[from as usize] = is_certain;
            return Moved { source: if is_certain { source } else { SourceState::Ready }, ..Moved::default() };
        }
        self.is_bulk[from as usize] = taken >= BULK_BYTES;
        let (given, sink) = self.splice_out(from);
        Moved { taken, given, source, sink }
    }

    /// Moves bytes from the pipe to the sink.
    fn splice_out(&mut self, from: Side) -> (u32, SinkState) {
        let (Some(pipe), Ok(sink)) = (&self.pipes[from as usize], self.socket(from.other())) else {
            return (0, SinkState::Failed);
        };
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        sink_state(splice(pipe.reader.as_fd(), None, sink.as_fd(), None, SPLICE_BYTES, flags))
    }

    fn return_pipes(&mut self, tools: &mut Tools) {
        for from in Side::BOTH {
            if self.relay.held_bytes(from) == 0
                && let Some(pipe) = self.pipes[from as usize].take()
            {
                // The machine drops the bytes for a failed sink, but the pipe still has them.
                if self.relay.is_sink_failed(from) { tools.pipes.discard(pipe) } else { tools.pipes.give_back(pipe) }
            }
        }
    }
}

fn source_state(read: rustix::io::Result<usize>) -> (u32, SourceState) {
    match read {
        Ok(0) => (0, SourceState::Ended),
        Ok(count) => (u32::try_from(count).unwrap_or(u32::MAX), SourceState::Ready),
        Err(Errno::AGAIN) => (0, SourceState::Empty),
        Err(Errno::INTR) => (0, SourceState::Ready),
        Err(_) => (0, SourceState::Failed),
    }
}

fn sink_state(written: rustix::io::Result<usize>) -> (u32, SinkState) {
    match written {
        Ok(count) => (u32::try_from(count).unwrap_or(u32::MAX), SinkState::Ready),
        Err(Errno::AGAIN) => (0, SinkState::Full),
        Err(Errno::INTR) => (0, SinkState::Ready),
        Err(_) => (0, SinkState::Failed),
    }
}
