//! What a kernel has.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use super::{
    super::ipsets::{Element, Set},
    config::IpvsConfig,
    objects::{ServerKey, Settings},
};
use crate::{dataplane::rules::ExistingTables, model::Protocol};

/// A virtual server that the kernel has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExistingServer {
    /// Settings; `None` if they are none that we ever give (a scheduler that is not known,
    /// one-packet scheduling, another netmask).
    pub settings: Option<Settings>,
    /// Destinations and weights. Those that are not reached by masquerading count as absent, and
    /// have to be left out with a warning.
    pub destinations: BTreeMap<SocketAddr, u32>,
}

/// What a kernel has in one family.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Existing {
    /// Sets of our names and of the right kind, with their elements. One of another kind is to be
    /// destroyed before.
    pub sets: BTreeMap<Set, BTreeSet<Element>>,
    /// Addresses of our device.
    pub device_addresses: BTreeSet<IpAddr>,
    /// Virtual servers by address, whoever made them. Those by firewall mark are others' and left
    /// out.
    pub servers: BTreeMap<ServerKey, ExistingServer>,
    /// iptables.
    pub tables: ExistingTables,
}

impl Existing {
    /// The element that shows a virtual server to be ours, if it is.
    #[must_use]
    pub fn mark(&self, key: &ServerKey, config: &IpvsConfig) -> Option<(Set, Element)> {
        self.mark_besides(key, config, |_| false)
    }

    /// The same, rather an element that services do not need than one that they do: it stands there
    /// for the server alone.
    #[must_use]
    pub fn mark_besides(
        &self,
        key: &ServerKey,
        config: &IpvsConfig,
        is_needed: impl Fn(&(Set, Element)) -> bool,
    ) -> Option<(Set, Element)> {
        if config.excludes(key.address) {
            return None;
        }
        let has = |set: &Set| self.sets.get(set).is_some_and(|elements| elements.contains(&key.element()));
        let mut marks = Set::OF_SERVERS.into_iter().filter(has).map(|set| (set, key.element())).peekable();
        if let Some(first) = marks.peek().copied() {
            return Some(marks.find(|mark| !is_needed(mark)).unwrap_or(first));
        }
        if self.device_addresses.contains(&key.address) {
            return Some((Set::ClusterIp, key.element()));
        }
        self.is_kube_proxys_node_port(key).then_some((Set::NodePortServers, key.element()))
    }

    /// kube-proxy has NodePorts without addresses, and not the set that says which servers they
    /// have.
    fn is_kube_proxys_node_port(&self, key: &ServerKey) -> bool {
        let element = match key.protocol {
            Protocol::Tcp | Protocol::Udp => Element::Port(key.port),
            Protocol::Sctp => key.element(),
        };
        let matches = self.sets.get(&Set::node_port(key.protocol)).is_some_and(|elements| elements.contains(&element));
        matches && !self.sets.contains_key(&Set::NodePortServers)
    }
}
