//! Whether a `Hello` is accepted.

use std::{collections::BTreeMap, sync::Arc, time::SystemTime};

use headgate_core::dns_name::check_subdomain;
use headgate_proto::{digests_from_wire, v1};
use tonic::Status;

use super::agents::End;
use crate::{identity::Peer, store::Resume, transaction::SourceKind};

/// What an accepted `Hello` said.
#[derive(Debug)]
pub(super) struct Admitted {
    pub(super) node: Arc<str>,
    pub(super) resume: Option<Resume>,
}

/// Checks a `Hello` against what the peer has proved.
///
/// # Errors
///
/// The end of the stream, with the status that the contract names.
pub(super) fn admit(hello: &v1::Hello, peer: &Peer) -> Result<Admitted, End> {
    check_subdomain(&hello.node_name).map_err(|problem| {
        End::refusal("invalid_hello", Status::invalid_argument(format!("Hello.node_name: {problem}")))
    })?;
    peer.may_follow(&hello.node_name, SystemTime::now())
        .map_err(|denied| End::refusal(denied.reason(), Status::from(denied)))?;
    let resume = hello.resume.as_ref().map(resume).transpose()?;
    Ok(Admitted { node: hello.node_name.as_str().into(), resume })
}

fn resume(wire: &v1::Resume) -> Result<Resume, End> {
    let digests = match &wire.digests {
        None => None,
        Some(digests) => Some(digests_from_wire(digests).ok_or_else(|| {
            let text = "Hello.resume.digests: one sum of 16 bytes and one count for each of 1,024 buckets are needed";
            End::refusal("invalid_hello", Status::invalid_argument(text))
        })?),
    };
    let positions = positions_from_wire(&wire.positions);
    Ok(Resume { epoch: wire.epoch, version: wire.version, positions, digests })
}

/// Positions by kind; a kind that only newer programs know cannot be compared, and is left out.
pub(super) fn positions_from_wire(wire: &[v1::SourcePosition]) -> BTreeMap<SourceKind, u64> {
    wire.iter().filter_map(|wire| Some((kind(wire.kind())?, wire.position))).collect()
}

fn kind(wire: v1::source_position::Kind) -> Option<SourceKind> {
    use v1::source_position::Kind;
    match wire {
        Kind::Services => Some(SourceKind::Services),
        Kind::EndpointSlices => Some(SourceKind::EndpointSlices),
        Kind::Nodes => Some(SourceKind::Nodes),
        Kind::ServiceCidrs => Some(SourceKind::ServiceCidrs),
        Kind::Files => Some(SourceKind::Files),
        // A kind that only newer programs know cannot be compared.
        Kind::Unspecified => None,
    }
}
