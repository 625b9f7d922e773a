//! The gate of mode userspace with rules of iptables: an IP set that contains all addresses while
//! the gate is closed. The elements expire, so the kernel opens the gate if nobody renews them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use headgate_core::{
    Family, Protocol,
    iptables::{RulesLedger, names::gate_set},
};
use ipset_netlink::{Change, Element, IpSets, SetType, Specification};

use super::{
    super::{
        DataplaneError, ErrorKind, Leftover,
        dual_stack::has_ipv6,
        ip_sets::{destroy_if_there, family_of_sets, has_sets, of_sets},
        iptables::Variant,
        xtables::programs::Programs,
    },
    gate::ProxyGate,
};

/// The shortest timeout of an element that the kernel offers.
const TIMEOUT_SECONDS: u32 = 1;
/// The smallest number of buckets of a set, and enough room for its elements.
const SIZE: u32 = 64;

fn specification(family: Family) -> Specification {
    Specification::new(gate_set(family), SetType::HashNet, family_of_sets(family))
        .with_sizes(SIZE, SIZE)
        .expiring_after(TIMEOUT_SECONDS)
}

/// The elements of the closed gate. A set cannot contain the network of all addresses, so the set
/// contains both halves of this network.
fn elements(family: Family) -> [Element; 2] {
    let halves: [IpAddr; 2] = match family {
        Family::V4 => [Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(128, 0, 0, 0).into()],
        Family::V6 => [Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x8000, 0, 0, 0, 0, 0, 0, 0).into()],
    };
    halves.map(|half| Element::Net(half, 1))
}

/// Creates the gate of a family, which is open, unless it exists.
pub(super) fn create(family: Family) -> Result<(), DataplaneError> {
    let (wanted, mut sets) = (specification(family), IpSets::open().map_err(of_sets)?);
    match sets.create(&wanted) {
        Err(error) if error.refusal_code() == Some(libc::EEXIST) => find(&mut sets, family).map(drop),
        result => result.map_err(of_sets),
    }
}

/// Returns how many rules refer to the gate of a family, if it exists.
/// Errors: [`ErrorKind::Unavailable`] if a set of another program has the name of the gate.
fn find(sets: &mut IpSets, family: Family) -> Result<Option<u32>, DataplaneError> {
    let wanted = specification(family);
    let Some(found) = sets.header(&wanted.name).map_err(of_sets)? else { return Ok(None) };
    if found.fits(&wanted) {
        return Ok(Some(found.references));
    }
    let message = format!(
        "the set {name} has another type or other options than the gate of mode userspace: remove the set (ipset destroy {name})",
        name = wanted.name
    );
    Err(DataplaneError::new(ErrorKind::Unavailable, message).of(family))
}

/// Checks that this machine has what the gate needs in these families. Tries a rule in a chain that
/// receives no packets, unless rules of an earlier run match the gate.
/// Errors: [`ErrorKind::Unavailable`] if something is missing. The message names it.
pub(super) fn require(families: &[Family], variant: Variant) -> Result<(), DataplaneError> {
    for family in families.iter().copied().filter(|family| *family == Family::V4 || has_ipv6()) {
        let mut sets = IpSets::open().map_err(of_sets)?;
        let found = find(&mut sets, family)?;
        if found.is_some_and(|references| references > 0) {
            continue;
        }
        create(family)?;
        let tried = Programs::new(family, variant).try_out(&RulesLedger::trial_of_gate(family));
        if found.is_none() {
            destroy_if_there(&mut sets, gate_set(family))?;
        }
        if let Some(reason) = tried? {
            let message = format!(
                "iptables cannot match IP sets on this node: load the module xt_set (modprobe xt_set): {reason}"
            );
            return Err(DataplaneError::new(ErrorKind::Unavailable, message).of(family));
        }
    }
    Ok(())
}

/// The gates of both families, as a leftover, with the chains that match them.
pub(crate) fn gates() -> Leftover {
    Leftover::new("gate of userspace", || {
        if !has_sets() {
            return Ok(());
        }
        DataplaneError::join_all(Family::BOTH.map(|family| remove(family).map_err(|error| error.of(family))))
    })
}

fn remove(family: Family) -> Result<(), DataplaneError> {
    let (name, mut sets) = (gate_set(family), IpSets::open().map_err(of_sets)?);
    match find(&mut sets, family) {
        // A set of another program is nothing that Headgate left.
        Ok(None) => return Ok(()),
        Err(error) if error.kind == ErrorKind::Unavailable => return Ok(()),
        found => drop(found?),
    }
    // A kube-proxy removes the jumps to these chains when it replaces the chains of Services, and
    // not the chains. Until then they stay without rules, and the set, so that the next attempt
    // looks again.
    let programs = [Variant::Legacy, Variant::Nft].map(|variant| Programs::new(family, variant));
    let delete = |programs: &Programs| programs.delete(&RulesLedger::cleanup_of_gates(&programs.existing_tables()?));
    DataplaneError::join_all(programs.iter().filter(|programs| programs.are_installed()).map(delete))?;
    destroy_if_there(&mut sets, name)
}

/// A connection that changes only the gate. The connection belongs to one network namespace.
#[derive(Debug)]
pub(super) struct SetGate(IpSets);

impl SetGate {
    /// Connects in the network namespace of the calling thread.
    pub(super) fn connect() -> Result<Box<dyn ProxyGate>, String> {
        let sets = IpSets::open().map_err(|error| error.to_string())?;
        Ok(Box::new(Self(sets)))
    }

    fn execute(&mut self, family: Family, change: impl Fn(&'static str, Element) -> Change) -> Result<(), String> {
        let changes = elements(family).map(|element| change(gate_set(family), element));
        let refused = self.0.execute(&changes).map_err(|error| error.to_string())?;
        match refused.first() {
            Some(refused) => Err(changes[refused.index].explain(&refused.refusal)),
            None => Ok(()),
        }
    }
}

impl ProxyGate for SetGate {
    fn protocols(&self) -> &'static [Protocol] {
        &[Protocol::Tcp]
    }

    /// Adding an element that exists renews its timeout.
    fn close(&mut self, family: Family, protocols: &[Protocol]) -> Result<(), String> {
        if protocols.is_empty() { Ok(()) } else { self.execute(family, Change::add) }
    }

    fn open(&mut self, family: Family) -> Result<(), String> {
        self.execute(family, Change::delete)
    }
}
