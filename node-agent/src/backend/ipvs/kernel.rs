//! The parts of the kernel that the backend speaks to, and what is missing of them.

use std::path::Path;

use headgate_core::ipvs::DEVICE;
use headgate_netlink::{
    NetlinkError,
    route::{Link, Routing},
};
use ipset_netlink::{IpSetError, IpSets};
use ipvs_netlink::{Ipvs, IpvsError};

use super::super::{BackendError, ErrorKind};

/// Connections to IPVS, IP sets and rtnetlink, in the network namespace of the thread that uses them first. Each is opened when it is needed: the
/// kernel then loads the modules of what it lacks, where it can.
#[derive(Debug, Default)]
pub(super) struct Kernel {
    ipvs: Option<Ipvs>,
    sets: Option<IpSets>,
    routing: Option<Routing>,
}

/// What an option holds, made if it holds nothing.
fn or_open<T, E>(slot: &mut Option<T>, open: impl FnOnce() -> Result<T, E>) -> Result<&mut T, E> {
    let value = match slot.take() {
        Some(value) => value,
        None => open()?,
    };
    Ok(slot.insert(value))
}

impl Kernel {
    /// Virtual servers.
    pub(super) fn ipvs(&mut self) -> Result<&mut Ipvs, BackendError> {
        or_open(&mut self.ipvs, Ipvs::open).map_err(of_ipvs)
    }

    /// Sets.
    pub(super) fn sets(&mut self) -> Result<&mut IpSets, BackendError> {
        or_open(&mut self.sets, IpSets::open).map_err(of_sets)
    }

    /// The device and its addresses.
    pub(super) fn routing(&mut self) -> Result<&mut Routing, BackendError> {
        or_open(&mut self.routing, Routing::open).map_err(of_routing)
    }

    /// The number of our device, which is made and set up if it is not.
    pub(super) fn device(&mut self) -> Result<u32, BackendError> {
        let routing = self.routing()?;
        let link = match routing.link(DEVICE).map_err(of_routing)? {
            Some(link) => link,
            None => {
                routing.add_dummy(DEVICE).map_err(|error| match error.refusal_code() {
                    Some(libc::EOPNOTSUPP) => BackendError::new(
                        ErrorKind::Unavailable,
                        "this kernel has no dummy devices: load the module dummy (modprobe dummy)",
                    ),
                    _ => of_routing(error),
                })?;
                let made = routing.link(DEVICE).map_err(of_routing)?;
                made.ok_or_else(|| BackendError::new(ErrorKind::Retry, format!("device {DEVICE} went as it came")))?
            }
        };
        if link.kind.as_deref() != Some("dummy") {
            let message = format!(
                "device {DEVICE} is not a dummy device (ip -d link show {DEVICE}); remove it (ip link del {DEVICE})"
            );
            return Err(BackendError::new(ErrorKind::Fatal, message));
        }
        if !link.is_up() {
            // Without it the kernel delivers nothing by routes, and IPv6 addresses are never ready.
            routing.set_up(link.index, true).map_err(of_routing)?;
        }
        Ok(link.index)
    }

    /// The number of our device, on which everything is that has been put there.
    ///
    /// # Errors
    /// It is gone, and its addresses with it; or down, by which it has lost those of IPv6. Only a full sync helps.
    pub(super) fn device_in_use(&mut self) -> Result<u32, BackendError> {
        let state = match self.link()? {
            Some(link) if link.is_up() => return Ok(link.index),
            Some(_) => "down",
            None => "gone",
        };
        let message = format!("device {DEVICE} is {state}: services' addresses went with it");
        Err(BackendError::new(ErrorKind::NeedsFullSync, message))
    }

    /// The number of our device, if it is there.
    pub(super) fn existing_device(&mut self) -> Result<Option<u32>, BackendError> {
        Ok(self.link()?.map(|link| link.index))
    }

    /// Our device, if it is there.
    pub(super) fn link(&mut self) -> Result<Option<Link>, BackendError> {
        let link = self.routing()?.link(DEVICE).map_err(of_routing)?;
        // A device of another kind is somebody else's.
        Ok(link.filter(|link| link.kind.as_deref() == Some("dummy")))
    }
}

/// Whether this network namespace has IPVS, without making the kernel load it.
pub(super) fn has_ipvs() -> bool {
    Path::new("/proc/thread-self/net/ip_vs").exists()
}

/// Whether the kernel has IP sets, without making it load them.
pub(super) fn has_sets() -> bool {
    Path::new("/sys/module/ip_set").exists()
}

fn kind(error: &NetlinkError) -> ErrorKind {
    if error.is_transient() { ErrorKind::Retry } else { ErrorKind::NeedsFullSync }
}

pub(super) fn of_ipvs(error: IpvsError) -> BackendError {
    let kind = match &error {
        IpvsError::Missing => ErrorKind::Unavailable,
        IpvsError::Netlink(error) => kind(error),
        IpvsError::Malformed(_) => ErrorKind::NeedsFullSync,
    };
    BackendError::new(kind, error)
}

pub(super) fn of_sets(error: IpSetError) -> BackendError {
    let kind = match &error {
        IpSetError::Missing | IpSetError::MissingType(_) | IpSetError::Protocol(..) => ErrorKind::Unavailable,
        IpSetError::Netlink(error) => kind(error),
        _ => ErrorKind::NeedsFullSync,
    };
    BackendError::new(kind, error)
}

#[allow(clippy::needless_pass_by_value)] // for `map_err`
pub(super) fn of_routing(error: NetlinkError) -> BackendError {
    BackendError::new(kind(&error), format_args!("device {DEVICE} and its addresses: {error}"))
}
