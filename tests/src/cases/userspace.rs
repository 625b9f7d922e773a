//! Cases of mode userspace: the agent hangs, is killed, or stops, while it carries connections.

use std::net::{SocketAddr, SocketAddrV4};
use std::ops::Range;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::{libc, sys::signal::Signal};
use socket2::{Domain, Protocol, Socket, Type};

use super::changes::eventually;
use super::live::{outcomes_while_asking, targets, while_asking};
use super::nftables::{metric, metric_of};
use super::rollout::{REFUSES, SILENT, fail};
use crate::testbed::client::{self, ANSWER_TIMEOUT, HeldConnection};
use crate::testbed::manifests::Via;
use crate::testbed::plan;
use crate::testbed::{Answer, Family, Outcome, Request, Testbed, Transport};

/// The node whose agent fails, and a pod of this node.
const NODE: &str = "node-a";
const CLIENT: &str = "a3";
/// After a failure, new connections go straight to endpoints within this time: the gate's 800 ms
/// (with iptables, 1 s), and time for a busy machine.
pub(super) const OPENS_WITHIN: Duration = Duration::from_millis(1_200);
/// The time during which connections are opened after a failure.
pub(super) const OBSERVED: Duration = Duration::from_millis(1_800);
const PAUSE: Duration = Duration::from_millis(50);

fn steady(bed: &Testbed) -> Result<Vec<SocketAddr>> {
    Family::BOTH.into_iter().map(|family| bed.address("steady", Via::ClusterIp, family, "tcp")).collect()
}

/// Whether the connection did not go through the proxy: the server saw the client's address.
pub(super) fn is_direct(answer: &Answer) -> bool {
    plan::address(CLIENT).is_some_and(|client| client.both().contains(&answer.source.ip()))
}

/// Waits until the proxy of the node carries new connections of both families.
pub(super) fn until_carried(bed: &Testbed) -> Result<()> {
    for to in steady(bed)? {
        eventually(|| match bed.machines().ask(CLIENT, &Request::new(Transport::Tcp, to))? {
            Outcome::Answered(answer) if !is_direct(&answer) => Ok(()),
            other => bail!("{to}: {other}"),
        })
        .context("waiting until the proxy carries connections")?;
    }
    Ok(())
}

/// Opens connections of both families from now on for [`OBSERVED`], each in a thread of its own.
/// Checks that all connections that begin after [`OPENS_WITHIN`] are answered directly. Calls
/// `recover` at the end, so that earlier connections may complete. Prints how long connections were
/// not answered directly.
fn observe(bed: &Testbed, what: &str, recover: impl FnOnce() -> Result<()>) -> Result<()> {
    let (machine, targets, began) = (bed.machines().machine(CLIENT)?, steady(bed)?, Instant::now());
    let outcomes = thread::scope(|scope| -> Result<Vec<(Duration, SocketAddr, Outcome)>> {
        let mut asked = Vec::new();
        while began.elapsed() < OBSERVED {
            for to in targets.iter().copied() {
                let since = began.elapsed();
                asked.push(scope.spawn(move || (since, to, client::ask(machine, &Request::new(Transport::Tcp, to)))));
            }
            thread::sleep(PAUSE);
        }
        recover()?;
        let join = |asked: thread::ScopedJoinHandle<'_, (Duration, SocketAddr, Result<Outcome>)>| {
            let (since, to, outcome) = asked.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            Ok((since, to, outcome?))
        };
        asked.into_iter().map(join).collect()
    })?;
    let is_direct = |outcome: &Outcome| matches!(outcome, Outcome::Answered(answer) if is_direct(answer));
    let (direct, others): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(|(.., outcome)| is_direct(outcome));
    let last = others.iter().map(|(since, ..)| *since).max().unwrap_or_default();
    let failed = others.iter().filter(|(.., outcome)| !matches!(outcome, Outcome::Answered(_))).count();
    eprintln!(
        "{what}: {} of {} connections went straight to endpoints, the last other one began after {last:?}, {failed} had no answer",
        direct.len(),
        direct.len() + others.len()
    );
    let late = others.iter().find(|(since, ..)| *since >= OPENS_WITHIN);
    ensure!(late.is_none(), "{what}: a connection was not answered directly: {late:?}");
    ensure!(!direct.is_empty(), "{what}: no connection was answered directly");
    Ok(())
}

/// Repeats a case that measures how long something takes, because a busy machine may pause
/// meanwhile. The case fails if all attempts fail.
pub(super) fn in_time(case: impl Fn() -> Result<()>) -> Result<()> {
    for _ in 0..4 {
        match case() {
            Ok(()) => return Ok(()),
            Err(error) => eprintln!("tried again: {error:#}"),
        }
    }
    case()
}

/// The agent hangs, continues, is killed, and starts again. New connections go straight to
/// endpoints soon after the agent hangs or is killed.
pub fn new_connections_need_no_agent(bed: &Testbed) -> Result<()> {
    in_time(|| {
        until_carried(bed)?;
        let agent = bed.take_agent(NODE)?;
        agent.signal(Signal::SIGSTOP)?;
        let hanging = observe(bed, "the agent hangs", || agent.signal(Signal::SIGCONT));
        agent.signal(Signal::SIGCONT)?;
        let continued = until_carried(bed);
        agent.kill()?;
        let killed = observe(bed, "the agent was killed", || Ok(()));
        bed.start_agent(NODE)?;
        hanging.and(continued).and(killed)?;
        until_carried(bed)
    })
}

/// The agent stops and another one starts, as in an upgrade, while clients open connections. No
/// connection is lost: the old agent carries its connections to their end.
pub fn an_upgrade_loses_no_connection(bed: &Testbed) -> Result<()> {
    until_carried(bed)?;
    let machine = bed.machines().machine(CLIENT)?;
    // On a busy machine, some connections may go past the proxy.
    let open = |to: SocketAddr| -> Result<HeldConnection> {
        for _ in 0..100 {
            let connection = HeldConnection::open(machine, to)?;
            if !is_direct(&connection.answer) {
                return Ok(connection);
            }
        }
        bail!("the proxy does not carry connections")
    };
    let mut held: Vec<HeldConnection> = Vec::new();
    for to in steady(bed)? {
        for _ in 0..20 {
            held.push(open(to)?);
        }
    }
    while_asking(bed, &targets(bed, "steady")?, || {
        let agent = bed.take_agent(NODE)?;
        agent.signal(Signal::SIGTERM)?;
        thread::sleep(OPENS_WITHIN);
        held.iter_mut().try_for_each(HeldConnection::check).context("while the old agent drains")?;
        drop(std::mem::take(&mut held));
        let status = agent.terminate()?;
        ensure!(status.success(), "the old agent ended with {status}");
        bed.start_agent(NODE)?;
        until_carried(bed)
    })
    .map(drop)
}

/// One of two endpoints refuses connections, and then answers nothing, while it stays in the
/// EndpointSlice. Returns the outcomes of the connections that clients opened meanwhile and that
/// had no answer before `timeout`, and the number of all these connections.
///
/// Needs a running cluster with [`super::lifecycle::some_services`].
fn lost_to_a_dead_endpoint(bed: &Testbed, timeout: Duration) -> Result<(Vec<Outcome>, usize)> {
    // The clients use the agents of two nodes.
    let targets: Vec<_> = [CLIENT, "b3"]
        .into_iter()
        .map(|client| steady(bed).map(|to| to.into_iter().map(move |to| (client, to))))
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .collect();
    let (mut lost, mut opened) = (Vec::new(), 0);
    for how in [REFUSES, SILENT] {
        fail(bed, "b1", true, how)?;
        let outcomes = outcomes_while_asking(bed, &targets, timeout, || {
            thread::sleep(OBSERVED);
            Ok(())
        });
        fail(bed, "b1", false, how)?;
        let outcomes: Vec<Outcome> = outcomes?.into_iter().flatten().collect();
        opened += outcomes.len();
        lost.extend(outcomes.into_iter().filter(|outcome| !matches!(outcome, Outcome::Answered(_))));
    }
    eprintln!("a dead endpoint: {} of {opened} connections had no answer", lost.len());
    Ok((lost, opened))
}

/// The proxy tries another endpoint when one is dead, so it loses no connection.
pub fn a_dead_endpoint_loses_no_connection(bed: &Testbed) -> Result<()> {
    until_carried(bed)?;
    let carried = || -> Result<u64> {
        let of = |node| metric_of(bed, node, "headgate_userspace_connections_accepted_total");
        Ok(of("node-a")? + of("node-b")?)
    };
    let carried_before = carried()?;
    let (lost, opened) = lost_to_a_dead_endpoint(bed, ANSWER_TIMEOUT)?;
    let carried = usize::try_from(carried()? - carried_before)?;
    ensure!(carried >= 20, "the proxies carried only {carried} of {opened} connections");
    // The gate opens while a busy machine does not run the agent. Then a connection can go straight
    // to the dead endpoint.
    let direct = opened.saturating_sub(carried);
    ensure!(
        lost.len() <= direct,
        "{} of {opened} connections had no answer, and {direct} went straight: {lost:?}",
        lost.len()
    );
    Ok(())
}

/// Rules cannot try another endpoint: the case for comparison.
pub fn rules_lose_connections_to_a_dead_endpoint(bed: &Testbed) -> Result<()> {
    // Each lost connection takes this time.
    let (lost, opened) = lost_to_a_dead_endpoint(bed, Duration::from_secs(8))?;
    ensure!(
        lost.len() * 10 > opened,
        "{} of {opened} connections were lost, as if the endpoint were not dead",
        lost.len()
    );
    Ok(())
}

/// The ports from which connections begin and never complete. Other clients use higher ports.
const HALF_OPEN_PORTS: Range<u16> = 2_000..22_000;

/// A pod begins 20,000 connections and completes none of them. The kernel answers with SYN cookies,
/// so other clients notice nothing, and the agent has no connections to carry.
pub fn half_open_connections_hinder_nobody(bed: &Testbed) -> Result<()> {
    until_carried(bed)?;
    let machine = bed.machines().machine(CLIENT)?;
    let addresses = (plan::address(CLIENT).map(|client| client.v4), steady(bed)?[0]);
    let (Some(from), SocketAddr::V4(to)) = addresses else { bail!("no IPv4 addresses: {addresses:?}") };
    // The pod's kernel would reset the connections, because no socket belongs to them.
    let (first, last) = (HALF_OPEN_PORTS.start, HALF_OPEN_PORTS.end - 1);
    let rules = format!(
        "add table ip silent; add chain ip silent input {{ type filter hook input priority 0; }}; \
         add rule ip silent input tcp sport {} tcp dport {first}-{last} drop",
        to.port()
    );
    machine.output({
        let mut nft = Command::new("nft");
        nft.arg(rules);
        nft
    })?;
    while_asking(bed, &targets(bed, "steady")?, || {
        machine.run(|| {
            let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(libc::IPPROTO_RAW)))?;
            for port in HALF_OPEN_PORTS {
                let sent = socket.send_to(&first_packet(SocketAddrV4::new(from, port), to), &SocketAddr::V4(to).into());
                sent.context("sending a packet")?;
            }
            Ok(())
        })?;
        thread::sleep(OBSERVED);
        Ok(())
    })?;
    let open = metric(bed, "headgate_userspace_connections_open")?;
    ensure!(open < 100, "the agent carries {open} connections");
    Ok(())
}

/// The packet that begins a TCP connection (RFC 9293, 3.1). The kernel completes the IP header.
fn first_packet(from: SocketAddrV4, to: SocketAddrV4) -> Vec<u8> {
    const BYTES: u8 = 20;
    const SYN: u8 = 2;
    const TCP: u8 = libc::IPPROTO_TCP as u8;
    let mut segment = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
    segment.extend([0; 8]);
    segment.extend([BYTES << 2, SYN, 0xff, 0xff, 0, 0, 0, 0]);
    let pseudo_header = [from.ip().octets(), to.ip().octets(), [0, TCP, 0, BYTES]];
    let words = pseudo_header.as_flattened().chunks(2).chain(segment.chunks(2));
    let sum: u32 = words.map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let checksum = !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or_default();
    segment[16..18].copy_from_slice(&checksum.to_be_bytes());
    let mut packet = vec![0x45, 0, 0, 2 * BYTES, 0, 0, 0, 0, 64, TCP, 0, 0];
    packet.extend(from.ip().octets());
    packet.extend(to.ip().octets());
    packet.extend(segment);
    packet
}
