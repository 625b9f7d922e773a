//! Connections to the parts of the kernel that the dataplane uses, and its network device.

use std::{net::IpAddr, path::Path, time::Duration};

use headgate_core::ipvs::{DEVICE, PROBE_DEVICE};
use headgate_netlink::{
    NetlinkError,
    route::{Change, Link, Prefix, Routing},
};
use ipset_netlink::IpSets;
use ipvs_netlink::{Ipvs, IpvsError, Timeouts};
use tracing::info;

use super::{
    super::{
        DataplaneError, ErrorKind, KernelHandle, WakeLoop,
        ip_sets::{kind_of_netlink, of_sets},
        metrics::DataplaneMetrics,
        xtables::{Flushes, Variant},
    },
    sysctl::IpvsSysctls,
};
use headgate_settings::IpvsSettings;

/// The error message for a kernel that cannot create dummy devices.
pub(super) const NO_DUMMY_DEVICES: &str = "this kernel has no dummy devices: load the module dummy (modprobe dummy)";

/// Connections to IPVS, IP sets and rtnetlink, each opened when it is first needed, in the network
/// namespace of the caller. This makes the kernel load missing modules.
#[derive(Debug, Default)]
pub struct IpvsKernel {
    ipvs: Option<Ipvs>,
    sets: Option<IpSets>,
    routing: Option<Routing>,
    /// The result of [`Self::prepare`] after its first success.
    prepared: Option<Vec<String>>,
    /// Follows the iptables rules beside the virtual servers.
    flushes: Flushes,
}

impl KernelHandle for IpvsKernel {
    fn reset(&mut self) {
        (self.ipvs, self.sets, self.routing) = (None, None, None);
    }

    fn follow(&mut self, wake: WakeLoop, metrics: &DataplaneMetrics) -> Result<(), DataplaneError> {
        self.flushes.follow(wake, metrics)
    }

    fn note_sync(&self) {
        self.flushes.note_sync();
    }
}

fn or_open<T, E>(slot: &mut Option<T>, open: impl FnOnce() -> Result<T, E>) -> Result<&mut T, E> {
    let value = match slot.take() {
        Some(value) => value,
        None => open()?,
    };
    Ok(slot.insert(value))
}

impl IpvsKernel {
    /// For a variant of iptables, which must not be `Auto`.
    pub(super) fn new(variant: Variant) -> Self {
        Self { flushes: Flushes::of(variant), ..Self::default() }
    }

    /// Sets kernel parameters and time-outs at the first call. Returns a sentence for each optional
    /// parameter that cannot be set.
    /// Errors: IPVS is missing, or a required parameter cannot be set.
    pub(super) fn prepare(&mut self, settings: &IpvsSettings) -> Result<Vec<String>, DataplaneError> {
        if let Some(sentences) = &self.prepared {
            return Ok(sentences.clone());
        }
        // Opening the connection loads the IPVS module. The parameters exist only while the module
        // is loaded.
        let ipvs = self.ipvs()?;
        let seconds = |timeout: Duration| u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX);
        let timeouts = Timeouts {
            tcp_seconds: seconds(settings.tcp_timeout),
            tcp_fin_seconds: seconds(settings.tcp_fin_timeout),
            udp_seconds: seconds(settings.udp_timeout),
        };
        if timeouts != Timeouts::default() {
            ipvs.set_timeouts(&timeouts).map_err(of_ipvs)?;
        }
        let set = IpvsSysctls::default().set(settings.strict_arp);
        let sentences = set.map_err(|error| DataplaneError::new(ErrorKind::Fatal, error))?;
        self.prepared = Some(sentences.clone());
        Ok(sentences)
    }

    pub(super) fn ipvs(&mut self) -> Result<&mut Ipvs, DataplaneError> {
        or_open(&mut self.ipvs, Ipvs::open).map_err(of_ipvs)
    }

    pub(super) fn sets(&mut self) -> Result<&mut IpSets, DataplaneError> {
        or_open(&mut self.sets, IpSets::open).map_err(of_sets)
    }

    pub(super) fn routing(&mut self) -> Result<&mut Routing, DataplaneError> {
        or_open(&mut self.routing, Routing::open).map_err(of_routing)
    }

    /// Returns the index of our device, and creates it if necessary. The device stays down, so that
    /// routing daemons do not export its addresses, which are still the node's own. A device that
    /// is up, or whose addresses have lost their local routes, is replaced. Errors: the kernel has
    /// no dummy devices, or a device of another type has our name.
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
        let mut is_in_order = !link.is_up();
        for prefix in &addresses {
            is_in_order = is_in_order && self.is_own(prefix.address)?;
        }
        if !is_in_order {
            return self.replace_device(link.index, &addresses);
        }
        self.deprecate_addresses(link.index)?;
        Ok(link.index)
    }

    /// Makes the kernel avoid the IPv6 addresses of our device as source addresses. kube-proxy adds
    /// addresses that the kernel may choose, for example when it masquerades.
    pub(super) fn deprecate_addresses(&mut self, link: u32) -> Result<(), DataplaneError> {
        let preferred = self.routing()?.preferred_addresses(link).map_err(of_routing)?;
        let hosts = preferred.iter().filter(|prefix| **prefix == Prefix::host(prefix.address));
        let changes: Vec<Change> = hosts.map(|address| Change::DeprecateAddress { link, address: *address }).collect();
        // A rejected change means that somebody has removed the address meanwhile.
        self.routing()?.change(&changes, |_, _| {}).map_err(of_routing)
    }

    /// Returns whether the node treats an address as its own. When the device goes down again after
    /// it was up, its IPv6 addresses go, or stay without their routes (`keep_addr_on_down`).
    pub(super) fn is_own(&mut self, address: IpAddr) -> Result<bool, DataplaneError> {
        self.routing()?.is_local(address).map_err(of_routing)
    }

    fn make_device(&mut self, name: &str) -> Result<Link, DataplaneError> {
        let routing = self.routing()?;
        routing.add_dummy(name).map_err(|error| match error.refusal_code() {
            Some(libc::EOPNOTSUPP) => DataplaneError::new(ErrorKind::Unavailable, NO_DUMMY_DEVICES),
            _ => of_routing(error),
        })?;
        let made = routing.link(name).map_err(of_routing)?;
        made.ok_or_else(|| {
            DataplaneError::new(ErrorKind::Retry, format!("somebody else has removed the new device {name}"))
        })
    }

    /// Replaces our device. Meanwhile a temporary device has the addresses, so that the node never
    /// loses them. A renamed device would keep wrong labels of IPv4 addresses.
    fn replace_device(&mut self, old: u32, addresses: &[Prefix]) -> Result<u32, DataplaneError> {
        // An agent that was killed during a replacement leaves the temporary device behind.
        if let Some(left) = self.routing()?.link(PROBE_DEVICE).map_err(of_routing)? {
            self.routing()?.remove_link(left.index).map_err(of_routing)?;
        }
        let temporary = self.make_device(PROBE_DEVICE)?.index;
        self.add_addresses(temporary, addresses)?;
        self.routing()?.remove_link(old).map_err(of_routing)?;
        let new = self.make_device(DEVICE)?.index;
        self.add_addresses(new, addresses)?;
        self.routing()?.remove_link(temporary).map_err(of_routing)?;
        info!(
            device = DEVICE,
            addresses = addresses.len(),
            "replaced the device: it was up, or its addresses had no local routes"
        );
        Ok(new)
    }

    /// Adds those of `addresses` whose prefix is /32 or /128. Ignores rejected addresses: the full
    /// sync reads the device later and adds the missing addresses.
    fn add_addresses(&mut self, link: u32, addresses: &[Prefix]) -> Result<(), DataplaneError> {
        let hosts = addresses.iter().filter(|prefix| **prefix == Prefix::host(prefix.address));
        let adds: Vec<Change> = hosts.map(|address| Change::AddAddress { link, address: *address }).collect();
        self.routing()?.change(&adds, |_, _| {}).map_err(of_routing)
    }

    /// The index of our device, if nobody else has changed it.
    /// Errors: somebody has removed the device or brought it up. Only a full sync helps.
    pub(super) fn device_in_use(&mut self) -> Result<u32, DataplaneError> {
        let message = match self.link()? {
            Some(link) if !link.is_up() => return Ok(link.index),
            Some(_) => format!("device {DEVICE} is up: routing daemons may export services' addresses"),
            None => format!("device {DEVICE} and all services' addresses on it are gone"),
        };
        Err(DataplaneError::new(ErrorKind::NeedsFullSync, message))
    }

    pub(super) fn existing_device(&mut self) -> Result<Option<u32>, DataplaneError> {
        Ok(self.link()?.map(|link| link.index))
    }

    pub(super) fn link(&mut self) -> Result<Option<Link>, DataplaneError> {
        let link = self.routing()?.link(DEVICE).map_err(of_routing)?;
        // A device of another type belongs to somebody else.
        Ok(link.filter(|link| link.kind.as_deref() == Some("dummy")))
    }
}

/// True if the IPVS module is loaded. Does not make the kernel load the module.
pub(super) fn has_ipvs() -> bool {
    Path::new("/proc/thread-self/net/ip_vs").exists()
}

pub(super) fn of_ipvs(error: IpvsError) -> DataplaneError {
    let kind = match &error {
        IpvsError::Missing => ErrorKind::Unavailable,
        IpvsError::Netlink(error) => kind_of_netlink(error),
    };
    DataplaneError::new(kind, error)
}

#[allow(clippy::needless_pass_by_value)] // for `map_err`
pub(super) fn of_routing(error: NetlinkError) -> DataplaneError {
    DataplaneError::new(kind_of_netlink(&error), format_args!("device {DEVICE} and its addresses: {error}"))
}
