//! Session affinity by client address.

use std::collections::BTreeSet;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::case::EVERY_TRANSPORT;
use super::run::{answers, shares};
use crate::testbed::manifests::{Service, Via, ready};
use crate::testbed::{Backend, Family, Outcome, Request, Testbed, Transport, client};

use Via::{ClusterIp, ExternalIp, LoadBalancerIp, NodePort};

/// The number of requests of one affinity check. Without affinity, one of four servers would answer
/// all eight requests with a probability of 1 in 16,000. The scenarios make this check about a
/// hundred times.
const REQUESTS: usize = 8;
/// Clients that send their requests to node-a, which therefore has all their affinity records.
const CLIENTS_OF_NODE_A: [&str; 6] = ["outside-1", "outside-2", "a3", "b3", "c2", "node-b"];

/// The server that answers all of [`REQUESTS`] requests of a client.
///
/// # Errors
/// More than one server answers, or a request is not answered.
fn only_server(bed: &Testbed, from: &str, service: &str, via: Via, family: Family, port: &str) -> Result<String> {
    let description = bed.service(service)?;
    let request = Request::new(description.port(port)?.transport, description.socket_address(via, family, port)?);
    let context = || format!("{from} asks {service} {port} by {via:?} over {family}");
    let answers =
        answers(client::ask_many(bed.machines().machine(from)?, &request, REQUESTS)?).with_context(context)?;
    let shares = shares(&answers);
    ensure!(shares.len() == 1, "{}: expected one server, but {shares:?} answered", context());
    Ok(answers[0].server.clone())
}

/// The ports whose clients reach servers.
fn transports(bed: &Testbed) -> impl Iterator<Item = &'static str> {
    EVERY_TRANSPORT.iter().copied().filter(|port| !(bed.backend().refuses_sctp() && *port == "sctp"))
}

/// A client stays with its server at all addresses of the service. The choices of different clients
/// are independent.
pub fn a_client_stays_with_its_server(bed: &Testbed) -> Result<()> {
    let mut seen = BTreeSet::new();
    for family in Family::BOTH {
        for port in transports(bed) {
            for from in CLIENTS_OF_NODE_A {
                seen.insert(only_server(bed, from, "sticky", NodePort("node-a"), family, port)?);
            }
            if bed.backend() == Backend::Ipvs {
                // IPVS has one affinity record for each virtual server.
                continue;
            }
            // The affinity record belongs to the service port, not to an address.
            for (from, ways) in [
                ("outside-1", [ClusterIp, NodePort("node-a"), ExternalIp, LoadBalancerIp]),
                ("a3", [LoadBalancerIp, ExternalIp, NodePort("node-a"), ClusterIp]),
            ] {
                let servers: BTreeSet<String> = ways
                    .into_iter()
                    .map(|via| only_server(bed, from, "sticky", via, family, port))
                    .collect::<Result<_>>()?;
                ensure!(servers.len() == 1, "{from} {port} over {family} by {ways:?} reached {servers:?}");
            }
        }
    }
    // Each of the six clients makes an independent choice for each of two families and four ports.
    // All 48 choices are the same server with a probability of 10⁻²⁸.
    ensure!(seen.len() > 1, "all clients reached {seen:?}, but they should be independent");
    Ok(())
}

/// A client keeps its server until the client has opened no connection for the whole affinity
/// time-out. The client then loses its server.
pub fn affinity_ends_after_its_timeout(bed: &Testbed) -> Result<()> {
    let service = bed.service("sticky-briefly")?;
    let timeout_seconds = service.affinity_timeout_seconds.context("sticky-briefly has no affinity time-out")?;
    if bed.backend() == Backend::Ipvs {
        return has_timeout(bed, &service, timeout_seconds);
    }
    let expires_over = |family| -> Result<()> {
        let ask_all = || -> Result<Vec<String>> {
            CLIENTS_OF_NODE_A
                .iter()
                .map(|from| {
                    let request = Request::new(
                        service.port("tcp")?.transport,
                        service.socket_address(NodePort("node-a"), family, "tcp")?,
                    );
                    let outcomes = client::ask_many(bed.machines().machine(from)?, &request, 1)?;
                    Ok(answers(outcomes)?.remove(0).server)
                })
                .collect()
        };
        let first = ask_all()?;
        // By chance all six clients choose their old servers with a probability of 1 in 4096. Three
        // such rounds in a row are practically impossible.
        let mut changed = false;
        for _ in 0..3 {
            std::thread::sleep(Duration::from_secs(u64::from(timeout_seconds) + 1));
            changed = ask_all()? != first;
            if changed {
                break;
            }
        }
        ensure!(changed, "over {family} all clients still reach {first:?} after the time-out");
        Ok(())
    };
    // The checks run in parallel, because they mostly wait. `expires_over` uses TCP and
    // `is_renewed` uses UDP. TCP and UDP ports have separate affinity records.
    std::thread::scope(|scope| {
        let expiring = Family::BOTH.map(|family| scope.spawn(move || expires_over(family)));
        let renewed = Family::BOTH.map(|family| scope.spawn(move || is_renewed(bed, family, timeout_seconds)));
        let join = |thread: ScopedJoinHandle<'_, Result<()>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        expiring.into_iter().chain(renewed).try_for_each(join)
    })
}

/// Checks the time-out of a virtual server. IPVS starts the time-out only when it forgets the
/// client's last connection, minutes after that connection has ended. A check with connections
/// would take too long.
fn has_timeout(bed: &Testbed, service: &Service, timeout_seconds: u32) -> Result<()> {
    let listed = bed.machines().machine("node-a")?.tool("ipvsadm", &["-Sn"])?;
    for family in Family::BOTH {
        let server = service.socket_address(ClusterIp, family, "tcp")?;
        let line = listed.lines().find(|line| line.starts_with(&format!("-A -t {server} ")));
        let line = line.with_context(|| format!("no virtual server {server}:\n{listed}"))?;
        ensure!(
            line.contains(&format!(" -p {timeout_seconds}")),
            "the affinity time-out is not {timeout_seconds} s: {line}"
        );
    }
    Ok(())
}

/// Checks that each connection restarts the time-out: clients that connect in time keep their
/// servers for longer than one time-out.
fn is_renewed(bed: &Testbed, family: Family, timeout_seconds: u32) -> Result<()> {
    let (service, timeout) = (bed.service("sticky-briefly")?, Duration::from_secs(timeout_seconds.into()));
    let request =
        Request::new(service.port("udp")?.transport, service.socket_address(NodePort("node-a"), family, "udp")?);
    let ask_all = || -> Result<Vec<String>> {
        let ask = |from: &&str| {
            let outcomes = client::ask_many(bed.machines().machine(from)?, &request, 1)?;
            Ok(answers(outcomes)?.remove(0).server)
        };
        CLIENTS_OF_NODE_A.iter().map(ask).collect()
    };
    // On a busy machine requests may be too late. In this case the check begins again.
    for _ in 0..20 {
        let (began, first) = (Instant::now(), ask_all()?);
        let mut earliest = began;
        while began.elapsed() < timeout * 2 + timeout / 2 {
            std::thread::sleep(timeout / 8);
            let (asked, now) = (Instant::now(), ask_all()?);
            if earliest.elapsed() >= timeout {
                break;
            }
            ensure!(now == first, "over {family} clients moved from {first:?} to {now:?} before the time-out");
            earliest = asked;
        }
        if earliest.elapsed() < timeout && began.elapsed() >= timeout * 2 {
            return Ok(());
        }
    }
    bail!("the machine is too busy to send requests before the time-out")
}

/// Affinity can be turned on and off. A client whose server is removed gets another server.
pub fn affinity_can_be_turned_on_and_off(bed: &Testbed) -> Result<()> {
    bed.update(|manifests| manifests.add(Service::new("toggled", &["a1", "a2", "b1", "c1"])))?;
    let spread = |context: &str| -> Result<()> {
        for family in Family::BOTH {
            let request = Request::new(
                bed.service("toggled")?.port("tcp")?.transport,
                bed.address("toggled", ClusterIp, family, "tcp")?,
            );
            let answers = answers(client::ask_many(bed.machines().machine("a3")?, &request, 60)?)?;
            let shares = shares(&answers);
            ensure!(shares.len() > 1, "{context}, over {family}: expected several servers, but {shares:?} answered");
        }
        Ok(())
    };
    spread("before affinity")?;
    bed.update_service("toggled", |service| service.affinity_timeout_seconds = Some(10_800))?;
    for family in Family::BOTH {
        let server = only_server(bed, "a3", "toggled", ClusterIp, family, "tcp")?;
        bed.update_service("toggled", |service| service.endpoints.retain(|endpoint| endpoint.name != server))?;
        let next = only_server(bed, "a3", "toggled", ClusterIp, family, "tcp")?;
        ensure!(next != server, "the removed {server} still answers over {family}");
    }
    bed.update_service("toggled", |service| service.affinity_timeout_seconds = None)?;
    spread("after affinity")
}

/// The endpoints of the Service `local` in [`with_local_policies`]: two on node-a, one on node-b.
const SPREAD: [&str; 3] = ["a1", "a2", "b1"];

/// Affinity together with the policy Local: a client reaches only endpoints that the policy allows,
/// even if its affinity record names another endpoint. The client stays with the endpoint that it
/// has reached. Affinity and policy can each be turned on and off.
pub fn with_local_policies(bed: &Testbed) -> Result<()> {
    bed.update(|manifests| {
        let service = Service::new("local", &SPREAD);
        let affinity_timeout_seconds = Some(10_800);
        manifests.add(Service { external_local: true, internal_local: true, affinity_timeout_seconds, ..service })
    })?;
    for family in Family::BOTH {
        for port in transports(bed) {
            sticks_within_policies(bed, family, port)?;
        }
    }
    let change = |change: &dyn Fn(&mut Service)| bed.update_service("local", change);
    let by_balancer = |family| only_server(bed, "outside-1", "local", LoadBalancerIp, family, "tcp");
    let now = |expected: &[&str], context: &str| {
        for family in Family::BOTH {
            let request = Request::new(Transport::Tcp, bed.address("local", LoadBalancerIp, family, "tcp")?);
            let answers = answers(client::ask_many(bed.machines().machine("outside-1")?, &request, 60)?)?;
            let found: Vec<&str> = shares(&answers).into_keys().collect();
            ensure!(found == expected, "{context}, over {family}: {found:?} answered, expected {expected:?}");
        }
        Ok(())
    };
    change(&|service| service.affinity_timeout_seconds = None)?;
    now(&["a1", "a2"], "without affinity")?;
    change(&|service| service.affinity_timeout_seconds = Some(10_800))?;
    let before = [by_balancer(Family::V4)?, by_balancer(Family::V6)?];
    // The affinity record survives changes of the policy, because both policies allow the endpoint
    // that the record names. A proxy has other records for each policy.
    for external_local in [false, true].into_iter().filter(|_| !bed.backend().carries_tcp()) {
        change(&|service| service.external_local = external_local)?;
        for (family, before) in Family::BOTH.into_iter().zip(&before) {
            let now = by_balancer(family)?;
            ensure!(
                now == *before,
                "{now} answers over {family} after the policy Local was set to {external_local}, expected {before}"
            );
        }
    }
    // A client whose server is removed gets an endpoint that the policy allows.
    for left in ["a2", "a1"] {
        change(&|service| service.endpoints = ready(&[left, "b1"]))?;
        now(&[left], "with one endpoint left on the node")?;
    }
    change(&|service| service.endpoints = ready(&["b1"]))?;
    for family in Family::BOTH {
        expect_silence(bed, "outside-1", LoadBalancerIp, family)?;
        let server = only_server(bed, "a3", "local", LoadBalancerIp, family, "tcp")?;
        ensure!(server == "b1", "the policy Local applies to a pod of the cluster: {server} answers");
    }
    change(&|service| service.external_local = false)?;
    for family in Family::BOTH {
        ensure!(by_balancer(family)? == "b1", "the only endpoint does not answer");
    }
    change(&|service| (service.endpoints, service.external_local) = (ready(&SPREAD), true))?;
    Family::BOTH.into_iter().try_for_each(|family| {
        let server = by_balancer(family)?;
        ensure!(server != "b1", "over {family} an affinity record selects an endpoint of another node");
        Ok(())
    })
}

/// Checks which endpoints each client reaches, for one port of a service with both policies Local.
fn sticks_within_policies(bed: &Testbed, family: Family, port: &str) -> Result<()> {
    let one_of = |from: &str, via: Via, servers: &[&str]| -> Result<String> {
        let server = only_server(bed, from, "local", via, family, port)?;
        ensure!(
            servers.contains(&&*server),
            "{from} by {via:?} over {family} {port}: {server} answers, expected one of {servers:?}"
        );
        Ok(server)
    };
    const ON_NODE_A: &[&str] = &["a1", "a2"];
    for from in ["outside-1", "node-b"] {
        one_of(from, NodePort("node-a"), ON_NODE_A)?;
    }
    let by_port = one_of("outside-1", NodePort("node-a"), ON_NODE_A)?;
    for via in [ExternalIp, LoadBalancerIp] {
        let server = one_of("outside-1", via, ON_NODE_A)?;
        ensure!(server == by_port, "{via:?} leads to {server} and the NodePort to {by_port}, expected one server");
    }
    one_of("outside-2", LoadBalancerIp, &["b1"])?;
    one_of("b3", ClusterIp, &["b1"])?;
    // At external addresses a pod reaches all endpoints, so its affinity record may name an
    // endpoint of another node. At the cluster address the policy still allows only endpoints of
    // the node.
    one_of("a3", LoadBalancerIp, &SPREAD)?;
    one_of("a3", ClusterIp, ON_NODE_A)?;
    one_of("node-a", NodePort("node-a"), &SPREAD)?;
    one_of("node-a", ClusterIp, ON_NODE_A)?;
    Ok(())
}

fn expect_silence(bed: &Testbed, from: &str, via: Via, family: Family) -> Result<()> {
    let request = Request::new(Transport::Tcp, bed.address("local", via, family, "tcp")?).expecting_silence();
    let outcome = bed.machines().ask(from, &request)?;
    ensure!(
        outcome == Outcome::TimedOut,
        "{from} by {via:?} over {family}: {outcome}, although the node has no endpoint"
    );
    Ok(())
}
