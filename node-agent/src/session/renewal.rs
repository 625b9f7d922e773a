//! When a stream is left because the agent's certificate was renewed.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::time::Instant;
use tracing::warn;

use super::tls::AgentTls;
use crate::backoff::jitter;

/// Shortest time between two looks for a renewed certificate.
const RETRY: Duration = Duration::from_secs(10);
/// Longer than any stream lasts.
const ONE_YEAR: Duration = Duration::from_secs(365 * 86_400);

/// Leaves a stream in time for a renewed certificate: the replica ends the stream when the
/// certificate expires with which it was made.
pub(super) struct Renewal {
    tls: Arc<AgentTls>,
    /// When the certificate of the stream expires.
    not_after: SystemTime,
    /// When to look for another certificate.
    pub(super) look_at: Instant,
}

impl Renewal {
    /// The first look is when between 5 and 10 % of the time are left, so that agents with
    /// certificates of the same age do not all connect at once.
    pub(super) fn new(tls: Arc<AgentTls>, not_after: SystemTime) -> Self {
        let left = not_after.duration_since(SystemTime::now()).unwrap_or_default();
        let wait = left.mul_f64(0.9) + jitter(left / 20);
        let now = Instant::now();
        Self { tls, not_after, look_at: now.checked_add(wait).unwrap_or(now + ONE_YEAR) }
    }

    /// True when the files hold a certificate that lasts longer. Otherwise sets the time of the
    /// next look.
    pub(super) async fn is_done(&mut self) -> bool {
        // `load` logs what is wrong with the files.
        if self.tls.load().await.is_ok_and(|loaded| loaded.validity.not_after > self.not_after) {
            return true;
        }
        let left = self.not_after.duration_since(SystemTime::now()).unwrap_or_default();
        warn!(
            left_seconds = left.as_secs(),
            "this agent's certificate expires soon, and --tls-cert holds no newer one; renew it"
        );
        self.look_at = Instant::now() + RETRY.max(left / 4);
        false
    }
}
