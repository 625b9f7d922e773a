//! Failures of lists and watches, their remedies, and the pauses before retries.

use std::{error::Error, time::Duration};

use headgate_core::errors::chain;
use http::StatusCode;
use kube::core::Status;

use crate::objects::ObjectKind;

/// Upper bound of the first pause, which is random.
const FIRST_PAUSE: Duration = Duration::from_millis(200);

/// Upper bound of the random pause, and of the pause that a server asks for.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Why a request failed, or a watch ended early. Every failure is retried.
#[derive(Debug)]
pub(super) struct Failure {
    /// The value of the metric label `reason`.
    pub(super) reason: &'static str,
    /// What happened and what to do about it.
    pub(super) message: String,
    /// True if the watch cannot continue from its position, so the kind must be listed again.
    pub(super) needs_list: bool,
    /// The HTTP status code, if the server has answered.
    pub(super) code: Option<StatusCode>,
    /// The pause that the server asks for.
    pub(super) retry_after: Option<Duration>,
}

impl Failure {
    fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), needs_list: false, code: None, retry_after: None }
    }

    /// The server sent an answer that violates the protocol. An event may be lost, so the watch is
    /// opened again after the last event that was decoded. If it breaks there again, the kind is
    /// listed.
    pub(super) fn malformed(message: impl std::fmt::Display) -> Self {
        Self::new("malformed_answer", format!("the server sent an invalid answer: {message}"))
    }

    /// The connection broke.
    pub(super) fn dropped(error: &(dyn Error + 'static)) -> Self {
        Self::new("connection_lost", format!("the connection broke: {}", chain(error)))
    }

    /// The answer ended in the middle of an object.
    pub(super) fn cut() -> Self {
        Self::new("connection_lost", "the answer ended in the middle of an object")
    }

    /// Nothing arrived for `time`. `what` is the first part of the message, such as "nothing
    /// arrived in a watch".
    pub(super) fn silent(what: &str, time: Duration) -> Self {
        Self::new("timeout", format!("{what} for {} seconds", time.as_secs()))
    }

    /// A streaming list ended before it was complete.
    pub(super) fn incomplete_list() -> Self {
        Self::new("list_incomplete", "the server ended a streaming list before it was complete")
    }

    /// The newest version at the server is older than a version that the server sent before.
    pub(super) fn went_back(ours: u64, theirs: u64) -> Self {
        let message = format!(
            "the server is at version {theirs}, but has sent version {ours} before, as after the restore of a backup: \
             everything is listed again"
        );
        Self { needs_list: true, ..Self::new("source_went_back", message) }
    }

    /// The server did not answer the request.
    pub(super) fn request(error: &kube::Error) -> Self {
        let message =
            format!("a request to the API server failed: {}: check the address and the network", chain(error));
        match error {
            kube::Error::Auth(_) => Self::new("unauthorized", message),
            _ => Self::new("connection_failed", message),
        }
    }

    /// An answer with an error code to a request that needs the right `verb`.
    pub(super) fn answer(kind: ObjectKind, verb: &str, code: StatusCode, status: Option<&Status>) -> Self {
        let said = status.map_or_else(|| code.to_string(), |status| format!("{} ({})", status.message, code.as_u16()));
        let resource = kind.rbac_resource();
        let (reason, message) = match code {
            StatusCode::UNAUTHORIZED => {
                ("unauthorized", format!("{said}: the credentials are not accepted; check the token or the kubeconfig"))
            }
            StatusCode::FORBIDDEN => {
                let message =
                    format!("{said}: allow the verb {verb:?} on {resource} in the ClusterRole of this account");
                ("forbidden", message)
            }
            StatusCode::NOT_FOUND => ("not_found", format!("{said}: the server does not serve {resource}")),
            StatusCode::GONE => ("watch_expired", format!("{said}: everything is listed again")),
            StatusCode::TOO_MANY_REQUESTS => ("throttled", said),
            _ if code.is_server_error() => ("server_error", said),
            _ => ("refused", said),
        };
        let retry_after = status.and_then(|status| status.details.as_ref()).map(|details| details.retry_after_seconds);
        let retry_after = retry_after.filter(|seconds| *seconds > 0).map(|seconds| Duration::from_secs(seconds.into()));
        let needs_list = code == StatusCode::GONE;
        Self { needs_list, code: Some(code), retry_after, ..Self::new(reason, message) }
    }

    /// An ERROR event inside a watch.
    pub(super) fn event(kind: ObjectKind, status: &Status) -> Self {
        let code = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let expired = matches!(status.reason.as_str(), "Expired" | "Gone");
        let code = if expired { StatusCode::GONE } else { code };
        Self::answer(kind, "watch", code, Some(status))
    }

    /// Whether the server sent an error of its own, or a line that cannot be decoded. The same may
    /// happen at each attempt to continue at this version.
    pub(super) fn is_fault_of_server(&self) -> bool {
        matches!(self.reason, "malformed_answer" | "server_error" | "refused")
    }

    /// Whether the answer means that the server has no streaming lists. API servers with the
    /// feature disabled answer 422. Proxies in front of API servers answer with one of the other
    /// codes below.
    pub(super) fn refuses_streaming(&self) -> bool {
        self.code.is_some_and(|code| matches!(code.as_u16(), 400 | 405 | 406 | 415 | 422 | 501))
    }
}

/// Pauses between retries: random times between 0 and a bound that doubles with each failure. The
/// pauses are random so that replicas do not retry together.
#[derive(Debug, Default)]
pub(crate) struct BackOff {
    failures: u32,
    pub(super) rng: fastrand::Rng,
}

impl BackOff {
    /// A back-off before the first failure, which draws its pauses from `rng`.
    pub(super) fn new(rng: fastrand::Rng) -> Self {
        Self { failures: 0, rng }
    }

    /// Returns to the first bound.
    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }

    /// The time to wait before the next retry. `retry_after` is the pause that the server asks for.
    /// A random pause is added to `retry_after`.
    pub(crate) fn pause(&mut self, retry_after: Option<Duration>) -> Duration {
        let bound = FIRST_PAUSE.saturating_mul(1 << self.failures.min(16)).min(LONGEST_PAUSE);
        self.failures = self.failures.saturating_add(1);
        let drawn = bound.mul_f64(self.rng.f64());
        retry_after.map_or(drawn, |asked| asked.min(LONGEST_PAUSE) + drawn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_start_over() {
        let mut back_off = BackOff::default();
        assert!(back_off.pause(None) <= FIRST_PAUSE);
        for _ in 0..100 {
            assert!(back_off.pause(None) <= LONGEST_PAUSE);
        }
        assert!(back_off.pause(Some(Duration::from_secs(3))) >= Duration::from_secs(3));
        back_off.reset();
        assert!(back_off.pause(None) <= FIRST_PAUSE);
    }

    #[test]
    fn a_missing_permission_is_named() {
        let failure = Failure::answer(ObjectKind::EndpointSlice, "watch", StatusCode::FORBIDDEN, None);
        assert_eq!(failure.reason, "forbidden");
        assert!(failure.message.contains("\"watch\"") && failure.message.contains("endpointslices.discovery.k8s.io"));
        assert!(Failure::answer(ObjectKind::Node, "watch", StatusCode::GONE, None).needs_list);
    }
}
