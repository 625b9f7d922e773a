//! The protocol `headgate.v1`: generated types, and conversion between them and [`headgate_core`].
//!
//! The head of `proto/headgate/v1/discovery.proto` documents the contract. Conversion to the wire
//! cannot fail. Conversion from the wire reports unusable resources and converts the other
//! resources.

mod decode;
mod encode;
mod verification;

use bytes::{BufMut as _, Bytes, BytesMut};
use headgate_core::{Protocol, ProxyProtocol, node_state::SourceState};
use prost::Message;

pub use decode::{Decoder, UnknownReference, digests_from_wire, node_from_wire, reserved_from_wire};
pub use encode::{ChangesBuilder, References, address_to_wire, digests_to_wire, node_to_wire, reserved_to_wire};
/// Rules that all programs share, for programs that do not use the core crate.
pub use headgate_core::{dns_name::check_subdomain, errors, plaintext, printable};
pub use verification::{NodeView, ServiceDigests};

/// Generated from `proto/headgate/v1`.
#[allow(
    missing_docs,
    clippy::all,
    clippy::semicolon_if_nothing_returned,
    clippy::needless_pass_by_value,
    unreachable_pub
)]
pub mod v1 {
    tonic::include_proto!("headgate.v1");
}

/// The numbers of the values of enums on the wire.
const PROTOCOLS: [(Protocol, v1::Protocol); 3] =
    [(Protocol::Tcp, v1::Protocol::Tcp), (Protocol::Udp, v1::Protocol::Udp), (Protocol::Sctp, v1::Protocol::Sctp)];
const PROXY_PROTOCOLS: [(Option<ProxyProtocol>, v1::ProxyProtocol); 3] = [
    (None, v1::ProxyProtocol::None),
    (Some(ProxyProtocol::V1), v1::ProxyProtocol::V1),
    (Some(ProxyProtocol::V2), v1::ProxyProtocol::V2),
];

/// Returns the number of a value, which the table has.
fn to_number<T: Copy + PartialEq, W: Copy + Into<i32>>(table: &[(T, W)], value: T) -> i32 {
    table.iter().find(|(known, _)| *known == value).map_or(0, |(_, wire)| (*wire).into())
}

fn from_number<T: Copy, W: Copy + Into<i32>>(table: &[(T, W)], number: i32) -> Option<T> {
    table.iter().find(|(_, wire)| (*wire).into() == number).map(|(value, _)| *value)
}

impl From<SourceState> for v1::SourceState {
    fn from(state: SourceState) -> Self {
        match state {
            SourceState::Unlisted => Self::Unlisted,
            SourceState::CutOff => Self::CutOff,
            SourceState::Following => Self::Following,
        }
    }
}

/// A missing or unknown state counts as [`SourceState::Unlisted`].
impl From<v1::SourceState> for SourceState {
    fn from(state: v1::SourceState) -> Self {
        match state {
            v1::SourceState::Unspecified | v1::SourceState::Unlisted => Self::Unlisted,
            v1::SourceState::CutOff => Self::CutOff,
            v1::SourceState::Following => Self::Following,
        }
    }
}

/// Serializes the kind of a position by its name in the protocol.
fn kind_name<S: serde::Serializer>(kind: &i32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(v1::source_position::Kind::try_from(*kind).unwrap_or_default().as_str_name())
}

impl v1::Batch {
    /// The version that the receiver must have; `None` for a batch that violates the contract.
    #[must_use]
    pub fn follows(&self) -> Option<u64> {
        self.follows_version.or_else(|| self.version.checked_sub(1))
    }

    /// All source positions that the batch changes.
    pub fn moved_positions(&self) -> impl Iterator<Item = v1::SourcePosition> {
        let slices = v1::SourcePosition {
            kind: v1::source_position::Kind::EndpointSlices.into(),
            position: self.endpoint_slices_position,
        };
        self.positions.iter().copied().chain((self.endpoint_slices_position != 0).then_some(slices))
    }
}

impl v1::Changes {
    /// The trigger time of a group's changes in milliseconds since the Unix epoch. 0 if unknown.
    #[must_use]
    pub fn trigger_unix_ms(&self, group: &v1::ServiceEndpoints) -> u64 {
        let index = usize::try_from(group.trigger).unwrap_or(usize::MAX);
        self.triggers_unix_ms.get(index).copied().unwrap_or_default()
    }
}

/// The compiled protocol, for gRPC reflection and for the compatibility check.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/headgate.v1.binpb"));

/// The maximum size of a message from a replica, in bytes.
pub const MAX_SERVER_MESSAGE_BYTES: usize = 1 << 20;

/// A part of the error for a client that is no agent, on the port for agents.
pub const AGENTS_ONLY: &str = "this port serves only agents";

/// The maximum size of a message from an agent, in bytes.
pub const MAX_AGENT_MESSAGE_BYTES: usize = 256 << 10;

// gRPC framing of messages that many streams share.

/// The length of gRPC's prefix: a compression flag and a 32-bit length.
pub const PREFIX_BYTES: usize = 5;

/// Encodes a message with its gRPC prefix, uncompressed. Clones share the memory.
#[must_use]
pub fn frame(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut buffer = BytesMut::with_capacity(PREFIX_BYTES + length);
    buffer.put_u8(0);
    buffer.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    // `BytesMut` grows as needed, so the encoding cannot fail.
    message.encode_raw(&mut buffer);
    buffer.freeze()
}
