//! A simulated network: connections between hosts, which deliver bytes after a delay and can be
//! cut.
//!
//! A host is an IP address. What a process sends arrives when the driver calls
//! [`Network::deliver`], so that the order does not depend on which process runs first.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr},
    ops::Range,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use bytes::{Buf as _, Bytes, BytesMut};
use fastrand::Rng;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{LONGEST_TURN_MS, MILLISECOND, clock};

/// The most bytes of a direction that its reader has not taken.
const CAPACITY: usize = 64 << 10;
/// The delays of a network without faults.
pub const ORDINARY_DELAYS_MS: Range<u64> = 2..12;

/// What happens to bytes between two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// They arrive.
    Open,
    /// Connections are reset, and new ones refused.
    Refused,
    /// Nothing arrives, as long as this lasts.
    Silent,
}

/// All hosts and connections. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Network(Arc<Mutex<Wires>>);

#[derive(Debug)]
struct Wires {
    rng: Rng,
    delay_ms: Range<u64>,
    routes: BTreeMap<(IpAddr, IpAddr), Route>,
    listeners: BTreeMap<SocketAddr, Backlog>,
    connections: BTreeMap<u64, Connection>,
    /// When something arrives, and on which connection.
    due: BTreeSet<(u64, u64)>,
    /// The connections on which something waits for a silent route to open.
    stuck: BTreeSet<u64>,
    next: u64,
    /// Bytes that arrived, and in how many pieces.
    arrived: (u64, u64),
}

impl Default for Wires {
    fn default() -> Self {
        Self {
            rng: Rng::with_seed(0),
            delay_ms: ORDINARY_DELAYS_MS,
            routes: BTreeMap::new(),
            listeners: BTreeMap::new(),
            connections: BTreeMap::new(),
            due: BTreeSet::new(),
            stuck: BTreeSet::new(),
            next: 0,
            arrived: (0, 0),
        }
    }
}

#[derive(Debug, Default)]
struct Backlog {
    /// The numbers of connections, and their clients.
    waiting: VecDeque<(u64, SocketAddr)>,
    waker: Option<Waker>,
}

#[derive(Debug)]
struct Connection {
    hosts: [IpAddr; 2],
    target: SocketAddr,
    client: SocketAddr,
    state: State,
    /// When the request to connect arrives.
    opens_at: u64,
    waker: Option<Waker>,
    pipes: [Pipe; 2],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Opening,
    Open,
    /// Refused or reset.
    Reset,
}

/// One direction of a connection.
#[derive(Debug, Default)]
struct Pipe {
    /// When they arrive, and the bytes; no bytes mean the end.
    sent: VecDeque<(u64, Bytes)>,
    readable: BytesMut,
    unread: usize,
    is_over: bool,
    /// The writer or the reader has gone.
    is_left: [bool; 2],
    reader: Option<Waker>,
    writer: Option<Waker>,
}

const WRITER: usize = 0;
const READER: usize = 1;

impl Pipe {
    fn wake(&mut self) {
        self.reader.take().into_iter().chain(self.writer.take()).for_each(Waker::wake);
    }
}

impl Connection {
    fn reset(&mut self) {
        self.state = State::Reset;
        self.waker.take().into_iter().for_each(Waker::wake);
        for pipe in &mut self.pipes {
            pipe.sent.clear();
            pipe.readable.clear();
            pipe.wake();
        }
    }
}

impl Wires {
    fn route(&self, from: IpAddr, to: IpAddr) -> Route {
        self.routes.get(&(from, to)).copied().unwrap_or(Route::Open)
    }

    /// When something arrives that a process sends at `at` by its own clock. A clock that was too
    /// fast or too slow does not change how long messages take.
    fn arrival(&mut self, at: u64) -> u64 {
        let now = clock::now();
        at.clamp(now, now + LONGEST_TURN_MS * MILLISECOND) + self.rng.u64(self.delay_ms.clone()) * MILLISECOND
    }

    /// Tries again what waits, after a change of the routes.
    fn unstick(&mut self) {
        let now = clock::now();
        self.due.extend(std::mem::take(&mut self.stuck).into_iter().map(|number| (now, number)));
    }
}

impl Network {
    /// A network whose delays follow from a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let network = Self::default();
        network.wires().rng = Rng::with_seed(seed);
        network
    }

    fn wires(&self) -> MutexGuard<'_, Wires> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the delays of bytes that are sent from now on, in milliseconds.
    pub fn set_delays(&self, milliseconds: Range<u64>) {
        self.wires().delay_ms = milliseconds;
    }

    /// Sets what happens to bytes from one host to another.
    pub fn set_route(&self, from: IpAddr, to: IpAddr, route: Route) {
        let mut wires = self.wires();
        wires.routes.insert((from, to), route);
        wires.unstick();
        if route == Route::Refused {
            let between =
                |connection: &&mut Connection| connection.hosts == [from, to] || connection.hosts == [to, from];
            wires.connections.values_mut().filter(between).for_each(Connection::reset);
        }
    }

    /// Resets the connections of a host.
    pub fn reset(&self, host: IpAddr) {
        self.wires().connections.values_mut().filter(|one| one.hosts.contains(&host)).for_each(Connection::reset);
    }

    /// Whether all routes from and to a host are open.
    #[must_use]
    pub fn is_open(&self, host: IpAddr) -> bool {
        let wires = self.wires();
        let mut of_host = wires.routes.iter().filter(|((from, to), _)| [*from, *to].contains(&host));
        of_host.all(|(_, route)| *route == Route::Open)
    }

    /// Opens all routes.
    pub fn open_routes(&self) {
        let mut wires = self.wires();
        wires.routes.clear();
        wires.unstick();
    }

    /// Forgets the ports and connections of a host. With `is_silent`, nobody hears of it: the
    /// machine has lost its power.
    pub fn leave(&self, host: IpAddr, is_silent: bool) {
        let mut wires = self.wires();
        wires.listeners.retain(|address, _| address.ip() != host);
        if is_silent {
            wires.connections.values_mut().filter(|one| one.hosts.contains(&host)).for_each(|connection| {
                let side = usize::from(connection.hosts[1] == host);
                connection.pipes[side].is_left[WRITER] = true;
                connection.pipes[1 - side].is_left[READER] = true;
            });
        }
    }

    /// The bytes that have arrived so far, and the number of pieces.
    #[must_use]
    pub fn arrived(&self) -> (u64, u64) {
        self.wires().arrived
    }

    /// When the next bytes or requests to connect arrive.
    #[must_use]
    pub fn next_arrival(&self) -> Option<u64> {
        self.wires().due.first().map(|(at, _)| *at)
    }

    /// Delivers what has arrived by the time of the driver. Returns the hosts that got something.
    pub fn deliver(&self) -> BTreeSet<IpAddr> {
        let now = clock::now();
        let mut reached = BTreeSet::new();
        let mut wires = self.wires();
        let later = wires.due.split_off(&(now + 1, 0));
        let arrived = std::mem::replace(&mut wires.due, later);
        for number in arrived.into_iter().map(|(_, number)| number).collect::<BTreeSet<_>>() {
            let Some(connection) = wires.connections.get(&number) else { continue };
            let [client, server] = connection.hosts;
            let routes = [wires.route(client, server), wires.route(server, client)];
            let (target, from, state, opens_at) =
                (connection.target, connection.client, connection.state, connection.opens_at);
            if state == State::Opening && opens_at <= now && !routes.contains(&Route::Silent) {
                reached.extend([client, server]);
                let is_refused = routes.contains(&Route::Refused);
                let backlog = wires.listeners.get_mut(&target).filter(|_| !is_refused);
                let accepted = backlog.map(|backlog| {
                    backlog.waiting.push_back((number, from));
                    backlog.waker.take()
                });
                let Some(connection) = wires.connections.get_mut(&number) else { continue };
                match accepted {
                    Some(waker) => {
                        connection.state = State::Open;
                        connection.waker.take().into_iter().chain(waker).for_each(Waker::wake);
                    }
                    None => connection.reset(),
                }
            }
            let Wires { connections, arrived, stuck, .. } = &mut *wires;
            let Some(connection) = connections.get_mut(&number) else { continue };
            let mut is_broken = false;
            for (side, pipe) in connection.pipes.iter_mut().enumerate() {
                let arrives = connection.state == State::Open && routes[side] != Route::Silent;
                while arrives && pipe.sent.front().is_some_and(|(at, _)| *at <= now) {
                    let Some((_, bytes)) = pipe.sent.pop_front() else { break };
                    reached.insert([server, client][side]);
                    // The host has closed the socket, so it answers with a reset.
                    is_broken |= pipe.is_left[READER] && !bytes.is_empty();
                    pipe.is_over |= bytes.is_empty();
                    arrived.0 += bytes.len() as u64;
                    arrived.1 += 1;
                    pipe.readable.extend_from_slice(&bytes);
                    pipe.reader.take().into_iter().for_each(Waker::wake);
                }
            }
            if is_broken {
                reached.extend([client, server]);
                connection.reset();
            }
            let is_reset = connection.state == State::Reset;
            let waits = |pipe: &Pipe| pipe.sent.front().is_some_and(|(at, _)| *at <= now);
            if connection.state == State::Opening || !is_reset && connection.pipes.iter().any(waits) {
                stuck.insert(number);
            } else if connection
                .pipes
                .iter()
                .all(|pipe| (is_reset || pipe.sent.is_empty()) && pipe.is_left == [true; 2])
            {
                connections.remove(&number);
            }
        }
        reached
    }

    /// Connects from a host.
    ///
    /// # Errors
    /// The connection is refused.
    pub async fn connect(&self, host: IpAddr, target: SocketAddr) -> io::Result<SimulatedStream> {
        let number = {
            let mut wires = self.wires();
            let number = wires.next;
            wires.next += 1;
            let port = 32_768 + u16::try_from(number % 28_000).unwrap_or_default();
            let opens_at = wires.arrival(clock::local());
            let connection = Connection {
                hosts: [host, target.ip()],
                target,
                client: SocketAddr::new(host, port),
                state: State::Opening,
                opens_at,
                waker: None,
                pipes: Default::default(),
            };
            wires.connections.insert(number, connection);
            wires.due.insert((opens_at, number));
            number
        };
        // Dropping the stream, also while it waits, closes the connection.
        let stream = SimulatedStream { network: self.clone(), number, side: 0 };
        std::future::poll_fn(|context| {
            let mut wires = self.wires();
            let Some(connection) = wires.connections.get_mut(&number) else {
                return Poll::Ready(Err(ErrorKind::ConnectionRefused.into()));
            };
            match connection.state {
                State::Open => Poll::Ready(Ok(())),
                State::Reset => Poll::Ready(Err(io::Error::from(ErrorKind::ConnectionRefused))),
                State::Opening => {
                    connection.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await?;
        Ok(stream)
    }

    /// Listens at an address of a host.
    #[must_use]
    pub fn listen(&self, address: SocketAddr) -> SimulatedListener {
        self.wires().listeners.insert(address, Backlog::default());
        SimulatedListener { network: self.clone(), address }
    }
}

/// A port.
#[derive(Debug)]
pub struct SimulatedListener {
    network: Network,
    address: SocketAddr,
}

impl SimulatedListener {
    /// Accepts the next connection.
    ///
    /// # Errors
    /// The host has gone.
    pub fn poll_accept(&mut self, context: &mut Context<'_>) -> Poll<io::Result<(SimulatedStream, SocketAddr)>> {
        let mut wires = self.network.wires();
        let Some(backlog) = wires.listeners.get_mut(&self.address) else {
            return Poll::Ready(Err(ErrorKind::NotConnected.into()));
        };
        match backlog.waiting.pop_front() {
            Some((number, client)) => {
                Poll::Ready(Ok((SimulatedStream { network: self.network.clone(), number, side: 1 }, client)))
            }
            None => {
                backlog.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// Connections that nobody has accepted are reset.
impl Drop for SimulatedListener {
    fn drop(&mut self) {
        let mut wires = self.network.wires();
        let Some(backlog) = wires.listeners.remove(&self.address) else { return };
        for (number, _) in backlog.waiting {
            wires.connections.get_mut(&number).into_iter().for_each(Connection::reset);
        }
    }
}

/// One end of a connection: that of the client (0) or of the server (1).
#[derive(Debug)]
pub struct SimulatedStream {
    network: Network,
    number: u64,
    side: usize,
}

impl SimulatedStream {
    fn with<T>(&self, act: impl FnOnce(&mut Wires, u64) -> T) -> T {
        act(&mut self.network.wires(), self.number)
    }
}

impl AsyncRead for SimulatedStream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let side = 1 - self.side;
        self.with(|wires, number| {
            let Some(connection) = wires.connections.get_mut(&number) else {
                return Poll::Ready(Err(ErrorKind::ConnectionReset.into()));
            };
            if connection.state == State::Reset {
                return Poll::Ready(Err(ErrorKind::ConnectionReset.into()));
            }
            let pipe = &mut connection.pipes[side];
            if pipe.readable.is_empty() && !pipe.is_over {
                pipe.reader = Some(context.waker().clone());
                return Poll::Pending;
            }
            let count = pipe.readable.len().min(buffer.remaining());
            buffer.put_slice(&pipe.readable[..count]);
            pipe.readable.advance(count);
            pipe.unread -= count;
            pipe.writer.take().into_iter().for_each(Waker::wake);
            Poll::Ready(Ok(()))
        })
    }
}

impl AsyncWrite for SimulatedStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let side = self.side;
        self.with(|wires, number| {
            let arrival = wires.arrival(clock::local());
            let Some(connection) = wires.connections.get_mut(&number) else {
                return Poll::Ready(Err(ErrorKind::BrokenPipe.into()));
            };
            let pipe = &mut connection.pipes[side];
            if connection.state == State::Reset || pipe.is_left[WRITER] {
                return Poll::Ready(Err(ErrorKind::BrokenPipe.into()));
            }
            let count = bytes.len().min(CAPACITY - pipe.unread.min(CAPACITY));
            if count == 0 && !bytes.is_empty() {
                pipe.writer = Some(context.waker().clone());
                return Poll::Pending;
            }
            let last = pipe.sent.back().map_or(0, |(at, _)| *at);
            let arrival = arrival.max(last);
            pipe.sent.push_back((arrival, Bytes::copy_from_slice(&bytes[..count])));
            pipe.unread += count;
            wires.due.insert((arrival, number));
            Poll::Ready(Ok(count))
        })
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.finish(false);
        Poll::Ready(Ok(()))
    }
}

impl SimulatedStream {
    /// Sends the end, and with `leaves` also stops to read.
    fn finish(&self, leaves: bool) {
        let side = self.side;
        self.with(|wires, number| {
            let arrival = wires.arrival(clock::local());
            let Some(connection) = wires.connections.get_mut(&number) else { return };
            let is_opening = connection.state == State::Opening;
            let pipe = &mut connection.pipes[side];
            if !pipe.is_left[WRITER] {
                pipe.is_left[WRITER] = true;
                let arrival = pipe.sent.back().map_or(arrival, |(at, _)| arrival.max(*at));
                pipe.sent.push_back((arrival, Bytes::new()));
                wires.due.insert((arrival, number));
            }
            if leaves {
                connection.pipes[1 - side].is_left[READER] = true;
                if is_opening {
                    wires.connections.remove(&number);
                }
            }
        });
    }
}

impl Drop for SimulatedStream {
    fn drop(&mut self) {
        self.finish(true);
    }
}
