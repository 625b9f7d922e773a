//! Limits on warnings that each of thousands of peers may cause. In each interval, the log shows
//! the first few warnings of a kind, and the number of further warnings.
//!
//! A resource that one agent rejects is usually rejected by every agent, and an untrusted peer may
//! retry as often as it likes. Metrics count all warnings.

use std::{
    collections::HashMap,
    fmt::Display,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// The maximum number of warnings of one kind that are logged within [`INTERVAL`].
const MAX_LOGGED: u32 = 10;

/// How long further warnings are counted before their number is logged.
const INTERVAL: Duration = Duration::from_secs(10);

/// The most networks and clients that are counted and named within [`INTERVAL`].
const MAX_SOURCES: usize = 1024;
const MAX_NAMED: usize = 10;

/// The kinds of warnings that peers can cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Warning {
    /// An agent rejects resources.
    Rejected,
    /// An agent could not program its kernel.
    ApplyFailed,
    /// An agent receives older state: the source did not reach the agent's position.
    WentBack,
    StreamRefused,
    RequestRefused,
    ConnectionRefused,
    Handshake,
    /// An agent got no certificate.
    Enrolment,
    /// A client has had all its lines in the audit log.
    Audited,
    /// Pods have waited for a node too long.
    Stalled,
}

/// The log message for the warnings of each kind that were left out, with their number.
const SUMMARIES: [(Warning, &str); 10] = [
    (Warning::Rejected, "more NACKs from agents; `headgatectl agents` shows what each agent rejects"),
    (
        Warning::ApplyFailed,
        "more agents failed to program their kernels; `headgatectl agents` shows the error of each agent",
    ),
    (
        Warning::WentBack,
        "more agents receive this replica's older state, because the replica's source did not reach their positions",
    ),
    (Warning::StreamRefused, "more streams refused; headgate_streams_rejected_total counts them by reason"),
    (Warning::RequestRefused, "more requests refused; headgate_requests_denied_total counts them by reason"),
    (Warning::ConnectionRefused, "more connections refused; headgate_connections_refused_total counts them by reason"),
    (Warning::Handshake, "more TLS handshakes failed; headgate_tls_handshakes_failed_total counts them by reason"),
    (Warning::Enrolment, "more agents got no certificate; headgate_enrolments_total counts them by result"),
    (Warning::Audited, "more requests of clients of Inspect are not in the audit log"),
    (Warning::Stalled, "more nodes for which pods hardly wait; `headgatectl agents` shows them"),
];

/// Decides which warnings are logged.
#[derive(Debug, Default)]
pub(crate) struct Warnings([Mutex<LoggedKind>; SUMMARIES.len()]);

#[derive(Debug, Default)]
struct LoggedKind {
    /// When the interval ends; `None` before the first warning of an interval.
    end: Option<Instant>,
    logged: u32,
    /// How many warnings each network or client caused. The others count as `None`.
    left_out: HashMap<Option<String>, u64>,
}

impl Warnings {
    /// Returns true if a warning may be logged at `now`. Otherwise counts the warning.
    pub(crate) fn admit(&self, warning: Warning, now: Instant) -> bool {
        self.admit_from(None::<&str>, warning, now)
    }

    /// As [`Self::admit`], for a network or client, which is named if it causes most.
    pub(crate) fn admit_from(&self, source: Option<impl Display>, warning: Warning, now: Instant) -> bool {
        self.end_interval(warning, now);
        let mut kind = self.kind(warning);
        kind.end.get_or_insert(now + INTERVAL);
        let is_admitted = kind.logged < MAX_LOGGED;
        if is_admitted {
            kind.logged += 1;
        } else {
            let source = source.filter(|_| kind.left_out.len() < MAX_SOURCES).map(|source| source.to_string());
            *kind.left_out.entry(source).or_default() += 1;
        }
        is_admitted
    }

    /// Logs how many warnings were left out in ended intervals. To be called regularly.
    pub(crate) fn tick(&self, now: Instant) {
        for (warning, _) in SUMMARIES {
            self.end_interval(warning, now);
        }
    }

    /// Ends the interval of a kind if it is over, and logs how many warnings were left out.
    fn end_interval(&self, warning: Warning, now: Instant) {
        let mut kind = self.kind(warning);
        if kind.end.is_none_or(|end| end > now) {
            return;
        }
        let LoggedKind { left_out, .. } = std::mem::take(&mut *kind);
        drop(kind);
        let count: u64 = left_out.values().sum();
        if count > 0 {
            let mut most: Vec<_> = left_out.into_iter().filter_map(|(source, count)| Some((count, source?))).collect();
            most.sort_unstable_by(|a, b| b.cmp(a));
            let named = most.into_iter().take(MAX_NAMED).map(|(count, source)| format!("{source} ({count})"));
            let most_from = named.reduce(|all, next| all + ", " + &next);
            tracing::warn!(count, most_from, "{}", SUMMARIES[warning as usize].1);
        }
    }

    fn kind(&self, warning: Warning) -> std::sync::MutexGuard<'_, LoggedKind> {
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

    /// Collects log lines.
    #[derive(Clone, Default)]
    struct LogLines(Arc<Mutex<Vec<u8>>>);

    impl LogLines {
        fn text(&self) -> MutexGuard<'_, Vec<u8>> {
            self.0.lock().unwrap()
        }

        fn lines(&self) -> Vec<String> {
            String::from_utf8(std::mem::take(&mut *self.text())).unwrap().lines().map(str::to_owned).collect()
        }
    }

    impl Write for LogLines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.text().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn thousands_of_warnings_become_a_few_lines_and_a_count() {
        let log = LogLines::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let _default = tracing::subscriber::set_default(subscriber);
        let (warnings, start) = (Warnings::default(), Instant::now());
        let admitted = (0..15_000).filter(|_| warnings.admit(Warning::Rejected, start)).count();
        assert_eq!(admitted, MAX_LOGGED as usize);
        assert!(warnings.admit(Warning::ApplyFailed, start), "each kind has its own limit");
        warnings.tick(start + INTERVAL / 2);
        assert_eq!(log.lines().len(), 0);
        warnings.tick(start + INTERVAL);
        let lines = log.lines();
        assert!(lines.len() == 1 && lines[0].contains("more NACKs") && lines[0].contains("count=14990"), "{lines:?}");
        // No further count is logged, and the next warnings are logged again.
        warnings.tick(start + INTERVAL * 3);
        assert!(warnings.admit(Warning::Rejected, start + INTERVAL * 3));
        assert_eq!(log.lines().len(), 0);
        // Without a tick, the next warning logs the count of the interval before it.
        let admitted = (0..20).filter(|_| warnings.admit(Warning::Rejected, start + INTERVAL * 3)).count();
        assert_eq!(admitted, MAX_LOGGED as usize - 1);
        assert!(warnings.admit(Warning::Rejected, start + INTERVAL * 4));
        assert!(log.lines()[0].contains("count=11"));
        // The networks that cause most warnings are named.
        let later = start + INTERVAL * 5;
        for host in [1, 1, 2].iter().cycle().take(MAX_LOGGED as usize + 30) {
            warnings.admit_from(Some(format!("192.0.2.{host}")), Warning::Handshake, later);
        }
        warnings.tick(later + INTERVAL);
        assert!(log.lines()[0].contains("most_from=\"192.0.2.1 (20), 192.0.2.2 (10)\""));
    }
}
