//! Metrics of the session: its streams, what the replica reports, and TLS.

use std::{
    sync::atomic::{AtomicI64, AtomicU64},
    time::{Duration, Instant},
};

use headgate_core::node_state::SourceState;
use headgate_proto::v1::welcome::ResumeMode;
use headgate_tls::{Loaded, Validity};
use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tokio::sync::watch;

use crate::metric_registry::{AGENT, Labels, metrics};

metrics! {
    /// Metrics of the session.
    pub struct SessionMetrics {
        /// Certificates and handshakes.
        pub tls: TlsMetrics,
        source: watch::Sender<Source>,
    }
    AGENT {
        pub connected: Gauge = "connected", "1 while a control plane serves this agent";
        stream_errors: Family<Labels<1>, Counter> = "stream_errors" ["reason"], "Streams that ended, by reason";
        pub reconnects: Counter = "reconnects", "Attempts to connect, without the first attempt";
        resumes: Family<Labels<1>, Counter> = "resumes" ["mode (log, digests, full)"],
            "Streams that began, by resume mode";
        pub rejected_resources: Counter = "rejected_resources",
            "Resources that the control plane sent and this agent cannot use";
        source_age_seconds: Gauge<f64, AtomicU64> = "source_age_seconds",
            "Time since the control plane last heard from its source";
        pub version_received: Gauge<u64, AtomicU64> = "version_received", "Version of the state that the agent holds";
        pub head_version: Gauge<u64, AtomicU64> = "head_version",
            "Newest version that the control plane has, as of its last heartbeat";
        enrolments: Family<Labels<1>, Counter> = "enrolments" ["result (success, failure)"],
            "Attempts to get a certificate (--enrolment-address), by result";
    }
}

/// What the replica reports about its source.
#[derive(Debug, Default)]
struct Source {
    /// When the last heartbeat arrived, and the age of the source that this heartbeat reported.
    last_heartbeat: Option<(Instant, Duration)>,
    state: Option<SourceState>,
}

impl SessionMetrics {
    /// Counts an attempt to get a certificate. The status shows a problem until new files load.
    pub(crate) fn enrolled(&self, problem: Option<String>) {
        let result = if problem.is_none() { "success" } else { "failure" };
        self.enrolments.get_or_create(&[("result", result)]).inc();
        if problem.is_some() {
            self.tls.problem.send_replace(problem);
        }
    }

    /// Counts a stream that ended. `reason` is from a small fixed set.
    pub fn stream_error(&self, reason: &'static str) {
        self.stream_errors.get_or_create(&[("reason", reason)]).inc();
    }

    /// Counts a stream that began with this resume mode. Returns the name of the mode.
    pub fn resumed(&self, mode: ResumeMode) -> &'static str {
        let mode = match mode {
            ResumeMode::Log => "log",
            ResumeMode::Digests => "digests",
            ResumeMode::Full => "full",
            ResumeMode::Unspecified => "unspecified",
        };
        self.resumes.get_or_create(&[("mode", mode)]).inc();
        mode
    }

    /// Records the source age of a heartbeat.
    pub fn set_source_age(&self, source_age: Duration) {
        self.source.send_modify(|source| source.last_heartbeat = Some((Instant::now(), source_age)));
    }

    /// Records the state of the source.
    pub fn set_source_state(&self, state: SourceState) {
        self.source.send_modify(|source| source.state = Some(state));
    }

    /// The state of the source that was reported last; `None` if no state was reported.
    pub fn source_state(&self) -> Option<SourceState> {
        self.source.borrow().state
    }

    /// Time since the replica last heard from its source: the age in the last heartbeat plus the
    /// time since that heartbeat. `None` before the first heartbeat.
    pub fn source_age(&self) -> Option<Duration> {
        self.source.borrow().last_heartbeat.map(|(at, age)| age.saturating_add(at.elapsed()))
    }

    /// Updates the gauges that depend on the time. Call it before encoding.
    pub(crate) fn refresh(&self) {
        self.source_age_seconds.set(self.source_age().map_or(0.0, |age| age.as_secs_f64()));
    }
}

metrics! {
    /// Metrics of certificates and TLS handshakes.
    pub struct TlsMetrics {
        /// What is wrong with the current TLS files. `None` if the files can be used, and no
        /// control plane rejects the certificate.
        pub(crate) problem: watch::Sender<Option<String>>,
    }
    AGENT {
        handshakes: Family<Labels<1>, Counter> = "tls_handshakes" ["kind (full, resumed)"],
            "Completed TLS handshakes with control planes, by kind";
        reloads: Family<Labels<1>, Counter> = "tls_reloads" ["result (success, failure)"],
            "Changes of the TLS files, by whether the agent could load them";
        not_after: Family<Labels<1>, Gauge<i64, AtomicI64>> = "tls_certificate_not_after_seconds" ["file (cert, ca)"],
            "Expiry time in seconds since 1970, by file: the agent's certificate (cert), and the first authority in the CA file to expire (ca)";
    }
}

impl TlsMetrics {
    /// Records TLS files that were loaded. The first load is not a reload.
    pub(crate) fn loaded<C>(&self, loaded: &Loaded<C>, is_first: bool) {
        if !is_first {
            self.reloads.get_or_create(&[("result", "success")]).inc();
        }
        let authorities = Validity { not_after: loaded.authorities_not_after, ..loaded.validity };
        for (file, validity) in [("cert", loaded.validity), ("ca", authorities)] {
            self.not_after.get_or_create(&[("file", file)]).set(validity.not_after_unix_seconds());
        }
        self.problem.send_replace(None);
    }

    /// Records TLS files that cannot be used.
    pub(crate) fn load_failed(&self, problem: String) {
        self.reloads.get_or_create(&[("result", "failure")]).inc();
        self.problem.send_replace(Some(problem));
    }

    pub(crate) fn handshake(&self, is_resumed: bool) {
        let kind = if is_resumed { "resumed" } else { "full" };
        self.handshakes.get_or_create(&[("kind", kind)]).inc();
    }
}
