//! The objects in the kernel.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use super::{
    super::ipsets::{IpSetElement, Set},
    config::IpvsConfig,
    objects::{ServerKey, Settings},
};
use crate::{dataplane::rules::ExistingTables, model::Protocol};

/// A virtual server in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExistingServer {
    /// The settings. `None` for settings that Headgate never programs: an unknown scheduler,
    /// one-packet scheduling or another netmask.
    pub settings: Option<Settings>,
    /// Destinations with their weights. The caller leaves out destinations with another forwarding
    /// method than NAT and logs a warning.
    pub destinations: BTreeMap<SocketAddr, u32>,
}

/// The objects in the kernel for one family.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct ExistingObjects {
    /// Sets with names of Headgate and the right type, with their elements. The caller destroys
    /// sets with such a name and another type before it reads the kernel.
    pub sets: BTreeMap<Set, BTreeSet<IpSetElement>>,
    /// Addresses of Headgate's device.
    pub device_addresses: BTreeSet<IpAddr>,
    /// Virtual servers with an address, including servers of other programs. Virtual servers with a
    /// firewall mark always belong to other programs and are left out.
    pub servers: BTreeMap<ServerKey, ExistingServer>,
    /// iptables rules.
    pub tables: ExistingTables,
}

impl ExistingObjects {
    /// Returns the element that marks a virtual server as Headgate's, or `None` if the server
    /// belongs to another program.
    #[must_use]
    pub fn mark(&self, key: &ServerKey, config: &IpvsConfig) -> Option<(Set, IpSetElement)> {
        self.mark_preferring(key, config, |_| false)
    }

    /// Like [`Self::mark`], but if several elements mark the server, prefers an element that no
    /// service needs. Such an element exists only to mark the server.
    #[must_use]
    pub fn mark_preferring(
        &self,
        key: &ServerKey,
        config: &IpvsConfig,
        is_needed: impl Fn(&(Set, IpSetElement)) -> bool,
    ) -> Option<(Set, IpSetElement)> {
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

    /// True if a previous kube-proxy has created the server for a NodePort. kube-proxy's sets of
    /// NodePorts contain no addresses, and kube-proxy does not create [`Set::NodePortServers`].
    fn is_kube_proxys_node_port(&self, key: &ServerKey) -> bool {
        let element = match key.protocol {
            Protocol::Tcp | Protocol::Udp => IpSetElement::Port(key.port),
            Protocol::Sctp => key.element(),
        };
        let is_node_port =
            self.sets.get(&Set::node_port(key.protocol)).is_some_and(|elements| elements.contains(&element));
        is_node_port && !self.sets.contains_key(&Set::NodePortServers)
    }
}
