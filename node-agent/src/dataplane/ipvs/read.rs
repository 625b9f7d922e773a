//! Reads the kernel's objects, in the form that the ledger compares with the wanted objects.

use std::{collections::BTreeSet, net::IpAddr};

use headgate_core::{
    Family, Protocol,
    iptables::ExistingTables,
    ipvs::{ExistingObjects, Set, existing::ExistingServer},
};
use headgate_netlink::route::{Change as RouteChange, Prefix, Routing};
use headgate_oracle::{
    iptables::Rules,
    ipvs::{IpvsDump, Member},
};
use ipnet::IpNet;
use ipset_netlink::{Change, IpSets, Specification};
use ipvs_netlink::{Destination, Forwarding, Ipvs, ServiceId};

use super::{
    super::{
        DataplaneError, ErrorKind,
        ip_sets::{destroy_if_there, of_sets},
    },
    convert,
    kernel::{IpvsKernel, of_ipvs, of_routing},
};

/// Reads all objects of one family. A set of our name with other properties is created again, with
/// its elements; one of another type is destroyed.
pub(super) fn existing(
    kernel: &mut IpvsKernel,
    device: u32,
    family: Family,
    tables: ExistingTables,
) -> Result<ExistingObjects, DataplaneError> {
    let mut existing = ExistingObjects { tables, ..ExistingObjects::default() };
    read_device(kernel.routing()?, device, family, NetworkAddresses::Remove, &mut existing)?;
    read_sets(kernel.sets()?, family, MismatchedSets::Recreate, &mut existing)?;
    read_servers(kernel.ipvs()?, family, &mut existing)?;
    Ok(existing)
}

/// What to do with addresses of a prefix on our device, such as 10.96.0.1/16. We never add one: the
/// kernel would route the whole network to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NetworkAddresses {
    /// Remove these addresses.
    Remove,
    /// Keep these addresses.
    Keep,
}

pub(super) fn read_device(
    routing: &mut Routing,
    device: u32,
    family: Family,
    network_addresses: NetworkAddresses,
    existing: &mut ExistingObjects,
) -> Result<(), DataplaneError> {
    let addresses = routing.addresses(device).map_err(of_routing)?;
    let of_family = addresses.into_iter().filter(|prefix| Family::of(prefix.address) == family);
    let (hosts, networks): (Vec<Prefix>, Vec<Prefix>) =
        of_family.partition(|prefix| *prefix == Prefix::host(prefix.address));
    existing.device_addresses = hosts.into_iter().map(|prefix| prefix.address).collect();
    if network_addresses == NetworkAddresses::Remove {
        let networks = networks.into_iter().filter(|prefix| !is_link_local(prefix.address));
        let removals: Vec<_> = networks.map(|address| RouteChange::RemoveAddress { link: device, address }).collect();
        // Ignore rejected removals: the address is gone, or the next read finds it again.
        routing.change(&removals, |_, _| {}).map_err(of_routing)?;
    }
    Ok(())
}

/// True for link-local IPv6 addresses. The kernel adds such an address to every device by itself.
fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

/// What to do with sets that have our names but other properties, such as another maximum number of
/// elements. kube-proxy creates sets with the same names and other properties.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MismatchedSets {
    /// Create these sets again with their elements, and destroy sets of another type.
    Recreate,
    /// Accept these sets.
    Accept,
}

pub(super) fn read_sets(
    sets: &mut IpSets,
    family: Family,
    mismatched_sets: MismatchedSets,
    existing: &mut ExistingObjects,
) -> Result<(), DataplaneError> {
    for set in Set::ALL {
        let Some(found) = sets.set(&set.name(family)).map_err(of_sets)? else { continue };
        let wanted = convert::specification(set, family, found.entries.len());
        if !found.header.fits(&wanted) && mismatched_sets == MismatchedSets::Recreate {
            if found.header.is_of_type(&wanted) {
                replace(sets, &wanted, &found)?;
            } else if found.header.references == 0 {
                sets.destroy(&wanted.name).map_err(of_sets)?;
                continue;
            } else {
                let family = |family: Option<_>| family.map(|family| format!(" family {family}")).unwrap_or_default();
                let message = format!(
                    "the set {name} has type {}{} instead of {}{}, and cannot be replaced because rules refer to it (iptables-save | grep {name}): remove these rules, or run this program with --cleanup",
                    found.header.type_name,
                    family(found.header.family),
                    wanted.set_type,
                    family(found.header.family.map(|_| wanted.family)),
                    name = wanted.name,
                );
                return Err(DataplaneError::new(ErrorKind::Fatal, message));
            }
        }
        // Keep the known elements. The other elements are deleted if sets are recreated.
        let mut elements = BTreeSet::new();
        let mut foreign = Vec::new();
        for entry in &found.entries {
            match convert::known_element(&entry.element) {
                Some(element) if !entry.nomatch => drop(elements.insert(element)),
                _ => foreign.push(Change::delete(&wanted.name, entry.element)),
            }
        }
        if mismatched_sets == MismatchedSets::Recreate {
            sets.execute(&foreign).map_err(of_sets)?;
        }
        existing.sets.insert(set, elements);
    }
    Ok(())
}

/// The name of a new set until it replaces an existing set.
pub(super) const DRAFT: &str = "KUBE-DRAFT";

/// Replaces a hash that is full by one that can have more elements. Returns false if the hash does
/// not exist, or already is of the larger kind.
pub(super) fn grow(sets: &mut IpSets, set: Set, family: Family) -> Result<bool, DataplaneError> {
    let Some(found) = sets.set(&set.name(family)).map_err(of_sets)? else { return Ok(false) };
    let wanted = convert::specification(set, family, found.entries.len() + 1);
    if found.header.fits(&wanted) {
        return Ok(false);
    }
    replace(sets, &wanted, &found).map(|()| true)
}

/// Replaces a set by a new set with the same elements. Swapping is atomic, so rules that refer to
/// the set always see all elements.
fn replace(sets: &mut IpSets, wanted: &Specification, found: &ipset_netlink::Set) -> Result<(), DataplaneError> {
    let draft = Specification { name: DRAFT.to_owned(), ..wanted.clone() };
    // An agent that was killed during a replacement leaves a draft behind.
    destroy_if_there(sets, DRAFT)?;
    sets.create(&draft).map_err(of_sets)?;
    let matching = found.entries.iter().filter(|entry| !entry.nomatch);
    let changes: Vec<Change> = matching.map(|entry| Change::add(DRAFT, entry.element)).collect();
    if let Some(refused) = sets.execute(&changes).map_err(of_sets)?.first() {
        let message = changes[refused.index].explain(&refused.refusal);
        return Err(DataplaneError::new(ErrorKind::NeedsFullSync, message));
    }
    sets.swap(&wanted.name, &draft.name).map_err(of_sets)?;
    sets.destroy(&draft.name).map_err(of_sets)
}

/// Reads the virtual servers of one family that are identified by address, with their destinations.
pub(super) fn read_servers(
    ipvs: &mut Ipvs,
    family: Family,
    existing: &mut ExistingObjects,
) -> Result<(), DataplaneError> {
    for found in ipvs.services().map_err(of_ipvs)? {
        let id = found.service.id;
        let Some(key) = convert::server_key(id).filter(|key| Family::of(key.address) == family) else { continue };
        let destinations = ipvs.destinations(id).map_err(of_ipvs)?;
        let weighed =
            |entry: ipvs_netlink::DestinationEntry| (entry.destination.address, convert::weight(&entry.destination));
        let destinations = destinations.into_iter().map(weighed).collect();
        existing.servers.insert(key, ExistingServer { settings: convert::settings(&found), destinations });
    }
    Ok(())
}

/// Reads the kernel for a decoder. Changes nothing.
pub(super) fn for_decoder(
    kernel: &mut IpvsKernel,
    family: Family,
    node_addresses: &BTreeSet<IpAddr>,
    node_port_addresses: &[IpAddr],
    rules: Rules,
) -> Result<IpvsDump, DataplaneError> {
    let of_family = |address: &&IpAddr| Family::of(**address) == family;
    let mut dump = IpvsDump {
        rules,
        node_addresses: node_addresses.iter().filter(of_family).copied().collect(),
        node_port_addresses: node_port_addresses.iter().filter(of_family).copied().collect(),
        ..IpvsDump::default()
    };
    let device = kernel.device_in_use()?;
    let prefixes = kernel.routing()?.addresses(device).map_err(of_routing)?;
    dump.device = prefixes.iter().map(|prefix| prefix.address).filter(|address| of_family(&address)).collect();
    for set in Set::ALL {
        let name = set.name(family);
        let Some(found) = kernel.sets()?.set(&name).map_err(of_sets)? else { continue };
        let members = found.entries.iter().filter(|entry| !entry.nomatch).filter_map(|entry| member(&entry.element));
        dump.sets.insert(name, members.collect());
    }
    let ipvs = kernel.ipvs()?;
    for found in ipvs.services().map_err(of_ipvs)? {
        let ServiceId::Address { protocol, address } = found.service.id else { continue };
        let Some(protocol) = protocol_of(protocol).filter(|_| of_family(&&address.ip())) else { continue };
        let destinations = ipvs.destinations(found.service.id).map_err(of_ipvs)?.into_iter();
        // Without translation, an endpoint gets packets to an address that it does not have.
        let destinations = destinations.map(|entry| match entry.destination {
            Destination { address, weight, forwarding: Forwarding::Masquerade, .. } => (address, weight),
            Destination { address, .. } => (address, 0),
        });
        dump.servers.insert((address.ip(), protocol, address.port()), destinations.collect());
    }
    Ok(dump)
}

fn protocol_of(protocol: ipvs_netlink::Protocol) -> Option<Protocol> {
    match protocol {
        ipvs_netlink::Protocol::Tcp => Some(Protocol::Tcp),
        ipvs_netlink::Protocol::Udp => Some(Protocol::Udp),
        ipvs_netlink::Protocol::Sctp => Some(Protocol::Sctp),
        ipvs_netlink::Protocol::Other(_) => None,
    }
}

fn member(element: &ipset_netlink::Element) -> Option<Member> {
    use ipset_netlink::{Element, Protocol as OfSet};
    let port = |protocol: OfSet, port| {
        let protocol = match protocol {
            OfSet::Tcp => Protocol::Tcp,
            OfSet::Udp => Protocol::Udp,
            OfSet::Sctp => Protocol::Sctp,
            OfSet::Other(_) => return None,
        };
        Some((Some(protocol), port))
    };
    let (address, port, source) = match *element {
        Element::Ip(address) => (Some(address), None, None),
        Element::Port(number) => (None, Some((None, number)), None),
        Element::IpPort(address, protocol, number) => (Some(address), Some(port(protocol, number)?), None),
        Element::IpPortIp(address, protocol, number, source) => {
            (Some(address), Some(port(protocol, number)?), Some(source.into()))
        }
        Element::IpPortNet(address, protocol, number, source, length) => {
            (Some(address), Some(port(protocol, number)?), Some(IpNet::new(source, length).ok()?))
        }
        // No set of mode IPVS has this type.
        Element::Net(..) => return None,
    };
    Some(Member { address, port, source })
}
