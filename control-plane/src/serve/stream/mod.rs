//! The messages of one stream of deltas: what the replica sends to the agent, and what the agent
//! answers. [`super::transport`] reads and writes the connection.

mod session;
mod snapshot_queue;
mod standing;

use std::sync::Arc;

use self::snapshot_queue::SnapshotQueue;
pub(crate) use self::{
    session::{Session, closed_before_hello, closed_by_agent, malformed, no_hello_in_time, stopping, too_large},
    standing::{ANSWERED, standing},
};
use super::{
    barrier::Barrier,
    context::{Context, Settings, Visited},
    everywhere::Everywhere,
    fleet::Fleet,
    overview::Overview,
};
use crate::{metrics::Metrics, store::Store};

/// The state that all streams share.
pub(crate) struct Streams {
    pub(crate) context: Arc<Context>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) everywhere: Arc<Everywhere>,
    pub(crate) barrier: Arc<Barrier>,
    pub(crate) overview: Arc<Overview>,
    snapshots: Arc<SnapshotQueue>,
    _visited: Visited,
}

impl Streams {
    /// Returns the shared state for the streams of a replica that serves `store`.
    pub(crate) fn new(store: Arc<Store>, metrics: Arc<Metrics>, settings: Settings) -> Arc<Self> {
        let snapshots = Arc::new(SnapshotQueue::new(Arc::clone(&metrics)));
        let context = Context::new(store, metrics, settings);
        let visited = context.visits.add(Arc::<SnapshotQueue>::clone(&snapshots));
        let fleet = Fleet::new(Arc::clone(&context));
        let everywhere = Everywhere::new(Arc::clone(&fleet));
        let barrier = Barrier::new(Arc::clone(&fleet), Arc::clone(&everywhere));
        let overview = Overview::new(Arc::clone(&fleet), Arc::clone(&everywhere));
        Arc::new(Self { context, fleet, everywhere, barrier, overview, snapshots, _visited: visited })
    }
}
