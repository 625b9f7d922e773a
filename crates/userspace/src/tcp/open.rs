//! The beginning and the end of a connection: accepting, choosing an endpoint, connecting, trying
//! the next endpoint, closing.

use std::{
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    time::Instant,
};

use rustix::{
    event::epoll::EventFlags,
    io::Errno,
    net::{AddressFamily, SendFlags, SocketAddrAny, SocketFlags, SocketType, connect, send, socket_with, sockopt},
};

use super::{
    Destination, HowEnded,
    connection::{ATTEMPTS, Connection, Visit},
    lingering::reset,
    worker::TcpWorker,
};
use crate::{
    carried::{Carried, Listed as _, token},
    proxy_header,
    relay::{End, Side},
    services::{Protocol, Scope, plain},
    threads::milliseconds,
};

/// The events of a socket. Edge-triggered, it is registered once.
pub(super) fn socket_events() -> EventFlags {
    EventFlags::IN | EventFlags::OUT | EventFlags::PRI | EventFlags::RDHUP | EventFlags::ET
}

pub(super) fn destination_of(client: &OwnedFd, destination: Destination) -> rustix::io::Result<SocketAddr> {
    let local = || rustix::net::getsockname(client).and_then(SocketAddr::try_from);
    match destination {
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

impl TcpWorker {
    /// Begins a connection for an accepted socket.
    pub(super) fn accepted(
        &mut self,
        client: OwnedFd,
        peer: Option<SocketAddrAny>,
        scope: Scope,
        destination: Destination,
    ) {
        let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok()).map(plain);
        let destination = destination_of(&client, destination).ok().map(plain);
        let service = destination.and_then(|destination| self.services.find(scope, Protocol::Tcp, destination));
        let (Some(peer), Some(destination), Some((service, _))) = (peer, destination, service) else {
            // The client is gone, or it connected to the listener itself.
            self.counters.unknown_destination.add(1);
            return reset(client);
        };
        service.account.stats.accepted.add(1);
        if !service.account.open(self.free()) {
            return reset(client);
        }
        let Some(carried) = Carried::begin(service, peer, destination, &mut self.event_loop) else {
            return reset(client);
        };
        let slot = self.connections.insert(Connection::new(carried, client));
        self.counters.open.add(1);
        self.begin_connect(slot);
    }

    /// Connects to the chosen endpoint, or to the next one if that fails at once.
    fn begin_connect(&mut self, slot: usize) {
        loop {
            let connection = &mut self.connections[slot];
            let address = connection.carried.picked.address;
            if self.services.has_address(Protocol::Tcp, address) {
                // The rules of this node would send the connection back to this proxy.
                connection.carried.stats().loops.add(1);
            } else {
                connection.connect_began = Instant::now();
                match start_connect(address) {
                    Ok(fd) => {
                        let token = token(slot, connection.carried.generation, Side::Endpoint);
                        if self.event_loop.watch(&fd, token, socket_events()).is_err() {
                            return self.give_up(slot);
                        }
                        connection.endpoint = Some(fd);
                        let timeout_ms = milliseconds(self.settings.connect_timeout);
                        self.event_loop.timers.add(token, self.event_loop.now_ms + timeout_ms);
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
                    Err(_) => connection.carried.endpoint_failed(self.event_loop.now_ms),
                }
            }
            if !self.next_endpoint(slot) {
                return self.give_up(slot);
            }
        }
    }

    /// The endpoint refused the connection or did not answer: tries the next one.
    pub(super) fn connect_failed(&mut self, slot: usize) {
        let connection = &mut self.connections[slot];
        connection.endpoint = None;
        connection.carried.endpoint_failed(self.event_loop.now_ms);
        if self.next_endpoint(slot) { self.begin_connect(slot) } else { self.give_up(slot) }
    }

    /// Chooses another endpoint. False if none is left, or the connection has tried enough.
    fn next_endpoint(&mut self, slot: usize) -> bool {
        let Connection { carried, tried, .. } = &mut self.connections[slot];
        tried.push(carried.picked.key);
        if tried.len() == ATTEMPTS {
            return false;
        }
        let next = carried.pick(tried, &mut self.event_loop);
        next.map(|next| carried.move_to(next)).is_some()
    }

    /// No endpoint accepted the connection.
    fn give_up(&mut self, slot: usize) {
        self.connections[slot].carried.stats().failed.add(1);
        self.close(slot, HowEnded::Failed);
    }

    /// The endpoint accepted the connection: the relay begins.
    pub(super) fn connected(&mut self, slot: usize) -> Visit {
        let connection = &mut self.connections[slot];
        connection.is_connected = true;
        let stats = connection.carried.stats();
        stats.connected.add(1);
        let micros = connection.connect_began.elapsed().as_micros();
        stats.connect_microseconds.add(u64::try_from(micros).unwrap_or(u64::MAX));
        let version = {
            let mut state = connection.carried.service.state();
            state.pool.succeeded(connection.carried.picked.key);
            state.settings.proxy_header
        };
        if let (Some(version), Some(endpoint)) = (version, &connection.endpoint) {
            let header = proxy_header::header(version, connection.carried.client, connection.carried.destination);
            // The buffer of a new socket has room for the header.
            if send(endpoint, &header, SendFlags::NOSIGNAL) != Ok(header.len()) {
                return Visit::Ended(End::Reset);
            }
        }
        let token = token(slot, connection.carried.generation, Side::Client);
        if self.event_loop.watch(&connection.client, token, socket_events()).is_err() {
            return Visit::Ended(End::Reset);
        }
        // Most clients have sent their request by now.
        connection.relay.readable(Side::Client);
        connection.relay.writable(Side::Client);
        connection.relay.writable(Side::Endpoint);
        connection.visit(&mut self.tools, self.event_loop.now_ms)
    }

    pub(super) fn close(&mut self, slot: usize, how: HowEnded) {
        let mut connection = self.connections.remove(slot);
        connection.discard_pipes(&mut self.tools);
        if let Some(on_end) = self.settings.on_end {
            on_end(&connection.info(self.event_loop.now_ms), how);
        }
        self.counters.open.subtract(1);
        let Connection { carried, client, endpoint, relay, .. } = connection;
        if how == HowEnded::Closed {
            return;
        }
        carried.stats().reset.add(1);
        // The peers learn of the end after it is counted.
        drop(carried);
        for (side, socket) in [(Side::Client, Some(client)), (Side::Endpoint, endpoint)] {
            let Some(socket) = socket else { continue };
            // If the other side failed, this side still gets the bytes that it was given before.
            if how == HowEnded::Reset && !relay.is_sink_failed(side.other()) {
                self.lingering.reset_after_delivery(socket, self.event_loop.now_ms);
            } else {
                reset(socket);
            }
        }
    }
}

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

impl Drop for TcpWorker {
    fn drop(&mut self) {
        let slots: Vec<usize> = self.connections.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            self.close(slot, HowEnded::Stopped);
        }
    }
}
