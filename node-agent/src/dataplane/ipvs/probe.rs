//! Tries every kernel feature that the dataplane needs, before the dataplane programs anything. The
//! trial makes the kernel load the modules, if it can.

use std::net::{IpAddr, Ipv4Addr};

use headgate_core::{
    Family, Protocol,
    ipvs::{PROBE_DEVICE, Scheduler, ServerKey, Set, Settings},
};
use ipset_netlink::IpSets;
use ipvs_netlink::{Command, Ipvs};

use super::{
    super::{DataplaneError, ErrorKind, ip_sets::of_sets},
    convert,
    kernel::{NO_DUMMY_DEVICES, of_ipvs, of_routing},
    sysctl::IpvsSysctls,
};

/// The address of the temporary virtual server that tests a scheduler. The address is reserved for
/// documentation (RFC 5737), so no service has it. kube-proxy uses the same address.
const PROBE_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 0));
/// The ports of the temporary virtual server. If a port is in use, the next port is tried.
const PROBE_PORTS: std::ops::Range<u16> = 20_000..20_008;

/// Checks that the kernel has everything for these families, leaves no objects, and then sets the
/// parameter without which IPVS cannot masquerade. Errors: [`ErrorKind::Unavailable`] if something
/// is missing. The message names everything, with the remedy.
pub(super) fn require(scheduler: Scheduler, families: &[Family]) -> Result<(), DataplaneError> {
    let mut missing = Vec::new();
    let mut note = |result: Result<(), DataplaneError>| missing.extend(result.err().map(|error| error.message));
    note(Ipvs::open().map_err(of_ipvs).and_then(|mut ipvs| require_scheduler(&mut ipvs, scheduler)));
    match IpSets::open() {
        Ok(mut sets) => set_types(families).into_iter().for_each(|(set_type, family)| {
            note(sets.revision(set_type, family).map(drop).map_err(of_sets));
        }),
        Err(error) => note(Err(of_sets(error))),
    }
    note(require_dummy_devices());
    if missing.is_empty() {
        // Set the parameter last, because a machine that cannot run IPVS must keep its parameters.
        let set = IpvsSysctls::default().set_conntrack();
        missing.extend(set.err());
    }
    if missing.is_empty() {
        return Ok(());
    }
    missing.dedup();
    Err(DataplaneError::new(ErrorKind::Unavailable, missing.join("; ")))
}

fn set_types(families: &[Family]) -> Vec<(ipset_netlink::SetType, ipset_netlink::Family)> {
    let specifications = families.iter().flat_map(|family| Set::ALL.map(|set| convert::specification(set, *family, 0)));
    let mut types: Vec<_> = specifications.map(|wanted| (wanted.set_type, wanted.family)).collect();
    types.sort_unstable();
    types.dedup();
    types
}

/// The error message for a scheduler that the kernel does not have.
pub(super) fn no_scheduler(scheduler: Scheduler) -> String {
    format!("this kernel has no scheduler {scheduler}: load the module ip_vs_{scheduler} (modprobe ip_vs_{scheduler})")
}

/// Creates a virtual server with the scheduler, and removes the server again. Succeeds without this
/// trial if all of [`PROBE_PORTS`] are in use. Errors: [`ErrorKind::Unavailable`] when the kernel
/// does not have the scheduler. The message says how to get it.
pub(super) fn require_scheduler(ipvs: &mut Ipvs, scheduler: Scheduler) -> Result<(), DataplaneError> {
    for port in PROBE_PORTS {
        let key = ServerKey { address: PROBE_ADDRESS, protocol: Protocol::Tcp, port };
        let settings = Settings::new(scheduler);
        let add = Command::AddService(convert::service(key, settings));
        match ipvs.execute([&add]).map_err(of_ipvs)?.first() {
            None => {
                let remove = Command::RemoveService(convert::service_id(key));
                ipvs.execute([&remove]).map_err(of_ipvs)?;
                return Ok(());
            }
            Some(refused) if refused.refusal.code == libc::EEXIST => {
                // An agent that was killed between adding and removing this server leaves a server
                // without destinations.
                let id = convert::service_id(key);
                if ipvs.destinations(id).map_err(of_ipvs)?.is_empty() {
                    ipvs.execute([&Command::RemoveService(id)]).map_err(of_ipvs)?;
                }
            }
            Some(refused) if refused.refusal.code == libc::ENOENT => {
                return Err(DataplaneError::new(ErrorKind::Unavailable, no_scheduler(scheduler)));
            }
            Some(refused) => {
                return Err(DataplaneError::new(ErrorKind::Unavailable, add.explain(&refused.refusal)));
            }
        }
    }
    Ok(())
}

/// Creates a temporary device and removes this device again. Does nothing if our device exists.
fn require_dummy_devices() -> Result<(), DataplaneError> {
    let mut routing = headgate_netlink::route::Routing::open().map_err(of_routing)?;
    let existing = routing.link(headgate_core::ipvs::DEVICE).map_err(of_routing)?;
    if existing.is_some() {
        return Ok(());
    }
    match routing.add_dummy(PROBE_DEVICE) {
        Ok(()) => {}
        Err(error) if error.refusal_code() == Some(libc::EEXIST) => {}
        Err(error) if error.refusal_code() == Some(libc::EOPNOTSUPP) => {
            return Err(DataplaneError::new(ErrorKind::Unavailable, NO_DUMMY_DEVICES));
        }
        Err(error) => return Err(of_routing(error)),
    }
    if let Some(link) = routing.link(PROBE_DEVICE).map_err(of_routing)? {
        routing.remove_link(link.index).map_err(of_routing)?;
    }
    Ok(())
}
