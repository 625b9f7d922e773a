//! What the kernel has, as the ledger compares it with what is wanted.

use std::{collections::BTreeSet, net::IpAddr};

use headgate_core::{
    Family,
    iptables::ExistingTables,
    ipvs::{Existing, Set, existing::ExistingServer},
};
use headgate_netlink::route::{Change as RouteChange, Prefix, Routing};
use ipset_netlink::{Change, Entry, IpSets, Specification};
use ipvs_netlink::Ipvs;

use super::{
    super::{DataplaneError, ErrorKind},
    convert,
    kernel::{Kernel, of_ipvs, of_routing, of_sets},
};

/// Everything of one family, at the cost of what there is. Sets of other sizes than ours are made
/// anew with what is in them.
pub(super) fn existing(
    kernel: &mut Kernel,
    device: u32,
    family: Family,
    tables: ExistingTables,
) -> Result<Existing, DataplaneError> {
    let mut existing = Existing { tables, ..Existing::default() };
    read_device(kernel.routing()?, device, family, OfNetworks::Remove, &mut existing)?;
    read_sets(kernel.sets()?, family, OfOtherSize::MakeAnew, &mut existing)?;
    read_servers(kernel.ipvs()?, family, &mut existing)?;
    Ok(existing)
}

/// What becomes of addresses of networks, such as 10.96.0.1/16, on our device. None of ours are:
/// the kernel takes such an address for another than that of the host alone, and the whole network
/// for one behind the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OfNetworks {
    /// They are removed.
    Remove,
    /// They stay.
    Leave,
}

/// Addresses of our device.
pub(super) fn read_device(
    routing: &mut Routing,
    device: u32,
    family: Family,
    of_networks: OfNetworks,
    existing: &mut Existing,
) -> Result<(), DataplaneError> {
    let addresses = routing.addresses(device).map_err(of_routing)?;
    let of_family = addresses.into_iter().filter(|prefix| Family::of(prefix.address) == family);
    let (hosts, networks): (Vec<Prefix>, Vec<Prefix>) =
        of_family.partition(|prefix| *prefix == convert::host(prefix.address));
    existing.device_addresses = hosts.into_iter().map(|prefix| prefix.address).collect();
    if of_networks == OfNetworks::Remove {
        let networks = networks.into_iter().filter(|prefix| !is_link_local(prefix.address));
        let removals: Vec<_> = networks.map(|address| RouteChange::RemoveAddress { link: device, address }).collect();
        // What is rejected is gone already, or is looked at again.
        routing.change(&removals, |_, _| {}).map_err(of_routing)?;
    }
    Ok(())
}

/// The kernel gives every device a network of IPv6 by itself.
fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

/// What becomes of sets that are not of our sizes, such as kube-proxy's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OfOtherSize {
    /// They are made anew with what is in them.
    MakeAnew,
    /// They are as good as others.
    Take,
}

/// Sets of our names, with their elements.
pub(super) fn read_sets(
    sets: &mut IpSets,
    family: Family,
    of_other_size: OfOtherSize,
    existing: &mut Existing,
) -> Result<(), DataplaneError> {
    for set in Set::ALL {
        let wanted = convert::specification(set, family);
        let Some(found) = sets.set(&wanted.name).map_err(of_sets)? else { continue };
        if !found.header.fits(&wanted) && of_other_size == OfOtherSize::MakeAnew {
            if found.header.is_of_type(&wanted) {
                // A draft has no comments.
                let bare = |entry: &Entry| Entry::new(entry.element);
                let matching = found.entries.iter().filter(|entry| !entry.nomatch);
                let changes = matching.map(|entry| Change::add(&wanted.name, bare(entry)));
                replace(sets, &wanted, changes.collect())?;
            } else if found.header.references == 0 {
                sets.destroy(&wanted.name).map_err(of_sets)?;
                continue;
            } else {
                let family = |family: Option<_>| family.map(|family| format!(" family {family}")).unwrap_or_default();
                let message = format!(
                    "the set {name} is of type {}{}, and has to be {}{}, but rules refer to it (iptables-save | grep {name}): remove them, or run this program with --cleanup",
                    found.header.type_name,
                    family(found.header.family),
                    wanted.set_type,
                    family(found.header.family.map(|_| wanted.family)),
                    name = wanted.name,
                );
                return Err(DataplaneError::new(ErrorKind::Fatal, message));
            }
        }
        // What we never put there has no place there either, whatever made it.
        let mut elements = BTreeSet::new();
        let mut foreign = Vec::new();
        for entry in &found.entries {
            match convert::known_element(&entry.element) {
                Some(element) if !entry.nomatch => drop(elements.insert(element)),
                _ => foreign.push(Change::delete(&wanted.name, entry.element)),
            }
        }
        if of_other_size == OfOtherSize::MakeAnew {
            sets.execute(&foreign).map_err(of_sets)?;
        }
        existing.sets.insert(set, elements);
    }
    Ok(())
}

/// The set that takes another's place.
pub(super) const DRAFT: &str = "KUBE-DRAFT";

/// Destroys a set that need not be there.
pub(super) fn destroy_if_there(sets: &mut IpSets, name: &str) -> Result<(), DataplaneError> {
    match sets.destroy(name) {
        Err(error) if error.refusal_code() == Some(libc::ENOENT) => Ok(()),
        result => result.map_err(of_sets),
    }
}

/// Makes a set anew with these elements. Rules that refer to it never see less than what is in it.
fn replace(sets: &mut IpSets, wanted: &Specification, mut changes: Vec<Change>) -> Result<(), DataplaneError> {
    let draft = Specification { name: DRAFT.to_owned(), ..wanted.clone() };
    // A draft that is there is from an agent that was killed in between.
    destroy_if_there(sets, DRAFT)?;
    sets.create(&draft).map_err(of_sets)?;
    for change in &mut changes {
        if let Change::Add(set, _) = change {
            set.clone_from(&draft.name);
        }
    }
    if let Some(refused) = sets.execute(&changes).map_err(of_sets)?.first() {
        let message = changes[refused.index].explain(&refused.refusal);
        return Err(DataplaneError::new(ErrorKind::NeedsFullSync, message));
    }
    sets.swap(&wanted.name, &draft.name).map_err(of_sets)?;
    sets.destroy(&draft.name).map_err(of_sets)
}

/// All virtual servers by address, with their destinations.
pub(super) fn read_servers(ipvs: &mut Ipvs, family: Family, existing: &mut Existing) -> Result<(), DataplaneError> {
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
