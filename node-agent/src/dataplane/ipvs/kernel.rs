//! The parts of the kernel that the dataplane speaks to, and what is missing of them.

use std::{
    io,
    net::{IpAddr, UdpSocket},
    path::Path,
    time::Duration,
};

use headgate_core::ipvs::DEVICE;
use headgate_netlink::{
    NetlinkError,
    route::{Change, Link, Prefix, Routing},
};
use ipset_netlink::{IpSetError, IpSets};
use ipvs_netlink::{Ipvs, IpvsError, Timeouts};
use tracing::info;

use super::{
    super::{DataplaneError, ErrorKind, KernelHandle},
    Config, convert,
    sysctl::Sysctls,
};

/// The device that shows whether there can be any. It also has the addresses of ours while that is
/// made anew.
pub(super) const PROBE_DEVICE: &str = "kube-ipvs-probe";

/// Connections to IPVS, IP sets and rtnetlink, in the network namespace of the thread that uses
/// them first. Each is opened when it is needed: the kernel then loads the modules of what it
/// lacks, where it can.
#[derive(Debug, Default)]
pub struct Kernel {
    ipvs: Option<Ipvs>,
    sets: Option<IpSets>,
    routing: Option<Routing>,
    /// What [`Self::prepare`] returned, once it has succeeded.
    prepared: Option<Vec<String>>,
}

impl KernelHandle for Kernel {
    fn reset(&mut self) {
        *self = Self { prepared: self.prepared.take(), ..Self::default() };
    }
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
    /// Sets kernel parameters and time-outs, once. Returns a sentence for each parameter that
    /// cannot be set and without which services work all the same.
    pub(super) fn prepare(&mut self, config: &Config) -> Result<Vec<String>, DataplaneError> {
        if let Some(sentences) = &self.prepared {
            return Ok(sentences.clone());
        }
        // The parameters come with IPVS.
        let ipvs = self.ipvs()?;
        let seconds = |timeout: Duration| u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX);
        let timeouts = Timeouts {
            tcp_seconds: seconds(config.tcp_timeout),
            tcp_fin_seconds: seconds(config.tcp_fin_timeout),
            udp_seconds: seconds(config.udp_timeout),
        };
        if timeouts != Timeouts::default() {
            ipvs.set_timeouts(&timeouts).map_err(of_ipvs)?;
        }
        let set = Sysctls::default().set(config.strict_arp);
        let sentences = set.map_err(|error| DataplaneError::new(ErrorKind::Fatal, error))?;
        self.prepared = Some(sentences.clone());
        Ok(sentences)
    }

    /// Virtual servers.
    pub(super) fn ipvs(&mut self) -> Result<&mut Ipvs, DataplaneError> {
        or_open(&mut self.ipvs, Ipvs::open).map_err(of_ipvs)
    }

    /// Sets.
    pub(super) fn sets(&mut self) -> Result<&mut IpSets, DataplaneError> {
        or_open(&mut self.sets, IpSets::open).map_err(of_sets)
    }

    /// The device and its addresses.
    pub(super) fn routing(&mut self) -> Result<&mut Routing, DataplaneError> {
        or_open(&mut self.routing, Routing::open).map_err(of_routing)
    }

    /// The number of our device, which is made if it is not there. It is down, so that its
    /// addresses are the node's own and no more: routing daemons export those of devices that are
    /// up. Routes to addresses are made as these come, and lost when the device goes up and down
    /// again; then another device takes its place.
    pub(super) fn device(&mut self) -> Result<u32, DataplaneError> {
        let link = match self.routing()?.link(DEVICE).map_err(of_routing)? {
            Some(link) => link,
            None => self.make_device(DEVICE)?,
        };
        if link.kind.as_deref() != Some("dummy") {
            let message = format!(
                "device {DEVICE} is not a dummy device (ip -d link show {DEVICE}); remove it (ip link del {DEVICE})"
            );
            return Err(DataplaneError::new(ErrorKind::Fatal, message));
        }
        let addresses = self.routing()?.addresses(link.index).map_err(of_routing)?;
        if link.is_up() || addresses.iter().any(|prefix| is_without_route(prefix.address)) {
            return self.replace_device(link.index, &addresses);
        }
        Ok(link.index)
    }

    fn make_device(&mut self, name: &str) -> Result<Link, DataplaneError> {
        let routing = self.routing()?;
        routing.add_dummy(name).map_err(|error| match error.refusal_code() {
            Some(libc::EOPNOTSUPP) => DataplaneError::new(
                ErrorKind::Unavailable,
                "this kernel has no dummy devices: load the module dummy (modprobe dummy)",
            ),
            _ => of_routing(error),
        })?;
        let made = routing.link(name).map_err(of_routing)?;
        made.ok_or_else(|| DataplaneError::new(ErrorKind::Retry, format!("device {name} went as it came")))
    }

    /// Makes our device anew, with these addresses. Another device has them meanwhile, so that the
    /// node has them all the time. That one is not renamed instead: the kernel would number the
    /// labels of its addresses, by which the device of an IPv4 address is known.
    fn replace_device(&mut self, old: u32, addresses: &[Prefix]) -> Result<u32, DataplaneError> {
        // One may be left from an agent that was killed in the middle of this.
        if let Some(left) = self.routing()?.link(PROBE_DEVICE).map_err(of_routing)? {
            self.routing()?.remove_link(left.index).map_err(of_routing)?;
        }
        let meanwhile = self.make_device(PROBE_DEVICE)?.index;
        self.add_addresses(meanwhile, addresses)?;
        self.routing()?.remove_link(old).map_err(of_routing)?;
        let new = self.make_device(DEVICE)?.index;
        self.add_addresses(new, addresses)?;
        self.routing()?.remove_link(meanwhile).map_err(of_routing)?;
        info!(device = DEVICE, addresses = addresses.len(), "replaced, since it was up");
        Ok(new)
    }

    /// Adds those addresses that are of one host. One that is rejected is missing when the full
    /// sync looks at the device.
    fn add_addresses(&mut self, link: u32, addresses: &[Prefix]) -> Result<(), DataplaneError> {
        let hosts = addresses.iter().filter(|prefix| **prefix == convert::host(prefix.address));
        let adds: Vec<Change> = hosts.map(|address| Change::AddAddress { link, address: *address }).collect();
        self.routing()?.change(&adds, |_, _| {}).map_err(of_routing)
    }

    /// The number of our device, on which everything is that has been put there.
    ///
    /// # Errors
    /// It is gone, and its addresses with it; or somebody has set it up. Only a full sync helps.
    pub(super) fn device_in_use(&mut self) -> Result<u32, DataplaneError> {
        let message = match self.link()? {
            Some(link) if !link.is_up() => return Ok(link.index),
            Some(_) => format!("device {DEVICE} is up: routing daemons may export services' addresses"),
            None => format!("device {DEVICE} is gone: services' addresses went with it"),
        };
        Err(DataplaneError::new(ErrorKind::NeedsFullSync, message))
    }

    /// The number of our device, if it is there.
    pub(super) fn existing_device(&mut self) -> Result<Option<u32>, DataplaneError> {
        Ok(self.link()?.map(|link| link.index))
    }

    /// Our device, if it is there.
    pub(super) fn link(&mut self) -> Result<Option<Link>, DataplaneError> {
        let link = self.routing()?.link(DEVICE).map_err(of_routing)?;
        // A device of another kind is somebody else's.
        Ok(link.filter(|link| link.kind.as_deref() == Some("dummy")))
    }
}

/// True of an IPv4 address of ours that the kernel does not take for the node's own, though it is
/// on the device. Only then a socket cannot have it.
pub(super) fn is_without_route(address: IpAddr) -> bool {
    let is_refused =
        || UdpSocket::bind((address, 0)).is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable);
    address.is_ipv4() && is_refused()
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

pub(super) fn of_ipvs(error: IpvsError) -> DataplaneError {
    let kind = match &error {
        IpvsError::Missing => ErrorKind::Unavailable,
        IpvsError::Netlink(error) => kind(error),
        IpvsError::Malformed(_) => ErrorKind::NeedsFullSync,
    };
    DataplaneError::new(kind, error)
}

pub(super) fn of_sets(error: IpSetError) -> DataplaneError {
    let kind = match &error {
        IpSetError::Missing | IpSetError::MissingType(_) | IpSetError::Protocol(..) => ErrorKind::Unavailable,
        IpSetError::Netlink(error) => kind(error),
        _ => ErrorKind::NeedsFullSync,
    };
    DataplaneError::new(kind, error)
}

#[allow(clippy::needless_pass_by_value)] // for `map_err`
pub(super) fn of_routing(error: NetlinkError) -> DataplaneError {
    DataplaneError::new(kind(&error), format_args!("device {DEVICE} and its addresses: {error}"))
}
