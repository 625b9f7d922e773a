//! Passes bytes to the code that the agent uses for input from a replica, the disk or an operator.
//!
//! A function must return for every input, and its memory is bounded by the size of the input. The
//! result shows whether the input was valid. A test uses the result to check that its inputs pass
//! the first checks.

use std::sync::Arc;

use headgate_core::{Change, Dirty, State, reference::Referable};
use headgate_node_agent::{
    persist,
    session::machine::{Effect, Machine},
    state::Held,
};
use headgate_proto::{MAX_SERVER_MESSAGE_BYTES, v1};
use headgate_settings as settings;
use prost::Message as _;

/// Processes messages of a replica as one stream, until a message breaks the protocol. Returns the
/// number of steps that were applied.
///
/// # Panics
/// The digests of the resulting state are wrong. With wrong digests, an agent would resume wrongly
/// until it starts again.
pub(super) fn server_stream<'a>(messages: impl IntoIterator<Item = &'a [u8]>) -> usize {
    let mut held = Held::default();
    let mut machine = Machine::new(Arc::from("node-a"));
    machine.begin(held.position());
    let mut applied = 0;
    for bytes in messages.into_iter().filter(|bytes| bytes.len() <= MAX_SERVER_MESSAGE_BYTES) {
        let Ok(message) = v1::ServerMessage::decode(bytes) else { break };
        let Ok(effects) = machine.on_message(message) else { break };
        for effect in effects {
            if let Effect::Apply(step) = effect {
                held.apply(step, &mut Dirty::default());
                applied += 1;
            }
        }
        if machine.needs_referable() {
            machine.refer_to(Referable::of(held.state()));
        }
    }
    assert_digests(held.state());
    applied
}

/// Reads a state file with this content and the right checksum. Another version of the agent, or an
/// agent with a defect, may write such a file. Returns true when the file holds a valid state.
///
/// # Panics
/// The digests of the resulting state are wrong.
pub(super) fn state_file(content: &[u8]) -> bool {
    let state = persist::state_of(content, "node-a");
    state.iter().for_each(assert_digests);
    state.is_some()
}

/// Reads a `KubeProxyConfiguration`. Returns true when the agent would start with this
/// configuration.
pub(super) fn configuration(text: &str) -> bool {
    settings::parse("config.yaml", text.to_owned()).is_ok()
}

fn assert_digests(state: &State) {
    let mut rebuilt = State::default();
    for (key, entry) in state.entries() {
        let service = entry.service().cloned().map(Change::from);
        let endpoints = entry.endpoints().values().map(|endpoint| Change::Endpoint((**key).clone(), endpoint.clone()));
        for change in service.into_iter().chain(endpoints) {
            rebuilt.apply(change, &mut Dirty::default());
        }
    }
    for service_cidr in state.service_cidrs() {
        rebuilt.apply(Change::ServiceCidr(service_cidr.clone()), &mut Dirty::default());
    }
    assert_eq!(state.digests(), rebuilt.digests(), "the digests do not match the resources");
}
