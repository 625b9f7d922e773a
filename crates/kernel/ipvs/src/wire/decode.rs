//! Decoding of the kernel's answers. Unknown attributes are ignored. A truncated message, or a
//! message without the key of its object, is an error.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use headgate_netlink::{Malformed, checked_attributes, find, generic, read_be16, read_text, read_u16, read_u32};

use super::{dest, flag, svc, top};
use crate::{
    Destination, DestinationEntry, Family, Forwarding, Netmask, Persistence, Protocol, SchedulerFlags, Service,
    ServiceEntry, ServiceId,
};

fn family(value: &[u8]) -> Result<Family, Malformed> {
    Family::of_number(read_u16(value)?).ok_or(Malformed("an address family that is neither IPv4 nor IPv6"))
}

fn protocol(value: &[u8]) -> Result<Protocol, Malformed> {
    let number = u8::try_from(read_u16(value)?).map_err(|_| Malformed("a protocol with a number above 255"))?;
    Ok(Protocol::of_number(number))
}

/// Reads an address as `union nf_inet_addr`, or in the length of its family.
fn address(family: Family, value: &[u8]) -> Result<IpAddr, Malformed> {
    let wrong = Malformed("an address with the wrong length for its family");
    match family {
        Family::V4 if value.len() == 4 || value.len() == 16 => {
            let bytes: [u8; 4] = value.get(..4).ok_or(wrong)?.try_into().map_err(|_| wrong)?;
            Ok(bytes.into())
        }
        Family::V4 => Err(wrong),
        Family::V6 => <[u8; 16]>::try_from(value).map(IpAddr::from).map_err(|_| wrong),
    }
}

/// Reads a virtual service from a list or a single answer.
pub(crate) fn service(payload: &[u8]) -> Result<ServiceEntry, Malformed> {
    let (mut of, mut transport, mut ip, mut port, mut mark) = (None, None, None, None, None);
    let (mut scheduler, mut engine) = (None, None);
    let (mut flags, mut timeout_seconds, mut netmask) = (0, 0, None);
    for attribute in
        checked_attributes(find(generic::split(payload)?.1, top::SERVICE, "a message without its virtual service")?)
    {
        let (kind, value) = attribute?;
        match kind {
            svc::AF => of = Some(family(value)?),
            svc::PROTOCOL => transport = Some(protocol(value)?),
            svc::ADDR => ip = Some(value),
            svc::PORT => port = Some(read_be16(value)?),
            svc::FWMARK => mark = Some(read_u32(value)?),
            svc::SCHED_NAME => scheduler = Some(read_text(value)?.to_owned()),
            svc::PE_NAME => engine = Some(read_text(value)?.to_owned()),
            // The second half of the value is the mask of valid flags, which covers all flags.
            svc::FLAGS => flags = read_u32(value.get(..4).ok_or(Malformed("truncated flags"))?)?,
            svc::TIMEOUT => timeout_seconds = read_u32(value)?,
            svc::NETMASK => netmask = Some(value),
            _ => {}
        }
    }
    let family = of.ok_or(Malformed("a virtual service without an address family"))?;
    let id = match mark {
        Some(mark) => ServiceId::FirewallMark { family, mark },
        None => ServiceId::Address {
            protocol: transport.ok_or(Malformed("a virtual service without a protocol"))?,
            address: SocketAddr::new(
                address(family, ip.ok_or(Malformed("a virtual service without an address"))?)?,
                port.ok_or(Malformed("a virtual service without a port"))?,
            ),
        },
    };
    let persistence = if flags & flag::PERSISTENT == 0 {
        None
    } else {
        let netmask = netmask.map_or(Ok(Netmask::host(family)), |value| read_netmask(family, value))?;
        Some(Persistence { timeout_seconds, netmask })
    };
    let is_set = |flag: u32| flags & flag != 0;
    let known = flag::PERSISTENT | flag::HASHED | flag::ONEPACKET | flag::SCHED1 | flag::SCHED2;
    Ok(ServiceEntry {
        service: Service {
            id,
            scheduler: scheduler.ok_or(Malformed("a virtual service without a scheduler"))?,
            persistence,
            one_packet: is_set(flag::ONEPACKET),
            scheduler_flags: SchedulerFlags { fallback: is_set(flag::SCHED1), port: is_set(flag::SCHED2) },
            persistence_engine: engine,
        },
        other_flags: flags & !known,
    })
}

fn read_netmask(family: Family, value: &[u8]) -> Result<Netmask, Malformed> {
    Ok(match family {
        Family::V4 => {
            let bytes: [u8; 4] = value.try_into().map_err(|_| Malformed("a netmask of another length than 4"))?;
            Netmask::V4(Ipv4Addr::from(bytes))
        }
        Family::V6 => Netmask::V6(read_u32(value)?),
    })
}

/// Reads a destination of a list. Kernels before 3.18 omit its family, which is then the family of
/// the service.
pub(crate) fn destination(payload: &[u8], service: Family) -> Result<DestinationEntry, Malformed> {
    let (mut of, mut ip, mut port, mut forwarding) = (None, None, None, None);
    let mut destination = Destination::new(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0)).weighing(0);
    let (mut active_connections, mut inactive_connections, mut persistent_connections) = (0, 0, 0);
    for attribute in
        checked_attributes(find(generic::split(payload)?.1, top::DEST, "a message without its destination")?)
    {
        let (kind, value) = attribute?;
        match kind {
            dest::ADDR_FAMILY => of = Some(family(value)?),
            dest::ADDR => ip = Some(value),
            dest::PORT => port = Some(read_be16(value)?),
            dest::FWD_METHOD => forwarding = Some(Forwarding::of_number(read_u32(value)?)),
            dest::WEIGHT => destination.weight = read_u32(value)?,
            dest::U_THRESH => destination.upper_threshold = read_u32(value)?,
            dest::L_THRESH => destination.lower_threshold = read_u32(value)?,
            dest::ACTIVE_CONNS => active_connections = read_u32(value)?,
            dest::INACT_CONNS => inactive_connections = read_u32(value)?,
            dest::PERSIST_CONNS => persistent_connections = read_u32(value)?,
            _ => {}
        }
    }
    let ip = address(of.unwrap_or(service), ip.ok_or(Malformed("a destination without an address"))?)?;
    destination.address = SocketAddr::new(ip, port.ok_or(Malformed("a destination without a port"))?);
    destination.forwarding = forwarding.ok_or(Malformed("a destination without a forwarding method"))?;
    Ok(DestinationEntry { destination, active_connections, inactive_connections, persistent_connections })
}
