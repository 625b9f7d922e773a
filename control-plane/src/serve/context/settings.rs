//! What the command line says about serving.

use std::time::Duration;

use headgate_core::ServiceKey;

/// What serving needs to know.
#[derive(Clone)]
pub struct Settings {
    /// Name of this replica, shown to agents and people.
    pub replica_name: String,
    /// What the source is called: `files:DIR` or `kubernetes`.
    pub source_name: String,
    /// Longest time between two messages to an agent.
    pub heartbeat_interval: Duration,
    /// How long an agent that has seen newer state waits for this replica to catch up.
    pub behind_wait: Duration,
    /// How long a stream may take to say `Hello`.
    pub hello_timeout: Duration,
    /// How long a response of the general server may wait for its client to take some of it.
    pub stalled_response_timeout: Duration,
    /// How long agents have to go elsewhere when the replica stops.
    pub drain_grace: Duration,
    /// Whether nodes may use Inspect and reflection, as readers may.
    pub nodes_may_inspect: bool,
    /// The Service whose ready endpoints are the replicas, between which agents are balanced.
    /// Without it they are not balanced.
    pub balance_service: Option<ServiceKey>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            replica_name: "headgate".into(),
            source_name: String::new(),
            heartbeat_interval: Duration::from_secs(10),
            behind_wait: Duration::from_secs(30),
            hello_timeout: Duration::from_secs(10),
            stalled_response_timeout: Duration::from_secs(300),
            drain_grace: Duration::from_secs(2),
            nodes_may_inspect: false,
            balance_service: None,
        }
    }
}
