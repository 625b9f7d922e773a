//! The metrics of the control plane, named `headgate_…`, in base units (seconds, bytes).

use std::{
    fmt,
    ops::Deref,
    sync::atomic::{AtomicI64, AtomicU64},
    time::Duration,
};

use headgate_core::node_state::SourceState;
use headgate_listener::ProcessMetrics;
use headgate_proto::v1;
use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, text::encode},
    metrics::{MetricType, TypedMetric, counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Metric, Registry},
};

use crate::objects::SourceKind;

pub(crate) type Total = Counter<u64, AtomicU64>;
pub(crate) type Level = Gauge<i64, AtomicI64>;

/// A counted pod that waits for the drain barrier.
pub(crate) struct CountedPod(Level);

impl Drop for CountedPod {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Defines the metrics by a table: field, type, name without its prefix, labels, and meaning.
macro_rules! metrics {
    ($($field:ident: $kind:ty = $name:literal $([$($label:ident),+])?, $meaning:literal;)+) => {
        /// All metrics of a replica. Names of nodes and services are never label values.
        #[derive(Debug)]
        pub struct Metrics {
            registry: Registry,
            process: ProcessMetrics,
            $(pub(crate) $field: $kind,)+
        }

        impl Metrics {
            /// Returns the metrics, and adds their rows of `docs/control-plane-metrics.md`.
            fn described(rows: &mut Vec<String>) -> Self {
                let (mut registry, process) = (Registry::default(), ProcessMetrics::default());
                let mut add = Adder { prefix: "process", registry: &mut registry, rows };
                add.of_process(&process);
                let mut add = Adder { prefix: "headgate", ..add };
                $(let $field: $kind = add.add($name, [$($(stringify!($label)),+)?], $meaning);)+
                Self { registry, process, $($field),+ }
            }
        }
    };
}

metrics! {
    programmed_everywhere: Histogram = "control_plane_programmed_everywhere_seconds",
        "Time from the arrival of a change at this replica until all connected agents had the change in their kernels. The time that an ACK waits at its agent does not count";
    gate_seconds: Histogram = "readiness_gate_seconds",
        "Time from the moment at which a pod lacked only its readiness gate until this replica set the condition";
    programmed_on_node: Histogram = "control_plane_programmed_on_node_seconds",
        "Time from the trigger of a change until the kernel of a node had it, once for each change and each agent of this replica. The histograms of all replicas add up";
    fleet_everywhere: Histogram = "fleet_programmed_everywhere_seconds",
        "Time from the trigger of a change until the kernel of the last node of all replicas had it. One replica records each change, so the histograms of all replicas add up";
    build: Labelled<Level> = "build_info" [version], "Always 1. The label is the version of the program";
    other_versions: Level = "control_plane_agents_of_other_version",
        "Agents with a stream whose version differs from the version of this replica";
    agents: Labelled<Level> = "control_plane_agents" [state],
        "Agents with a stream, by state: up_to_date (everything that the replica has known for more than a second is programmed), behind, failing (the last attempt failed, or a resource is rejected), waiting (the agent has acknowledged nothing, or the source is unlisted), cut_off (the source is cut off), or standby (another service proxy works on the node)";
    source_ages: Labelled<Level> = "source_age_seconds" [kind],
        "Time since the source last confirmed the objects of a kind, by kind";
    source_errors: Labelled<Total, 2> = "source_errors" [kind, reason],
        "Refused objects, dropped watches and other errors of the source, by kind and reason";
    problems: Level = "source_problems", "Objects, or parts of objects, that are rejected or have no effect";
    conflicts: Level = "service_conflicts",
        "Services that lack addresses, ports or NodePorts, because these belong to other Services";
    synced: Level = "source_synced", "1 after every kind has been listed, 0 before";
    source_states: Labelled<Level> = "source_state" [state],
        "1 for the current state of the source, 0 for the other states: unlisted (not every kind has been listed), following, or cut_off (every kind was listed, and changes no longer arrive)";
    resources: Labelled<Level> = "resources" [kind], "Resources in the store, by kind";
    version: Level = "store_version", "Version of the newest change in the store";
    tombstones: Level = "store_tombstones", "Removals in the log of the store";
    changes: Total = "store_changes", "Changes that the store applied; changes without effect do not count";
    streams: Level = "streams", "Open streams of agents";
    streams_opened: Total = "streams_opened", "Streams whose Hello was accepted";
    streams_rejected: Labelled<Total> = "streams_rejected" [reason],
        "Streams that were refused, or ended because of an error of the agent, by reason";
    streams_ended: Labelled<Total> = "streams_ended" [reason],
        "Streams that ended without an error of the agent, by reason";
    resumes: Labelled<Total> = "resumes" [mode], "Streams that began, by resume mode: log, digests or full";
    resumed_resources: Total = "resumed_resources",
        "Resources and removals sent to bring agents up to date when their streams began";
    snapshots: Total = "snapshots", "Snapshots sent, full and partial";
    snapshots_in_flight: Level = "snapshots_in_flight", "Snapshots that are being sent";
    snapshots_waiting: Level = "snapshots_waiting", "Snapshots that wait in the queue";
    snapshots_waited: Total = "snapshots_waited", "Snapshots that waited in the queue before they began";
    messages_sent: Total = "messages_sent", "Messages sent to agents";
    bytes_sent: Total = "sent_bytes", "Bytes of messages sent to agents, with their gRPC prefixes";
    agent_messages: Labelled<Total> = "agent_messages" [message], "Messages from agents, by type";
    agent_messages_ignored: Labelled<Total> = "agent_messages_ignored" [reason],
        "Messages from agents that had no effect, by reason";
    rejected_resources: Total = "rejected_resources", "Resources named in NACKs";
    behind_waits: Total = "behind_waits",
        "Times that an agent had to wait because it had seen a later position of the source than this replica";
    behind_waits_expired: Total = "behind_waits_expired",
        "Waits for this replica's source that timed out. After such a wait, the agent receives this replica's older state";
    connections_refused: Labelled<Total> = "connections_refused" [reason],
        "Connections closed before any request, by reason";
    http_closed: Labelled<Total, 2> = "http_connections_closed" [port, reason],
        "Connections to the HTTP pages that were closed because of limits, by port (pages) and reason: evicted (a new connection needed the place), or refused (not accepted, for example because of too many open files)";
    stalled_responses: Total = "connections_untaken",
        "Connections closed because the client read nothing of a pending response, or of its stream, for minutes";
    handshakes_failed: Labelled<Total> = "tls_handshakes_failed" [reason], "TLS handshakes that failed, by reason";
    handshakes: Labelled<Total> = "tls_handshakes" [kind], "TLS handshakes that succeeded, by kind: full or resumed";
    handshakes_pending: Labelled<Level> = "tls_handshakes_pending" [state],
        "Connections that have not proved who they are, by state: active or waiting (for its turn) at the gRPC ports, enrolling or waiting_to_enrol at --enrolment-listen";
    tls_reloads: Labelled<Total> = "tls_reloads" [result],
        "Times that changed TLS files were read, by result: success (the new files are in use) or failure (the earlier files stay in use)";
    tls_not_after: Labelled<Level> = "tls_certificate_not_after_seconds" [file],
        "Expiry time in seconds since 1970, by file: this replica's certificate (cert), and the first authority of --tls-client-ca and --tls-node-ca to expire (client_ca)";
    requests_denied: Labelled<Total> = "requests_denied" [reason], "Requests that were refused, by reason";
    barriers: Labelled<Total> = "barrier_answers" [result],
        "Answers to pods that stop and ask when no node sends new connections to them, by result";
    verifications: Labelled<Total> = "node_verifications" [result],
        "Nodes that were verified on request (headgatectl verify), by result: verified, drift (something differs), or unverified (a part could not be compared)";
    drifting: Level = "control_plane_drifting_agents",
        "Agents whose last verification, as they report it, found a difference between the kernel and what it should forward";
    peer_questions: Total = "peer_questions", "Questions of other replicas about what all nodes have programmed";
    absent: Labelled<Level> = "control_plane_nodes_absent" [reason],
        "Nodes that should have an agent and have no stream to any replica, by reason: lost (a replica remembers a stream), unknown (replicas may be missing that know more), or never (no replica has ever had a stream). All replicas report the same Nodes";
    enrolments: Labelled<Total> = "enrolments" [result],
        "Attempts of agents to get a certificate (--enrolment-listen), by result";
    barriers_waiting: Level = "barrier_waiting", "Pods that wait for the drain barrier at this replica";
    gates_waiting: Level = "readiness_gates_waiting",
        "Pods that lack only the readiness gate headgate.io/programmed (--ready-everywhere)";
    gates_set: Labelled<Total> = "readiness_gates_set" [reason],
        "Conditions of readiness gates that this replica set, by reason: programmed (all nodes use the pod), timed_out (some nodes have not confirmed this within the bound), or no_endpoints (no Service had an endpoint of the pod within the bound)";
    gate_failures: Total = "readiness_gate_request_failures", "Failed patches of the conditions of readiness gates";
    balance_replicas: Level = "balance_replicas", "Ready endpoints of --balance-service, which are the replicas";
    balance_limit: Level = "balance_limit_agents",
        "Number of agents above which this replica asks some agents to move to another replica; 0 while it asks no agent";
    balance_asked: Total = "balance_asked_agents",
        "Times that this replica asked an agent to move to another replica for balance";
}

impl Default for Metrics {
    /// The time of this call counts as the start of the process.
    fn default() -> Self {
        let metrics = Self::described(&mut Vec::new());
        metrics.build.of([env!("CARGO_PKG_VERSION")]).set(1);
        metrics
    }
}

/// Converts a count to the value of a gauge.
pub(crate) fn level(count: impl TryInto<i64>) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}

impl Metrics {
    /// Returns all metrics in the OpenMetrics text format.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        self.process.refresh();
        if let Err(error) = encode(&mut text, &self.registry) {
            // Writing to a String cannot fail, so an error means that a metric has a defect.
            tracing::error!(%error, "metrics cannot be encoded");
        }
        text
    }

    /// When this replica's certificate, or an authority that it trusts, expires first; 0 without
    /// TLS.
    pub(crate) fn certificate_not_after_unix_ms(&self) -> u64 {
        let of = |file| Some(self.tls_not_after.metrics.get(&[("file", file)])?.get());
        let first = ["cert", "client_ca"].into_iter().filter_map(of).min().unwrap_or_default();
        u64::try_from(first).unwrap_or_default().saturating_mul(1_000)
    }

    pub(crate) fn set_source_state(&self, state: SourceState) {
        self.synced.set((state != SourceState::Unlisted).into());
        for other in SourceState::ALL {
            self.source_states.of([other.as_str()]).set((other == state).into());
        }
    }

    pub(crate) fn set_resources(&self, services: usize, endpoints: usize, service_cidrs: usize, nodes: usize) {
        let counts = [("service", services), ("endpoint", endpoints), ("service_cidr", service_cidrs), ("node", nodes)];
        for (kind, count) in counts {
            self.resources.of([kind]).set(level(count));
        }
    }

    pub(crate) fn count_barrier(&self, result: v1::barrier_answer::Result) {
        use v1::barrier_answer::Result;
        let result = match result {
            Result::Refused => "refused",
            Result::Drained => "drained",
            Result::Incomplete => "incomplete",
            Result::Last => "last",
        };
        self.barriers.of([result]).inc();
    }

    pub(crate) fn count_gate_set(&self, reason: &'static str, after: Duration) {
        self.gates_set.of([reason]).inc();
        self.gate_seconds.observe(after.as_secs_f64());
    }

    /// Counts a pod that waits until the returned value is dropped.
    pub(crate) fn barrier_waits(&self) -> CountedPod {
        self.barriers_waiting.inc();
        CountedPod(self.barriers_waiting.clone())
    }
}

pub(crate) fn kind_name(kind: SourceKind) -> &'static str {
    match kind {
        SourceKind::Services => "services",
        SourceKind::EndpointSlices => "endpoint_slices",
        SourceKind::Nodes => "nodes",
        SourceKind::ServiceCidrs => "service_cidrs",
        SourceKind::Pods => "pods",
        SourceKind::Files => "files",
    }
}

// Descriptions of all metrics, from which `docs/control-plane-metrics.md` is made.

/// Upper bounds of the histograms' buckets, in seconds. The smallest bounds suit a quiet fleet in
/// one rack, and the largest bounds suit nodes that are stuck.
const SECONDS: [f64; 14] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0];

/// Metrics that differ in the values of `N` labels. Every value is part of the program.
#[derive(Debug, Clone)]
pub(crate) struct Labelled<M, const N: usize = 1> {
    names: [&'static str; N],
    /// The metrics by the names and values of their labels.
    pub(crate) metrics: Family<[(&'static str, &'static str); N], M>,
}

impl<M: Clone + Default, const N: usize> Labelled<M, N> {
    /// Returns the metric with these values of the labels.
    pub(crate) fn of(&self, values: [&'static str; N]) -> impl Deref<Target = M> + '_ {
        let mut value = values.into_iter();
        self.metrics.get_or_create(&self.names.map(|name| (name, value.next().unwrap_or_default())))
    }
}

impl<M: EncodeMetric + TypedMetric, const N: usize> EncodeMetric for Labelled<M, N> {
    fn encode(&self, encoder: MetricEncoder<'_>) -> fmt::Result {
        self.metrics.encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        self.metrics.metric_type()
    }
}

/// A metric in its initial state, with labels of these names.
trait Initial<const N: usize> {
    fn initial(labels: [&'static str; N]) -> Self;
}

impl<A: Default> Initial<0> for Counter<u64, A> {
    fn initial(_: [&'static str; 0]) -> Self {
        Self::default()
    }
}

impl<N, A: Default> Initial<0> for Gauge<N, A> {
    fn initial(_: [&'static str; 0]) -> Self {
        Self::default()
    }
}

impl Initial<0> for Histogram {
    fn initial(_: [&'static str; 0]) -> Self {
        Self::new(SECONDS)
    }
}

impl<M: Default, const N: usize> Initial<N> for Labelled<M, N> {
    fn initial(names: [&'static str; N]) -> Self {
        Self { names, metrics: Family::default() }
    }
}

/// Registers metrics, and describes each of them.
struct Adder<'a> {
    prefix: &'static str,
    registry: &'a mut Registry,
    /// The rows of `docs/control-plane-metrics.md`.
    rows: &'a mut Vec<String>,
}

impl Adder<'_> {
    /// Registers a metric, adds its row, and returns it.
    fn add<M: Initial<N> + Clone + Metric, const N: usize>(
        &mut self,
        name: &str,
        labels: [&'static str; N],
        meaning: &str,
    ) -> M {
        let metric = M::initial(labels);
        self.register(name, &labels.join(", "), meaning, metric.clone());
        metric
    }

    fn register(&mut self, name: &str, labels: &str, meaning: &str, metric: impl Metric) {
        let (prefix, kind) = (self.prefix, metric.metric_type());
        let suffix = if matches!(kind, MetricType::Counter) { "_total" } else { "" };
        self.rows.push(format!("| `{prefix}_{name}{suffix}` | {} | {labels} | {meaning} |\n", kind.as_str()));
        self.registry.register(format!("{prefix}_{name}"), meaning, metric);
    }

    fn of_process(&mut self, process: &ProcessMetrics) {
        let ProcessMetrics { cpu_seconds, resident_bytes, virtual_bytes, started, open_fds, max_fds } = process;
        self.register("cpu_seconds", "", "CPU time of the replica", cpu_seconds.clone());
        self.register("resident_memory_bytes", "", "Resident memory of the replica", resident_bytes.clone());
        self.register("virtual_memory_bytes", "", "Virtual memory of the replica", virtual_bytes.clone());
        let help = "When the replica started, in seconds since the Unix epoch";
        self.register("start_time_seconds", "", help, started.clone());
        self.register("open_fds", "", "Open file descriptors", open_fds.clone());
        self.register("max_fds", "", "Maximum number of open file descriptors", max_fds.clone());
    }
}

#[cfg(test)]
mod catalogue_tests {
    #![allow(clippy::unwrap_used)]
    use std::{fs, path::Path};

    use crate::metrics::Metrics;

    const HEAD: &str = "\
# Metrics of the control plane

<!-- `make docs` writes this page from control-plane/src/metrics.rs; edit that file instead. -->

`GET /metrics` of each replica (`--metrics-listen`) answers in the Prometheus text format, or in the
OpenMetrics format if the request asks for it. A metric with labels appears once it has a value. The
number of label values is bounded: names of nodes and services are never label values.
`headgatectl agents` and `headgatectl status` show these names.

| name | type | labels | meaning |
| --- | --- | --- | --- |
";

    /// `make docs` sets `HEADGATE_WRITE_DOCS`. If this variable is set, the test writes the file
    /// before it compares the file with the page.
    #[test]
    fn documents_are_current() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/control-plane-metrics.md");
        let mut rows = Vec::new();
        drop(Metrics::described(&mut rows));
        rows.sort_unstable();
        let page = [HEAD, &rows.concat()].concat();
        if std::env::var_os("HEADGATE_WRITE_DOCS").is_some() {
            fs::write(&path, &page).unwrap();
        }
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(found == page, "docs/control-plane-metrics.md is stale: run `make docs`");
    }
}
