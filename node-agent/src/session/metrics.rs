//! Metrics of the session: its streams, what the control plane sends, and TLS.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicI64, AtomicU64},
    },
    time::{Duration, Instant},
};

use headgate_core::node_state::SourceState;
use headgate_proto::v1::welcome::ResumeMode;
use headgate_tls::{Loaded, Validity};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Unit,
};
use tokio::sync::watch;

use crate::metric_registry::{AGENT, KindLabel, MetricRegistry, ResultLabel};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModeLabel {
    mode: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FileLabel {
    file: &'static str,
}

/// See the module.
#[derive(Debug, Clone, Default)]
pub struct SessionMetrics {
    /// 1 while a stream is up and welcomed.
    pub connected: Gauge,
    /// Streams after the first that were begun.
    pub reconnects: Counter,
    /// Resources that could not be used.
    pub rejected_resources: Counter,
    /// Version of the state that is held.
    pub version_received: Gauge<u64, AtomicU64>,
    /// The newest version that the control plane has.
    pub head_version: Gauge<u64, AtomicU64>,
    /// Certificates and handshakes.
    pub tls: TlsMetrics,
    stream_errors: Family<ReasonLabel, Counter>,
    resumes: Family<ModeLabel, Counter>,
    source_age_seconds: Gauge<f64, AtomicU64>,
    source: Arc<Mutex<Source>>,
}

/// What the replica says of its source.
#[derive(Debug, Default)]
struct Source {
    /// When the replica said how old its last word from the source is, and that age.
    heard: Option<(Instant, Duration)>,
    state: Option<SourceState>,
}

impl SessionMetrics {
    /// Registers all of them.
    pub(crate) fn register(&self, registry: &mut MetricRegistry) {
        let mut add = registry.adder(AGENT);
        add.gauge("connected", "", "1 while a control plane serves this agent", self.connected.clone());
        add.counter("stream_errors", "reason", "Streams that ended, by reason", self.stream_errors.clone());
        add.counter("reconnects", "", "Attempts to connect after the first", self.reconnects.clone());
        let help = "How streams began: log, digests or full";
        add.counter("resumes", "mode (log, digests, full)", help, self.resumes.clone());
        let help = "Resources that the control plane sent and this agent cannot use";
        add.counter("rejected_resources", "", help, self.rejected_resources.clone());
        let help = "Time since the control plane's source was last heard";
        add.gauge_in(Unit::Seconds, "source_age", "", help, self.source_age_seconds.clone());
        add.gauge("version_received", "", "Version of the state that is held", self.version_received.clone());
        let help = "Newest version that the control plane has, as of its last heartbeat";
        add.gauge("head_version", "", help, self.head_version.clone());
        self.tls.register(registry);
    }

    /// A stream ended, for one of a few fixed reasons.
    pub fn stream_error(&self, reason: &'static str) {
        self.stream_errors.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// A stream began.
    pub fn resumed(&self, mode: ResumeMode) {
        let mode = match mode {
            ResumeMode::Log => "log",
            ResumeMode::Digests => "digests",
            ResumeMode::Full => "full",
            ResumeMode::Unspecified => "unspecified",
        };
        self.resumes.get_or_create(&ModeLabel { mode }).inc();
    }

    /// A heartbeat said how long ago the source was heard.
    pub fn heard(&self, source_age: Duration) {
        self.source().heard = Some((Instant::now(), source_age));
    }

    /// The replica said what its source is doing; `None` from one that does not say.
    pub fn source_said(&self, state: Option<SourceState>) {
        self.source().state = state;
    }

    /// What the replica said last of its source; `None` before, and from one that does not say.
    #[must_use]
    pub fn source_state(&self) -> Option<SourceState> {
        self.source().state
    }

    /// Time since the source was last heard, grown since the heartbeat that said so; `None` before
    /// the first.
    #[must_use]
    pub fn source_age(&self) -> Option<Duration> {
        self.source().heard.map(|(at, age)| age.saturating_add(at.elapsed()))
    }

    /// Brings the gauges that depend on the time up to date, before the registry is read.
    pub(crate) fn refresh(&self) {
        self.source_age_seconds.set(self.source_age().map_or(0.0, |age| age.as_secs_f64()));
    }

    fn source(&self) -> MutexGuard<'_, Source> {
        self.source.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Metrics of certificates and TLS handshakes.
#[derive(Debug, Clone, Default)]
pub struct TlsMetrics {
    handshakes: Family<KindLabel, Counter>,
    reloads: Family<ResultLabel, Counter>,
    not_after: Family<FileLabel, Gauge<i64, AtomicI64>>,
    problem: watch::Sender<Option<String>>,
}

impl TlsMetrics {
    fn register(&self, registry: &mut MetricRegistry) {
        let mut add = registry.adder(AGENT);
        let help = "TLS handshakes with control planes that were done, by kind";
        add.counter("tls_handshakes", "kind (full, resumed)", help, self.handshakes.clone());
        let help = "Times that other TLS files were taken up, or had to be refused";
        add.counter("tls_reloads", "result (success, failure)", help, self.reloads.clone());
        let help =
            "When what is in use expires, in seconds since 1970: the own certificate, the first of the authorities";
        add.gauge_in(Unit::Seconds, "tls_certificate_not_after", "file (cert, ca)", help, self.not_after.clone());
    }

    /// Files were taken up; the first ones are not counted as a reload.
    pub(crate) fn loaded<C>(&self, loaded: &Loaded<C>, is_first: bool) {
        if !is_first {
            self.reloads.get_or_create(&ResultLabel { result: "success" }).inc();
        }
        let authorities = Validity { not_after: loaded.authorities_not_after, ..loaded.validity };
        for (file, validity) in [("cert", loaded.validity), ("ca", authorities)] {
            self.not_after.get_or_create(&FileLabel { file }).set(validity.not_after_unix_seconds());
        }
        self.problem.send_replace(None);
    }

    /// Files cannot be used.
    pub(crate) fn refused(&self, problem: String) {
        self.reloads.get_or_create(&ResultLabel { result: "failure" }).inc();
        self.problem.send_replace(Some(problem));
    }

    /// A handshake was done.
    pub(crate) fn handshake(&self, is_resumed: bool) {
        let kind = if is_resumed { "resumed" } else { "full" };
        self.handshakes.get_or_create(&KindLabel { kind }).inc();
    }

    /// What is wrong with the files as they are now.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.problem.borrow().clone()
    }

    /// Follows what is wrong with the files.
    pub(crate) fn watch_problem(&self) -> watch::Receiver<Option<String>> {
        self.problem.subscribe()
    }
}
