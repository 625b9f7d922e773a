//! Changes, and what their refusals mean.

use std::net::SocketAddr;

use crate::{Destination, Refusal, Service, ServiceId};

/// A change of what is programmed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Makes a virtual service. Refused when it exists.
    AddService(Service),
    /// Gives a virtual service another scheduler, persistence and flags. Its destinations and connections stay.
    SetService(Service),
    /// Removes a virtual service with its destinations.
    RemoveService(ServiceId),
    /// Sets a virtual service's counters, and those of its destinations, to zero.
    ZeroService(ServiceId),
    /// Makes a destination of a virtual service. Refused when it exists.
    AddDestination(ServiceId, Destination),
    /// Gives a destination another weight, forwarding method and thresholds. Its connections stay.
    SetDestination(ServiceId, Destination),
    /// Removes a destination. Its connections are dropped with their next packet, or stay if the kernel's `expire_nodest_conn` is 0 and the destination
    /// comes back.
    RemoveDestination(ServiceId, SocketAddr),
}

impl Command {
    /// The virtual service that it is about.
    #[must_use]
    pub fn service(&self) -> ServiceId {
        match self {
            Self::AddService(service) | Self::SetService(service) => service.id,
            Self::RemoveService(id)
            | Self::ZeroService(id)
            | Self::AddDestination(id, _)
            | Self::SetDestination(id, _)
            | Self::RemoveDestination(id, _) => *id,
        }
    }

    /// What a refusal of this command means, with the object that it is about.
    #[must_use]
    pub fn explain(&self, refusal: &Refusal) -> String {
        let reason = self.reason(refusal.code).map_or_else(|| refusal.to_string(), str::to_owned);
        let of = self.service();
        match self {
            Self::AddService(service) | Self::SetService(service) => {
                format!("virtual service {of} with scheduler {:?}: {reason}", service.scheduler)
            }
            Self::RemoveService(_) | Self::ZeroService(_) => format!("virtual service {of}: {reason}"),
            Self::AddDestination(_, destination) | Self::SetDestination(_, destination) => {
                format!("destination {} of virtual service {of}: {reason}", destination.address)
            }
            Self::RemoveDestination(_, address) => format!("destination {address} of virtual service {of}: {reason}"),
        }
    }

    /// What the kernel's error numbers stand for (`net/netfilter/ipvs/ip_vs_ctl.c`).
    fn reason(&self, code: i32) -> Option<&'static str> {
        Some(match (self, code) {
            (_, libc::ESRCH) => "there is no such virtual service",
            (_, libc::EPERM) => "not permitted: CAP_NET_ADMIN is needed",
            (Self::AddService(_) | Self::SetService(_), libc::ENOENT) => {
                "the kernel has neither this scheduler nor a module ip_vs_NAME for it"
            }
            (Self::AddService(_), libc::EEXIST) => "it exists",
            (Self::AddDestination(..), libc::EEXIST) => "it exists",
            (Self::SetDestination(..) | Self::RemoveDestination(..), libc::ENOENT) => "there is no such destination",
            (Self::AddDestination(..), libc::EINVAL) => "to this node it is no unicast address (see ip route get)",
            (Self::AddDestination(..) | Self::SetDestination(..), libc::ERANGE) => {
                "the weight is out of range, or the lower threshold is above the upper"
            }
            _ => return None,
        })
    }
}
