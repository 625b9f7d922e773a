//! A thread of the UDP proxy: its event loop and its sessions.

use std::{
    collections::{HashMap, VecDeque},
    io,
    mem::MaybeUninit,
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
    sync::{Arc, atomic::Ordering, mpsc},
};

use rustix::{
    event::epoll::{self, EventData, EventFlags},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, connect, socket_with},
};
use slab::Slab;

use super::{
    Counters, Heartbeats, UdpSettings,
    socket::{Batch, Buffers, Lost, Socket, is_unreachable},
    unreachable::Reporter,
};
use crate::{
    balance::{Picked, mix},
    inbox::Inbox,
    list::{ConnectionInfo, ConnectionList, ConnectionState, ListFilter, Listed},
    services::{Protocol, Scope, Service, Services, plain},
    stats::{Counter, Stats},
    threads::{End, HEARTBEAT_MS, LISTENER, MAX_GENERATION, WAKE, epoll_timeout, epoll_with, milliseconds},
    wheel::Wheel,
};

const EVENTS: usize = 128;
/// Receives of one socket before others act.
const RECEIVES_PER_VISIT: usize = 8;
/// For a new session, at most this many old sessions of the client's address end.
const MOST_ENDED: usize = 4;
/// A search for a session that may end gives up after this many sessions in use.
const MOST_BUSY: usize = 8;
/// A session without a datagram for this time has ended, unless it awaits a reply.
const QUIET_MS: u64 = 500;
/// At a limit, a session ends for a new one this long after its last datagram, if that was a reply.
const ANSWERED_MS: u64 = 100;
/// After this time, a client does not wait for a reply: resolvers repeat a question after 5 s.
const REPLY_MS: u64 = 5_000;

/// A command of another thread to a worker.
#[derive(Debug)]
pub(super) enum Command {
    Listen {
        id: u64,
        socket: OwnedFd,
        scope: Scope,
        destination: SocketAddr,
    },
    StopListening(u64),
    List(Arc<ListFilter>, mpsc::Sender<ConnectionList>),
    /// Asks for the number of sessions for which datagrams may still come.
    CountBusy(mpsc::Sender<u64>),
    End,
}

impl End for Command {
    const END: Self = Self::End;
}

#[derive(Debug)]
struct Listener {
    socket: Socket,
    scope: Scope,
    /// The address that the clients use. Its IP address is unspecified if the socket receives for
    /// all addresses.
    destination: SocketAddr,
}

/// The key of a session: the listener, the client, and the address that the client used.
type Key = (u64, SocketAddr, IpAddr);

#[derive(Debug)]
struct Session {
    key: Key,
    scope: Scope,
    /// The port of the Service.
    port: u16,
    service: Arc<Service>,
    picked: Picked,
    socket: Socket,
    /// The Service's count of removals when the Service and the endpoint were last checked.
    removals: u64,
    active_ms: u64,
    began_ms: u64,
    generation: u32,
    /// Bytes and datagrams that were sent to the endpoint, and to the client.
    bytes: [u64; 2],
    datagrams: [u64; 2],
    awaits_reply: bool,
}

impl Session {
    /// The address of the Service that the client used.
    fn destination(&self) -> SocketAddr {
        SocketAddr::new(self.key.2, self.port)
    }

    /// Whether the session may end for a new one of the same client. Answered questions are over
    /// soon, and a burst of them must not fill the node.
    fn may_end(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.active_ms) >= if self.awaits_reply { QUIET_MS } else { ANSWERED_MS }
    }

    /// Whether datagrams for the client may still come.
    fn is_busy(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.active_ms) < if self.awaits_reply { REPLY_MS } else { QUIET_MS }
    }
}

impl Listed for Session {
    fn account(&self) -> &Arc<str> {
        &self.service.account.name
    }

    fn bytes(&self) -> u64 {
        self.bytes.iter().sum()
    }

    fn info(&self, now_ms: u64) -> ConnectionInfo {
        ConnectionInfo {
            protocol: Protocol::Udp,
            service: Arc::clone(&self.service.state().settings.name),
            client: self.key.1,
            destination: self.destination(),
            endpoint: self.picked.address,
            state: if self.awaits_reply { ConnectionState::AwaitsReply } else { ConnectionState::Answered },
            bytes_to_endpoint: self.bytes[0],
            bytes_to_client: self.bytes[1],
            datagrams_to_endpoint: self.datagrams[0],
            datagrams_to_client: self.datagrams[1],
            age_ms: now_ms.saturating_sub(self.began_ms),
            idle_ms: now_ms.saturating_sub(self.active_ms),
        }
    }
}

/// The sessions of one client address.
#[derive(Debug, Default)]
struct OfClient {
    count: u32,
    /// The tokens of the sessions, oldest first, and of sessions that have ended.
    by_age: VecDeque<u64>,
}

/// A thread of the proxy.
#[derive(Debug)]
pub(super) struct Worker {
    settings: UdpSettings,
    services: Arc<Services>,
    counters: Arc<Counters>,
    inbox: Arc<Inbox<Command>>,
    epoll: OwnedFd,
    /// Numbers of listeners are not used again, so that sessions do not change their listener.
    listeners: HashMap<u64, Listener>,
    sessions: Slab<Session>,
    by_key: HashMap<Key, usize>,
    /// The number of sessions of each client.
    by_client: HashMap<IpAddr, OfClient>,
    wheel: Wheel,
    now_ms: u64,
    /// The times of all threads, and the number of this thread.
    heartbeat: (Arc<Heartbeats>, usize),
    reporter: Reporter,
    /// For the datagrams of sessions that end, while other datagrams are in use.
    discarded: Buffers,
    next_generation: u32,
    random_state: u64,
    is_ending: bool,
}

impl Worker {
    pub(super) fn new(
        settings: UdpSettings,
        services: Arc<Services>,
        counters: Arc<Counters>,
        inbox: Arc<Inbox<Command>>,
        heartbeat: (Arc<Heartbeats>, usize),
        random_state: u64,
    ) -> io::Result<Self> {
        let epoll = epoll_with(&inbox)?;
        Ok(Self {
            settings,
            services,
            counters,
            inbox,
            epoll,
            listeners: HashMap::new(),
            sessions: Slab::new(),
            by_key: HashMap::new(),
            by_client: HashMap::new(),
            wheel: Wheel::new(0),
            now_ms: 0,
            heartbeat,
            reporter: Reporter::open(),
            discarded: Buffers::new(),
            next_generation: 0,
            random_state,
            is_ending: false,
        })
    }

    /// Runs until [`Command::End`]. Returns an error only if epoll itself fails.
    pub(super) fn run(mut self) -> io::Result<()> {
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
        let (mut fired, mut buffers) = (Vec::new(), Buffers::new());
        while !self.is_ending {
            let timeout = self.wait_ms().and_then(epoll_timeout);
            let ready = match epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()) {
                Ok((ready, _)) => &*ready,
                Err(Errno::INTR) => &[],
                Err(error) => return Err(error.into()),
            };
            self.now_ms = self.heartbeat.0.now_ms();
            for event in ready {
                let token = event.data.u64();
                if token == WAKE {
                    for command in self.inbox.take() {
                        self.obey(command, &mut buffers);
                    }
                } else if token & LISTENER != 0 {
                    self.serve_clients(token & !LISTENER, &mut buffers);
                } else if let Some(slot) = slot_of(&self.sessions, token) {
                    self.serve_endpoint(slot, &mut buffers);
                }
            }
            self.wheel.advance(self.now_ms, &mut fired);
            for token in fired.drain(..) {
                self.timer(token);
            }
        }
        Ok(())
    }

    /// The time until something is due. Records that this thread does not hang, or, before a wait
    /// that may be longer than a heartbeat, that it is idle.
    fn wait_ms(&self) -> Option<u64> {
        let (heartbeats, number) = &self.heartbeat;
        let now_ms = heartbeats.now_ms();
        let beat_ms = (!self.listeners.is_empty()).then_some(HEARTBEAT_MS);
        heartbeats.last_ms[*number].store(beat_ms.map_or(u64::MAX, |_| now_ms), Ordering::Relaxed);
        beat_ms.into_iter().chain(self.wheel.next_ms(now_ms)).min()
    }

    fn token(&self, slot: usize) -> u64 {
        (u64::from(self.sessions[slot].generation) << 32) | slot as u64
    }

    fn obey(&mut self, command: Command, buffers: &mut Buffers) {
        match command {
            Command::Listen { id, socket, scope, destination } => {
                let added = Socket::new(socket, destination.is_ipv4()).and_then(|socket| {
                    epoll::add(&self.epoll, &socket.fd, EventData::new_u64(LISTENER | id), EventFlags::IN)?;
                    self.listeners.insert(id, Listener { socket, scope, destination });
                    Ok(())
                });
                if added.is_err() {
                    self.counters.exhausted.add(1);
                }
            }
            // The sessions of the listener end when they are idle, or when their endpoint answers.
            Command::StopListening(id) => {
                self.serve_clients(id, buffers);
                if let Some(listener) = self.listeners.remove(&id) {
                    self.counters.unknown_destination.add(listener.socket.discard(buffers));
                }
            }
            Command::List(filter, answer) => {
                let sessions = self.sessions.iter().map(|(_, session)| session);
                // The caller may have stopped waiting.
                let _ = answer.send(ConnectionList::of(sessions, &filter, self.now_ms));
            }
            Command::CountBusy(answer) => {
                let busy = self.sessions.iter().filter(|(_, session)| session.is_busy(self.now_ms)).count();
                let _ = answer.send(busy as u64);
            }
            Command::End => self.is_ending = true,
        }
    }

    /// Passes datagrams of clients to the endpoints of their sessions.
    fn serve_clients(&mut self, id: u64, buffers: &mut Buffers) {
        for _ in 0..RECEIVES_PER_VISIT {
            let Some(listener) = self.listeners.get(&id) else { return };
            let (scope, destination) = (listener.scope, listener.destination);
            // An error of a listener is the ICMP error of a reply: that client is gone.
            let Ok(()) = listener.socket.receive(buffers) else { return };
            let mut at = 0;
            while let Some(batch) = buffers.next_batch(&mut at) {
                let sender = plain(batch.sender);
                let is_for_all = destination.ip().is_unspecified();
                let used = if is_for_all { batch.destination } else { Some(destination.ip()) };
                let Some(used) = used else {
                    self.counters.unknown_destination.add(batch.count());
                    continue;
                };
                let key = (id, sender, used.to_canonical());
                if let Some(slot) = self.session(key, scope, destination.port(), batch.count()) {
                    self.send_to_endpoint(slot, batch);
                }
            }
            // A further receive would only find that nothing waits. If datagrams have arrived
            // meanwhile, epoll reports the socket again.
            if !buffers.is_full() {
                return;
            }
        }
    }

    /// The session of a client. A new one is opened if the limits allow it.
    fn session(&mut self, key: Key, scope: Scope, port: u16, datagrams: u64) -> Option<usize> {
        if let Some(slot) = self.by_key.get(&key).copied()
            && self.check(slot)
        {
            return Some(slot);
        }
        let destination = SocketAddr::new(key.2, port);
        let Some((service, removals)) = self.services.find_with_removals(scope, Protocol::Udp, destination) else {
            self.counters.unknown_destination.add(datagrams);
            return None;
        };
        let client = key.1.ip();
        let has_place = self.take_place(&service, client);
        let random = self.random();
        let picked = {
            let mut state = service.state();
            let affinity_ms = state.settings.affinity_seconds.map(|seconds| u64::from(seconds) * 1000);
            let stats = &service.account.stats;
            if !has_place {
                stats.dropped_by_limit.add(datagrams);
                return None;
            }
            stats.accepted.add(1);
            let Some(picked) = state.pool.pick(client, &[], affinity_ms, self.now_ms, random) else {
                stats.open.subtract(1);
                stats.without_endpoint.add(1);
                stats.dropped_without_endpoint.add(datagrams);
                return None;
            };
            picked
        };
        let socket = match self.open(&service, picked.address) {
            Ok(socket) => socket,
            Err(reason) => {
                service.state().pool.release(picked.key);
                service.account.stats.open.subtract(1);
                reason(&service.account.stats).add(datagrams);
                return None;
            }
        };
        self.next_generation = self.next_generation.wrapping_add(1) & MAX_GENERATION;
        let slot = self.sessions.insert(Session {
            key,
            scope,
            port,
            service,
            picked,
            socket,
            removals,
            active_ms: self.now_ms,
            began_ms: self.now_ms,
            generation: self.next_generation,
            bytes: [0; 2],
            datagrams: [0; 2],
            awaits_reply: true,
        });
        self.by_key.insert(key, slot);
        self.counters.open.add(1);
        self.sessions[slot].service.account.stats.udp_sessions.add(1);
        let token = self.token(slot);
        let of_client = self.by_client.entry(client).or_default();
        of_client.count += 1;
        of_client.by_age.push_back(token);
        if of_client.by_age.len() > 2 * of_client.count as usize + 16 {
            let sessions = &self.sessions;
            of_client.by_age.retain(|token| slot_of(sessions, *token).is_some());
        }
        self.wheel.add(token, self.now_ms + self.idle_ms());
        if epoll::add(&self.epoll, &self.sessions[slot].socket.fd, EventData::new_u64(token), EventFlags::IN).is_err() {
            self.counters.exhausted.add(1);
            self.sessions[slot].service.account.stats.dropped_by_exhaustion.add(datagrams);
            self.close(slot);
            return None;
        }
        Some(slot)
    }

    /// Takes a place of the Service, if the limits of the node, the client's address and the
    /// Service allow another session. At a limit, the client's address gives up old sessions. Other
    /// clients may have taken more of the node since, so that the address is above its limit: it
    /// then still gets one session for one.
    fn take_place(&mut self, service: &Service, client: IpAddr) -> bool {
        if self.is_full_for(client) && !self.end_oldest_of(client) {
            service.account.stats.over_limit.add(1);
            return false;
        }
        for _ in 0..MOST_ENDED {
            if service.account.open(self.free()) {
                return true;
            }
            if !self.end_oldest_of(client) {
                return false;
            }
        }
        false
    }

    /// The number of further sessions that the node allows.
    fn free(&self) -> u64 {
        self.settings.max_sessions.saturating_sub(self.counters.open.get())
    }

    fn is_full_for(&self, client: IpAddr) -> bool {
        let count = self.by_client.get(&client).map_or(0, |of_client| of_client.count);
        count >= self.settings.max_sessions_per_client || u64::from(count) >= self.free()
    }

    /// Ends the oldest session of a client's address that may end. So a client with a new socket
    /// for each question, as resolvers have, does not wait for the idle timeout of its old sockets.
    /// Returns false if the first sessions in order were all used just now.
    fn end_oldest_of(&mut self, client: IpAddr) -> bool {
        let mut busy = 0;
        while busy < MOST_BUSY {
            let Some(of_client) = self.by_client.get_mut(&client) else { return false };
            let Some(token) = of_client.by_age.pop_front() else { return false };
            match slot_of(&self.sessions, token) {
                Some(slot) if !self.sessions[slot].may_end(self.now_ms) => {
                    of_client.by_age.push_back(token);
                    busy += 1;
                }
                Some(slot) => {
                    self.close(slot);
                    return true;
                }
                None => {}
            }
        }
        false
    }

    /// Opens the socket of a session. The error is the counter for the dropped datagrams.
    fn open(&self, service: &Service, endpoint: SocketAddr) -> Result<Socket, fn(&Stats) -> &Counter> {
        if self.services.has_address(Protocol::Udp, endpoint) {
            service.account.stats.loops.add(1);
            return Err(|stats| &stats.dropped_by_loop);
        }
        match open(endpoint) {
            Ok(socket) => Ok(socket),
            // The node has no route to the endpoint.
            Err(error) if is_unreachable(&error) => Err(|stats| &stats.dropped_unreachable),
            Err(_) => {
                self.counters.exhausted.add(1);
                Err(|stats| &stats.dropped_by_exhaustion)
            }
        }
    }

    /// Ensures that the address that the client used still belongs to the Service of the session,
    /// and the endpoint, too. Without the address, the session ends. Without the endpoint, the
    /// session moves to another endpoint, or ends. Returns whether the session continues.
    fn check(&mut self, slot: usize) -> bool {
        let session = &mut self.sessions[slot];
        let removals = session.service.removals();
        if session.removals != removals {
            session.removals = removals;
            let owner = self.services.find(session.scope, Protocol::Udp, session.destination());
            if owner.is_none_or(|owner| !Arc::ptr_eq(&owner, &session.service)) {
                self.close(slot);
                return false;
            }
            let is_present = session.service.state().pool.contains(session.picked.key);
            if !is_present && !self.move_session(slot) {
                self.close(slot);
                return false;
            }
        }
        true
    }

    /// Connects a session to another endpoint. Returns false if none is left. Replies of the old
    /// endpoint are no longer accepted.
    fn move_session(&mut self, slot: usize) -> bool {
        let random = self.random();
        let session = &mut self.sessions[slot];
        let service = Arc::clone(&session.service);
        let mut state = service.state();
        let affinity_ms = state.settings.affinity_seconds.map(|seconds| u64::from(seconds) * 1000);
        let old = session.picked;
        let Some(next) = state.pool.pick(session.key.1.ip(), &[old.key], affinity_ms, self.now_ms, random) else {
            return false;
        };
        drop(state);
        // An endpoint of the other IP family needs another socket, so it is not chosen.
        let is_usable = next.address.is_ipv4() == old.address.is_ipv4()
            && !self.services.has_address(Protocol::Udp, next.address)
            && connect(&session.socket.fd, &next.address).is_ok();
        let mut state = service.state();
        if is_usable {
            state.pool.release(old.key);
            session.picked = next;
            service.account.stats.retries.add(1);
        } else {
            state.pool.release(next.key);
        }
        is_usable
    }

    fn send_to_endpoint(&mut self, slot: usize, batch: Batch<'_>) {
        let session = &mut self.sessions[slot];
        session.active_ms = self.now_ms;
        session.awaits_reply = true;
        let mut sent = session.socket.send(batch, session.picked.address);
        if sent.as_ref().is_err_and(|lost| is_unreachable(&lost.error)) {
            // The kernel reports the ICMP error of an earlier datagram. What it sent of this batch
            // is also lost.
            if !self.endpoint_failed(slot, batch.count()) {
                return;
            }
            let session = &self.sessions[slot];
            sent = session.socket.send(batch, session.picked.address);
        }
        let session = &mut self.sessions[slot];
        let stats = &session.service.account.stats;
        let (datagrams, bytes) = count_sent(stats, batch, sent);
        stats.datagrams_to_endpoints.add(datagrams);
        stats.datagram_bytes_to_endpoints.add(bytes);
        stats.bytes_to_endpoints.add(bytes);
        session.datagrams[0] += datagrams;
        session.bytes[0] += bytes;
    }

    /// Nobody listens at the endpoint of a session: the client learns that a datagram is lost, and
    /// the session moves, or ends. Returns whether the session continues. Otherwise `datagrams` of
    /// the client were dropped.
    fn endpoint_failed(&mut self, slot: usize, datagrams: u64) -> bool {
        let session = &self.sessions[slot];
        self.reporter.report(session.key.1, session.destination());
        session.service.state().pool.failed(session.picked.key, self.now_ms);
        if self.move_session(slot) {
            return true;
        }
        let stats = &self.sessions[slot].service.account.stats;
        stats.failed.add(1);
        stats.dropped_unreachable.add(datagrams);
        self.close(slot);
        false
    }

    /// Passes datagrams of an endpoint to the client, from the address that the client used.
    fn serve_endpoint(&mut self, slot: usize, buffers: &mut Buffers) {
        for _ in 0..RECEIVES_PER_VISIT {
            let session = &mut self.sessions[slot];
            match session.socket.receive(buffers) {
                Ok(()) => {}
                Err(error) if is_unreachable(&error) => {
                    self.endpoint_failed(slot, 0);
                    return;
                }
                Err(_) => return,
            }
            let listener = self.listeners.get(&session.key.0);
            session.active_ms = self.now_ms;
            session.awaits_reply = false;
            let stats = &session.service.account.stats;
            let mut at = 0;
            while let Some(batch) = buffers.next_batch(&mut at) {
                let Some(listener) = listener else {
                    stats.dropped_after_end.add(batch.count());
                    continue;
                };
                let source = listener.destination.ip().is_unspecified().then_some(session.key.2);
                let sent = listener.socket.send_to(batch, session.key.1, source);
                let (datagrams, bytes) = count_sent(stats, batch, sent);
                stats.datagrams_to_clients.add(datagrams);
                stats.datagram_bytes_to_clients.add(bytes);
                stats.bytes_to_clients.add(bytes);
                session.datagrams[1] += datagrams;
                session.bytes[1] += bytes;
            }
            if listener.is_none() {
                return self.close(slot);
            }
            if !buffers.is_full() {
                return;
            }
        }
    }

    fn idle_ms(&self) -> u64 {
        milliseconds(self.settings.idle_timeout)
    }

    fn timer(&mut self, token: u64) {
        let Some(slot) = slot_of(&self.sessions, token) else { return };
        let due_ms = self.sessions[slot].active_ms.saturating_add(self.idle_ms());
        if self.now_ms >= due_ms {
            self.sessions[slot].service.account.stats.idle.add(1);
            self.close(slot);
        } else {
            self.wheel.add(token, due_ms);
        }
    }

    fn close(&mut self, slot: usize) {
        let session = self.sessions.remove(slot);
        self.by_key.remove(&session.key);
        let client = session.key.1.ip();
        if let Some(of_client) = self.by_client.get_mut(&client) {
            of_client.count -= 1;
            if of_client.count == 0 {
                self.by_client.remove(&client);
            }
        }
        self.counters.open.subtract(1);
        session.service.state().pool.release(session.picked.key);
        let stats = &session.service.account.stats;
        stats.open.subtract(1);
        stats.udp_sessions.subtract(1);
        stats.dropped_after_end.add(session.socket.discard(&mut self.discarded));
    }

    fn random(&mut self) -> u64 {
        self.random_state = self.random_state.wrapping_add(1);
        mix(self.random_state)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let slots: Vec<usize> = self.sessions.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            self.close(slot);
        }
    }
}

/// Counts the datagrams of a batch that the kernel did not send. Returns the number of datagrams
/// and bytes that it sent.
fn count_sent(stats: &Stats, batch: Batch<'_>, sent: Result<(), Lost>) -> (u64, u64) {
    let (datagrams, bytes) = (batch.count(), batch.bytes.len() as u64);
    let Err(lost) = sent else { return (datagrams, bytes) };
    let reason = match Errno::from_io_error(&lost.error) {
        Some(Errno::AGAIN | Errno::NOBUFS) => &stats.dropped_by_full_buffer,
        _ if is_unreachable(&lost.error) => &stats.dropped_unreachable,
        _ => &stats.dropped_by_refusal,
    };
    reason.add(lost.datagrams);
    (datagrams - lost.datagrams, bytes - lost.bytes)
}

/// A socket that is connected to an endpoint, so that the kernel reports ICMP errors and drops
/// datagrams of others.
fn open(endpoint: SocketAddr) -> io::Result<Socket> {
    let family = if endpoint.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = socket_with(family, SocketType::DGRAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)?;
    connect(&fd, &endpoint)?;
    Socket::new(fd, endpoint.is_ipv4())
}

/// The slot of a session, if it has not ended.
fn slot_of(sessions: &Slab<Session>, token: u64) -> Option<usize> {
    let slot = (token & u64::from(u32::MAX)) as usize;
    let session = sessions.get(slot)?;
    (u64::from(session.generation) == token >> 32).then_some(slot)
}
