//! Compares the TCP proxy with HAProxy on loopback.
//!
//! ```text
//! cargo run --release -p headgate-userspace --example compare -- compare ROUNDS
//! ```
//!
//! With `udp ROUNDS` instead, it compares datagrams through this proxy with datagrams that go
//! directly to the server.
//!
//! The command starts a server, and in each round both proxies after each other, each with one
//! thread on processor 0. Client and server run on processor 1. It needs `haproxy` and `taskset`.
//! The rates are for a second of the proxy's processor time, so that other programs on the machine
//! disturb them less.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    process::{Child, Command},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use headgate_userspace::{
    Algorithm, Destination, Protocol, Scope, ServiceId, ServiceSettings, Services, TcpProxy, TcpSettings, UdpProxy,
    UdpSettings,
};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const PROXY: &str = "127.0.0.1:18080";
const SERVER_PORT: u16 = 18081;
/// The server is reached by four addresses, so that ports do not run out.
const ENDPOINTS: u8 = 4;
const IDLE_CONNECTIONS: usize = 7_000;
const SECONDS: u64 = 2;

const ECHO: u8 = b'e';
const SOURCE: u8 = b's';
const ONCE: u8 = b'c';
const KEEP: u8 = b'k';

fn main() -> Result<(), Failure> {
    raise_descriptor_limit()?;
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("server") => server(),
        Some("proxy") => proxy(),
        Some("compare") => compare(arguments.get(2).map_or(Ok(5), |rounds| rounds.parse())?),
        Some("udp") => compare_udp(arguments.get(2).map_or(Ok(5), |rounds| rounds.parse())?),
        _ => Err("usage: compare server | proxy | compare [ROUNDS] | udp [ROUNDS]".into()),
    }
}

/// Allows as many connections as the system does.
fn raise_descriptor_limit() -> Result<(), Failure> {
    let resource = rustix::process::Resource::Nofile;
    let maximum = rustix::process::getrlimit(resource).maximum;
    let limit = rustix::process::Rlimit { current: maximum, maximum };
    Ok(rustix::process::setrlimit(resource, limit)?)
}

fn endpoints() -> impl Iterator<Item = SocketAddr> {
    (1..=ENDPOINTS).map(|number| SocketAddr::from(([127, 0, 1, number], SERVER_PORT)))
}

fn datagram_server() -> SocketAddr {
    SocketAddr::from(([127, 0, 1, 1], SERVER_PORT))
}

fn proxy() -> Result<(), Failure> {
    let services = Arc::new(Services::default());
    let id = ServiceId(1);
    let algorithm = Algorithm::RoundRobin;
    services.set_service(id, ServiceSettings { algorithm, ..ServiceSettings::default() });
    services.set_address(id, Scope::default(), Protocol::Tcp, PROXY.parse()?);
    for endpoint in endpoints() {
        services.set_endpoint(id, endpoint, 1);
    }
    let proxy = TcpProxy::start(&TcpSettings::default(), &services)?;
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None)?;
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &PROXY.parse::<SocketAddr>()?)?;
    rustix::net::listen(&socket, 4096)?;
    proxy.listen(socket, Scope::default(), Destination::Local)?;
    let datagrams = ServiceId(2);
    services.set_service(datagrams, ServiceSettings::default());
    services.set_address(datagrams, Scope::default(), Protocol::Udp, PROXY.parse()?);
    services.set_endpoint(datagrams, datagram_server(), 1);
    let udp = UdpProxy::start(&UdpSettings::default(), &services)?;
    udp.listen(UdpSocket::bind(PROXY)?, Scope::default(), PROXY.parse()?)?;
    loop {
        thread::park();
    }
}

fn haproxy_configuration() -> String {
    let mut text = format!(
        "global\n  nbthread 1\n  maxconn 7500\n  tune.pipesize 262144\n\
         defaults\n  mode tcp\n  option splice-request\n  option splice-response\n\
         timeout connect 3s\n  timeout client 1h\n  timeout server 1h\n\
         listen test\n  bind {PROXY} backlog 4096\n  balance roundrobin\n"
    );
    for (number, endpoint) in endpoints().enumerate() {
        text += &format!("  server s{number} {endpoint}\n");
    }
    text
}

/// Accepts connections. The first byte of a connection selects what the server does.
fn server() -> Result<(), Failure> {
    let listener = TcpListener::bind(("0.0.0.0", SERVER_PORT))?;
    rustix::net::listen(&listener, 4096)?;
    let kept = Arc::new(Mutex::new(Vec::new()));
    let datagrams = UdpSocket::bind(datagram_server())?;
    thread::spawn(move || {
        let mut buffer = vec![0; 65_536];
        while let Ok((count, sender)) = datagrams.recv_from(&mut buffer) {
            // A client that is gone needs no answer.
            let _ = datagrams.send_to(&buffer[..count], sender);
        }
    });
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let (listener, kept) = (listener.try_clone(), Arc::clone(&kept));
            thread::spawn(move || -> Result<(), Failure> {
                let listener = listener?;
                loop {
                    let (stream, _) = listener.accept()?;
                    // A connection that fails ends; the client counts what it misses.
                    let _ = serve(stream, &kept);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().map_err(|_| "a thread of the server panicked")??;
    }
    Ok(())
}

fn serve(mut stream: TcpStream, kept: &Mutex<Vec<TcpStream>>) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut byte = [0];
    stream.read_exact(&mut byte)?;
    match byte[0] {
        ONCE => stream.write_all(&byte)?,
        KEEP => {
            stream.write_all(&byte)?;
            if let Ok(mut kept) = kept.lock() {
                kept.push(stream);
            }
        }
        ECHO => {
            // A run begins with this mode: the connections of the last run are over.
            if let Ok(mut kept) = kept.lock() {
                kept.clear();
            }
            thread::spawn(move || while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {});
        }
        _ => {
            thread::spawn(move || {
                let block = vec![1; 256 * 1024];
                while stream.write_all(&block).is_ok() {}
            });
        }
    }
    Ok(())
}

/// What one run of a proxy measures.
#[derive(Debug, Clone, Copy)]
struct Run {
    megabytes_per_cpu_second: f64,
    megabytes_per_second: f64,
    connections_per_cpu_second: f64,
    connections_per_second: f64,
    p50_microseconds: f64,
    p99_microseconds: f64,
    bytes_per_idle_connection: f64,
}

type Field = fn(&Run) -> f64;

fn compare(rounds: usize) -> Result<(), Failure> {
    let me = std::env::current_exe()?;
    let pinned = |processor: &str| {
        let mut command = Command::new("taskset");
        command.args(["-c", processor]);
        command
    };
    let mut guard = Guard(pinned("1").arg(&me).arg("server").spawn()?);
    let configuration = std::env::temp_dir().join("headgate-compare-haproxy.cfg");
    std::fs::write(&configuration, haproxy_configuration())?;
    let pid = rustix::process::getpid().as_raw_nonzero().to_string();
    Command::new("taskset").args(["-cp", "1", &pid]).output()?;
    let mut runs = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        for which in [round % 2, 1 - round % 2] {
            let child = if which == 0 {
                pinned("0").arg(&me).arg("proxy").spawn()?
            } else {
                pinned("0").args(["haproxy", "-db", "-f"]).arg(&configuration).spawn()?
            };
            let proxy = Guard(child);
            let run = measure(proxy.0.id())?;
            println!("{} {run:?}", ["headgate", "haproxy "][which]);
            runs[which].push(run);
        }
    }
    println!("medians:              headgate     haproxy");
    let fields: [(&str, Field); 7] = [
        ("MB per CPU second", |run| run.megabytes_per_cpu_second),
        ("MB per second", |run| run.megabytes_per_second),
        ("conns per CPU second", |run| run.connections_per_cpu_second),
        ("conns per second", |run| run.connections_per_second),
        ("p50, microseconds", |run| run.p50_microseconds),
        ("p99, microseconds", |run| run.p99_microseconds),
        ("bytes per idle conn", |run| run.bytes_per_idle_connection),
    ];
    for (name, field) in fields {
        let [ours, theirs] = [0, 1].map(|which| median(runs[which].iter().map(field).collect()));
        println!("{name:20} {ours:10.1} {theirs:10.1}");
    }
    guard.0.kill()?;
    Ok(())
}

/// Prints the rates of answered datagrams, and those that were lost.
fn compare_udp(rounds: usize) -> Result<(), Failure> {
    let me = std::env::current_exe()?;
    let start = |role: &str, processor: &str| {
        Command::new("taskset").args(["-c", processor]).arg(&me).arg(role).spawn().map(Guard)
    };
    let (_server, proxy) = (start("server", "1")?, start("proxy", "0")?);
    let pid = rustix::process::getpid().as_raw_nonzero().to_string();
    Command::new("taskset").args(["-cp", "1", &pid]).output()?;
    thread::sleep(Duration::from_millis(500));
    let mut rates = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for (which, address) in [datagram_server(), PROXY.parse()?].into_iter().enumerate() {
            let cpu_before = cpu_seconds(proxy.0.id())?;
            let (rate, lost) = datagram_rate(address)?;
            let cpu = cpu_seconds(proxy.0.id())? - cpu_before;
            println!("{}: {rate:.0} datagrams/s, {lost} lost, {cpu:.2} s of the proxy", ["direct ", "proxied"][which]);
            rates[which].push(rate);
        }
    }
    let [direct, proxied] = rates.map(median);
    println!("median: direct {direct:.0}, proxied {proxied:.0}: {:.0} %", 100.0 * proxied / direct);
    Ok(())
}

/// Sends groups of 32 datagrams of 1,000 bytes, each after the answers to the last group.
fn datagram_rate(address: SocketAddr) -> Result<(f64, u32), Failure> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.connect(address)?;
    socket.set_read_timeout(Some(Duration::from_millis(500)))?;
    let (began, mut answered, mut lost) = (Instant::now(), 0_u32, 0);
    let mut buffer = [0; 1000];
    while began.elapsed() < Duration::from_secs(SECONDS) {
        for _ in 0..32 {
            socket.send(&buffer)?;
        }
        for received in 0..32 {
            if socket.recv(&mut buffer).is_err() {
                lost += 32 - received;
                break;
            }
            answered += 1;
        }
    }
    Ok((f64::from(answered) / began.elapsed().as_secs_f64(), lost))
}

/// Ends a child process.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn open(mode: u8) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(PROXY)?;
    stream.set_nodelay(true)?;
    stream.write_all(&[mode])?;
    Ok(stream)
}

fn measure(pid: u32) -> Result<Run, Failure> {
    let until = Instant::now() + Duration::from_secs(5);
    while TcpStream::connect(PROXY).is_err() {
        if Instant::now() > until {
            return Err("the proxy does not listen".into());
        }
        thread::sleep(Duration::from_millis(20));
    }
    thread::sleep(Duration::from_millis(200));
    let (p50_microseconds, p99_microseconds) = round_trips()?;
    let (bytes, bytes_cpu) = load(pid, 4, |stop, count| {
        let mut stream = open(SOURCE)?;
        let mut buffer = vec![0; 256 * 1024];
        while !stop.load(Ordering::Relaxed) {
            count.fetch_add(stream.read(&mut buffer)? as u64, Ordering::Relaxed);
        }
        Ok(())
    })?;
    let (connections, connections_cpu) = load(pid, 8, |stop, count| {
        while !stop.load(Ordering::Relaxed) {
            let mut stream = open(ONCE)?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer)?;
            if answer != [ONCE] {
                return Err("no answer".into());
            }
            count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    })?;
    thread::sleep(Duration::from_millis(300));
    let before = resident_bytes(pid)?;
    let mut idle = Vec::new();
    for _ in 0..IDLE_CONNECTIONS {
        let mut stream = open(KEEP)?;
        stream.read_exact(&mut [0])?;
        idle.push(stream);
    }
    thread::sleep(Duration::from_millis(500));
    let after = resident_bytes(pid)?;
    Ok(Run {
        megabytes_per_cpu_second: bytes / 1e6 / bytes_cpu,
        megabytes_per_second: bytes / 1e6 / SECONDS as f64,
        connections_per_cpu_second: connections / connections_cpu,
        connections_per_second: connections / SECONDS as f64,
        p50_microseconds,
        p99_microseconds,
        bytes_per_idle_connection: (after - before) / IDLE_CONNECTIONS as f64,
    })
}

/// Runs `work` on some threads for a time. Returns the counted work, and the seconds of processor
/// time that the proxy took.
fn load(
    pid: u32,
    threads: usize,
    work: impl Fn(&AtomicBool, &AtomicU64) -> Result<(), Failure> + Send + Sync + 'static,
) -> Result<(f64, f64), Failure> {
    let (stop, count, work) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)), Arc::new(work));
    let running: Vec<_> = (0..threads)
        .map(|_| {
            let (stop, count, work) = (Arc::clone(&stop), Arc::clone(&count), Arc::clone(&work));
            thread::spawn(move || work(&stop, &count))
        })
        .collect();
    thread::sleep(Duration::from_millis(300));
    let (count_before, cpu_before) = (count.load(Ordering::Relaxed), cpu_seconds(pid)?);
    thread::sleep(Duration::from_secs(SECONDS));
    let (done, cpu) = (count.load(Ordering::Relaxed) - count_before, cpu_seconds(pid)? - cpu_before);
    stop.store(true, Ordering::Relaxed);
    for thread in running {
        thread.join().map_err(|_| "a thread of the client panicked")??;
    }
    Ok((done as f64, cpu))
}

/// The median and the 99th percentile of the round trip of one byte, in microseconds.
fn round_trips() -> Result<(f64, f64), Failure> {
    let mut stream = open(ECHO)?;
    let mut byte = [7];
    let mut times: Vec<f64> = Vec::new();
    for _ in 0..20_000 {
        let began = Instant::now();
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)?;
        times.push(began.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok((times[times.len() / 2], times[times.len() * 99 / 100]))
}

/// The processor time of all threads of a process.
fn cpu_seconds(pid: u32) -> Result<f64, Failure> {
    let mut nanoseconds = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        nanoseconds += text.split(' ').next().unwrap_or_default().parse::<u64>()?;
    }
    Ok(nanoseconds as f64 / 1e9)
}

fn resident_bytes(pid: u32) -> Result<f64, Failure> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? * 1024.0)
}
