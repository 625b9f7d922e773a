//! Metrics of syncs: Headgate's own, and kube-proxy's by their names, labels and buckets.

use std::{
    sync::atomic::AtomicU64,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use headgate_core::Family as IpFamily;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
};

use crate::{
    dataplane::{FamilyStatistics, Report},
    metric_registry::{AGENT, FamilyLabel, KUBE_PROXY, KindLabel, MetricRegistry, sync_histogram},
    state::backlog::Trigger,
};

/// What a sync had to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SyncKind {
    /// The state changed, but no rule.
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

/// Labels `ip_family` and `table`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TableLabel {
    ip_family: &'static str,
    table: &'static str,
}

/// Labels `ip_family` and `traffic_policy`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PolicyLabel {
    ip_family: &'static str,
    traffic_policy: &'static str,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct SyncMetrics {
    started: SystemTime,
    /// Version that is in the kernel.
    pub version_programmed: Gauge<u64, AtomicU64>,
    /// Times that another program had removed or changed our rules.
    pub repairs: Counter,
    /// Verifications that failed.
    pub verifications_failed: Counter,
    /// Services that are in quarantine, as a whole or in part.
    pub services_refused: Gauge,
    /// Times that a service was put in quarantine.
    pub service_refusals: Counter,
    /// What the operator has to fix.
    pub degraded_modes: Gauge,
    /// 1 while rules count into [`crate::packet_counters`].
    pub counts_packets: Gauge,
    apply_duration: Family<KindLabel, Histogram>,
    applies_failed: Family<KindLabel, Counter>,
    services_planned: Counter,
    objects_written: Counter,
    sync_duration: Family<FamilyLabel, Histogram>,
    sync_full_duration: Family<FamilyLabel, Histogram>,
    sync_partial_duration: Family<FamilyLabel, Histogram>,
    programming_duration: Family<FamilyLabel, Histogram>,
    no_local_endpoints: Family<PolicyLabel, Gauge>,
    iptables_total: Family<TableLabel, Gauge>,
    iptables_last: Family<TableLabel, Gauge>,
    restore_failures: Family<FamilyLabel, Counter>,
    partial_restore_failures: Family<FamilyLabel, Counter>,
}

/// From a quarter of a second to five minutes, in steps that grow.
fn programming_histogram() -> Histogram {
    let steps = |from: u32, step: u32, count: u32| (0..count).map(move |i| f64::from(from + i * step));
    let buckets = [0.25, 0.5].into_iter().chain(steps(1, 1, 59)).chain(steps(60, 5, 12)).chain(steps(120, 30, 7));
    Histogram::new(buckets)
}

/// The process begins now.
impl Default for SyncMetrics {
    fn default() -> Self {
        Self {
            started: SystemTime::now(),
            version_programmed: Gauge::default(),
            repairs: Counter::default(),
            verifications_failed: Counter::default(),
            services_refused: Gauge::default(),
            service_refusals: Counter::default(),
            degraded_modes: Gauge::default(),
            counts_packets: Gauge::default(),
            apply_duration: Family::new_with_constructor(sync_histogram),
            applies_failed: Family::default(),
            services_planned: Counter::default(),
            objects_written: Counter::default(),
            sync_duration: Family::new_with_constructor(sync_histogram),
            sync_full_duration: Family::new_with_constructor(sync_histogram),
            sync_partial_duration: Family::new_with_constructor(sync_histogram),
            programming_duration: Family::new_with_constructor(programming_histogram),
            no_local_endpoints: Family::default(),
            iptables_total: Family::default(),
            iptables_last: Family::default(),
            restore_failures: Family::default(),
            partial_restore_failures: Family::default(),
        }
    }
}

impl SyncMetrics {
    /// Registers all of them.
    pub(crate) fn register(&self, registry: &mut MetricRegistry) {
        let mut add = registry.adder(AGENT);
        add.gauge("version_programmed", "", "Version that is in the kernel", self.version_programmed.clone());
        let help = "Time from taking up a change to the kernel's acknowledgement";
        add.histogram("apply_duration_seconds", "kind (partial, full)", help, self.apply_duration.clone());
        let help = "Attempts to program the kernel that failed";
        add.counter("applies_failed", "kind (partial, full, nothing)", help, self.applies_failed.clone());
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
        add.gauge("packet_counters", "", help, self.counts_packets.clone());
        self.register_kube_proxy_names(registry);
    }

    fn register_kube_proxy_names(&self, registry: &mut MetricRegistry) {
        let mut add = registry.adder(KUBE_PROXY);
        let family = "ip_family";
        add.histogram("sync_proxy_rules_duration_seconds", family, "Time that a sync took", self.sync_duration.clone());
        let help = "Time that a sync of everything took";
        add.histogram("sync_full_proxy_rules_duration_seconds", family, help, self.sync_full_duration.clone());
        let help = "Time that a sync of what changed took";
        add.histogram("sync_partial_proxy_rules_duration_seconds", family, help, self.sync_partial_duration.clone());
        let help = "Time from what set a change of endpoints off (annotation endpoints.kubernetes.io/last-change-trigger-time) to the kernel's acknowledgement. Removals, and what is older than the process, do not count";
        add.histogram("network_programming_duration_seconds", family, help, self.programming_duration.clone());
        let labels = "ip_family, traffic_policy (internal, external)";
        let help = "Service ports whose traffic is dropped on this node, for their policy is Local and all their endpoints are elsewhere";
        add.gauge("sync_proxy_rules_no_local_endpoints_total", labels, help, self.no_local_endpoints.clone());
        let labels = "ip_family, table (nat, filter)";
        let help = "iptables rules that Headgate has in the kernel";
        add.gauge("sync_proxy_rules_iptables_total", labels, help, self.iptables_total.clone());
        let help = "iptables rules that the last sync wrote";
        add.gauge("sync_proxy_rules_iptables_last", labels, help, self.iptables_last.clone());
        let help = "Syncs that iptables refused";
        add.counter("sync_proxy_rules_iptables_restore_failures", family, help, self.restore_failures.clone());
        let help = "Syncs of what changed that iptables refused";
        let name = "sync_proxy_rules_iptables_partial_restore_failures";
        add.counter(name, family, help, self.partial_restore_failures.clone());
    }

    /// A sync succeeded. `triggers` set off what it programmed.
    pub(crate) fn succeeded(
        &self,
        kind: SyncKind,
        took: Duration,
        report: &Report,
        families: &[FamilyStatistics],
        triggers: &[Trigger],
    ) {
        if kind != SyncKind::Nothing {
            self.apply_duration.get_or_create(&kind.label()).observe(took.as_secs_f64());
        }
        self.services_planned.inc_by(report.services_planned.into());
        self.objects_written.inc_by(report.objects_written.into());
        for statistics in families {
            self.observe_family(statistics);
        }
        for family in IpFamily::BOTH {
            let statistics = families.iter().find(|statistics| statistics.family == family);
            if families.is_empty() || statistics.is_some() {
                self.observe_duration(kind, family, statistics.map_or(took, |statistics| statistics.took));
            }
        }
        let now = SystemTime::now();
        for trigger in triggers {
            let at = UNIX_EPOCH + Duration::from_millis(trigger.unix_ms);
            // A change that is older than the process did not wait for it.
            if at >= self.started {
                let waited = now.duration_since(at).unwrap_or_default();
                let label = FamilyLabel::of(trigger.family);
                self.programming_duration.get_or_create(&label).observe(waited.as_secs_f64());
            }
        }
    }

    fn observe_duration(&self, kind: SyncKind, family: IpFamily, took: Duration) {
        let by_kind = match kind {
            SyncKind::Nothing => return,
            SyncKind::Partial => &self.sync_partial_duration,
            SyncKind::Full => &self.sync_full_duration,
        };
        for histogram in [&self.sync_duration, by_kind] {
            histogram.get_or_create(&FamilyLabel::of(family)).observe(took.as_secs_f64());
        }
    }

    fn observe_family(&self, FamilyStatistics { family, statistics, .. }: &FamilyStatistics) {
        let FamilyLabel { ip_family } = FamilyLabel::of(*family);
        for rules in &statistics.rules {
            let label = TableLabel { ip_family, table: rules.table };
            self.iptables_total.get_or_create(&label).set(rules.total.into());
            self.iptables_last.get_or_create(&label).set(rules.last.into());
        }
        let no_local = [("internal", statistics.no_local.internal), ("external", statistics.no_local.external)];
        for (traffic_policy, count) in no_local {
            self.no_local_endpoints.get_or_create(&PolicyLabel { ip_family, traffic_policy }).set(count.into());
        }
    }

    /// A sync failed in these families; none means both.
    pub(crate) fn failed(&self, kind: SyncKind, families: &[IpFamily]) {
        self.applies_failed.get_or_create(&kind.label()).inc();
        for family in IpFamily::BOTH.into_iter().filter(|family| families.is_empty() || families.contains(family)) {
            let label = FamilyLabel::of(family);
            self.restore_failures.get_or_create(&label).inc();
            if kind == SyncKind::Partial {
                self.partial_restore_failures.get_or_create(&label).inc();
            }
        }
    }

    /// Services planned since the start.
    #[must_use]
    pub fn services_planned(&self) -> u64 {
        self.services_planned.get()
    }
}
