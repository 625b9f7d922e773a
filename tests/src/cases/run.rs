//! Running cases against a testbed.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail, ensure};

use super::case::{Case, Expect, SourceAddress};
use crate::testbed::{Answer, Family, Outcome, Request, Testbed, client, plan};

/// Cases that run at once. Most of their time is waiting for silence.
const WORKERS: usize = 12;
/// Requests that show an even spread: with four servers each expects 75 ± 7.5 of them.
const EVEN_REQUESTS: usize = 300;
/// Bound on a share's distance from its expectation, in standard deviations. Chance exceeds it once
/// in a million shares, of which a run of all tests has some hundreds; so who exceeds it is asked
/// for as many more, and only twice in a row is uneven.
const EVEN_SIGMAS: f64 = 5.0;

/// Runs all cases, each for its ports and families; an error lists everything that did not behave.
pub fn run(bed: &Testbed, cases: &[Case]) -> Result<()> {
    let mut jobs = Vec::new();
    for case in cases {
        if let Some((_, reason)) = case.excluded.iter().find(|(backend, _)| *backend == bed.backend()) {
            eprintln!("not for {}: {case:?}: {reason}", bed.backend());
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
                    if let Err(error) = check(bed, case, *family, port) {
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

fn check(bed: &Testbed, case: &Case, family: Family, port: &str) -> Result<()> {
    let service = bed.service(case.service)?;
    let request = Request::new(service.port(port)?.transport, service.socket_address(case.via, family, port)?);
    let client = bed.machines().machine(case.from)?;
    match &case.expect {
        Expect::Refused => {
            let outcome = client::ask(client, &request)?;
            ensure!(outcome == Outcome::Refused, "{outcome}");
        }
        Expect::Dropped | Expect::Gone => {
            // What nobody translated leaves a conntrack entry that says so. It must not meet a
            // later request that is to be answered.
            let request = request.expecting_silence();
            let ask = |port| client::ask(client, &Request { from_port: Some(port), ..request });
            let (_, outcome) = client::ask_from_low_port(ask)?;
            let may_be_refused = matches!(case.expect, Expect::Gone) && bed.backend().binds_addresses();
            ensure!(outcome == Outcome::TimedOut || (may_be_refused && outcome == Outcome::Refused), "{outcome}");
        }
        Expect::Answered { by, source, even } => {
            let count = if *even { EVEN_REQUESTS } else { requests_to_see_all(by.len()) };
            let ask = || answers(client::ask_many(client, &request, count)?);
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
                check_source(answer, case.from, *source, family)?;
            }
            if *source == SourceAddress::Masqueraded(case.from) {
                check_port_changes(bed, case.from, &request)?;
            }
        }
    }
    Ok(())
}

/// So many that missing one of `servers` by chance is out of the question: below 10⁻⁹.
fn requests_to_see_all(servers: usize) -> usize {
    match servers {
        0 | 1 => 3,
        2 => 31,
        3 => 54,
        4 => 77,
        // A little more than is needed.
        more => 24 * more,
    }
}

/// The answers in `outcomes`; an error shows the first outcome that is none.
pub(super) fn answers(outcomes: Vec<Outcome>) -> Result<Vec<Answer>> {
    let asked = outcomes.len();
    let answer = |(index, outcome)| match outcome {
        Outcome::Answered(answer) => Ok(answer),
        other => bail!("request {} of {asked}: {other}", index + 1),
    };
    outcomes.into_iter().enumerate().map(answer).collect()
}

/// How often each server answered.
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
    #[allow(clippy::cast_precision_loss)] // some hundreds
    let (count, servers) = (answers.len() as f64, servers as f64);
    let expected = count / servers;
    let bound = EVEN_SIGMAS * (expected * (1.0 - 1.0 / servers)).sqrt();
    for (server, share) in &shares {
        #[allow(clippy::cast_precision_loss)]
        let distance = (*share as f64 - expected).abs();
        ensure!(distance <= bound, "{server} got {share} of {count} requests, more than {bound:.0} off: {shares:?}");
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
    ensure!(answer.source.ip() == expected, "{} saw {}, not {expected}", answer.server, answer.source.ip());
    Ok(())
}

/// A node that is masqueraded as itself shows it by its ports only: they are drawn anew.
fn check_port_changes(bed: &Testbed, from: &str, request: &Request) -> Result<()> {
    for _ in 0..4 {
        let ask = |port| bed.machines().ask(from, &Request { from_port: Some(port), ..*request });
        let (port, outcome) = client::ask_from_low_port(ask)?;
        match outcome {
            Outcome::Answered(answer) if answer.source.port() != port => return Ok(()),
            // Chance may draw the same port again, though hardly ever.
            Outcome::Answered(_) => {}
            other => bail!("a request from a chosen port: {other}"),
        }
    }
    bail!("the node's own ports were kept: it was not masqueraded")
}
