//! `userspace-udp`: datagrams through the agent's proxy, compared with datagrams that go straight
//! to the endpoint. The proxy has one processor. Clients and the server share the other one.
//!
//! Each client sends groups of datagrams, and waits for the answers to a group before it sends the
//! next one. There are enough clients that the proxy and the server always have work.

use std::{
    fs, io,
    net::{SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use socket2::SockRef;

use super::{Bench, MEASURED, ROUNDS, SETTLE, load};
use crate::{
    bench::{
        report::{Figure, median},
        workload,
    },
    testbed::netns::Namespace,
};

const PORT: u16 = 53;
const TARGET_PORT: u16 = 5353;
const CLIENTS: usize = 8;
const GROUP: usize = 32;
const DATAGRAM_BYTES: usize = 1_000;
/// More than the kernel counts for a datagram in a buffer (`skb->truesize`).
const BUFFER_BYTES: usize = 4_096;
/// A datagram without an answer after this time is lost.
const LONGEST_ANSWER: Duration = Duration::from_millis(500);
/// The goal: through the proxy, at least 40 % of the direct rate.
const MOST_RATIO: f64 = 1.0 / 0.4;

/// Runs the bench. The figures are medians of five rounds, in which both ways take turns.
///
/// # Errors
/// A program does not start, datagrams are lost that no counter of the kernel shows, direct
/// datagrams are lost, or the goal is missed.
pub fn run() -> Result<Vec<Figure>> {
    let bench = Bench::new(CLIENTS)?;
    let service = SocketAddr::new(workload::cluster_ip(0), PORT);
    let endpoint = SocketAddr::new(workload::endpoint_ip(0, 0), TARGET_PORT);
    bench.add_manifest(&manifest(service, endpoint))?;
    bench.namespace.run(move || serve(endpoint))?;
    let mut agent = bench.start_agent()?;
    std::thread::sleep(SETTLE);
    let mut costs = [Vec::new(), Vec::new()];
    let (mut sent, mut lost) = ([0; 2], [0; 2]);
    let reported_before = reported(&bench.namespace)?;
    for _ in 0..ROUNDS {
        for (way, target) in [service, endpoint].into_iter().enumerate() {
            let measured = bench.namespace.run(move || measure(target))?;
            costs[way].push(measured.us_per_datagram);
            sent[way] += measured.sent;
            lost[way] += measured.lost;
        }
    }
    let reported = reported(&bench.namespace)? - reported_before;
    let carried = bench.agent_counter("headgate_userspace_datagrams_to_endpoints_total")?;
    agent.check_running()?;
    agent.kill()?;
    let [sent, sent_direct] = sent;
    let [lost, lost_direct] = lost;
    ensure!(
        carried >= (sent - lost) as f64,
        "the agent's proxy carried only {carried} of {sent} datagrams: the gate was open meanwhile"
    );
    eprintln!(
        "no answer: {lost} of {sent} datagrams through the proxy, {lost_direct} of {sent_direct} direct; \
         the kernel's counters show {reported} dropped datagrams"
    );
    ensure!(lost_direct == 0, "{lost_direct} direct datagrams were lost, and made the direct way slower");
    ensure!(lost <= reported, "{lost} datagrams were lost, but the kernel's counters show only {reported}");
    let [through_proxy, direct] = costs.map(median);
    ensure!(
        through_proxy <= direct * MOST_RATIO,
        "a datagram takes {through_proxy:.2} µs through the proxy and {direct:.2} µs direct: the goal is 40 % of the direct rate"
    );
    Ok(vec![
        Figure::against("userspace-udp/time-per-datagram", through_proxy, "µs", "direct", direct),
        Figure::alone("userspace-udp/lost", lost as f64, ""),
        Figure::alone("userspace-udp/lost-as-counted", reported as f64, ""),
    ])
}

fn manifest(service: SocketAddr, endpoint: SocketAddr) -> String {
    let (ip, address) = (service.ip(), endpoint.ip());
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{namespace: bench, name: datagrams}}\n\
         spec: {{clusterIP: {ip}, clusterIPs: [{ip}], ports: [{{name: dns, protocol: UDP, port: {PORT}}}]}}\n---\n\
         apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{namespace: bench, name: datagrams-a, labels: {{kubernetes.io/service-name: datagrams}}}}\n\
         addressType: IPv4\nports: [{{name: dns, protocol: UDP, port: {TARGET_PORT}}}]\n\
         endpoints: [{{addresses: [{address}]}}]\n"
    )
}

/// Returns each datagram to its sender, in a thread.
fn serve(endpoint: SocketAddr) -> Result<()> {
    load::use_the_other_processor()?;
    let socket = UdpSocket::bind(endpoint).context("binding the server")?;
    // The datagrams of all clients fit in the buffer.
    SockRef::from(&socket).set_recv_buffer_size(CLIENTS * GROUP * BUFFER_BYTES).context("enlarging the buffer")?;
    std::thread::spawn(move || {
        let mut buffer = [0; DATAGRAM_BYTES];
        loop {
            match socket.recv_from(&mut buffer) {
                // A client that is gone needs no answer.
                Ok((count, sender)) => drop(socket.send_to(&buffer[..count], sender)),
                Err(error) => eprintln!("the server of datagrams: {error}"),
            }
        }
    });
    Ok(())
}

struct Measured {
    us_per_datagram: f64,
    sent: u64,
    lost: u64,
}

/// Sends datagrams from all clients, and measures the time for each answered datagram.
fn measure(target: SocketAddr) -> Result<Measured> {
    load::use_the_other_processor()?;
    let began = Instant::now();
    let counts: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(move || client(target, began))).collect();
        let join = |client: std::thread::ScopedJoinHandle<'_, _>| {
            client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        clients.into_iter().map(join).collect::<Result<_>>()
    })?;
    let elapsed = began.elapsed();
    let (sent, answered) = counts.into_iter().fold((0, 0), |(a, b), (c, d)| (a + c, b + d));
    ensure!(answered > 0, "no datagram to {target} was answered");
    Ok(Measured { us_per_datagram: elapsed.as_secs_f64() * 1e6 / answered as f64, sent, lost: sent - answered })
}

/// Returns the numbers of datagrams that were sent and answered.
fn client(target: SocketAddr, began: Instant) -> Result<(u64, u64)> {
    let socket = UdpSocket::bind("0.0.0.0:0").context("binding a client")?;
    socket.connect(target)?;
    socket.set_read_timeout(Some(LONGEST_ANSWER))?;
    let (mut sent, mut answered) = (0, 0);
    let mut buffer = [0; DATAGRAM_BYTES];
    while began.elapsed() < MEASURED {
        for _ in 0..GROUP {
            socket.send(&buffer).context("sending a datagram")?;
            sent += 1;
        }
        for _ in 0..GROUP {
            match socket.recv(&mut buffer) {
                Ok(_) => answered += 1,
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => break,
                Err(error) => return Err(error).with_context(|| format!("a datagram to {target}")),
            }
        }
    }
    Ok((sent, answered))
}

/// The datagrams that the kernel counts as dropped in the namespace.
fn reported(namespace: &Namespace) -> Result<u64> {
    namespace.run(|| {
        let text = fs::read_to_string("/proc/thread-self/net/snmp")?;
        let mut lines = text.lines().filter_map(|line| line.strip_prefix("Udp: "));
        let (names, values) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
        let counters = names.split(' ').zip(values.split(' '));
        let dropped = counters.filter(|(name, _)| ["InErrors", "SndbufErrors", "MemErrors"].contains(name));
        let dropped: Vec<u64> = dropped.map(|(_, value)| value.parse()).collect::<Result<_, _>>()?;
        ensure!(!dropped.is_empty(), "/proc/net/snmp has no counters of UDP");
        Ok(dropped.into_iter().sum())
    })
}
