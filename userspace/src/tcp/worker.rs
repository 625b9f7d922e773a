//! A thread of the TCP proxy: its event loop.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, mpsc},
};

use rustix::{
    event::{
        Timespec,
        epoll::{self, EventData, EventFlags},
    },
    io::Errno,
    net::{SocketFlags, acceptfrom_with},
};
use slab::Slab;

use super::{
    Counters, Destination, Heartbeat, HowEnded, ListenerId, TcpSettings,
    connection::{BUFFER_BYTES, Connection, Tools, Visit},
    lingering::{self, Lingering},
    pipes::Pipes,
};
use crate::{
    inbox::Inbox,
    list::{ConnectionList, ListFilter},
    relay::{End, Side},
    services::{Scope, Services},
    threads::{self, HEARTBEAT_MS, LISTENER, WAKE, epoll_timeout, epoll_with, milliseconds},
    wheel::Wheel,
};

/// The connections that a listener accepts before others act.
const ACCEPTS_PER_VISIT: usize = 64;
const EVENTS: usize = 256;
/// After the kernel refused to accept, listeners pause for this time.
const ACCEPT_PAUSE_MS: u64 = 100;

/// The epoll token of a socket.
pub(super) fn token(slot: usize, generation: u32, side: Side) -> u64 {
    (u64::from(generation) << 32) | ((slot as u64) << 1) | side as u64
}

/// A command of another thread to a worker.
#[derive(Debug)]
pub(super) enum Command {
    Listen {
        id: ListenerId,
        socket: Arc<OwnedFd>,
        scope: Scope,
        destination: Destination,
    },
    /// Accepts what waits in the backlog, and closes the listener. `None` means all listeners.
    StopListening {
        id: Option<ListenerId>,
        done: mpsc::Sender<()>,
    },
    List(Arc<ListFilter>, mpsc::Sender<ConnectionList>),
    /// Resets all connections and ends the thread.
    End,
}

impl threads::End for Command {
    const END: Self = Self::End;
}

#[derive(Debug)]
struct Listener {
    id: ListenerId,
    socket: Arc<OwnedFd>,
    scope: Scope,
    destination: Destination,
}

/// A thread of the proxy.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) settings: TcpSettings,
    pub(super) services: Arc<Services>,
    pub(super) counters: Arc<Counters>,
    inbox: Arc<Inbox<Command>>,
    pub(super) epoll: OwnedFd,
    pub(super) connections: Slab<Connection>,
    listeners: Slab<Listener>,
    /// A descriptor for the endpoint of an accepted connection, if the process has no other left.
    /// Without the reserve, the thread accepts no connection.
    pub(super) reserve: Option<OwnedFd>,
    /// Listeners are out of epoll until then.
    paused_until_ms: Option<u64>,
    pub(super) wheel: Wheel,
    pub(super) tools: Tools,
    pub(super) next_generation: u32,
    pub(super) random_state: u64,
    /// Connections with more to do.
    again: Vec<u64>,
    pub(super) lingering: Lingering,
    heartbeat: Arc<Heartbeat>,
    is_ending: bool,
}

impl Worker {
    pub(super) fn new(
        settings: TcpSettings,
        services: Arc<Services>,
        counters: Arc<Counters>,
        inbox: Arc<Inbox<Command>>,
        heartbeat: Arc<Heartbeat>,
        random_state: u64,
    ) -> io::Result<Self> {
        let epoll = epoll_with(&inbox)?;
        let reserve = Some(epoll.try_clone()?);
        let tools = Tools {
            pipes: Pipes::new(settings.pipes_per_thread, Arc::clone(&counters)),
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
            now_ms: 0,
        };
        Ok(Self {
            settings,
            services,
            counters,
            inbox,
            epoll,
            connections: Slab::new(),
            listeners: Slab::new(),
            reserve,
            paused_until_ms: None,
            wheel: Wheel::new(0),
            tools,
            next_generation: 0,
            random_state,
            again: Vec::new(),
            lingering: Lingering::default(),
            heartbeat,
            is_ending: false,
        })
    }

    /// Runs until [`Command::End`]. Returns an error only if epoll itself fails.
    pub(super) fn run(mut self) -> io::Result<()> {
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
        let mut fired = Vec::new();
        while !self.is_ending {
            let timeout = self.timeout();
            let ready = match epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()) {
                Ok((ready, _)) => &*ready,
                Err(Errno::INTR) => &[],
                Err(error) => return Err(error.into()),
            };
            self.tools.now_ms = self.heartbeat.beat();
            for event in ready {
                self.handle(event.data.u64(), event.flags);
            }
            for token in std::mem::take(&mut self.again) {
                self.with_connection(token, |worker, slot, _| worker.visit(slot));
            }
            self.resume_listeners();
            self.lingering.check(self.tools.now_ms);
            self.wheel.advance(self.tools.now_ms, &mut fired);
            for token in fired.drain(..) {
                self.with_connection(token, Self::timer);
            }
        }
        Ok(())
    }

    fn timeout(&self) -> Option<Timespec> {
        if !self.again.is_empty() {
            return Some(Timespec { tv_sec: 0, tv_nsec: 0 });
        }
        let now_ms = self.heartbeat.now_ms();
        let pause_ms = self.paused_until_ms.map(|until_ms| until_ms.saturating_sub(now_ms));
        // A thread that accepts connections turns its loop often enough for its heartbeat.
        let beat_ms = (!self.listeners.is_empty()).then_some(HEARTBEAT_MS);
        let linger_ms = (!self.lingering.is_empty()).then_some(lingering::CHECK_MS);
        pause_ms
            .into_iter()
            .chain(beat_ms)
            .chain(linger_ms)
            .chain(self.wheel.next_ms(now_ms))
            .min()
            .and_then(epoll_timeout)
    }

    fn handle(&mut self, token: u64, flags: EventFlags) {
        if token == WAKE {
            for command in self.inbox.take() {
                self.obey(command);
            }
        } else if token & LISTENER != 0 {
            self.accept(usize::try_from(token & !LISTENER).unwrap_or(usize::MAX), ACCEPTS_PER_VISIT);
        } else {
            self.with_connection(token, |worker, slot, side| worker.event(slot, side, flags));
        }
    }

    /// Calls `act` if the token's connection still exists.
    fn with_connection(&mut self, token: u64, act: impl FnOnce(&mut Self, usize, Side)) {
        let slot = ((token & u64::from(u32::MAX)) >> 1) as usize;
        let side = if token & 1 == 0 { Side::Client } else { Side::Endpoint };
        let generation = token >> 32;
        if self.connections.get(slot).is_some_and(|connection| u64::from(connection.generation) == generation) {
            act(self, slot, side);
        }
    }

    fn event(&mut self, slot: usize, side: Side, flags: EventFlags) {
        let connection = &mut self.connections[slot];
        let has_failed = flags.intersects(EventFlags::ERR | EventFlags::HUP);
        if !connection.is_connected {
            if has_failed {
                self.connect_failed(slot);
            } else if flags.contains(EventFlags::OUT) {
                if flags.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::PRI) {
                    self.announce(slot, side, flags);
                }
                let visit = self.connected(slot);
                self.after(slot, visit);
            }
            return;
        }
        self.announce(slot, side, flags);
        self.visit(slot);
    }

    /// Tells the relay what the kernel announced.
    fn announce(&mut self, slot: usize, side: Side, flags: EventFlags) {
        let connection = &mut self.connections[slot];
        if flags.intersects(EventFlags::RDHUP | EventFlags::ERR | EventFlags::HUP) {
            connection.ending(side);
        }
        if flags.contains(EventFlags::PRI) {
            connection.urgent(side);
        }
        if flags.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::PRI) {
            connection.relay.readable(side);
        }
        if flags.contains(EventFlags::OUT) {
            connection.relay.writable(side);
        }
        if flags.intersects(EventFlags::ERR | EventFlags::HUP) {
            connection.relay.failed(side);
        }
    }

    fn visit(&mut self, slot: usize) {
        let visit = self.connections[slot].visit(&mut self.tools);
        self.after(slot, visit);
    }

    fn after(&mut self, slot: usize, visit: Visit) {
        match visit {
            Visit::Waits => {}
            Visit::Continues => self.again.push(token(slot, self.connections[slot].generation, Side::Client)),
            Visit::Ended(End::Closed) => self.close(slot, HowEnded::Closed),
            Visit::Ended(End::Reset) if self.connections[slot].is_expired => self.close(slot, HowEnded::Idle),
            Visit::Ended(End::Reset) => self.close(slot, HowEnded::Reset),
        }
    }

    /// The connect timeout or the idle timeout of a connection may have passed.
    fn timer(&mut self, slot: usize, _: Side) {
        let idle_ms = milliseconds(self.settings.idle_timeout);
        let connect_ms = milliseconds(self.settings.connect_timeout);
        let now_ms = self.tools.now_ms;
        let connection = &mut self.connections[slot];
        let token = token(slot, connection.generation, Side::Client);
        if !connection.is_connected {
            // A timer of an earlier attempt fires early.
            let waited_ms = milliseconds(connection.connect_began.elapsed());
            if waited_ms >= connect_ms {
                self.connect_failed(slot);
            } else {
                self.wheel.add(token, now_ms + connect_ms - waited_ms);
            }
            return;
        }
        if now_ms >= connection.active_ms.saturating_add(idle_ms) {
            connection.service.account.stats.idle.add(1);
            connection.is_expired = true;
            connection.relay.expire();
            return self.visit(slot);
        }
        if !connection.has_keepalive {
            connection.keep_alive(&self.settings);
        }
        connection.renew_affinity(now_ms);
        self.wheel.add(token, connection.active_ms.saturating_add(idle_ms));
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
                self.reserve = self.epoll.try_clone().ok();
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
                let _ = epoll::delete(&self.epoll, &listener.socket);
            }
        }
        self.paused_until_ms = Some(self.tools.now_ms + ACCEPT_PAUSE_MS);
    }

    fn resume_listeners(&mut self) {
        if self.paused_until_ms.is_some_and(|until_ms| self.tools.now_ms >= until_ms) {
            self.paused_until_ms = None;
            let slots: Vec<usize> = self.listeners.iter().map(|(slot, _)| slot).collect();
            for slot in slots {
                self.watch_listener(slot);
            }
        }
    }

    fn watch_listener(&mut self, slot: usize) {
        let Some(listener) = self.listeners.get(slot) else { return };
        let data = EventData::new_u64(LISTENER | slot as u64);
        // With EXCLUSIVE, one connection wakes one thread.
        if epoll::add(&self.epoll, listener.socket.as_fd(), data, EventFlags::IN | EventFlags::EXCLUSIVE).is_err() {
            // The kernel lacks memory. The listener returns after the pause.
            self.counters.exhausted.add(1);
            self.pause_listeners();
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Listen { id, socket, scope, destination } => {
                let slot = self.listeners.insert(Listener { id, socket, scope, destination });
                if self.paused_until_ms.is_none() {
                    self.watch_listener(slot);
                }
            }
            Command::StopListening { id, done } => {
                let chosen = self.listeners.iter().filter(|(_, listener)| id.is_none_or(|id| listener.id == id));
                let slots: Vec<usize> = chosen.map(|(slot, _)| slot).collect();
                for slot in slots {
                    self.accept(slot, usize::MAX);
                    let listener = self.listeners.remove(slot);
                    let _ = epoll::delete(&self.epoll, &listener.socket);
                }
                // The caller may have stopped waiting.
                let _ = done.send(());
            }
            Command::List(filter, answer) => {
                let connections = self.connections.iter().map(|(_, connection)| connection);
                let _ = answer.send(ConnectionList::of(connections, &filter, self.tools.now_ms));
            }
            Command::End => self.is_ending = true,
        }
    }
}
