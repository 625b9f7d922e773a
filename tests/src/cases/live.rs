//! Services that change while connections exist.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::run::{answers, shares};
use crate::testbed::client::{self, ANSWER_TIMEOUT, HeldConnection};
use crate::testbed::flow::{self, Flow, open_all};
use crate::testbed::manifests::{Service, Slice, Via, ready};
use crate::testbed::turn::{ask_and_pause, in_turn};
use crate::testbed::{Answer, Backend, Family, Outcome, Request, Testbed, Transport};

use Via::{ClusterIp, LoadBalancerIp, NodePort};

/// The clients of the scenarios, each with the kind of address that it uses.
const WAYS: [(&str, Via); 3] = [("a3", ClusterIp), ("b3", ClusterIp), ("outside-1", NodePort("node-a"))];
const PAUSE: Duration = Duration::from_millis(10);

/// Runs `work` while clients open new connections to `targets`. Each client opens its connections
/// one after the other. Returns the answers.
///
/// # Errors
/// `work` fails, or a request is not answered.
pub fn while_asking(
    bed: &Testbed,
    targets: &[(&str, SocketAddr)],
    work: impl FnOnce() -> Result<()>,
) -> Result<Vec<Answer>> {
    let outcomes = outcomes_while_asking(bed, targets, ANSWER_TIMEOUT, work)?;
    let answered = |((from, to), outcomes): (&(&str, SocketAddr), _)| {
        answers(outcomes).with_context(|| format!("{from} asks {to} repeatedly"))
    };
    let all: Vec<Vec<Answer>> = targets.iter().zip(outcomes).map(answered).collect::<Result<_>>()?;
    Ok(all.into_iter().flatten().collect())
}

/// Like [`while_asking`]. Returns the outcomes of each target, also of requests that failed, such
/// as those without an answer before `timeout`: at least ten for each target, the last ones after
/// the end of `work` on a slow machine.
///
/// # Errors
/// `work` fails.
pub fn outcomes_while_asking(
    bed: &Testbed,
    targets: &[(&str, SocketAddr)],
    timeout: Duration,
    work: impl FnOnce() -> Result<()>,
) -> Result<Vec<Vec<Outcome>>> {
    let machines: Vec<_> = targets.iter().map(|(from, _)| bed.machines().machine(from)).collect::<Result<_>>()?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for ((_, to), machine) in targets.iter().zip(machines) {
            let stop = &stop;
            threads.push(scope.spawn(move || {
                machine.run(|| {
                    let mut outcomes = Vec::new();
                    let request = Request { timeout, ..Request::new(Transport::Tcp, *to) };
                    while !stop.load(Ordering::Relaxed) || outcomes.len() < 10 {
                        let ask = || in_turn(&request, || client::outcome(&request));
                        outcomes.push(ask_and_pause(targets.len(), PAUSE, ask));
                    }
                    Ok(outcomes)
                })
            }));
        }
        // The threads must also end if `work` panics.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        stop.store(true, Ordering::Relaxed);
        let joined = threads.into_iter().map(std::thread::ScopedJoinHandle::join);
        let all = joined.map(|outcomes| outcomes.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect();
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        all
    })
}

/// The clients of [`WAYS`] with the service's addresses, in both families.
pub fn targets(bed: &Testbed, service: &str) -> Result<Vec<(&'static str, SocketAddr)>> {
    let mut targets = Vec::new();
    for family in Family::BOTH {
        for (from, via) in WAYS {
            targets.push((from, bed.address(service, via, family, "tcp")?));
        }
    }
    Ok(targets)
}

/// Checks that exactly these servers answer all clients of [`WAYS`], over both families.
pub fn expect_servers(bed: &Testbed, service: &str, servers: &[&str]) -> Result<()> {
    expect_servers_at(bed, &targets(bed, service)?, servers)
}

/// Checks that exactly these servers answer each client at its address.
pub fn expect_servers_at(bed: &Testbed, targets: &[(&str, SocketAddr)], servers: &[&str]) -> Result<()> {
    for (from, to) in targets {
        let request = Request::new(Transport::Tcp, *to);
        let answers = answers(client::ask_many(bed.machines().machine(from)?, &request, 25 * servers.len())?)
            .with_context(|| format!("{from} asks {to}"))?;
        let mut expected = servers.to_vec();
        expected.sort_unstable();
        let shares = shares(&answers);
        ensure!(shares.keys().copied().eq(expected), "{from} asks {to}: answered by {shares:?}, expected {servers:?}");
    }
    Ok(())
}

/// Checks that the requests of all clients of [`WAYS`] are refused, over both families.
pub fn expect_refused(bed: &Testbed, service: &str) -> Result<()> {
    for (from, to) in targets(bed, service)? {
        let outcome = bed.machines().ask(from, &Request::new(Transport::Tcp, to))?;
        ensure!(outcome == Outcome::Refused, "{from} asks {to}: {outcome}, expected: refused");
    }
    Ok(())
}

/// Opens six connections for each client of [`WAYS`] and each family.
pub fn hold_connections(bed: &Testbed, service: &str) -> Result<Vec<HeldConnection>> {
    let mut held = Vec::new();
    for (from, to) in targets(bed, service)? {
        for _ in 0..6 {
            held.push(HeldConnection::open(bed.machines().machine(from)?, to)?);
        }
    }
    Ok(held)
}

/// An endpoint gets weight 0: its connections stay, and new connections go to the others, or are
/// refused if there is no other. Then it has its weight again.
pub fn weight_zero_keeps_connections(bed: &Testbed) -> Result<()> {
    let mut service = Service::new("weighed", &["a1"]);
    service.more_slices = vec![Slice { suffix: "second", ports: service.ports.clone(), endpoints: ready(&["b1"]) }];
    bed.update(|manifests| manifests.add(service))?;
    let mut held = hold_connections(bed, "weighed")?;
    let mut update = |what: &str, change: &dyn Fn(&mut Service)| {
        bed.update_service("weighed", change)?;
        held.iter_mut().try_for_each(HeldConnection::check).with_context(|| format!("connections, {what}"))
    };
    update("with weight 0", &|service| service.weight = Some(0))?;
    expect_servers(bed, "weighed", &["b1"])?;
    update("with weights 0 and 1", &|service| service.more_slices[0].endpoints.extend(ready(&["c1"])))?;
    expect_servers(bed, "weighed", &["b1", "c1"])?;
    update("with weight 50", &|service| service.weight = Some(50))?;
    expect_servers(bed, "weighed", &["a1", "b1", "c1"])?;
    bed.update_service("weighed", |service| (service.weight, service.more_slices) = (Some(0), Vec::new()))?;
    expect_refused(bed, "weighed")
}

/// Every endpoint is replaced, one after the other, as in a rolling update of a Deployment: a new
/// endpoint becomes ready, then an old endpoint is removed. No connection breaks, no new connection
/// is refused, and in the end only the new endpoints answer.
pub fn rolling_replacement(bed: &Testbed) -> Result<()> {
    bed.update(|manifests| manifests.add(Service::new("rolling", &["a1", "b1", "c1"])))?;
    let mut held = hold_connections(bed, "rolling")?;
    let answers = while_asking(bed, &targets(bed, "rolling")?, || {
        for (old, new) in [("a1", "a2"), ("b1", "b2"), ("c1", "b3")] {
            bed.update_service("rolling", |service| service.endpoints.extend(ready(&[new])))?;
            bed.update_service("rolling", |service| service.endpoints.retain(|endpoint| endpoint.name != old))?;
            for connection in &mut held {
                connection.check().with_context(|| format!("after {old} was replaced by {new}"))?;
            }
        }
        // In the last step, all endpoints are replaced at once.
        bed.set_endpoints("rolling", &["a1", "c1"])?;
        held.iter_mut().try_for_each(HeldConnection::check).context("after all endpoints were replaced at once")
    })?;
    let shares = shares(&answers);
    ensure!(
        ["a1", "b2", "b3"].iter().all(|server| shares.contains_key(server)),
        "only {shares:?} answered during the changes"
    );
    expect_servers(bed, "rolling", &["a1", "c1"])
}

/// The UDP clients, each with the kind of address that it uses.
const UDP_WAYS: [(&str, Via); 5] = [
    ("a3", ClusterIp),
    ("node-a", ClusterIp),
    ("b3", ClusterIp),
    ("outside-1", NodePort("node-a")),
    ("outside-2", LoadBalancerIp),
];

/// Every endpoint is replaced while UDP clients keep their sockets and send without a pause. If the
/// agent did not delete conntrack entries, the kernel would continue to send the packets of a
/// client to a removed endpoint. The clients of a removed endpoint must move to another endpoint at
/// once, and other clients must stay.
///
/// The agent must delete conntrack entries after it has written the rules. Otherwise the old rules
/// could create an entry again, and its client would stay at the old endpoint.
pub fn udp_rolling_replacement(bed: &Testbed) -> Result<()> {
    bed.update(|manifests| manifests.add(Service::new("datagrams", &["a1", "b1", "c1"])))?;
    let mut flows = Vec::new();
    // With this number of flows, every endpoint has at least one flow.
    for _ in 0..4 {
        flows.extend(open_all(bed, "datagrams", &UDP_WAYS)?);
    }
    let servers = || flows.iter().map(Flow::server).collect::<Result<Vec<_>>>();
    let stays = |flow: &Flow, before: &str| -> Result<()> {
        let now = flow.server()?;
        if now != before && bed.backend() == Backend::Userspace {
            // On a busy machine, a datagram may go past the agent. The session is still there.
            return flow.until_answered_by(before).map(drop);
        }
        ensure!(now == before, "a flow moved from {before} to {now}");
        Ok(())
    };
    servers()?;
    for (old, new) in [("a1", "a2"), ("b1", "b2"), ("c1", "b3")] {
        let context = || format!("{old} is replaced by {new}");
        let before = servers()?;
        flow::while_asking(&flows, || {
            bed.update_service("datagrams", |service| service.endpoints.extend(ready(&[new])))
        })?;
        let mut all = flows.iter().zip(&before);
        all.try_for_each(|(flow, before)| stays(flow, before)).with_context(|| format!("{new} was added"))?;
        let moving = before.iter().filter(|server| *server == old).count();
        ensure!(moving > 0, "{old} has no flow: {before:?}");
        flow::while_asking(&flows, || {
            bed.update_service("datagrams", |service| service.endpoints.retain(|endpoint| endpoint.name != old))
        })?;
        let is_elsewhere = |outcome: &Outcome| matches!(outcome, Outcome::Answered(answer) if answer.server != old);
        for (flow, before) in flows.iter().zip(&before) {
            if before == old {
                flow.until("answered by another endpoint", is_elsewhere).with_context(context)?;
            } else {
                stays(flow, before).with_context(context)?;
            }
        }
    }
    // One new endpoint replaces all endpoints. Only stale conntrack entries could keep a client
    // away from the new endpoint.
    flow::while_asking(&flows, || bed.set_endpoints("datagrams", &["c1"]))?;
    flows.iter().try_for_each(|flow| flow.until_answered_by("c1").map(drop))
}

/// A Service is added, scaled, gets other ports, is removed, and is added again. Another Service is
/// not disturbed.
pub fn services_are_added_changed_and_removed(bed: &Testbed) -> Result<()> {
    bed.update(|manifests| manifests.add(Service::new("neighbour", &["a1", "b1"])))?;
    let answers = while_asking(bed, &targets(bed, "neighbour")?, || {
        bed.update(|manifests| manifests.add(Service::new("fickle", &["a1"])))?;
        expect_servers(bed, "fickle", &["a1"])?;
        let old_targets = targets(bed, "fickle")?;
        for endpoints in [&["a1", "a2", "b1", "c1"][..], &["b2"], &["b2", "c1"]] {
            bed.set_endpoints("fickle", endpoints)?;
            expect_servers(bed, "fickle", endpoints)?;
        }
        bed.update_service("fickle", |service| service.ports[0].port = 81)?;
        expect_servers(bed, "fickle", &["b2", "c1"])?;
        // No server answers at a port that the service no longer has.
        let gone = bed.machines().ask("a3", &Request::new(Transport::Tcp, old_targets[0].1).expecting_silence())?;
        ensure!(!matches!(gone, Outcome::Answered(_)), "a request to the old port is still {gone}");
        bed.update_service("fickle", |service| service.ports[0].target_port = crate::testbed::plan::SECOND_LINE_PORT)?;
        let to = bed.address("fickle", ClusterIp, Family::V6, "tcp")?;
        match bed.machines().ask("a3", &Request::new(Transport::Tcp, to))? {
            Outcome::Answered(answer) => {
                ensure!(answer.port == 9090, "the request reached the old target port {}", answer.port);
            }
            other => bail!("after a change of the target port: {other}"),
        }
        let removed_targets = targets(bed, "fickle")?;
        bed.update(|manifests| manifests.remove("fickle").map(drop))?;
        for (from, to) in removed_targets {
            let outcome = bed.machines().ask(from, &Request::new(Transport::Tcp, to).expecting_silence())?;
            ensure!(!matches!(outcome, Outcome::Answered(_)), "{from} asks {to} of a removed service: {outcome}");
        }
        bed.update(|manifests| manifests.add(Service::new("fickle", &["c1"])))?;
        expect_servers(bed, "fickle", &["c1"])
    })?;
    let shares = shares(&answers);
    ensure!(shares.keys().eq(["a1", "b1"].iter()), "the other Service was answered by {shares:?}");
    Ok(())
}

/// A Service without endpoints refuses connections. The Service answers again when it has
/// endpoints.
pub fn scale_to_zero_and_back(bed: &Testbed) -> Result<()> {
    bed.update(|manifests| manifests.add(Service::new("idle", &["a1", "c1"])))?;
    for _ in 0..2 {
        expect_servers(bed, "idle", &["a1", "c1"])?;
        bed.update_service("idle", |service| service.endpoints.clear())?;
        expect_refused(bed, "idle")?;
        bed.set_endpoints("idle", &["a1", "c1"])?;
    }
    Ok(())
}
