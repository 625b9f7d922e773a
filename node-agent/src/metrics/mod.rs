//! Registers and encodes all metrics of the agent for Prometheus; other modules define them.

mod build_info;
pub mod kube_proxy;
mod services;
mod userspace;

use headgate_listener::{ClosedConnections, ProcessMetrics};
use prometheus_client::metrics::{counter::Counter, family::Family};

use self::{kube_proxy::KubeProxyMetrics, services::ServiceMetrics, userspace::UserspaceMetrics};
use crate::{
    interfaces::InterfaceMetrics,
    metric_registry::{AGENT, Labels, MetricRegistry},
    observers::{
        conntrack::ConntrackMetrics, endpoint_checks::EndpointCheckMetrics, health_check_ports::HealthCheckMetrics,
    },
    persist::SaveMetrics,
    reconcile::SyncMetrics,
    session::{barriers::DrainMetrics, metrics::SessionMetrics},
    state::progress::ChangeCounts,
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
    /// Probes of ClusterIPs (`ProbeQuery`).
    pub(crate) probes: Family<Labels<1>, Counter>,
    /// Connections to HTTP ports that were closed because of limits.
    pub http_closed: ClosedConnections,
    /// Other metrics of kube-proxy.
    pub kube_proxy: KubeProxyMetrics,
    pub(crate) services: ServiceMetrics,
    pub(crate) userspace: UserspaceMetrics,
    process: ProcessMetrics,
}

impl Metrics {
    /// Creates and registers all metrics. The time of this call counts as the start of the process.
    pub fn registered() -> Self {
        let mut metrics = Self::default();
        let registry = &mut metrics.registry;
        build_info::register(registry);
        let ProcessMetrics { cpu_seconds, resident_bytes, virtual_bytes, started, open_fds, max_fds } =
            &metrics.process;
        let mut add = registry.adder("process");
        let help = "CPU time of the agent, without its child processes";
        add.add("cpu_seconds", "", help, cpu_seconds.clone());
        let help = "Resident memory of the agent, without its child processes";
        add.add("resident_memory_bytes", "", help, resident_bytes.clone());
        let help = "Virtual memory of the agent, without its child processes";
        add.add("virtual_memory_bytes", "", help, virtual_bytes.clone());
        let help = "When the agent started, in seconds since the Unix epoch";
        add.add("start_time_seconds", "", help, started.clone());
        add.add("open_fds", "", "Open file descriptors", open_fds.clone());
        add.add("max_fds", "", "Maximum number of open file descriptors", max_fds.clone());
        metrics.session.register(registry);
        metrics.session.tls.register(registry);
        metrics.saves.register(registry);
        metrics.sync.register(registry);
        metrics.sync.dataplane.register(registry);
        metrics.interfaces.register(registry);
        metrics.conntrack.register(registry);
        metrics.health_check_ports.register(registry);
        metrics.endpoint_checks.register(registry);
        metrics.drain.register(registry);
        let help = "Probes of the ClusterIPs of the API and of the cluster DNS, for `headgatectl migrate run`";
        registry.adder(AGENT).add("probes", "result (answered, failed)", help, metrics.probes.clone());
        let help = "Connections to HTTP ports that were closed because of limits, by port (health, metrics, drain or health_check_node_port) and reason: evicted (a new connection needed the place), or refused (not accepted, for example because of too many open files)";
        let closed = metrics.http_closed.clone();
        registry.adder(AGENT).add("http_connections_closed", "port, reason", help, closed);
        metrics.kube_proxy.register(registry);
        metrics.services.register(registry);
        metrics.userspace.register(registry);
        metrics.userspace.register_figures(registry);
        metrics
    }

    /// The resident memory of the agent, without its child processes.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.process.refresh();
        self.process.resident_bytes.get()
    }

    /// Encodes all metrics as OpenMetrics text, with the counts of the backlog.
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
    use std::time::Duration;

    use headgate_proto::v1::welcome::ResumeMode;

    use super::*;
    use crate::{dataplane::Report, reconcile::SyncKind};

    impl Metrics {
        pub(crate) fn registry(&self) -> &MetricRegistry {
            &self.registry
        }
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
}
