//! Removing what the backend made, and nothing else.

use headgate_core::{
    Family,
    ipvs::{Existing, IpvsConfig, Ledger},
};
use ipnet::IpNet;

use super::{
    super::{BackendError, ErrorKind},
    kernel::{self, Kernel, of_routing},
    read::{self, OfOtherSize},
    write,
};

/// Removes our virtual servers, sets and device. Rules that refer to the sets have to be gone. Makes the kernel load nothing: what it has not
/// loaded holds nothing of ours.
///
/// # Errors
/// Names what is left.
pub(in crate::backend) fn remove_all(exclude_cidrs: &[IpNet]) -> Result<(), BackendError> {
    let mut kernel = Kernel::default();
    let device = kernel.existing_device()?;
    let mut result = Ok(());
    for family in Family::BOTH {
        let removed = remove(&mut kernel, device, family, exclude_cidrs).map_err(|error| error.of(family));
        result = BackendError::join(result, removed);
    }
    if let Some(device) = device {
        let removed = kernel.routing().and_then(|routing| routing.remove_link(device).map_err(of_routing));
        result = BackendError::join(result, removed);
    }
    result
}

fn remove(
    kernel: &mut Kernel,
    device: Option<u32>,
    family: Family,
    exclude_cidrs: &[IpNet],
) -> Result<(), BackendError> {
    let mut existing = Existing::default();
    if let Some(device) = device {
        read::read_device(kernel.routing()?, device, family, &mut existing)?;
    }
    if kernel::has_sets() {
        read::read_sets(kernel.sets()?, family, OfOtherSize::Take, &mut existing)?;
    }
    if kernel::has_ipvs() {
        read::read_servers(kernel.ipvs()?, family, &mut existing)?;
    }
    let config = IpvsConfig { exclude_cidrs: exclude_cidrs.to_vec(), ..IpvsConfig::new(family) };
    let plan = Ledger::cleanup(&config, &existing);
    let refused = write::run(kernel, device.unwrap_or_default(), family, &plan.after)?;
    if refused.is_empty() {
        return Ok(());
    }
    let reasons: Vec<String> = refused.into_iter().map(|refused| refused.reason).collect();
    Err(BackendError::new(ErrorKind::Fatal, reasons.join("; ")))
}
