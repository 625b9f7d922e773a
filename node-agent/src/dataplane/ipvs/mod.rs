//! The IPVS dataplane: executes plans of [`headgate_core::ipvs`] over netlink, and writes the
//! iptables rules with `iptables-restore`. Only a full sync reads all objects. If the kernel
//! rejects one object, all others are still written.

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

pub use config::IpvsOptions;
pub use family::IpvsFamily;

use std::sync::Arc;

use headgate_core::{
    Family,
    ipvs::{IpvsConfig, IpvsLedger},
};
use ipnet::IpNet;
use ipvs_netlink::Ipvs;

use self::{
    kernel::{IpvsKernel, of_ipvs},
    sysctl::IpvsSysctls,
};
use super::{
    DataplaneError, DualStack, ErrorKind,
    leftovers::{Busy, Leftover},
    xtables::{self, FamilyRules},
};

/// The dataplane that programs the kernel's IPVS.
pub type IpvsDataplane = DualStack<IpvsFamily>;

/// Sets all kernel parameters, so that the agent can then run without the privilege. Errors: a
/// parameter cannot be set. [`ErrorKind::Unavailable`] when the kernel has no IPVS.
pub(crate) fn prepare(strict_arp: bool) -> Result<(), DataplaneError> {
    // Opening the connection loads the IPVS module. The parameters exist only while the module is
    // loaded.
    Ipvs::open().map_err(of_ipvs)?;
    let sentences =
        IpvsSysctls::default().set(strict_arp).map_err(|error| DataplaneError::new(ErrorKind::Fatal, error))?;
    if sentences.is_empty() { Ok(()) } else { Err(DataplaneError::new(ErrorKind::Fatal, sentences.join("; "))) }
}

/// Virtual servers, sets and the device of an earlier run, except what is in `exclude_cidrs`. TCP
/// connections are in IPVS's own table, so a busy virtual server can stay, without new connections.
pub(crate) fn servers_and_sets(exclude_cidrs: Vec<IpNet>) -> Leftover {
    Leftover::draining("ipvs", move |busy| cleanup::remove_all(&exclude_cidrs, busy == Busy::Stays))
}

/// The sets that kube-proxy does not have, for a node on which kube-proxy runs in mode ipvs.
pub(crate) fn sets_beside_kube_proxys() -> Leftover {
    Leftover::new("ipvs", cleanup::remove_sets_beside_kube_proxys)
}

impl DualStack<IpvsFamily> {
    /// Creates the dataplane if this machine can run it. Programs nothing.
    /// Errors: [`ErrorKind::Unavailable`] if something is missing. The message names everything
    /// that is missing, and how to get it.
    pub fn new(config: IpvsOptions) -> Result<Self, DataplaneError> {
        let variant = xtables::choose(config.variant)?;
        let mut own = xtables::leftovers(variant);
        own.push(servers_and_sets(config.settings.exclude_cidrs.clone()));
        let config = Arc::new(config);
        let make = |family: Family| {
            let ledger = IpvsLedger::new(IpvsConfig {
                scheduler: config.settings.scheduler,
                exclude_cidrs: config.settings.exclude_cidrs.clone(),
                masquerade: config.masquerade.clone(),
                ..IpvsConfig::new(family)
            });
            IpvsFamily::new(FamilyRules::new(family, variant), ledger, Arc::clone(&config))
        };
        let dataplane = Self::assemble("ipvs", IpvsKernel::new(variant), own, config.families.clone(), make);
        probe::require(config.settings.scheduler, &dataplane.families())?;
        Ok(dataplane)
    }
}
