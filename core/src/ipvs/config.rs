//! What the plan depends on besides state and node.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use super::Scheduler;
use crate::{
    iptables::{NodePortAddresses, RenderConfig},
    masquerade::MasqueradeConfig,
    model::Family,
};

/// Configuration of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IpvsConfig {
    /// The family.
    pub family: Family,
    /// The cluster's scheduler.
    pub scheduler: Scheduler,
    /// Schedulers that the kernel has. A service that asks for another one gets the cluster's, with a warning.
    pub available_schedulers: BTreeSet<Scheduler>,
    /// Addresses of the node that answer NodePorts: concrete ones, none on loopback or our device.
    pub node_port_addresses: Vec<IpAddr>,
    /// Addresses that other devices of this node have: they are not bound to ours.
    pub other_addresses: BTreeSet<IpAddr>,
    /// Virtual servers of these addresses are others', whatever sets say.
    pub exclude_cidrs: Vec<IpNet>,
    /// A draining destination is removed after so long even if it has connections; `None`, as with kube-proxy, for never.
    pub drain_limit_ms: Option<u64>,
    /// Masquerading.
    pub masquerade: MasqueradeConfig,
}

impl IpvsConfig {
    /// kube-proxy's defaults for a family, on a kernel that has every scheduler.
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
        }
    }

    /// For the rules that stand beside virtual servers.
    #[must_use]
    pub fn render_config(&self) -> RenderConfig {
        RenderConfig {
            masquerade: self.masquerade.clone(),
            node_port_addresses: NodePortAddresses::Only(self.node_port_addresses.clone()),
            localhost_node_ports: false,
            beside_ipvs: true,
            ..RenderConfig::new(self.family)
        }
    }

    /// True for addresses whose virtual servers are others'.
    #[must_use]
    pub fn excludes(&self, address: IpAddr) -> bool {
        self.exclude_cidrs.iter().any(|cidr| cidr.contains(&address))
    }

    /// The scheduler of a service that asks for `name`, and what is wrong with the name.
    #[must_use]
    pub fn scheduler_for(&self, name: &str) -> (Scheduler, Option<String>) {
        if name.is_empty() {
            return (self.scheduler, None);
        }
        match Scheduler::parse(name) {
            Some(scheduler) if self.available_schedulers.contains(&scheduler) => (scheduler, None),
            Some(scheduler) => {
                let problem = format!(
                    "this node's kernel lacks scheduler {scheduler} (load it: `modprobe ip_vs_{scheduler}`); {} is used",
                    self.scheduler
                );
                (self.scheduler, Some(problem))
            }
            None => {
                let known: Vec<&str> = Scheduler::ALL.iter().map(|scheduler| scheduler.as_str()).collect();
                let problem = format!(
                    "annotation headgate.io/scheduler names no scheduler of IPVS: {name:?}; {} is used (there are {})",
                    self.scheduler,
                    known.join(", ")
                );
                (self.scheduler, Some(problem))
            }
        }
    }
}
