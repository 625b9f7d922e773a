//! The beginning and the end of a connection: accepting, choosing an endpoint, connecting, trying
//! the next endpoint, closing.

use std::{
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::epoll::{self, EventData, EventFlags},
    io::Errno,
    net::{AddressFamily, SendFlags, SocketAddrAny, SocketFlags, SocketType, connect, send, socket_with, sockopt},
};

use super::{
    Destination, HowEnded,
    connection::{ATTEMPTS, Connection, Visit},
    worker::{Worker, token},
};
use crate::{
    balance::mix,
    list::Listed as _,
    proxy_header,
    relay::{End, Side},
    services::{Protocol, Scope, plain},
    threads::{MAX_GENERATION, milliseconds},
};

/// The events of a socket. With edge-triggered events a socket is registered once and never
/// changed.
pub(super) fn socket_events() -> EventFlags {
    EventFlags::IN | EventFlags::OUT | EventFlags::PRI | EventFlags::RDHUP | EventFlags::ET
}

/// Closes a socket with a RST.
pub(super) fn reset(fd: OwnedFd) {
    // The option fails only on sockets that have no connection to reset.
    let _ = sockopt::set_socket_linger(&fd, Some(Duration::ZERO));
    drop(fd);
}

/// The address that the client used.
pub(super) fn destination_of(client: &OwnedFd, destination: Destination) -> rustix::io::Result<SocketAddr> {
    let local = || rustix::net::getsockname(client).and_then(SocketAddr::try_from);
    match destination {
        Destination::Fixed(address) => Ok(address),
        Destination::Local => local(),
        Destination::Original => match local()? {
            SocketAddr::V4(_) => sockopt::ip_original_dst(client).map(SocketAddr::V4),
            SocketAddr::V6(v6) if v6.ip().to_ipv4_mapped().is_some() => {
                sockopt::ip_original_dst(client).map(SocketAddr::V4)
            }
            SocketAddr::V6(_) => sockopt::ipv6_original_dst(client).map(SocketAddr::V6),
        },
    }
}

impl Worker {
    /// Begins a connection for an accepted socket.
    pub(super) fn accepted(
        &mut self,
        client: OwnedFd,
        peer: Option<SocketAddrAny>,
        scope: Scope,
        destination: Destination,
    ) {
        let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
        let (Some(peer), Ok(destination)) = (peer, destination_of(&client, destination)) else {
            // The client is gone, or it connected to the listener itself.
            self.counters.unknown_destination.add(1);
            return reset(client);
        };
        let (peer, destination) = (plain(peer), plain(destination));
        let Some(service) = self.services.find(scope, Protocol::Tcp, destination) else {
            self.counters.unknown_destination.add(1);
            return reset(client);
        };
        let stats = &service.account.stats;
        stats.accepted.add(1);
        if !service.account.open(self.free()) {
            return reset(client);
        }
        let now_ms = self.tools.now_ms;
        let random = self.random();
        let picked = {
            let mut state = service.state();
            let affinity_ms = state.settings.affinity_seconds.map(|seconds| u64::from(seconds) * 1000);
            state.pool.pick(peer.ip(), &[], affinity_ms, now_ms, random)
        };
        let Some(picked) = picked else {
            stats.open.subtract(1);
            stats.without_endpoint.add(1);
            return reset(client);
        };
        self.next_generation = self.next_generation.wrapping_add(1) & MAX_GENERATION;
        let connection = Connection::new(service, client, peer, destination, picked, self.next_generation, now_ms);
        let slot = self.connections.insert(connection);
        self.counters.open.add(1);
        self.begin_connect(slot);
    }

    /// Connects to the chosen endpoint, or to the next one if that fails at once.
    fn begin_connect(&mut self, slot: usize) {
        loop {
            let connection = &mut self.connections[slot];
            let address = connection.picked.address;
            if self.services.has_address(Protocol::Tcp, address) {
                // The rules of this node would send the connection back to this proxy.
                connection.service.account.stats.loops.add(1);
            } else {
                connection.connect_began = Instant::now();
                match start_connect(address) {
                    Ok(fd) => {
                        let token = token(slot, connection.generation, Side::Endpoint);
                        let added = epoll::add(&self.epoll, &fd, EventData::new_u64(token), socket_events());
                        if added.is_err() {
                            return self.give_up(slot);
                        }
                        connection.endpoint = Some(fd);
                        let timeout_ms = milliseconds(self.settings.connect_timeout);
                        self.wheel.add(token, self.tools.now_ms + timeout_ms);
                        return;
                    }
                    // The next accept waits until the process has descriptors again.
                    Err(Errno::MFILE | Errno::NFILE) if self.reserve.take().is_some() => continue,
                    // This node lacks descriptors or memory. No other endpoint helps.
                    Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                        self.counters.exhausted.add(1);
                        return self.give_up(slot);
                    }
                    // No local port is free for this endpoint. Another endpoint has other ports.
                    Err(Errno::ADDRNOTAVAIL) => {
                        self.counters.exhausted.add(1);
                    }
                    Err(_) => self.mark_failed(slot),
                }
            }
            if !self.next_endpoint(slot) {
                return self.give_up(slot);
            }
        }
    }

    /// The endpoint refused the connection or did not answer: tries the next one.
    pub(super) fn connect_failed(&mut self, slot: usize) {
        self.connections[slot].endpoint = None;
        self.mark_failed(slot);
        if self.next_endpoint(slot) { self.begin_connect(slot) } else { self.give_up(slot) }
    }

    /// Marks the current endpoint as failed.
    fn mark_failed(&self, slot: usize) {
        let connection = &self.connections[slot];
        connection.service.state().pool.failed(connection.picked.key, self.tools.now_ms);
    }

    /// Chooses another endpoint. Returns false if none is left, or if the connection has tried
    /// enough endpoints.
    fn next_endpoint(&mut self, slot: usize) -> bool {
        let now_ms = self.tools.now_ms;
        let random = self.random();
        let connection = &mut self.connections[slot];
        let service = Arc::clone(&connection.service);
        let mut state = service.state();
        let Some(place) = connection.tried.iter_mut().find(|key| key.is_none()) else { return false };
        *place = Some(connection.picked.key);
        let mut tried = [connection.picked.key; ATTEMPTS - 1];
        for (tried, key) in tried.iter_mut().zip(connection.tried.iter().flatten()) {
            *tried = *key;
        }
        let affinity_ms = state.settings.affinity_seconds.map(|seconds| u64::from(seconds) * 1000);
        let client = connection.client_address.ip();
        let Some(next) = state.pool.pick(client, &tried, affinity_ms, now_ms, random) else { return false };
        state.pool.release(connection.picked.key);
        connection.picked = next;
        service.account.stats.retries.add(1);
        true
    }

    /// No endpoint accepted the connection.
    fn give_up(&mut self, slot: usize) {
        self.connections[slot].service.account.stats.failed.add(1);
        self.close(slot, HowEnded::Failed);
    }

    /// The endpoint accepted the connection: the relay begins.
    pub(super) fn connected(&mut self, slot: usize) -> Visit {
        let connection = &mut self.connections[slot];
        connection.is_connected = true;
        let stats = &connection.service.account.stats;
        stats.connected.add(1);
        let micros = connection.connect_began.elapsed().as_micros();
        stats.connect_microseconds.add(u64::try_from(micros).unwrap_or(u64::MAX));
        let version = {
            let mut state = connection.service.state();
            state.pool.succeeded(connection.picked.key);
            state.settings.proxy_header
        };
        if let (Some(version), Some(endpoint)) = (version, &connection.endpoint) {
            let header = proxy_header::header(version, connection.client_address, connection.destination);
            // The buffer of a new socket has room for the header.
            if send(endpoint, &header, SendFlags::NOSIGNAL) != Ok(header.len()) {
                return Visit::Ended(End::Reset);
            }
        }
        let token = token(slot, connection.generation, Side::Client);
        let added = epoll::add(&self.epoll, &connection.client, EventData::new_u64(token), socket_events());
        if added.is_err() {
            return Visit::Ended(End::Reset);
        }
        // Most clients have sent their request by now.
        connection.relay.readable(Side::Client);
        connection.relay.writable(Side::Client);
        connection.relay.writable(Side::Endpoint);
        connection.visit(&mut self.tools)
    }

    /// Ends a connection.
    pub(super) fn close(&mut self, slot: usize, how: HowEnded) {
        let mut connection = self.connections.remove(slot);
        connection.discard_pipes(&mut self.tools);
        if let Some(on_end) = self.settings.on_end {
            on_end(&connection.info(self.tools.now_ms), how);
        }
        let service = &connection.service;
        service.state().pool.release(connection.picked.key);
        service.account.stats.open.subtract(1);
        self.counters.open.subtract(1);
        if how == HowEnded::Closed {
            return;
        }
        service.account.stats.reset.add(1);
        let Connection { client, endpoint, relay, .. } = connection;
        for (side, socket) in [(Side::Client, Some(client)), (Side::Endpoint, endpoint)] {
            let Some(socket) = socket else { continue };
            // If the other side failed, this side still gets the bytes that it was given before.
            if how == HowEnded::Reset && !relay.is_sink_failed(side.other()) {
                self.lingering.reset_after_delivery(socket, self.tools.now_ms);
            } else {
                reset(socket);
            }
        }
    }

    /// A random number. Nobody gains from guessing the choice of an endpoint.
    fn random(&mut self) -> u64 {
        self.random_state = self.random_state.wrapping_add(1);
        mix(self.random_state)
    }
}

/// Creates a socket and begins to connect.
fn start_connect(address: SocketAddr) -> rustix::io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let fd = socket_with(family, SocketType::STREAM, flags, None)?;
    sockopt::set_tcp_nodelay(&fd, true)?;
    match connect(fd.as_fd(), &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(fd),
        Err(error) => Err(error),
    }
}

const _: () = assert!(size_of::<Connection>() <= 512);

impl Drop for Worker {
    fn drop(&mut self) {
        let slots: Vec<usize> = self.connections.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            self.close(slot, HowEnded::Stopped);
        }
    }
}
