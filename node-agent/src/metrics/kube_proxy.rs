//! kube-proxy's metrics about waiting changes, counted packets and health pages, with the names and
//! labels that kube-proxy gives them.

use std::{sync::atomic::AtomicU64, time::UNIX_EPOCH};

use headgate_core::Family as IpFamily;
use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tracing::debug;

use crate::{
    metric_registry::{FAMILY_LABELS, KUBE_PROXY, Labels, metrics},
    packet_counters,
    state::progress::ChangeCounts,
};

/// The answers to a page, by the label `code` with the status.
pub(crate) type AnswersByCode = Family<[(&'static str, u16); 1], Counter>;

type SecondsGauge = Gauge<f64, AtomicU64>;

metrics! {
    /// kube-proxy's metrics about waiting changes, counted packets and health pages.
    pub struct KubeProxyMetrics {}
    KUBE_PROXY {
        last_timestamp: Family<Labels<1>, SecondsGauge> = "sync_proxy_rules_last_timestamp_seconds" ["ip_family"],
            "When the last sync succeeded, in seconds since the Unix epoch";
        last_queued_timestamp: Family<Labels<1>, SecondsGauge> = "sync_proxy_rules_last_queued_timestamp_seconds"
            ["ip_family"], "When the last change arrived, in seconds since the Unix epoch";
        endpoint_changes_pending: Gauge = "sync_proxy_rules_endpoint_changes_pending",
            "Changes of endpoints that are not in the kernel yet";
        endpoint_changes_total: Counter = "sync_proxy_rules_endpoint_changes",
            "Changes of endpoints (kube-proxy counts EndpointSlices)";
        service_changes_pending: Gauge = "sync_proxy_rules_service_changes_pending",
            "Changes of services that are not in the kernel yet";
        service_changes_total: Counter = "sync_proxy_rules_service_changes", "Changes of services";
        pub(crate) healthz: AnswersByCode = "proxy_healthz" ["code"], "Answers to /healthz";
        pub(crate) livez: AnswersByCode = "proxy_livez" ["code"], "Answers to /livez";
    }
    "kubeproxy_iptables" {
        invalid_dropped: Counter = "ct_state_invalid_dropped_packets",
            "Dropped packets whose conntrack state was INVALID. 0 if packets are not counted, see headgate_agent_packet_counters";
        localhost_accepted: Counter = "localhost_nodeports_accepted_packets",
            "First packets of accepted connections to NodePorts on 127.0.0.0/8. 0 if packets are not counted, see headgate_agent_packet_counters";
    }
}

impl KubeProxyMetrics {
    /// Reads the packet counters from the kernel. Call it before encoding.
    pub(super) fn read_packet_counters(&self) {
        match packet_counters::read() {
            Ok(counts) => {
                raise(&self.invalid_dropped, counts.invalid_dropped);
                raise(&self.localhost_accepted, counts.localhost_node_ports_accepted);
            }
            Err(error) => debug!(%error, "packet counters cannot be read"),
        }
    }

    /// Copies the counts of the backlog. Call this function before the registry is encoded.
    pub(super) fn take_counts(&self, counts: &ChangeCounts) {
        self.endpoint_changes_pending.set(signed(counts.endpoint_changes_pending));
        self.service_changes_pending.set(signed(counts.service_changes_pending));
        raise(&self.endpoint_changes_total, counts.endpoint_changes_total);
        raise(&self.service_changes_total, counts.service_changes_total);
        for (family, synced_at) in IpFamily::BOTH.into_iter().zip(counts.synced_at) {
            let stamps = [(&self.last_timestamp, synced_at), (&self.last_queued_timestamp, counts.queued_at)];
            for (gauge, at) in stamps {
                if let Some(since_epoch) = at.and_then(|at| at.duration_since(UNIX_EPOCH).ok()) {
                    gauge.get_or_create(&FAMILY_LABELS[family as usize]).set(since_epoch.as_secs_f64());
                }
            }
        }
    }
}

/// Raises a counter to a value that was counted elsewhere. The counter never decreases.
fn raise(counter: &Counter, to: u64) {
    counter.inc_by(to.saturating_sub(counter.get()));
}

fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
