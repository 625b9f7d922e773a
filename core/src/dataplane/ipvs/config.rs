//! What the plan depends on besides state and node.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use super::Scheduler;
use crate::{behaviours::masquerade::MasqueradeConfig, model::Family};

/// Configuration of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IpvsConfig {
    /// The family.
    pub family: Family,
    /// The cluster's scheduler.
    pub scheduler: Scheduler,
    /// Schedulers that the kernel has. A service that asks for another one gets the cluster's, as a
    /// [`Problem`].
    pub available_schedulers: BTreeSet<Scheduler>,
    /// Addresses of the node that answer NodePorts: concrete ones, none on loopback or our device.
    pub node_port_addresses: Vec<IpAddr>,
    /// Addresses that other devices of this node have: our device does not get them.
    pub other_addresses: BTreeSet<IpAddr>,
    /// Virtual servers of these addresses are others', whatever sets say.
    pub exclude_cidrs: Vec<IpNet>,
    /// A draining destination is removed after so long even if it has connections; `None`, as with
    /// kube-proxy, for never.
    pub drain_limit_ms: Option<u64>,
    /// Masquerading.
    pub masquerade: MasqueradeConfig,
    /// As
    /// [`RenderConfig::leaves_out_sctp`](crate::dataplane::rules::RenderConfig::leaves_out_sctp).
    pub leaves_out_sctp: bool,
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
            leaves_out_sctp: false,
        }
    }

    /// True for addresses whose virtual servers are others'.
    #[must_use]
    pub fn excludes(&self, address: IpAddr) -> bool {
        self.exclude_cidrs.iter().any(|cidr| cidr.contains(&address))
    }

    /// The scheduler of a service that asks for `name`, and what is wrong with the name.
    #[must_use]
    pub fn scheduler_for(&self, name: &str) -> (Scheduler, Option<Problem>) {
        if name.is_empty() {
            return (self.scheduler, None);
        }
        let problem = match Scheduler::parse(name) {
            Some(scheduler) if self.available_schedulers.contains(&scheduler) => return (scheduler, None),
            Some(scheduler) => Problem::MissingScheduler(scheduler),
            None => Problem::UnknownScheduler(name.to_owned()),
        };
        (self.scheduler, Some(problem))
    }
}

/// What is wrong with the scheduler that a service asks for. It gets the cluster's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// IPVS has none of this name.
    UnknownScheduler(String),
    /// This node's kernel has not loaded it, and cannot.
    MissingScheduler(Scheduler),
}
