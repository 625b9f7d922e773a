//! Decodes virtual servers, sets and rules of mode IPVS to a forwarding table. It follows a packet
//! for each server and member through nat (translation for pods and the node), filter (what sets
//! reject and drop), and IPVS.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
};

use headgate_core::{
    Family, Protocol,
    forwarding::{Admitted, Entry, Fate, NodePortsAt, Origin, Problem, Table},
    frontends::Frontend,
    iptables::RulesTable,
    view::LocalDetector,
};
use ipnet::IpNet;

use super::{
    iptables::{
        FIREWALL, Rules, SERVICES,
        evaluate::{Client, FirstPacket, Unknown},
        translations,
    },
    outcome::{Ending, Lists},
};

/// The chain that refuses packets that the node receives.
const RECEIVED: &str = "KUBE-IPVS-FILTER";
/// The chain that refuses packets of the node itself, in filter. In mangle it checks source ranges.
const SENT: &str = "KUBE-IPVS-OUT-FILTER";

/// The chains that each base chain must lead to.
const NEEDED: [(RulesTable, &str, &[&str]); 5] = [
    (RulesTable::Mangle, "OUTPUT", &[SENT]),
    (RulesTable::Nat, "PREROUTING", &[SERVICES]),
    (RulesTable::Nat, "OUTPUT", &[SERVICES]),
    (RulesTable::Filter, "INPUT", &[FIREWALL, RECEIVED]),
    (RulesTable::Filter, "OUTPUT", &[SENT]),
];

/// A member of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Member {
    /// The destination address. `None` in a set of ports.
    pub address: Option<IpAddr>,
    /// The protocol and the port. A set of ports has no protocol.
    pub port: Option<(Option<Protocol>, u16)>,
    /// The source.
    pub source: Option<IpNet>,
}

/// What the kernel of a node has in one family.
#[derive(Debug, Default)]
pub struct IpvsDump {
    /// The virtual servers with their endpoints and weights. Weight 0 gets no new connections.
    pub servers: BTreeMap<(IpAddr, Protocol, u16), Vec<(SocketAddr, u32)>>,
    /// The addresses on the device for Services.
    pub device: BTreeSet<IpAddr>,
    /// The members of the sets of this family, by the names of the sets.
    pub sets: HashMap<String, BTreeSet<Member>>,
    /// The rules.
    pub rules: Rules,
    /// The other addresses of the node.
    pub node_addresses: BTreeSet<IpAddr>,
    /// The addresses of the node at which NodePorts should answer.
    pub node_port_addresses: BTreeSet<IpAddr>,
}

impl IpvsDump {
    /// Whether a set contains the parts of a frontend that `flags` names. The client is in none of
    /// the sets that name sources but `client_in`.
    fn contains(&self, set: &str, flags: &str, frontend: &Frontend, client_in: Option<&str>) -> Option<bool> {
        let members = self.sets.get(set)?;
        let Frontend::Address(address, protocol, port) = *frontend else { return Some(false) };
        let has = |address, port| members.contains(&Member { address, port, source: None });
        match flags {
            "dst,dst,src" => Some(client_in == Some(set) && sources(members, frontend).next().is_some()),
            "dst,dst" => Some(has(Some(address), Some((Some(protocol), port)))),
            "dst" => Some(has(Some(address), None) || has(None, Some((None, port)))),
            _ => None,
        }
    }
}

fn sources<'a>(members: &'a BTreeSet<Member>, frontend: &Frontend) -> impl Iterator<Item = IpNet> + use<'a> {
    let (address, port) = match *frontend {
        Frontend::Address(address, protocol, port) => (Some(address), Some((Some(protocol), port))),
        Frontend::NodePort(..) => (None, None),
    };
    let first = Member { address, port, source: None };
    let of_frontend = move |member: &&Member| (member.address, member.port) == (address, port);
    members.range(first..).take_while(of_frontend).filter_map(|member| member.source)
}

/// Decodes a dump. `detector` is how rules recognise pods of the node.
pub fn decode(dump: &IpvsDump, family: Family, detector: Option<&LocalDetector>) -> Table {
    let mut table = Table::new(family);
    let rules = &dump.rules;
    rules.check_bases(&NEEDED, family, &mut table.problems);
    let contains = |set: &str, flags: &str, frontend: &Frontend| dump.contains(set, flags, frontend, None);
    let translated = translations(rules, detector, Some(&contains), &mut table);
    // Each NodePort has a virtual server at each address.
    table.node_ports_at = NodePortsAt::Listed(dump.node_port_addresses.clone());
    let mut frontends: BTreeSet<Frontend> = translated.iter().flat_map(BTreeMap::keys).copied().collect();
    frontends.retain(|frontend| matches!(frontend, Frontend::Address(..)));
    frontends.extend(dump.sets.values().flatten().filter_map(|member| {
        match (member.address, member.port, member.source) {
            (Some(address), Some((Some(protocol), port)), None) => Some(Frontend::Address(address, protocol, port)),
            _ => None,
        }
    }));
    // Other virtual servers belong to other programs.
    let servers = dump.servers.keys().filter(|(address, ..)| dump.device.contains(address));
    frontends.extend(servers.map(|(address, protocol, port)| Frontend::Address(*address, *protocol, *port)));
    let of_node_ports = dump.sets.iter().filter(|(name, _)| name.contains(NODE_PORT_SERVERS));
    let of_node_ports: BTreeSet<&Member> = of_node_ports.flat_map(|(_, members)| members).collect();
    let (mut unknown, mut lists) = (BTreeSet::new(), Lists::default());
    let mut node_ports: BTreeMap<(Protocol, u16), BTreeMap<IpAddr, Entry>> = BTreeMap::new();
    for frontend in frontends {
        let Frontend::Address(address, protocol, port) = frontend else { continue };
        let member = Member { address: Some(address), port: Some((Some(protocol), port)), source: None };
        let is_at_node = of_node_ports.contains(&member);
        let mut follower = Follower { dump, detector, frontend, unknown: &mut unknown };
        let mut entry = Entry::default();
        let mut admitted = None;
        for (origin, translated) in Origin::ALL.into_iter().zip(&translated) {
            let node_port = Frontend::NodePort(family, protocol, port);
            let reached = translated.get(&frontend).or_else(|| translated.get(&node_port).filter(|_| is_at_node));
            match reached.map(|reached| (reached.fate(), &reached.admitted)) {
                Some((fate, ranges)) if fate != Fate::NotServed => {
                    admitted = admitted.or_else(|| Some(ranges).filter(|ranges| !ranges.is_empty()));
                    entry.set(origin, fate);
                }
                _ => entry.set(origin, follower.fate(origin)),
            }
        }
        lists.share(&mut entry);
        entry.admitted = follower.admitted();
        if admitted.is_some_and(|ranges| entry.admitted != Admitted::only(ranges.iter().copied())) {
            entry.admitted = Admitted::All;
        }
        if entry == Entry::default() {
            continue;
        }
        if is_at_node {
            node_ports.entry((protocol, port)).or_default().insert(address, entry);
        } else {
            table.entries.insert(frontend, entry);
        }
    }
    for ((protocol, port), entries) in node_ports {
        add_node_port(&mut table, dump, protocol, port, entries);
    }
    for chain in unknown {
        table.problems.insert(Problem::NotUnderstood(format!(
            "cannot verify what chain {chain} ({family}) does: it contains a rule that Headgate does not know"
        )));
    }
    table
}

/// Adds a NodePort once, if all addresses serve it alike. Otherwise adds the addresses that differ
/// from the first, too.
fn add_node_port(table: &mut Table, dump: &IpvsDump, protocol: Protocol, port: u16, entries: BTreeMap<IpAddr, Entry>) {
    let mut entries = entries;
    for address in &dump.node_port_addresses {
        entries.entry(*address).or_default();
    }
    let count = |one: &Entry| (entries.values().filter(|other| *other == one).count(), *one != Entry::default());
    let Some(of_most) = entries.values().max_by_key(|one| count(one)).cloned() else { return };
    for (address, entry) in &entries {
        if *entry != of_most {
            table.entries.insert(Frontend::Address(*address, protocol, port), entry.clone());
        }
    }
    table.entries.insert(Frontend::NodePort(table.family, protocol, port), of_most);
}

/// Follows the packets for one frontend that nat does not translate.
struct Follower<'a> {
    dump: &'a IpvsDump,
    detector: Option<&'a LocalDetector>,
    frontend: Frontend,
    unknown: &'a mut Unknown,
}

impl Follower<'_> {
    /// How a chain ends a packet. `client_in` is the set that names the source.
    fn ending(&mut self, table: RulesTable, chain: &str, origin: Origin, client_in: Option<&str>) -> Option<Ending> {
        let id = self.dump.rules.find(table, chain)?;
        let contains =
            |set: &str, flags: &str, frontend: &Frontend| self.dump.contains(set, flags, frontend, client_in);
        let client = Client { origin, detector: self.detector, sets: Some(&contains) };
        let packet = FirstPacket { client, frontend: self.frontend, depth: 0 };
        self.dump.rules.evaluate(id, packet, self.unknown).ending
    }

    fn fate(&mut self, origin: Origin) -> Fate {
        let Frontend::Address(address, protocol, port) = self.frontend else { return Fate::NotServed };
        let is_at_node = self.dump.node_addresses.contains(&address);
        let is_local = self.dump.device.contains(&address) || is_at_node;
        let server = self.dump.servers.get(&(address, protocol, port));
        let endpoints = server.into_iter().flatten().filter(|(_, weight)| *weight > 0);
        let mut endpoints = endpoints.map(|(endpoint, _)| *endpoint).peekable();
        // IPVS takes the node's own packets before filter sees them, and received ones after it.
        let chain = if origin == Origin::Node && !is_at_node { SENT } else { RECEIVED };
        let ending = self.ending(RulesTable::Filter, chain, origin, None);
        match ending {
            Some(Ending::Drop | Ending::Reject) if origin != Origin::Node || endpoints.peek().is_none() => {
                Ending::fate(ending)
            }
            _ if is_local && endpoints.peek().is_some() => Fate::to(endpoints),
            _ => Fate::NotServed,
        }
    }

    fn admitted(&mut self) -> Admitted {
        let ways = [(RulesTable::Filter, FIREWALL, Origin::Outside), (RulesTable::Mangle, SENT, Origin::Node)];
        let dropped = |follower: &mut Self, client_in| {
            ways.map(|(table, chain, origin)| follower.ending(table, chain, origin, client_in) == Some(Ending::Drop))
        };
        if dropped(self, None) != [true; 2] {
            return Admitted::All;
        }
        let (dump, frontend) = (self.dump, self.frontend);
        let names = dump.sets.keys().filter(|name| name.contains(SOURCES));
        let admitting = names.filter(|name| dropped(self, Some(name)) == [false; 2]);
        Admitted::only(admitting.flat_map(|name| sources(&dump.sets[name], &frontend)))
    }
}

/// A part of the names of the sets of virtual servers for NodePorts.
const NODE_PORT_SERVERS: &str = "NODE-PORT-SERVERS";
/// A part of the names of the sets of clients that may reach a load balancer IP.
const SOURCES: &str = "LOAD-BALANCER-SOURCE";
