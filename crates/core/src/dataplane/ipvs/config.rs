//! The configuration of IPVS mode.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use super::{Scheduler, objects::Settings};
use crate::{
    behaviours::view::MasqueradeConfig,
    model::{Family, LoadBalancing, Service},
};

/// The configuration of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IpvsConfig {
    /// The family.
    pub family: Family,
    /// The default scheduler of the cluster.
    pub scheduler: Scheduler,
    /// Schedulers that the kernel has. A service that requests another scheduler gets the default
    /// scheduler, and the ledger reports a [`SchedulerProblem`].
    pub available_schedulers: BTreeSet<Scheduler>,
    /// Addresses of the node on which NodePorts are served, without loopback addresses and
    /// addresses of Headgate's device.
    pub node_port_addresses: Vec<IpAddr>,
    /// Addresses of other devices of this node. Headgate does not add them to its device.
    pub other_addresses: BTreeSet<IpAddr>,
    /// If no Service wants a virtual server with such an address, the virtual server belongs to
    /// another program, even if a set of Headgate contains its address and port.
    pub exclude_cidrs: Vec<IpNet>,
    /// Time in milliseconds after which a draining destination is removed even if it has
    /// connections. `None`: the destination exists until it has no connections, as in kube-proxy.
    pub drain_limit_ms: Option<u64>,
    /// Masquerading.
    pub masquerade: MasqueradeConfig,
    /// See
    /// [`RenderConfig::leaves_out_sctp`](crate::dataplane::rules::RenderConfig::leaves_out_sctp).
    pub leaves_out_sctp: bool,
}

impl IpvsConfig {
    /// Returns the defaults of kube-proxy for a family and a kernel that has every scheduler.
    #[must_use]
    pub fn new(family: Family) -> Self {
        Self {
            family,
            scheduler: Scheduler::default(),
            available_schedulers: Scheduler::ALL.into(),
            node_port_addresses: Vec::new(),
            other_addresses: BTreeSet::new(),
            exclude_cidrs: Vec::new(),
            drain_limit_ms: None,
            masquerade: MasqueradeConfig::default(),
            leaves_out_sctp: false,
        }
    }

    /// True if `exclude_cidrs` contains the address.
    #[must_use]
    pub fn excludes(&self, address: IpAddr) -> bool {
        self.exclude_cidrs.iter().any(|cidr| cidr.contains(&address))
    }

    /// Returns the settings of the virtual servers of a service, without session affinity, and the
    /// problem if the service gets the default scheduler instead of the requested scheduler. The
    /// annotation for IPVS takes precedence over the annotation for all modes. Without both
    /// annotations, the service gets the default scheduler, or the weighted form of the default
    /// scheduler if `has_weights` is true.
    #[must_use]
    pub fn settings_for(&self, service: &Service, has_weights: bool) -> (Settings, Option<SchedulerProblem>) {
        let algorithm = LoadBalancing::parse(&service.load_balancing).and_then(Scheduler::of);
        let wanted = match (&*service.scheduler, algorithm) {
            ("", Some(scheduler)) => Settings { hashes_source_port: false, ..Settings::new(scheduler) },
            ("", None) if has_weights => Settings::new(self.scheduler.weighted()),
            ("", None) => return (Settings::new(self.scheduler), None),
            (name, _) => match Scheduler::parse(name) {
                Some(scheduler) => Settings::new(scheduler),
                None => {
                    let problem = SchedulerProblem::UnknownScheduler(name.to_owned());
                    return (Settings::new(self.scheduler), Some(problem));
                }
            },
        };
        if wanted.scheduler == self.scheduler || self.available_schedulers.contains(&wanted.scheduler) {
            return (wanted, None);
        }
        (Settings::new(self.scheduler), Some(SchedulerProblem::MissingScheduler(wanted.scheduler)))
    }
}

/// Why a service gets the default scheduler instead of the requested one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SchedulerProblem {
    /// IPVS has no scheduler of this name.
    UnknownScheduler(String),
    /// The kernel of this node has not loaded the scheduler and cannot load it.
    MissingScheduler(Scheduler),
}
