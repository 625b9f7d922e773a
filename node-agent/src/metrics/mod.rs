//! Registers and encodes all metrics of the agent for Prometheus. The modules that update metrics
//! define them.

mod build_info;
pub mod kube_proxy;
mod services;
mod userspace;

use headgate_listener::{ClosedConnections, ProcessMetrics};
use prometheus_client::registry::Unit;

use self::{kube_proxy::KubeProxyMetrics, services::ServiceMetrics, userspace::UserspaceMetrics};
use crate::{
    interfaces::InterfaceMetrics,
    metric_registry::{AGENT, MetricRegistry},
    observers::{
        conntrack::ConntrackMetrics, endpoint_checks::EndpointCheckMetrics, health_check_ports::HealthCheckMetrics,
    },
    persist::SaveMetrics,
    reconcile::SyncMetrics,
    session::{barriers::DrainMetrics, metrics::SessionMetrics},
    state::backlog::ChangeCounts,
};

/// All metrics of the agent. Values have base units. The names of Headgate's own metrics begin with
/// `headgate_agent_`, or with `headgate_userspace_` for the proxy of mode userspace.
#[derive(Debug, Default)]
pub struct Metrics {
    registry: MetricRegistry,
    /// The session with the control plane.
    pub session: SessionMetrics,
    /// The state on disk.
    pub saves: SaveMetrics,
    /// Syncs.
    pub sync: SyncMetrics,
    /// The thread that follows the addresses of the node's interfaces.
    pub interfaces: InterfaceMetrics,
    /// The cleanup of connection tracking.
    pub conntrack: ConntrackMetrics,
    /// Health-check node ports.
    pub health_check_ports: HealthCheckMetrics,
    /// Endpoint checks.
    pub endpoint_checks: EndpointCheckMetrics,
    /// Requests of pods that stop.
    pub drain: DrainMetrics,
    /// Connections to HTTP ports that were closed because of limits.
    pub http_closed: ClosedConnections,
    /// Other metrics of kube-proxy.
    pub kube_proxy: KubeProxyMetrics,
    /// Counters of Services.
    pub(crate) services: ServiceMetrics,
    /// The proxy of mode userspace.
    pub(crate) userspace: UserspaceMetrics,
    process: ProcessMetrics,
}

impl Metrics {
    /// Creates and registers all metrics. The time of this call counts as the start of the process.
    #[must_use]
    pub fn registered() -> Self {
        let mut metrics = Self::default();
        let registry = &mut metrics.registry;
        build_info::register(registry);
        let ProcessMetrics { cpu_seconds, resident_bytes, virtual_bytes, started, open_fds, max_fds } =
            &metrics.process;
        let mut add = registry.adder("process");
        let help = "CPU time of the agent, without its child processes";
        add.counter("cpu_seconds", "", help, cpu_seconds.clone());
        let help = "Resident memory of the agent, without its child processes";
        add.gauge_in(Unit::Bytes, "resident_memory", "", help, resident_bytes.clone());
        let help = "Virtual memory of the agent, without its child processes";
        add.gauge_in(Unit::Bytes, "virtual_memory", "", help, virtual_bytes.clone());
        let help = "When the agent started, in seconds since the Unix epoch";
        add.gauge_in(Unit::Seconds, "start_time", "", help, started.clone());
        add.gauge("open_fds", "", "Open file descriptors", open_fds.clone());
        add.gauge("max_fds", "", "Maximum number of open file descriptors", max_fds.clone());
        metrics.session.register(registry);
        metrics.saves.register(registry);
        metrics.sync.register(registry);
        metrics.interfaces.register(registry);
        metrics.conntrack.register(registry);
        metrics.health_check_ports.register(registry);
        metrics.endpoint_checks.register(registry);
        metrics.drain.register(registry);
        let help = "Connections to HTTP ports that were closed because of limits, by port (health, metrics, drain or health_check_node_port) and reason: evicted (a new connection needed the place), or refused (not accepted, for example because of too many open files)";
        let closed = metrics.http_closed.clone();
        registry.adder(AGENT).counter("http_connections_closed", "port, reason", help, closed);
        metrics.kube_proxy.register(registry);
        metrics.services.register(registry);
        metrics.userspace.register(registry);
        metrics
    }

    /// The resident memory of the agent, without its child processes.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.process.refresh();
        self.process.resident_bytes.get()
    }

    /// Encodes all metrics as OpenMetrics text, with the counts of the backlog.
    #[must_use]
    pub fn encode(&self, counts: &ChangeCounts) -> String {
        self.session.refresh();
        self.kube_proxy.take_counts(counts);
        if self.sync.counts_packets.get() != 0 {
            self.kube_proxy.read_packet_counters();
        }
        self.process.refresh();
        self.registry.encode(self.sync.uses_nftables.get() != 0)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::{Duration, SystemTime, UNIX_EPOCH};

    use headgate_core::{
        Family::{V4, V6},
        view::NoLocalEndpoints,
    };
    use headgate_proto::v1::welcome::ResumeMode;

    use super::*;
    use crate::{
        dataplane::{FamilyStatistics, Report, Statistics, TableStatistics},
        reconcile::SyncKind,
        state::backlog::Trigger,
    };

    impl Metrics {
        pub(crate) fn registry(&self) -> &MetricRegistry {
            &self.registry
        }
    }

    #[test]
    fn headgates_own_metrics_are_served_with_their_names_and_labels() {
        let metrics = Metrics::registered();
        metrics.session.stream_error("version_gap");
        metrics.session.resumed(ResumeMode::Digests);
        metrics.session.set_source_age(Duration::from_secs(5));
        let report = Report { services_planned: 3, objects_written: 4, ..Report::default() };
        metrics.sync.succeeded(SyncKind::Partial, Duration::from_millis(3), &report, &[], &[]);
        metrics.sync.failed(SyncKind::Full, &[]);
        let text = metrics.encode(&ChangeCounts::default());
        for line in [
            "headgate_agent_stream_errors_total{reason=\"version_gap\"} 1",
            "headgate_agent_resumes_total{mode=\"digests\"} 1",
            "headgate_agent_services_planned_total 3",
            "headgate_agent_objects_written_total 4",
            "headgate_agent_version_programmed 0",
            "headgate_agent_apply_duration_seconds_count{kind=\"partial\"} 1",
            "headgate_agent_applies_failed_total{kind=\"full\"} 1",
            "headgate_agent_connected 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(metrics.session.source_age().unwrap() >= Duration::from_secs(5));
    }

    #[test]
    fn every_served_metric_is_in_the_catalogue() {
        let metrics = Metrics::registered();
        metrics.session.stream_error("x");
        metrics.session.resumed(ResumeMode::Log);
        metrics.sync.failed(SyncKind::Partial, &[]);
        metrics.kube_proxy.healthz.get_or_create(&[("code", 200)]).inc();
        metrics.kube_proxy.livez.get_or_create(&[("code", 200)]).inc();
        metrics.sync.succeeded(SyncKind::Partial, Duration::ZERO, &Report::default(), &[], &[]);
        let text = metrics.encode(&ChangeCounts::default());
        let names = metrics.registry().names();
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
    fn row_109_metrics_have_kube_proxys_names_and_labels() {
        let metrics = Metrics::registered();
        let table = TableStatistics { table: "nat", total: 9, last: 2 };
        let no_local = NoLocalEndpoints { internal: 1, external: 0 };
        let statistics = Statistics { rules: vec![table], no_local, counts_packets: false };
        let v4 = FamilyStatistics { family: V4, took: Duration::from_millis(3), statistics };
        let now_ms = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap();
        let triggers = [Trigger { family: V4, unix_ms: now_ms + 1000 }, Trigger { family: V6, unix_ms: 1 }];
        metrics.sync.succeeded(SyncKind::Partial, Duration::ZERO, &Report::default(), &[v4], &triggers);
        metrics.sync.failed(SyncKind::Partial, &[V6]);
        metrics.kube_proxy.healthz.get_or_create(&[("code", 503)]).inc();
        let counts = ChangeCounts { endpoint_changes_total: 5, service_changes_pending: 2, ..ChangeCounts::default() };
        let text = metrics.encode(&counts);
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
        let has = |text: &str, rules: &str| {
            let mut names = text.lines().filter(|line| line.starts_with("kubeproxy_"));
            names.any(|name| name.contains(&format!("{rules}_")))
        };
        assert!(has(&text, "iptables") && !has(&text, "nftables"), "{text}");
        metrics.sync.set_mode("nftables", None);
        let text = metrics.encode(&counts);
        for line in [
            "kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family=\"IPv6\"} 1",
            "kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total{ip_family=\"IPv4\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(!has(&text, "iptables"), "{text}");
        // A change that was triggered before the start of the process is not counted.
        assert!(!text.contains("network_programming_duration_seconds_count{ip_family=\"IPv6\"}"));
    }
}
