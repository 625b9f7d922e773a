#![doc = include_str!("../README.md")]

mod model;
mod refusal;
mod wire;

pub use headgate_netlink::{Malformed, NetlinkError, Refusal};
pub use model::{Change, Element, Entry, Family, Header, Protocol, Set, SetType, Specification};

use std::collections::HashMap;

use headgate_netlink::{Connection, Request};

/// `IPSET_PROTOCOL`: the version that is spoken where the kernel knows it. What is used of it is the same in 6.
const PROTOCOL: u8 = 7;
/// `IPSET_PROTOCOL_MIN`.
const PROTOCOL_MIN: u8 = 6;

/// Why nothing is known, or nothing done.
#[derive(Debug, thiserror::Error)]
pub enum IpSetError {
    /// The kernel has no IP sets, and found no module for them.
    #[error("this kernel has no IP sets: load the module ip_set (modprobe ip_set)")]
    Missing,
    /// The kernel has no such type, and found no module for it.
    #[error("this kernel has no sets of the type {0}: load its module (modprobe ip_set_{module})", module = module(*.0))]
    MissingType(SetType),
    /// The kernel's type is too old for comments.
    #[error("the kernel's sets of the type {set_type} are of revision {revision}, and have no comments")]
    NoComments {
        /// The type.
        set_type: SetType,
        /// The kernel's newest revision of it.
        revision: u8,
    },
    /// No protocol version is common.
    #[error("the kernel speaks ipset's protocol {0} to {1}, not {PROTOCOL_MIN} to {PROTOCOL}")]
    Protocol(u8, u8),
    /// The kernel refuses.
    #[error("{action}: {reason}")]
    Refused {
        /// What was to be done, with the set's name.
        action: String,
        /// Why not.
        reason: String,
        /// The kernel's number: one of `errno`, or of ipset's own above 4095.
        code: i32,
    },
    /// The kernel cannot be reached.
    #[error("ipset: {0}")]
    Netlink(#[from] NetlinkError),
    /// An answer is none.
    #[error("ipset: the kernel's answer is malformed: {0}")]
    Malformed(#[from] Malformed),
}

impl IpSetError {
    /// The kernel's number, when it was the kernel that refused.
    #[must_use]
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

/// A change that the kernel refuses. The others of its batch are done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// Which of the changes.
    pub index: usize,
    /// Why; [`Change::explain`] says it in words.
    pub refusal: Refusal,
}

/// A connection to IP sets in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct IpSets {
    connection: Connection,
    protocol: u8,
    revisions: HashMap<(SetType, Family), u8>,
}

impl IpSets {
    /// Connects and agrees on the protocol's version.
    ///
    /// # Errors
    /// [`IpSetError::Missing`] when the kernel has no IP sets, [`IpSetError::Protocol`] when it speaks other versions.
    pub fn open() -> Result<Self, IpSetError> {
        let mut connection = Connection::open(libc::NETLINK_NETFILTER)?;
        let mut versions = Err(Malformed("no version of the protocol"));
        let asked = connection.ask(wire::get_protocol(PROTOCOL), |_, payload| {
            versions = wire::protocol_versions(payload);
        });
        match asked {
            // What netfilter says when a subsystem is not there.
            Err(error) if error.refusal_code() == Some(libc::EINVAL) => return Err(IpSetError::Missing),
            result => result?,
        }
        let (least, most) = versions?;
        if least > PROTOCOL || most < PROTOCOL_MIN {
            return Err(IpSetError::Protocol(least, most));
        }
        Ok(Self { connection, protocol: most.min(PROTOCOL), revisions: HashMap::new() })
    }

    /// The revision of a type that sets are made in. Asked for once.
    ///
    /// # Errors
    /// [`IpSetError::MissingType`] when the kernel has no such type.
    pub fn revision(&mut self, set_type: SetType, family: Family) -> Result<u8, IpSetError> {
        if let Some(revision) = self.revisions.get(&(set_type, family)) {
            return Ok(*revision);
        }
        /// `IPSET_ERR_FIND_TYPE`.
        const FIND_TYPE: i32 = 4098;
        let mut versions = Err(Malformed("no revision of the set type"));
        let request = wire::get_type(self.protocol, set_type, family);
        let asked = self.connection.ask(request, |_, payload| versions = wire::revisions(payload));
        match asked {
            Err(error) if error.refusal_code() == Some(FIND_TYPE) => return Err(IpSetError::MissingType(set_type)),
            result => result?,
        }
        let (least, most) = versions?;
        let revision = set_type.wanted_revision().clamp(least.min(most), most);
        self.revisions.insert((set_type, family), revision);
        Ok(revision)
    }

    /// Makes an empty set.
    ///
    /// # Errors
    /// [`IpSetError::Refused`] with `EEXIST` when there is a set of that name, whatever its type.
    pub fn create(&mut self, wanted: &Specification) -> Result<(), IpSetError> {
        let set_type = wanted.set_type;
        let revision = self.revision(set_type, wanted.family)?;
        if wanted.comments && revision < set_type.comment_revision() {
            return Err(IpSetError::NoComments { set_type, revision });
        }
        let request = wire::create(self.protocol, revision, wanted);
        self.ask(request, || format!("making the set {} of type {set_type}", wanted.name), Some(set_type))
    }

    /// Removes a set with its entries.
    ///
    /// # Errors
    /// [`IpSetError::Refused`] when a rule uses it, or with `ENOENT` when there is none.
    pub fn destroy(&mut self, set: &str) -> Result<(), IpSetError> {
        self.ask(wire::destroy(self.protocol, set), || format!("destroying the set {set}"), None)
    }

    /// Removes all entries of a set.
    ///
    /// # Errors
    /// [`IpSetError::Refused`] with `ENOENT` when there is no such set.
    pub fn flush(&mut self, set: &str) -> Result<(), IpSetError> {
        self.ask(wire::flush(self.protocol, set), || format!("emptying the set {set}"), None)
    }

    /// Exchanges what two sets of the same type and family hold, at once: rules that use one see the other's entries from then on.
    ///
    /// # Errors
    /// [`IpSetError::Refused`] when there is no such set, or they are of different types or families.
    pub fn swap(&mut self, set: &str, with: &str) -> Result<(), IpSetError> {
        self.ask(wire::swap(self.protocol, set, with), || format!("swapping the sets {set} and {with}"), None)
    }

    /// Carries out changes of entries in their order, many in one send. Each stands for itself: those that the kernel refuses are returned, in their order, the
    /// others are done.
    ///
    /// # Errors
    /// What was done is not known, all or part of it.
    pub fn execute<'a>(&mut self, changes: impl IntoIterator<Item = &'a Change>) -> Result<Vec<Refused>, IpSetError> {
        let mut all_refused = Vec::new();
        let protocol = self.protocol;
        let requests = changes.into_iter().map(|change| wire::change(protocol, change));
        self.connection.execute(requests, |index, refusal| all_refused.push(Refused { index, refusal }))?;
        Ok(all_refused)
    }

    /// What the kernel says of each set of the namespace.
    ///
    /// # Errors
    /// When the kernel does not list them. Try again when [`NetlinkError::is_transient`].
    pub fn headers(&mut self) -> Result<Vec<Header>, IpSetError> {
        let sets = self.read(&wire::list(self.protocol, None, false))?;
        Ok(sets.into_iter().map(|set| set.header).collect())
    }

    /// What the kernel says of a set; none when there is no set of that name.
    ///
    /// # Errors
    /// When the kernel does not list it. Try again when [`NetlinkError::is_transient`].
    pub fn header(&mut self, name: &str) -> Result<Option<Header>, IpSetError> {
        Ok(self.read_one(name, false)?.map(|set| set.header))
    }

    /// All sets of the namespace with their entries. Those of types that are not in [`SetType`] come without.
    ///
    /// # Errors
    /// When the kernel does not list them. Try again when [`NetlinkError::is_transient`].
    pub fn list(&mut self) -> Result<Vec<Set>, IpSetError> {
        self.read(&wire::list(self.protocol, None, true))
    }

    /// A set with its entries; none when there is no set of that name.
    ///
    /// # Errors
    /// When the kernel does not list it. Try again when [`NetlinkError::is_transient`].
    pub fn set(&mut self, name: &str) -> Result<Option<Set>, IpSetError> {
        self.read_one(name, true)
    }

    fn read_one(&mut self, name: &str, entries: bool) -> Result<Option<Set>, IpSetError> {
        match self.read(&wire::list(self.protocol, Some(name), entries)) {
            Err(error) if error.refusal_code() == Some(libc::ENOENT) => Ok(None),
            result => Ok(result?.pop()),
        }
    }

    fn ask(
        &mut self,
        request: Request,
        action: impl FnOnce() -> String,
        set_type: Option<SetType>,
    ) -> Result<(), IpSetError> {
        self.connection.ask(request, |_, _| {}).map_err(|error| match error {
            NetlinkError::Kernel(refusal) => IpSetError::Refused {
                action: action(),
                reason: refusal::reason(&refusal, set_type),
                code: refusal.code,
            },
            error => error.into(),
        })
    }

    fn read(&mut self, request: &Request) -> Result<Vec<Set>, IpSetError> {
        self.connection.list(request, |sets, payload| add(sets, wire::read_part(payload)?))
    }
}

/// Adds a message of a list to what was read before it.
fn add(sets: &mut Vec<Set>, mut part: wire::Part) -> Result<(), Malformed> {
    if let Some(header) = part.header.take() {
        sets.push(Set { header, entries: Vec::new() });
    }
    let set = sets.last_mut().filter(|set| set.header.name == part.name);
    let set = set.ok_or(Malformed("a set that goes on without a beginning"))?;
    if let Some(set_type) = SetType::of_name(&set.header.type_name) {
        set.entries.extend(part.entries(set_type)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_types_name_their_modules() {
        let text = |set_type| IpSetError::MissingType(set_type).to_string();
        assert!(text(SetType::HashIpPortNet).ends_with("(modprobe ip_set_hash_ipportnet)"));
        assert!(text(SetType::BitmapPort).ends_with("(modprobe ip_set_bitmap_port)"));
    }
}
