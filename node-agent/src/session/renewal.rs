//! Decides when to leave a stream because the agent's certificate was renewed.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::time::Instant;
use tracing::warn;

use super::tls::AgentTls;
use crate::backoff::jitter;

/// Shortest time between two checks for a renewed certificate.
const RETRY: Duration = Duration::from_secs(10);
/// The wait before a check whose time is too far away to be represented. No stream lasts this long.
const ONE_YEAR: Duration = Duration::from_secs(365 * 86_400);

/// Checks for a renewed certificate before the certificate of a stream expires, because the replica
/// ends the stream when the certificate expires.
pub(super) struct Renewal {
    tls: Arc<AgentTls>,
    /// When the certificate of the stream expires.
    not_after: SystemTime,
    /// When to check the files for another certificate.
    pub(super) check_at: Instant,
}

impl Renewal {
    /// Schedules the first check for a time when 5 to 10 % of the certificate's remaining lifetime
    /// are left. The moment is random, so that agents whose certificates expire together do not
    /// connect together.
    pub(super) fn new(tls: Arc<AgentTls>, not_after: SystemTime) -> Self {
        let left = not_after.duration_since(SystemTime::now()).unwrap_or_default();
        let wait = left.mul_f64(0.9) + jitter(left / 20);
        let now = Instant::now();
        Self { tls, not_after, check_at: now.checked_add(wait).unwrap_or(now + ONE_YEAR) }
    }

    /// Returns true if the files hold a certificate that expires later. Otherwise schedules the
    /// next check.
    pub(super) async fn is_renewed(&mut self) -> bool {
        // `load` logs errors of the files.
        if self.tls.load().await.is_ok_and(|loaded| loaded.validity.not_after > self.not_after) {
            return true;
        }
        let left = self.not_after.duration_since(SystemTime::now()).unwrap_or_default();
        warn!(
            left_seconds = left.as_secs(),
            "this agent's certificate expires soon, and the file of --tls-cert holds no newer certificate; renew the certificate"
        );
        self.check_at = Instant::now() + RETRY.max(left / 4);
        false
    }
}
