//! Encodes resources of the store into messages of limited size. Streams share these messages.

use std::collections::BTreeMap;

use bytes::Bytes;
use headgate_core::{Change, State};
use headgate_proto::{
    ChangesBuilder, References,
    frame::frame,
    v1::{self, source_position::Kind},
};

use super::log::{LogKey, LoggedKey};
use crate::transaction::SourceKind;

/// The versions before and after a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) previous_version: u64,
    pub(super) version: u64,
    /// Agents acknowledge the step at once.
    pub(super) is_urgent: bool,
}

/// The kinds of positions, and their values on the wire.
const KINDS: [(SourceKind, Kind); 6] = [
    (SourceKind::Services, Kind::Services),
    (SourceKind::EndpointSlices, Kind::EndpointSlices),
    (SourceKind::Nodes, Kind::Nodes),
    (SourceKind::ServiceCidrs, Kind::ServiceCidrs),
    (SourceKind::Pods, Kind::Pods),
    (SourceKind::Files, Kind::Files),
];

/// The positions of a source on the wire.
pub(crate) fn positions_to_wire(positions: impl IntoIterator<Item = (SourceKind, u64)>) -> Vec<v1::SourcePosition> {
    let to_wire = |(kind, position)| {
        let kind = KINDS.iter().find(|(known, _)| *known == kind).map_or(Kind::Unspecified, |(_, kind)| *kind);
        v1::SourcePosition { kind: kind.into(), position }
    };
    positions.into_iter().map(to_wire).collect()
}

/// Positions by kind. A kind that this program does not know is left out, because its positions
/// cannot be compared.
pub(crate) fn positions_from_wire(wire: &[v1::SourcePosition]) -> BTreeMap<SourceKind, u64> {
    let from_wire = |wire: &v1::SourcePosition| {
        let (kind, _) = KINDS.into_iter().find(|(_, kind)| *kind == wire.kind())?;
        Some((kind, wire.position))
    };
    wire.iter().filter_map(from_wire).collect()
}

/// Encodes a message of the server with its gRPC prefix.
pub(crate) fn server_frame(body: v1::server_message::Body) -> Bytes {
    frame(&v1::ServerMessage { body: Some(body) })
}

/// The present value of a key as a change; a removal if the key has no value.
pub(super) fn present(state: &State, key: &LogKey) -> Change {
    match key {
        LogKey::Service(key) => match state.entry(key).and_then(|entry| entry.service()) {
            Some(service) => Change::from(service.clone()),
            None => Change::RemoveService((**key).clone()),
        },
        LogKey::Endpoint(key, address) => match state.entry(key).and_then(|entry| entry.endpoints().get(address)) {
            Some(endpoint) => Change::Endpoint((**key).clone(), endpoint.clone()),
            None => Change::RemoveEndpoint((**key).clone(), *address),
        },
        LogKey::Cidr(name) => match state.service_cidr(name) {
            Some(cidr) => Change::ServiceCidr(cidr.clone()),
            None => Change::RemoveServiceCidr(name.clone()),
        },
    }
}

/// A change to encode.
#[derive(Debug)]
pub(super) struct Item {
    change: Change,
    trigger_unix_ms: u64,
    references: References,
}

/// The present values of log entries in the order of encoding, with the references that can replace
/// parts of each value.
pub(super) fn present_all<'a>(
    state: &State,
    entries: impl IntoIterator<Item = &'a LoggedKey>,
    references: impl Fn(&Change) -> References,
) -> Vec<Item> {
    let mut entries: Vec<&LoggedKey> = entries.into_iter().collect();
    entries.sort_unstable_by(|a, b| a.key.order().cmp(&b.key.order()));
    let item = |entry: &LoggedKey| {
        let change = present(state, &entry.key);
        Item { trigger_unix_ms: entry.trigger_unix_ms, references: references(&change), change }
    };
    entries.into_iter().map(item).collect()
}

/// The messages of one step. If there are several messages, the receiver reaches the version of the
/// step with the last message. `None` if the estimated size of all messages before the last message
/// exceeds `max_split_bytes`.
pub(super) fn batch_frames(
    span: Span,
    positions: &[v1::SourcePosition],
    changes: impl IntoIterator<Item = Item>,
    part_bytes: usize,
    max_split_bytes: usize,
) -> Option<Box<[Bytes]>> {
    let Span { previous_version, version, is_urgent } = span;
    let mut parts = MessageParts::default();
    for change in changes {
        parts.push(change, part_bytes);
        if parts.full_bytes > max_split_bytes {
            return None;
        }
    }
    let is_slices = |position: &&v1::SourcePosition| position.kind() == Kind::EndpointSlices;
    let batch = |version: u64, positions: &[v1::SourcePosition], builder: ChangesBuilder| {
        server_frame(v1::server_message::Body::Batch(v1::Batch {
            follows_version: (version.checked_sub(1) != Some(previous_version)).then_some(previous_version),
            version,
            positions: positions.iter().filter(|position| !is_slices(position)).copied().collect(),
            changes: Some(builder.finish()),
            endpoint_slices_position: positions.iter().find(is_slices).map_or(0, |position| position.position),
            acknowledge_at_once: is_urgent,
        }))
    };
    let mut frames: Vec<Bytes> = parts.full.into_iter().map(|part| batch(previous_version, &[], part)).collect();
    frames.push(batch(version, positions, parts.last));
    Some(frames.into())
}

/// The messages of a part of a snapshot; empty if there are no resources.
pub(super) fn chunk_frames(changes: impl IntoIterator<Item = Change>, part_bytes: usize) -> Box<[Bytes]> {
    let mut parts = MessageParts::default();
    for change in changes {
        parts.push(Item { change, trigger_unix_ms: 0, references: References::default() }, part_bytes);
    }
    let chunk = |builder: ChangesBuilder| {
        let changes = Some(builder.finish());
        server_frame(v1::server_message::Body::SnapshotChunk(v1::SnapshotChunk { changes }))
    };
    let has_last = parts.last.resources() > 0;
    parts.full.into_iter().chain(has_last.then_some(parts.last)).map(chunk).collect()
}

/// Changes divided into messages.
#[derive(Default)]
struct MessageParts {
    full: Vec<ChangesBuilder>,
    /// Estimated size of `full`.
    full_bytes: usize,
    last: ChangesBuilder,
}

impl MessageParts {
    fn push(&mut self, Item { change, trigger_unix_ms, references }: Item, part_bytes: usize) {
        if self.last.estimated_bytes() >= part_bytes {
            self.full_bytes += self.last.estimated_bytes();
            self.full.push(std::mem::take(&mut self.last));
        }
        self.last.push(&change, trigger_unix_ms, references);
    }
}
