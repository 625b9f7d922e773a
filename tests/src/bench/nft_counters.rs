//! `nft-counters`: what counters of Services cost in nftables mode. The bench measures a new
//! connection, a round trip of one byte, and the throughput of a connection, through the last of
//! the Services. It measures with and without counters in turn.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

use super::{
    nftables::Programmed,
    report::{Figure, median},
    workload,
};
use crate::testbed::netns::Namespace;

const ENDPOINTS: u32 = 10;
const ROUNDS: usize = 10;
const CONNECTIONS: usize = 300;
const ROUND_TRIPS: usize = 3_000;
const BYTES: usize = 256 << 20;

/// Runs the bench.
///
/// # Errors
/// A namespace cannot be created, or a connection fails.
pub fn run(services: Option<u32>) -> Result<Vec<Figure>> {
    let services = services.unwrap_or(10_000);
    let namespaces = [namespace(services, false)?, namespace(services, true)?];
    let target = SocketAddr::new(workload::cluster_ip(services - 1), 80);
    let mut all = [const { [const { Vec::new() }; 3] }; 2];
    for _ in 0..ROUNDS {
        for (namespace, measured) in namespaces.iter().zip(&mut all) {
            let found = namespace.run(|| measure(target))?;
            measured.iter_mut().zip(found).for_each(|(values, value)| values.push(value));
        }
    }
    let [without, with] = all.map(|measured| measured.map(median));
    let names = [("connection", "µs"), ("round-trip", "µs"), ("throughput", "MB/s")];
    let figure = |((name, unit), (with, without))| {
        let name = format!("nft-counters/{name}/{services}x{ENDPOINTS}");
        Figure::against(name, with, unit, "without counters", without)
    };
    Ok(names.into_iter().zip(with.into_iter().zip(without)).map(figure).collect())
}

/// A namespace with the rules, and a server on the addresses of the last Service's endpoints.
fn namespace(services: u32, counts_services: bool) -> Result<Namespace> {
    let namespace = Namespace::create(format!("hg{}-bench-counters-{counts_services}", std::process::id()))?;
    let mut commands = String::from("link set lo up\nroute add 10.96.0.0/12 dev lo\n");
    for endpoint in 0..ENDPOINTS {
        commands.push_str(&format!("addr add {}/32 dev lo\n", workload::endpoint_ip(services - 1, endpoint)));
    }
    namespace.ip_batch(&commands)?;
    namespace.run(|| {
        Programmed::load(workload::state(services, ENDPOINTS), counts_services)?;
        let listener = TcpListener::bind("0.0.0.0:8080").context("listening")?;
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                thread::spawn(move || serve(stream));
            }
        });
        Ok(())
    })?;
    Ok(namespace)
}

/// Answers every read with one byte.
fn serve(mut stream: TcpStream) {
    let mut buffer = vec![0; 1 << 18];
    while let Ok(1..) = stream.read(&mut buffer) {
        if stream.write_all(&[0]).is_err() {
            return;
        }
    }
}

/// Returns the medians of the time of a connection and of a round trip in microseconds, and the
/// throughput in MB/s.
fn measure(target: SocketAddr) -> Result<[f64; 3]> {
    let (mut connecting, mut trips) = (Vec::new(), Vec::new());
    let us = |since: Instant| since.elapsed().as_secs_f64() * 1e6;
    for _ in 0..CONNECTIONS {
        let start = Instant::now();
        let stream = TcpStream::connect_timeout(&target, Duration::from_secs(5))?;
        connecting.push(us(start));
        drop(stream);
    }
    let mut stream = TcpStream::connect_timeout(&target, Duration::from_secs(5))?;
    stream.set_nodelay(true)?;
    for _ in 0..ROUND_TRIPS {
        let start = Instant::now();
        stream.write_all(&[0])?;
        stream.read_exact(&mut [0])?;
        trips.push(us(start));
    }
    let mut answers = stream.try_clone()?;
    let drain = thread::spawn(move || while let Ok(1..) = answers.read(&mut [0; 4_096]) {});
    let (start, block) = (Instant::now(), vec![0; 1 << 16]);
    for _ in 0..BYTES / block.len() {
        stream.write_all(&block)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    stream.shutdown(std::net::Shutdown::Write)?;
    drain.join().map_err(|_| anyhow::anyhow!("the thread that reads the answers panicked"))?;
    Ok([median(connecting), median(trips), BYTES as f64 / 1e6 / seconds])
}
