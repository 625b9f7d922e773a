//! The metrics of the control plane. All names begin with `headgate_`, and values are in base units
//! (seconds, bytes).

mod catalogue;

use std::{
    sync::atomic::{AtomicI64, AtomicU64},
    time::Duration,
};

use headgate_core::node_state::SourceState;
use headgate_proto::v1;
use headgate_tls::{Loaded, Validity};
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use self::catalogue::{Adder, Labelled};
use crate::transaction::SourceKind;

/// Defines a struct for each set of labels.
macro_rules! labels {
    ($($name:ident { $($label:ident),+ })+) => {$(
        #[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
        struct $name {
            $($label: &'static str),+
        }

        impl Labelled for $name {
            const LABELS: &str = stringify!($($label),+);
        }
    )+};
}

labels! {
    SourceError { kind, reason }
    Reason { reason }
    Outcome { result }
    TlsFile { file }
    Kind { kind }
    Mode { mode }
    Message { message }
    Quantile { quantile }
    State { state }
}

/// Upper bounds of the histogram's buckets, in seconds. The smallest bounds suit a quiet fleet in
/// one rack, and the largest bounds suit nodes that are stuck.
const EVERYWHERE_SECONDS: [f64; 14] =
    [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0];

type Total = Counter<u64, AtomicU64>;
type Level = Gauge<i64, AtomicI64>;
type Seconds = Gauge<f64, AtomicU64>;

/// A counted pod that waits for the drain barrier.
pub(crate) struct Waiting(Level);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// All metrics of a replica. The number of label values is bounded: names of nodes and services are
/// never label values.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    programmed_everywhere: Histogram,
    recently_everywhere: Family<Quantile, Seconds>,
    agents: Family<State, Level>,
    source_ages: Family<Kind, Level>,
    source_errors: Family<SourceError, Total>,
    problems: Level,
    conflicts: Level,
    synced: Level,
    source_states: Family<State, Level>,
    resources: Family<Kind, Level>,
    version: Level,
    tombstones: Level,
    changes: Total,
    pub(crate) streams: Level,
    streams_opened: Total,
    streams_rejected: Family<Reason, Total>,
    streams_ended: Family<Reason, Total>,
    resumes: Family<Mode, Total>,
    pub(crate) resumed_resources: Total,
    pub(crate) snapshots: Total,
    snapshots_in_flight: Level,
    snapshots_waiting: Level,
    pub(crate) snapshots_waited: Total,
    messages_sent: Total,
    bytes_sent: Total,
    agent_messages: Family<Message, Total>,
    agent_messages_ignored: Family<Reason, Total>,
    rejected_resources: Total,
    pub(crate) behind_waits: Total,
    pub(crate) behind_waits_expired: Total,
    connections_refused: Family<Reason, Total>,
    pub(crate) stalled_responses: Total,
    handshakes_failed: Family<Reason, Total>,
    handshakes: Family<Kind, Total>,
    handshakes_pending: Family<State, Level>,
    tls_reloads: Family<Outcome, Total>,
    tls_not_after: Family<TlsFile, Level>,
    requests_denied: Family<Reason, Total>,
    barriers: Family<Outcome, Total>,
    verifications: Family<Outcome, Total>,
    drifting: Level,
    absent: Family<Reason, Level>,
    peer_questions: Total,
    enrolments: Family<Outcome, Total>,
    barriers_waiting: Level,
    gates_waiting: Level,
    gates_set: Family<Reason, Total>,
    gate_failures: Total,
    gate_seconds: Histogram,
    balance_replicas: Level,
    balance_limit: Level,
    pub(crate) balance_asked: Total,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::described(&mut Vec::new())
    }
}

impl Metrics {
    /// Returns the metrics, and adds their rows of `docs/control-plane-metrics.md`.
    fn described(rows: &mut Vec<String>) -> Self {
        let mut add = Adder { registry: Registry::with_prefix("headgate"), rows };
        let programmed_everywhere = Histogram::new(EVERYWHERE_SECONDS);
        add.register(
            "control_plane_programmed_everywhere_seconds",
            "Time from the arrival of a change at this replica until all connected agents had the change in their kernels. The time that an ACK waits at its agent does not count",
            programmed_everywhere.clone(),
        );
        let gate_seconds = Histogram::new(EVERYWHERE_SECONDS);
        add.register(
            "readiness_gate_seconds",
            "Time from the moment at which a pod lacked only its readiness gate until this replica set the condition",
            gate_seconds.clone(),
        );
        Self {
            programmed_everywhere,
            recently_everywhere: add.add(
                "control_plane_recently_programmed_everywhere_seconds",
                "Time from the arrival of a change at this replica until all connected agents had the change in their kernels, for the last 1,024 changes at most: p50, p99 and, as quantile 1, the maximum. Absent until a change is measured",
            ),
            agents: add.add("control_plane_agents", "Agents with a stream, by state: up_to_date (everything that the replica has known for more than a second is programmed), behind, failing (the last attempt failed, or a resource is rejected), waiting (the agent has acknowledged nothing, or the source is unlisted), or cut_off (the source is cut off)"),
            source_ages: add.add("source_age_seconds", "Time since the source last confirmed the objects of a kind, by kind"),
            source_errors: add
                .add("source_errors", "Refused objects, dropped watches and other errors of the source, by kind and reason"),
            problems: add.add("source_problems", "Objects, or parts of objects, that are rejected or have no effect"),
            conflicts: add.add("service_conflicts", "Services that lack addresses, ports or NodePorts, because these belong to other Services"),
            synced: add.add("source_synced", "1 after every kind has been listed, 0 before"),
            source_states: add.add("source_state", "1 for the current state of the source, 0 for the other states: unlisted (not every kind has been listed), following, or cut_off (every kind was listed, and changes no longer arrive)"),
            resources: add.add("resources", "Resources in the store, by kind"),
            version: add.add("store_version", "Version of the newest change in the store"),
            tombstones: add.add("store_tombstones", "Removals in the log of the store"),
            changes: add.add("store_changes", "Changes that the store applied; changes without effect do not count"),
            streams: add.add("streams", "Open streams of agents"),
            streams_opened: add.add("streams_opened", "Streams whose Hello was accepted"),
            streams_rejected: add.add("streams_rejected", "Streams that were refused, or ended because of an error of the agent, by reason"),
            streams_ended: add.add("streams_ended", "Streams that ended without an error of the agent, by reason"),
            resumes: add.add("resumes", "Streams that began, by resume mode: log, digests or full"),
            resumed_resources: add.add(
                "resumed_resources",
                "Resources and removals sent to bring agents up to date when their streams began",
            ),
            snapshots: add.add("snapshots", "Snapshots sent, full and partial"),
            snapshots_in_flight: add.add("snapshots_in_flight", "Snapshots that are being sent"),
            snapshots_waiting: add.add("snapshots_waiting", "Snapshots that wait in the queue"),
            snapshots_waited: add.add("snapshots_waited", "Snapshots that waited in the queue before they began"),
            messages_sent: add.add("messages_sent", "Messages sent to agents"),
            bytes_sent: add.add("sent_bytes", "Bytes of messages sent to agents, with their gRPC prefixes"),
            agent_messages: add.add("agent_messages", "Messages from agents, by type"),
            agent_messages_ignored: add.add("agent_messages_ignored", "Messages from agents that had no effect, by reason"),
            rejected_resources: add.add("rejected_resources", "Resources named in NACKs"),
            behind_waits: add.add("behind_waits", "Times that an agent had to wait because it had seen a later position of the source than this replica"),
            behind_waits_expired: add.add("behind_waits_expired", "Waits for this replica's source that timed out. After such a wait, the agent receives this replica's older state"),
            connections_refused: add.add("connections_refused", "Connections closed before any request, by reason"),
            stalled_responses: add.add(
                "connections_untaken",
                "Connections closed because the client read nothing of a pending response for minutes",
            ),
            handshakes_failed: add.add("tls_handshakes_failed", "TLS handshakes that failed, by reason"),
            handshakes: add.add("tls_handshakes", "TLS handshakes that succeeded, by kind: full or resumed"),
            handshakes_pending: add.add(
                "tls_handshakes_pending",
                "TLS handshakes that are not complete, by state: active, or waiting (for its turn)",
            ),
            tls_reloads: add.add("tls_reloads", "Times that changed TLS files were read, by result: success (the new files are in use) or failure (the earlier files stay in use)"),
            tls_not_after: add.add(
                "tls_certificate_not_after_seconds",
                "Expiry time in seconds since 1970, by file: this replica's certificate (cert), and the first authority in the client CA file to expire (client_ca)",
            ),
            requests_denied: add.add("requests_denied", "Requests that were refused, by reason"),
            barriers: add.add("barrier_answers", "Answers to pods that stop and ask when no node sends new connections to them, by result"),
            verifications: add.add("node_verifications", "Nodes that were verified on request (headgatectl verify), by result: verified, drift (something differs), or unverified (a part could not be compared)"),
            drifting: add.add("control_plane_drifting_agents", "Agents whose last verification, as they report it, found a difference between the kernel and what it should forward"),
            peer_questions: add.add("peer_questions", "Questions of other replicas about what all nodes have programmed"),
            absent: add.add("control_plane_nodes_absent", "Nodes that should have an agent and have no stream to any replica, by reason: lost (a replica remembers a stream), unknown (replicas may be missing that know more), or never (no replica has ever had a stream). All replicas report the same Nodes"),
            enrolments: add.add("enrolments", "Attempts of agents to get a certificate (--enrolment-listen), by result"),
            barriers_waiting: add.add("barrier_waiting", "Pods that wait for the drain barrier at this replica"),
            gates_waiting: add.add("readiness_gates_waiting", "Pods that lack only the readiness gate headgate.io/programmed (--ready-everywhere)"),
            gates_set: add.add("readiness_gates_set", "Conditions of readiness gates that this replica set, by reason: programmed (all nodes use the pod), timed_out (some nodes have not confirmed this within the bound), or no_endpoints (no Service had an endpoint of the pod within the bound)"),
            gate_failures: add.add("readiness_gate_request_failures", "Failed patches of the conditions of readiness gates"),
            gate_seconds,
            balance_replicas: add.add("balance_replicas", "Ready endpoints of --balance-service, which are the replicas"),
            balance_limit: add.add(
                "balance_limit_agents",
                "Number of agents above which this replica asks some agents to move to another replica; 0 while it asks no agent",
            ),
            balance_asked: add.add("balance_asked_agents", "Times that this replica asked an agent to move to another replica for balance"),
            registry: add.registry,
        }
    }
}

fn level(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

impl Metrics {
    /// Returns all metrics in the OpenMetrics text format.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        if let Err(error) = encode(&mut text, &self.registry) {
            // Writing to a String cannot fail, so an error means that a metric has a defect.
            tracing::error!(%error, "metrics cannot be encoded");
        }
        text
    }

    pub(crate) fn count_source_error(&self, kind: SourceKind, reason: &'static str) {
        self.source_errors.get_or_create(&SourceError { kind: kind_name(kind), reason }).inc();
    }

    pub(crate) fn observe_programmed_everywhere(&self, age: Duration) {
        self.programmed_everywhere.observe(age.as_secs_f64());
    }

    pub(crate) fn set_recently_everywhere(&self, quantiles: [(&'static str, Duration); 3]) {
        for (quantile, time) in quantiles {
            self.recently_everywhere.get_or_create(&Quantile { quantile }).set(time.as_secs_f64());
        }
    }

    pub(crate) fn set_agents(&self, states: [(&'static str, usize); 5]) {
        for (state, count) in states {
            self.agents.get_or_create(&State { state }).set(level(count));
        }
    }

    pub(crate) fn set_source_age(&self, kind: SourceKind, age: Duration) {
        let seconds = i64::try_from(age.as_secs()).unwrap_or(i64::MAX);
        self.source_ages.get_or_create(&Kind { kind: kind_name(kind) }).set(seconds);
    }

    pub(crate) fn set_conflicts(&self, count: usize) {
        self.conflicts.set(level(count));
    }

    pub(crate) fn set_problems(&self, count: usize) {
        self.problems.set(level(count));
    }

    pub(crate) fn set_source_state(&self, state: SourceState) {
        self.synced.set(i64::from(state != SourceState::Unlisted));
        for other in SourceState::ALL {
            self.source_states.get_or_create(&State { state: other.as_str() }).set(i64::from(other == state));
        }
    }

    pub(crate) fn set_resources(&self, services: usize, endpoints: usize, service_cidrs: usize, nodes: usize) {
        let counts = [("service", services), ("endpoint", endpoints), ("service_cidr", service_cidrs), ("node", nodes)];
        for (kind, count) in counts {
            self.resources.get_or_create(&Kind { kind }).set(level(count));
        }
    }

    pub(crate) fn set_store(&self, version: u64, tombstones: usize) {
        self.version.set(i64::try_from(version).unwrap_or(i64::MAX));
        self.tombstones.set(level(tombstones));
    }

    pub(crate) fn count_changes(&self, count: usize) {
        self.changes.inc_by(count as u64);
    }

    pub(crate) fn stream_opened(&self) {
        self.streams.inc();
        self.streams_opened.inc();
    }

    pub(crate) fn count_rejected(&self, reason: &'static str) {
        self.streams_rejected.get_or_create(&Reason { reason }).inc();
    }

    pub(crate) fn count_ended(&self, reason: &'static str) {
        self.streams_ended.get_or_create(&Reason { reason }).inc();
    }

    pub(crate) fn count_resume(&self, mode: &'static str) {
        self.resumes.get_or_create(&Mode { mode }).inc();
    }

    pub(crate) fn set_snapshots(&self, in_flight: usize, waiting: usize) {
        self.snapshots_in_flight.set(level(in_flight));
        self.snapshots_waiting.set(level(waiting));
    }

    pub(crate) fn count_sent(&self, bytes: usize) {
        self.messages_sent.inc();
        self.bytes_sent.inc_by(bytes as u64);
    }

    pub(crate) fn count_agent_message(&self, message: &'static str) {
        self.agent_messages.get_or_create(&Message { message }).inc();
    }

    pub(crate) fn count_ignored(&self, reason: &'static str) {
        self.agent_messages_ignored.get_or_create(&Reason { reason }).inc();
    }

    pub(crate) fn count_rejected_resources(&self, count: usize) {
        self.rejected_resources.inc_by(count as u64);
    }

    pub(crate) fn count_handshake(&self, is_resumed: bool) {
        let kind = if is_resumed { "resumed" } else { "full" };
        self.handshakes.get_or_create(&Kind { kind }).inc();
    }

    pub(crate) fn set_handshakes_pending(&self, active: usize, waiting: usize) {
        for (state, count) in [("active", active), ("waiting", waiting)] {
            self.handshakes_pending.get_or_create(&State { state }).set(level(count));
        }
    }

    pub(crate) fn count_tls_reload(&self, result: &'static str) {
        self.tls_reloads.get_or_create(&Outcome { result }).inc();
    }

    pub(crate) fn set_tls_not_after<C>(&self, loaded: &Loaded<C>) {
        let authorities = Validity { not_after: loaded.authorities_not_after, ..loaded.validity };
        for (file, validity) in [("cert", loaded.validity), ("client_ca", authorities)] {
            self.tls_not_after.get_or_create(&TlsFile { file }).set(validity.not_after_unix_seconds());
        }
    }

    pub(crate) fn count_request_denied(&self, reason: &'static str) {
        self.requests_denied.get_or_create(&Reason { reason }).inc();
    }

    pub(crate) fn count_barrier(&self, result: v1::barrier_answer::Result) {
        use v1::barrier_answer::Result;
        let result = match result {
            Result::Refused => "refused",
            Result::Drained => "drained",
            Result::Incomplete => "incomplete",
            Result::Last => "last",
        };
        self.barriers.get_or_create(&Outcome { result }).inc();
    }

    pub(crate) fn count_verification(&self, result: &'static str) {
        self.verifications.get_or_create(&Outcome { result }).inc();
    }

    pub(crate) fn set_drifting(&self, agents: usize) {
        self.drifting.set(level(agents));
    }

    pub(crate) fn count_peer_question(&self) {
        self.peer_questions.inc();
    }

    pub(crate) fn set_absent(&self, reason: &'static str, nodes: usize) {
        self.absent.get_or_create(&Reason { reason }).set(level(nodes));
    }

    pub(crate) fn set_gates_waiting(&self, pods: usize) {
        self.gates_waiting.set(level(pods));
    }

    pub(crate) fn count_gate_set(&self, reason: &'static str, after: Duration) {
        self.gates_set.get_or_create(&Reason { reason }).inc();
        self.gate_seconds.observe(after.as_secs_f64());
    }

    pub(crate) fn count_gate_failure(&self) {
        self.gate_failures.inc();
    }

    /// Counts a pod that waits until the returned value is dropped.
    pub(crate) fn barrier_waits(&self) -> Waiting {
        self.barriers_waiting.inc();
        Waiting(self.barriers_waiting.clone())
    }

    pub(crate) fn count_connection_refused(&self, reason: &'static str) {
        self.connections_refused.get_or_create(&Reason { reason }).inc();
    }

    /// Sets the metrics of balance. `limit` is 0 while this replica asks no agent to move.
    pub(crate) fn set_balance(&self, replicas: usize, limit: usize) {
        self.balance_replicas.set(level(replicas));
        self.balance_limit.set(level(limit));
    }

    pub(crate) fn count_enrolment(&self, result: &'static str) {
        self.enrolments.get_or_create(&Outcome { result }).inc();
    }

    pub(crate) fn count_handshake_failed(&self, reason: &'static str) {
        self.handshakes_failed.get_or_create(&Reason { reason }).inc();
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
