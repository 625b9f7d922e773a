//! What the agent counts, for Prometheus and for `/healthz`.

mod build_info;
pub mod catalogue;
pub mod endpoint_health;
pub mod kube_proxy;
pub mod process;
pub mod tls;

use std::{
    sync::{Mutex, PoisonError, atomic::AtomicU64},
    time::{Duration, Instant},
};

use headgate_core::node_state::SourceState;
use headgate_proto::v1::welcome::ResumeMode;
use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

pub use self::endpoint_health::CheckResult;
use self::{
    catalogue::Catalogue, endpoint_health::EndpointHealthMetrics, kube_proxy::KubeProxyMetrics,
    process::ProcessMetrics, tls::TlsMetrics,
};
use crate::{backlog::Counts, conntrack::ConntrackMetrics, dataplane::Report, health_check::HealthCheckMetrics};

/// What a sync had to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SyncKind {
    /// The state moved on without a change to any rule.
    Nothing,
    /// The services that changed.
    Partial,
    /// Everything.
    Full,
}

impl SyncKind {
    fn label(self) -> KindLabel {
        let kind = match self {
            Self::Nothing => "nothing",
            Self::Partial => "partial",
            Self::Full => "full",
        };
        KindLabel { kind }
    }
}

/// Label `kind`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

/// Label `reason`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

/// Label `kind` of a write to disk.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SaveLabel {
    kind: &'static str,
}

/// Label `mode`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModeLabel {
    mode: &'static str,
}

/// All metrics, in base units; names begin with `headgate_agent_`.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    catalogue: Catalogue,
    /// kube-proxy's.
    pub kube_proxy: KubeProxyMetrics,
    process: ProcessMetrics,
    build: Registry,
    /// Of the thread that deletes stale flows.
    pub conntrack: ConntrackMetrics,
    /// Of certificates and handshakes.
    pub tls: TlsMetrics,
    /// Active health checks.
    pub endpoint_health: EndpointHealthMetrics,
    /// 1 while a stream is up and welcomed.
    pub connected: Gauge,
    /// Streams after the first that were begun.
    pub reconnects: Counter,
    /// Resources that could not be used.
    pub rejected_resources: Counter,
    /// Version of the state that is held.
    pub version_received: Gauge<u64, AtomicU64>,
    /// Version that is in the kernel.
    pub version_programmed: Gauge<u64, AtomicU64>,
    /// Times that somebody else had touched our rules.
    pub repairs: Counter,
    /// Verifications that could not be made.
    pub verifications_failed: Counter,
    /// Services whose rules the kernel refuses.
    pub services_refused: Gauge,
    /// What the operator has to fix.
    pub degraded_modes: Gauge,
    /// Times that the kernel began to refuse a service's rules.
    pub service_refusals: Counter,
    /// Health-check node ports.
    pub health_check: HealthCheckMetrics,
    /// The newest version that the control plane has.
    pub head_version: Gauge<u64, AtomicU64>,
    /// 1 when this run began with a state from disk.
    pub state_restored: Gauge,
    /// Attempts to save the state that failed.
    pub state_save_errors: Counter,
    state_saves: Family<SaveLabel, Counter>,
    state_bytes: Gauge<u64, AtomicU64>,
    stream_errors: Family<ReasonLabel, Counter>,
    resumes: Family<ModeLabel, Counter>,
    source_age_seconds: Gauge<f64, AtomicU64>,
    source: Mutex<Option<(Instant, Duration)>>,
    source_state: Mutex<Option<SourceState>>,
    apply_duration: Family<KindLabel, Histogram>,
    applies_failed: Family<KindLabel, Counter>,
    services_planned: Counter,
    objects_written: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        // 1 ms doubled 15 times, as kube-proxy's.
        let apply_histogram: fn() -> Histogram =
            || Histogram::new(prometheus_client::metrics::histogram::exponential_buckets(0.001, 2.0, 15));
        let (mut catalogue, conntrack) = (Catalogue::default(), ConntrackMetrics::default());
        let kube_proxy = KubeProxyMetrics::new(&mut catalogue, &conntrack);
        let process = ProcessMetrics::new(&mut catalogue);
        let build = build_info::registry(&mut catalogue);
        let mut metrics = Self {
            registry: Registry::with_prefix("headgate_agent"),
            catalogue,
            kube_proxy,
            process,
            build,
            conntrack,
            tls: TlsMetrics::default(),
            endpoint_health: EndpointHealthMetrics::default(),
            connected: Gauge::default(),
            reconnects: Counter::default(),
            rejected_resources: Counter::default(),
            version_received: Gauge::default(),
            version_programmed: Gauge::default(),
            repairs: Counter::default(),
            verifications_failed: Counter::default(),
            services_refused: Gauge::default(),
            degraded_modes: Gauge::default(),
            service_refusals: Counter::default(),
            health_check: HealthCheckMetrics::default(),
            head_version: Gauge::default(),
            state_restored: Gauge::default(),
            state_save_errors: Counter::default(),
            state_saves: Family::default(),
            state_bytes: Gauge::default(),
            stream_errors: Family::default(),
            resumes: Family::default(),
            source_age_seconds: Gauge::default(),
            source: Mutex::new(None),
            source_state: Mutex::new(None),
            apply_duration: Family::new_with_constructor(apply_histogram),
            applies_failed: Family::default(),
            services_planned: Counter::default(),
            objects_written: Counter::default(),
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&mut self) {
        let mut add = self.catalogue.adder("headgate_agent", &mut self.registry);
        add.gauge("connected", "", "1 while a control plane serves this agent", self.connected.clone());
        add.counter("stream_errors", "reason", "Streams that ended, by reason", self.stream_errors.clone());
        add.counter("reconnects", "", "Attempts to connect after the first", self.reconnects.clone());
        add.counter(
            "resumes",
            "mode (log, digests, full)",
            "How streams began: log, digests or full",
            self.resumes.clone(),
        );
        let help = "Resources that the control plane sent and this agent cannot use";
        add.counter("rejected_resources", "", help, self.rejected_resources.clone());
        let help = "Time since the control plane's source was last heard";
        add.gauge_in(Unit::Seconds, "source_age", "", help, self.source_age_seconds.clone());
        add.gauge("version_received", "", "Version of the state that is held", self.version_received.clone());
        add.gauge("version_programmed", "", "Version that is in the kernel", self.version_programmed.clone());
        let help = "Newest version that the control plane has, as of its last heartbeat";
        add.gauge("head_version", "", help, self.head_version.clone());
        let help = "1 when this run of the agent began with a state from disk";
        add.gauge("state_restored", "", help, self.state_restored.clone());
        let help = "Times that the state was saved to disk: append (what changed) or full";
        add.counter("state_saves", "kind (append, full)", help, self.state_saves.clone());
        let help = "Attempts to save the state to disk that failed";
        add.counter("state_save_errors", "", help, self.state_save_errors.clone());
        let help = "Size of the saved state";
        add.gauge_in(Unit::Bytes, "state", "", help, self.state_bytes.clone());
        let help = "Time from taking up a change to the kernel's acknowledgement";
        add.histogram("apply_duration_seconds", "kind (partial, full)", help, self.apply_duration.clone());
        add.counter(
            "applies_failed",
            "kind (partial, full, nothing)",
            "Attempts to program the kernel that failed",
            self.applies_failed.clone(),
        );
        let help = "Services whose programming was computed anew";
        add.counter("services_planned", "", help, self.services_planned.clone());
        let help = "Chains, or the backend's like, that were written";
        add.counter("objects_written", "", help, self.objects_written.clone());
        let help = "Times that rules were found removed or changed by somebody else, and were restored";
        add.counter("repairs", "", help, self.repairs.clone());
        let help = "Times that the rules could not be verified";
        add.counter("verifications_failed", "", help, self.verifications_failed.clone());
        let help =
            "Services whose rules the kernel refuses: their last good ones stay, and nothing else waits for them";
        add.gauge("services_refused", "", help, self.services_refused.clone());
        let help = "What the operator has to fix because Services suffer from it on this node, such as iptables in place of ipvs; /status of the metrics port and headgatectl agents name each";
        add.gauge("degraded_modes", "", help, self.degraded_modes.clone());
        let help = "Times that the kernel began to refuse a service's rules";
        add.counter("service_refusals", "", help, self.service_refusals.clone());
        let help = "1 while rules count packets into nfnetlink_acct: what the kubeproxy_iptables_…_packets_total show";
        add.gauge("packet_counters", "", help, self.kube_proxy.counts_packets().clone());
        let help = "Passes over the connection tracking table that failed and are tried again";
        self.catalogue.describe("headgate_agent_conntrack_passes_failed_total", "counter", "ip_family", help);
        self.conntrack.register(&mut self.registry);
        self.tls.register(&mut self.catalogue, &mut self.registry);
        self.endpoint_health.register(&mut self.catalogue, &mut self.registry);
        for (name, kind, help) in HealthCheckMetrics::DESCRIPTIONS {
            self.catalogue.describe(&format!("headgate_agent_{name}"), kind, "", help);
        }
        self.health_check.register(&mut self.registry);
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

    /// The state was saved to disk, in one of a few fixed ways; the file has this size now.
    pub fn state_saved(&self, kind: &'static str, bytes: u64) {
        self.state_saves.get_or_create(&SaveLabel { kind }).inc();
        self.state_bytes.set(bytes);
    }

    /// A heartbeat said how long ago the source was heard.
    pub fn heard(&self, source_age: Duration) {
        *self.source.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), source_age));
    }

    /// What the replica says that its source is doing; `None` from one that does not say.
    pub fn source_said(&self, state: Option<SourceState>) {
        *self.source_state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// What the replica said last of its source; `None` before, and from one that does not say.
    #[must_use]
    pub fn source_state(&self) -> Option<SourceState> {
        *self.source_state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time since the source was last heard, grown since the heartbeat that said so; `None` before the first.
    #[must_use]
    pub fn source_age(&self) -> Option<Duration> {
        let source = *self.source.lock().unwrap_or_else(PoisonError::into_inner);
        source.map(|(at, age)| age.saturating_add(at.elapsed()))
    }

    /// A sync succeeded.
    pub fn synced(&self, kind: SyncKind, took: Duration, report: &Report, version: u64) {
        if kind != SyncKind::Nothing {
            self.apply_duration.get_or_create(&kind.label()).observe(took.as_secs_f64());
        }
        self.services_planned.inc_by(report.services_planned.into());
        self.objects_written.inc_by(report.objects_written.into());
        self.version_programmed.set(version);
    }

    /// A sync failed.
    pub fn sync_failed(&self, kind: SyncKind) {
        self.applies_failed.get_or_create(&kind.label()).inc();
    }

    /// Services planned since the start.
    #[must_use]
    pub fn services_planned(&self) -> u64 {
        self.services_planned.get()
    }

    /// Descriptions of all metrics.
    #[must_use]
    pub fn catalogue(&self) -> &Catalogue {
        &self.catalogue
    }

    /// Everything as OpenMetrics text, with what is counted elsewhere.
    ///
    /// # Errors
    /// Only when formatting fails, which a `String` does not.
    pub fn encode(&self, counts: &Counts) -> Result<String, std::fmt::Error> {
        self.source_age_seconds.set(self.source_age().map_or(0.0, |age| age.as_secs_f64()));
        let mut out = String::new();
        self.kube_proxy.take_counts(counts);
        self.process.take();
        text::encode_registry(&mut out, &self.registry)?;
        text::encode_registry(&mut out, self.kube_proxy.registry())?;
        text::encode_registry(&mut out, self.process.registry())?;
        text::encode_registry(&mut out, &self.build)?;
        text::encode_eof(&mut out)?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::{SystemTime, UNIX_EPOCH};

    use headgate_core::{
        Family::{V4, V6},
        view::NoLocalEndpoints,
    };

    use super::*;
    use crate::{
        backlog::Trigger,
        dataplane::{FamilyStatistics, TableStatistics},
    };

    #[test]
    fn names_and_labels() {
        let metrics = Metrics::default();
        metrics.stream_error("version_gap");
        metrics.resumed(ResumeMode::Digests);
        metrics.heard(Duration::from_secs(5));
        let report = Report { services_planned: 3, objects_written: 4, warnings: Vec::new() };
        metrics.synced(SyncKind::Partial, Duration::from_millis(3), &report, 9);
        metrics.sync_failed(SyncKind::Full);
        let text = metrics.encode(&Counts::default()).unwrap();
        for line in [
            "headgate_agent_stream_errors_total{reason=\"version_gap\"} 1",
            "headgate_agent_resumes_total{mode=\"digests\"} 1",
            "headgate_agent_services_planned_total 3",
            "headgate_agent_objects_written_total 4",
            "headgate_agent_version_programmed 9",
            "headgate_agent_apply_duration_seconds_count{kind=\"partial\"} 1",
            "headgate_agent_applies_failed_total{kind=\"full\"} 1",
            "headgate_agent_connected 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(metrics.source_age().unwrap() >= Duration::from_secs(5));
    }

    #[test]
    fn everything_that_is_served_is_described() {
        let metrics = Metrics::default();
        metrics.stream_error("x");
        metrics.resumed(ResumeMode::Log);
        metrics.state_saved("full", 1);
        metrics.sync_failed(SyncKind::Full);
        metrics.synced(SyncKind::Full, Duration::ZERO, &Report::default(), 1);
        metrics.kube_proxy.failed(SyncKind::Partial, &[]);
        metrics.kube_proxy.healthz(200);
        metrics.kube_proxy.livez(200);
        metrics.kube_proxy.synced(SyncKind::Partial, Duration::ZERO, &[], &[]);
        let text = metrics.encode(&Counts::default()).unwrap();
        let names = metrics.catalogue().names();
        let mut served = 0;
        for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
            let (name, kind) = line.split_once(' ').unwrap();
            let name = if kind == "counter" { format!("{name}_total") } else { name.to_owned() };
            assert!(names.contains(&name.as_str()), "{name} is not in the catalogue");
            served += 1;
        }
        assert!(served > 30, "{served}");
        assert_eq!(text.matches("# EOF").count(), 1);
    }

    // rows: 109
    #[test]
    fn row_109_kube_proxys_names_and_labels() {
        let metrics = Metrics::default();
        let table = TableStatistics { table: "nat", total: 9, last: 2 };
        let no_local = NoLocalEndpoints { internal: 1, external: 0 };
        let v4 = FamilyStatistics { family: V4, took: Duration::from_millis(3), rules: vec![table], no_local };
        let now_ms = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap();
        let triggers = [Trigger { family: V4, unix_ms: now_ms + 1000 }, Trigger { family: V6, unix_ms: 1 }];
        metrics.kube_proxy.synced(SyncKind::Partial, Duration::ZERO, &[v4], &triggers);
        metrics.kube_proxy.failed(SyncKind::Partial, &[V6]);
        metrics.kube_proxy.healthz(503);
        let counts = Counts { endpoint_changes_total: 5, service_changes_pending: 2, ..Counts::default() };
        let text = metrics.encode(&counts).unwrap();
        for line in [
            "kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"} 1",
            "kubeproxy_sync_partial_proxy_rules_duration_seconds_bucket{le=\"0.004\",ip_family=\"IPv4\"} 1",
            "kubeproxy_network_programming_duration_seconds_count{ip_family=\"IPv4\"} 1",
            "kubeproxy_sync_proxy_rules_iptables_total{ip_family=\"IPv4\",table=\"nat\"} 9",
            "kubeproxy_sync_proxy_rules_iptables_last{ip_family=\"IPv4\",table=\"nat\"} 2",
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family=\"IPv4\",traffic_policy=\"internal\"} 1",
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family=\"IPv4\",traffic_policy=\"external\"} 0",
            "kubeproxy_sync_proxy_rules_iptables_restore_failures_total{ip_family=\"IPv6\"} 1",
            "kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total{ip_family=\"IPv6\"} 1",
            "kubeproxy_proxy_healthz_total{code=\"503\"} 1",
            "kubeproxy_sync_proxy_rules_endpoint_changes_total 5",
            "kubeproxy_sync_proxy_rules_service_changes_pending 2",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(
            !text.contains("network_programming_duration_seconds_count{ip_family=\"IPv6\"}"),
            "older than the process"
        );
    }
}
