//! The state of this replica, for agents of other replicas that look for a better replica
//! (discovery.proto, section 15). It is the only answer on its stream.
//!
//! An answer is cheap: it reads a few numbers. A request names a node, and the client must be
//! allowed to open a stream for this node. Each request counts against the node's limit of new
//! streams.

use std::collections::BTreeMap;

use bytes::Bytes;
use headgate_core::node_state::SourceState;
use headgate_proto::v1::{self, server_message::Body};
use tokio::time::Instant;

use super::{Streams, session};
use crate::{
    identity::Peer,
    serve::{
        context::{Lifecycle, milliseconds},
        fleet::End,
    },
    store::{positions_to_wire, server_frame},
    transaction::SourceKind,
};

/// The reason why a stream ends after the answer.
pub(crate) const ANSWERED: &str = "standing";

/// Returns the answer with its gRPC prefix, or the end of the stream if the request is refused.
pub(crate) fn standing(
    streams: &Streams,
    peer: &Peer,
    request: &v1::StandingRequest,
    now: Instant,
) -> Result<Bytes, End> {
    session::admit_node(&request.node_name, peer, &streams.context)?;
    session::admit_stream(streams, peer, &request.node_name, now)?;
    let context = &streams.context;
    let store = &context.store;
    let is_serving = context.lifecycle() == Lifecycle::Serving;
    let source = if is_serving { store.source_state_for_others() } else { SourceState::Unlisted };
    // The answer has only positions that can be compared between replicas.
    let comparable = |positions: BTreeMap<SourceKind, u64>| {
        positions_to_wire(positions.into_iter().filter(|(kind, _)| kind.is_comparable()))
    };
    Ok(server_frame(Body::Standing(v1::StandingResponse {
        replica: context.settings.replica_name.clone(),
        epoch: store.epoch(),
        source_state: v1::SourceState::from(source).into(),
        source_age_ms: milliseconds(store.source_age()),
        positions: comparable(store.positions()),
        changed_positions: comparable(store.changed_positions()),
    })))
}
