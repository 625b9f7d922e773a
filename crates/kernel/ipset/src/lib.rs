#![doc = include_str!("../README.md")]

mod model;
mod refusal;
mod wire;

pub use headgate_netlink::{Family, Malformed, NetlinkError, Protocol, Refusal, Refused};
pub use model::{Change, Element, Entry, Header, Set, SetType, Specification};
pub use refusal::HASH_FULL;

use std::collections::HashMap;

use headgate_netlink::{Connection, Request};

/// `IPSET_PROTOCOL`: the protocol version that this crate uses if the kernel supports it. The
/// requests of this crate are the same in version 6.
const PROTOCOL: u8 = 7;
/// `IPSET_PROTOCOL_MIN`.
const PROTOCOL_MIN: u8 = 6;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum IpSetError {
    /// The kernel has no IP sets and found no module for them.
    #[error("this kernel has no IP sets: load the module ip_set (modprobe ip_set)")]
    Missing,
    /// The kernel does not have this set type and found no module for it.
    #[error("this kernel has no sets of the type {0}: load its module (modprobe ip_set_{module})", module = module(*.0))]
    MissingType(SetType),
    /// The kernel and this crate have no protocol version in common.
    #[error("the kernel supports ipset protocol versions {0} to {1}, but {PROTOCOL_MIN} to {PROTOCOL} are needed")]
    Protocol(u8, u8),
    /// The kernel rejects the request.
    #[error("{action}: {reason}")]
    Refused {
        /// The rejected action, with the name of the set.
        action: String,
        /// The reason for the rejection.
        reason: String,
        /// The kernel's error number: an `errno` value, or ipset's own number above 4095.
        code: i32,
    },
    /// The kernel cannot be reached, or its answer has an unexpected format.
    #[error("ipset: {0}")]
    Netlink(#[from] NetlinkError),
}

impl IpSetError {
    /// The kernel's error number, if the kernel rejected the request.
    pub fn refusal_code(&self) -> Option<i32> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            Self::Netlink(error) => error.refusal_code(),
            _ => None,
        }
    }
}

fn module(set_type: SetType) -> String {
    let (kind, rest) = set_type.name().split_once(':').unwrap_or((set_type.name(), ""));
    format!("{kind}_{}", rest.replace(',', ""))
}

/// A connection to IP sets in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct IpSets {
    connection: Connection,
    protocol: u8,
    revisions: HashMap<(SetType, Family), u8>,
}

impl IpSets {
    /// Opens a connection and negotiates the protocol version.
    /// Errors: [`IpSetError::Missing`] if the kernel has no IP sets, [`IpSetError::Protocol`] if it
    /// supports no version that this crate supports.
    pub fn open() -> Result<Self, IpSetError> {
        let mut connection = Connection::open(libc::NETLINK_NETFILTER)?;
        let (least, most) = match connection.ask_one(&wire::get_protocol(PROTOCOL), wire::protocol_versions) {
            // Netfilter answers EINVAL if the subsystem does not exist.
            Err(error) if error.refusal_code() == Some(libc::EINVAL) => return Err(IpSetError::Missing),
            versions => versions?,
        };
        if least > PROTOCOL || most < PROTOCOL_MIN {
            return Err(IpSetError::Protocol(least, most));
        }
        Ok(Self { connection, protocol: most.min(PROTOCOL), revisions: HashMap::new() })
    }

    /// The revision in which new sets of a type are created. The crate queries the kernel once for
    /// each type and family.
    /// Errors: [`IpSetError::MissingType`] if the kernel does not have the type.
    pub fn revision(&mut self, set_type: SetType, family: Family) -> Result<u8, IpSetError> {
        if let Some(revision) = self.revisions.get(&(set_type, family)) {
            return Ok(*revision);
        }
        /// `IPSET_ERR_FIND_TYPE`.
        const FIND_TYPE: i32 = 4098;
        let request = wire::get_type(self.protocol, set_type, family);
        let (least, most) = match self.connection.ask_one(&request, wire::revisions) {
            Err(error) if error.refusal_code() == Some(FIND_TYPE) => return Err(IpSetError::MissingType(set_type)),
            versions => versions?,
        };
        let revision = set_type.wanted_revision().clamp(least.min(most), most);
        self.revisions.insert((set_type, family), revision);
        Ok(revision)
    }

    /// Creates an empty set.
    /// Errors: [`IpSetError::Refused`] with `EEXIST` if a set of any type has this name.
    pub fn create(&mut self, wanted: &Specification) -> Result<(), IpSetError> {
        let set_type = wanted.set_type;
        let revision = self.revision(set_type, wanted.family)?;
        let request = wire::create(self.protocol, revision, wanted);
        let is_bitmap = Some(set_type == SetType::BitmapPort);
        self.ask(request, || format!("creating the set {} of type {set_type}", wanted.name), is_bitmap)
    }

    /// Destroys a set with its entries. Errors: [`IpSetError::Refused`] if a rule uses the set, or
    /// with `ENOENT` if the set does not exist.
    pub fn destroy(&mut self, set: &str) -> Result<(), IpSetError> {
        self.ask(wire::destroy(self.protocol, set), || format!("destroying the set {set}"), None)
    }

    /// Atomically swaps the contents of two sets of the same type and family. Rules that use one of
    /// the sets then match the entries of the other set.
    /// Errors: [`IpSetError::Refused`] if a set does not exist, or if types or families differ.
    pub fn swap(&mut self, set: &str, with: &str) -> Result<(), IpSetError> {
        self.ask(wire::swap(self.protocol, set, with), || format!("swapping the sets {set} and {with}"), None)
    }

    /// Executes changes of entries in order, many in one send. Each change is independent. The
    /// result lists, in order, the changes that the kernel rejected, which [`Change::explain`]
    /// describes. The kernel has executed all other changes.
    /// Errors: the kernel may have executed none, some or all of the changes.
    pub fn execute<'a>(&mut self, changes: impl IntoIterator<Item = &'a Change>) -> Result<Vec<Refused>, IpSetError> {
        let protocol = self.protocol;
        Ok(self.connection.execute_all(changes.into_iter().map(|change| wire::change(protocol, change)))?)
    }

    /// Returns the header of a set, or `None` if no set has this name.
    /// Errors: the kernel does not list the set. Retry if [`NetlinkError::is_transient`].
    pub fn header(&mut self, name: &str) -> Result<Option<Header>, IpSetError> {
        Ok(self.read_one(name, false)?.map(|set| set.header))
    }

    /// Returns a set with its entries, or `None` if no set has this name.
    /// Errors: the kernel does not list the set. Retry if [`NetlinkError::is_transient`].
    pub fn set(&mut self, name: &str) -> Result<Option<Set>, IpSetError> {
        self.read_one(name, true)
    }

    fn read_one(&mut self, name: &str, entries: bool) -> Result<Option<Set>, IpSetError> {
        match self.connection.list(&wire::list(self.protocol, name, entries), wire::add_part) {
            Err(error) if error.refusal_code() == Some(libc::ENOENT) => Ok(None),
            result => Ok(result?.pop()),
        }
    }

    fn ask(
        &mut self,
        request: Request,
        action: impl FnOnce() -> String,
        is_bitmap: Option<bool>,
    ) -> Result<(), IpSetError> {
        self.connection.ask(request, |_, _| {}).map_err(|error| match error {
            NetlinkError::Kernel(refusal) => IpSetError::Refused {
                action: action(),
                reason: refusal::reason(&refusal, is_bitmap),
                code: refusal.code,
            },
            error => error.into(),
        })
    }
}
