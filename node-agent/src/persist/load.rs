//! Reads and checks the state file.
//!
//! The agent uses the state at the last intact point. An agent that was killed during an append
//! leaves an incomplete record, but the records before it are intact. A file without an intact
//! point is not used.

use std::{
    fs::OpenOptions,
    io::{self, BufReader, Read},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use headgate_core::{Change, Dirty, Node, State};
use headgate_proto::{Decoder, digests_from_wire, node_from_wire, v1};

use super::format::{Chain, FormatError, Kind, Reader};
use crate::state::held::{Held, Restored};

/// Why a state file, or a part at its end, is not used. The control plane later sends the missing
/// resources. Each text continues a sentence that begins with the name of the file.
#[derive(Debug, thiserror::Error)]
pub(super) enum LoadError {
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error("belongs to node {0}")]
    ForeignNode(String),
    #[error("ends before the state in it is complete")]
    Incomplete,
    #[error("is damaged: {0}")]
    Content(String),
}

/// The state in a file, and the values that are needed to append to the file.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) restored: Restored,
    /// The checksum at the last intact point.
    pub(super) chain: Chain,
    /// The offset of the end of the first point: the size of the file without appends.
    pub(super) base_bytes: u64,
    /// The offset of the end of the last intact point.
    pub(super) valid_bytes: u64,
    /// Why the end of the file is not used. `None` if the whole file is used.
    pub(super) left_out: Option<LoadError>,
}

/// Reads the file of a node. Returns `None` if the file does not exist.
pub(super) fn read(path: &Path, node_name: &str) -> Result<Option<Loaded>, LoadError> {
    // If the path is a named pipe, opening it without O_NONBLOCK would wait for a writer.
    let file = match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(FormatError::Io)?,
    };
    if !file.metadata().map_err(FormatError::Io)?.is_file() {
        return Err(FormatError::NoFile.into());
    }
    read_from(BufReader::with_capacity(64 << 10, file), node_name).map(Some)
}

/// Reads the contents of a file from any input.
pub(super) fn read_from(input: impl Read, node_name: &str) -> Result<Loaded, LoadError> {
    let mut reader = Reader::begin(input)?;
    match reader.next()? {
        Some((Kind::Owner, name)) if name == node_name.as_bytes() => {}
        Some((Kind::Owner, name)) => return Err(LoadError::ForeignNode(String::from_utf8_lossy(name).into_owned())),
        Some(_) => return Err(LoadError::Content("the first record does not name a node".into())),
        None => return Err(LoadError::Incomplete),
    }
    let mut decoder = Decoder::default();
    let base = read_base(&mut reader, &mut decoder, node_name)?;
    let (chain, base_bytes) = (reader.chain().clone(), reader.offset());
    let mut loaded = Loaded { restored: base, chain, base_bytes, valid_bytes: base_bytes, left_out: None };
    loop {
        match read_appended(&mut reader, &mut decoder, node_name) {
            Ok(Some(step)) => {
                step.apply_to(&mut loaded.restored);
                (loaded.chain, loaded.valid_bytes) = (reader.chain().clone(), reader.offset());
            }
            Ok(None) => return Ok(loaded),
            Err(error) => {
                loaded.left_out = Some(error);
                return Ok(loaded);
            }
        }
    }
}

/// Reads the records up to the first point. Applies each change at once: if the point is missing,
/// there is no earlier state that must be kept.
fn read_base(reader: &mut Reader<impl Read>, decoder: &mut Decoder, node_name: &str) -> Result<Restored, LoadError> {
    let (mut state, mut node) = (State::default(), LoadedNode::default());
    loop {
        match reader.next()? {
            Some((Kind::Changes, payload)) => {
                for change in changes(decoder, payload)? {
                    state.apply(change, &mut Dirty::default());
                }
            }
            Some((Kind::Node, payload)) => node = own_node(payload, node_name)?,
            Some((Kind::Point, payload)) => {
                let point = decode::<v1::Resume>(payload)?;
                let digests = point.digests.as_ref().and_then(digests_from_wire);
                if digests.as_ref() != Some(state.digests()) {
                    return Err(LoadError::Content("its digests do not match its contents".into()));
                }
                let mut restored = Restored { held: Held::restored(state, &point), node: None, may_be_behind: true };
                node.apply_to(&mut restored);
                return Ok(restored);
            }
            Some((Kind::Owner, _)) => return Err(LoadError::Content("it names its node twice".into())),
            None => return Err(LoadError::Incomplete),
        }
    }
}

/// The agent's own Node, and the position of the source at its last change.
#[derive(Default)]
struct LoadedNode {
    node: Option<Node>,
    position: Option<v1::SourcePosition>,
}

impl LoadedNode {
    fn apply_to(self, restored: &mut Restored) {
        restored.node = self.node;
        restored.held.set_node_position(self.position);
    }
}

/// The records between two points.
#[derive(Default)]
struct Appended {
    changes: Vec<Change>,
    node: Option<LoadedNode>,
    point: v1::Resume,
}

impl Appended {
    fn apply_to(self, restored: &mut Restored) {
        restored.held.replay(self.changes, &self.point);
        if let Some(node) = self.node {
            node.apply_to(restored);
        }
    }
}

/// Reads the records up to the next point. Returns `None` at the end of the file.
fn read_appended(
    reader: &mut Reader<impl Read>,
    decoder: &mut Decoder,
    node_name: &str,
) -> Result<Option<Appended>, LoadError> {
    let mut step = Appended::default();
    let mut is_empty = true;
    while let Some((kind, payload)) = reader.next()? {
        is_empty = false;
        match kind {
            Kind::Changes => step.changes.extend(changes(decoder, payload)?),
            Kind::Node => step.node = Some(own_node(payload, node_name)?),
            Kind::Point => {
                step.point = decode(payload)?;
                return Ok(Some(step));
            }
            Kind::Owner => return Err(LoadError::Content("it names its node twice".into())),
        }
    }
    if is_empty { Ok(None) } else { Err(LoadError::Incomplete) }
}

fn decode<M: prost::Message + Default>(payload: &[u8]) -> Result<M, LoadError> {
    M::decode(payload).map_err(|error| LoadError::Content(error.to_string()))
}

fn changes(decoder: &mut Decoder, payload: &[u8]) -> Result<Vec<Change>, LoadError> {
    let decoded = decoder.changes(decode(payload)?);
    let (changes, rejections) = decoded.map_err(|error| LoadError::Content(error.to_string()))?;
    // Every resource in the file was usable when it was written. If this version of the program
    // cannot use a resource, the program must not silently leave out the resource.
    rejections.into_iter().next().map_or(Ok(changes), |rejection| Err(unusable(&rejection)))
}

fn unusable(rejection: &v1::Rejection) -> LoadError {
    let v1::Rejection { resource, field, reason } = rejection;
    LoadError::Content(format!("{resource} cannot be used: {field}: {reason}"))
}

fn own_node(payload: &[u8], node_name: &str) -> Result<LoadedNode, LoadError> {
    let v1::OwnNode { node, position, .. } = decode(payload)?;
    let Some(wire) = node else { return Ok(LoadedNode { node: None, position }) };
    let node = node_from_wire(&wire).map_err(|rejection| unusable(&rejection))?;
    let is_ours = node.name.eq_ignore_ascii_case(node_name);
    if is_ours { Ok(LoadedNode { node: Some(node), position }) } else { Err(LoadError::ForeignNode(wire.name)) }
}
