//! Metrics of syncs: Headgate's own metrics, and kube-proxy's metrics with the names, labels and
//! buckets that kube-proxy gives them.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use headgate_core::{Family as IpFamily, ServiceKey};
use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram};

use crate::{
    dataplane::{FamilyStatistics, Report, metrics::DataplaneMetrics},
    metric_registry::{AGENT, KUBE_PROXY, Labels, MetricRegistry, family_label, sync_histogram},
    state::progress::Trigger,
};

/// The maximum number of Services with a counter of drift.
const MAX_DRIFTED: usize = 100;

/// The extent of a sync.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SyncKind {
    /// The state changed, but no rule changed. Nothing is written.
    Nothing,
    /// The services that changed are programmed.
    Partial,
    /// The whole state is compared with the kernel, and the differences are programmed.
    Full,
}

impl SyncKind {
    fn label(self) -> Labels<1> {
        let kind = match self {
            Self::Nothing => "nothing",
            Self::Partial => "partial",
            Self::Full => "full",
        };
        [("kind", kind)]
    }
}

/// Metrics of syncs.
#[derive(Debug, Clone)]
pub struct SyncMetrics {
    started: SystemTime,
    /// The version that is in the kernel.
    pub version_programmed: Gauge<u64, AtomicU64>,
    /// Number of times that another program had removed or changed Headgate's rules.
    pub repairs: Counter,
    /// Number of verifications that failed.
    pub verifications_failed: Counter,
    /// Number of services that the kernel rejects, as a whole or in part.
    pub services_rejected: Gauge,
    /// Number of times that the kernel began to reject a service, as a whole or in part.
    pub service_rejections: Counter,
    /// Number of problems that the operator has to fix.
    pub degraded_modes: Gauge,
    /// Metrics that the dataplane updates.
    pub dataplane: DataplaneMetrics,
    /// 1 while rules count packets into [`crate::packet_counters`], else 0.
    pub counts_packets: Gauge,
    /// 1 while the agent writes rules of nftables, else 0. It selects kube-proxy's metrics.
    pub uses_nftables: Gauge,
    verifications: Family<Labels<1>, Counter>,
    verified_at: Gauge,
    drifted: Family<[(&'static str, String); 2], Counter>,
    drifted_services: Arc<Mutex<BTreeSet<ServiceKey>>>,
    mode: Family<[(&'static str, String); 2], Gauge>,
    standby: Family<[(&'static str, String); 1], Gauge>,
    apply_duration: Family<Labels<1>, Histogram>,
    applies_failed: Family<Labels<1>, Counter>,
    services_planned: Counter,
    objects_written: Counter,
    sync_duration: Family<Labels<1>, Histogram>,
    sync_full_duration: Family<Labels<1>, Histogram>,
    sync_partial_duration: Family<Labels<1>, Histogram>,
    programming_duration: Family<Labels<1>, Histogram>,
    no_local_endpoints: Family<Labels<2>, Gauge>,
    iptables_total: Family<Labels<2>, Gauge>,
    iptables_last: Family<Labels<2>, Gauge>,
    restore_failures: Family<Labels<1>, Counter>,
    partial_restore_failures: Family<Labels<1>, Counter>,
}

/// The buckets of kube-proxy: from 0.25 s to 300 s, in steps that grow.
fn programming_histogram() -> Histogram {
    let steps = |from: u32, step: u32, count: u32| (0..count).map(move |i| f64::from(from + i * step));
    let buckets = [0.25, 0.5].into_iter().chain(steps(1, 1, 59)).chain(steps(60, 5, 12)).chain(steps(120, 30, 7));
    Histogram::new(buckets)
}

/// The time of the call of `default` counts as the start of the process.
impl Default for SyncMetrics {
    fn default() -> Self {
        Self {
            started: SystemTime::now(),
            version_programmed: Gauge::default(),
            repairs: Counter::default(),
            verifications_failed: Counter::default(),
            services_rejected: Gauge::default(),
            service_rejections: Counter::default(),
            degraded_modes: Gauge::default(),
            dataplane: DataplaneMetrics::default(),
            counts_packets: Gauge::default(),
            uses_nftables: Gauge::default(),
            verifications: Family::default(),
            verified_at: Gauge::default(),
            drifted: Family::default(),
            drifted_services: Arc::default(),
            mode: Family::default(),
            standby: Family::default(),
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
    pub(crate) fn register(&self, registry: &mut MetricRegistry) {
        let mut add = registry.adder(AGENT);
        add.gauge("version_programmed", "", "Version that is in the kernel", self.version_programmed.clone());
        let help = "Always 1. The labels say which backend runs, and why the agent chose it; `reason` is empty if the configuration leaves no choice";
        add.gauge("mode_info", "backend, reason", help, self.mode.clone());
        let help = "1 while the agent stands by, because another service proxy works on the node. Served only at --standby-address";
        add.gauge("standby", "proxy", help, self.standby.clone());
        let help = "Time from the start of a sync until the kernel has accepted the rules";
        add.histogram("apply_duration_seconds", "kind (partial, full)", help, self.apply_duration.clone());
        let help = "Attempts to program the kernel that failed";
        add.counter("applies_failed", "kind (partial, full, nothing)", help, self.applies_failed.clone());
        let help = "Services that were planned, summed over all syncs";
        add.counter("services_planned", "", help, self.services_planned.clone());
        let help = "Chains, or the corresponding objects of the dataplane, that were written";
        add.counter("objects_written", "", help, self.objects_written.clone());
        let help = "Times that another program had removed or changed rules and the agent restored them";
        add.counter("repairs", "", help, self.repairs.clone());
        let help = "Times that the rules could not be verified";
        add.counter("verifications_failed", "", help, self.verifications_failed.clone());
        let help = "Verifications of what the kernel forwards, by their result: equal to what the state asks for, drift, or failed";
        add.counter("forwarding_verifications", "result (equal, drift, failed)", help, self.verifications.clone());
        let help = "Time of the last verification of what the kernel forwards that did not fail, in Unix seconds";
        add.gauge("verified_timestamp_seconds", "", help, self.verified_at.clone());
        let help = "Verifications that found a Service served otherwise than the state asks for. Only the first 100 Services have a counter";
        add.counter("service_drift", "namespace, service", help, self.drifted.clone());
        let help = "Services that the kernel rejects, as a whole or in part. Their last good rules stay, and they delay no other Service";
        add.gauge("services_refused", "", help, self.services_rejected.clone());
        let help = "Problems on this node that the operator has to fix because Services get less than was configured, such as iptables in place of ipvs. /status on the metrics port and `headgatectl agents` list these problems";
        add.gauge("degraded_modes", "", help, self.degraded_modes.clone());
        let help = "Times that the kernel began to reject a Service, as a whole or in part";
        add.counter("service_refusals", "", help, self.service_rejections.clone());
        let help = "1 while rules count packets in nfnetlink_acct objects, from which the metrics kubeproxy_iptables_…_packets_total are read";
        add.gauge("packet_counters", "", help, self.counts_packets.clone());
        self.register_kube_proxy_names(registry);
        self.dataplane.register(registry);
    }

    /// Records which backend runs, and why the agent chose this backend.
    pub(crate) fn set_mode(&self, backend: &str, reason: Option<&str>) {
        self.uses_nftables.set(matches!(backend, "nftables" | "userspace").into());
        let labels = [("backend", backend.to_owned()), ("reason", reason.unwrap_or_default().to_owned())];
        self.mode.get_or_create(&labels).set(1);
    }

    /// Records the other proxy that works on the node of an agent in standby.
    pub(crate) fn set_standby(&self, proxy: &str) {
        self.standby.get_or_create(&[("proxy", proxy.to_owned())]).set(1);
    }

    /// Records the result of a verification: "equal", "drift" or "failed".
    pub(super) fn verified(&self, result: &'static str) {
        self.verifications.get_or_create(&[("result", result)]).inc();
        if result != "failed" {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            self.verified_at.set(i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        }
    }

    /// Counts a Service that is served otherwise than the state asks for.
    pub(super) fn drifted(&self, service: &ServiceKey) {
        let mut services = self.drifted_services.lock().unwrap_or_else(PoisonError::into_inner);
        if services.len() < MAX_DRIFTED || services.contains(service) {
            services.insert(service.clone());
            let labels = [("namespace", service.namespace.to_string()), ("service", service.name.to_string())];
            self.drifted.get_or_create(&labels).inc();
        }
    }

    fn register_kube_proxy_names(&self, registry: &mut MetricRegistry) {
        let mut add = registry.adder(KUBE_PROXY);
        let family = "ip_family";
        add.histogram("sync_proxy_rules_duration_seconds", family, "Time that a sync took", self.sync_duration.clone());
        let help = "Time that a full sync took";
        add.histogram("sync_full_proxy_rules_duration_seconds", family, help, self.sync_full_duration.clone());
        let help = "Time that a sync of only the changed Services took";
        add.histogram("sync_partial_proxy_rules_duration_seconds", family, help, self.sync_partial_duration.clone());
        let help = "Time from the trigger of an endpoint change (annotation endpoints.kubernetes.io/last-change-trigger-time) to the kernel's acknowledgement. Removals, and triggers before the start of the process, do not count";
        add.histogram("network_programming_duration_seconds", family, help, self.programming_duration.clone());
        let labels = "ip_family, traffic_policy (internal, external)";
        let help = "Service ports whose traffic is dropped on this node, because their policy is Local and all their endpoints are on other nodes";
        add.gauge("sync_proxy_rules_no_local_endpoints_total", labels, help, self.no_local_endpoints.clone());
        let mut add = registry.adder("kubeproxy_sync_proxy_rules_nftables");
        let help = "Syncs that failed to program the kernel";
        add.counter("sync_failures", family, help, self.restore_failures.clone());
        let help = "Always 0: the agent deletes old rules in the transaction of a sync, not afterwards as kube-proxy";
        let never = Family::<Labels<1>, Counter>::default();
        IpFamily::BOTH.iter().for_each(|family| drop(never.get_or_create(&family_label(*family))));
        add.counter("cleanup_failures", family, help, never);
        let mut add = registry.adder("kubeproxy_sync_proxy_rules_iptables");
        let labels = "ip_family, table (nat, filter)";
        let help = "iptables rules that Headgate has in the kernel";
        add.gauge("total", labels, help, self.iptables_total.clone());
        let help = "iptables rules that the last sync wrote";
        add.gauge("last", labels, help, self.iptables_last.clone());
        let help = "Syncs that failed to program the kernel";
        add.counter("restore_failures", family, help, self.restore_failures.clone());
        let help = "Syncs of only the changed Services that failed to program the kernel";
        add.counter("partial_restore_failures", family, help, self.partial_restore_failures.clone());
    }

    /// Records a sync that succeeded. `triggers` are those of programmed endpoint changes.
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
            // Ignore triggers from before the process's start: their changes did not wait for it.
            if at >= self.started {
                let waited = now.duration_since(at).unwrap_or_default();
                let label = family_label(trigger.family);
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
            histogram.get_or_create(&family_label(family)).observe(took.as_secs_f64());
        }
    }

    fn observe_family(&self, FamilyStatistics { family, statistics, .. }: &FamilyStatistics) {
        let [ip_family] = family_label(*family);
        for rules in &statistics.rules {
            let label = [ip_family, ("table", rules.table)];
            self.iptables_total.get_or_create(&label).set(rules.total.into());
            self.iptables_last.get_or_create(&label).set(rules.last.into());
        }
        let no_local = [("internal", statistics.no_local.internal), ("external", statistics.no_local.external)];
        for (traffic_policy, count) in no_local {
            self.no_local_endpoints.get_or_create(&[ip_family, ("traffic_policy", traffic_policy)]).set(count.into());
        }
    }

    /// Records a sync that failed in these families. An empty list means both families.
    pub(crate) fn failed(&self, kind: SyncKind, families: &[IpFamily]) {
        self.applies_failed.get_or_create(&kind.label()).inc();
        for family in IpFamily::BOTH.into_iter().filter(|family| families.is_empty() || families.contains(family)) {
            let label = family_label(family);
            self.restore_failures.get_or_create(&label).inc();
            if kind == SyncKind::Partial {
                self.partial_restore_failures.get_or_create(&label).inc();
            }
        }
    }
}
