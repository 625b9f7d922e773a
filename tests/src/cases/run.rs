//! Runs cases on a testbed.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::case::{Case, Expect, SourceAddress};
use crate::testbed::manifests::Via;
use crate::testbed::{Answer, Family, Outcome, Request, Testbed, Transport, client, plan};

/// The number of cases that run in parallel. Cases spend most of their time waiting for time-outs.
const WORKERS: usize = 12;
/// The number of requests in a check for equal shares. With four servers, the expected number of
/// requests of a server is 75 ± 7.5.
const EVEN_REQUESTS: usize = 300;
/// The largest distance of a share from its expected value, in standard deviations. By chance about
/// one share in a million exceeds this distance. If a share exceeds this distance, the case sends
/// the requests again. The case fails only if a share of the second round also exceeds this
/// distance.
const EVEN_SIGMAS: f64 = 5.0;

/// Runs all cases, each for its ports and families.
///
/// # Errors
/// Some cases failed. The error lists all of them.
pub fn run(bed: &Testbed, cases: &[Case]) -> Result<()> {
    let mut jobs = Vec::new();
    for case in cases {
        if let Some((_, reason)) = case.excluded.iter().find(|(backend, _)| *backend == bed.backend()) {
            eprintln!("skipped for {}: {case:?}: {reason}", bed.backend());
            continue;
        }
        for family in case.families {
            jobs.extend(case.ports.iter().map(|port| (case, *family, *port)));
        }
    }
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..WORKERS.min(jobs.len()) {
            scope.spawn(|| {
                while let Some((case, family, port)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = check_patiently(bed, case, *family, port) {
                        let Case { from, service, via, expect, .. } = case;
                        let failure = format!(
                            "{from} asks {service} {port} by {via:?} over {family}: {error:#}; expected {expect:?}"
                        );
                        failures.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(failure);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    ensure!(
        failures.is_empty(),
        "{} of {} cases failed with {}:\n  {}",
        failures.len(),
        jobs.len(),
        bed.backend(),
        failures.join("\n  ")
    );
    Ok(())
}

/// Does a check. On a busy machine, an agent may be late, and connections then go past its proxy
/// until the agent has its turn. A check of a proxy is therefore done up to ten times.
fn check_patiently(bed: &Testbed, case: &Case, family: Family, port: &str) -> Result<()> {
    let transport = bed.service(case.service)?.port(port)?.transport;
    let is_carried = matches!(case.expect, Expect::Answered { .. }) && bed.backend().carries(transport, case.via);
    let attempts = if is_carried { 10 } else { 1 };
    let mut result = check(bed, case, family, port);
    for _ in 1..attempts {
        if result.is_err() {
            std::thread::sleep(Duration::from_millis(500));
            result = check(bed, case, family, port);
        }
    }
    result
}

fn check(bed: &Testbed, case: &Case, family: Family, port: &str) -> Result<()> {
    let service = bed.service(case.service)?;
    let request = Request::new(service.port(port)?.transport, service.socket_address(case.via, family, port)?);
    let client = bed.machines().machine(case.from)?;
    let is_refused = bed.backend().refuses_sctp() && request.transport == Transport::Sctp;
    match &case.expect {
        Expect::Answered { .. } if is_refused => {
            let outcome = client::ask(client, &request)?;
            ensure!(outcome == Outcome::Refused, "{outcome}, although mode userspace refuses SCTP");
        }
        // The check of source ranges, which drops packets, comes before the refusal.
        Expect::Dropped if is_refused => {
            let outcome = client::ask(client, &request.expecting_silence())?;
            ensure!(!matches!(outcome, Outcome::Answered(_)), "{outcome}, although mode userspace refuses SCTP");
        }
        Expect::Refused => {
            let outcome = client::ask(client, &request)?;
            ensure!(outcome == Outcome::Refused, "{outcome}");
        }
        Expect::Dropped | Expect::Gone => {
            // A packet that is not translated leaves a conntrack entry without translation. The
            // entry would also match a later request from the same port, so each request has a new
            // port.
            let request = request.expecting_silence();
            let ask = |port| client::ask(client, &Request { from_port: Some(port), ..request });
            let (_, outcome) = client::ask_from_low_port(ask)?;
            let may_be_refused = matches!(case.expect, Expect::Gone) && bed.backend().binds_addresses();
            ensure!(outcome == Outcome::TimedOut || (may_be_refused && outcome == Outcome::Refused), "{outcome}");
        }
        Expect::Answered { by, source, even } => {
            let ask = || match even {
                true => answers(client::ask_many(client, &request, EVEN_REQUESTS)?),
                false => answers(client::ask_all(client, &request, by.len())?),
            };
            let mut answers = ask()?;
            check_servers(&answers, by)?;
            if *even && check_even(&answers, by.len()).is_err() {
                let more = ask()?;
                check_servers(&more, by)?;
                check_even(&more, by.len())?;
                answers.extend(more);
            }
            for answer in &answers {
                let target_port = service.target_port(&answer.server, port)?;
                ensure!(answer.port == target_port, "{} was reached at port {}", answer.server, answer.port);
                let source = match source {
                    SourceAddress::Kept if bed.backend().carries_to(request.transport, case.via, by) => {
                        let entry = match case.via {
                            Via::NodePort(node) => Some(node),
                            _ => plan::entry_of(case.from),
                        };
                        SourceAddress::Masqueraded(entry.context("no node gets the request")?)
                    }
                    source => *source,
                };
                check_source(answer, case.from, source, family)?;
            }
            if *source == SourceAddress::Masqueraded(case.from) {
                check_port_changes(bed, case.from, &request)?;
            }
        }
    }
    Ok(())
}

/// The answers in `outcomes`.
///
/// # Errors
/// An outcome is not an answer.
pub(super) fn answers(outcomes: Vec<Outcome>) -> Result<Vec<Answer>> {
    let asked = outcomes.len();
    let answer = |(index, outcome)| match outcome {
        Outcome::Answered(answer) => Ok(answer),
        other => bail!("request {} of {asked}: {other}", index + 1),
    };
    outcomes.into_iter().enumerate().map(answer).collect()
}

/// The number of answers of each server.
pub(super) fn shares(answers: &[Answer]) -> BTreeMap<&str, usize> {
    let mut shares = BTreeMap::new();
    for answer in answers {
        *shares.entry(answer.server.as_str()).or_default() += 1;
    }
    shares
}

fn check_servers(answers: &[Answer], by: &[&str]) -> Result<()> {
    let shares = shares(answers);
    let mut expected = by.to_vec();
    expected.sort_unstable();
    ensure!(shares.keys().copied().eq(expected), "answered by {shares:?}");
    Ok(())
}

fn check_even(answers: &[Answer], servers: usize) -> Result<()> {
    let shares = shares(answers);
    #[allow(clippy::cast_precision_loss)] // The numbers are at most some hundreds.
    let (count, servers) = (answers.len() as f64, servers as f64);
    let expected = count / servers;
    let bound = EVEN_SIGMAS * (expected * (1.0 - 1.0 / servers)).sqrt();
    for (server, share) in &shares {
        #[allow(clippy::cast_precision_loss)]
        let distance = (*share as f64 - expected).abs();
        ensure!(
            distance <= bound,
            "{server} got {share} of {count} requests, expected {expected:.0} ± {bound:.0}: {shares:?}"
        );
    }
    Ok(())
}

fn address(machine: &str, family: Family) -> Result<IpAddr> {
    Ok(plan::address(machine).with_context(|| format!("{machine} has no address"))?.of(family))
}

fn check_source(answer: &Answer, from: &str, source: SourceAddress, family: Family) -> Result<()> {
    let expected = match source {
        SourceAddress::Kept => address(from, family)?,
        SourceAddress::Masqueraded(node) => address(node, family)?,
    };
    ensure!(
        answer.source.ip() == expected,
        "{} saw the source {}, expected {expected}",
        answer.server,
        answer.source.ip()
    );
    Ok(())
}

/// Checks that a node which masquerades its own requests changes their source ports. The node's
/// address stays the same, so only the ports show the masquerading.
fn check_port_changes(bed: &Testbed, from: &str, request: &Request) -> Result<()> {
    for _ in 0..4 {
        let ask = |port| bed.machines().ask(from, &Request { from_port: Some(port), ..*request });
        let (port, outcome) = client::ask_from_low_port(ask)?;
        match outcome {
            Outcome::Answered(answer) if answer.source.port() != port => return Ok(()),
            // By chance the kernel may choose the original port.
            Outcome::Answered(_) => {}
            other => bail!("a request from port {port}: {other}"),
        }
    }
    bail!("the node's source ports were kept, so its requests were not masqueraded")
}
