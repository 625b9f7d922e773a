//! Active health checks of endpoints: the sockets, the clock and the counting.
//!
//! What is checked when, and what follows from it, [`headgate_core::endpoint_health`] decides. Failing endpoints go into the state, as this node's own
//! knowledge, and the reconcile loop programs the services whose endpoints began to fail or recovered. It works for every backend.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeSet, HashMap},
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{
    ServiceKey,
    endpoint_health::{Check, CheckTiming, Checks, ServiceTargets, targets},
};
use tokio::{net::TcpStream, task::JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::{
    companion::{Changes, Follower, Mailbox},
    metrics::{CheckResult, Metrics},
    shared::Shared,
};

/// Most checks at a time. Those that are due beyond that wait.
pub const MAX_RUNNING: usize = 256;

/// The companion that follows what services ask for, and the checker to be run on the async runtime.
#[must_use]
pub fn new(timing: CheckTiming, shared: Arc<Shared>, metrics: Arc<Metrics>) -> (Follower<ServiceTargets>, Checker) {
    let (follower, mailbox) = Follower::new(targets);
    let checks = Checks::new(timing, fastrand::u64(..));
    let told = HashMap::new();
    (follower, Checker { mailbox, shared, metrics, checks, told, started: Instant::now() })
}

/// Checks endpoints in the network namespace of the runtime's threads, at most [`MAX_RUNNING`] at a time.
#[derive(Debug)]
pub struct Checker {
    mailbox: Arc<Mailbox<ServiceTargets>>,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    checks: Checks,
    /// What the state was told to fail.
    told: HashMap<Arc<ServiceKey>, BTreeSet<SocketAddr>>,
    started: Instant,
}

impl Checker {
    /// Checks until `shutdown`.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut running = JoinSet::new();
        loop {
            for check in self.checks.start(self.now_ms(), MAX_RUNNING - running.len()) {
                running.spawn(async move { (check, connect(check).await) });
            }
            let pause = self.checks.next_due_ms().filter(|_| running.len() < MAX_RUNNING).map(|at| self.pause(at));
            let changed = tokio::select! {
                () = shutdown.cancelled() => return,
                changes = self.mailbox.take() => self.take(changes),
                Some(joined) = running.join_next(), if !running.is_empty() => match joined {
                    Ok((check, result)) => self.finish(&check, &result),
                    // Tasks neither panic nor are they aborted.
                    Err(_) => Vec::new(),
                },
                () = sleep(pause) => Vec::new(),
            };
            self.tell(changed).await;
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn pause(&self, at_ms: u64) -> Duration {
        Duration::from_millis(at_ms.saturating_sub(self.now_ms()))
    }

    fn take(&mut self, changes: Changes<ServiceTargets>) -> Vec<Arc<ServiceKey>> {
        let now_ms = self.now_ms();
        let take = |(key, wanted)| {
            self.checks.set_service(&key, wanted, now_ms);
            key
        };
        changes.into_iter().map(take).collect()
    }

    fn finish(&mut self, check: &Check, result: &io::Result<()>) -> Vec<Arc<ServiceKey>> {
        let now_ms = self.now_ms();
        let (result, changed) = match result {
            Ok(()) => (CheckResult::Passed, self.checks.finish(check, true, now_ms)),
            Err(error) if is_ours(error) => {
                self.checks.skip(check, now_ms);
                (CheckResult::NotMade, Vec::new())
            }
            Err(error) => {
                let changed = self.checks.finish(check, false, now_ms);
                if !changed.is_empty() {
                    info!(endpoint = %check.address, %error, "an endpoint fails its health checks: new connections are kept off it");
                }
                (CheckResult::Failed, changed)
            }
        };
        if result == CheckResult::Passed && !changed.is_empty() {
            info!(endpoint = %check.address, "an endpoint passes its health checks again");
        }
        self.metrics.endpoint_health.checked(result);
        changed
    }

    /// Puts into the state what changed for these services.
    async fn tell(&mut self, changed: Vec<Arc<ServiceKey>>) {
        let mut news = Vec::new();
        for key in changed {
            let failing = self.checks.failing(&key);
            let before = if failing.is_empty() {
                self.told.remove(&key).unwrap_or_default()
            } else {
                self.told.insert(Arc::clone(&key), failing.clone()).unwrap_or_default()
            };
            if before != failing {
                news.push((key, failing));
            }
        }
        self.metrics.endpoint_health.counted(self.checks.len(), self.checks.failing_count());
        if !news.is_empty() {
            let shared = Arc::clone(&self.shared);
            // The state's lock may be held for a while. The task fails only when the runtime ends.
            let _ = tokio::task::spawn_blocking(move || shared.set_failing(news)).await;
        }
    }
}

async fn sleep(pause: Option<Duration>) {
    match pause {
        Some(pause) => tokio::time::sleep(pause).await,
        None => std::future::pending().await,
    }
}

/// One check: the endpoint accepts a connection, which is closed at once.
async fn connect(check: Check) -> io::Result<()> {
    let timeout = Duration::from_millis(check.timeout_ms.into());
    match tokio::time::timeout(timeout, TcpStream::connect(check.address)).await {
        Ok(connected) => connected.map(drop),
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {timeout:?}"))),
    }
}

/// This machine has no means to make the check, which says nothing about the endpoint.
fn is_ours(error: &io::Error) -> bool {
    let ours = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM, libc::EADDRNOTAVAIL, libc::EAFNOSUPPORT];
    error.raw_os_error().is_some_and(|code| ours.contains(&code))
}
