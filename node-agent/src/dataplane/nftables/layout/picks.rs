//! The chains that select an endpoint of a group, and the records of clients.

use headgate_core::nftables::{Lookup, Pick, Selection};
use nftables_netlink::{DataType, DynamicSetOperation, Expression, Register, Set, Verdict};

use super::{
    super::{
        elements::{GROUP_WORD, PORT_WORD, address_type, lookup_map, names, pick_key},
        expressions::Side,
    },
    Builder, FIRST, Layout, RuleContent, SECOND, picks_map,
};

/// Maximum number of clients that the map of one affinity timeout records.
pub(in super::super) const MAX_RECORDED_CLIENTS: u32 = 1 << 18;
/// The number of clients that a Service port may record at once. It may record as many again within
/// one affinity timeout. So a Service port fills at most an eighth of a map.
pub(in super::super) const RECORDING_BURST: u32 = MAX_RECORDED_CLIENTS >> 4;
/// Maximum number of Service ports whose clients are recorded with one affinity timeout.
const MAX_RECORDING_PORTS: u32 = 1 << 16;

/// The register at which the rules for affinity load the target of a client.
const CLIENT_TARGET: Register = Register::word(7);
/// The number of the service port in a target that is loaded at [`CLIENT_TARGET`]. The client's
/// address is loaded after the number, and both together are the key of a recorded client.
const CLIENT: Register = Register::word(7 + PORT_WORD);

/// The parts of a chain's name that stand for [`Selection::ByClient`] and [`Selection::ProxyOnly`].
const BY_CLIENT: &str = "by-client-of-";
const PROXY_ONLY: &str = "proxy-only";

fn pick_chain(pick: &Pick) -> String {
    let Pick { lookup, affinity_timeout_seconds, selection } = pick;
    let selection = match selection {
        Selection::Random(slots) => format!("of-{slots}"),
        Selection::ByClient(slots) => format!("{BY_CLIENT}{slots}"),
        Selection::ProxyOnly => PROXY_ONLY.to_owned(),
    };
    match affinity_timeout_seconds {
        Some(timeout) => format!("{}-{selection}-affinity-{timeout}s", lookup_map(*lookup)),
        None => format!("{}-{selection}", lookup_map(*lookup)),
    }
}

pub(in super::super) fn pick_of_chain(name: &str) -> Option<Pick> {
    Lookup::ALL.into_iter().find_map(|lookup| {
        let rest = name.strip_prefix(lookup_map(lookup))?.strip_prefix('-')?;
        let (selection, timeout) = match rest.split_once("-affinity-") {
            Some((selection, timeout)) => (selection, Some(timeout.strip_suffix('s')?.parse().ok()?)),
            None => (rest, None),
        };
        let number = |slots: &str| slots.parse().ok().filter(|slots| *slots > 0);
        let selection = match (selection.strip_prefix("of-"), selection.strip_prefix(BY_CLIENT)) {
            (Some(slots), _) => Selection::Random(number(slots)?),
            (None, Some(slots)) => Selection::ByClient(number(slots)?),
            (None, None) if selection == PROXY_ONLY => Selection::ProxyOnly,
            (None, None) => return None,
        };
        Some(Pick { lookup, affinity_timeout_seconds: timeout, selection })
    })
}

/// The start of the names of the maps of recorded clients.
const CLIENTS: &str = "clients-";

/// The name of the map that records the clients of one affinity timeout.
pub(in super::super) fn clients_map(timeout_seconds: u32) -> String {
    format!("{CLIENTS}{timeout_seconds}s")
}

pub(in super::super) fn is_clients_map(name: &str) -> bool {
    name.starts_with(CLIENTS)
}

/// The set of Service ports with affinity, which bounds how many clients each port records.
fn recordings_set(timeout_seconds: u32) -> String {
    format!("recordings-{timeout_seconds}s")
}

fn endpoints_map(pick: &Pick) -> &'static str {
    if pick.affinity_timeout_seconds.is_some() { names::AFFINITY_ENDPOINTS } else { names::ENDPOINTS }
}

impl Builder<'_> {
    pub(super) fn clients_set(&self, timeout: u32) -> Set {
        let address = address_type(self.config.family);
        let (key, data) = ([DataType::Mark, address], [DataType::Mark, address, DataType::Port]);
        let clients = Set::map(&self.table, clients_map(timeout), &key, &data).with_size(MAX_RECORDED_CLIENTS);
        clients.with_timeout_ms(u64::from(timeout) * 1000).dynamic()
    }

    pub(super) fn recordings_set(&self, timeout: u32) -> Set {
        let recordings = Set::new(&self.table, recordings_set(timeout), &[DataType::Mark]);
        // After this time, the kernel would grant a port its whole burst again.
        recordings.with_size(MAX_RECORDING_PORTS).with_timeout_ms(u64::from(timeout) * 1000).dynamic()
    }

    /// Loads the key of the packet's client: the number of the service port, and the client's
    /// address. The groups for policy Cluster and for policy Local have the same service port
    /// number, so both groups use the same records.
    fn client(&self, lookup: Lookup) -> Vec<Expression> {
        let mut all = self.target(lookup, CLIENT_TARGET);
        all.push(self.expressions.address(Side::Source, CLIENT.after(4)));
        all
    }

    /// Adds the chain of a pick. `nft` 1.0.6 aborts when the first word of a lookup's result lies
    /// in the data of a record: so two unused words precede an endpoint with affinity, and one does
    /// in a record.
    pub(super) fn add_pick(&self, pick: &Pick, layout: &mut Layout) {
        let Pick { lookup, affinity_timeout_seconds, selection } = *pick;
        let to = self.expressions;
        let what = match selection {
            Selection::Random(_) => "a random endpoint of the group",
            Selection::ByClient(_) => "the endpoint of the group that the client's address selects",
            Selection::ProxyOnly => return self.add_proxy_only(pick, layout),
        };
        let text = format!("{what}, from @{}", lookup_map(lookup));
        let mut rules = Vec::new();
        let endpoint = match affinity_timeout_seconds {
            None => FIRST,
            Some(timeout) => {
                rules.push(self.recorded(lookup, timeout));
                rules.push(self.recording(pick, timeout, &text));
                FIRST.after(8)
            }
        };
        let (group, slot) = (SECOND.after(4 * GROUP_WORD), SECOND.after(4 * (GROUP_WORD + 1)));
        let mut plain = self.target(lookup, SECOND);
        match selection {
            Selection::Random(slots) => plain.push(to.random(slots, slot)),
            Selection::ByClient(slots) => {
                plain.extend([to.address(Side::Source, FIRST), to.hash_of_address(FIRST, slots, slot)]);
            }
            Selection::ProxyOnly => {}
        }
        if affinity_timeout_seconds.is_some() {
            plain.extend(to.endpoint_placeholders(endpoint));
        }
        plain.push(to.lookup(endpoints_map(pick), group, FIRST));
        plain.push(to.translate(endpoint));
        rules.push(RuleContent::with_comment(plain, &text));
        let chain = pick_chain(pick);
        layout.add_chain(&chain, rules);
        layout.elements.insert((picks_map(lookup), pick_key(pick)), Some(Verdict::Jump(chain)));
    }

    /// Adds the chain of connections that only the proxy can carry. The connection stays
    /// untranslated, so the chain [`super::UNSERVED`] refuses it.
    fn add_proxy_only(&self, pick: &Pick, layout: &mut Layout) {
        let chain = pick_chain(pick);
        let rule = vec![Expression::Verdict(Verdict::Accept)];
        layout.add_chain(&chain, vec![RuleContent::with_comment(rule, "not translated, and refused later")]);
        layout.elements.insert((picks_map(pick.lookup), pick_key(pick)), Some(Verdict::Jump(chain)));
    }

    /// Sends a client to a selected endpoint and records it. If too many are recorded, the rule
    /// ends, and the next rule sends the client on without a record.
    fn recording(&self, pick: &Pick, timeout: u32, text: &str) -> RuleContent {
        let to = self.expressions;
        let clients = clients_map(timeout);
        let (record, endpoint, target) = (FIRST.after(4), FIRST.after(8), Register::word(4));
        let (group, slot) = (target.after(4 * GROUP_WORD), target.after(4 * (GROUP_WORD + 1)));
        let mut all = self.client(pick.lookup);
        all.extend(self.target(pick.lookup, target));
        match pick.selection {
            Selection::Random(slots) => all.push(to.random(slots, slot)),
            Selection::ByClient(slots) => all.push(to.hash_of_address(CLIENT.after(4), slots, slot)),
            // Such a pick has no affinity.
            Selection::ProxyOnly => {}
        }
        all.push(to.placeholder(record));
        all.extend(to.endpoint_placeholders(endpoint));
        all.push(to.lookup(endpoints_map(pick), group, FIRST));
        all.push(to.within_rate(&recordings_set(timeout), CLIENT, RECORDING_BURST, timeout));
        all.push(to.record(&clients, DynamicSetOperation::Delete, CLIENT, Some(record)));
        all.push(to.record(&clients, DynamicSetOperation::Add, CLIENT, Some(record)));
        all.push(to.translate(endpoint));
        RuleContent::with_comment(all, &format!("{text}; the client is recorded"))
    }

    /// Sends a recorded client to its endpoint, if the endpoint is still in the group.
    fn recorded(&self, lookup: Lookup, timeout: u32) -> RuleContent {
        let to = self.expressions;
        let clients = clients_map(timeout);
        // The group follows the record, so that endpoint and group are the key of a member.
        let (record, endpoint) = (FIRST.after(4), FIRST.after(8));
        let group = endpoint.after(to.address_bytes()).after(4);
        let mut all = self.client(lookup);
        // The kernel renews the timeout of a record and keeps its data, but the rule must name
        // data. If the record expires now, they lead to no member.
        all.push(to.destination_port(CLIENT.after(4).after(to.address_bytes())));
        all.extend(self.target(lookup, Register::word(group.index() - GROUP_WORD)));
        all.extend(to.endpoint_placeholders(endpoint));
        all.push(to.lookup(&clients, CLIENT, record));
        all.push(to.is_in(names::MEMBERS, endpoint));
        all.push(to.record(&clients, DynamicSetOperation::Update, CLIENT, Some(CLIENT)));
        all.push(to.translate(endpoint));
        RuleContent::with_comment(all, &format!("the endpoint of the client, from @{clients}"))
    }
}
