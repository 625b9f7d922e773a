//! Warnings that each of thousands of peers may cause: the first few in an interval are written,
//! the others are counted.
//!
//! A resource that one agent rejects is rejected by every agent, and a peer that nobody trusts may
//! try again as often as it likes. Metrics count all warnings; the log shows some, and says how
//! many more there were.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Warnings of one kind that are written within [`INTERVAL`].
const WRITTEN: u32 = 10;

/// How long the others are counted before their number is written.
const INTERVAL: Duration = Duration::from_secs(10);

/// What peers cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Warning {
    /// An agent rejects resources.
    Rejected,
    /// An agent could not program its kernel.
    ApplyFailed,
    /// An agent goes back to the state of a replica that did not catch up.
    WentBack,
    /// A stream was refused.
    StreamRefused,
    /// A request to Inspect or reflection was refused.
    RequestRefused,
    /// A connection was refused.
    ConnectionRefused,
    /// A TLS handshake came to nothing.
    Handshake,
}

impl Warning {
    const ALL: [Self; 7] = [
        Self::Rejected,
        Self::ApplyFailed,
        Self::WentBack,
        Self::StreamRefused,
        Self::RequestRefused,
        Self::ConnectionRefused,
        Self::Handshake,
    ];

    /// The line that stands for the warnings that were not written.
    fn summary(self) -> &'static str {
        match self {
            Self::Rejected => "more NACKs of agents; `headgatectl agents` shows what each rejects",
            Self::ApplyFailed => "more failures of agents to program their kernels; `headgatectl agents` shows each",
            Self::WentBack => {
                "more agents go back to this replica's state, since its source is still behind what they have"
            }
            Self::StreamRefused => "more streams refused; headgate_streams_rejected_total counts them by reason",
            Self::RequestRefused => "more requests refused; headgate_requests_denied_total counts them by reason",
            Self::ConnectionRefused => {
                "more connections refused; headgate_connections_refused_total counts them by reason"
            }
            Self::Handshake => {
                "more TLS handshakes that came to nothing; headgate_tls_handshakes_failed_total counts them by reason"
            }
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Warnings([Mutex<Kind>; Warning::ALL.len()]);

#[derive(Debug, Default)]
struct Kind {
    /// When the interval ends, and counting starts again.
    end: Option<Instant>,
    written: u32,
    left_out: u64,
}

impl Warnings {
    /// True when a warning may be written. Otherwise it is counted.
    pub(crate) fn admit(&self, warning: Warning, now: Instant) -> bool {
        self.begin_anew(warning, now);
        let mut kind = self.kind(warning);
        kind.end.get_or_insert(now + INTERVAL);
        let is_admitted = kind.written < WRITTEN;
        if is_admitted {
            kind.written += 1;
        } else {
            kind.left_out += 1;
        }
        is_admitted
    }

    /// Writes how many warnings were left out in intervals that have ended. To be called regularly.
    pub(crate) fn tick(&self, now: Instant) {
        for warning in Warning::ALL {
            self.begin_anew(warning, now);
        }
    }

    fn begin_anew(&self, warning: Warning, now: Instant) {
        let mut kind = self.kind(warning);
        if kind.end.is_none_or(|end| end > now) {
            return;
        }
        let Kind { left_out, .. } = std::mem::take(&mut *kind);
        drop(kind);
        if left_out > 0 {
            tracing::warn!(count = left_out, "{}", warning.summary());
        }
    }

    fn kind(&self, warning: Warning) -> std::sync::MutexGuard<'_, Kind> {
        self.0[warning as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        io::Write,
        sync::{Arc, MutexGuard},
    };

    use super::*;

    /// What is logged.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Log {
        fn text(&self) -> MutexGuard<'_, Vec<u8>> {
            self.0.lock().unwrap()
        }

        fn lines(&self) -> Vec<String> {
            String::from_utf8(std::mem::take(&mut *self.text())).unwrap().lines().map(str::to_owned).collect()
        }
    }

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.text().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_thousands_say_is_a_few_lines_and_a_count() {
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let _default = tracing::subscriber::set_default(subscriber);
        let (warnings, start) = (Warnings::default(), Instant::now());
        let written = (0..15_000).filter(|_| warnings.admit(Warning::Rejected, start)).count();
        assert_eq!(written, WRITTEN as usize);
        assert!(warnings.admit(Warning::ApplyFailed, start), "kinds count for themselves");
        warnings.tick(start + INTERVAL / 2);
        assert_eq!(log.lines().len(), 0);
        warnings.tick(start + INTERVAL);
        let lines = log.lines();
        assert!(lines.len() == 1 && lines[0].contains("more NACKs") && lines[0].contains("count=14990"), "{lines:?}");
        // Nothing is owed any more, and the next ones are written again.
        warnings.tick(start + INTERVAL * 3);
        assert!(warnings.admit(Warning::Rejected, start + INTERVAL * 3));
        assert_eq!(log.lines().len(), 0);
        // Without a tick the next one writes what is owed.
        let admitted = (0..20).filter(|_| warnings.admit(Warning::Rejected, start + INTERVAL * 3)).count();
        assert_eq!(admitted, WRITTEN as usize - 1);
        assert!(warnings.admit(Warning::Rejected, start + INTERVAL * 4));
        assert!(log.lines()[0].contains("count=11"));
    }
}
