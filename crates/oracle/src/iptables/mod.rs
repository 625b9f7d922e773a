//! Decodes the output of `iptables-save` to a forwarding table. It reads the rules as the kernel
//! does, shares no code with the renderers, and knows only a few names of chains: those that the
//! base chains must lead to, and the chain of NodePorts.
//! [`Rules`] takes the output line by line, and keeps a chain that only chooses among endpoints as
//! a list of them, to save memory. [`Walk`] goes down from a base chain once for each origin and
//! collects conditions, so that the cost grows with the number of rules.

pub(super) mod evaluate;
pub(super) mod parse;
mod walk;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use headgate_core::{
    Family,
    explain::Mode,
    forwarding::{Admitted, Entry, Fate, Origin, Table},
    frontends::Frontend,
    iptables::{RulesTable, names},
    view::LocalDetector,
};

pub use self::parse::Rules;
use self::{
    evaluate::{Client, Sets, closed_gates},
    walk::Walk,
};
use crate::outcome::{Ending, Lists, Outcome};

pub(super) const SERVICES: &str = "KUBE-SERVICES";
/// The chain of external addresses and NodePorts without endpoints.
const EXTERNAL: &str = "KUBE-EXTERNAL-SERVICES";
/// The chain that drops the packets of clients outside of source ranges.
pub(super) const FIREWALL: &str = "KUBE-PROXY-FIREWALL";

/// The other chains of Headgate in filter.
const OTHERS: [&str; 4] = [names::LOCALNET_GUARD, names::GATE_INPUT, names::NODE_PORTS, names::FORWARD];

/// A base chain, and the chains to which it must lead.
type Needed<'a> = (RulesTable, &'a str, &'a [&'a str]);

/// The chains that each base chain must lead to. Each serves groups of Services.
const NEEDED: [Needed<'static>; 5] = [
    (RulesTable::Nat, "PREROUTING", &[SERVICES]),
    (RulesTable::Nat, "OUTPUT", &[SERVICES]),
    (RulesTable::Filter, "INPUT", &[FIREWALL, EXTERNAL]),
    (RulesTable::Filter, "FORWARD", &[FIREWALL, SERVICES, EXTERNAL]),
    (RulesTable::Filter, "OUTPUT", &[FIREWALL, SERVICES, EXTERNAL]),
];

/// Decodes the rules of kube-proxy in mode iptables. `detector` is how rules recognise pods.
pub fn decode_kube_proxy(rules: &Rules, family: Family, detector: Option<&LocalDetector>) -> Table {
    // kube-proxy has no rule for connections of the node itself to the chain EXTERNAL.
    let [one, two, three, four, (table, base, _)] = NEEDED;
    let needed = [one, two, three, four, (table, base, &[FIREWALL, SERVICES])];
    let table = decode_needing(&needed, rules, family, detector, &BTreeSet::new());
    Table { of_kube_proxy: Some(Mode::Iptables), ..table }
}

/// Decodes the rules of mode iptables. `detector` is how rules recognise pods of the node.
/// `listeners` are those of the proxy, in mode userspace.
pub fn decode(
    rules: &Rules,
    family: Family,
    detector: Option<&LocalDetector>,
    listeners: &BTreeSet<SocketAddr>,
) -> Table {
    decode_needing(&NEEDED, rules, family, detector, listeners)
}

fn decode_needing(
    needed: &[Needed<'_>],
    rules: &Rules,
    family: Family,
    detector: Option<&LocalDetector>,
    listeners: &BTreeSet<SocketAddr>,
) -> Table {
    let mut table = Table::new(family);
    rules.check_bases(needed, family, &mut table.problems);
    let translated = translations(rules, detector, None, &mut table);
    let to_proxy = (!listeners.is_empty()).then(|| translations(rules, detector, Some(&closed_gates), &mut table));
    let [input, forward, output] = ["INPUT", "FORWARD", "OUTPUT"].map(|base| {
        let client = Client { origin: Origin::Outside, detector, sets: None };
        let mut walk = Walk::new(rules, family, RulesTable::Filter, client);
        walk.from(base, &[&[FIREWALL, SERVICES, EXTERNAL], &OTHERS[..]].concat());
        table.problems.append(&mut walk.problems);
        walk
    });
    let frontends =
        translated.iter().chain([&input.reached, &forward.reached, &output.reached]).flat_map(BTreeMap::keys);
    let frontends: BTreeSet<Frontend> = frontends.copied().collect();
    let mut lists = Lists::default();
    for frontend in frontends {
        let is_node_port = matches!(frontend, Frontend::NodePort(..));
        let mut entry = Entry::default();
        let (mut admitted, mut is_guarded) = (None, true);
        for (origin, translated) in Origin::ALL.into_iter().zip(&translated) {
            let to_endpoint = if origin == Origin::Node { &output } else { &forward };
            let filter = if is_node_port { &input } else { to_endpoint };
            let refused = filter.reached.get(&frontend).and_then(Outcome::ending_of_all);
            if let Some(reached) = translated.get(&frontend) {
                entry.set(origin, to_endpoint.filtered(reached.fate(), frontend.protocol()));
                admitted = admitted.or_else(|| Some(&reached.admitted).filter(|ranges| !ranges.is_empty()));
            }
            if *entry.fate(origin) == Fate::NotServed {
                entry.set(origin, Ending::fate(refused));
            }
            is_guarded &= refused == Some(Ending::Drop);
            let to_proxy = to_proxy.as_ref().and_then(|to_proxy| to_proxy[origin as usize].get(&frontend));
            entry.reaches_proxy[origin as usize] = to_proxy.is_some_and(|reached| match reached.fate() {
                Fate::Forwarded(to) => to.iter().all(|to| listeners.contains(to)),
                _ => false,
            });
        }
        lists.share(&mut entry);
        // Without a rule that drops the packets of other clients, the packets go on.
        entry.admitted =
            admitted.filter(|_| is_guarded).map_or(Admitted::All, |ranges| Admitted::only(ranges.iter().copied()));
        if entry != Entry::default() {
            table.entries.insert(frontend, entry);
        }
    }
    table
}

/// What nat does with packets of each origin. Sets where NodePorts answer.
pub(super) fn translations(
    rules: &Rules,
    detector: Option<&LocalDetector>,
    sets: Option<Sets<'_>>,
    table: &mut Table,
) -> [BTreeMap<Frontend, Outcome>; 3] {
    Origin::ALL.map(|origin| {
        let mut walk = Walk::new(rules, table.family, RulesTable::Nat, Client { origin, detector, sets });
        walk.from(if origin == Origin::Node { "OUTPUT" } else { "PREROUTING" }, &[SERVICES]);
        table.problems.extend(walk.problems);
        table.node_ports_at = walk.node_ports_at;
        walk.reached
    })
}
