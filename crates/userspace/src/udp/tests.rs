//! The proxy with real sockets on loopback.

use std::{net::UdpSocket, thread};

use super::{unreachable::Reporter, *};
use crate::{ConnectionInfo, ConnectionState, Protocol, Scope, ServiceId, ServiceSettings, ServiceStats};

const SERVICE: ServiceId = ServiceId(1);
/// The longest time that a test waits before it fails.
const GUARD: Duration = Duration::from_secs(60);

struct Bed {
    services: Arc<Services>,
    proxy: UdpProxy,
    address: SocketAddr,
    listener: ListenerId,
}

impl Bed {
    fn new(settings: &UdpSettings, service: ServiceSettings, endpoints: &[SocketAddr]) -> Self {
        Self::with_waiting(settings, service, endpoints, &[])
    }

    /// A datagram of each of these clients waits when the proxy begins to listen. One turn of the
    /// thread takes all of them, so that no session becomes quiet meanwhile on a slow machine.
    fn with_waiting(
        settings: &UdpSettings,
        service: ServiceSettings,
        endpoints: &[SocketAddr],
        clients: &[UdpSocket],
    ) -> Self {
        let services = Arc::new(Services::default());
        let listener = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        for client in clients {
            client.connect(address).unwrap();
            client.send(b"x").unwrap();
        }
        services.set_service(SERVICE, service);
        services.set_address(SERVICE, Scope::default(), Protocol::Udp, address);
        for endpoint in endpoints {
            services.set_endpoint(SERVICE, *endpoint, 1);
        }
        let proxy = UdpProxy::start(settings, &services).unwrap();
        let listener = proxy.listen(listener, Scope::default(), address).unwrap();
        Self { services, proxy, address, listener }
    }

    fn simple(endpoints: &[SocketAddr]) -> Self {
        Self::new(&UdpSettings::default(), ServiceSettings::default(), endpoints)
    }

    fn client(&self) -> UdpSocket {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        // A connected socket gets only replies from the address that it used.
        socket.connect(self.address).unwrap();
        socket.set_read_timeout(Some(GUARD)).unwrap();
        socket
    }

    fn stats(&self) -> ServiceStats {
        self.services.stats().1
    }

    /// The sessions. The list waits for the thread, which counts a datagram after it sent it.
    fn sessions(&self) -> Vec<ConnectionInfo> {
        self.proxy.sessions(ListFilter { account: None, limit: 100 }).connections
    }

    /// The number of dropped datagrams, for every reason.
    fn dropped(&self) -> u64 {
        self.stats().dropped_datagrams() + self.proxy.stats().unknown_destination
    }
}

/// An endpoint that answers each datagram with its name and the datagram.
fn endpoint(name: u8) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    thread::spawn(move || {
        let mut buffer = vec![0; 65_536];
        while let Ok((count, sender)) = socket.recv_from(&mut buffer[1..]) {
            buffer[0] = name;
            if buffer[1..=count] == *b"stop" {
                return;
            }
            socket.send_to(&buffer[..=count], sender).unwrap();
        }
    });
    address
}

fn ask(client: &UdpSocket, question: &[u8]) -> (u8, Vec<u8>) {
    client.send(question).unwrap();
    let mut buffer = vec![0; 65_536];
    let count = client.recv(&mut buffer).unwrap();
    (buffer[0], buffer[1..count].to_vec())
}

#[test]
fn datagrams_of_every_size_go_both_ways_in_one_session() {
    let bed = Bed::simple(&[endpoint(1)]);
    let client = bed.client();
    for size in [0, 1, 512, 1472, 9000, 60_000] {
        let question = vec![9; size];
        assert_eq!(ask(&client, &question), (1, question));
    }
    let sessions = bed.sessions();
    let stats = bed.stats();
    assert_eq!((stats.accepted, stats.open, stats.udp_sessions, bed.dropped()), (1, 1, 1, 0));
    assert_eq!((stats.datagrams_to_endpoints, stats.datagrams_to_clients), (6, 6));
    assert_eq!(stats.datagram_bytes_to_clients, stats.datagram_bytes_to_endpoints + 6);
    assert_eq!(sessions.len(), 1);
    let session = &sessions[0];
    assert_eq!((session.protocol, session.client), (Protocol::Udp, client.local_addr().unwrap()));
    assert_eq!((session.destination, session.state), (bed.address, ConnectionState::Answered));
    assert_eq!((session.bytes_to_endpoint, session.bytes_to_client), (70_985, 70_991));
    assert_eq!((session.datagrams_to_endpoint, session.datagrams_to_client), (6, 6));
}

#[test]
fn many_clients_and_bursts_lose_nothing_that_is_not_counted() {
    let bed = Bed::simple(&[endpoint(1), endpoint(1)]);
    // All clients exist at the same time, so that no source port comes again.
    let clients: Vec<UdpSocket> = (0..20).map(|_| bed.client()).collect();
    for client in &clients {
        for number in 0..50_u8 {
            client.send(&[number; 110][..if number % 7 == 0 { 90 } else { 100 }]).unwrap();
        }
        let mut received: Vec<u8> = (0..50)
            .map(|_| {
                let mut buffer = [0; 200];
                let count = client.recv(&mut buffer).unwrap();
                assert_eq!(count, if buffer[1].is_multiple_of(7) { 91 } else { 101 });
                assert!(buffer[1..count].iter().all(|byte| *byte == buffer[1]), "datagrams are mixed");
                buffer[1]
            })
            .collect();
        received.sort_unstable();
        assert!(received.into_iter().eq(0..50));
    }
    assert_eq!((bed.stats().open, bed.dropped()), (20, 0));
}

#[test]
fn sessions_of_a_removed_endpoint_move_with_the_next_datagram() {
    let (first, second) = (endpoint(1), endpoint(2));
    let bed = Bed::simple(&[first]);
    let client = bed.client();
    assert_eq!(ask(&client, b"x").0, 1);
    bed.services.set_endpoint(SERVICE, second, 1);
    assert_eq!(ask(&client, b"x").0, 1);
    bed.services.remove_endpoint(SERVICE, first);
    assert_eq!(ask(&client, b"x").0, 2);
    assert_eq!(bed.stats().open, 1);
    bed.services.remove_endpoint(SERVICE, second);
    client.send(b"x").unwrap();
    eventually("the datagram is dropped", || bed.stats().dropped_without_endpoint == 1);
    client.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert!(client.recv(&mut [0]).is_err());
    assert_eq!((bed.stats().open, bed.stats().dropped_without_endpoint, bed.dropped()), (0, 1, 1));
}

#[test]
fn a_session_leaves_its_service_when_the_address_moves_to_another_service() {
    let bed = Bed::simple(&[endpoint(1)]);
    let client = bed.client();
    assert_eq!(ask(&client, b"x").0, 1);
    let other = ServiceId(2);
    let settings = ServiceSettings { name: "other".into(), account: "other".into(), ..ServiceSettings::default() };
    bed.services.set_service(other, settings);
    bed.services.set_endpoint(other, endpoint(2), 1);
    bed.services.set_address(other, Scope(1), Protocol::Udp, bed.address);
    assert_eq!(ask(&client, b"x").0, 1, "the address of another scope is another address");
    bed.services.set_address(other, Scope::default(), Protocol::Udp, bed.address);
    // As in the agent, the earlier Service gives the address up afterwards.
    assert!(!bed.services.remove_address(SERVICE, Scope::default(), Protocol::Udp, bed.address));
    assert_eq!(ask(&client, b"x").0, 2);
    let names: Vec<_> = bed.sessions().into_iter().map(|session| session.service).collect();
    assert_eq!(names, ["other".into()]);
    let open = |account: &str| bed.services.stats().0[account].open;
    assert_eq!((open(""), open("other"), bed.dropped()), (0, 1, 0));
}

#[test]
fn a_session_moves_when_its_endpoint_is_unreachable() {
    let (first, second) = (endpoint(1), endpoint(2));
    let bed = Bed::simple(&[first]);
    let client = bed.client();
    assert_eq!(ask(&client, b"x").0, 1);
    bed.services.set_endpoint(SERVICE, second, 1);
    client.send(b"stop").unwrap();
    eventually("the endpoint closes its socket", || UdpSocket::bind(first).is_ok());
    // The ICMP error for this datagram moves the session, and tells the client to repeat it.
    client.send(b"lost").unwrap();
    eventually("the session moves", || bed.stats().retries == 1);
    // Without the capability NET_RAW, the proxy cannot tell the client.
    let can_report = Reporter::open().report(endpoint(3), bed.address);
    let mut kind = None;
    eventually("the client learns of the error if the proxy can tell it", || {
        kind = client.take_error().unwrap().map(|error| error.kind());
        kind.is_some() == can_report
    });
    assert_eq!(kind, can_report.then_some(io::ErrorKind::ConnectionRefused));
    assert_eq!(ask(&client, b"x").0, 2);
    assert_eq!(bed.stats().retries, 1);
}

/// Clients that have the same address.
fn clients(count: usize) -> Vec<UdpSocket> {
    let open = |_| {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        socket
    };
    (0..count).map(open).collect()
}

/// Waits until this number of clients has an answer.
fn answers(clients: &[UdpSocket], count: usize) {
    let mut answered = 0;
    eventually("clients are answered", || {
        answered += clients.iter().filter(|client| client.recv(&mut [0; 9]).is_ok()).count();
        answered >= count
    });
    assert_eq!(answered, count);
}

#[test]
fn sessions_have_limits_and_end_when_they_are_idle() {
    let ten = clients(10);
    let service = || ServiceSettings { max_connections: Some(3), ..ServiceSettings::default() };
    let bed = Bed::with_waiting(&UdpSettings::default(), service(), &[endpoint(1)], &ten);
    answers(&ten, 3);
    eventually("every datagram is sent or dropped", || bed.stats().accepted + bed.dropped() == 10);
    assert_eq!((bed.stats().open, bed.stats().over_limit, bed.stats().dropped_by_limit), (3, 7, 7));

    let settings = UdpSettings { max_sessions_per_client: 5, ..UdpSettings::default() };
    let ten = clients(10);
    let bed = Bed::with_waiting(&settings, ServiceSettings::default(), &[endpoint(1)], &ten);
    answers(&ten, 5);
    eventually("every datagram is sent or dropped", || bed.stats().accepted + bed.dropped() == 10);
    assert_eq!((bed.stats().dropped_by_limit, bed.dropped()), (5, 5), "a client has five sessions");
    // The sessions are answered, so the drain does not wait until they are idle.
    assert_eq!(bed.proxy.drain(settings.idle_timeout / 2), 0);

    // Sessions that have ended count for no limit.
    let settings =
        UdpSettings { idle_timeout: Duration::from_millis(300), max_sessions_per_client: 3, ..UdpSettings::default() };
    let bed = Bed::new(&settings, service(), &[endpoint(1)]);
    let three = [bed.client(), bed.client(), bed.client()];
    for ended in [3, 6] {
        three.iter().for_each(|client| _ = client.send(b"x").unwrap());
        eventually("sessions end when they are idle", || (bed.stats().open, bed.stats().idle) == (0, ended));
    }
    assert_eq!((bed.stats().over_limit, bed.stats().dropped_by_limit), (0, 0));
}

#[test]
fn one_client_leaves_as_many_sessions_to_others_as_it_has() {
    let settings = UdpSettings { max_sessions: 10, ..UdpSettings::default() };
    let greedy = clients(12);
    let bed = Bed::with_waiting(&settings, ServiceSettings::default(), &[endpoint(1)], &greedy);
    eventually("every datagram is sent or dropped", || bed.stats().accepted + bed.dropped() == 12);
    assert_eq!((bed.stats().open, bed.stats().over_limit, bed.stats().dropped_by_limit), (5, 7, 7));
    let other = UdpSocket::bind("127.0.0.2:0").unwrap();
    other.connect(bed.address).unwrap();
    other.set_read_timeout(Some(GUARD)).unwrap();
    assert_eq!(ask(&other, b"x").0, 1);
}

#[test]
fn a_client_at_its_limit_gives_up_its_oldest_quiet_session() {
    let settings = UdpSettings { max_sessions_per_client: 3, ..UdpSettings::default() };
    let bed = Bed::new(&settings, ServiceSettings::default(), &[endpoint(1)]);
    let kept = bed.client();
    for round in 0..4 {
        // Fewer sessions than the limit are busy.
        let clients = [bed.client(), bed.client()];
        assert_eq!(ask(&kept, b"x").0, 1, "round {round}");
        clients.iter().for_each(|client| assert_eq!(ask(client, b"x").0, 1, "round {round}"));
        assert_eq!(bed.stats().open, 3);
        // A session is quiet after half a second. The oldest one is used again before.
        thread::sleep(Duration::from_millis(600));
    }
    assert_eq!((bed.stats().dropped_by_limit, bed.dropped(), bed.stats().over_limit), (0, 0, 0));
    // No session is quiet. On a slow machine, one may become quiet before the last client has its
    // turn, so all clients try again.
    let clients = [bed.client(), bed.client(), bed.client(), bed.client()];
    eventually("a datagram is dropped", || {
        clients.iter().for_each(|client| _ = client.send(b"x").unwrap());
        bed.stats().dropped_by_limit > 0
    });
}

#[test]
fn a_session_that_awaits_a_reply_delays_a_drain() {
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let bed = Bed::simple(&[silent.local_addr().unwrap()]);
    let client = bed.client();
    let mut session = bed.address;
    // A session waits 5 s for a reply. If the machine was slower, the client asks again.
    eventually("a session awaits a reply", || {
        client.send(b"x").unwrap();
        let (count, from) = silent.recv_from(&mut [0; 9]).unwrap();
        session = from;
        (count, bed.proxy.drain(Duration::from_millis(300))) == (1, 1)
    });
    let began = Instant::now();
    let late = thread::spawn(move || {
        thread::sleep(Duration::from_millis(300));
        silent.send_to(b"late", session).unwrap();
    });
    assert_eq!(bed.proxy.drain(GUARD), 0);
    assert!(began.elapsed() > Duration::from_millis(700), "the drain ended before the reply");
    late.join().unwrap();
    assert_eq!(client.recv(&mut [0; 9]).unwrap(), 4);
}

#[test]
fn a_closed_listener_serves_nobody_and_does_not_keep_the_thread_alive() {
    let bed = Bed::simple(&[endpoint(1)]);
    let client = bed.client();
    assert_eq!(ask(&client, b"x").0, 1);
    thread::sleep(Duration::from_millis(300));
    eventually("the thread turns while it listens", || bed.proxy.since_last_turn() < Duration::from_millis(250));
    bed.proxy.stop_listening(bed.listener);
    // The list waits until the thread has closed the socket.
    assert_eq!(bed.sessions().len(), 1);
    client.send(b"x").unwrap();
    assert_eq!(client.recv(&mut [0; 9]).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    eventually("nothing has to turn", || has_nothing_to_turn(&bed));
    // The same without any session.
    let bed = Bed::simple(&[]);
    thread::sleep(Duration::from_millis(150));
    bed.proxy.stop_listening(bed.listener);
    eventually("the thread waits without a limit", || has_nothing_to_turn(&bed));
}

/// Whether the time since the last turn is zero for longer than the pause between two turns.
fn has_nothing_to_turn(bed: &Bed) -> bool {
    (0..30).all(|_| {
        thread::sleep(Duration::from_millis(10));
        bed.proxy.since_last_turn() == Duration::ZERO
    })
}

#[test]
fn every_datagram_that_the_proxy_drops_has_a_reason() {
    // Nobody listens at the endpoint: its socket keeps the port from other programs, and receives
    // only from another peer.
    let closed = UdpSocket::bind("127.0.0.1:0").unwrap();
    closed.connect("127.0.0.1:9").unwrap();
    let bed = Bed::simple(&[closed.local_addr().unwrap()]);
    let client = bed.client();
    client.send(b"reaches the endpoint's kernel").unwrap();
    eventually("the kernel reports the error", || bed.stats().failed == 1);
    assert_eq!((bed.sessions().len(), bed.stats().failed), (0, 1));

    // The endpoint is an address of a Service.
    let bed = Bed::simple(&[]);
    bed.services.set_endpoint(SERVICE, bed.address, 1);
    bed.client().send(b"x").unwrap();
    eventually("a loop", || bed.stats().dropped_by_loop == 1);

    // An endpoint answers after its session has lost the listener.
    let late = UdpSocket::bind("127.0.0.1:0").unwrap();
    let bed = Bed::simple(&[late.local_addr().unwrap()]);
    let client = bed.client();
    client.send(b"x").unwrap();
    let (_, session) = late.recv_from(&mut [0; 9]).unwrap();
    bed.proxy.stop_listening(bed.listener);
    assert_eq!(bed.sessions().len(), 1);
    late.send_to(b"late", session).unwrap();
    eventually("the session ends", || bed.sessions().is_empty());
    assert_eq!((bed.stats().dropped_after_end, bed.dropped()), (1, 1));

    // The kernel has no route to the endpoint, which is a broadcast address.
    let bed = Bed::simple(&["255.255.255.255:9".parse().unwrap()]);
    bed.client().send(b"x").unwrap();
    eventually("no route", || bed.stats().dropped_unreachable == 1);
    assert_eq!((bed.stats().open, bed.stats().udp_sessions), (0, 0));
}

#[test]
fn a_socket_counts_the_datagrams_that_it_discards() {
    let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
    receiver.set_nonblocking(true).unwrap();
    let (to, sender) = (receiver.local_addr().unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
    sender.connect(to).unwrap();
    let [receiver, sender] = [(receiver, false), (sender, true)]
        .map(|(socket, is_connected)| socket::Socket::new(socket.into(), true, is_connected).unwrap());
    // Seven datagrams in one GSO batch, a single one, and an empty one.
    for (bytes, stride) in [(&[1; 650][..], 100), (&[1; 90], 90), (&[], 0)] {
        let batch = socket::Batch { bytes, stride, sender: to };
        sender.send(batch, to).unwrap();
    }
    let mut buffers = socket::Buffers::new();
    let mut discarded = 0;
    // The kernel may deliver a datagram a little later than it accepts it.
    eventually("all datagrams are discarded", || {
        discarded += receiver.discard(&mut buffers);
        discarded >= 9
    });
    assert_eq!((discarded, receiver.discard(&mut buffers)), (9, 0));
}

fn eventually(what: &str, mut is_true: impl FnMut() -> bool) {
    let until = Instant::now() + GUARD;
    while !is_true() {
        assert!(Instant::now() < until, "not in time: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}
