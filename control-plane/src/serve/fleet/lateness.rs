//! Decides whether an agent is late.
//!
//! An agent may hang or read slowly. The replica sends messages to such an agent until the socket
//! is full, which may take minutes. Each of these messages costs as much time as a message to any
//! other agent. Late agents are visited last ([`crate::serve::context::Visits`]), so that they do
//! not delay other agents.

use std::time::Duration;

use tokio::time::Instant;

/// The time after which an agent that has not answered a version is late. A normal agent sends ACKs
/// 150 to 350 ms apart. An agent that needs more than a second for an ACK programs its kernel
/// slowly, so a later visit hardly delays this agent.
const LATE_AFTER: Duration = Duration::from_secs(1);

/// Measures how long an agent has not answered.
#[derive(Debug, Default)]
pub(crate) struct Lateness {
    /// A version without an answer, and a time by which this version had been sent.
    unanswered: Option<(u64, Instant)>,
}

impl Lateness {
    /// Returns true if the agent is late at `now`. An agent becomes late when a version has had no
    /// answer for [`LATE_AFTER`]. The agent stays late until it answers this version. Call this
    /// method often, because the wait for an answer is measured from one call to the next.
    pub(crate) fn look(&mut self, sent_version: u64, answered_version: u64, now: Instant) -> bool {
        match self.unanswered {
            Some((version, since)) if version > answered_version => now.saturating_duration_since(since) >= LATE_AFTER,
            _ => {
                self.unanswered = (sent_version > answered_version).then_some((sent_version, now));
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_is_late_while_it_does_not_answer() {
        let (start, mut lateness) = (Instant::now(), Lateness::default());
        let at = |ms| start + Duration::from_millis(ms);
        // A version is sent every 50 ms, and is answered 500 ms later.
        for ms in (0..10_000).step_by(50) {
            assert!(!lateness.look(ms / 50, (ms / 50).saturating_sub(10), at(ms)), "after {ms} ms");
        }
        // An agent is not late while nothing is sent.
        assert!(!lateness.look(200, 200, at(10_000)) && !lateness.look(200, 200, at(60_000)));
        assert!(!lateness.look(201, 200, at(60_000)));
        assert!(!lateness.look(210, 200, at(60_999)));
        assert!(lateness.look(211, 200, at(61_000)) && lateness.look(211, 200, at(600_000)));
        // After an answer to some versions, the time for the other versions starts again.
        assert!(!lateness.look(300, 250, at(600_001)) && !lateness.look(400, 250, at(601_000)));
        assert!(lateness.look(400, 299, at(601_001)));
        assert!(!lateness.look(400, 400, at(601_002)));
    }
}
