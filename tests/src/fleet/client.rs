//! One agent with its connection.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use mio::{Interest, Registry, Token, net::TcpStream};
use rustls::ClientConfig;
use socket2::{Domain, SockRef, Socket, Type};

use super::{
    Break, Fault, Member,
    agent::{Agent, Reference},
    http2::{Broken, End, Http2},
    latency::{Histogram, Timetable},
    send,
    tls::Tls,
    tracker::{Effect, Mode, Point, Received, Violation},
};

/// Earlier versions that an ACK tells of (contract, `Ack.earlier`).
const MAX_EARLIER: usize = 64;

/// Why a connection is no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Lost {
    /// The server closed it, or ended the stream.
    Ended(String),
    /// The agent gave it up because of what it was sent.
    Violation(String),
}

/// What all agents of the thread use in turn.
pub(super) struct Scratch {
    /// What is read from sockets.
    pub(super) incoming: Box<[u8]>,
    /// What is to be encrypted.
    plain: Vec<u8>,
    /// What is to be written.
    cipher: Vec<u8>,
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self { incoming: vec![0; 256 << 10].into(), plain: Vec::new(), cipher: Vec::new() }
    }
}

/// Where times are measured.
pub(super) struct Gauge {
    pub(super) timetable: Arc<Timetable>,
    pub(super) is_recording: bool,
    pub(super) latency: Histogram,
    /// Moments at which agents were welcomed, and had their first snapshot, are numbered.
    pub(super) moments: u64,
}

impl Gauge {
    fn moved(&mut self, before: &Point, after: &Point, now: Instant) {
        if before.version == 0 {
            // Its first snapshot.
            return;
        }
        for version in before.slices() + 1..=after.slices() {
            if let Some(microseconds) = self.timetable.microseconds(version, now) {
                self.latency.record(microseconds);
            }
        }
    }
}

struct Link {
    socket: TcpStream,
    tls: Tls,
    http2: Http2,
    /// What the socket did not take yet.
    out: Vec<u8>,
    is_open: bool,
    /// The server will send no more. Its last bytes and its end may have been told by one event, so
    /// that no other follows.
    has_ended: bool,
    since: Instant,
    last_heard: Instant,
    has_sent_garbage: bool,
}

/// One agent. What it knows outlives its connections.
pub struct Client {
    pub(super) member: Member,
    config: Arc<ClientConfig>,
    agent: Agent,
    link: Option<Link>,
    next_replica: usize,
    /// A replica that asked it to go elsewhere, until it has connected again.
    left: Option<SocketAddr>,
    pub(super) failures: u32,
    next_ack: Option<Instant>,
    /// Versions that the next ACK covers, and when they came.
    programmed: Vec<(u64, Instant)>,
    pub(super) ack_is_scheduled: bool,
    pub(super) violation: Option<String>,
    pub(super) is_suspended: bool,
    earlier: Received,
    counts: Counts,
    welcomed: Option<u64>,
    first_snapshot: Option<(u64, u64)>,
}

/// What happened on an agent's connections, ended ones included.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    /// Handshakes that made new keys.
    pub full_handshakes: u64,
    /// Handshakes that resumed a session.
    pub resumed_handshakes: u64,
    /// ACKs sent.
    pub acks: u64,
    /// Connections begun.
    pub connections: u64,
    /// Bytes read from sockets.
    pub wire_bytes: u64,
}

impl Client {
    pub(super) fn new(member: Member, config: Arc<ClientConfig>) -> Self {
        let agent = Agent::new(&member.node, member.is_full);
        Self {
            member,
            config,
            agent,
            link: None,
            next_replica: 0,
            left: None,
            failures: 0,
            next_ack: None,
            programmed: Vec::new(),
            ack_is_scheduled: false,
            violation: None,
            is_suspended: false,
            earlier: Received::default(),
            counts: Counts::default(),
            welcomed: None,
            first_snapshot: None,
        }
    }

    /// What it was added with.
    #[must_use]
    pub fn member(&self) -> &Member {
        &self.member
    }

    /// What it knows.
    #[must_use]
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// What its connections did.
    #[must_use]
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// What all its streams brought.
    #[must_use]
    pub fn received(&self) -> Received {
        let mut all = self.earlier;
        all += *self.agent.tracker().received();
        all
    }

    /// When it was first welcomed, and when it had its first snapshot, as places in the order of
    /// such moments of all agents.
    #[must_use]
    pub fn first_snapshot(&self) -> Option<(u64, u64)> {
        self.first_snapshot
    }

    /// How its present stream began; none when there is none.
    #[must_use]
    pub fn mode(&self) -> Option<Mode> {
        self.link.as_ref().and_then(|_| self.agent.tracker().mode())
    }

    /// True when it has a stream whose beginning is over.
    #[must_use]
    pub fn is_following(&self) -> bool {
        self.link.is_some() && self.agent.tracker().is_following()
    }

    /// True when it follows a stream, and has all that the source had at this position of
    /// EndpointSlices.
    #[must_use]
    pub fn has(&self, slices: u64) -> bool {
        self.is_following() && self.agent.tracker().point().is_some_and(|point| point.slices() >= slices)
    }

    /// True when it reads, sends no garbage, and has not been suspended.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        matches!(self.member.fault, Fault::None | Fault::Nack) && !self.is_suspended
    }

    pub(super) fn is_handshaking(&self) -> bool {
        self.link.as_ref().is_some_and(|link| !link.is_open)
    }

    pub(super) fn is_connected(&self) -> bool {
        self.link.is_some()
    }

    /// Changes where it connects the next time.
    pub(super) fn set_replicas(&mut self, replicas: &[SocketAddr]) {
        self.member.replicas = replicas.to_vec();
        self.next_replica = 0;
        self.failures = 0;
    }

    /// The next replica, which is not the one that was left while there are others.
    fn next_address(&mut self) -> Result<SocketAddr> {
        let left = self.left.take();
        let replicas = &self.member.replicas;
        let address = |number: usize| replicas.get(number % replicas.len().max(1)).copied();
        if address(self.next_replica) == left {
            self.next_replica += 1;
        }
        let address = address(self.next_replica).context("an agent without replicas")?;
        self.next_replica += 1;
        Ok(address)
    }

    /// Begins a connection to its next replica.
    pub(super) fn connect(&mut self, registry: &Registry, token: Token) -> Result<()> {
        let address = self.next_address()?;
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.set_tcp_nodelay(true)?;
        if let Some(source) = self.member.source {
            socket.bind(&SocketAddr::new(source, 0).into())?;
        }
        match socket.connect(&address.into()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        let mut socket = TcpStream::from_std(socket.into());
        registry.register(&mut socket, token, Interest::READABLE | Interest::WRITABLE)?;
        let mut tls = Tls::new(Arc::clone(&self.config))?;
        let mut out = Vec::new();
        tls.take(&mut [], &mut out, |_| Ok(())).map_err(anyhow::Error::msg)?;
        let now = Instant::now();
        let http2 = Http2::new();
        self.link = Some(Link {
            socket,
            tls,
            http2,
            out,
            is_open: false,
            has_ended: false,
            since: now,
            last_heard: now,
            has_sent_garbage: false,
        });
        self.counts.connections += 1;
        self.ack_is_scheduled = false;
        Ok(())
    }

    /// The connection is to be left for another, if it is still this one.
    pub(super) fn leaves(&mut self, connection: u64) -> bool {
        let leaves = self.link.is_some() && self.counts.connections == connection;
        if leaves {
            self.left = self.link.as_ref().and_then(|link| link.socket.peer_addr().ok());
        }
        leaves
    }

    /// Drops the connection.
    pub(super) fn disconnect(&mut self, how: Break) {
        let Some(link) = self.link.take() else { return };
        self.earlier += self.agent.end_stream();
        self.programmed.clear();
        if how == Break::Reset
            && let Err(error) = SockRef::from(&link.socket).set_linger(Some(Duration::ZERO))
        {
            eprintln!("warning: a TCP reset cannot be armed: {error}");
        }
    }

    /// The server has closed its side; what it sent before can still be read.
    pub(super) fn on_closed(&mut self) {
        if let Some(link) = &mut self.link {
            link.has_ended = true;
        }
    }

    /// The socket takes more.
    pub(super) fn on_writable(&mut self) -> Result<(), Lost> {
        let Some(link) = &mut self.link else { return Ok(()) };
        if let Ok(Some(error)) = link.socket.take_error() {
            return Err(Lost::Ended(format!("connection: {}", error.kind())));
        }
        link.flush()
    }

    /// Reads what is there, `limit` bytes at the most. True when everything has been read.
    pub(super) fn on_readable(
        &mut self,
        limit: usize,
        scratch: &mut Scratch,
        gauge: &mut Gauge,
        ack_interval: Duration,
        reference: Option<&Reference>,
    ) -> Result<Outcome, Lost> {
        let (mut wants_ack, mut move_at) = (false, None);
        loop {
            let Some(link) = &mut self.link else { return Ok(Outcome::default()) };
            let Scratch { incoming, plain, cipher } = scratch;
            let held = link.tls.partial().len();
            incoming[..held].copy_from_slice(link.tls.partial());
            let room = (incoming.len() - held).min(limit);
            let count = match link.socket.read(&mut incoming[held..held + room]) {
                Ok(0) => return Err(link.closed()),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::NotConnected => break,
                Err(error) => return Err(Lost::Ended(format!("connection: {}", error.kind()))),
            };
            self.counts.wire_bytes += count as u64;
            let now = Instant::now();
            link.last_heard = now;
            plain.clear();
            cipher.clear();
            let (http2, agent, is_measured) = (&mut link.http2, &mut self.agent, self.member.is_measured);
            let (welcomed, first_snapshot) = (&mut self.welcomed, &mut self.first_snapshot);
            let programmed = &mut self.programmed;
            let mut broken = None;
            let mut on_message = |message: &[u8]| {
                let effect = agent.on_message(message).map_err(|violation| violation.to_string())?;
                match effect {
                    Effect::None => {}
                    // The replica has to learn what is programmed, also when nothing changes from
                    // now on.
                    Effect::Welcomed => {
                        wants_ack |= agent.tracker().mode() == Some(Mode::Log);
                        gauge.moments += 1;
                        welcomed.get_or_insert(gauge.moments);
                    }
                    Effect::Node => wants_ack = true,
                    Effect::Drained(within_ms) => {
                        move_at = Some(now + Duration::from_millis(within_ms).mul_f64(fastrand::f64()));
                    }
                    Effect::Moved(before) => {
                        wants_ack = true;
                        if first_snapshot.is_none() {
                            gauge.moments += 1;
                            *first_snapshot = welcomed.map(|welcomed| (welcomed, gauge.moments));
                        }
                        if programmed.len() > MAX_EARLIER {
                            programmed.remove(0);
                        }
                        programmed.extend(agent.tracker().point().map(|point| (point.version, now)));
                        if let (true, true, Some(after)) = (is_measured, gauge.is_recording, agent.tracker().point()) {
                            gauge.moved(&before, &after, now);
                        }
                    }
                }
                Ok(())
            };
            let taken = link.tls.take(&mut incoming[..held + count], cipher, |data| {
                http2.feed(data, plain, &mut on_message).map_err(|error| {
                    broken = Some(error);
                    String::new()
                })
            });
            let progress = match (taken, broken) {
                (_, Some(error)) => return Err(Lost::of(&error)),
                // An alert: the server refuses us, or what we sent.
                (Err(error), None) => return Err(Lost::Ended(error)),
                (Ok(progress), None) => progress,
            };
            if progress.has_opened {
                link.is_open = true;
                match link.tls.is_resumed() {
                    Some(true) => self.counts.resumed_handshakes += 1,
                    _ => self.counts.full_handshakes += 1,
                }
                Http2::open("control-plane", plain);
                self.next_ack = None;
                let hello = self.agent.hello(reference);
                if !link.http2.send(&hello, plain) {
                    return Err(Lost::Violation("the server's windows do not take a Hello".to_owned()));
                }
            }
            if let Some(end) = link.http2.end.take() {
                return Err(Lost::Ended(shown(&end)));
            }
            link.encrypt_and_flush(plain, cipher)?;
            let is_drained = count < room && !link.has_ended;
            if is_drained || limit < incoming.len() {
                break;
            }
        }
        let outcome = if wants_ack { self.answer(scratch, ack_interval)? } else { Outcome::default() };
        Ok(Outcome { move_at: move_at.map(|at| (at, self.counts.connections)), ..outcome })
    }

    /// Acknowledges now, or says when.
    fn answer(&mut self, scratch: &mut Scratch, ack_interval: Duration) -> Result<Outcome, Lost> {
        if self.member.fault == Fault::Nack {
            let nack = self.agent.nack();
            self.send(&nack, scratch)?;
        }
        if let (Fault::Garbage(garbage), Some(link)) = (self.member.fault, &mut self.link)
            && !link.has_sent_garbage
        {
            link.has_sent_garbage = true;
            scratch.plain.clear();
            scratch.cipher.clear();
            send::garbage(garbage, &mut link.http2, &mut scratch.plain, &mut scratch.cipher);
            link.encrypt_and_flush(&mut scratch.plain, &mut scratch.cipher)?;
        }
        match self.next_ack.filter(|due| *due > Instant::now()) {
            Some(_) if self.ack_is_scheduled => Ok(Outcome::default()),
            Some(due) => {
                self.ack_is_scheduled = true;
                Ok(Outcome { ack_at: Some(due), ..Outcome::default() })
            }
            None => self.acknowledge(scratch, ack_interval).map(|()| Outcome::default()),
        }
    }

    /// Sends an ACK for where it is. The next one waits for `ack_interval`, less or more by two
    /// fifths, as a real agent's does.
    pub(super) fn acknowledge(&mut self, scratch: &mut Scratch, ack_interval: Duration) -> Result<(), Lost> {
        self.ack_is_scheduled = false;
        let Some(ack) = self.agent.ack(&self.programmed).filter(|_| self.is_following()) else { return Ok(()) };
        if self.send(&ack, scratch)? {
            self.next_ack = Some(Instant::now() + ack_interval.mul_f64(0.6 + 0.8 * fastrand::f64()));
            self.programmed.clear();
            self.counts.acks += 1;
        }
        Ok(())
    }

    /// Sends a message; false when the server's windows do not take it now.
    fn send(&mut self, message: &[u8], scratch: &mut Scratch) -> Result<bool, Lost> {
        let Some(link) = self.link.as_mut().filter(|link| link.is_open) else { return Ok(false) };
        scratch.plain.clear();
        scratch.cipher.clear();
        let is_sent = link.http2.send(message, &mut scratch.plain);
        link.encrypt_and_flush(&mut scratch.plain, &mut scratch.cipher)?;
        Ok(is_sent)
    }

    /// Looks whether it has heard something in time.
    pub(super) fn check_silence(&self, now: Instant, handshake_limit: Duration) -> Result<(), Lost> {
        let Some(link) = &self.link else { return Ok(()) };
        if !link.is_open {
            let is_late = now.duration_since(link.since) > handshake_limit;
            return if is_late { Err(Lost::Ended("handshake: no end".to_owned())) } else { Ok(()) };
        }
        let limit = Duration::from_millis(3 * self.agent.tracker().heartbeat_interval_ms());
        if !limit.is_zero() && now.duration_since(link.last_heard) > limit {
            return Err(Lost::Violation(Violation::Silent.to_string()));
        }
        Ok(())
    }
}

/// What reading led to.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Outcome {
    /// When the next ACK is due, if that has to be looked after.
    pub(super) ack_at: Option<Instant>,
    /// When this connection, of those begun so far, is to be left for one to another replica.
    pub(super) move_at: Option<(Instant, u64)>,
}

impl Lost {
    fn of(error: &Broken) -> Self {
        Self::Violation(error.to_string())
    }
}

fn shown(end: &End) -> String {
    match end {
        End::Status { code, message } => format!("status {code}: {message}"),
        End::Reset(code) => format!("RST_STREAM {code}"),
    }
}

impl Link {
    fn closed(&self) -> Lost {
        let how = if self.http2.goes_away { "GOAWAY" } else { "closed" };
        Lost::Ended(format!("connection: {how}"))
    }

    /// Encrypts `plain`, and writes it behind `cipher`.
    fn encrypt_and_flush(&mut self, plain: &mut Vec<u8>, cipher: &mut Vec<u8>) -> Result<(), Lost> {
        if !plain.is_empty() {
            self.tls.encrypt(plain, cipher).map_err(Lost::Ended)?;
            plain.clear();
        }
        if cipher.is_empty() {
            return if self.tls.is_closed { Err(self.closed()) } else { Ok(()) };
        }
        self.out.append(cipher);
        self.flush()
    }

    fn flush(&mut self) -> Result<(), Lost> {
        let mut written = 0;
        while written < self.out.len() {
            match self.socket.write(&self.out[written..]) {
                Ok(count) => written += count,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Lost::Ended(format!("connection: {}", error.kind()))),
            }
        }
        self.out.drain(..written);
        Ok(())
    }
}
