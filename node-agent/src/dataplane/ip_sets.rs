//! What the dataplanes with IP sets share.

use std::path::Path;

use headgate_core::Family;
use headgate_netlink::NetlinkError;
use ipset_netlink::{self as ipset, IpSetError, IpSets};

use super::{DataplaneError, ErrorKind};

/// True if the module of IP sets is loaded. Does not make the kernel load the module.
pub(super) fn has_sets() -> bool {
    Path::new("/sys/module/ip_set").exists()
}

pub(super) fn family_of_sets(family: Family) -> ipset::Family {
    match family {
        Family::V4 => ipset::Family::V4,
        Family::V6 => ipset::Family::V6,
    }
}

pub(super) fn destroy_if_there(sets: &mut IpSets, name: &str) -> Result<(), DataplaneError> {
    match sets.destroy(name) {
        Err(error) if error.refusal_code() == Some(libc::ENOENT) => Ok(()),
        result => result.map_err(of_sets),
    }
}

pub(super) fn of_sets(error: IpSetError) -> DataplaneError {
    let kind = match &error {
        IpSetError::Missing | IpSetError::MissingType(_) | IpSetError::Protocol(..) => ErrorKind::Unavailable,
        IpSetError::Netlink(error) => kind_of_netlink(error),
        _ => ErrorKind::NeedsFullSync,
    };
    DataplaneError::new(kind, error)
}

pub(super) fn kind_of_netlink(error: &NetlinkError) -> ErrorKind {
    if error.is_transient() { ErrorKind::Retry } else { ErrorKind::NeedsFullSync }
}
