//! A thread of the UDP proxy: its event loop and its sessions.

use std::{
    collections::{HashMap, VecDeque},
    io,
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
    sync::Arc,
};

use rustix::{
    event::epoll::EventFlags,
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, connect, socket_with},
};
use slab::Slab;

use super::{
    UdpSettings,
    socket::{Batch, Buffers, Lost, Socket, is_unreachable},
    unreachable::Reporter,
};
use crate::{
    carried::{Carried, Listed, find, token},
    list::{ConnectionList, ConnectionState, ListFilter},
    relay::Side,
    services::{Protocol, Scope, Service, Services, plain},
    stats::{Counter, Stats, UdpCounters},
    threads::{EventLoop, LISTENER, ListenerId, Worker, milliseconds},
};

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

/// The counter for datagrams that are dropped for a reason.
type Reason = fn(&Stats) -> &Counter;

#[derive(Debug)]
struct DatagramListener {
    socket: Socket,
    scope: Scope,
    /// The address that the clients use.
    destination: SocketAddr,
}

/// The key of a session: the listener and the client.
type Key = (ListenerId, SocketAddr);

#[derive(Debug)]
struct Session {
    key: Key,
    scope: Scope,
    carried: Carried,
    socket: Socket,
    /// The Service's count of removals when the Service and the endpoint were last checked.
    removals: u64,
    awaits_reply: bool,
}

impl Session {
    /// Whether the session may end for a new one of the same client. Answered questions are over
    /// soon, and a burst of them must not fill the node.
    fn may_end(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.carried.active_ms) >= if self.awaits_reply { QUIET_MS } else { ANSWERED_MS }
    }

    /// Whether datagrams for the client may still come.
    fn is_busy(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.carried.active_ms) < if self.awaits_reply { REPLY_MS } else { QUIET_MS }
    }
}

impl Listed for Session {
    const PROTOCOL: Protocol = Protocol::Udp;

    fn carried(&self) -> &Carried {
        &self.carried
    }

    fn state(&self) -> ConnectionState {
        if self.awaits_reply { ConnectionState::AwaitsReply } else { ConnectionState::Answered }
    }
}

/// The sessions of one client address.
#[derive(Debug, Default)]
struct OfClient {
    count: u32,
    /// The tokens of the sessions, oldest first, and of sessions that have ended.
    by_age: VecDeque<u64>,
}

#[derive(Debug)]
pub(super) struct UdpWorker {
    event_loop: EventLoop,
    settings: UdpSettings,
    services: Arc<Services>,
    counters: Arc<UdpCounters>,
    /// Numbers of listeners are not used again, so that sessions do not change their listener.
    listeners: HashMap<ListenerId, DatagramListener>,
    sessions: Slab<Session>,
    by_key: HashMap<Key, usize>,
    /// The number of sessions of each client.
    by_client: HashMap<IpAddr, OfClient>,
    reporter: Reporter,
    /// Buffers that are not in use. A session may end while datagrams of others are in a buffer.
    buffers: Vec<Buffers>,
}

impl UdpWorker {
    pub(super) fn new(
        event_loop: EventLoop,
        settings: UdpSettings,
        services: Arc<Services>,
        counters: Arc<UdpCounters>,
    ) -> Self {
        Self {
            event_loop,
            settings,
            services,
            counters,
            listeners: HashMap::new(),
            sessions: Slab::new(),
            by_key: HashMap::new(),
            by_client: HashMap::new(),
            reporter: Reporter::open(),
            buffers: Vec::new(),
        }
    }

    pub(super) fn listen(&mut self, id: ListenerId, socket: OwnedFd, scope: Scope, destination: SocketAddr) {
        let added = Socket::new(socket, destination.is_ipv4(), false).and_then(|socket| {
            self.event_loop.watch(&socket.fd, LISTENER | id.0, EventFlags::IN)?;
            self.listeners.insert(id, DatagramListener { socket, scope, destination });
            Ok(())
        });
        if added.is_err() {
            self.counters.exhausted.add(1);
        }
    }

    /// Closes a listener. Its sessions end when they are idle, or when their endpoint answers.
    pub(super) fn stop_listening(&mut self, id: ListenerId) {
        self.with_buffers(|worker, buffers| {
            worker.serve_clients(id, buffers);
            if let Some(listener) = worker.listeners.remove(&id) {
                worker.counters.unknown_destination.add(listener.socket.discard(buffers));
            }
        });
    }

    /// The number of sessions for which datagrams may still come.
    pub(super) fn busy(&self) -> u64 {
        let now_ms = self.event_loop.now_ms;
        self.sessions.iter().filter(|(_, session)| session.is_busy(now_ms)).count() as u64
    }

    /// Calls `act` with buffers that nobody else uses.
    fn with_buffers(&mut self, act: impl FnOnce(&mut Self, &mut Buffers)) {
        let mut buffers = self.buffers.pop().unwrap_or_else(Buffers::new);
        act(self, &mut buffers);
        self.buffers.push(buffers);
    }

    /// Passes datagrams of clients to the endpoints of their sessions.
    fn serve_clients(&mut self, id: ListenerId, buffers: &mut Buffers) {
        for _ in 0..RECEIVES_PER_VISIT {
            let Some(listener) = self.listeners.get(&id) else { return };
            let (scope, destination) = (listener.scope, listener.destination);
            // An error of a listener is the ICMP error of a reply: that client is gone.
            let Ok(()) = listener.socket.receive(buffers) else { return };
            let mut at = 0;
            while let Some(batch) = buffers.next_batch(&mut at) {
                if let Some(slot) = self.session((id, plain(batch.sender)), scope, destination, batch.count()) {
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
    fn session(&mut self, key: Key, scope: Scope, destination: SocketAddr, datagrams: u64) -> Option<usize> {
        if let Some(slot) = self.by_key.get(&key).copied()
            && self.check(slot)
        {
            return Some(slot);
        }
        let Some((service, removals)) = self.services.find(scope, Protocol::Udp, destination) else {
            self.counters.unknown_destination.add(datagrams);
            return None;
        };
        let account = Arc::clone(&service.account);
        match self.open_session(key, scope, destination, service, removals) {
            Ok(slot) => Some(slot),
            Err(reason) => {
                reason(&account.stats).add(datagrams);
                None
            }
        }
    }

    /// Opens a session. The error is the counter for the dropped datagrams.
    fn open_session(
        &mut self,
        key: Key,
        scope: Scope,
        destination: SocketAddr,
        service: Arc<Service>,
        removals: u64,
    ) -> Result<usize, Reason> {
        let client = key.1.ip();
        if !self.take_place(&service, client) {
            return Err(|stats| &stats.dropped_by_limit);
        }
        service.account.stats.accepted.add(1);
        let carried = Carried::begin(service, key.1, destination, &mut self.event_loop);
        let carried = carried.ok_or::<Reason>(|stats| &stats.dropped_without_endpoint)?;
        let socket = self.open_socket(&carried)?;
        let entry = self.sessions.vacant_entry();
        let (slot, token) = (entry.key(), token(entry.key(), carried.generation, Side::Endpoint));
        if self.event_loop.watch(&socket.fd, token, EventFlags::IN).is_err() {
            self.counters.exhausted.add(1);
            return Err(|stats| &stats.dropped_by_exhaustion);
        }
        carried.stats().udp_sessions.add(1);
        entry.insert(Session { key, scope, carried, socket, removals, awaits_reply: true });
        self.by_key.insert(key, slot);
        self.counters.open.add(1);
        let of_client = self.by_client.entry(client).or_default();
        of_client.count += 1;
        of_client.by_age.push_back(token);
        if of_client.by_age.len() > 2 * of_client.count as usize + 16 {
            let sessions = &self.sessions;
            of_client.by_age.retain(|token| find(sessions, *token).is_some());
        }
        self.event_loop.timers.add(token, self.event_loop.now_ms + self.idle_ms());
        Ok(slot)
    }

    /// Takes a place of the Service within the limits of the node, the client's address and the
    /// Service. At a limit, the address gives up old sessions, one for one even if others have
    /// taken more of the node since.
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

    /// Ends the oldest session of a client's address that may end, for resolvers, which have a new
    /// socket for each question. False if the first ones were all used just now.
    fn end_oldest_of(&mut self, client: IpAddr) -> bool {
        let mut busy = 0;
        while busy < MOST_BUSY {
            let Some(of_client) = self.by_client.get_mut(&client) else { return false };
            let Some(token) = of_client.by_age.pop_front() else { return false };
            match find(&self.sessions, token) {
                Some((slot, _)) if !self.sessions[slot].may_end(self.event_loop.now_ms) => {
                    of_client.by_age.push_back(token);
                    busy += 1;
                }
                Some((slot, _)) => {
                    self.close(slot);
                    return true;
                }
                None => {}
            }
        }
        false
    }

    /// Opens the socket of a session. The error is the counter for the dropped datagrams.
    fn open_socket(&self, carried: &Carried) -> Result<Socket, Reason> {
        let endpoint = carried.picked.address;
        if self.services.has_address(Protocol::Udp, endpoint) {
            carried.stats().loops.add(1);
            return Err(|stats| &stats.dropped_by_loop);
        }
        open(endpoint).map_err(|error| -> Reason {
            if is_unreachable(&error) {
                // The node has no route to the endpoint.
                return |stats| &stats.dropped_unreachable;
            }
            self.counters.exhausted.add(1);
            |stats| &stats.dropped_by_exhaustion
        })
    }

    /// Ensures that the address that the client used still belongs to the Service of the session,
    /// and the endpoint, too. Without the address, the session ends. Without the endpoint, the
    /// session moves to another endpoint, or ends. Returns whether the session continues.
    fn check(&mut self, slot: usize) -> bool {
        let session = &mut self.sessions[slot];
        let Carried { service, picked, destination, .. } = &session.carried;
        let removals = service.removals();
        if session.removals == removals {
            return true;
        }
        session.removals = removals;
        let owner = self.services.find(session.scope, Protocol::Udp, *destination);
        let is_owner = owner.is_some_and(|(owner, _)| Arc::ptr_eq(&owner, service));
        let is_present = service.state().pool.contains(picked.key);
        let continues = is_owner && (is_present || self.move_session(slot));
        if !continues {
            self.close(slot);
        }
        continues
    }

    /// Connects a session to another endpoint. Returns false if none is left. Replies of the old
    /// endpoint are no longer accepted.
    fn move_session(&mut self, slot: usize) -> bool {
        let Session { carried, socket, .. } = &mut self.sessions[slot];
        let old = carried.picked;
        let Some(next) = carried.pick(&[old.key], &mut self.event_loop) else { return false };
        // An endpoint of the other IP family needs another socket, so it is not chosen.
        let is_usable = next.address.is_ipv4() == old.address.is_ipv4()
            && !self.services.has_address(Protocol::Udp, next.address)
            && connect(&socket.fd, &next.address).is_ok();
        if is_usable {
            carried.move_to(next);
        } else {
            carried.service.state().pool.release(next.key);
        }
        is_usable
    }

    fn send_to_endpoint(&mut self, slot: usize, batch: Batch<'_>) {
        let session = &mut self.sessions[slot];
        session.carried.active_ms = self.event_loop.now_ms;
        session.awaits_reply = true;
        let mut sent = session.socket.send(batch, session.carried.picked.address);
        if sent.as_ref().is_err_and(|lost| is_unreachable(&lost.error)) {
            // The kernel reports the ICMP error of an earlier datagram. What it sent is lost.
            if !self.endpoint_failed(slot, batch.count()) {
                return;
            }
            let session = &self.sessions[slot];
            sent = session.socket.send(batch, session.carried.picked.address);
        }
        count_sent(&mut self.sessions[slot].carried, Side::Client, batch, sent);
    }

    /// Nobody listens at the endpoint of a session: the client learns that a datagram is lost, and
    /// the session moves, or ends. Returns whether the session continues. Otherwise `datagrams` of
    /// the client were dropped.
    fn endpoint_failed(&mut self, slot: usize, datagrams: u64) -> bool {
        let carried = &self.sessions[slot].carried;
        self.reporter.report(carried.client, carried.destination);
        carried.endpoint_failed(self.event_loop.now_ms);
        if self.move_session(slot) {
            return true;
        }
        let stats = self.sessions[slot].carried.stats();
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
            session.carried.active_ms = self.event_loop.now_ms;
            session.awaits_reply = false;
            let mut at = 0;
            while let Some(batch) = buffers.next_batch(&mut at) {
                let Some(listener) = listener else {
                    session.carried.stats().dropped_after_end.add(batch.count());
                    continue;
                };
                let sent = listener.socket.send(batch, session.carried.client);
                count_sent(&mut session.carried, Side::Endpoint, batch, sent);
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
        let stats = session.carried.stats();
        stats.udp_sessions.subtract(1);
        self.with_buffers(|_, buffers| {
            stats.dropped_after_end.add(session.socket.discard(buffers));
        });
    }
}

impl Worker for UdpWorker {
    fn event_loop(&mut self) -> &mut EventLoop {
        &mut self.event_loop
    }

    fn is_listening(&self) -> bool {
        !self.listeners.is_empty()
    }

    fn list(&self, filter: &ListFilter) -> ConnectionList {
        ConnectionList::of(&self.sessions, filter, self.event_loop.now_ms)
    }

    fn event(&mut self, token: u64, _: EventFlags) {
        self.with_buffers(|worker, buffers| {
            if token & LISTENER != 0 {
                worker.serve_clients(ListenerId(token & !LISTENER), buffers);
            } else if let Some((slot, _)) = find(&worker.sessions, token) {
                worker.serve_endpoint(slot, buffers);
            }
        });
    }

    fn timer(&mut self, token: u64) {
        let Some((slot, _)) = find(&self.sessions, token) else { return };
        let carried = &self.sessions[slot].carried;
        let due_ms = carried.active_ms.saturating_add(self.idle_ms());
        if self.event_loop.now_ms >= due_ms {
            carried.stats().idle.add(1);
            self.close(slot);
        } else {
            self.event_loop.timers.add(token, due_ms);
        }
    }
}

impl Drop for UdpWorker {
    fn drop(&mut self) {
        let slots: Vec<usize> = self.sessions.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            self.close(slot);
        }
    }
}

/// Counts what the kernel sent of a batch of this side, and what it did not send.
fn count_sent(carried: &mut Carried, from: Side, batch: Batch<'_>, sent: Result<(), Lost>) {
    let stats = &carried.service.account.stats;
    let (mut datagrams, mut bytes) = (batch.count(), batch.bytes.len() as u64);
    if let Err(lost) = sent {
        let reason = match Errno::from_io_error(&lost.error) {
            Some(Errno::AGAIN | Errno::NOBUFS) => &stats.dropped_by_full_buffer,
            _ if is_unreachable(&lost.error) => &stats.dropped_unreachable,
            _ => &stats.dropped_by_refusal,
        };
        reason.add(lost.datagrams);
        datagrams -= lost.datagrams;
        bytes -= lost.bytes;
    }
    let (all_datagrams, datagram_bytes, all_bytes) = match from {
        Side::Client => (&stats.datagrams_to_endpoints, &stats.datagram_bytes_to_endpoints, &stats.bytes_to_endpoints),
        Side::Endpoint => (&stats.datagrams_to_clients, &stats.datagram_bytes_to_clients, &stats.bytes_to_clients),
    };
    all_datagrams.add(datagrams);
    datagram_bytes.add(bytes);
    all_bytes.add(bytes);
    carried.datagrams[from as usize] += datagrams;
    carried.bytes[from as usize] += bytes;
}

/// A socket connected to an endpoint: the kernel reports ICMP errors, and drops others' datagrams.
fn open(endpoint: SocketAddr) -> io::Result<Socket> {
    let family = if endpoint.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = socket_with(family, SocketType::DGRAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)?;
    connect(&fd, &endpoint)?;
    Socket::new(fd, endpoint.is_ipv4(), true)
}
