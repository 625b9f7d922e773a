//! Encoding of requests. Attribute numbers come from `linux/ip_vs.h`, and layouts from
//! `net/netfilter/ipvs/ip_vs_ctl.c`.
//!
//! Ports and IPv4 netmasks are big-endian. All other numbers are in the machine's byte order.
//! Addresses take 16 bytes in both families. An IPv4 address uses the first four bytes (`union
//! nf_inet_addr`).

mod decode;
#[cfg(test)]
mod tests;

pub(crate) use decode::{destination, service};

use std::net::{IpAddr, SocketAddr};

use headgate_netlink::{Request, generic};

use crate::{Command, Destination, Family, Forwarding, Netmask, Service, ServiceId, Timeouts};

/// `IPVS_CMD_…`.
mod commands {
    pub(super) const NEW_SERVICE: u8 = 1;
    pub(super) const SET_SERVICE: u8 = 2;
    pub(super) const DEL_SERVICE: u8 = 3;
    pub(super) const GET_SERVICE: u8 = 4;
    pub(super) const NEW_DEST: u8 = 5;
    pub(super) const SET_DEST: u8 = 6;
    pub(super) const DEL_DEST: u8 = 7;
    pub(super) const GET_DEST: u8 = 8;
    pub(super) const SET_CONFIG: u8 = 12;
}

/// `IPVS_CMD_ATTR_…`.
mod top {
    pub(super) const SERVICE: u16 = 1;
    pub(super) const DEST: u16 = 2;
    pub(super) const TIMEOUT_TCP: u16 = 4;
    pub(super) const TIMEOUT_TCP_FIN: u16 = 5;
    pub(super) const TIMEOUT_UDP: u16 = 6;
}

/// `IPVS_SVC_ATTR_…`.
mod svc {
    pub(super) const AF: u16 = 1;
    pub(super) const PROTOCOL: u16 = 2;
    pub(super) const ADDR: u16 = 3;
    pub(super) const PORT: u16 = 4;
    pub(super) const FWMARK: u16 = 5;
    pub(super) const SCHED_NAME: u16 = 6;
    pub(super) const FLAGS: u16 = 7;
    pub(super) const TIMEOUT: u16 = 8;
    pub(super) const NETMASK: u16 = 9;
    pub(super) const PE_NAME: u16 = 11;
}

/// `IPVS_DEST_ATTR_…`.
mod dest {
    pub(super) const ADDR: u16 = 1;
    pub(super) const PORT: u16 = 2;
    pub(super) const FWD_METHOD: u16 = 3;
    pub(super) const WEIGHT: u16 = 4;
    pub(super) const U_THRESH: u16 = 5;
    pub(super) const L_THRESH: u16 = 6;
    pub(super) const ACTIVE_CONNS: u16 = 7;
    pub(super) const INACT_CONNS: u16 = 8;
    pub(super) const PERSIST_CONNS: u16 = 9;
    pub(super) const ADDR_FAMILY: u16 = 11;
}

/// `IP_VS_SVC_F_…`.
mod flag {
    pub(super) const PERSISTENT: u32 = 0x1;
    pub(super) const HASHED: u32 = 0x2;
    pub(super) const ONEPACKET: u32 = 0x4;
    pub(super) const SCHED1: u32 = 0x8;
    pub(super) const SCHED2: u32 = 0x10;
}

const FLAG_DUMP: u16 = libc::NLM_F_DUMP as u16;

impl Forwarding {
    fn number(self) -> u32 {
        match self {
            Self::Masquerade => 0,
            Self::Local => 1,
            Self::Tunnel => 2,
            Self::Direct => 3,
            Self::Other(number) => number,
        }
    }

    fn of_number(number: u32) -> Self {
        match number {
            0 => Self::Masquerade,
            1 => Self::Local,
            2 => Self::Tunnel,
            3 => Self::Direct,
            other => Self::Other(other),
        }
    }
}

fn inet_addr(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&address.octets());
            bytes
        }
        IpAddr::V6(address) => address.octets(),
    }
}

/// Adds the nested attribute of a service with its key. `fill` adds the other attributes inside it.
fn put_service(request: Request, id: ServiceId, fill: impl FnOnce(Request) -> Request) -> Request {
    request.nested(top::SERVICE, |service| {
        let service = service.attribute(svc::AF, &u16::from(id.family().number()).to_ne_bytes());
        fill(match id {
            ServiceId::Address { protocol, address } => service
                .attribute(svc::PROTOCOL, &u16::from(protocol.number()).to_ne_bytes())
                .attribute(svc::ADDR, &inet_addr(address.ip()))
                .attribute(svc::PORT, &address.port().to_be_bytes()),
            ServiceId::FirewallMark { mark, .. } => service.attribute(svc::FWMARK, &mark.to_ne_bytes()),
        })
    })
}

fn put_whole_service(request: Request, service: &Service) -> Request {
    let flags = service_flags(service).to_ne_bytes();
    // The second half of `struct ip_vs_flags` is the mask of flags to set. Only the kernel sets or
    // clears HASHED.
    let mask = (!flag::HASHED).to_ne_bytes();
    let (timeout_seconds, netmask) = match service.persistence {
        Some(persistence) => (persistence.timeout_seconds, persistence.netmask),
        None => (0, Netmask::host(service.id.family())),
    };
    let netmask = match netmask {
        Netmask::V4(mask) => mask.octets(),
        Netmask::V6(length) => length.to_ne_bytes(),
    };
    put_service(request, service.id, |request| {
        let request = request.text(svc::SCHED_NAME, &service.scheduler);
        let request = match &service.persistence_engine {
            Some(name) => request.text(svc::PE_NAME, name),
            None => request,
        };
        request
            .attribute(svc::FLAGS, &[flags, mask].concat())
            .attribute(svc::TIMEOUT, &timeout_seconds.to_ne_bytes())
            .attribute(svc::NETMASK, &netmask)
    })
}

fn service_flags(service: &Service) -> u32 {
    let flags = [
        (service.persistence.is_some(), flag::PERSISTENT),
        (service.one_packet, flag::ONEPACKET),
        (service.scheduler_flags.fallback, flag::SCHED1),
        (service.scheduler_flags.port, flag::SCHED2),
    ];
    flags.into_iter().filter(|(set, _)| *set).fold(0, |flags, (_, flag)| flags | flag)
}

fn put_address(destination: Request, address: SocketAddr) -> Request {
    destination
        .attribute(dest::ADDR_FAMILY, &u16::from(Family::of(address.ip()).number()).to_ne_bytes())
        .attribute(dest::ADDR, &inet_addr(address.ip()))
        .attribute(dest::PORT, &address.port().to_be_bytes())
}

fn put_destination(request: Request, destination: &Destination) -> Request {
    request.nested(top::DEST, |request| {
        put_address(request, destination.address)
            .attribute(dest::FWD_METHOD, &destination.forwarding.number().to_ne_bytes())
            .attribute(dest::WEIGHT, &destination.weight.to_ne_bytes())
            .attribute(dest::U_THRESH, &destination.upper_threshold.to_ne_bytes())
            .attribute(dest::L_THRESH, &destination.lower_threshold.to_ne_bytes())
    })
}

/// The request for a command.
pub(crate) fn command(family: generic::Family, command: &Command) -> Request {
    let about = |number: u8, id: ServiceId| put_service(family.request(number, 0), id, |service| service);
    match command {
        Command::AddService(service) => put_whole_service(family.request(commands::NEW_SERVICE, 0), service),
        Command::SetService(service) => put_whole_service(family.request(commands::SET_SERVICE, 0), service),
        Command::RemoveService(id) => about(commands::DEL_SERVICE, *id),
        Command::AddDestination(id, destination) => put_destination(about(commands::NEW_DEST, *id), destination),
        Command::SetDestination(id, destination) => put_destination(about(commands::SET_DEST, *id), destination),
        Command::RemoveDestination(id, address) => {
            about(commands::DEL_DEST, *id).nested(top::DEST, |request| put_address(request, *address))
        }
    }
}

pub(crate) fn set_timeouts(family: generic::Family, timeouts: &Timeouts) -> Request {
    family
        .request(commands::SET_CONFIG, 0)
        .attribute(top::TIMEOUT_TCP, &timeouts.tcp_seconds.to_ne_bytes())
        .attribute(top::TIMEOUT_TCP_FIN, &timeouts.tcp_fin_seconds.to_ne_bytes())
        .attribute(top::TIMEOUT_UDP, &timeouts.udp_seconds.to_ne_bytes())
}

pub(crate) fn list_services(family: generic::Family) -> Request {
    family.request(commands::GET_SERVICE, FLAG_DUMP)
}

pub(crate) fn get_service(family: generic::Family, id: ServiceId) -> Request {
    put_service(family.request(commands::GET_SERVICE, 0), id, |service| service)
}

pub(crate) fn list_destinations(family: generic::Family, id: ServiceId) -> Request {
    put_service(family.request(commands::GET_DEST, FLAG_DUMP), id, |service| service)
}
