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
    metric_registry::{AGENT, FAMILY_LABELS, KUBE_PROXY, Labels, metrics, sync_histogram},
    state::progress::Trigger,
};

/// The maximum number of Services with a counter of drift.
const MAX_DRIFTED: usize = 100;

headgate_core::named! {
    /// The extent of a sync.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum SyncKind {
        /// The state changed, but no rule changed. Nothing is written.
        Nothing = "nothing",
        /// The services that changed are programmed.
        Partial = "partial",
        /// The whole state is compared with the kernel, and the differences are programmed.
        Full = "full",
    }
}

impl SyncKind {
    fn label(self) -> Labels<1> {
        [("kind", self.as_str())]
    }
}

metrics! {
    /// Metrics of syncs. The time of the call of `default` counts as the start of the process.
    pub struct SyncMetrics {
        started: SystemTime = SystemTime::now(),
        /// Metrics that the dataplane updates.
        pub dataplane: DataplaneMetrics,
        /// 1 while the agent writes rules of nftables, else 0. It selects kube-proxy's metrics.
        pub uses_nftables: Gauge,
        drifted_services: Arc<Mutex<BTreeSet<ServiceKey>>>,
    }
    AGENT {
        pub version_programmed: Gauge<u64, AtomicU64> = "version_programmed", "Version that is in the kernel";
        mode: Family<[(&'static str, String); 2], Gauge> = "mode_info" ["backend, reason"],
            "Always 1. The labels say which backend runs, and why the agent chose it; `reason` is empty if the configuration leaves no choice";
        standby: Family<[(&'static str, String); 1], Gauge> = "standby" ["proxy"],
            "1 while the agent stands by, because another service proxy works on the node. Served only at --standby-address";
        apply_duration: Family<Labels<1>, Histogram> = "apply_duration_seconds" ["kind (partial, full)"],
            "Time from the start of a sync until the kernel has accepted the rules",
            Family::new_with_constructor(sync_histogram);
        applies_failed: Family<Labels<1>, Counter> = "applies_failed" ["kind (partial, full, nothing)"],
            "Attempts to program the kernel that failed";
        services_planned: Counter = "services_planned", "Services that were planned, summed over all syncs";
        objects_written: Counter = "objects_written",
            "Chains, or the corresponding objects of the dataplane, that were written";
        pub repairs: Counter = "repairs",
            "Times that another program had removed or changed rules and the agent restored them";
        pub verifications_failed: Counter = "verifications_failed", "Times that the rules could not be verified";
        verifications: Family<Labels<1>, Counter> = "forwarding_verifications" ["result (equal, drift, failed)"],
            "Verifications of what the kernel forwards, by their result: equal to what the state asks for, drift, or failed";
        verified_at: Gauge = "verified_timestamp_seconds",
            "Time of the last verification of what the kernel forwards that did not fail, in Unix seconds";
        drifted: Family<[(&'static str, String); 2], Counter> = "service_drift" ["namespace, service"],
            "Verifications that found a Service served otherwise than the state asks for. Only the first 100 Services have a counter";
        pub services_rejected: Gauge = "services_refused",
            "Services that the kernel rejects, as a whole or in part. Their last good rules stay, and they delay no other Service";
        pub degraded_modes: Gauge = "degraded_modes",
            "Problems on this node that the operator has to fix because Services get less than was configured, such as iptables in place of ipvs. /status on the metrics port and `headgatectl agents` list these problems";
        pub service_rejections: Counter = "service_refusals",
            "Times that the kernel began to reject a Service, as a whole or in part";
        pub counts_packets: Gauge = "packet_counters",
            "1 while rules count packets in nfnetlink_acct objects, from which the metrics kubeproxy_iptables_…_packets_total are read";
    }
    KUBE_PROXY {
        sync_duration: Family<Labels<1>, Histogram> = "sync_proxy_rules_duration_seconds" ["ip_family"],
            "Time that a sync took", Family::new_with_constructor(sync_histogram);
        sync_full_duration: Family<Labels<1>, Histogram> = "sync_full_proxy_rules_duration_seconds" ["ip_family"],
            "Time that a full sync took", Family::new_with_constructor(sync_histogram);
        sync_partial_duration: Family<Labels<1>, Histogram> = "sync_partial_proxy_rules_duration_seconds" ["ip_family"],
            "Time that a sync of only the changed Services took", Family::new_with_constructor(sync_histogram);
        programming_duration: Family<Labels<1>, Histogram> = "network_programming_duration_seconds" ["ip_family"],
            "Time from the trigger of an endpoint change (annotation endpoints.kubernetes.io/last-change-trigger-time) to the kernel's acknowledgement. Removals, and triggers before the start of the process, do not count",
            Family::new_with_constructor(programming_histogram);
        no_local_endpoints: Family<Labels<2>, Gauge> = "sync_proxy_rules_no_local_endpoints_total"
            ["ip_family, traffic_policy (internal, external)"],
            "Service ports whose traffic is dropped on this node, because their policy is Local and all their endpoints are on other nodes";
    }
    "kubeproxy_sync_proxy_rules_nftables" {
        sync_failures: Family<Labels<1>, Counter> = "sync_failures" ["ip_family"],
            "Syncs that failed to program the kernel";
        cleanup_failures: Family<Labels<1>, Counter> = "cleanup_failures" ["ip_family"],
            "Always 0: the agent deletes old rules in the transaction of a sync, not afterwards as kube-proxy",
            never_counted();
    }
    "kubeproxy_sync_proxy_rules_iptables" {
        iptables_total: Family<Labels<2>, Gauge> = "total" ["ip_family, table (nat, filter)"],
            "iptables rules that Headgate has in the kernel";
        iptables_last: Family<Labels<2>, Gauge> = "last" ["ip_family, table (nat, filter)"],
            "iptables rules that the last sync wrote";
        restore_failures: Family<Labels<1>, Counter> = "restore_failures" ["ip_family"],
            "Syncs that failed to program the kernel";
        partial_restore_failures: Family<Labels<1>, Counter> = "partial_restore_failures" ["ip_family"],
            "Syncs of only the changed Services that failed to program the kernel";
    }
}

/// A counter that is 0 for each IP family.
fn never_counted() -> Family<Labels<1>, Counter> {
    let never = Family::default();
    IpFamily::BOTH.iter().for_each(|family| drop(never.get_or_create(&FAMILY_LABELS[*family as usize])));
    never
}

/// The buckets of kube-proxy: from 0.25 s to 300 s, in steps that grow.
fn programming_histogram() -> Histogram {
    let steps = |from: u32, step: u32, count: u32| (0..count).map(move |i| f64::from(from + i * step));
    let buckets = [0.25, 0.5].into_iter().chain(steps(1, 1, 59)).chain(steps(60, 5, 12)).chain(steps(120, 30, 7));
    Histogram::new(buckets)
}

impl SyncMetrics {
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
                let label = FAMILY_LABELS[trigger.family as usize];
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
            histogram.get_or_create(&FAMILY_LABELS[family as usize]).observe(took.as_secs_f64());
        }
    }

    fn observe_family(&self, FamilyStatistics { family, statistics, .. }: &FamilyStatistics) {
        let [ip_family] = FAMILY_LABELS[*family as usize];
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
            let label = FAMILY_LABELS[family as usize];
            self.restore_failures.get_or_create(&label).inc();
            self.sync_failures.get_or_create(&label).inc();
            if kind == SyncKind::Partial {
                self.partial_restore_failures.get_or_create(&label).inc();
            }
        }
    }
}
