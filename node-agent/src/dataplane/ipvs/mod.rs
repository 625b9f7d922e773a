//! The IPVS dataplane: plans of [`headgate_core::ipvs`], carried out over netlink, and the rules
//! beside the virtual servers by `iptables-restore`.
//!
//! A change writes what it changes. Only a full sync reads the kernel, and a look at everything in
//! the background. What the kernel rejects, each for itself, keeps nothing else from being done.

mod cleanup;
mod config;
mod convert;
mod family;
mod kernel;
mod maintain;
mod probe;
mod read;
mod sysctl;
mod write;

pub use config::Config;
pub use family::IpvsFamily;

use std::sync::Arc;

use headgate_core::{
    Family,
    ipvs::{IpvsConfig, Ledger},
};
use ipnet::IpNet;
use ipvs_netlink::Ipvs;

use self::{
    kernel::{Kernel, of_ipvs},
    sysctl::Sysctls,
};
use super::{
    DataplaneError, DualStack, ErrorKind,
    leftovers::Leftover,
    xtables::{self, Rules},
};

/// Programs the kernel's IPVS.
pub type IpvsDataplane = DualStack<IpvsFamily>;

/// Sets all kernel parameters that the dataplane needs or is better with, so that it need not be
/// allowed to.
///
/// # Errors
/// One cannot be set; [`ErrorKind::Unavailable`] when the kernel has no IPVS.
pub(crate) fn prepare(strict_arp: bool) -> Result<(), DataplaneError> {
    // They come with IPVS.
    Ipvs::open().map_err(of_ipvs)?;
    let sentences = Sysctls::default().set(strict_arp).map_err(|error| DataplaneError::new(ErrorKind::Fatal, error))?;
    if sentences.is_empty() { Ok(()) } else { Err(DataplaneError::new(ErrorKind::Fatal, sentences.join("; "))) }
}

/// Virtual servers, sets and the device that an earlier run made. Servers with addresses in
/// `exclude_cidrs` belong to others.
pub(crate) fn servers_and_sets(exclude_cidrs: Vec<IpNet>) -> Leftover {
    Leftover::new("ipvs", move || cleanup::remove_all(&exclude_cidrs))
}

impl DualStack<IpvsFamily> {
    /// Looks whether this machine can run the dataplane. Programs nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] where it cannot: all that is missing, and how to get it.
    pub fn new(config: Config) -> Result<Self, DataplaneError> {
        let variant = xtables::choose(config.variant)?;
        let mut own = xtables::leftovers(variant);
        own.push(servers_and_sets(config.exclude_cidrs.clone()));
        let config = Arc::new(config);
        let make = |family: Family| {
            let ledger = Ledger::new(IpvsConfig {
                scheduler: config.scheduler,
                exclude_cidrs: config.exclude_cidrs.clone(),
                masquerade: config.masquerade.clone(),
                ..IpvsConfig::new(family)
            });
            IpvsFamily::new(Rules::new(family, variant), ledger, Arc::clone(&config))
        };
        let dataplane = Self::assemble("ipvs", Kernel::default(), own, config.families.clone(), make);
        probe::require(config.scheduler, &dataplane.families())?;
        Ok(dataplane)
    }
}
