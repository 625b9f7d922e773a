//! The protocol `headgate.v1`: generated types, and conversion between them and [`headgate_core`].
//!
//! The head of `proto/headgate/v1/discovery.proto` documents the contract. Conversion to the wire
//! cannot fail. Conversion from the wire reports unusable resources and converts the other
//! resources.

mod decode;
mod encode;
mod verification;

use headgate_core::{Protocol, ProxyProtocol, node_state::SourceState};

pub use decode::{Decoder, UnknownReference, digests_from_wire, node_from_wire, reserved_from_wire};
pub use encode::{
    ChangesBuilder, PREFIX_BYTES, References, address_to_wire, digests_to_wire, frame, node_to_wire, reserved_to_wire,
};
/// Rules that all programs share, for programs that do not use the core crate.
pub use headgate_core::{addresses, check_subdomain, errors, printable};
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

/// The compiled protocol, for gRPC reflection and for the compatibility check.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/headgate.v1.binpb"));

/// The maximum size of a message from a replica, in bytes.
pub const MAX_SERVER_MESSAGE_BYTES: usize = 1 << 20;

/// A part of the error for a client that is no agent, on the port for agents.
pub const AGENTS_ONLY: &str = "this port serves only agents";

/// The maximum size of a message from an agent, in bytes.
pub const MAX_AGENT_MESSAGE_BYTES: usize = 256 << 10;
