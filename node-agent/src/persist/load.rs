//! The format of the state file, and how the file is read and checked.
//!
//! ```text
//! MAGIC   { length, varint   StatePart }*   checksum
//! ```
//!
//! The checksum is SHA-256 over everything before it. A reader uses the whole file or nothing.

use std::{fmt::Display, io};

use headgate_core::{Dirty, State};
use headgate_proto::{Decoder, node_from_wire, reserved_from_wire, v1};
use prost::Message as _;
use sha2::{Digest as _, Sha256};

use super::disk::Disk;
use crate::state::{Held, Restored};

/// The name of the file in its folder.
pub(super) const FILE: &str = "state";

/// The first bytes of the file. They change with each incompatible change of the format.
pub const MAGIC: &[u8; 16] = b"Headgate state 2";

/// The size of the checksum at the end of the file.
const CHECKSUM_BYTES: usize = 32;

/// A part of the file. Each part has resources, or all other fields: the last part.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StatePart {
    /// Resources.
    #[prost(message, optional, tag = "1")]
    pub changes: Option<v1::Changes>,
    /// The name of the node to which the file belongs.
    #[prost(string, tag = "2")]
    pub node_name: String,
    /// What the agent holds of its own Node.
    #[prost(message, optional, tag = "3")]
    pub node: Option<v1::OwnNode>,
    /// The version and positions of the state, without digests.
    #[prost(message, optional, tag = "4")]
    pub point: Option<v1::Resume>,
}

/// Why a state file is not used. Each text continues the file's name.
#[derive(Debug, thiserror::Error)]
pub(super) enum LoadError {
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("is not a regular file")]
    NoFile,
    #[error("is not a state file of this version of Headgate")]
    Magic,
    #[error("is damaged: the checksum does not match")]
    Checksum,
    #[error("belongs to node {0}")]
    ForeignNode(String),
    #[error("is damaged: {0}")]
    Content(String),
}

/// Reads the file of a node. Returns `None` if the file does not exist.
pub(super) fn read(disk: &dyn Disk, node_name: &str) -> Result<Option<Restored>, LoadError> {
    match disk.read(FILE) {
        Ok(bytes) => read_from(&bytes, node_name).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Err(LoadError::NoFile),
        Err(error) => Err(error.into()),
    }
}

pub(super) fn read_from(bytes: &[u8], node_name: &str) -> Result<Restored, LoadError> {
    if !bytes.starts_with(MAGIC) {
        return Err(LoadError::Magic);
    }
    let (body, checksum) = bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or(LoadError::Checksum)?;
    let Some(mut rest) = body.strip_prefix(MAGIC).filter(|_| Sha256::digest(body)[..] == checksum[..]) else {
        return Err(LoadError::Checksum);
    };
    let (mut state, mut decoder) = (State::default(), Decoder::default());
    while !rest.is_empty() {
        let part = StatePart::decode_length_delimited(&mut rest).map_err(|error| content(&error))?;
        let (changes, rejections) =
            decoder.changes(part.changes.unwrap_or_default()).map_err(|error| content(&error))?;
        // Every resource in the file was usable when it was written. If this version of the program
        // cannot use a resource, the program must not silently leave out the resource.
        rejections.first().map_or(Ok(()), |rejection| Err(unusable(rejection)))?;
        for change in changes {
            state.apply(change, &mut Dirty::default());
        }
        if let Some(point) = part.point {
            if part.node_name != node_name {
                return Err(LoadError::ForeignNode(part.node_name));
            }
            let own = part.node.unwrap_or_default();
            let node = own.node.map(|node| node_from_wire(&node)).transpose().map_err(|error| unusable(&error))?;
            let mut held = Held::restored(state, &point);
            held.node_position = own.position;
            held.reserved = reserved_from_wire(&own.reserved).map_err(|error| unusable(&error))?;
            return Ok(Restored { held, node, may_be_behind: false });
        }
    }
    Err(LoadError::Content("it has no end".into()))
}

fn content(error: &dyn Display) -> LoadError {
    LoadError::Content(error.to_string())
}

fn unusable(v1::Rejection { resource, field, reason }: &v1::Rejection) -> LoadError {
    LoadError::Content(format!("{resource} cannot be used: {field}: {reason}"))
}
