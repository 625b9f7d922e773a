//! Executes the steps of a plan. Successive steps for the same part of the kernel go together.

use std::{collections::BTreeSet, net::IpAddr};

use headgate_core::{
    Family,
    ipvs::{DEVICE, Op, Scheduler, ServerKey, SetKind},
};
use headgate_netlink::route::{Change as RouteChange, Prefix};
use ipset_netlink::{Change as SetChange, HASH_FULL, IpSetError};
use ipvs_netlink::{Command, Refusal};

use super::{
    super::{DataplaneError, ErrorKind, ip_sets::of_sets},
    convert,
    kernel::{IpvsKernel, of_ipvs, of_routing},
    read,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RejectedOp {
    pub(super) op: Op,
    /// The reason, including the object.
    pub(super) reason: String,
    /// The scheduler that the kernel lacks. `None` if the step failed for another reason.
    pub(super) missing_scheduler: Option<Scheduler>,
}

#[derive(Debug, Default)]
pub(super) struct StepsOutcome {
    /// The steps that the kernel rejected. The kernel executed all other steps.
    pub(super) rejected: Vec<RejectedOp>,
    /// The virtual servers that do not exist although a step needed them.
    pub(super) absent: BTreeSet<ServerKey>,
}

/// The part of the kernel that executes a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KernelPart {
    Set,
    Elements,
    Addresses,
    Servers,
}

fn part(op: &Op) -> KernelPart {
    match op {
        Op::CreateSet(_) | Op::DestroySet(_) => KernelPart::Set,
        Op::AddElement(..) | Op::DeleteElement(..) => KernelPart::Elements,
        Op::AddAddress(_) | Op::DeleteAddress(_) => KernelPart::Addresses,
        Op::AddServer(..)
        | Op::EditServer(..)
        | Op::DeleteServer(_)
        | Op::AddDestination(..)
        | Op::EditDestination(..)
        | Op::DeleteDestination(..) => KernelPart::Servers,
    }
}

/// Executes steps in order and adds their results to `outcome`. A step counts as executed if
/// somebody else has already made the change.
/// Errors: the kernel cannot be reached or lacks a set type. If a set or the device does not exist,
/// only a full sync helps. After an error, it is unknown which steps were executed.
pub(super) fn run(
    kernel: &mut IpvsKernel,
    device: u32,
    family: Family,
    ops: &[Op],
    outcome: &mut StepsOutcome,
) -> Result<(), DataplaneError> {
    for ops in ops.chunk_by(|one, next| part(one) == part(next)) {
        match ops.first().map(part) {
            Some(KernelPart::Set) => ops.iter().try_for_each(|op| set(kernel, family, *op, &mut outcome.rejected))?,
            Some(KernelPart::Elements) => elements(kernel, family, ops, &mut outcome.rejected)?,
            Some(KernelPart::Addresses) => addresses(kernel, device, ops, &mut outcome.rejected)?,
            Some(KernelPart::Servers) => servers(kernel, ops, outcome)?,
            None => {}
        }
    }
    Ok(())
}

fn set(kernel: &mut IpvsKernel, family: Family, op: Op, rejected: &mut Vec<RejectedOp>) -> Result<(), DataplaneError> {
    let sets = kernel.sets()?;
    let result = match op {
        Op::CreateSet(set) => sets.create(&convert::specification(set, family, 0)),
        Op::DestroySet(set) => sets.destroy(&set.name(family)),
        _ => Ok(()),
    };
    match result {
        Err(IpSetError::Refused { .. }) if matches!(op, Op::DestroySet(_)) => {
            let reason = result.err().map(|error| error.to_string()).unwrap_or_default();
            rejected.push(RejectedOp { op, reason, missing_scheduler: None });
            Ok(())
        }
        result => result.map_err(of_sets),
    }
}

fn elements(
    kernel: &mut IpvsKernel,
    family: Family,
    ops: &[Op],
    rejected: &mut Vec<RejectedOp>,
) -> Result<(), DataplaneError> {
    let change = |op: &Op| match *op {
        Op::AddElement(set, element) => Some(SetChange::add(set.name(family), convert::element(element))),
        Op::DeleteElement(set, element) => Some(SetChange::delete(set.name(family), convert::element(element))),
        _ => None,
    };
    let changes: Vec<SetChange> = ops.iter().filter_map(change).collect();
    let (mut refused_as_full, mut full) = (Vec::new(), BTreeSet::new());
    for refusal in kernel.sets()?.execute(&changes).map_err(of_sets)? {
        let (op, change) = (ops[refusal.index], &changes[refusal.index]);
        if refusal.refusal.code == libc::ENOENT {
            return Err(DataplaneError::new(ErrorKind::NeedsFullSync, change.explain(&refusal.refusal)));
        }
        match op {
            Op::AddElement(set, _) if set.kind() != SetKind::Port && refusal.refusal.code == HASH_FULL => {
                full.insert(set);
                refused_as_full.push(op);
            }
            _ => rejected.push(RejectedOp { op, reason: change.explain(&refusal.refusal), missing_scheduler: None }),
        }
    }
    let mut has_grown = false;
    for set in full {
        has_grown |= read::grow(kernel.sets()?, set, family)?;
    }
    if has_grown {
        return elements(kernel, family, &refused_as_full, rejected);
    }
    let full = Refusal::of_code(HASH_FULL);
    let reason = |op| change(op).map(|change| change.explain(&full)).unwrap_or_default();
    let still_full =
        refused_as_full.iter().map(|op| RejectedOp { op: *op, reason: reason(op), missing_scheduler: None });
    rejected.extend(still_full);
    Ok(())
}

fn addresses(
    kernel: &mut IpvsKernel,
    device: u32,
    ops: &[Op],
    rejected: &mut Vec<RejectedOp>,
) -> Result<(), DataplaneError> {
    let change = |op: &Op| match *op {
        Op::AddAddress(address) => Some(RouteChange::AddAddress { link: device, address: Prefix::host(address) }),
        Op::DeleteAddress(address) => Some(RouteChange::RemoveAddress { link: device, address: Prefix::host(address) }),
        _ => None,
    };
    let changes: Vec<RouteChange> = ops.iter().filter_map(change).collect();
    let mut refusals = Vec::new();
    kernel.routing()?.change(&changes, |index, refusal| refusals.push((index, refusal))).map_err(of_routing)?;
    for (index, refusal) in refusals {
        let (op, code) = (ops[index], refusal.code);
        let (what, is_done) = match op {
            Op::AddAddress(address) => (format!("address {address}"), code == libc::EEXIST),
            Op::DeleteAddress(address) => (format!("removing address {address}"), code == libc::EADDRNOTAVAIL),
            _ => continue,
        };
        if is_done {
            continue;
        }
        let remedy = match op {
            Op::AddAddress(IpAddr::V6(_)) if code == libc::EACCES => {
                format!(" (IPv6 is off on it: sysctl -w net.ipv6.conf.{DEVICE}.disable_ipv6=0)")
            }
            _ => String::new(),
        };
        let reason = format!("{what} on device {DEVICE}: {refusal}{remedy}");
        if code == libc::ENODEV {
            return Err(DataplaneError::new(ErrorKind::NeedsFullSync, reason));
        }
        rejected.push(RejectedOp { op, reason, missing_scheduler: None });
    }
    Ok(())
}

fn command(op: &Op) -> Option<Command> {
    Some(match *op {
        Op::AddServer(key, settings) => Command::AddService(convert::service(key, settings)),
        Op::EditServer(key, settings) => Command::SetService(convert::service(key, settings)),
        Op::DeleteServer(key) => Command::RemoveService(convert::service_id(key)),
        Op::AddDestination(key, address, weight) => {
            Command::AddDestination(convert::service_id(key), convert::destination(address, weight))
        }
        Op::EditDestination(key, address, weight) => {
            Command::SetDestination(convert::service_id(key), convert::destination(address, weight))
        }
        Op::DeleteDestination(key, address) => Command::RemoveDestination(convert::service_id(key), address),
        _ => return None,
    })
}

fn servers(kernel: &mut IpvsKernel, ops: &[Op], outcome: &mut StepsOutcome) -> Result<(), DataplaneError> {
    let commands: Vec<Command> = ops.iter().filter_map(command).collect();
    let refusals = kernel.ipvs()?.execute(&commands).map_err(of_ipvs)?;
    let StepsOutcome { rejected, absent } = outcome;
    let mut replacements = Vec::new();
    for refusal in refusals {
        let (op, command) = (ops[refusal.index], &commands[refusal.index]);
        absent.extend(absent_server(&op, refusal.refusal.code));
        match reaction(command, &refusal.refusal) {
            Reaction::Done => {}
            Reaction::Replace(command) => replacements.push((op, command)),
            Reaction::Reject => rejected.push(rejected_op(op, command, &refusal.refusal)),
        }
    }
    if replacements.is_empty() {
        return Ok(());
    }
    let (ops, commands): (Vec<Op>, Vec<Command>) = replacements.into_iter().unzip();
    for refusal in kernel.ipvs()?.execute(&commands).map_err(of_ipvs)? {
        rejected.push(rejected_op(ops[refusal.index], &commands[refusal.index], &refusal.refusal));
    }
    Ok(())
}

fn rejected_op(op: Op, command: &Command, refusal: &Refusal) -> RejectedOp {
    let missing_scheduler = match op {
        Op::AddServer(_, settings) | Op::EditServer(_, settings) if refusal.code == libc::ENOENT => {
            Some(settings.scheduler)
        }
        _ => None,
    };
    RejectedOp { op, reason: command.explain(refusal), missing_scheduler }
}

/// The virtual server that a step needs, if the kernel rejects the step for lack of it.
fn absent_server(op: &Op, code: i32) -> Option<ServerKey> {
    match *op {
        Op::EditServer(key, _) | Op::AddDestination(key, ..) | Op::EditDestination(key, _, 1..)
            if code == libc::ESRCH =>
        {
            Some(key)
        }
        _ => None,
    }
}

/// How to react when the kernel refuses a command.
#[derive(Debug, PartialEq)]
enum Reaction {
    /// Do nothing: the kernel already is in the wanted state.
    Done,
    /// Send this command, which brings the kernel to the wanted state.
    Replace(Command),
    /// Report the step as rejected.
    Reject,
}

fn reaction(command: &Command, refusal: &Refusal) -> Reaction {
    match (command, refusal.code) {
        (Command::AddService(service), libc::EEXIST) => Reaction::Replace(Command::SetService(service.clone())),
        (Command::AddDestination(id, destination), libc::EEXIST) => {
            Reaction::Replace(Command::SetDestination(*id, *destination))
        }
        (Command::SetDestination(id, destination), libc::ENOENT) if destination.weight > 0 => {
            Reaction::Replace(Command::AddDestination(*id, *destination))
        }
        (Command::SetService(service), libc::ESRCH) => Reaction::Replace(Command::AddService(service.clone())),
        // A draining destination (weight 0) that does not exist has no connections to keep.
        (Command::SetDestination(..) | Command::RemoveDestination(..), libc::ENOENT)
        | (Command::RemoveService(_) | Command::RemoveDestination(..), libc::ESRCH) => Reaction::Done,
        (Command::SetDestination(_, destination), libc::ESRCH) if destination.weight == 0 => Reaction::Done,
        _ => Reaction::Reject,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use headgate_core::{Protocol, ipvs::ServerKey};

    use super::*;

    #[test]
    fn changes_that_somebody_else_made_count_as_executed_and_other_refusals_are_reported() {
        let key = ServerKey { address: "10.96.0.1".parse().unwrap(), protocol: Protocol::Tcp, port: 80 };
        let address = "10.0.0.1:8080".parse().unwrap();
        let react = |op: Op, code| reaction(&command(&op).unwrap(), &Refusal::of_code(code));
        assert_eq!(react(Op::DeleteServer(key), libc::ESRCH), Reaction::Done);
        assert_eq!(react(Op::DeleteDestination(key, address), libc::ENOENT), Reaction::Done);
        assert_eq!(react(Op::EditDestination(key, address, 0), libc::ENOENT), Reaction::Done);
        let add = command(&Op::AddDestination(key, address, 3)).unwrap();
        assert_eq!(react(Op::EditDestination(key, address, 3), libc::ENOENT), Reaction::Replace(add.clone()));
        let edit = command(&Op::EditDestination(key, address, 3)).unwrap();
        assert_eq!(react(Op::AddDestination(key, address, 3), libc::EEXIST), Reaction::Replace(edit));
        for weight in [0, 3] {
            assert_eq!(react(Op::AddDestination(key, address, weight.max(1)), libc::ESRCH), Reaction::Reject);
            let expected = if weight == 0 { Reaction::Done } else { Reaction::Reject };
            assert_eq!(react(Op::EditDestination(key, address, weight), libc::ESRCH), expected);
        }
        let settings = headgate_core::ipvs::Settings::new(Scheduler::MaglevHashing);
        let op = Op::AddServer(key, settings);
        let add = command(&op).unwrap();
        assert_eq!(react(Op::EditServer(key, settings), libc::ESRCH), Reaction::Replace(add));
        for adding in [op, Op::AddDestination(key, address, 0), Op::EditDestination(key, address, 3)] {
            let expected = Some(key).filter(|_| adding != op);
            assert_eq!(absent_server(&adding, libc::ESRCH), expected);
            assert_eq!(absent_server(&adding, libc::ENOENT), None);
        }
        assert_eq!(absent_server(&Op::EditServer(key, settings), libc::ESRCH), Some(key));
        for removing in [Op::EditDestination(key, address, 0), Op::DeleteServer(key)] {
            assert_eq!(absent_server(&removing, libc::ESRCH), None);
        }
        let rejected = rejected_op(op, &command(&op).unwrap(), &Refusal::of_code(libc::ENOENT));
        assert_eq!(rejected.missing_scheduler, Some(Scheduler::MaglevHashing));
        assert!(rejected.reason.contains("10.96.0.1:80") && rejected.reason.contains("ip_vs_"), "{}", rejected.reason);
    }
}
