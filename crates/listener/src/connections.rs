//! The connections of all HTTP ports of a program, within limits that the ports share.
//!
//! Any pod can reach such a port, and needs no certificate. A new connection is always accepted, so
//! that an honest probe gets an answer whoever else holds connections. If a limit is reached, the
//! new connection replaces an old one:
//!
//! - If the client's network has reached its limit, the connection of this network is closed that
//!   has been silent for longest. Connections whose requests are being answered are closed last,
//!   the oldest first: a client that sends request after request has old connections.
//! - If all connections together have reached the limit, the network with the most connections
//!   loses a connection in the same way.
//! - The answers that clients have not read have a limit in bytes, and are dropped in this order.
//!
//! A connection takes one open file, small buffers in the kernel, and from its first byte on some
//! 20 KB, with at most 8 KiB for its request. The first byte has to arrive within some time, from
//! there the headers of the first request within the same time again, and with HTTP/1.1 those of
//! each later one. So all HTTP ports together hold a small part of the open files, and the rest
//! stays for streams, TLS files and the proxy of mode userspace.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    error::Error,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{Router, body::HttpBody as _, extract::ConnectInfo};
use futures::TryFutureExt as _;
use hyper::{Request, body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use prometheus_client::metrics::{counter::Counter, family::Family};
use socket2::SockRef;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::{JoinHandle, yield_now},
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tower::Service as _;
use tracing::{debug, warn};

use crate::{Network, open_files};

/// The most connections of all ports. Load balancers may keep one open for each Service.
const MAX_CONNECTIONS: u64 = 512;

const PART_OF_NETWORK: usize = 4;

/// The most connections of a port whose clients wait.
const MAX_WAITING_CONNECTIONS: u64 = 1_024;

/// The connections also take at most this part of the limit of open files.
const PART_OF_OPEN_FILES: u64 = 8;

/// The longest time until the first byte, from there until all headers of a request have arrived,
/// and with HTTP/1.1 from an answer until all headers of the next request. Load balancers and
/// Prometheus ask at least every 30 s, and some keep their connections.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(40);

/// The size of the buffer for a request, and so of its line and headers. hyper's smallest.
const REQUEST_BYTES: u32 = 8 << 10;

/// The most bytes of the last answers on all connections. One answer may be larger.
const MAX_ANSWER_BYTES: u64 = 16 << 20;

/// The sizes of the kernel's buffers of a connection. The kernel doubles them for its own data.
const RECEIVE_BUFFER_BYTES: usize = 16 << 10;
const SEND_BUFFER_BYTES: usize = 64 << 10;

/// The pause after an accept that failed, for example because there are too many open files.
/// Without the pause, the next accept would usually fail too.
pub const ACCEPT_RETRY: Duration = Duration::from_millis(100);

const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// The number of connections that were closed because of limits, by the labels `port` (the purpose
/// of the port) and `reason`: `evicted` (another connection needed the place), or `refused` (the
/// connection could not be accepted).
pub type ClosedConnections = Family<[(&'static str, &'static str); 2], Counter>;

/// The connections of all HTTP ports of a program.
#[derive(Debug)]
pub struct HttpConnections {
    answers_http2: bool,
    max_connections: usize,
    max_of_network: usize,
    request_timeout: Duration,
    closed: ClosedConnections,
    table: Mutex<ConnectionTable>,
}

#[derive(Debug, Default)]
struct ConnectionTable {
    open: BTreeMap<u64, OpenConnection>,
    next_number: u64,
    warned_at: Option<Instant>,
}

#[derive(Debug)]
struct OpenConnection {
    network: Network,
    port: &'static str,
    /// When the client connected, last sent a request, or last got an answer.
    heard_at: Instant,
    /// The size of the last answer, and 0 before the first one. `None` during an answer.
    answer_bytes: Option<u64>,
    task: JoinHandle<()>,
}

#[derive(Debug, Clone)]
struct HttpPort {
    purpose: &'static str,
    pages: Router,
    stopped: CancellationToken,
}

impl HttpConnections {
    /// Returns the connections of a program, which counts in `closed` what it closes; call it after
    /// the limit of open files has been raised. With `answers_http2`, gRPC clients of a wrong port
    /// get an answer.
    pub fn new(answers_http2: bool, closed: ClosedConnections) -> Arc<Self> {
        Self::limited(answers_http2, MAX_CONNECTIONS, PART_OF_NETWORK, closed)
    }

    /// Returns the connections of a port whose clients wait long for an answer, and whose page
    /// limits how many wait. One network may have all places, because a node may masquerade its
    /// pods.
    pub fn of_waiting_clients(closed: ClosedConnections) -> Arc<Self> {
        Self::limited(false, MAX_WAITING_CONNECTIONS, 1, closed)
    }

    fn limited(answers_http2: bool, most: u64, part_of_network: usize, closed: ClosedConnections) -> Arc<Self> {
        let max_connections = most.min(open_files::limit() / PART_OF_OPEN_FILES) as usize;
        let (max_of_network, request_timeout) = ((max_connections / part_of_network).max(1), REQUEST_TIMEOUT);
        let table = Mutex::default();
        Arc::new(Self { answers_http2, max_connections, max_of_network, request_timeout, closed, table })
    }

    /// Serves `pages` to each client of `listener`. Requests have the extension
    /// `ConnectInfo<SocketAddr>` with the client's address. `purpose` is the label `port` of
    /// metrics. Never returns. Dropping the future closes the port and its connections.
    pub async fn serve(self: Arc<Self>, purpose: &'static str, listener: TcpListener, pages: Router) {
        // Accepted connections inherit the sizes.
        let socket = SockRef::from(&listener);
        let set = socket.set_recv_buffer_size(RECEIVE_BUFFER_BYTES);
        if let Err(error) = set.and_then(|()| socket.set_send_buffer_size(SEND_BUFFER_BYTES)) {
            debug!(%error, purpose, "the sizes of socket buffers cannot be set");
        }
        let port = HttpPort { purpose, pages, stopped: CancellationToken::new() };
        let _stops = port.stopped.clone().drop_guard();
        let failed = |error: io::Error| {
            self.count(purpose, "refused");
            debug!(%error, purpose, "an HTTP connection cannot be accepted");
        };
        loop {
            let (stream, address) = accept(&listener, failed).await;
            if let Some(evicted) = self.enter(port.clone(), stream, address) {
                // The file of the evicted connection is closed before the next connection is
                // accepted. The task was aborted, so its result is not needed.
                let _ = evicted.await;
            }
            // The new connection is served before the next one may replace it.
            yield_now().await;
        }
    }

    /// Adds a connection, and closes another at a limit. Returns the task of the closed one.
    fn enter(self: &Arc<Self>, port: HttpPort, stream: TcpStream, address: SocketAddr) -> Option<JoinHandle<()>> {
        let (network, purpose, heard_at) = (Network::of(address.ip()), port.purpose, Instant::now());
        let mut table = self.table();
        let of_network = table.open.values().filter(|other| other.network == network).count();
        let is_crowded = of_network >= self.max_of_network;
        let is_full = is_crowded || table.open.len() >= self.max_connections;
        let may = |_, other: &OpenConnection| !is_crowded || other.network == network;
        let evicted = if is_full { self.evict(&mut table, may) } else { None };
        let number = table.next_number;
        table.next_number += 1;
        let connections = Arc::clone(self);
        let task = tokio::spawn(async move {
            let served = connections.serve_connection(number, stream, address, port.pages);
            if let Some(Err(error)) = port.stopped.run_until_cancelled(served).await {
                debug!(%address, %error, purpose, "an HTTP connection ended with an error");
            }
            connections.table().open.remove(&number);
        });
        table.open.insert(number, OpenConnection { network, port: purpose, heard_at, answer_bytes: Some(0), task });
        evicted
    }

    /// Closes one of the connections that `may` selects: of the network that has the most of them,
    /// the one that has been silent for longest. Returns its task.
    fn evict(&self, table: &mut ConnectionTable, may: impl Fn(u64, &OpenConnection) -> bool) -> Option<JoinHandle<()>> {
        let selected = || table.open.iter().filter(|(number, open)| may(**number, open));
        let mut counts: HashMap<Network, usize> = HashMap::new();
        selected().for_each(|(_, open)| *counts.entry(open.network).or_default() += 1);
        let rank = |open: &OpenConnection| {
            let silent_since = open.answer_bytes.map(|_| Reverse(open.heard_at));
            (counts.get(&open.network), silent_since)
        };
        // Of equal ranks, the last one is selected, which is the oldest connection.
        let number = *selected().rev().max_by_key(|(_, open)| rank(open))?.0;
        let OpenConnection { network, port, task, .. } = table.open.remove(&number)?;
        task.abort();
        self.count(port, "evicted");
        if table.warned_at.is_none_or(|at| at.elapsed() >= WARNING_INTERVAL) {
            table.warned_at = Some(Instant::now());
            warn!(
                %network, connections = counts.get(&network), port,
                "HTTP connections are closed for new ones: this network has the most, and loses those that are silent for longest"
            );
        }
        Some(task)
    }

    async fn serve_connection(
        self: &Arc<Self>,
        number: u64,
        stream: TcpStream,
        address: SocketAddr,
        pages: Router,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        // hyper takes 21 KB for a connection at once, and an idle client sends nothing.
        if timeout(self.request_timeout, stream.peek(&mut [0])).await?? == 0 {
            return Ok(());
        }
        let (connections, asked) = (Arc::clone(self), Arc::<Notify>::default());
        let first_request = Arc::clone(&asked);
        let answer = service_fn(move |mut request: Request<Incoming>| {
            asked.notify_one();
            request.extensions_mut().insert(ConnectInfo(address));
            connections.heard(number, None);
            let (connections, answer) = (Arc::clone(&connections), pages.clone().call(request));
            answer.inspect_ok(move |answer| connections.heard(number, Some(answer.body().size_hint().lower())))
        });
        let mut server = auto::Builder::new(TokioExecutor::new());
        let http1 = &mut server.http1();
        http1.timer(TokioTimer::new()).header_read_timeout(self.request_timeout).max_buf_size(REQUEST_BYTES as usize);
        // A client of HTTP/2 gets one answer at a time, too, and its bodies are not read.
        let http2 = &mut server.http2();
        http2.max_concurrent_streams(1).max_header_list_size(REQUEST_BYTES).initial_stream_window_size(REQUEST_BYTES);
        let server = if self.answers_http2 { server } else { server.http1_only() };
        let mut serving = Box::pin(server.serve_connection(TokioIo::new(stream), answer));
        tokio::select! {
            served = &mut serving => return served,
            // hyper limits only the headers of HTTP/1.1, and not the time to find out the version.
            () = sleep(self.request_timeout) => return Ok(()),
            () = first_request.notified() => {}
        }
        serving.await
    }

    /// Records that a client has sent a request, or that its answer is ready. Closes other
    /// connections if too many bytes of answers wait for their clients.
    fn heard(&self, number: u64, answer_bytes: Option<u64>) {
        let mut table = self.table();
        if let Some(open) = table.open.get_mut(&number) {
            (open.heard_at, open.answer_bytes) = (Instant::now(), answer_bytes);
        }
        let may = |other: u64, open: &OpenConnection| other != number && open.answer_bytes > Some(0);
        while table.open.values().filter_map(|open| open.answer_bytes).sum::<u64>() > MAX_ANSWER_BYTES {
            if self.evict(&mut table, may).is_none() {
                break;
            }
        }
    }

    fn count(&self, port: &'static str, reason: &'static str) {
        self.closed.get_or_create(&[("port", port), ("reason", reason)]).inc();
    }

    fn table(&self) -> MutexGuard<'_, ConnectionTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Accepts the next connection. After an error, calls `failed` and pauses.
pub async fn accept(listener: &TcpListener, failed: impl Fn(io::Error)) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) => failed(error),
        }
        sleep(ACCEPT_RETRY).await;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{future::pending, net::Ipv4Addr};

    use axum::routing::get;
    use futures::future::join_all;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpSocket,
    };

    use super::*;

    const GUARD: Duration = Duration::from_secs(30);
    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";

    /// The connections of a program that may have 16, 4 of each network.
    fn connections(answers_http2: bool, request_timeout: Duration) -> HttpConnections {
        let (closed, table) = (ClosedConnections::default(), Mutex::default());
        HttpConnections { answers_http2, max_connections: 16, max_of_network: 4, request_timeout, closed, table }
    }

    /// A port at 127.0.0.1 whose page `/` is this text. Dropping it closes the port.
    struct Port {
        address: SocketAddr,
        closed: ClosedConnections,
        /// Notified by each request for `/wait`, whose answer never comes.
        waits: Arc<Notify>,
        server: JoinHandle<()>,
    }

    impl Port {
        async fn open(connections: HttpConnections, page: String) -> Self {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            let (address, closed) = (listener.local_addr().unwrap(), connections.closed.clone());
            let waits = Arc::<Notify>::default();
            let waiting = Arc::clone(&waits);
            let wait = move || {
                waiting.notify_one();
                pending::<String>()
            };
            let pages = Router::new().route("/", get(move || async { page })).route("/wait", get(wait));
            let server = tokio::spawn(Arc::new(connections).serve("test", listener, pages));
            Self { address, closed, waits, server }
        }

        /// Connects and sends a request that is never answered.
        async fn wait(&self, host: u8) -> TcpStream {
            let stream = self.connect(host, b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n").await;
            timeout(GUARD, self.waits.notified()).await.expect("the request does not arrive");
            stream
        }

        async fn connect(&self, host: u8, first: &[u8]) -> TcpStream {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind((Ipv4Addr::new(127, 0, 0, host), 0).into()).unwrap();
            let mut stream = socket.connect(self.address).await.unwrap();
            stream.write_all(first).await.unwrap();
            stream
        }

        /// Connects and gets the page, so the port has accepted all earlier connections.
        async fn get(&self, host: u8) -> TcpStream {
            let mut stream = self.connect(host, REQUEST).await;
            let mut status = [0; 15];
            timeout(GUARD, stream.read_exact(&mut status)).await.expect("no answer").unwrap();
            assert_eq!(&status, b"HTTP/1.1 200 OK");
            stream
        }

        fn evicted(&self) -> u64 {
            self.closed.get_or_create(&[("port", "test"), ("reason", "evicted")]).get()
        }
    }

    impl Drop for Port {
        fn drop(&mut self) {
            self.server.abort();
        }
    }

    async fn ended(mut stream: TcpStream) {
        let mut rest = Vec::new();
        timeout(GUARD, stream.read_to_end(&mut rest)).await.expect("the connection stays open").ok();
    }

    fn is_open(stream: &TcpStream) -> bool {
        stream.try_read(&mut [0; 4096]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    #[tokio::test]
    async fn the_longest_silent_connection_of_the_most_crowded_network_is_closed() {
        let connections = connections(false, GUARD);
        let start = Instant::now();
        // Host, seconds since `start` at which the client was heard, and whether it is answered.
        let open = [
            (1, 0, false),
            (2, 4, true),
            (2, 1, true),
            (2, 3, false),
            (2, 2, false),
            (3, 9, false),
            (3, 5, false),
            (3, 7, false),
        ];
        let mut table = ConnectionTable::default();
        for (number, (host, seconds, is_answering)) in (0..).zip(open) {
            let (network, task) = (Network::of([192, 0, 2, host].into()), tokio::spawn(pending::<()>()));
            let heard_at = start + Duration::from_secs(seconds);
            let answer_bytes = (!is_answering).then_some(0);
            table.open.insert(number, OpenConnection { network, port: "test", heard_at, answer_bytes, task });
        }
        // Hosts 2 and 3 lose connections first. Then each host has one.
        for expected in [4, 3, 6, 7, 1, 0, 5, 2] {
            let before: Vec<u64> = table.open.keys().copied().collect();
            connections.evict(&mut table, |_, _| true).unwrap();
            let gone: Vec<u64> = before.into_iter().filter(|number| !table.open.contains_key(number)).collect();
            assert_eq!(gone, [expected]);
        }
        assert!(connections.evict(&mut table, |_, _| true).is_none());
    }

    #[tokio::test]
    async fn a_new_connection_is_always_served_and_others_are_closed() {
        let port = Port::open(connections(false, GUARD), "page".into()).await;
        let waiting = port.wait(2).await;
        let mut idle = Vec::new();
        for first in [&b""[..], b"GET / HT", b"", b"GET"] {
            idle.push(port.connect(2, first).await);
        }
        // Host 2 has reached its limit, and gets further pages. The request that waits stays.
        let kept = port.get(2).await;
        for stream in idle.drain(..2) {
            ended(stream).await;
        }
        assert_eq!(port.evicted(), 2);
        // Many hosts reach the limit of all.
        for host in 3..20 {
            idle.push(port.connect(host, b"").await);
        }
        for _ in 0..3 {
            port.get(30).await;
        }
        assert!(is_open(&waiting) && port.evicted() >= 8, "{}", port.evicted());
        drop((kept, idle));
    }

    #[tokio::test]
    async fn silence_and_late_or_long_headers_end_a_connection_and_answers_may_take_long() {
        for answers_http2 in [false, true] {
            // Long enough for a slow machine to receive requests that are complete.
            let port = Port::open(connections(answers_http2, Duration::from_secs(3)), "page".into()).await;
            let waiting = port.wait(1).await;
            let mut streams = vec![port.get(2).await];
            for first in [
                &b""[..],
                b"GET / HTTP/1.1\r\nHost:",
                // The beginning of HTTP/2, and all of it without a request.
                b"PRI",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
            ] {
                streams.push(port.connect(3, first).await);
            }
            join_all(streams.into_iter().map(ended)).await;
            let mut long = [b'x'; REQUEST_BYTES as usize];
            long[..19].copy_from_slice(b"GET / HTTP/1.1\r\nx: ");
            let mut long = port.connect(3, &long).await;
            let mut status = [0; 12];
            timeout(GUARD, long.read_exact(&mut status)).await.unwrap().unwrap();
            assert_eq!((&status, port.evicted()), (b"HTTP/1.1 431", 0));
            assert!(is_open(&waiting));
        }
    }

    #[tokio::test]
    async fn answers_that_nobody_reads_are_bounded() {
        let port = Port::open(connections(false, GUARD), "x".repeat(7 << 20)).await;
        let mut streams = Vec::new();
        for host in 2..6 {
            streams.push(port.get(host).await);
        }
        assert_eq!(port.evicted(), 2);
        let mut last = streams.pop().unwrap();
        for stream in streams.drain(..2) {
            ended(stream).await;
        }
        let mut answer = vec![0; 7 << 20];
        timeout(GUARD, last.read_exact(&mut answer)).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_port_that_is_closed_closes_its_connections() {
        let port = Port::open(connections(false, GUARD), "page".into()).await;
        let open = port.get(2).await;
        port.server.abort();
        ended(open).await;
        assert!(TcpStream::connect(port.address).await.is_err());
    }
}
