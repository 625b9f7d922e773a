//! Prints the virtual services and destinations of this network namespace like `ipvsadm -Sn`, and
//! adds the thresholds.

use ipvs_netlink::{
    DestinationEntry, Family, Forwarding, Ipvs, IpvsError, Netmask, Protocol, Service, ServiceId, TunnelKind,
};

fn main() -> Result<(), IpvsError> {
    let mut ipvs = Ipvs::open()?;
    for entry in ipvs.services()? {
        let name = name(entry.service.id);
        println!("-A {name} -s {}{}", entry.service.scheduler, options(&entry.service));
        for destination in ipvs.destinations(entry.service.id)? {
            println!("-a {name} {}", describe(&destination));
        }
    }
    Ok(())
}

fn name(id: ServiceId) -> String {
    match id {
        ServiceId::Address { protocol, address } => match protocol {
            Protocol::Tcp => format!("-t {address}"),
            Protocol::Udp => format!("-u {address}"),
            Protocol::Sctp => format!("--sctp-service {address}"),
            Protocol::Other(number) => format!("--protocol-{number} {address}"),
        },
        ServiceId::FirewallMark { family: Family::V4, mark } => format!("-f {mark}"),
        ServiceId::FirewallMark { family: Family::V6, mark } => format!("-f {mark} -6"),
    }
}

fn options(service: &Service) -> String {
    let mut text = String::new();
    if let Some(persistence) = service.persistence {
        text += &format!(" -p {}", persistence.timeout_seconds);
        if persistence.netmask != Netmask::host(service.id.family()) {
            text += &match persistence.netmask {
                Netmask::V4(mask) => format!(" -M {mask}"),
                Netmask::V6(length) => format!(" -M {length}"),
            };
        }
    }
    if let Some(engine) = &service.persistence_engine {
        text += &format!(" --pe {engine}");
    }
    if service.one_packet {
        text += " -o";
    }
    let flags = service.scheduler_flags;
    let of = &service.scheduler;
    let named = [(flags.fallback, "fallback"), (flags.port, "port")];
    let flags: Vec<_> = named.iter().filter(|(set, _)| *set).map(|(_, flag)| format!("{of}-{flag}")).collect();
    if flags.is_empty() { text } else { text + " -b " + &flags.join(",") }
}

fn describe(entry: &DestinationEntry) -> String {
    let destination = &entry.destination;
    let forwarding = match destination.forwarding {
        Forwarding::Masquerade => "-m",
        Forwarding::Local | Forwarding::Direct => "-g",
        Forwarding::Tunnel => "-i",
        Forwarding::Other(_) => "-?",
    };
    let mut text = format!("-r {} {forwarding} -w {}", destination.address, destination.weight);
    if destination.upper_threshold != 0 {
        text += &format!(" -x {}", destination.upper_threshold);
    }
    if destination.lower_threshold != 0 {
        text += &format!(" -y {}", destination.lower_threshold);
    }
    match destination.tunnel.kind {
        TunnelKind::Gue => text += &format!(" --tun-type gue --tun-port {}", destination.tunnel.port),
        TunnelKind::Gre => text += " --tun-type gre",
        TunnelKind::Ipip | TunnelKind::Other(_) => return text,
    }
    text + match destination.tunnel.flags {
        0 => " --tun-nocsum",
        1 => " --tun-csum",
        _ => " --tun-remcsum",
    }
}
