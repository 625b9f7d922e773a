//! What the honest do while others attack: a tenant changes its Service, the kubelet and a load
//! balancer probe, and a pod stops.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::Result;
use socket2::{Domain, SockRef, Socket, Type};

use super::bed::{Bed, CHECKED_SERVER, DRAIN_PORT, GATEWAY, HONEST, STOPPING_PODS, stopping_slice};
use crate::testbed::netns::Namespace;

/// A change that has not arrived after this time counts as failed, with this time.
const LONGEST_CHANGE: Duration = Duration::from_secs(10);
/// The time limit of a probe, as the kubelet's default.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// The longest time for a new connection to a Service.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause between two looks at where the Service leads.
const BETWEEN_LOOKS: Duration = Duration::from_micros(500);

/// What happened to honest requests of one kind.
#[derive(Debug, Clone, Default)]
pub(super) struct Requests {
    /// How long each request took, in milliseconds. A request that failed has its whole time.
    pub(super) times_ms: Vec<f64>,
    /// The number of requests that failed.
    pub(super) failed: u64,
}

impl Requests {
    pub(super) fn add(&mut self, started: Instant, is_ok: bool) {
        self.times_ms.push(started.elapsed().as_secs_f64() * 1e3);
        self.failed += u64::from(!is_ok);
    }
}

/// Opens a connection, and returns the number of the server that answers.
///
/// # Errors
/// The connection is refused or times out.
pub(super) fn connect_once(address: SocketAddr) -> io::Result<u8> {
    let mut stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
    stream.set_read_timeout(Some(CONNECT_TIMEOUT))?;
    let mut number = [0];
    stream.read_exact(&mut number)?;
    // The reset leaves no socket that waits for late packets.
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    Ok(number[0])
}

/// Moves the honest Service between its two pods until `deadline`. A change has arrived when a new
/// connection reaches the other pod. Its time begins when the API server has stored it. Returns the
/// changes, and the number of connections that failed.
///
/// # Errors
/// The API server refuses a change, which is a defect of the bench.
pub(super) fn changes(bed: &Bed, deadline: Instant) -> Result<(Requests, u64)> {
    bed.node.run(|| {
        let (mut changes, mut failed_connections) = (Requests::default(), 0);
        while Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(fastrand::u64(20_000..40_000)));
            let wanted = bed.move_honest_service()?;
            let started = Instant::now();
            let has_arrived = loop {
                match connect_once(HONEST) {
                    Ok(number) if number == wanted => break true,
                    Ok(_) => {}
                    Err(_) => failed_connections += 1,
                }
                if started.elapsed() > LONGEST_CHANGE {
                    break false;
                }
                std::thread::sleep(BETWEEN_LOOKS);
            };
            changes.add(started, has_arrived);
        }
        Ok((changes, failed_connections))
    })
}

/// Requests a page from the address `source`, and returns the whole answer. The time limit holds
/// for the whole request.
///
/// # Errors
/// There is no whole answer in time.
pub(super) fn request(
    source: Option<Ipv4Addr>,
    target: SocketAddr,
    path: &str,
    time_limit: Duration,
) -> io::Result<String> {
    let deadline = Instant::now() + time_limit;
    let left = || {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::Error::from(ErrorKind::TimedOut)) } else { Ok(left) }
    };
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    if let Some(source) = source {
        socket.bind(&SocketAddr::from((source, 0)).into())?;
    }
    socket.connect_timeout(&target.into(), left()?)?;
    let mut stream = TcpStream::from(socket);
    stream.set_write_timeout(Some(left()?))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: honest\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    let mut buffer = [0; 4_096];
    loop {
        stream.set_read_timeout(Some(left()?))?;
        match stream.read(&mut buffer)? {
            0 => return String::from_utf8(answer).map_err(|_| ErrorKind::InvalidData.into()),
            read => answer.extend_from_slice(&buffer[..read]),
        }
    }
}

/// A page that an honest client probes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Probe {
    /// The client's address; `None` for the node itself.
    pub(super) source: Option<Ipv4Addr>,
    pub(super) target: (Ipv4Addr, u16),
    pub(super) path: &'static str,
}

impl Probe {
    /// Probes ten times a second until `is_over`. Each answer must have the status 200.
    ///
    /// # Errors
    /// The thread cannot enter the namespace.
    pub(super) fn run(self, namespace: &Namespace, is_over: &AtomicBool) -> Result<Requests> {
        namespace.run(|| {
            let mut probes = Requests::default();
            while !is_over.load(Ordering::Relaxed) {
                let started = Instant::now();
                let target = SocketAddr::new(IpAddr::V4(self.target.0), self.target.1);
                let answer = request(self.source, target, self.path, PROBE_TIMEOUT);
                let is_good = answer.as_ref().is_ok_and(|answer| answer.starts_with("HTTP/1.1 200 "));
                if !is_good && probes.failed == 0 {
                    println!("the first probe of {target} that failed: {answer:?}");
                }
                probes.add(started, is_good);
                std::thread::sleep(Duration::from_millis(100).saturating_sub(started.elapsed()));
            }
            Ok(probes)
        })
    }
}

/// Lets a pod stop and come back until `deadline`. Each time it asks the drain page, and the answer
/// must be `drained`.
///
/// # Errors
/// The API server refuses a change, which is a defect of the bench.
pub(super) fn drains(bed: &Bed, deadline: Instant) -> Result<Requests> {
    let page = SocketAddr::from((GATEWAY, DRAIN_PORT));
    bed.pods.run(|| {
        let mut drains = Requests::default();
        while Instant::now() < deadline {
            bed.write(stopping_slice(true))?;
            let started = Instant::now();
            let path = "/v1/drain?timeout=5s&settle=0s&silent=5s&namespace=honest&uid=u0";
            let answer = request(Some(STOPPING_PODS[0]), page, path, LONGEST_CHANGE);
            drains.add(started, answer.is_ok_and(|answer| answer.contains("\r\n\r\ndrained\n")));
            bed.write(stopping_slice(false))?;
            std::thread::sleep(Duration::from_millis(250));
        }
        Ok(drains)
    })
}

/// The gaps between the health checks that a pod of the honest tenant has received since `began`,
/// up to now, in milliseconds. The longest gap includes a check that does not come.
pub(super) fn gaps_between_checks(bed: &Bed, began: Instant) -> Requests {
    let checks: Vec<Instant> =
        bed.servers.take_accepted(CHECKED_SERVER).into_iter().filter(|check| *check >= began).collect();
    let ends = checks.iter().copied().chain([Instant::now()]);
    let gaps = [began].into_iter().chain(checks.iter().copied()).zip(ends);
    let times_ms = gaps.map(|(start, end)| end.saturating_duration_since(start).as_secs_f64() * 1e3);
    Requests { times_ms: times_ms.collect(), failed: 0 }
}
