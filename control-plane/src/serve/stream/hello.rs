//! Checks the `Hello` of an agent.

use std::{sync::Arc, time::SystemTime};

use headgate_core::dns_name::check_subdomain;
use headgate_proto::v1;
use tonic::Status;

use crate::{
    identity::Peer,
    serve::{context::Context, fleet::End},
    store::Resume,
};

/// The contents of an accepted `Hello`.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) node: Arc<str>,
    pub(crate) resume: Option<Resume>,
}

/// Checks a `Hello` against the identity that the peer has proved.
///
/// # Errors
///
/// The end of the stream, with the status that discovery.proto specifies. The agent may retry with
/// another `Hello`.
pub(crate) fn admit(hello: &v1::Hello, peer: &Peer, context: &Context) -> Result<Admitted, End> {
    admit_node(&hello.node_name, peer, context)?;
    let resume = hello.resume.as_ref().map(resume).transpose()?;
    Ok(Admitted { node: hello.node_name.as_str().into(), resume })
}

/// Checks the name of an agent's node against the identity that the peer has proved, and with
/// `--streams-from-node-address` against its address.
///
/// # Errors
///
/// The end of the stream, as for [`admit`].
pub(super) fn admit_node(node_name: &str, peer: &Peer, context: &Context) -> Result<(), End> {
    check_subdomain(node_name)
        .map_err(|problem| End::refusal("invalid_hello", Status::invalid_argument(format!("node_name: {problem}"))))?;
    peer.may_follow(node_name, SystemTime::now())
        .map_err(|denied| End::refusal(denied.reason(), Status::from(denied)))?;
    let address = peer.address.ip().to_canonical();
    let known = context.settings.streams_from_node_address.then(|| context.store.node(node_name).node);
    if known.is_none_or(|node| node.is_some_and(|node| node.addresses.contains(&address))) {
        return Ok(());
    }
    let text = format!(
        "the control plane knows no Node {node_name} with the address {address}; if addresses are translated on the way, start it without --streams-from-node-address"
    );
    Err(End::refusal("node_address", Status::permission_denied(text)))
}

fn resume(wire: &v1::Resume) -> Result<Resume, End> {
    Resume::from_wire(wire).ok_or_else(|| {
        let text = "Hello.resume.digests: must have one sum of 16 bytes and one count for each of 1,024 buckets";
        End::refusal("invalid_hello", Status::invalid_argument(text))
    })
}
