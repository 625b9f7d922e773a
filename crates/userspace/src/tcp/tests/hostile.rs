//! Clients and endpoints that hold connections, and a process without descriptors. Other Services
//! of the same thread are served meanwhile. No check depends on the speed of the machine: a
//! neighbour that waits for a hostile connection waits for ever, and the test then ends with an
//! error.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;

/// A Service with an endpoint that answers.
struct Neighbour {
    address: SocketAddr,
}

impl Neighbour {
    fn beside(bed: &Bed, endpoint: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, id) = (listener.local_addr().unwrap(), ServiceId(7));
        bed.services.set_service(id, ServiceSettings { account: "default/quiet".into(), ..Default::default() });
        bed.services.set_address(id, Scope::default(), Protocol::Tcp, address);
        bed.services.set_endpoint(id, endpoint, 1);
        bed.proxy.listen(listener, Scope::default(), Destination::Local).unwrap();
        Self { address }
    }

    /// Checks that clients are served, also clients with more bytes than a buffer has.
    fn check(&self) {
        for count in [1; 20].into_iter().chain([1_000_000]) {
            let sent = pattern(count);
            let mut stream = TcpStream::connect(self.address).unwrap();
            stream.set_read_timeout(Some(GUARD)).unwrap();
            let (mut writer, copy) = (stream.try_clone().unwrap(), sent.clone());
            let sender = thread::spawn(move || writer.write_all(&copy).unwrap());
            let mut received = vec![0; count];
            stream.read_exact(&mut received).unwrap();
            sender.join().unwrap();
            assert!(sent == received, "{count} bytes arrive in order");
        }
    }
}

fn loud(limit: Option<u32>) -> ServiceSettings {
    ServiceSettings { account: "default/loud".into(), max_connections: limit, ..ServiceSettings::default() }
}

fn stats_of(bed: &Bed, account: &str) -> crate::ServiceStats {
    bed.services.stats().0[account]
}

/// An endpoint that accepts connections and does nothing with them.
fn mute() -> SocketAddr {
    endpoint(|_stream| {
        loop {
            thread::park();
        }
    })
}

/// Connections of `count` clients that do not wait for room in a socket.
fn senders(bed: &Bed, count: usize) -> Vec<TcpStream> {
    let clients: Vec<TcpStream> = (0..count).map(|_| bed.connect()).collect();
    clients.iter().for_each(|client| client.set_nonblocking(true).unwrap());
    clients
}

/// Sends as many bytes as the sockets on the way take now.
fn send_all(clients: &mut [TcpStream]) {
    clients.iter_mut().for_each(|client| while client.write(&[0; 65_536]).is_ok() {});
}

#[test]
fn a_flood_of_clients_ends_at_the_limit_of_their_service_or_leaves_connections_to_the_others() {
    let few = TcpSettings { max_connections: 45, ..TcpSettings::default() };
    for (settings, limit, endpoint, open, [over_limit, over_share]) in
        [(TcpSettings::default(), Some(50), echo(), 50, [250, 0]), (few, None, mute(), 40, [0, 260])]
    {
        let bed = Bed::new(&settings, loud(limit), &[endpoint]);
        let quiet = Neighbour::beside(&bed, echo());
        // A connection beyond the limit may be reset before `connect` returns.
        let flood: Vec<_> = (0..300).map(|_| TcpStream::connect(bed.address)).collect();
        // The last connection is counted as accepted a little before it is counted as refused.
        eventually("the flood ends at the limit", || {
            let stats = stats_of(&bed, "default/loud");
            (stats.accepted, stats.open, stats.over_limit, stats.over_share) == (300, open, over_limit, over_share)
        });
        quiet.check();
        assert_eq!(stats_of(&bed, "default/loud").open, open);
        drop(flood);
    }
}

#[test]
fn endpoints_that_accept_and_never_answer_hold_few_pipes_and_stop_nobody() {
    let settings = TcpSettings { pipes_per_thread: 4, ..TcpSettings::default() };
    let bed = Bed::new(&settings, loud(None), &[mute()]);
    let quiet = Neighbour::beside(&bed, echo());
    let mut clients = senders(&bed, 30);
    eventually("pipes are used up", || {
        send_all(&mut clients);
        bed.proxy.stats().pipes_refused > 0
    });
    quiet.check();
    assert_eq!((stats_of(&bed, "default/loud").open, bed.proxy.stats().pipes), (30, 4));
    // The clients close, but their bytes wait for the endpoints, until the idle timeout.
    drop(clients);
    quiet.check();
}

#[test]
fn connections_to_an_endpoint_that_never_answers_end_when_they_are_idle() {
    let settings = TcpSettings { idle_timeout: Duration::from_millis(200), ..TcpSettings::default() };
    let server = mute();
    // The idle timeout counts once the connect timeout has passed. If a client has not sent
    // everything by then, a write may get the error that the read below expects: it tries again.
    eventually("all clients send in time", || {
        let began = Instant::now();
        let bed = Bed::new(&settings, loud(None), &[server]);
        let mut clients = senders(&bed, 5);
        send_all(&mut clients);
        if began.elapsed() >= settings.connect_timeout {
            return false;
        }
        eventually("connections without progress are reset", || stats_of(&bed, "default/loud").idle == 5);
        // A connection ends a little after it is counted as idle.
        eventually("the connections end", || bed.proxy.stats().open == 0);
        for mut client in clients {
            client.set_nonblocking(false).unwrap();
            assert_eq!(client.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        }
        true
    });
}

#[test]
fn clients_that_never_read_hold_few_pipes_and_stop_nobody() {
    let server = endpoint(|mut stream| while stream.write_all(&[7; 1 << 16]).is_ok() {});
    let settings = TcpSettings { pipes_per_thread: 4, ..TcpSettings::default() };
    let bed = Bed::new(&settings, loud(None), &[server]);
    let quiet = Neighbour::beside(&bed, echo());
    let stuck: Vec<TcpStream> = (0..12).map(|_| bed.connect()).collect();
    // The buffers of the kernel take some megabytes for each client.
    let (mut last, mut same) = (u64::MAX, 0);
    eventually("the kernel's buffers fill", || {
        let moved = stats_of(&bed, "default/loud").bytes_to_clients;
        same = if last == moved { same + 1 } else { 0 };
        last = moved;
        thread::sleep(Duration::from_millis(20));
        // On a slow machine, the bytes may also rest before all connections have begun.
        let is_full = stats_of(&bed, "default/loud").open == 12 && bed.proxy.stats().pipes_refused > 0;
        same >= 20 && is_full
    });
    quiet.check();
    let stats = bed.proxy.stats();
    assert_eq!((stats_of(&bed, "default/loud").open, stats.pipes), (12, 4));
    assert!(stats.pipes_refused > 0, "{stats:?}");
    drop(stuck);
    eventually("the connections end", || bed.proxy.stats().open == 0);
}

/// Descriptors that fill the table of this process, and leave `free` places.
fn fill_descriptors(free: usize) -> Vec<std::fs::File> {
    let open = || std::fs::File::open("/dev/null");
    let mut filling: Vec<_> = std::iter::from_fn(|| open().ok()).collect();
    filling.truncate(filling.len() - free);
    filling
}

/// Runs in processes of its own, because the limit of descriptors belongs to the process, and
/// because no descriptor of an earlier part may close meanwhile.
#[test]
fn without_descriptors_open_connections_work_and_the_others_wait() {
    const FREE: &str = "HEADGATE_TEST_FREE_DESCRIPTORS";
    let Ok(free) = std::env::var(FREE) else {
        let name = "tcp::tests::hostile::without_descriptors_open_connections_work_and_the_others_wait";
        let program = std::env::current_exe().unwrap();
        for free in 0..4 {
            let mut child = std::process::Command::new(&program);
            let output = child.args(["--exact", name]).env(FREE, free.to_string()).output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
        }
        return;
    };
    let free: usize = free.parse().unwrap();
    let old = getrlimit(Resource::Nofile);
    let bed = Bed::new(&TcpSettings::default(), loud(None), &[echo()]);
    let mut first = bed.connect();
    round_trip(&mut first);
    // The kernel completes connections to this endpoint, which accepts them later.
    let late_endpoint = TcpListener::bind("127.0.0.1:0").unwrap();
    let quiet = Neighbour::beside(&bed, late_endpoint.local_addr().unwrap());
    // The clients of this process need descriptors too.
    let socket = |_| rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None);
    let pending: Vec<OwnedFd> = (0..5).map(|number| socket(number).unwrap()).collect();
    setrlimit(Resource::Nofile, Rlimit { current: Some(200), maximum: old.maximum }).unwrap();
    let filling = fill_descriptors(free);
    let (began, cpu_before) = (Instant::now(), cpu_time());
    for socket in &pending {
        rustix::net::connect(socket, &quiet.address).unwrap();
    }
    eventually("exhaustion is counted", || bed.proxy.stats().exhausted > 2);
    round_trip(&mut first);
    let (stats, cpu) = (bed.proxy.stats(), cpu_time().saturating_sub(cpu_before));
    let most_attempts = began.elapsed().as_millis() / 100 + 2;
    assert!(u128::from(stats.exhausted) <= most_attempts && stats.accept_pauses > 0, "{stats:?}");
    assert!(cpu < Duration::from_millis(500), "the loop spins: {cpu:?}");
    let of_quiet = stats_of(&bed, "default/quiet");
    // Each connection takes two descriptors. The reserve is the second one of the last.
    assert_eq!((of_quiet.connected, of_quiet.failed), (free.div_ceil(2) as u64, 0), "{free}");
    drop(filling);
    setrlimit(Resource::Nofile, old).unwrap();
    thread::spawn(move || {
        let mut accepted: Vec<TcpStream> = late_endpoint.incoming().take(5).map(Result::unwrap).collect();
        accepted.iter_mut().for_each(|stream| {
            stream.read_exact(&mut [0]).unwrap();
            stream.write_all(b"y").unwrap();
        });
    });
    let mut late: Vec<TcpStream> = pending.into_iter().map(TcpStream::from).collect();
    late.iter_mut().for_each(|stream| stream.write_all(b"x").unwrap());
    late.iter_mut().for_each(|stream| stream.read_exact(&mut [0]).unwrap());
    let of_quiet = stats_of(&bed, "default/quiet");
    assert_eq!((of_quiet.connected, of_quiet.failed), (5, 0));
}

/// The processor time of this process so far. It needs no descriptor.
fn cpu_time() -> Duration {
    rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime).try_into().unwrap()
}
