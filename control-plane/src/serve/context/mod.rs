//! State that all handlers of a replica share: store, metrics, settings, limits and signals.

mod audit;
mod settings;
mod tally;
mod visits;
mod warnings;

use std::{
    net::IpAddr,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use headgate_core::{node_state::SourceState, turns::Turns};
pub(crate) use headgate_listener::Network;
use tokio::sync::watch;

pub use self::settings::{EnrolmentSettings, PeerSettings, PeerTls, Ports, ReadinessSettings, Settings};
pub(crate) use self::{
    audit::{AuditedRequest, audit_object},
    tally::{Counted, Failures, Tally},
    visits::{PositionWait, Signal, Visit, Visited, Visits, start as start_visits},
    warnings::{Warning, Warnings},
};
use crate::{metrics::Metrics, store::Store};

/// The phase of a replica between start and stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lifecycle {
    Serving,
    /// Agents have been asked to move to another replica.
    Draining,
    /// The remaining streams end.
    Ended,
}

/// The state that all handlers of a replica share.
pub(crate) struct Context {
    pub(crate) store: Arc<Store>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) settings: Settings,
    pub(crate) warnings: Warnings,
    /// The lines of the audit log that each client may cause.
    audit_lines: Mutex<Turns<String>>,
    pub(crate) lifecycle: watch::Sender<Lifecycle>,
    pub(crate) visits: Arc<Visits>,
    pub(crate) failures: Arc<Failures>,
}

impl Context {
    /// Returns the context of a replica that serves `store`.
    pub(crate) fn new(store: Arc<Store>, metrics: Arc<Metrics>, settings: Settings) -> Arc<Self> {
        let Settings { heartbeat_interval, behind_wait, hello_timeout, stalled_response_timeout, .. } = settings;
        let visits = Visits::new([heartbeat_interval, behind_wait, hello_timeout, stalled_response_timeout]);
        Arc::new(Self {
            store,
            metrics,
            settings,
            warnings: Warnings::default(),
            audit_lines: audit::lines(),
            lifecycle: watch::Sender::new(Lifecycle::Serving),
            visits: Arc::new(visits),
            failures: Arc::default(),
        })
    }

    /// Returns the replica's present phase.
    pub(crate) fn lifecycle(&self) -> Lifecycle {
        *self.lifecycle.borrow()
    }

    /// Returns the network of a client. The address of a Node has a share of its own, which the
    /// node and its pods contest with nobody else.
    pub(crate) fn network(&self, client: IpAddr) -> Network {
        let is_node = self.store.is_node_address(client.to_canonical());
        if is_node { Network::of_node(client) } else { Network::of(client) }
    }

    /// Returns why this replica is not ready, or `None` if the replica is ready. All probes use
    /// this answer (discovery.proto, section 14).
    pub(crate) fn unready_reason(&self) -> Option<String> {
        if self.lifecycle() != Lifecycle::Serving {
            return Some("draining".into());
        }
        let reason = match self.store.source_state() {
            SourceState::Following => return None,
            SourceState::Unlisted => "the source has not been listed yet",
            SourceState::CutOff => "cut off from the source",
        };
        let problem = self.store.source_problem();
        Some(problem.map_or_else(|| reason.to_owned(), |problem| format!("{reason}: {problem}")))
    }
}

/// Returns the time since the Unix epoch in whole milliseconds.
pub(crate) fn unix_ms(time: SystemTime) -> u64 {
    milliseconds(time.duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// Returns a duration in whole milliseconds.
pub(crate) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
