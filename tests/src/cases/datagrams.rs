//! Cases of mode userspace: datagrams that the agent carries.

use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use headgate_netlink::{Connection, Request};
use nix::sys::signal::Signal;

use super::{
    changes::eventually,
    userspace::{OBSERVED, OPENS_WITHIN, in_time, is_direct},
};
use crate::testbed::{
    Family, Outcome, Testbed, Transport,
    flow::{Flow, open_all},
    manifests::{
        Port, Service,
        Via::{self, ClusterIp, LoadBalancerIp},
        ready,
    },
    plan::{self, NODES},
};

/// The node whose agent carries the datagrams of the clients, and its clients.
const NODE: &str = "node-a";
const WAYS: [(&str, Via); 3] = [("a3", ClusterIp), (NODE, ClusterIp), ("outside-1", LoadBalancerIp)];
/// A port of pods at which no server of the testbed listens.
const TARGET_PORT: u16 = 7053;
const GUARD: Duration = Duration::from_secs(60);

/// A Service whose servers are those that a case starts.
fn service(name: &str, endpoints: &[&str]) -> Service {
    let port = Port { name: "udp", transport: Transport::Udp, port: 53, target_port: TARGET_PORT };
    Service { ports: vec![port], ..Service::new(name, endpoints) }
}

/// Waits until the proxy carries the datagrams of a pod of the node.
fn until_carried(bed: &Testbed) -> Result<()> {
    for flow in open_all(bed, "steady", &[("a3", ClusterIp)])? {
        let is_carried = |outcome: &Outcome| matches!(outcome, Outcome::Answered(answer) if !is_direct(answer));
        flow.until("an answer to a datagram that the proxy carries", is_carried)?;
    }
    Ok(())
}

/// Makes the kernels of all nodes forget all connections.
fn forget_connections(bed: &Testbed) -> Result<()> {
    /// `IPCTNL_MSG_CT_DELETE`, which deletes all entries if the request names none.
    const DELETE: u8 = 2;
    NODES.iter().try_for_each(|node| {
        bed.machines().machine(node.name)?.run(|| {
            let request = Request::netfilter(libc::NFNL_SUBSYS_CTNETLINK, DELETE, 0, 0);
            Ok(Connection::open(libc::NETLINK_NETFILTER)?.ask(request, |_, _| {})?)
        })
    })
}

fn client(bed: &Testbed, from: &str, to: SocketAddr) -> Result<UdpSocket> {
    bed.machines().machine(from)?.run(|| {
        let any: IpAddr = if to.is_ipv4() { [0, 0, 0, 0].into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((any, 0))?;
        // A connected socket accepts only datagrams from the address that it used.
        socket.connect(to)?;
        socket.set_read_timeout(Some(GUARD))?;
        Ok(socket)
    })
}

/// A reply comes from the address that the client used, although connection tracking has forgotten
/// the question.
pub fn replies_need_no_connection_tracking(bed: &Testbed) -> Result<()> {
    until_carried(bed)?;
    bed.update(|manifests| manifests.add(service("late", &["b1"])))?;
    let server = bed.machines().machine("b1")?.run(|| {
        let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, TARGET_PORT))?;
        socket.set_read_timeout(Some(GUARD))?;
        Ok(socket)
    })?;
    for family in Family::BOTH {
        for (from, via) in WAYS {
            let to = bed.address("late", via, family, "udp")?;
            let context = || format!("{from} asks {to}");
            let client = client(bed, from, to).with_context(context)?;
            client.send(b"question").with_context(context)?;
            let (_, session) = server.recv_from(&mut [0; 20]).with_context(context)?;
            let node = plan::address(NODE).context("the node has no address")?;
            ensure!(node.both().contains(&session.ip().to_canonical()), "{}: {session} is not the node", context());
            forget_connections(bed)?;
            server.send_to(b"answer", session).with_context(context)?;
            let mut buffer = [0; 20];
            let length = client.recv(&mut buffer).with_context(context)?;
            ensure!(&buffer[..length] == b"answer", "{}: another datagram arrived", context());
        }
    }
    Ok(())
}

/// If nobody listens at the endpoint, the client gets an error, as without a proxy.
pub fn a_client_learns_that_nobody_listens(bed: &Testbed) -> Result<()> {
    until_carried(bed)?;
    bed.update(|manifests| manifests.add(service("absent", &["b1"])))?;
    for family in Family::BOTH {
        for (from, via) in WAYS {
            let to = bed.address("absent", via, family, "udp")?;
            let client = client(bed, from, to)?;
            client.send(b"question")?;
            let began = Instant::now();
            match client.recv(&mut [0; 20]) {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
                other => bail!("{from} asked {to}, and got {other:?} after {:?}", began.elapsed()),
            }
        }
    }
    Ok(())
}

/// The first datagram after an endpoint was removed reaches another endpoint.
pub fn sessions_of_a_removed_endpoint_move_at_once(bed: &Testbed) -> Result<()> {
    until_carried(bed)?;
    let pods = ["a1", "b1", "c1"];
    bed.update(|manifests| manifests.add(Service::new("moving", &pods)))?;
    let flows = open_all(bed, "moving", &WAYS)?;
    for round in 0..6 {
        let before = flows.iter().map(Flow::server).collect::<Result<Vec<_>>>()?;
        let removed = pods[round % pods.len()];
        bed.update(|manifests| {
            let others = pods.into_iter().filter(|pod| *pod != removed).collect::<Vec<_>>();
            manifests.service_mut("moving")?.endpoints = ready(&others);
            Ok(())
        })?;
        for (flow, before) in flows.iter().zip(before) {
            let now = flow.server()?;
            ensure!(now != removed, "a session stayed with {removed}");
            if before != removed && now != before {
                // On a busy machine, a datagram may go past the agent. The session is still there.
                flow.until_answered_by(&before).context("a session moved")?;
            }
        }
    }
    Ok(())
}

/// The agent hangs, continues, is killed, and starts again. Also the datagrams of open flows go
/// straight to endpoints about 800 ms after the agent hangs or is killed.
pub fn open_flows_need_no_agent(bed: &Testbed) -> Result<()> {
    in_time(|| {
        until_carried(bed)?;
        let flows = open_all(bed, "steady", &WAYS)?;
        let until_answered = |what: &str| -> Result<()> {
            let began = Instant::now();
            for flow in &flows {
                flow.until("answered", |outcome| matches!(outcome, Outcome::Answered(_)))?;
            }
            let waited = began.elapsed();
            eprintln!("{what}: all flows were answered again after {waited:?}");
            // A flow may just have begun to wait for an answer of the agent.
            let limit = OPENS_WITHIN + Duration::from_millis(250);
            ensure!(waited < limit, "{what}: a flow waited {waited:?}");
            Ok(())
        };
        let all_answered = || flows.iter().try_for_each(|flow| flow.server().map(drop));
        all_answered()?;
        let agent = bed.take_agent(NODE)?;
        agent.signal(Signal::SIGSTOP)?;
        let hanging = until_answered("the agent hangs");
        agent.signal(Signal::SIGCONT)?;
        let continued = until_carried(bed).and_then(|()| all_answered());
        agent.kill()?;
        let killed = until_answered("the agent was killed");
        bed.start_agent(NODE)?;
        hanging.and(continued).and(killed)?;
        until_carried(bed)?;
        all_answered()
    })
}

/// The agent stops and another one starts, as in an upgrade, while clients send datagrams. Each
/// datagram is answered.
pub fn an_upgrade_loses_no_datagram(bed: &Testbed) -> Result<()> {
    until_carried(bed)?;
    let flows = open_all(bed, "steady", &WAYS)?;
    let (stop, asked) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let ask = |flow: &Flow| {
            while !stop.load(Ordering::Relaxed) {
                flow.server()?;
                asked.fetch_add(1, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(2));
            }
            Ok(())
        };
        let asking: Vec<_> = flows.iter().map(|flow| scope.spawn(move || ask(flow))).collect();
        let upgrade = || -> Result<()> {
            let agent = bed.take_agent(NODE)?;
            thread::sleep(OBSERVED);
            let status = agent.terminate()?;
            ensure!(status.success(), "the old agent ended with {status}");
            bed.start_agent(NODE)?;
            until_carried(bed)?;
            thread::sleep(OBSERVED);
            Ok(())
        };
        let upgraded = upgrade();
        stop.store(true, Ordering::Relaxed);
        let asked =
            asking.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        asked.collect::<Result<()>>().and(upgraded)
    })?;
    eprintln!("{} datagrams were answered", asked.load(Ordering::Relaxed));
    eventually(|| until_carried(bed))
}
