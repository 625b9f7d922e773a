//! Decodes a table of nftables by executing its rules: a packet for each frontend (the keys of sets
//! and maps) from each origin, with every result of random numbers and hashes ([`interpreter`]). So
//! a missing rule and a changed or foreign element change the result. The cost grows with frontends
//! and elements, and is limited, because foreign rules may have any shape.

mod dump;
mod interpreter;
mod packet;

use std::collections::BTreeSet;

use headgate_core::{
    Protocol,
    explain::Mode,
    forwarding::{Admitted, Entry, Fate, NodePortsAt, Origin, Problem, Table},
    frontends::Frontend,
    view::LocalDetector,
};
use nftables_netlink::{ChainType, Hook};

pub use self::dump::{DumpedChain, DumpedSet, NftablesDump, Packed, pack};
use self::interpreter::Interpreter;
use crate::outcome::Lists;

/// The sets of frontends that do not go to the proxy of mode userspace.
const STRAIGHT: [&str; 2] = ["straight", "straight-node-ports"];

/// The maximum number of steps for each rule, expression and element of a dump.
const MAX_STEPS: u64 = 1000;

/// Decodes a table. `detector` is how rules recognise pods of the node. `gate` is the set whose
/// elements send connections to the proxy of mode userspace: the result is without them, and says
/// if rules that send TCP connections to the proxy are missing.
pub fn decode(dump: &NftablesDump, detector: Option<&LocalDetector>, gate: Option<&str>) -> Table {
    decode_within(dump, detector, gate, dump.size().saturating_mul(MAX_STEPS))
}

/// Decodes the table of kube-proxy in mode nftables. See [`decode`].
pub fn decode_kube_proxy(dump: &NftablesDump, detector: Option<&LocalDetector>) -> Table {
    Table { of_kube_proxy: Some(Mode::Nftables), ..decode(dump, detector, None) }
}

/// Like [`decode`], with a maximum number of steps. A step executes a rule or an expression, or
/// reads an element. Beyond the maximum, the result says that the decoder gave up.
pub fn decode_within(
    dump: &NftablesDump,
    detector: Option<&LocalDetector>,
    gate: Option<&str>,
    max_steps: u64,
) -> Table {
    let mut table = Table::new(dump.family());
    let nat = [Hook::Prerouting, Hook::Output].map(|hook| (ChainType::Nat, hook));
    let filter = [Hook::Input, Hook::Forward, Hook::Output].map(|hook| (ChainType::Filter, hook));
    for (kind, hook) in nat.into_iter().chain(filter) {
        if !dump.base_chains(hook).iter().any(|(_, base)| base.kind == kind) {
            table.problems.insert(Problem::Broken(format!(
                "the table {} has no rules of type {kind:?} at hook {hook:?}, so it serves no Service there",
                dump.name
            )));
        }
    }
    if !table.problems.is_empty() {
        return table;
    }
    let mut interpreter = Interpreter::new(dump, detector, None, max_steps);
    let frontends = dump.frontends(dump.sets.values());
    let mut lists = Lists::default();
    for frontend in &frontends {
        let mut entry = Entry::default();
        let mut admitted: Option<BTreeSet<_>> = None;
        for origin in Origin::ALL {
            let (fate, ranges) = interpreter.follow(*frontend, origin);
            entry.set(origin, fate);
            admitted = admitted.or(ranges);
        }
        if interpreter.is_exhausted() {
            return given_up(dump);
        }
        lists.share(&mut entry);
        entry.admitted = admitted.map_or(Admitted::All, Admitted::only);
        if entry != Entry::default() {
            table.entries.insert(*frontend, entry);
        }
    }
    // Without NodePorts, no packet reaches a rule for the addresses that answer them.
    let has_node_ports = frontends.iter().any(|frontend| matches!(frontend, Frontend::NodePort(..)));
    table.node_ports_at = match interpreter.node_ports_at {
        None if has_node_ports => NodePortsAt::Only(BTreeSet::new()),
        found => found.unwrap_or_default(),
    };
    if let Some(gate) = gate {
        let mut interpreter = Interpreter::new(dump, detector, Some(gate), max_steps);
        check_redirects(&mut interpreter, dump, &mut table);
        if interpreter.is_exhausted() {
            return given_up(dump);
        }
    }
    for chain in interpreter.unknown {
        table.problems.insert(Problem::NotUnderstood(format!(
            "cannot verify what chain {chain} of the table {} does: it contains something that Headgate does not know",
            dump.name
        )));
    }
    table
}

fn given_up(dump: &NftablesDump) -> Table {
    let name = &dump.name;
    let problem = Problem::GivenUp(format!(
        "cannot verify the table {name}: its rules branch too often to follow them. Look for rules of other programs in it (nft list table {name}), and remove them"
    ));
    Table { problems: [problem].into(), ..Table::new(dump.family()) }
}

/// Checks that connections go to one listener of the proxy while the gate is closed. The rules do
/// not depend on single Services, so one frontend of each kind is enough. Frontends in the sets
/// [`STRAIGHT`] do not go to the proxy.
fn check_redirects(interpreter: &mut Interpreter<'_>, dump: &NftablesDump, table: &mut Table) {
    let mut checked = BTreeSet::new();
    let straight = dump.frontends(STRAIGHT.iter().filter_map(|set| dump.sets.get(*set)));
    for (frontend, entry) in table.entries.iter().filter(|(frontend, _)| !straight.contains(frontend)) {
        let is_node_port = matches!(frontend, Frontend::NodePort(..));
        for origin in Origin::ALL {
            let is_forwarded = matches!(entry.fate(origin), Fate::Forwarded(_));
            let is_inside = entry.fate(origin) != entry.fate(Origin::Outside);
            if frontend.protocol() != Protocol::Tcp || !is_forwarded || !checked.insert((is_node_port, is_inside)) {
                continue;
            }
            let (fate, _) = interpreter.follow(*frontend, origin);
            let is_one = matches!(&fate, Fate::Forwarded(endpoints) if endpoints.len() == 1);
            if !is_one || fate == *entry.fate(origin) {
                table.problems.insert(Problem::Broken(format!(
                    "no rule of the table {} sends connections {origin} to the proxy, such as those to {frontend}",
                    dump.name
                )));
            }
        }
    }
}
