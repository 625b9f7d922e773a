//! Whether an agent keeps up.
//!
//! An agent that hangs or reads slowly takes what is sent to it until its socket is full. That may
//! last minutes, and meanwhile it costs as much as any other. Such agents are visited last
//! ([`crate::serve::context::Visits`]), so that other agents get a change no later because of it.

use std::time::Duration;

use tokio::time::Instant;

/// How long an agent may have a version without an answer. ACKs come 150 to 350 ms apart. An agent
/// whose ACK comes later has taken long to program, and being visited last makes that no worse.
const LATE_AFTER: Duration = Duration::from_secs(1);

/// What an agent has not answered yet.
#[derive(Debug, Default)]
pub(crate) struct Lateness {
    /// A version that had been sent at this time and is not answered.
    unanswered: Option<(u64, Instant)>,
}

impl Lateness {
    /// True once a version has been unanswered for [`LATE_AFTER`], until the agent has answered
    /// what had been sent when it became late. To be asked often.
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
    fn who_answers_is_never_late_and_who_does_not_is_until_it_does() {
        let (start, mut lateness) = (Instant::now(), Lateness::default());
        let at = |ms| start + Duration::from_millis(ms);
        // A version every 50 ms, each answered 500 ms later.
        for ms in (0..10_000).step_by(50) {
            assert!(!lateness.look(ms / 50, (ms / 50).saturating_sub(10), at(ms)), "after {ms} ms");
        }
        // Nothing is sent for long.
        assert!(!lateness.look(200, 200, at(10_000)) && !lateness.look(200, 200, at(60_000)));
        assert!(!lateness.look(201, 200, at(60_000)));
        assert!(!lateness.look(210, 200, at(60_999)));
        assert!(lateness.look(211, 200, at(61_000)) && lateness.look(211, 200, at(600_000)));
        // It has answered some of it, and is given the same time for the rest.
        assert!(!lateness.look(300, 250, at(600_001)) && !lateness.look(400, 250, at(601_000)));
        assert!(lateness.look(400, 299, at(601_001)));
        assert!(!lateness.look(400, 400, at(601_002)));
    }
}
