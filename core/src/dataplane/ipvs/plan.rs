//! Steps that change a kernel.

use std::net::{IpAddr, SocketAddr};

use super::{
    super::ipsets::{Element, Set},
    objects::{Object, ServerKey, Settings},
};
use crate::dataplane::rules::Script;

/// One change of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Makes a set.
    CreateSet(Set),
    /// Adds an element that is not there.
    AddElement(Set, Element),
    /// Gives our device an address, /32 or /128.
    AddAddress(IpAddr),
    /// Adds a virtual server without destinations.
    AddServer(ServerKey, Settings),
    /// Changes a virtual server's settings.
    EditServer(ServerKey, Settings),
    /// Adds a destination with a weight, to be reached by masquerading (NAT).
    AddDestination(ServerKey, SocketAddr, u32),
    /// Changes a destination's weight; 0 keeps new connections off it.
    EditDestination(ServerKey, SocketAddr, u32),
    /// Removes a destination.
    DeleteDestination(ServerKey, SocketAddr),
    /// Removes a virtual server, which has no destinations.
    DeleteServer(ServerKey),
    /// Takes an address from our device.
    DeleteAddress(IpAddr),
    /// Removes an element that is there.
    DeleteElement(Set, Element),
    /// Removes a set that no rule refers to.
    DestroySet(Set),
}

impl Op {
    /// The object that a step makes or changes; `None` for steps that remove, and for steps of
    /// sets.
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

/// What is to be done, in order: `before`, then the script, then `after`.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Plan {
    /// What is added and changed, referred to before what refers to it.
    pub before: Vec<Op>,
    /// iptables rules.
    pub script: Script,
    /// What is removed.
    pub after: Vec<Op>,
    /// Services whose views were computed.
    pub services_planned: u32,
}

impl Plan {
    /// True when there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.before.is_empty() && self.script.is_empty() && self.after.is_empty()
    }

    /// All steps but the script's.
    pub fn ops(&self) -> impl Iterator<Item = &Op> {
        self.before.iter().chain(&self.after)
    }
}
