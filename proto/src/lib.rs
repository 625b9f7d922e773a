//! The protocol `headgate.v1`: generated types, and conversion between them and [`headgate_core`].
//!
//! The contract is written at the head of `proto/headgate/v1/discovery.proto`. Conversion to the wire cannot fail; conversion from it names what is
//! wrong with a resource and goes on with the rest.

mod decode;
mod encode;
pub mod frame;

pub use decode::{Decoder, digests_from_wire, node_from_wire};
pub use encode::{ChangesBuilder, digests_to_wire, node_to_wire};
/// Where the protocol may be spoken without TLS; for programs that know the protocol and not the model.
pub use headgate_core::plaintext;

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

/// The compiled protocol, for reflection and for the compatibility check.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/headgate.v1.binpb"));

/// Largest message that a replica sends, in bytes.
pub const MAX_SERVER_MESSAGE_BYTES: usize = 1 << 20;

/// Largest message that an agent sends, in bytes.
pub const MAX_AGENT_MESSAGE_BYTES: usize = 256 << 10;
