//! The proxy of this node: the engine of the crate `headgate-userspace`, its listeners, and the
//! thread that keeps the gate closed.

use std::{
    collections::{BTreeMap, HashMap},
    fmt, io,
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use headgate_core::{
    Family, LoadBalancing, Protocol as Transport, ProxyProtocol, ServiceKey,
    nftables::Lookup,
    userspace::{Operation, PoolSettings},
};
use headgate_listener::open_files;
use headgate_userspace::{
    Algorithm, ConnectionInfo, ConnectionList, Destination, HowEnded, ListFilter, Protocol, ProxyVersion, ServiceId,
    ServiceSettings, Services, TcpProxy, TcpSettings, UdpProxy, UdpSettings,
};
use socket2::Type;
use tracing::{info, warn};

use super::{
    super::{ConnectionProxy, DataplaneError, ErrorKind, ProxyCounts, TryWake},
    ProxySettings, access_log,
    capacity::Capacity,
    datagrams,
    gate::{Connect, ProxyGate},
    route::{Route, listener_address},
    sockets::{bind, scope},
};

/// The port of the first listener. If another program has a port, the listener gets a free one.
const FIRST_PORT: u16 = 10245;
/// Connections that wait until the proxy accepts them.
const BACKLOG: i32 = 4096;
/// How often the gate is renewed. Its elements expire after 800 ms (nftables) or 1 s (IP sets).
const RENEWAL: Duration = Duration::from_millis(200);
/// The gate is renewed only if a thread of the proxy has begun a turn of its loop within this time.
const HANG: Duration = Duration::from_millis(400);
/// How long the agent waits until the gate is closed or open. Unrenewed, it is then open.
const LONGEST_CHANGE: Duration = Duration::from_secs(1);
/// If the proxy gets no connections this long after its start, this is reported as a problem.
const LONGEST_START: Duration = Duration::from_secs(10);
const NO_ANSWER: &str = "the agent carries no connection until a control plane has answered: traffic goes straight to endpoints, and Services that use the PROXY protocol are refused";
/// The most threads of the proxy.
const MAX_THREADS: usize = 4;

type Listeners = HashMap<Family, BTreeMap<Lookup, SocketAddr>>;

pub(super) struct Proxy {
    services: Arc<Services>,
    tcp: Arc<TcpProxy>,
    pub(super) udp: Arc<UdpProxy>,
    gate: Arc<Mutex<GateState>>,
    /// Called after a problem of the gate began or ended.
    follower: Arc<OnceLock<TryWake>>,
    /// Why the proxy carries nothing on this node, as a sentence.
    shortage: Option<String>,
    /// Wakes the thread, which answers when it has acted. Dropping the sender ends the thread.
    wake: Option<mpsc::Sender<mpsc::Sender<()>>>,
    thread: Option<JoinHandle<()>>,
}

/// What the gate's thread does, and its problem.
#[derive(Debug, Default)]
struct GateState {
    families: Vec<Family>,
    is_draining: bool,
    /// Why the gate is not as it should be, as a sentence, and since when.
    problem: Option<(String, Instant)>,
}

impl GateState {
    /// Stores the result of a turn of the gate's thread. True if the problem is new.
    fn record(&mut self, problem: Option<String>) -> bool {
        let (before, since) = match self.problem.take() {
            Some((sentence, since)) => (Some(sentence), since),
            None => (None, Instant::now()),
        };
        match (&before, &problem) {
            (None, Some(sentence)) => warn!("{sentence}"),
            (Some(_), None) if !self.is_draining => {
                let seconds = since.elapsed().as_secs_f64();
                info!("the gate of the proxy is closed again, {seconds:.1} s after the agent noticed the problem");
            }
            _ => {}
        }
        let is_new = before != problem;
        self.problem = problem.map(|sentence| (sentence, since));
        is_new
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy").field("gate", &self.gate).finish_non_exhaustive()
    }
}

impl Proxy {
    /// Opens the listeners and starts the threads. Returns the listeners' addresses.
    pub(super) fn start(
        families: &[Family],
        connect: Connect,
        settings: ProxySettings,
    ) -> Result<(Self, Listeners), DataplaneError> {
        Self::start_with(families, connect, settings, open_files::raise())
    }

    /// Like [`Self::start`], with a limit of open files.
    fn start_with(
        families: &[Family],
        connect: Connect,
        settings: ProxySettings,
        open_files: u64,
    ) -> Result<(Self, Listeners), DataplaneError> {
        let refused = |error: io::Error| {
            let message = format!("the kernel refuses the proxy of mode userspace a socket or a thread: {error}");
            DataplaneError::new(ErrorKind::Unavailable, message)
        };
        let (services, gate) = (Arc::<Services>::default(), Arc::<Mutex<GateState>>::default());
        let threads = thread::available_parallelism().map_or(1, |cores| cores.get().min(MAX_THREADS));
        let (capacity, shortage) = match Capacity::of(open_files) {
            Ok(capacity @ Capacity { connections, sessions }) => {
                info!(
                    open_files,
                    connections, sessions, "the limit of open files allows so many connections and UDP sessions"
                );
                (capacity, None)
            }
            // The agent logs what is degraded at its start.
            Err(sentence) => (Capacity::default(), Some(sentence)),
        };
        let ProxySettings { has_access_log, connect_timeout, idle_timeout, udp_idle_timeout } = settings;
        let tcp = TcpSettings {
            threads,
            connect_timeout,
            idle_timeout,
            max_connections: capacity.connections,
            on_end: has_access_log.then_some(access_log::write as fn(&ConnectionInfo, HowEnded)),
            ..TcpSettings::default()
        };
        let tcp = Arc::new(TcpProxy::start(&tcp, &services).map_err(refused)?);
        let max_sessions = capacity.sessions;
        let udp = UdpSettings { threads, idle_timeout: udp_idle_timeout, max_sessions, ..UdpSettings::default() };
        let udp = Arc::new(UdpProxy::start(&udp, &services).map_err(refused)?);
        let mut listeners = Listeners::new();
        for family in families {
            // A node without IPv6 has no such sockets, and its IPv6 dataplane does not exist.
            let of_family = match listen_all(&tcp, *family) {
                Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => continue,
                opened => opened.map_err(refused)?,
            };
            listeners.insert(*family, of_family);
        }
        let (wake, woken) = mpsc::channel();
        let follower = Arc::<OnceLock<TryWake>>::default();
        let keeper = Keeper {
            tcp: Arc::clone(&tcp),
            udp: Arc::clone(&udp),
            connect,
            gate: Arc::clone(&gate),
            follower: Arc::clone(&follower),
            serves_by: shortage.is_none().then(|| Instant::now() + LONGEST_START),
            has_news: false,
        };
        let thread = thread::Builder::new().name("gate".into()).spawn(move || keeper.run(&woken)).map_err(refused)?;
        let (wake, thread) = (Some(wake), Some(thread));
        Ok((Self { services, tcp, udp, gate, follower, shortage, wake, thread }, listeners))
    }

    /// Keeps the gate of a family closed from now on, and waits until it is, so that a node that
    /// reports its first sync carries connections. If the proxy can carry nothing, it stays open.
    pub(super) fn serve(&self, family: Family) {
        if self.shortage.is_some() {
            return;
        }
        let mut gate = lock(&self.gate);
        if !gate.families.contains(&family) {
            gate.families.push(family);
            drop(gate);
            // If the gate cannot be closed, `problem` says why.
            let _ = self.wake().recv_timeout(LONGEST_CHANGE);
        }
    }

    /// Makes the gate's thread act at once. The receiver gets a message after the thread has acted.
    fn wake(&self) -> mpsc::Receiver<()> {
        let (acted, receiver) = mpsc::channel();
        // A thread that has ended no longer renews the gate.
        let _ = self.wake.as_ref().map(|wake| wake.send(acted));
        receiver
    }

    pub(super) fn set_node_addresses(&self, addresses: &[IpAddr]) {
        self.services.set_node_addresses(addresses.iter().copied());
    }

    /// Executes changes of the table, and opens and closes listeners for datagrams. The rules use
    /// the listeners after [`datagrams::DatagramListeners::write`].
    pub(super) fn execute(&self, operations: Vec<Operation>, datagrams: &mut datagrams::DatagramListeners) {
        let services = &self.services;
        for operation in operations {
            match operation {
                Operation::SetPool(pool, settings) => services.set_service(ServiceId(pool), settings_of(&settings)),
                Operation::SetEndpoint(pool, endpoint, weight) => {
                    services.set_endpoint(ServiceId(pool), endpoint, weight);
                }
                Operation::RemoveEndpoint(pool, endpoint) => {
                    services.remove_endpoint(ServiceId(pool), endpoint);
                }
                Operation::SetAddress(pool, lookup, transport, address) => {
                    services.set_address(ServiceId(pool), scope(lookup), protocol(transport), address);
                    if transport == Transport::Udp && self.shortage.is_none() {
                        datagrams.add(&self.udp, (lookup, address));
                    }
                }
                Operation::RemoveAddress(pool, lookup, transport, address) => {
                    let pool = ServiceId(pool);
                    let is_removed = services.remove_address(pool, scope(lookup), protocol(transport), address);
                    if transport == Transport::Udp && is_removed {
                        datagrams.remove((lookup, address));
                    }
                }
                Operation::RemovePool(pool) => {
                    services.remove_service(ServiceId(pool));
                }
                Operation::RemoveService(service) => services.remove_account(&service),
            }
        }
    }

    /// Why the gate is open although the proxy should get connections, as a sentence.
    pub(super) fn problem(&self) -> Option<String> {
        if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            return Some(
                "traffic goes straight to endpoints, because the thread of the gate has ended: restart the agent"
                    .to_owned(),
            );
        }
        self.shortage.clone().or_else(|| lock(&self.gate).problem.as_ref().map(|(sentence, _)| sentence.clone()))
    }
}

impl ConnectionProxy for Proxy {
    /// Opens the gate, accepts the connections that wait, and passes on the replies to earlier
    /// datagrams. Dropping the proxy resets what remains open.
    fn drain(&self, limit: Duration) -> u64 {
        let until = Instant::now() + limit;
        lock(&self.gate).is_draining = true;
        let is_open = self.wake().recv_timeout(LONGEST_CHANGE).is_ok() && lock(&self.gate).problem.is_none();
        // Connections that passed the gate before complete their handshake. A gate that the thread
        // could not open opens by itself.
        thread::sleep(if is_open { RENEWAL * 2 } else { LONGEST_CHANGE });
        let left = || until.saturating_duration_since(Instant::now());
        self.tcp.drain(left()) + self.udp.drain(left())
    }

    fn counts(&self) -> ProxyCounts {
        let (services, totals) = self.services.stats();
        ProxyCounts { services, totals, tcp: self.tcp.stats(), udp: self.udp.stats() }
    }

    fn connections(&self, service: Option<&ServiceKey>, limit: usize) -> ConnectionList {
        let filter = ListFilter { account: service.map(|key| key.to_string().into()), limit };
        ConnectionList::join([self.tcp.connections(filter.clone()), self.udp.sessions(filter)], limit)
    }

    fn follow_problems(&self, wake: TryWake) {
        // The loop calls this once, at its start.
        let _ = self.follower.set(wake);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        drop(self.wake.take());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked no longer renews the gate.
            let _ = thread.join();
        }
    }
}

/// Keeps the gate closed while the proxy accepts connections and datagrams.
struct Keeper {
    tcp: Arc<TcpProxy>,
    udp: Arc<UdpProxy>,
    connect: Connect,
    gate: Arc<Mutex<GateState>>,
    follower: Arc<OnceLock<TryWake>>,
    /// Without connections until then, there is a problem. `None` if the proxy can carry nothing.
    serves_by: Option<Instant>,
    /// True if the follower does not know of the last change of the problem.
    has_news: bool,
}

impl Keeper {
    fn run(mut self, woken: &mpsc::Receiver<mpsc::Sender<()>>) {
        let mut kernel = None;
        loop {
            let acted = match woken.recv_timeout(RENEWAL) {
                Ok(acted) => Some(acted),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            self.turn(&mut kernel);
            // Nobody may wait for the message.
            let _ = acted.map(|acted| acted.send(()));
        }
    }

    /// Renews the gate, and wakes the follower if a problem began, changed or ended.
    fn turn(&mut self, kernel: &mut Option<Connections>) {
        let (families, is_draining) = {
            let gate = lock(&self.gate);
            (gate.families.clone(), gate.is_draining)
        };
        let problem = self.renew(kernel, &families, is_draining).err();
        self.has_news |= lock(&self.gate).record(problem);
        // The gate would expire if this thread waited for the follower.
        self.has_news = self.has_news && self.follower.get().is_some_and(|wake| !wake());
    }

    /// Closes or opens the gate of each family. A family with an error does not hinder the other
    /// one. Returns the problems as a sentence.
    fn renew(&self, kernel: &mut Option<Connections>, families: &[Family], is_draining: bool) -> Result<(), String> {
        if families.is_empty() {
            let is_late = !is_draining && self.serves_by.is_some_and(|time| time <= Instant::now());
            return if is_late { Err(NO_ANSWER.to_owned()) } else { Ok(()) };
        }
        let not_closed = |error| {
            format!("traffic goes straight to endpoints, because the gate of the proxy cannot be closed: {error}")
        };
        if kernel.is_none() {
            let (gate, route) = ((self.connect)().map_err(not_closed)?, Route::connect().map_err(not_closed)?);
            *kernel = Some(Connections { gate, route });
        }
        let Some(Connections { gate, route }) = kernel else { return Ok(()) };
        let hang = |transport: &Transport| match transport {
            Transport::Udp => self.udp.since_last_turn(),
            _ => self.tcp.since_last_turn(),
        };
        let (live, hanging): (Vec<_>, Vec<_>) =
            gate.protocols().iter().copied().partition(|transport| hang(transport) <= HANG);
        let mut change = |family| match is_draining {
            true => gate.open(family),
            false => route.keep(family).and_then(|()| gate.close(family, &live)),
        };
        let failed: Vec<String> = families
            .iter()
            .filter_map(|family| change(*family).err().map(|error| format!("{family}: {error}")))
            .collect();
        if !failed.is_empty() {
            *kernel = None;
            return Err(not_closed(failed.join("; ")));
        }
        match hanging.first().filter(|_| !is_draining) {
            // The sentence stays the same while the thread hangs.
            Some(transport) => Err(format!(
                "{transport} traffic goes straight to endpoints, because a thread of the proxy has not turned for more than {HANG:?}"
            )),
            None => Ok(()),
        }
    }
}

/// The gate, and the routes without which nobody reaches the listeners.
struct Connections {
    gate: Box<dyn ProxyGate>,
    route: Route,
}

fn lock(gate: &Mutex<GateState>) -> MutexGuard<'_, GateState> {
    gate.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A protocol in the table of the proxy, which has no SCTP.
fn protocol(transport: Transport) -> Protocol {
    if transport == Transport::Udp { Protocol::Udp } else { Protocol::Tcp }
}

fn settings_of(settings: &PoolSettings) -> ServiceSettings {
    ServiceSettings {
        name: Arc::clone(&settings.name),
        account: Arc::clone(&settings.service),
        algorithm: match settings.load_balancing {
            LoadBalancing::Random => Algorithm::Random,
            LoadBalancing::RoundRobin => Algorithm::RoundRobin,
            LoadBalancing::LeastConnections => Algorithm::LeastConnections,
            LoadBalancing::ConsistentHash => Algorithm::ConsistentHash,
        },
        affinity_seconds: settings.affinity_timeout_seconds,
        max_connections: settings.max_connections,
        proxy_header: settings.proxy_protocol.map(|version| match version {
            ProxyProtocol::V1 => ProxyVersion::V1,
            ProxyProtocol::V2 => ProxyVersion::V2,
        }),
    }
}

fn listen_all(tcp: &TcpProxy, family: Family) -> io::Result<BTreeMap<Lookup, SocketAddr>> {
    let open = |lookup| {
        let port = FIRST_PORT + u16::from(scope(lookup).0);
        let listener = match listener((listener_address(family), port).into()) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => listener((listener_address(family), 0).into()),
            opened => opened,
        }?;
        let address = listener.local_addr()?;
        tcp.listen(OwnedFd::from(listener), scope(lookup), Destination::Original)?;
        Ok((lookup, address))
    };
    Lookup::ALL.into_iter().map(open).collect()
}

fn listener(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = bind(address, Type::STREAM)?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests;
