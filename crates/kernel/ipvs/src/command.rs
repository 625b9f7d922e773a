//! Changes of virtual services and destinations, and explanations of the kernel's errors.

use std::net::SocketAddr;

use crate::{Destination, Refusal, Service, ServiceId};

/// One change of the kernel's IPVS configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Creates a virtual service. The kernel rejects the command if the service exists.
    AddService(Service),
    /// Changes the scheduler, persistence and flags of a virtual service. The kernel keeps its
    /// destinations and connections.
    SetService(Service),
    /// Removes a virtual service and its destinations.
    RemoveService(ServiceId),
    /// Adds a destination to a virtual service. Rejected if the destination exists.
    AddDestination(ServiceId, Destination),
    /// Changes weight, forwarding method and thresholds of a destination. Its connections stay.
    SetDestination(ServiceId, Destination),
    /// Removes a destination. The kernel drops each of its connections at the next packet. If
    /// `expire_nodest_conn` is 0 and the destination is added again, its connections continue.
    RemoveDestination(ServiceId, SocketAddr),
}

impl Command {
    /// The virtual service that the command changes.
    pub fn service(&self) -> ServiceId {
        match self {
            Self::AddService(service) | Self::SetService(service) => service.id,
            Self::RemoveService(id)
            | Self::AddDestination(id, _)
            | Self::SetDestination(id, _)
            | Self::RemoveDestination(id, _) => *id,
        }
    }

    /// Describes a rejection of this command in words, with its object and the reason.
    pub fn explain(&self, refusal: &Refusal) -> String {
        let reason = self.reason(refusal.code).map_or_else(|| refusal.to_string(), str::to_owned);
        let of = self.service();
        match self {
            Self::AddService(service) | Self::SetService(service) => {
                format!("virtual service {of} with scheduler {:?}: {reason}", service.scheduler)
            }
            Self::RemoveService(_) => format!("virtual service {of}: {reason}"),
            Self::AddDestination(_, destination) | Self::SetDestination(_, destination) => {
                format!("destination {} of virtual service {of}: {reason}", destination.address)
            }
            Self::RemoveDestination(_, address) => format!("destination {address} of virtual service {of}: {reason}"),
        }
    }

    /// The meaning of the kernel's error numbers (`net/netfilter/ipvs/ip_vs_ctl.c`).
    fn reason(&self, code: i32) -> Option<&'static str> {
        Some(match (self, code) {
            (_, libc::ESRCH) => "there is no such virtual service",
            (_, libc::EPERM) => "not permitted: CAP_NET_ADMIN is needed",
            (Self::AddService(_) | Self::SetService(_), libc::ENOENT) => {
                "the kernel has neither this scheduler nor a module ip_vs_NAME for it"
            }
            (Self::AddService(_), libc::EEXIST) => "it already exists",
            (Self::AddDestination(..), libc::EEXIST) => "it already exists",
            (Self::SetDestination(..) | Self::RemoveDestination(..), libc::ENOENT) => "there is no such destination",
            (Self::AddDestination(..), libc::EINVAL) => {
                "this node does not route the address as a unicast address (see ip route get)"
            }
            (Self::AddDestination(..) | Self::SetDestination(..), libc::ERANGE) => {
                "the weight is out of range, or the lower threshold is above the upper threshold"
            }
            _ => return None,
        })
    }
}
