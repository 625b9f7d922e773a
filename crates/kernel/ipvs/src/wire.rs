//! Encoding of requests and decoding of answers (`linux/ip_vs.h`,
//! `net/netfilter/ipvs/ip_vs_ctl.c`). Unknown attributes are ignored. A truncated message, or one
//! without the key of its object, is an error. Ports and IPv4 netmasks are big-endian, other
//! numbers in the machine's byte order. Addresses take 16 bytes, IPv4 the first four (`union
//! nf_inet_addr`).

#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};

use headgate_netlink::{Fields, Malformed, Request, generic, read_be16, read_ip, read_text, read_u16, read_u32};

use crate::{
    Command, Destination, DestinationEntry, Family, Forwarding, Netmask, Persistence, Protocol, SchedulerFlags,
    Service, ServiceEntry, ServiceId, Timeouts,
};

/// `IPVS_GENL_VERSION`.
const VERSION: u8 = 1;

headgate_netlink::constants! {
    /// `IPVS_CMD_…`.
    commands: u8 {
        GET_SERVICE = 4, GET_DEST = 8, SET_CONFIG = 12,
    }

    /// `IPVS_CMD_ATTR_…`.
    top: u16 {
        SERVICE = 1, DEST = 2, TIMEOUT_TCP = 4, TIMEOUT_TCP_FIN = 5, TIMEOUT_UDP = 6,
    }

    /// `IPVS_SVC_ATTR_…`.
    svc: u16 {
        AF = 1, PROTOCOL = 2, ADDR = 3, PORT = 4, FWMARK = 5, SCHED_NAME = 6, FLAGS = 7,
        TIMEOUT = 8, NETMASK = 9, PE_NAME = 11,
    }

    /// `IPVS_DEST_ATTR_…`.
    dest: u16 {
        ADDR = 1, PORT = 2, FWD_METHOD = 3, WEIGHT = 4, U_THRESH = 5, L_THRESH = 6,
        ACTIVE_CONNS = 7, INACT_CONNS = 8, ADDR_FAMILY = 11,
    }

    /// `IP_VS_SVC_F_…`.
    flag: u32 {
        PERSISTENT = 0x1, HASHED = 0x2, ONEPACKET = 0x4, SCHED1 = 0x8, SCHED2 = 0x10,
    }
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
        let named = [Self::Masquerade, Self::Local, Self::Tunnel, Self::Direct];
        named.into_iter().find(|named| named.number() == number).unwrap_or(Self::Other(number))
    }
}

fn request(kind: u16, command: u8, flags: u16) -> Request {
    Request::new(kind, flags, &[command, VERSION, 0, 0])
}

fn put_family(request: Request, attribute: u16, family: Family) -> Request {
    request.attribute(attribute, &u16::from(family.number()).to_ne_bytes())
}

fn read_family(value: &[u8]) -> Result<Family, Malformed> {
    Family::of_number(read_u16(value)?).ok_or(Malformed("an address family that is neither IPv4 nor IPv6"))
}

/// Adds an address as `union nf_inet_addr`, and the port in the next attribute.
fn put_address(request: Request, attribute: u16, address: SocketAddr) -> Request {
    let mut bytes = [0; 16];
    match address.ip() {
        IpAddr::V4(address) => bytes[..4].copy_from_slice(&address.octets()),
        IpAddr::V6(address) => bytes = address.octets(),
    }
    request.attribute(attribute, &bytes).attribute(attribute + 1, &address.port().to_be_bytes())
}

/// Reads an address as `union nf_inet_addr`, or in the length of its family.
fn read_address(family: Family, value: &[u8]) -> Result<IpAddr, Malformed> {
    let address = match family {
        Family::V4 if value.len() == 16 => read_ip(&value[..4]),
        _ => read_ip(value),
    };
    let address = address.ok().filter(|address| Family::of(*address) == family);
    address.ok_or(Malformed("an address with the wrong length for its family"))
}

/// Adds the nested attribute of a service with its key. `fill` adds the other attributes inside it.
fn put_service(request: Request, id: ServiceId, fill: impl FnOnce(Request) -> Request) -> Request {
    request.nested(top::SERVICE, |service| {
        let service = put_family(service, svc::AF, id.family());
        fill(match id {
            ServiceId::Address { protocol, address } => {
                let protocol = u16::from(protocol.number()).to_ne_bytes();
                put_address(service.attribute(svc::PROTOCOL, &protocol), svc::ADDR, address)
            }
            ServiceId::FirewallMark { mark, .. } => service.attribute(svc::FWMARK, &mark.to_ne_bytes()),
        })
    })
}

fn put_options(request: Request, service: &Service) -> Request {
    let flags = [
        (service.persistence.is_some(), flag::PERSISTENT),
        (service.one_packet, flag::ONEPACKET),
        (service.scheduler_flags.fallback, flag::SCHED1),
        (service.scheduler_flags.port, flag::SCHED2),
    ];
    let flags = flags.into_iter().filter(|(set, _)| *set).fold(0, |flags, (_, flag)| flags | flag);
    let unlimited = Persistence { timeout_seconds: 0, netmask: Netmask::host(service.id.family()) };
    let Persistence { timeout_seconds, netmask } = service.persistence.unwrap_or(unlimited);
    let netmask = match netmask {
        Netmask::V4(mask) => mask.octets(),
        Netmask::V6(length) => length.to_ne_bytes(),
    };
    let request = request.text(svc::SCHED_NAME, &service.scheduler);
    let engine = service.persistence_engine.iter();
    engine
        .fold(request, |request, name| request.text(svc::PE_NAME, name))
        // The second half of `struct ip_vs_flags` is the mask of flags to set. Only the kernel sets
        // or clears HASHED.
        .attribute(svc::FLAGS, [flags, !flag::HASHED].map(u32::to_ne_bytes).as_flattened())
        .attribute(svc::TIMEOUT, &timeout_seconds.to_ne_bytes())
        .attribute(svc::NETMASK, &netmask)
}

/// Adds the nested attribute of a destination with its key. `fill` adds the other attributes inside
/// it.
fn put_destination(request: Request, address: SocketAddr, fill: impl FnOnce(Request) -> Request) -> Request {
    request.nested(top::DEST, |request| {
        fill(put_address(put_family(request, dest::ADDR_FAMILY, Family::of(address.ip())), dest::ADDR, address))
    })
}

pub(crate) fn command(kind: u16, command: &Command) -> Request {
    // `IPVS_CMD_…`
    let number = match command {
        Command::AddService(_) => 1,
        Command::SetService(_) => 2,
        Command::RemoveService(_) => 3,
        Command::AddDestination(..) => 5,
        Command::SetDestination(..) => 6,
        Command::RemoveDestination(..) => 7,
    };
    let request = put_service(request(kind, number, 0), command.service(), |request| match command {
        Command::AddService(service) | Command::SetService(service) => put_options(request, service),
        _ => request,
    });
    match command {
        Command::AddDestination(_, of) | Command::SetDestination(_, of) => {
            put_destination(request, of.address, |request| {
                request
                    .attribute(dest::FWD_METHOD, &of.forwarding.number().to_ne_bytes())
                    .attribute(dest::WEIGHT, &of.weight.to_ne_bytes())
                    .attribute(dest::U_THRESH, &of.upper_threshold.to_ne_bytes())
                    .attribute(dest::L_THRESH, &of.lower_threshold.to_ne_bytes())
            })
        }
        Command::RemoveDestination(_, address) => put_destination(request, *address, |request| request),
        _ => request,
    }
}

pub(crate) fn set_timeouts(kind: u16, timeouts: &Timeouts) -> Request {
    request(kind, commands::SET_CONFIG, 0)
        .attribute(top::TIMEOUT_TCP, &timeouts.tcp_seconds.to_ne_bytes())
        .attribute(top::TIMEOUT_TCP_FIN, &timeouts.tcp_fin_seconds.to_ne_bytes())
        .attribute(top::TIMEOUT_UDP, &timeouts.udp_seconds.to_ne_bytes())
}

pub(crate) fn list_services(kind: u16) -> Request {
    request(kind, commands::GET_SERVICE, FLAG_DUMP)
}

pub(crate) fn get_service(kind: u16, id: ServiceId) -> Request {
    put_service(request(kind, commands::GET_SERVICE, 0), id, |service| service)
}

pub(crate) fn list_destinations(kind: u16, id: ServiceId) -> Request {
    put_service(request(kind, commands::GET_DEST, FLAG_DUMP), id, |service| service)
}

fn read_protocol(value: &[u8]) -> Result<Protocol, Malformed> {
    let number = u8::try_from(read_u16(value)?).map_err(|_| Malformed("a protocol with a number above 255"))?;
    Ok(Protocol::of_number(number))
}

pub(crate) fn service(payload: &[u8]) -> Result<ServiceEntry, Malformed> {
    let fields = generic::fields(payload)?.need(top::SERVICE, Fields::of, "a message without its virtual service")?;
    let family = fields.need(svc::AF, read_family, "a virtual service without an address family")?;
    let id = match fields.get(svc::FWMARK, read_u32)? {
        Some(mark) => ServiceId::FirewallMark { family, mark },
        None => ServiceId::Address {
            protocol: fields.need(svc::PROTOCOL, read_protocol, "a virtual service without a protocol")?,
            address: SocketAddr::new(
                fields.need(svc::ADDR, |ip| read_address(family, ip), "a virtual service without an address")?,
                fields.need(svc::PORT, read_be16, "a virtual service without a port")?,
            ),
        },
    };
    // The second half of the value is the mask of valid flags, which covers all flags.
    let read_flags = |value: &[u8]| read_u32(value.get(..4).ok_or(Malformed("truncated flags"))?);
    let flags = fields.get(svc::FLAGS, read_flags)?.unwrap_or_default();
    let is_set = |flag: u32| flags & flag != 0;
    let netmask = fields.get(svc::NETMASK, |value| read_netmask(family, value))?;
    let persistence = Persistence {
        timeout_seconds: fields.get(svc::TIMEOUT, read_u32)?.unwrap_or_default(),
        netmask: netmask.unwrap_or(Netmask::host(family)),
    };
    let known = flag::PERSISTENT | flag::HASHED | flag::ONEPACKET | flag::SCHED1 | flag::SCHED2;
    Ok(ServiceEntry {
        service: Service {
            id,
            scheduler: fields.need(svc::SCHED_NAME, read_text, "a virtual service without a scheduler")?,
            persistence: is_set(flag::PERSISTENT).then_some(persistence),
            one_packet: is_set(flag::ONEPACKET),
            scheduler_flags: SchedulerFlags { fallback: is_set(flag::SCHED1), port: is_set(flag::SCHED2) },
            persistence_engine: fields.get(svc::PE_NAME, read_text)?,
        },
        other_flags: flags & !known,
    })
}

fn read_netmask(family: Family, value: &[u8]) -> Result<Netmask, Malformed> {
    match (family, read_ip(value)) {
        (Family::V4, Ok(IpAddr::V4(mask))) => Ok(Netmask::V4(mask)),
        (Family::V4, _) => Err(Malformed("a netmask of another length than 4")),
        (Family::V6, _) => read_u32(value).map(Netmask::V6),
    }
}

/// Reads a destination of a list. Kernels before 3.18 omit its family: that of the service.
pub(crate) fn destination(payload: &[u8], service: Family) -> Result<DestinationEntry, Malformed> {
    let fields = generic::fields(payload)?.need(top::DEST, Fields::of, "a message without its destination")?;
    let family = fields.get(dest::ADDR_FAMILY, read_family)?.unwrap_or(service);
    let number = |attribute| Ok(fields.get(attribute, read_u32)?.unwrap_or_default());
    let forwarding = fields.need(dest::FWD_METHOD, read_u32, "a destination without a forwarding method")?;
    let destination = Destination {
        address: SocketAddr::new(
            fields.need(dest::ADDR, |ip| read_address(family, ip), "a destination without an address")?,
            fields.need(dest::PORT, read_be16, "a destination without a port")?,
        ),
        forwarding: Forwarding::of_number(forwarding),
        weight: number(dest::WEIGHT)?,
        upper_threshold: number(dest::U_THRESH)?,
        lower_threshold: number(dest::L_THRESH)?,
    };
    Ok(DestinationEntry {
        destination,
        active_connections: number(dest::ACTIVE_CONNS)?,
        inactive_connections: number(dest::INACT_CONNS)?,
    })
}
