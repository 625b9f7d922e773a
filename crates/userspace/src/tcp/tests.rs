//! The proxy with real sockets on loopback.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    thread,
};

use rustix::net::{SendFlags, send};

use super::*;
use crate::{ConnectionState, Protocol, Scope, ServiceId, ServiceSettings, unsafe_calls::has_unacknowledged_bytes};

mod hostile;
mod lists;

const SERVICE: ServiceId = ServiceId(1);
/// The longest time that a test waits before it fails.
const GUARD: Duration = Duration::from_secs(60);

/// A proxy with one Service, whose address is the address of its listener.
struct Bed {
    services: Arc<Services>,
    proxy: TcpProxy,
    address: SocketAddr,
}

impl Bed {
    fn new(settings: &TcpSettings, service: ServiceSettings, endpoints: &[SocketAddr]) -> Self {
        let services = Arc::new(Services::default());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        services.set_service(SERVICE, service);
        assert!(services.set_address(SERVICE, Scope::default(), Protocol::Tcp, address));
        for endpoint in endpoints {
            assert!(services.set_endpoint(SERVICE, *endpoint, 1));
        }
        let proxy = TcpProxy::start(settings, &services).unwrap();
        proxy.listen(listener, Scope::default(), Destination::Local).unwrap();
        Self { services, proxy, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(GUARD)).unwrap();
        stream
    }

    fn stats(&self) -> crate::ServiceStats {
        self.services.stats().1
    }
}

/// An endpoint that gives each connection to `serve` on a thread of its own.
fn endpoint(serve: impl Fn(TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let serve = Arc::new(serve);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let serve = Arc::clone(&serve);
            thread::spawn(move || serve(stream.unwrap()));
        }
    });
    address
}

fn echo() -> SocketAddr {
    endpoint(|mut stream| {
        let mut buffer = vec![0; 100_000];
        while let Ok(count @ 1..) = stream.read(&mut buffer) {
            if stream.write_all(&buffer[..count]).is_err() {
                return;
            }
        }
    })
}

/// A socket that does not listen, and its address.
fn bound() -> (OwnedFd, SocketAddr) {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = SocketAddr::try_from(rustix::net::getsockname(&socket).unwrap()).unwrap();
    (socket, address)
}

/// An address that refuses connections. Its socket stays, so that no other program gets the port.
fn refusing() -> SocketAddr {
    let (socket, address) = bound();
    std::mem::forget(socket);
    address
}

fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let until = Instant::now() + GUARD;
    while !check() {
        assert!(Instant::now() < until, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Sends a byte and receives the answer.
fn round_trip(stream: &mut TcpStream) {
    stream.write_all(b"x").unwrap();
    stream.read_exact(&mut [0]).unwrap();
}

/// Bytes whose order matters.
fn pattern(count: usize) -> Vec<u8> {
    (0..count).map(|index| u8::try_from((index * 7 + index / 251) % 256).unwrap()).collect()
}

fn carries_both_ways(settings: &TcpSettings) {
    let bed = Bed::new(settings, ServiceSettings::default(), &[echo()]);
    for count in [1, 100, 16 * 1024, 16 * 1024 + 1, 20_000_000] {
        let sent = pattern(count);
        let mut stream = bed.connect();
        let mut writer = stream.try_clone().unwrap();
        let copy = sent.clone();
        let sender = thread::spawn(move || {
            writer.write_all(&copy).unwrap();
            writer.shutdown(Shutdown::Write).unwrap();
        });
        let mut received = Vec::new();
        stream.read_to_end(&mut received).unwrap();
        sender.join().unwrap();
        assert!(sent == received, "{count} bytes arrive in order; got {}", received.len());
    }
    eventually("connections end", || bed.stats().open == 0);
    let stats = bed.stats();
    assert_eq!((stats.accepted, stats.connected, stats.reset), (5, 5, 0));
    assert_eq!(stats.bytes_to_endpoints, 1 + 100 + 16 * 1024 * 2 + 1 + 20_000_000);
    assert_eq!(stats.bytes_to_endpoints, stats.bytes_to_clients);
}

#[test]
fn bytes_arrive_in_order_both_ways_with_and_without_pipes() {
    carries_both_ways(&TcpSettings::default());
    carries_both_ways(&TcpSettings { pipes_per_thread: 0, ..TcpSettings::default() });
    carries_both_ways(&TcpSettings { threads: 3, ..TcpSettings::default() });
}

#[test]
fn a_slow_client_gets_the_whole_answer_before_the_reset() {
    let server = endpoint(|mut stream| {
        // The request stays unread, so that the socket ends with a RST.
        stream.peek(&mut [0]).unwrap();
        stream.write_all(&pattern(1_000_000)).unwrap();
        // The RST drops what the proxy has not taken.
        let socket = OwnedFd::from(stream);
        eventually("the proxy takes all bytes", || !has_unacknowledged_bytes(&socket));
        // The proxy has taken all bytes, and the client has not.
        thread::sleep(Duration::from_millis(200));
    });
    let bed = Bed::new(&TcpSettings::default(), ServiceSettings::default(), &[server]);
    let mut stream = bed.connect();
    sockopt::set_socket_recv_buffer_size(&stream, 16_384).unwrap();
    stream.write_all(b"request").unwrap();
    eventually("the connection ends", || bed.stats().reset == 1);
    let mut answer = vec![0; 1_000_000];
    stream.read_exact(&mut answer).unwrap();
    assert!(answer == pattern(1_000_000));
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
}

#[test]
fn urgent_data_stops_no_bytes() {
    let counting = endpoint(|mut stream| {
        let mut received = Vec::new();
        stream.read_to_end(&mut received).unwrap();
        let count = u64::try_from(received.len()).unwrap();
        stream.write_all(&count.to_be_bytes()).unwrap();
    });
    for server in [counting, echo()] {
        let bed = Bed::new(&TcpSettings::default(), ServiceSettings::default(), &[server]);
        for (before, after) in [(4, 4), (65_536, 1000), (1_000_000, 1_000_000)] {
            let mut stream = bed.connect();
            let mut reader = stream.try_clone().unwrap();
            let expected = before + after;
            let reading = thread::spawn(move || {
                if server == counting {
                    let mut count = [0; 8];
                    reader.read_exact(&mut count).map(|()| usize::try_from(u64::from_be_bytes(count)).unwrap())
                } else {
                    reader.read_exact(&mut vec![0; expected]).map(|()| expected)
                }
            });
            stream.write_all(&pattern(before)).unwrap();
            send(&stream, b"!", SendFlags::OOB).unwrap();
            stream.write_all(&pattern(after)).unwrap();
            if server == counting {
                stream.shutdown(Shutdown::Write).unwrap();
            }
            assert_eq!(reading.join().unwrap().unwrap(), expected, "{before} {after}");
        }
    }
}

#[test]
fn a_refused_connection_goes_to_the_next_endpoint_and_the_bad_endpoint_rests() {
    let (good, bad) = (echo(), refusing());
    let service = ServiceSettings { algorithm: crate::Algorithm::RoundRobin, ..ServiceSettings::default() };
    let bed = Bed::new(&TcpSettings::default(), service, &[good, bad]);
    for _ in 0..20 {
        round_trip(&mut bed.connect());
    }
    let stats = bed.stats();
    assert_eq!((stats.connected, stats.failed), (20, 0));
    // Without a rest, each connection but the first one would begin at the bad endpoint. On a slow
    // machine, the first rests end meanwhile, and each further one is twice as long.
    assert!((2..=8).contains(&stats.retries), "{stats:?}");
    eventually("the bad endpoint rests", || {
        let is_resting = bed.stats().resting_endpoints == 1;
        if !is_resting {
            round_trip(&mut bed.connect());
        }
        is_resting
    });
}

/// An address that does not answer, while the returned sockets exist: its backlog is full.
fn silent() -> (SocketAddr, (OwnedFd, Vec<TcpStream>)) {
    let (silent, address) = bound();
    rustix::net::listen(&silent, 0).unwrap();
    let connect = || TcpStream::connect_timeout(&address, Duration::from_millis(500)).ok();
    let filling: Vec<TcpStream> = std::iter::repeat_with(connect).map_while(|stream| stream).take(4).collect();
    assert!(filling.len() < 4, "the backlog is full");
    (address, (silent, filling))
}

#[test]
fn an_endpoint_that_does_not_answer_costs_one_connect_timeout() {
    let (address, _silent) = silent();
    let settings = TcpSettings { connect_timeout: Duration::from_millis(300), ..TcpSettings::default() };
    let service = ServiceSettings { algorithm: crate::Algorithm::RoundRobin, ..ServiceSettings::default() };
    let good = echo();
    // A slow machine may need several attempts.
    eventually("no connection takes longer than one timeout", || {
        let bed = Bed::new(&settings, service.clone(), &[address, good]);
        let is_quick = (0..2).all(|_| {
            let began = Instant::now();
            round_trip(&mut bed.connect());
            began.elapsed() < Duration::from_millis(900)
        });
        assert!((1..=2).contains(&bed.stats().retries));
        is_quick
    });
}

#[test]
fn a_service_that_cannot_serve_resets_its_clients_and_counts_them() {
    // The reset may come before `connect` returns.
    fn is_reset(bed: &Bed) -> bool {
        let read = TcpStream::connect(bed.address).and_then(|mut stream| {
            stream.set_read_timeout(Some(GUARD))?;
            stream.read(&mut [0])
        });
        read.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset)
    }
    let bed = Bed::new(&TcpSettings::default(), ServiceSettings::default(), &[]);
    assert!(is_reset(&bed));
    assert_eq!(bed.stats().without_endpoint, 1);
    // An endpoint that is a Service address is not tried.
    bed.services.set_endpoint(SERVICE, bed.address, 1);
    assert!(is_reset(&bed));
    assert_eq!((bed.stats().loops, bed.stats().failed), (1, 1));
    // Nor is an endpoint at an address of the node, where somebody listens.
    bed.services.remove_endpoint(SERVICE, bed.address);
    let served = echo();
    bed.services.set_endpoint(SERVICE, served, 1);
    bed.services.set_node_addresses(["127.0.0.1".parse().unwrap()]);
    assert!(is_reset(&bed));
    assert_eq!((bed.stats().loops, bed.stats().failed), (2, 2));
    bed.services.set_node_addresses([]);
    round_trip(&mut bed.connect());
    bed.services.remove_endpoint(SERVICE, served);
    bed.services.set_endpoint(SERVICE, refusing(), 1);
    assert!(is_reset(&bed));
    assert_eq!(bed.stats().failed, 3);
    assert!(bed.services.remove_address(SERVICE, Scope::default(), Protocol::Tcp, bed.address));
    assert!(is_reset(&bed));
    assert_eq!(bed.proxy.stats().unknown_destination, 1);
    eventually("nothing stays open", || bed.proxy.stats().open == 0 && bed.stats().open == 0);
}

#[test]
fn an_idle_connection_is_reset_and_a_busy_connection_is_not() {
    let settings = TcpSettings {
        idle_timeout: Duration::from_millis(400),
        connect_timeout: Duration::from_millis(300),
        ..TcpSettings::default()
    };
    let server = echo();
    // A machine that is too slow to keep a connection busy tries again.
    eventually("one connection is busy, and one is idle", || {
        let bed = Bed::new(&settings, ServiceSettings::default(), &[server]);
        let mut used_at = Instant::now();
        let (mut idle, mut busy) = (bed.connect(), bed.connect());
        let is_late = |used_at: Instant| used_at.elapsed() >= settings.idle_timeout;
        for _ in 0..12 {
            let now = Instant::now();
            let answer = busy.write_all(b"x").and_then(|()| busy.read_exact(&mut [0]));
            if is_late(used_at) {
                return false;
            }
            answer.unwrap();
            used_at = now;
            thread::sleep(Duration::from_millis(100));
        }
        let (end, stats) = (idle.read(&mut [0]), bed.stats());
        if is_late(used_at) {
            return false;
        }
        assert_eq!(end.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        assert_eq!((stats.idle, stats.open), (1, 1));
        true
    });
}

#[test]
fn a_drain_serves_the_backlog_and_waits_for_open_connections() {
    let bed = Bed::new(&TcpSettings::default(), ServiceSettings::default(), &[echo()]);
    let streams: Vec<TcpStream> = (0..50).map(|_| bed.connect()).collect();
    let address = bed.address;
    let draining = thread::spawn(move || bed.proxy.drain(GUARD));
    eventually("the listener closes", || TcpStream::connect(address).is_err());
    streams.into_iter().for_each(|mut stream| round_trip(&mut stream));
    assert_eq!(draining.join().unwrap(), 0);

    let bed = Bed::new(&TcpSettings::default(), ServiceSettings::default(), &[echo()]);
    let mut stream = bed.connect();
    round_trip(&mut stream);
    assert_eq!(bed.proxy.drain(Duration::from_millis(50)), 1);
    drop(bed.proxy);
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
}
