//! `nft-replace`: new connections at full rate while all endpoints of one Service are replaced
//! again and again. The bench fails if a connection is refused or times out, or if a connection
//! reaches an endpoint that was removed before the connection began.

use std::{
    collections::BTreeSet,
    io::{ErrorKind, Read as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use headgate_core::Change;
use socket2::SockRef;

use super::{nftables::Programmed, report::Figure, workload};
use crate::testbed::netns::Namespace;

const REPLACEMENTS: u32 = 10_000;
const CLIENTS: usize = 2;
/// The number of addresses from which the endpoints of a step are taken in turn.
const POOL: u32 = 251;
/// The distance between the first endpoints of two successive steps. The endpoints of successive
/// steps are different, because a step has fewer endpoints than this.
const STRIDE: u32 = 7;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// What happened during the replacements.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// The number of connections.
    pub connections: u64,
    /// The number of connections during which a replacement happened.
    pub crossed: u64,
    /// The time of all replacements in seconds.
    pub seconds: f64,
    /// The longest time to connect in milliseconds.
    pub longest_ms: f64,
}

/// Runs the bench.
///
/// # Errors
/// A connection fails or reaches a removed endpoint.
pub fn run() -> Result<Vec<Figure>> {
    let seen = measure(REPLACEMENTS)?;
    let name = |what: &str| format!("nft-replace/{what}/{REPLACEMENTS}");
    let per_second = seen.connections as f64 / seen.seconds;
    Ok(vec![
        Figure::alone(name("replacements-per-second"), f64::from(REPLACEMENTS) / seen.seconds, "1/s"),
        Figure::alone(name("connections-per-second"), per_second, "1/s"),
        Figure::alone(name("connections"), seen.connections as f64, ""),
        Figure::alone(name("connections-during-a-replacement"), seen.crossed as f64, ""),
        Figure::alone(name("longest-connect"), seen.longest_ms, "ms"),
        Figure::alone(name("refused-or-lost"), 0.0, ""),
        Figure::alone(name("to-a-removed-endpoint"), 0.0, ""),
    ])
}

/// The numbers of the endpoints after a step: two to four endpoints, so that the count changes too.
fn endpoints_of(step: u32) -> impl Iterator<Item = u32> {
    (0..2 + step % 3).map(move |i| (step * STRIDE + i) % POOL)
}

fn address(number: u32) -> IpAddr {
    let [.., high, low] = (number + 1).to_be_bytes();
    IpAddr::from([11, 0, high, low])
}

fn change_to(step: u32, old: u32) -> Vec<Change> {
    let endpoint = |number: u32| {
        let endpoint = workload::endpoint(0, 0);
        Change::Endpoint(workload::key(0), headgate_core::Endpoint { address: address(number), ..endpoint })
    };
    let removed = endpoints_of(old).map(|number| Change::RemoveEndpoint(workload::key(0), address(number)));
    removed.chain(endpoints_of(step).map(endpoint)).collect()
}

/// The steps that a client knows of.
#[derive(Default)]
struct Steps {
    /// The last step that the dataplane has begun to write.
    begun: AtomicU32,
    /// The last step that the kernel has.
    done: AtomicU32,
    is_over: AtomicBool,
    /// Set after the last client has ended.
    clients_ended: AtomicBool,
}

/// Replaces all endpoints of one Service this number of times, while clients connect.
///
/// # Errors
/// A connection fails or reaches a removed endpoint.
pub fn measure(replacements: u32) -> Result<Seen> {
    let namespace = Namespace::create(format!("hg{}-bench-replace", std::process::id()))?;
    let mut commands = String::from("link set lo up\nroute add 10.96.0.0/12 dev lo\n");
    for number in 0..POOL {
        commands.push_str(&format!("addr add {}/32 dev lo\n", address(number)));
    }
    namespace.ip_batch(&commands)?;
    namespace.set_sysctls(&[("ipv4/ip_local_port_range", "10000 65000")])?;
    namespace.run(|| {
        let mut cluster = Programmed::new(workload::state(1, 0))?;
        cluster.step(change_to(0, 0))?;
        // A closed connection leaves no entry that could reach the limit of the table.
        let timeout = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close";
        std::fs::write(timeout, "1").with_context(|| format!("writing {timeout}"))?;
        let listener = TcpListener::bind("0.0.0.0:8080").context("listening")?;
        let steps = Steps::default();
        let doorway = namespace.doorway()?;
        std::thread::scope(|scope| {
            scope.spawn(|| serve(&listener, &steps));
            let client = || {
                doorway.enter()?;
                connect_repeatedly(&steps)
            };
            let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(client)).collect();
            let started = Instant::now();
            let replaced = (1..=replacements).try_for_each(|step| {
                let changes = change_to(step, step - 1);
                steps.begun.store(step, Ordering::SeqCst);
                cluster.step(changes)?;
                steps.done.store(step, Ordering::SeqCst);
                ensure!(clients.iter().all(|client| !client.is_finished()), "a client has stopped at step {step}");
                Ok(())
            });
            let seconds = started.elapsed().as_secs_f64();
            steps.is_over.store(true, Ordering::SeqCst);
            let ended: Vec<_> = clients.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
            // Until now, the server has answered each connection, so no client waits for ever. This
            // connection ends the server's wait for another one.
            steps.clients_ended.store(true, Ordering::SeqCst);
            let _ = TcpStream::connect(SocketAddr::new(address(0), 8080));
            let mut all = Seen { connections: 0, crossed: 0, seconds, longest_ms: 0.0 };
            for client in ended {
                let seen = client.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                all.connections += seen.connections;
                all.crossed += seen.crossed;
                all.longest_ms = all.longest_ms.max(seen.longest_ms);
            }
            replaced.map(|()| all)
        })
    })
}

/// Answers each connection with the address of the endpoint that the connection reached.
fn serve(listener: &TcpListener, steps: &Steps) {
    for stream in listener.incoming().map_while(Result::ok) {
        if steps.clients_ended.load(Ordering::SeqCst) {
            return;
        }
        let Ok(own) = stream.local_addr() else { continue };
        let _ = std::io::Write::write_all(&mut &stream, own.ip().to_string().as_bytes());
        let _ = stream.shutdown(std::net::Shutdown::Write);
    }
}

fn connect_repeatedly(steps: &Steps) -> Result<Seen> {
    let target = SocketAddr::new(workload::cluster_ip(0), 80);
    let mut seen = Seen { connections: 0, crossed: 0, seconds: 0.0, longest_ms: 0.0 };
    while !steps.is_over.load(Ordering::SeqCst) {
        let before = steps.done.load(Ordering::SeqCst);
        let start = Instant::now();
        let mut stream = TcpStream::connect_timeout(&target, CONNECT_TIMEOUT)
            .with_context(|| format!("connection {} at step {before}", seen.connections))?;
        let after = steps.begun.load(Ordering::SeqCst);
        seen.longest_ms = seen.longest_ms.max(start.elapsed().as_secs_f64() * 1e3);
        let mut text = String::new();
        match stream.read_to_string(&mut text) {
            Err(error) if error.kind() != ErrorKind::ConnectionReset => return Err(error.into()),
            _ => {}
        }
        // The reset removes the connection at once, so that no side keeps it.
        SockRef::from(&stream).set_linger(Some(Duration::ZERO)).context("setting SO_LINGER")?;
        if text.is_empty() {
            // The server has ended at the end of the bench.
            ensure!(steps.is_over.load(Ordering::SeqCst), "a connection was closed without an answer");
            break;
        }
        let allowed: BTreeSet<IpAddr> = (before..=after).flat_map(endpoints_of).map(address).collect();
        if !allowed.contains(&text.parse().with_context(|| format!("the answer {text:?}"))?) {
            bail!("a connection that began after step {before} and ended before step {after} reached {text}");
        }
        seen.connections += 1;
        seen.crossed += u64::from(after > before);
    }
    Ok(seen)
}
