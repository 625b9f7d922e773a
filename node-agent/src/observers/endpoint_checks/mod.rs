//! Active health checks of endpoints: sockets, timers and metrics.
//!
//! [`headgate_core::endpoint_health`] decides when each endpoint is checked, and what a result
//! means. The checker writes failing endpoints into the node's facts. The reconcile loop then
//! programs the services whose endpoints began to fail or recovered. Endpoint checks work with
//! every dataplane.

pub mod metrics;
mod targets;
#[cfg(test)]
mod tests;

use std::{io, sync::Arc, time::Duration};

use headgate_core::{
    NodeFacts, ServiceKey,
    endpoint_health::{Check, CheckTiming, FailingEndpoints, FairCheck, FairChecks, ServiceTargets},
    turns::Turns,
};
use tokio::{net::TcpStream, task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::{
    backoff::passed,
    observers::{Changes, Follower, Mailbox, endpoint_checks::metrics::EndpointCheckMetrics},
    state::AgentState,
};

/// Maximum number of checks that run at a time. Further checks wait.
pub const MAX_RUNNING: usize = 256;
/// How many lines about the endpoints of a namespace the log gets at once, and the time after which
/// it gets one more.
const LINES_AT_ONCE: u32 = 10;
const LINE_INTERVAL: Duration = Duration::from_secs(6);

/// Returns the observer that collects the endpoints to check, and the checker. The caller runs the
/// checker on the async runtime. `namespaces` are those in which Services may ask for checks:
/// names, or `*` for all.
#[must_use]
pub fn new(
    namespaces: Vec<String>,
    timing: CheckTiming,
    shared: Arc<AgentState>,
    metrics: EndpointCheckMetrics,
) -> (Follower<ServiceTargets>, Checker) {
    let noted = Arc::clone(&shared);
    let (follower, mailbox) = Follower::new(move |state, key, node| {
        let (found, reason) = targets::targets(state, key, node, &namespaces);
        noted.set_unchecked(key, reason);
        found
    });
    let checks = FairChecks::new(timing, fastrand::u64(..), MAX_RUNNING);
    let (reported, started) = (FailingEndpoints::default(), Instant::now());
    let lines = Turns::new(LINE_INTERVAL, LINES_AT_ONCE);
    (follower, Checker { mailbox, shared, metrics, checks, reported, started, lines })
}

/// Checks endpoints in the network namespace of the runtime's threads, at most [`MAX_RUNNING`] at a
/// time.
#[derive(Debug)]
pub struct Checker {
    mailbox: Mailbox<ServiceTargets>,
    shared: Arc<AgentState>,
    metrics: EndpointCheckMetrics,
    checks: FairChecks,
    /// A copy of the failing endpoints in the node's facts. The checker locks the state only if the
    /// failing endpoints change.
    reported: FailingEndpoints,
    started: Instant,
    /// The lines of the log about each namespace.
    lines: Turns<String>,
}

impl Checker {
    /// Checks the endpoints until `shutdown`.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut running = JoinSet::new();
        loop {
            for check in self.checks.start(self.now_ms()) {
                running.spawn(async move { (check.clone(), connect(check.1).await) });
            }
            let due_at = self.checks.next_due_ms().map(|at_ms| self.started + Duration::from_millis(at_ms));
            let changed = tokio::select! {
                () = shutdown.cancelled() => return,
                changes = self.mailbox.take() => self.take(changes),
                Some(joined) = running.join_next(), if !running.is_empty() => match joined {
                    Ok((check, result)) => self.finish(&check, &result),
                    // The tasks do not panic, and nothing aborts them.
                    Err(_) => Vec::new(),
                },
                () = passed(due_at) => Vec::new(),
            };
            self.report(changed).await;
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn take(&mut self, changes: Changes<ServiceTargets>) -> Vec<Arc<ServiceKey>> {
        let now_ms = self.now_ms();
        let take = |(key, wanted)| {
            self.checks.set_service(&key, wanted, now_ms);
            key
        };
        changes.into_iter().map(take).collect()
    }

    fn finish(&mut self, check: &FairCheck, result: &io::Result<()>) -> Vec<Arc<ServiceKey>> {
        let (outcome, label) = match result {
            Ok(()) => (Some(true), "passed"),
            Err(error) if is_local_error(error) => (None, "not_made"),
            Err(_) => (Some(false), "failed"),
        };
        let changed = self.checks.finish(check, outcome, self.now_ms());
        let (namespace, Check { address, .. }) = check;
        if !changed.is_empty() && self.lines.take(namespace.to_string(), Instant::now().into()).is_ok() {
            match result {
                Ok(()) => info!(%namespace, endpoint = %address, "an endpoint passes its health checks again"),
                Err(error) => {
                    info!(%namespace, endpoint = %address, %error, "an endpoint fails its health checks; it gets no new connections while other endpoints of its service pass");
                }
            }
        }
        self.metrics.checked(label);
        changed
    }

    /// Updates the metrics, and writes the failing endpoints of these services to the node's facts.
    async fn report(&mut self, changed: Vec<Arc<ServiceKey>>) {
        let (checked, failing) = self.checks.counts();
        self.metrics.counted(checked, failing);
        let mut news = Vec::new();
        for key in changed {
            let failing = self.checks.failing(&key);
            if self.reported.set(&key, failing.clone()) {
                news.push((key, failing));
            }
        }
        if !news.is_empty() {
            let change = |facts: &mut NodeFacts| {
                let changed = news.into_iter().filter(|(key, failing)| facts.failing.set(key, failing.clone()));
                changed.map(|(key, _)| key).collect()
            };
            self.shared.blocking(|shared| shared.change_facts(change)).await;
        }
    }
}

/// Makes one check: opens a TCP connection to the endpoint and closes it at once.
async fn connect(check: Check) -> io::Result<()> {
    let timeout = Duration::from_millis(check.timeout_ms.into());
    match tokio::time::timeout(timeout, TcpStream::connect(check.address)).await {
        Ok(connected) => connected.map(drop),
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {timeout:?}"))),
    }
}

/// True if the check failed for a reason on this machine, such as a lack of file descriptors. In
/// this case, it is unknown whether the endpoint works.
fn is_local_error(error: &io::Error) -> bool {
    let local = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM, libc::EADDRNOTAVAIL, libc::EAFNOSUPPORT];
    error.raw_os_error().is_some_and(|code| local.contains(&code))
}
