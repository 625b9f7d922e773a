//! Removes the kernel objects that the dataplane created.

use headgate_core::{
    Family,
    ipvs::{Existing, IpvsConfig, Ledger, PROBE_DEVICE},
};
use ipnet::IpNet;

use super::{
    super::{DataplaneError, ErrorKind},
    kernel::{self, Kernel, of_routing},
    read::{self, MismatchedSets, NetworkAddresses},
    write,
};

/// Removes our virtual servers, sets and device. The caller must first remove the rules that refer
/// to the sets. Does not make the kernel load modules: a module that is not loaded holds no
/// objects.
///
/// # Errors
/// Something could not be removed; the message names it.
pub(crate) fn remove_all(exclude_cidrs: &[IpNet]) -> Result<(), DataplaneError> {
    let mut kernel = Kernel::default();
    let device = kernel.existing_device()?;
    let mut result = Ok(());
    for family in Family::BOTH {
        let removed = remove(&mut kernel, device, family, exclude_cidrs).map_err(|error| error.of(family));
        if removed.is_err() {
            // The old socket may still deliver messages of an interrupted dump.
            kernel = Kernel::default();
        }
        result = DataplaneError::join(result, removed);
    }
    if let Some(device) = device {
        let removed = kernel.routing().and_then(|routing| routing.remove_link(device).map_err(of_routing));
        result = DataplaneError::join(result, removed);
    }
    // An agent that was killed while it used the temporary device leaves this device behind.
    let probe = kernel.routing().and_then(|routing| routing.link(PROBE_DEVICE).map_err(of_routing));
    let removed = probe.and_then(|link| match link {
        Some(link) => kernel.routing().and_then(|routing| routing.remove_link(link.index).map_err(of_routing)),
        None => Ok(()),
    });
    DataplaneError::join(result, removed)
}

fn remove(
    kernel: &mut Kernel,
    device: Option<u32>,
    family: Family,
    exclude_cidrs: &[IpNet],
) -> Result<(), DataplaneError> {
    let mut existing = Existing::default();
    if let Some(device) = device {
        read::read_device(kernel.routing()?, device, family, NetworkAddresses::Keep, &mut existing)?;
    }
    if kernel::has_sets() {
        read::destroy_if_there(kernel.sets()?, read::DRAFT)?;
        read::read_sets(kernel.sets()?, family, MismatchedSets::Accept, &mut existing)?;
    }
    if kernel::has_ipvs() {
        read::read_servers(kernel.ipvs()?, family, &mut existing)?;
    }
    let config = IpvsConfig { exclude_cidrs: exclude_cidrs.to_vec(), ..IpvsConfig::new(family) };
    let plan = Ledger::cleanup(&config, &existing);
    let mut outcome = write::Outcome::default();
    write::run(kernel, device.unwrap_or_default(), family, &plan.after, &mut outcome)?;
    if outcome.rejected.is_empty() {
        return Ok(());
    }
    let reasons: Vec<String> = outcome.rejected.into_iter().map(|rejected| rejected.reason).collect();
    Err(DataplaneError::new(ErrorKind::Fatal, reasons.join("; ")))
}
