//! Converts between the types of `core` and the types of the netlink clients.

use headgate_core::{
    Family, Protocol,
    ipvs::{IpSetElement, Scheduler, ServerKey, Set, SetKind, Settings},
};
use ipnet::IpNet;
use ipset_netlink::{self as ipset, SetType, Specification};
use ipvs_netlink::{self as ipvs, SchedulerFlags, ServiceId};
use std::net::SocketAddr;

use super::super::ip_sets::family_of_sets;

pub(super) fn service_id(key: ServerKey) -> ServiceId {
    let protocol = match key.protocol {
        Protocol::Tcp => ipvs::Protocol::Tcp,
        Protocol::Udp => ipvs::Protocol::Udp,
        Protocol::Sctp => ipvs::Protocol::Sctp,
    };
    ServiceId::new(protocol, SocketAddr::new(key.address, key.port))
}

/// The key of a virtual server in the kernel. `None` for servers that are identified by a firewall
/// mark, and for protocols other than TCP, UDP and SCTP: the agent never creates such servers.
pub(super) fn server_key(id: ServiceId) -> Option<ServerKey> {
    let ServiceId::Address { protocol, address } = id else { return None };
    let protocol = match protocol {
        ipvs::Protocol::Tcp => Protocol::Tcp,
        ipvs::Protocol::Udp => Protocol::Udp,
        ipvs::Protocol::Sctp => Protocol::Sctp,
        ipvs::Protocol::Other(_) => return None,
    };
    Some(ServerKey { address: address.ip(), protocol, port: address.port() })
}

pub(super) fn service(key: ServerKey, settings: Settings) -> ipvs::Service {
    let service = ipvs::Service::new(service_id(key), settings.scheduler.as_str());
    let service = match settings.persistence_seconds {
        Some(seconds) => service.persistent(seconds),
        None => service,
    };
    let flags = SchedulerFlags { fallback: settings.scheduler.falls_back(), port: settings.hashes_source_port };
    ipvs::Service { scheduler_flags: flags, ..service }
}

/// The settings of a virtual server in the kernel. `None` if this dataplane never creates such.
pub(super) fn settings(found: &ipvs::ServiceEntry) -> Option<Settings> {
    let scheduler = Scheduler::parse(&found.service.scheduler)?;
    let persistence_seconds = found.service.persistence.map(|persistence| persistence.timeout_seconds);
    let hashes_source_port = found.service.scheduler_flags.port;
    let settings = Settings { scheduler, hashes_source_port, persistence_seconds };
    let is_possible = found.service == service(server_key(found.service.id)?, settings) && found.other_flags == 0;
    is_possible.then_some(settings)
}

pub(super) fn destination(address: SocketAddr, weight: u32) -> ipvs::Destination {
    ipvs::Destination::new(address).weighing(weight)
}

/// The weight of a destination in the kernel. If another field has a value that ours never have, a
/// weight that is never wanted, so that the ledger writes it again.
pub(super) fn weight(found: &ipvs::Destination) -> u32 {
    let is_ours = *found == destination(found.address, found.weight);
    if is_ours { found.weight } else { u32::MAX }
}

pub(super) fn specification(set: Set, family: Family, count: usize) -> Specification {
    let set_type = match set.kind() {
        SetKind::Port => SetType::BitmapPort,
        SetKind::Ip => SetType::HashIp,
        SetKind::IpPort => SetType::HashIpPort,
        SetKind::IpPortIp => SetType::HashIpPortIp,
        SetKind::IpPortNet => SetType::HashIpPortNet,
    };
    let wanted = Specification::new(set.name(family), set_type, family_of_sets(family));
    match set_type {
        SetType::BitmapPort => wanted,
        _ => wanted.with_sizes(SetKind::HASH_SIZE, SetKind::max_elements(count)),
    }
}

pub(super) fn element(element: IpSetElement) -> ipset::Element {
    match element {
        IpSetElement::Port(port) => ipset::Element::Port(port),
        IpSetElement::Ip(address) => ipset::Element::Ip(address),
        IpSetElement::IpPort(address, protocol, port) => {
            ipset::Element::IpPort(address, ipset_protocol(protocol), port)
        }
        IpSetElement::IpPortIp(address, protocol, port, second) => {
            ipset::Element::IpPortIp(address, ipset_protocol(protocol), port, second)
        }
        IpSetElement::IpPortNet(address, protocol, port, net) => {
            ipset::Element::IpPortNet(address, ipset_protocol(protocol), port, net.addr(), net.prefix_len())
        }
    }
}

fn ipset_protocol(protocol: Protocol) -> ipset::Protocol {
    match protocol {
        Protocol::Tcp => ipset::Protocol::Tcp,
        Protocol::Udp => ipset::Protocol::Udp,
        Protocol::Sctp => ipset::Protocol::Sctp,
    }
}

/// Converts an element of the kernel; `None` if this dataplane never adds such an element.
pub(super) fn known_element(found: &ipset::Element) -> Option<IpSetElement> {
    let known = |protocol| match protocol {
        ipset::Protocol::Tcp => Some(Protocol::Tcp),
        ipset::Protocol::Udp => Some(Protocol::Udp),
        ipset::Protocol::Sctp => Some(Protocol::Sctp),
        ipset::Protocol::Other(_) => None,
    };
    Some(match *found {
        ipset::Element::Port(port) => IpSetElement::Port(port),
        ipset::Element::Ip(address) => IpSetElement::Ip(address),
        ipset::Element::IpPort(address, protocol, port) => IpSetElement::IpPort(address, known(protocol)?, port),
        ipset::Element::IpPortIp(address, protocol, port, second) => {
            IpSetElement::IpPortIp(address, known(protocol)?, port, second)
        }
        ipset::Element::IpPortNet(address, protocol, port, net, length) => {
            IpSetElement::IpPortNet(address, known(protocol)?, port, IpNet::new(net, length).ok()?)
        }
        ipset::Element::Net(..) => return None,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn key(protocol: Protocol) -> ServerKey {
        ServerKey { address: "10.96.0.1".parse().unwrap(), protocol, port: 80 }
    }

    #[test]
    fn our_servers_are_read_back_unchanged_and_foreign_servers_are_not_taken_for_ours() {
        for scheduler in Scheduler::ALL {
            for persistence_seconds in [None, Some(10_800)] {
                let made = Settings { persistence_seconds, ..Settings::new(scheduler) };
                let entry = ipvs::ServiceEntry { service: service(key(Protocol::Sctp), made), other_flags: 0 };
                assert_eq!(settings(&entry), Some(made));
                let by_packet = ipvs::Service { one_packet: true, ..entry.service.clone() };
                assert_eq!(settings(&ipvs::ServiceEntry { service: by_packet, ..entry }), None);
            }
        }
        assert_eq!(server_key(service_id(key(Protocol::Udp))), Some(key(Protocol::Udp)));
        assert_eq!(server_key(ServiceId::FirewallMark { family: ipvs::Family::V4, mark: 1 }), None);
    }

    #[test]
    fn foreign_destinations_are_read_with_a_weight_that_our_destinations_never_have() {
        let ours = destination("10.0.0.1:80".parse().unwrap(), 7);
        assert_eq!(weight(&ours), 7);
        assert_eq!(weight(&ipvs::Destination { forwarding: ipvs::Forwarding::Direct, ..ours }), u32::MAX);
        assert_eq!(weight(&ipvs::Destination { upper_threshold: 1, ..ours }), u32::MAX);
    }
}
