//! kube-proxy's metrics, by its names, labels and buckets.

use std::{
    sync::atomic::AtomicU64,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use headgate_core::Family as IpFamily;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};
use tracing::debug;

use super::{SyncKind, catalogue::Catalogue};
use crate::{
    backlog::{Counts, Trigger},
    conntrack::ConntrackMetrics,
    dataplane::FamilyStatistics,
    packet_counters,
};

/// Label `ip_family`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FamilyLabel {
    ip_family: &'static str,
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

/// Label `code`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: u16,
}

type Seconds = Gauge<f64, AtomicU64>;

/// See the module.
#[derive(Debug)]
pub struct KubeProxyMetrics {
    registry: Registry,
    started: SystemTime,
    sync_duration: Family<FamilyLabel, Histogram>,
    sync_full_duration: Family<FamilyLabel, Histogram>,
    sync_partial_duration: Family<FamilyLabel, Histogram>,
    programming_duration: Family<FamilyLabel, Histogram>,
    last_timestamp: Family<FamilyLabel, Seconds>,
    last_queued_timestamp: Family<FamilyLabel, Seconds>,
    endpoint_changes_pending: Gauge,
    endpoint_changes_total: Counter,
    service_changes_pending: Gauge,
    service_changes_total: Counter,
    no_local_endpoints: Family<PolicyLabel, Gauge>,
    iptables_total: Family<TableLabel, Gauge>,
    iptables_last: Family<TableLabel, Gauge>,
    invalid_dropped: Counter,
    localhost_accepted: Counter,
    /// 1 while rules count into [`crate::packet_counters`].
    counts_packets: Gauge,
    restore_failures: Family<FamilyLabel, Counter>,
    partial_restore_failures: Family<FamilyLabel, Counter>,
    healthz: Family<CodeLabel, Counter>,
    livez: Family<CodeLabel, Counter>,
}

/// 1 ms doubled 15 times.
fn sync_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 15))
}

/// From a quarter of a second to five minutes, in steps that grow.
fn programming_histogram() -> Histogram {
    let steps = |from: u32, step: u32, count: u32| (0..count).map(move |i| f64::from(from + i * step));
    let buckets = [0.25, 0.5].into_iter().chain(steps(1, 1, 59)).chain(steps(60, 5, 12)).chain(steps(120, 30, 7));
    Histogram::new(buckets)
}

impl KubeProxyMetrics {
    /// Registers everything, and describes it in the catalogue.
    pub(super) fn new(catalogue: &mut Catalogue, conntrack: &ConntrackMetrics) -> Self {
        let histogram: fn() -> Histogram = sync_histogram;
        let programming: fn() -> Histogram = programming_histogram;
        let mut metrics = Self {
            registry: Registry::with_prefix("kubeproxy"),
            started: SystemTime::now(),
            sync_duration: Family::new_with_constructor(histogram),
            sync_full_duration: Family::new_with_constructor(histogram),
            sync_partial_duration: Family::new_with_constructor(histogram),
            programming_duration: Family::new_with_constructor(programming),
            last_timestamp: Family::default(),
            last_queued_timestamp: Family::default(),
            endpoint_changes_pending: Gauge::default(),
            endpoint_changes_total: Counter::default(),
            service_changes_pending: Gauge::default(),
            service_changes_total: Counter::default(),
            no_local_endpoints: Family::default(),
            iptables_total: Family::default(),
            iptables_last: Family::default(),
            invalid_dropped: Counter::default(),
            localhost_accepted: Counter::default(),
            counts_packets: Gauge::default(),
            restore_failures: Family::default(),
            partial_restore_failures: Family::default(),
            healthz: Family::default(),
            livez: Family::default(),
        };
        metrics.register_durations(catalogue);
        metrics.register_changes(catalogue);
        metrics.register_rules(catalogue);
        conntrack.register_kube_proxy_names(&mut metrics.registry);
        let labels = "ip_family";
        catalogue.describe(
            "kubeproxy_conntrack_reconciler_sync_duration_seconds",
            "histogram",
            labels,
            "Time that a pass over the connection tracking table took",
        );
        catalogue.describe(
            "kubeproxy_conntrack_reconciler_deleted_entries_total",
            "counter",
            labels,
            "Stale UDP entries that were deleted from the connection tracking table",
        );
        metrics
    }

    fn register_durations(&mut self, catalogue: &mut Catalogue) {
        let mut add = catalogue.adder("kubeproxy", &mut self.registry);
        let family = "ip_family";
        add.histogram("sync_proxy_rules_duration_seconds", family, "Time that a sync took", self.sync_duration.clone());
        let help = "Time that a sync of everything took";
        add.histogram("sync_full_proxy_rules_duration_seconds", family, help, self.sync_full_duration.clone());
        let help = "Time that a sync of what changed took";
        add.histogram("sync_partial_proxy_rules_duration_seconds", family, help, self.sync_partial_duration.clone());
        let help = "Time from what set a change of endpoints off (annotation endpoints.kubernetes.io/last-change-trigger-time) to the kernel's acknowledgement. Removals, and what is older than the process, do not count";
        add.histogram("network_programming_duration_seconds", family, help, self.programming_duration.clone());
        let help = "When the last sync succeeded, in seconds since the Unix epoch";
        add.gauge("sync_proxy_rules_last_timestamp_seconds", family, help, self.last_timestamp.clone());
        let help = "When the last change came, in seconds since the Unix epoch";
        add.gauge("sync_proxy_rules_last_queued_timestamp_seconds", family, help, self.last_queued_timestamp.clone());
    }

    fn register_changes(&mut self, catalogue: &mut Catalogue) {
        let mut add = catalogue.adder("kubeproxy", &mut self.registry);
        let help = "Changes of endpoints that are not in the kernel yet";
        add.gauge("sync_proxy_rules_endpoint_changes_pending", "", help, self.endpoint_changes_pending.clone());
        let help = "Changes of endpoints (kube-proxy counts EndpointSlices)";
        add.counter("sync_proxy_rules_endpoint_changes", "", help, self.endpoint_changes_total.clone());
        let help = "Changes of services that are not in the kernel yet";
        add.gauge("sync_proxy_rules_service_changes_pending", "", help, self.service_changes_pending.clone());
        add.counter("sync_proxy_rules_service_changes", "", "Changes of services", self.service_changes_total.clone());
        let labels = "ip_family, traffic_policy (internal, external)";
        let help = "Service ports whose traffic is dropped on this node, for their policy is Local and all their endpoints are elsewhere";
        add.gauge("sync_proxy_rules_no_local_endpoints_total", labels, help, self.no_local_endpoints.clone());
        add.counter("proxy_healthz", "code", "Answers to /healthz", self.healthz.clone());
        add.counter("proxy_livez", "code", "Answers to /livez", self.livez.clone());
    }

    fn register_rules(&mut self, catalogue: &mut Catalogue) {
        let mut add = catalogue.adder("kubeproxy", &mut self.registry);
        let labels = "ip_family, table (nat, filter)";
        let help = "iptables rules that Headgate has in the kernel";
        add.gauge("sync_proxy_rules_iptables_total", labels, help, self.iptables_total.clone());
        let help = "iptables rules that the last sync wrote";
        add.gauge("sync_proxy_rules_iptables_last", labels, help, self.iptables_last.clone());
        let help = "Packets that conntrack called INVALID and that were dropped. 0 where packets are not counted, see headgate_agent_packet_counters";
        add.counter("iptables_ct_state_invalid_dropped_packets", "", help, self.invalid_dropped.clone());
        let help = "First packets of connections that NodePorts accepted on 127.0.0.0/8. 0 where packets are not counted, see headgate_agent_packet_counters";
        add.counter("iptables_localhost_nodeports_accepted_packets", "", help, self.localhost_accepted.clone());
        let help = "Syncs that iptables refused";
        add.counter("sync_proxy_rules_iptables_restore_failures", "ip_family", help, self.restore_failures.clone());
        let help = "Syncs of what changed that iptables refused";
        let name = "sync_proxy_rules_iptables_partial_restore_failures";
        add.counter(name, "ip_family", help, self.partial_restore_failures.clone());
    }

    /// An answer to `/healthz`.
    pub(crate) fn healthz(&self, code: u16) {
        self.healthz.get_or_create(&CodeLabel { code }).inc();
    }

    /// An answer to `/livez`.
    pub(crate) fn livez(&self, code: u16) {
        self.livez.get_or_create(&CodeLabel { code }).inc();
    }

    /// A sync succeeded. `triggers` set off what it programmed.
    pub(crate) fn synced(&self, kind: SyncKind, took: Duration, families: &[FamilyStatistics], triggers: &[Trigger]) {
        for statistics in families {
            self.observe_family(statistics);
        }
        for family in IpFamily::BOTH {
            let took = families.iter().find(|statistics| statistics.family == family).map_or(took, |s| s.took);
            if families.is_empty() || families.iter().any(|statistics| statistics.family == family) {
                self.observe_duration(kind, family, took);
            }
        }
        let now = SystemTime::now();
        for trigger in triggers {
            let at = UNIX_EPOCH + Duration::from_millis(trigger.unix_ms);
            // What was set off before this process began did not wait for it.
            if at >= self.started {
                let waited = now.duration_since(at).unwrap_or_default();
                self.programming_duration.get_or_create(&label(trigger.family)).observe(waited.as_secs_f64());
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
            histogram.get_or_create(&label(family)).observe(took.as_secs_f64());
        }
    }

    fn observe_family(&self, statistics: &FamilyStatistics) {
        let ip_family = name(statistics.family);
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

    /// A sync failed, in these families; none means both.
    pub(crate) fn failed(&self, kind: SyncKind, families: &[IpFamily]) {
        for family in IpFamily::BOTH.into_iter().filter(|family| families.is_empty() || families.contains(family)) {
            self.restore_failures.get_or_create(&label(family)).inc();
            if kind == SyncKind::Partial {
                self.partial_restore_failures.get_or_create(&label(family)).inc();
            }
        }
    }

    /// Whether rules count packets.
    pub(crate) fn set_counts_packets(&self, counts_packets: bool) {
        self.counts_packets.set(counts_packets.into());
    }

    pub(super) fn counts_packets(&self) -> &Gauge {
        &self.counts_packets
    }

    fn take_packet_counts(&self) {
        if self.counts_packets.get() == 0 {
            return;
        }
        match packet_counters::read() {
            Ok(counts) => {
                raise(&self.invalid_dropped, counts.invalid_dropped);
                raise(&self.localhost_accepted, counts.localhost_node_ports_accepted);
            }
            Err(error) => debug!(%error, "packet counters cannot be read"),
        }
    }

    /// Takes over what is counted elsewhere, before the registry is read.
    pub(super) fn take_counts(&self, counts: &Counts) {
        self.take_packet_counts();
        self.endpoint_changes_pending.set(signed(counts.endpoint_changes_pending));
        self.service_changes_pending.set(signed(counts.service_changes_pending));
        raise(&self.endpoint_changes_total, counts.endpoint_changes_total);
        raise(&self.service_changes_total, counts.service_changes_total);
        for (family, synced_at) in IpFamily::BOTH.into_iter().zip(counts.synced_at) {
            let stamps = [(&self.last_timestamp, synced_at), (&self.last_queued_timestamp, counts.queued_at)];
            for (gauge, at) in stamps {
                if let Some(since_epoch) = at.and_then(|at| at.duration_since(UNIX_EPOCH).ok()) {
                    gauge.get_or_create(&label(family)).set(since_epoch.as_secs_f64());
                }
            }
        }
    }

    pub(super) fn registry(&self) -> &Registry {
        &self.registry
    }
}

/// Brings a counter to what was counted elsewhere; it never falls.
fn raise(counter: &Counter, to: u64) {
    counter.inc_by(to.saturating_sub(counter.get()));
}

fn name(family: IpFamily) -> &'static str {
    match family {
        IpFamily::V4 => "IPv4",
        IpFamily::V6 => "IPv6",
    }
}

fn label(family: IpFamily) -> FamilyLabel {
    FamilyLabel { ip_family: name(family) }
}

fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
