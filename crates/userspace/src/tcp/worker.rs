//! A thread of the TCP proxy: its event loop.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use rustix::{
    event::epoll::{self, EventFlags},
    io::Errno,
    net::{SocketFlags, acceptfrom_with},
};
use slab::Slab;

use super::{
    Destination, HowEnded, TcpSettings,
    connection::{BUFFER_BYTES, Connection, Tools, Visit},
    lingering::{self, Lingering},
    pipes::Pipes,
};
use crate::{
    carried::{find, token},
    list::{ConnectionList, ListFilter},
    relay::{End, Side},
    services::{Scope, Services},
    stats::TcpCounters,
    threads::{EventLoop, LISTENER, ListenerId, Worker, milliseconds},
};

/// The connections that a listener accepts before others act.
const ACCEPTS_PER_VISIT: usize = 64;
/// After the kernel refused to accept, listeners pause for this time.
const ACCEPT_PAUSE_MS: u64 = 100;

#[derive(Debug, Clone)]
pub(super) struct StreamListener {
    pub(super) id: ListenerId,
    pub(super) socket: Arc<OwnedFd>,
    pub(super) scope: Scope,
    pub(super) destination: Destination,
}

#[derive(Debug)]
pub(super) struct TcpWorker {
    pub(super) event_loop: EventLoop,
    pub(super) settings: TcpSettings,
    pub(super) services: Arc<Services>,
    pub(super) counters: Arc<TcpCounters>,
    pub(super) connections: Slab<Connection>,
    listeners: Slab<StreamListener>,
    /// A descriptor for the endpoint of an accepted connection, if the process has no other left.
    /// Without the reserve, the thread accepts no connection.
    pub(super) reserve: Option<OwnedFd>,
    /// Listeners are out of epoll until then.
    paused_until_ms: Option<u64>,
    pub(super) tools: Tools,
    /// Connections with more to do.
    again: Vec<u64>,
    pub(super) lingering: Lingering,
}

impl TcpWorker {
    pub(super) fn new(
        event_loop: EventLoop,
        settings: TcpSettings,
        services: Arc<Services>,
        counters: Arc<TcpCounters>,
    ) -> io::Result<Self> {
        let reserve = Some(event_loop.epoll.try_clone()?);
        let tools = Tools {
            pipes: Pipes::new(settings.pipes_per_thread, Arc::clone(&counters)),
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
        };
        Ok(Self {
            event_loop,
            settings,
            services,
            counters,
            connections: Slab::new(),
            listeners: Slab::new(),
            reserve,
            paused_until_ms: None,
            tools,
            again: Vec::new(),
            lingering: Lingering::default(),
        })
    }

    pub(super) fn listen(&mut self, listener: StreamListener) {
        let slot = self.listeners.insert(listener);
        if self.paused_until_ms.is_none() {
            self.watch_listener(slot);
        }
    }

    /// Accepts what waits in the backlog, and closes the listener. `None` means all listeners.
    pub(super) fn stop_listening(&mut self, id: Option<ListenerId>) {
        let chosen = self.listeners.iter().filter(|(_, listener)| id.is_none_or(|id| listener.id == id));
        let slots: Vec<usize> = chosen.map(|(slot, _)| slot).collect();
        for slot in slots {
            self.accept(slot, usize::MAX);
            let listener = self.listeners.remove(slot);
            let _ = epoll::delete(&self.event_loop.epoll, &listener.socket);
        }
    }

    fn ready(&mut self, slot: usize, side: Side, flags: EventFlags) {
        let connection = &mut self.connections[slot];
        let has_failed = flags.intersects(EventFlags::ERR | EventFlags::HUP);
        if !connection.is_connected {
            if has_failed {
                self.connect_failed(slot);
            } else if flags.contains(EventFlags::OUT) {
                if flags.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::PRI) {
                    connection.announce(side, flags);
                }
                let visit = self.connected(slot);
                self.after(slot, visit);
            }
            return;
        }
        connection.announce(side, flags);
        self.visit(slot);
    }

    fn visit(&mut self, slot: usize) {
        let visit = self.connections[slot].visit(&mut self.tools, self.event_loop.now_ms);
        self.after(slot, visit);
    }

    fn after(&mut self, slot: usize, visit: Visit) {
        match visit {
            Visit::Waits => {}
            Visit::Continues => self.again.push(token(slot, self.connections[slot].carried.generation, Side::Client)),
            Visit::Ended(End::Closed) => self.close(slot, HowEnded::Closed),
            Visit::Ended(End::Reset) if self.connections[slot].is_expired => self.close(slot, HowEnded::Idle),
            Visit::Ended(End::Reset) => self.close(slot, HowEnded::Reset),
        }
    }

    /// The connect timeout or the idle timeout of a connection may have passed.
    fn check_timeout(&mut self, slot: usize) {
        let idle_ms = milliseconds(self.settings.idle_timeout);
        let connect_ms = milliseconds(self.settings.connect_timeout);
        let now_ms = self.event_loop.now_ms;
        let connection = &mut self.connections[slot];
        let token = token(slot, connection.carried.generation, Side::Client);
        if !connection.is_connected {
            // A timer of an earlier attempt fires early.
            let waited_ms = milliseconds(connection.connect_began.elapsed());
            if waited_ms >= connect_ms {
                self.connect_failed(slot);
            } else {
                self.event_loop.timers.add(token, now_ms + connect_ms - waited_ms);
            }
            return;
        }
        if now_ms >= connection.carried.active_ms.saturating_add(idle_ms) {
            connection.carried.stats().idle.add(1);
            connection.is_expired = true;
            connection.relay.expire();
            return self.visit(slot);
        }
        if !connection.has_keepalive {
            connection.keep_alive(&self.settings);
        }
        connection.renew_affinity(now_ms);
        self.event_loop.timers.add(token, connection.carried.active_ms.saturating_add(idle_ms));
    }

    /// The number of further connections that the settings allow.
    pub(super) fn free(&self) -> u64 {
        self.settings.max_connections.saturating_sub(self.counters.open.get())
    }

    fn accept(&mut self, listener: usize, count: usize) {
        for _ in 0..count {
            let Some(found) = self.listeners.get(listener) else { return };
            let (scope, destination) = (found.scope, found.destination);
            if self.free() == 0 {
                return self.pause_listeners();
            }
            if self.reserve.is_none() {
                self.reserve = self.event_loop.epoll.try_clone().ok();
                if self.reserve.is_none() {
                    self.counters.exhausted.add(1);
                    return self.pause_listeners();
                }
            }
            match acceptfrom_with(&found.socket, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok((client, peer)) => self.accepted(client, peer, scope, destination),
                Err(Errno::AGAIN) => return,
                // Errors of one connection, see accept(2).
                Err(
                    Errno::CONNABORTED
                    | Errno::INTR
                    | Errno::NETDOWN
                    | Errno::PROTO
                    | Errno::NOPROTOOPT
                    | Errno::HOSTDOWN
                    | Errno::NONET
                    | Errno::HOSTUNREACH
                    | Errno::OPNOTSUPP
                    | Errno::NETUNREACH
                    | Errno::PERM,
                ) => {}
                Err(_) => {
                    self.counters.exhausted.add(1);
                    return self.pause_listeners();
                }
            }
        }
    }

    /// Takes the listeners out of epoll for a while, so that a full backlog does not spin the loop.
    fn pause_listeners(&mut self) {
        if self.paused_until_ms.is_none() {
            self.counters.accept_pauses.add(1);
            for (_, listener) in &self.listeners {
                // A listener that is not in epoll needs no removal.
                let _ = epoll::delete(&self.event_loop.epoll, &listener.socket);
            }
        }
        self.paused_until_ms = Some(self.event_loop.now_ms + ACCEPT_PAUSE_MS);
    }

    fn resume_listeners(&mut self) {
        if self.paused_until_ms.is_some_and(|until_ms| self.event_loop.now_ms >= until_ms) {
            self.paused_until_ms = None;
            let slots: Vec<usize> = self.listeners.iter().map(|(slot, _)| slot).collect();
            for slot in slots {
                self.watch_listener(slot);
            }
        }
    }

    fn watch_listener(&mut self, slot: usize) {
        let Some(listener) = self.listeners.get(slot) else { return };
        // With EXCLUSIVE, one connection wakes one thread.
        let flags = EventFlags::IN | EventFlags::EXCLUSIVE;
        if self.event_loop.watch(listener.socket.as_fd(), LISTENER | slot as u64, flags).is_err() {
            // The kernel lacks memory. The listener returns after the pause.
            self.counters.exhausted.add(1);
            self.pause_listeners();
        }
    }
}

impl Worker for TcpWorker {
    fn event_loop(&mut self) -> &mut EventLoop {
        &mut self.event_loop
    }

    fn is_listening(&self) -> bool {
        !self.listeners.is_empty()
    }

    fn due_ms(&self, now_ms: u64) -> Option<u64> {
        let again_ms = (!self.again.is_empty()).then_some(0);
        let pause_ms = self.paused_until_ms.map(|until_ms| until_ms.saturating_sub(now_ms));
        let linger_ms = (!self.lingering.is_empty()).then_some(lingering::CHECK_MS);
        [again_ms, pause_ms, linger_ms].into_iter().flatten().min()
    }

    fn list(&self, filter: &ListFilter) -> ConnectionList {
        ConnectionList::of(&self.connections, filter, self.event_loop.now_ms)
    }

    fn event(&mut self, token: u64, flags: EventFlags) {
        if token & LISTENER != 0 {
            self.accept(usize::try_from(token & !LISTENER).unwrap_or(usize::MAX), ACCEPTS_PER_VISIT);
        } else if let Some((slot, side)) = find(&self.connections, token) {
            self.ready(slot, side, flags);
        }
    }

    fn after_events(&mut self) {
        for token in std::mem::take(&mut self.again) {
            if let Some((slot, _)) = find(&self.connections, token) {
                self.visit(slot);
            }
        }
        self.resume_listeners();
        self.lingering.check(self.event_loop.now_ms);
    }

    fn timer(&mut self, token: u64) {
        if let Some((slot, _)) = find(&self.connections, token) {
            self.check_timeout(slot);
        }
    }
}
