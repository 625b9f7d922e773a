//! Compares datagrams through the UDP proxy with datagrams that go directly to the server, on
//! loopback. The bench `userspace` of the tests measures the TCP proxy behind its rules.
//!
//! ```text
//! cargo run --release -p headgate-userspace --example datagrams -- compare ROUNDS
//! ```
//!
//! The command starts a server and the proxy, which has one thread on processor 0. Client and
//! server run on processor 1. It needs `taskset`.

use std::{
    net::{SocketAddr, UdpSocket},
    process::{Child, Command},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use headgate_userspace::{Protocol, Scope, ServiceId, ServiceSettings, Services, UdpProxy, UdpSettings};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const PROXY: &str = "127.0.0.1:18080";
const SERVER_PORT: u16 = 18081;
const SECONDS: u64 = 2;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("server") => server(),
        Some("proxy") => proxy(),
        Some("compare") => compare(arguments.get(2).map_or(Ok(5), |rounds| rounds.parse())?),
        _ => Err("usage: datagrams server | proxy | compare [ROUNDS]".into()),
    }
}

fn datagram_server() -> SocketAddr {
    SocketAddr::from(([127, 0, 1, 1], SERVER_PORT))
}

fn proxy() -> Result<(), Failure> {
    let services = Arc::new(Services::default());
    let datagrams = ServiceId(1);
    services.set_service(datagrams, ServiceSettings::default());
    services.set_address(datagrams, Scope::default(), Protocol::Udp, PROXY.parse()?);
    services.set_endpoint(datagrams, datagram_server(), 1);
    let udp = UdpProxy::start(&UdpSettings::default(), &services)?;
    udp.listen(UdpSocket::bind(PROXY)?, Scope::default(), PROXY.parse()?)?;
    loop {
        thread::park();
    }
}

/// Returns each datagram to its sender.
fn server() -> Result<(), Failure> {
    let socket = UdpSocket::bind(datagram_server())?;
    let mut buffer = vec![0; 65_536];
    loop {
        let (count, sender) = socket.recv_from(&mut buffer)?;
        // A client that is gone needs no answer.
        let _ = socket.send_to(&buffer[..count], sender);
    }
}

/// Prints the rates of answered datagrams, and those that were lost.
fn compare(rounds: usize) -> Result<(), Failure> {
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

/// The processor time of all threads of a process.
fn cpu_seconds(pid: u32) -> Result<f64, Failure> {
    let mut nanoseconds = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        nanoseconds += text.split(' ').next().unwrap_or_default().parse::<u64>()?;
    }
    Ok(nanoseconds as f64 / 1e9)
}
