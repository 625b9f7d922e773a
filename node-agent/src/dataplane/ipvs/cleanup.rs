//! Removes the kernel objects that the dataplane created.

use std::{collections::BTreeSet, net::SocketAddr};

use headgate_core::{
    Family, Protocol,
    ipvs::{ExistingObjects, IpvsConfig, IpvsLedger, PROBE_DEVICE, ServerKey, Set},
};
use ipnet::IpNet;

use super::{
    super::{
        DataplaneError, ErrorKind,
        ip_sets::{destroy_if_there, has_sets},
    },
    convert,
    kernel::{self, IpvsKernel, of_ipvs, of_routing},
    read::{self, MismatchedSets, NetworkAddresses},
    write,
};

/// Removes our virtual servers, sets and device, after the caller has removed the rules that refer
/// to them. Loads no module. If `leaves_busy` is true, leaves TCP destinations with connections and
/// what they need, and returns the number of these connections. Errors: something could not be
/// removed; the message names it.
pub(crate) fn remove_all(exclude_cidrs: &[IpNet], leaves_busy: bool) -> Result<u64, DataplaneError> {
    let mut kernel = IpvsKernel::default();
    let device = kernel.existing_device()?;
    let (mut result, mut connections) = (Ok(()), 0);
    for family in Family::BOTH {
        let removed = remove(&mut kernel, device, family, exclude_cidrs, leaves_busy);
        if removed.is_err() {
            // The old socket may still deliver messages of an interrupted dump.
            kernel = IpvsKernel::default();
        }
        let removed = removed.map(|left| connections += left).map_err(|error| error.of(family));
        result = DataplaneError::join(result, removed);
    }
    if let Some(device) = device {
        let removed = match connections {
            0 => kernel.routing().and_then(|routing| routing.remove_link(device).map_err(of_routing)),
            _ => kernel.deprecate_addresses(device),
        };
        result = DataplaneError::join(result, removed);
    }
    // An agent that was killed while it used the temporary device leaves this device behind.
    let probe = kernel.routing().and_then(|routing| routing.link(PROBE_DEVICE).map_err(of_routing));
    let removed = probe.and_then(|link| match link {
        Some(link) => kernel.routing().and_then(|routing| routing.remove_link(link.index).map_err(of_routing)),
        None => Ok(()),
    });
    DataplaneError::join(result, removed).map(|()| connections)
}

/// Removes our sets that kube-proxy does not have. The caller must first remove the rules that
/// refer to the sets. Errors: a set could not be removed; the message names it.
pub(crate) fn remove_sets_beside_kube_proxys() -> Result<(), DataplaneError> {
    if !has_sets() {
        return Ok(());
    }
    let mut kernel = IpvsKernel::default();
    destroy_if_there(kernel.sets()?, read::DRAFT)?;
    for (family, set) in Family::BOTH.into_iter().flat_map(|family| Set::NOT_OF_KUBE_PROXY.map(|set| (family, set))) {
        destroy_if_there(kernel.sets()?, &set.name(family)).map_err(|error| error.of(family))?;
    }
    Ok(())
}

fn remove(
    kernel: &mut IpvsKernel,
    device: Option<u32>,
    family: Family,
    exclude_cidrs: &[IpNet],
    leaves_busy: bool,
) -> Result<u64, DataplaneError> {
    let mut existing = ExistingObjects::default();
    if let Some(device) = device {
        read::read_device(kernel.routing()?, device, family, NetworkAddresses::Keep, &mut existing)?;
    }
    if has_sets() {
        destroy_if_there(kernel.sets()?, read::DRAFT)?;
        read::read_sets(kernel.sets()?, family, MismatchedSets::Accept, &mut existing)?;
    }
    if kernel::has_ipvs() {
        read::read_servers(kernel.ipvs()?, family, &mut existing)?;
    }
    let config = IpvsConfig { exclude_cidrs: exclude_cidrs.to_vec(), ..IpvsConfig::new(family) };
    let (busy, connections) = if leaves_busy { busy(kernel, &config, &existing)? } else { (BTreeSet::new(), 0) };
    let plan = IpvsLedger::cleanup(&config, &existing, &busy);
    let mut outcome = write::StepsOutcome::default();
    write::run(kernel, device.unwrap_or_default(), family, &plan.after, &mut outcome)?;
    if outcome.rejected.is_empty() {
        return Ok(connections);
    }
    let reasons: Vec<String> = outcome.rejected.into_iter().map(|rejected| rejected.reason).collect();
    Err(DataplaneError::new(ErrorKind::Fatal, reasons.join("; ")))
}

/// The destinations of our TCP servers that have connections, and the number of these connections.
fn busy(
    kernel: &mut IpvsKernel,
    config: &IpvsConfig,
    existing: &ExistingObjects,
) -> Result<(BTreeSet<(ServerKey, SocketAddr)>, u64), DataplaneError> {
    let (mut busy, mut connections) = (BTreeSet::new(), 0);
    let is_ours = |key: &&ServerKey| key.protocol == Protocol::Tcp && existing.mark(key, config).is_some();
    for key in existing.servers.keys().filter(is_ours) {
        for entry in kernel.ipvs()?.destinations(convert::service_id(*key)).map_err(of_ipvs)? {
            let count = u64::from(entry.active_connections) + u64::from(entry.inactive_connections);
            if count > 0 {
                connections += count;
                busy.insert((*key, entry.destination.address));
            }
        }
    }
    Ok((busy, connections))
}
