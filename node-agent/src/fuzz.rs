//! Bytes as a peer, a disk or a person could give them, taken as the agent takes them. For fuzzers
//! and their tests only.
//!
//! Each function must return whatever it is given, in memory that is bounded by its input's size;
//! what it returns says whether the input was good, so that a test can tell that it exercises more
//! than the first check.

use std::{io, sync::Arc};

use headgate_core::{Change, Dirty, State, reference::Referable};
use headgate_proto::{MAX_SERVER_MESSAGE_BYTES, v1};
use prost::Message as _;

use crate::{
    persist,
    session::machine::{Effect, Machine},
    settings,
    state::held::Held,
};

/// Takes messages of a replica one after the other, as one stream, until one breaks the contract.
/// Returns the number of steps that were applied.
///
/// # Panics
/// When the state that results and its digests disagree: an agent would then resume wrongly for
/// ever.
#[must_use]
pub fn server_stream<'a>(messages: impl IntoIterator<Item = &'a [u8]>) -> usize {
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

/// Reads a state file as it is. True when a state came of it.
///
/// # Panics
/// As [`server_stream`].
#[must_use]
pub fn state_file(bytes: &[u8]) -> bool {
    let state = persist::state_in(bytes, "node-a");
    state.iter().for_each(assert_digests);
    state.is_some()
}

/// Reads a state file of these records, each a kind and a payload, whose checksums are right: what
/// a program of another version, or with a defect, may have written. True when a state came of it.
///
/// # Panics
/// As [`server_stream`].
#[must_use]
pub fn state_records(records: &[(u8, &[u8])]) -> bool {
    file_of(records).is_ok_and(|file| state_file(&file))
}

/// A state file of these records.
///
/// # Errors
/// A kind is unknown, or a payload too long.
pub fn file_of(records: &[(u8, &[u8])]) -> io::Result<Vec<u8>> {
    persist::file_of(records)
}

/// The records of a state file, up to the first that is damaged; for taking a good one apart.
#[must_use]
pub fn records_of(bytes: &[u8]) -> Vec<(u8, Vec<u8>)> {
    persist::records_of(bytes)
}

/// Reads a `KubeProxyConfiguration`. True when it is one that the agent starts with.
#[must_use]
pub fn configuration(text: &str) -> bool {
    settings::parse("config.yaml", text.to_owned()).is_ok()
}

fn assert_digests(state: &State) {
    let mut anew = State::default();
    for (key, entry) in state.entries() {
        let service = entry.service().cloned().map(Change::from);
        let endpoints = entry.endpoints().values().map(|endpoint| Change::Endpoint((**key).clone(), endpoint.clone()));
        for change in service.into_iter().chain(endpoints) {
            anew.apply(change, &mut Dirty::default());
        }
    }
    for service_cidr in state.service_cidrs() {
        anew.apply(Change::ServiceCidr(service_cidr.clone()), &mut Dirty::default());
    }
    assert_eq!(state.digests(), anew.digests(), "the digests are not those of the resources");
}
