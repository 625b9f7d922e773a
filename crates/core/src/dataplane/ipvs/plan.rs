//! Operations that change the kernel, and plans that consist of them.

use std::net::{IpAddr, SocketAddr};

use super::{
    super::ipsets::{IpSetElement, Set},
    objects::{Object, ServerKey, Settings},
};
use crate::dataplane::rules::Script;

/// One operation on the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Creates a set.
    CreateSet(Set),
    /// Adds an element that is not in the set.
    AddElement(Set, IpSetElement),
    /// Adds an address with prefix length 32 or 128 to Headgate's device.
    AddAddress(IpAddr),
    /// Adds a virtual server without destinations.
    AddServer(ServerKey, Settings),
    /// Changes the settings of a virtual server.
    EditServer(ServerKey, Settings),
    /// Adds a destination with a weight and the forwarding method NAT (`IP_VS_CONN_F_MASQ`).
    AddDestination(ServerKey, SocketAddr, u32),
    /// Changes the weight of a destination. A destination of weight 0 gets no new connections.
    EditDestination(ServerKey, SocketAddr, u32),
    /// Removes a destination.
    DeleteDestination(ServerKey, SocketAddr),
    /// Removes a virtual server that has no destinations.
    DeleteServer(ServerKey),
    /// Removes an address from Headgate's device.
    DeleteAddress(IpAddr),
    /// Removes an element that is in the set.
    DeleteElement(Set, IpSetElement),
    /// Removes a set that no rule refers to.
    DestroySet(Set),
}

impl Op {
    /// Returns the object that the operation creates or changes. Returns `None` for removals and
    /// for operations on whole sets.
    #[must_use]
    pub fn object(&self) -> Option<Object> {
        match *self {
            Self::AddElement(set, element) => Some(Object::Element(set, element)),
            Self::AddAddress(address) => Some(Object::Address(address)),
            Self::AddServer(server, _) | Self::EditServer(server, _) => Some(Object::Server(server)),
            Self::AddDestination(server, address, _) | Self::EditDestination(server, address, _) => {
                Some(Object::Destination(server, address))
            }
            Self::CreateSet(_)
            | Self::DestroySet(_)
            | Self::DeleteElement(..)
            | Self::DeleteAddress(_)
            | Self::DeleteServer(_)
            | Self::DeleteDestination(..) => None,
        }
    }
}

/// Changes of the kernel. The caller carries out `before`, then the script, then `after`.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct IpvsPlan {
    /// Additions and changes. An object comes before the objects that refer to it.
    pub before: Vec<Op>,
    /// Changes of iptables rules.
    pub script: Script,
    /// Removals, and weights of 0 for destinations that drain.
    pub after: Vec<Op>,
    /// Number of services whose views were computed.
    pub services_planned: u32,
    /// True if virtual servers of the services wait for another plan, because this one is large.
    pub is_partial: bool,
    /// True if virtual servers wait for another plan.
    pub has_rest: bool,
}

impl IpvsPlan {
    /// True if the plan changes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.before.is_empty() && self.script.is_empty() && self.after.is_empty()
    }

    /// Returns all operations, without the script.
    pub fn ops(&self) -> impl Iterator<Item = &Op> {
        self.before.iter().chain(&self.after)
    }
}
