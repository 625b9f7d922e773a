//! What is programmed in one family, and the scripts that change it.
//!
//! The ledger keeps a hash of each chain instead of its text. It assumes that scripts succeed: after one that did not, only
//! [`Ledger::full`] brings ledger and kernel together again.

mod late;
mod quarantine;

pub use late::LateChange;

use std::{
    collections::{BTreeSet, HashMap, HashSet, hash_map::DefaultHasher},
    hash::Hasher as _,
    net::IpAddr,
    sync::Arc,
};

use self::quarantine::{Aside, Before};
use super::{
    Existing, ExistingTables, RulesHash, Table,
    config::RenderConfig,
    dispatch::{DispatchLine, Selector, Shared, SharedChain},
    existing::BASE_CHAINS,
    fixed,
    names::ChainName,
    script::{Script, Writing},
    service::{self, ServiceRules},
    tally::Tally,
};
use crate::{
    behaviours::view::service_views,
    model::ServiceKey,
    node_facts::NodeFacts,
    state::{Dirty, State},
};

/// One family's programmed rules.
#[derive(Debug)]
pub struct Ledger {
    config: RenderConfig,
    programmed: HashMap<Arc<ServiceKey>, Programmed>,
    shared: Shared,
    /// Number of services when the dispatch groups were cut.
    groups_cut_for: usize,
    /// Chains that nobody wants any more and the kernel does not delete, since somebody else's rules lead to them.
    left: BTreeSet<(Table, String)>,
    aside: Aside,
    /// Of all services.
    tally: Tally,
    /// Of what depends on configuration alone.
    fixed_tally: Tally,
}

/// One service's programmed rules.
#[derive(Debug, Default, Clone)]
struct Programmed {
    chains: Box<[(ChainName, RulesHash)]>,
    dispatch: Box<[(SharedChain, Selector)]>,
    dispatch_hash: u64,
    tally: Tally,
}

/// What a planning step looked at, for counting.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Planned {
    /// Services whose view and rules were computed.
    pub services: u32,
}

impl Ledger {
    /// Nothing is programmed.
    #[must_use]
    pub fn new(config: RenderConfig) -> Self {
        let shared = Shared::new(config.clone(), None, None);
        let (tally, fixed_tally) = (Tally::default(), Tally::default());
        let (programmed, left) = (HashMap::new(), BTreeSet::new());
        Self { config, programmed, shared, groups_cut_for: 0, left, aside: Aside::default(), tally, fixed_tally }
    }

    /// The configuration it renders for.
    #[must_use]
    pub fn config(&self) -> &RenderConfig {
        &self.config
    }

    /// Takes another configuration, of the same family. Until the next [`Self::full`] the rules in the kernel are those of the old one.
    pub fn set_config(&mut self, config: RenderConfig) {
        self.config = config;
    }

    /// Writes what changed for the dirty services, at the cost of those services alone. Only when the size of the cluster has crossed
    /// the threshold between layouts is everything written.
    pub fn changed(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> (Script, Planned) {
        if self.layout_is_outgrown(state) {
            let believed = self.believed();
            return self.full(state, node, &believed);
        }
        let mut script = Script::default();
        let mut planned = Planned::default();
        let mut stale = Vec::new();
        for key in &dirty.services {
            if self.aside.contains(key) {
                continue;
            }
            let rules = self.render(state, node, key);
            planned.services += 1;
            let before = self.program(key, rules, &mut script, &mut stale);
            self.aside.changed(key, before);
        }
        self.shared.write_changed(&mut script);
        for name in stale {
            script.delete_chain(Table::Nat, &name);
        }
        (script, planned)
    }

    /// Forgets what was programmed and goes by what the kernel has: writes the chains that differ from what is wanted, and deletes those
    /// that are ours by name and not wanted. Where everything is as it should be, the script is empty. Nothing else is touched.
    pub fn full(&mut self, state: &State, node: &NodeFacts, existing: &ExistingTables) -> (Script, Planned) {
        self.full_by(Writing::Text, state, node, existing.clone())
    }

    /// The same with the rules of services' chains held as `writing` says; in steps only where nothing leads to our chains.
    pub fn full_by(
        &mut self,
        writing: Writing,
        state: &State,
        node: &NodeFacts,
        existing: ExistingTables,
    ) -> (Script, Planned) {
        let is_compact = self.wants_compact(state, existing.get(Table::Nat).chains.contains_key(fixed::HAIRPIN));
        self.everything_becomes_new();
        self.shared = self.new_shared(state, is_compact, existing.get(Table::Nat).prefix_length);
        self.groups_cut_for = state.service_count();
        self.programmed.clear();
        self.tally = Tally::default();
        self.fixed_tally = self.tally_of_fixed(is_compact);

        let is_reached = existing.get(Table::Nat).leads_to_ours(Table::Nat);
        let writing = if is_reached && writing == Writing::LateInSteps { Writing::Late } else { writing };
        let keys: BTreeSet<&Arc<ServiceKey>> = state.entries().map(|(key, _)| key).collect();
        let (aside, keys): (Vec<_>, Vec<_>) = keys.into_iter().partition(|key| self.aside.contains(key));
        for key in aside {
            self.keep(key, &existing);
        }
        let mut script = Script::comparing_with(existing, writing);
        let mut planned = Planned::default();
        for chain in fixed::chains(&self.config) {
            script.write_chain(chain.table, &chain.name, &chain.rules);
        }
        for key in keys {
            let rules = self.render(state, node, key);
            planned.services += 1;
            self.program(key, rules, &mut script, &mut Vec::new());
        }
        self.shared.write_changed(&mut script);
        for chain in fixed::leading_to_dispatch(&self.config, is_compact) {
            script.write_chain(chain.table, &chain.name, &chain.rules);
        }
        let left = std::mem::take(&mut self.left);
        let existing = script.take_existing();
        for table in Table::ALL {
            self.write_jumps(table, existing.get(table), &mut script);
            self.delete_stale(table, existing.get(table), &left, &mut script);
        }
        (script, planned)
    }

    /// Removes every trace from what a kernel has. Rules of the kernel's own chains that lead to ours are deleted first.
    #[must_use]
    pub fn cleanup(existing: &ExistingTables) -> Script {
        let mut script = Script::default();
        for table in Table::ALL {
            let existing = existing.get(table);
            for (chain, rule) in existing.jumps_to_ours(table) {
                script.delete_rule(table, chain, rule);
            }
            let names: BTreeSet<&String> = existing.chains.keys().collect();
            names.into_iter().for_each(|name| script.delete_chain(table, name));
        }
        script
    }

    /// What is programmed, in numbers. An endpoint behind several services counts for each of them among hairpin rules.
    #[must_use]
    pub fn tally(&self) -> Tally {
        let mut tally = self.tally;
        tally.add(self.fixed_tally);
        for table in [Table::Nat, Table::Filter] {
            tally.add_count(table, u32::try_from(self.shared.group_overhead(table)).unwrap_or(u32::MAX));
        }
        tally
    }

    fn tally_of_fixed(&self, is_compact: bool) -> Tally {
        let mut tally = Tally::default();
        let leading = fixed::leading_to_dispatch(&self.config, is_compact);
        for chain in fixed::chains(&self.config).iter().chain(&leading) {
            tally.add_rules(chain.table, &chain.rules);
        }
        fixed::jumps(&self.config).iter().for_each(|jump| tally.add_count(jump.table, 1));
        tally.add_count(Table::Nat, fixed::last_service_rules(&self.config).len().try_into().unwrap_or(u32::MAX));
        tally
    }

    fn layout_is_outgrown(&self, state: &State) -> bool {
        let is_compact = self.shared.is_compact();
        // Groups that were cut for few services are too long for many. Four times as many pay for a full pass.
        let groups_are_outgrown = is_compact && state.service_count() > 4 * self.groups_cut_for.max(64);
        self.wants_compact(state, is_compact) != is_compact || groups_are_outgrown
    }

    /// Going back from compact needs a clear distance, lest a service coming and going rebuilds everything each time.
    fn wants_compact(&self, state: &State, is_compact: bool) -> bool {
        let factor = if is_compact { 2 } else { 1 };
        self.config.is_compact(state.service_count() * factor, state.endpoint_count() * factor)
    }

    fn new_shared(&self, state: &State, is_compact: bool, prefix_length: Option<u8>) -> Shared {
        let addresses = is_compact.then(|| self.dispatched_addresses(state));
        Shared::new(self.config.clone(), addresses.as_deref(), prefix_length)
    }

    fn dispatched_addresses(&self, state: &State) -> Vec<IpAddr> {
        state.entries().filter_map(|(_, entry)| entry.service()?.cluster_ip(self.config.family)).collect()
    }

    fn render(&self, state: &State, node: &NodeFacts, key: &Arc<ServiceKey>) -> ServiceRules {
        let Some(service) = state.entry(key).and_then(|entry| entry.service()) else { return ServiceRules::default() };
        let views = service_views(state, key, self.config.family, node);
        service::render(&self.config, self.shared.is_compact(), service, &views)
    }

    /// Writes the chains of a service that differ from what is programmed, and enters its dispatch lines. Returns what was programmed.
    fn program(
        &mut self,
        key: &Arc<ServiceKey>,
        rules: ServiceRules,
        script: &mut Script,
        stale: &mut Vec<ChainName>,
    ) -> Before {
        let old = self.programmed.remove(key).unwrap_or_default();
        let tally = Tally::of(&rules);
        self.tally.subtract(old.tally);
        let before: HashMap<ChainName, RulesHash> = old.chains.iter().copied().collect();
        let mut chains = Vec::with_capacity(rules.chains.len());
        for chain in rules.chains {
            let hash = RulesHash::of(&chain.rules);
            if before.get(&chain.name) != Some(&hash) {
                script.write_service_chain(key, chain.name, &chain.rules, hash);
            }
            chains.push((chain.name, hash));
        }
        let kept: HashSet<ChainName> = chains.iter().map(|(name, _)| *name).collect();
        stale.extend(before.into_keys().filter(|name| !kept.contains(name)));

        let dispatch_hash = hash_of(&rules.dispatch);
        let dispatch: Box<[_]> = rules.dispatch.iter().map(|line| (line.chain, line.selector)).collect();
        let mut old_lines = None;
        if dispatch_hash != old.dispatch_hash || dispatch != old.dispatch {
            old_lines = Some(self.shared.lines(key, &old.dispatch));
            if refuses_more(&rules.dispatch, &old.dispatch) {
                script.put_filter_first();
            }
            self.shared.remove(key, &old.dispatch);
            self.shared.insert(key, rules.dispatch);
        }
        if !chains.is_empty() || !dispatch.is_empty() {
            self.tally.add(tally);
            let programmed = Programmed { chains: chains.into(), dispatch, dispatch_hash, tally };
            self.programmed.insert(Arc::clone(key), programmed);
        }
        Before { programmed: old, lines: old_lines }
    }

    /// Inserts the jumps that are missing at the head of their chains, and deletes those of ours that are not wanted. Those that are there stay
    /// where they are, unless their order is not the wanted one: then all of the chain's are inserted anew.
    fn write_jumps(&self, table: Table, existing: &Existing, script: &mut Script) {
        let wanted: Vec<_> = fixed::jumps(&self.config).into_iter().filter(|jump| jump.table == table).collect();
        let unwanted = existing.jumps_to_ours(table);
        for (chain, rule) in unwanted.filter(|(c, r)| !wanted.iter().any(|jump| jump.from == *c && jump.rule == *r)) {
            script.delete_rule(table, chain, rule);
        }
        for (chain, wanted) in by_chain(&wanted) {
            let there = existing.found_in(chain, &wanted);
            let missing = wanted.iter().copied().filter(|rule| !there.contains(rule));
            let missing: Vec<&str> = missing.collect();
            let is_in_order = [&missing[..], &there].concat() == wanted;
            if !is_in_order {
                there.iter().for_each(|rule| script.delete_rule(table, chain, rule));
            }
            let inserted = if is_in_order { missing } else { wanted };
            inserted.iter().rev().for_each(|rule| script.insert_first(table, chain, rule));
        }
    }

    /// Deletes the chains that are not wanted. Those of `left`, of which it is known that somebody else's rules lead to them, are only emptied, as
    /// long as that is so: a deletion that the kernel refuses would cost a round of attempts each time.
    fn delete_stale(
        &mut self,
        table: Table,
        existing: &Existing,
        left: &BTreeSet<(Table, String)>,
        script: &mut Script,
    ) {
        let wanted = self.wanted_chains(table);
        let stale: BTreeSet<&String> = existing.chains.keys().filter(|name| !wanted.contains(*name)).collect();
        for name in stale {
            let known = (table, name.clone());
            if existing.held.contains_key(name) && left.contains(&known) {
                if !existing.is_left(name) {
                    script.write_chain(table, name, "");
                }
                self.left.insert(known);
            } else {
                script.delete_chain(table, name);
            }
        }
    }

    /// Takes note of a chain that scripts so far should have deleted, and that the kernel keeps, empty. False when that is known already.
    pub fn leave(&mut self, table: Table, name: &str) -> bool {
        self.left.insert((table, name.to_owned()))
    }

    /// Names of all chains of a table that are programmed. A full pass.
    fn wanted_chains(&self, table: Table) -> BTreeSet<String> {
        let fixed = fixed::chains(&self.config);
        let leading = fixed::leading_to_dispatch(&self.config, self.shared.is_compact());
        let fixed = fixed.iter().chain(&leading).filter(|chain| chain.table == table);
        let mut wanted: BTreeSet<String> = fixed.map(|chain| chain.name.to_owned()).collect();
        let dispatch = self.shared.chains().filter(|chain| chain.table() == table);
        wanted.extend(dispatch.map(|chain| chain.name().to_owned()));
        let groups = self.shared.group_chains().filter(|(of, _)| *of == table);
        wanted.extend(groups.map(|(_, name)| name.to_string()));
        if table == Table::Nat {
            let own = self.programmed.values().flat_map(|programmed| programmed.chains.iter());
            wanted.extend(own.map(|(name, _)| name.to_string()));
        }
        wanted
    }

    /// True when the kernel has just the rules that scripts so far have made: no chain missing, left over, or changed by somebody
    /// else. Chains that cannot be deleted, because somebody else's rules lead to them, may be there, empty. A full pass; for slow verification in the background.
    #[must_use]
    pub fn is_in(&self, existing: &ExistingTables) -> bool {
        let mut wanted: HashMap<(Table, String), RulesHash> = HashMap::new();
        let leading = fixed::leading_to_dispatch(&self.config, self.shared.is_compact());
        let fixed = fixed::chains(&self.config).into_iter().chain(leading);
        wanted.extend(fixed.map(|chain| ((chain.table, chain.name.to_owned()), RulesHash::of(&chain.rules))));
        let own = self.programmed.values().flat_map(|programmed| programmed.chains.iter());
        wanted.extend(own.map(|(name, hash)| ((Table::Nat, name.to_string()), *hash)));
        wanted.extend(self.shared.rules().map(|(table, name, rules)| ((table, name), RulesHash::of(&rules))));
        let is_as_wanted =
            |((table, name), hash): (&(Table, String), &RulesHash)| existing.get(*table).has_chain_with(name, *hash);
        let chains = Table::ALL.iter().map(|table| existing.get(*table).chains.len()).sum::<usize>();
        let is_left = |key: &&(Table, String)| existing.get(key.0).is_left(&key.1) && !wanted.contains_key(*key);
        let left = self.left.iter().filter(is_left).count();
        let has_jumps = |table: Table| {
            let jumps: Vec<_> = fixed::jumps(&self.config).into_iter().filter(|jump| jump.table == table).collect();
            let mut chains = by_chain(&jumps);
            chains.all(|(chain, wanted)| existing.get(table).found_in(chain, &wanted) == wanted)
        };
        chains == wanted.len() + left && wanted.iter().all(is_as_wanted) && Table::ALL.into_iter().all(has_jumps)
    }

    /// What the kernel has if all scripts so far succeeded and nobody interfered; what the chains hold is left open.
    fn believed(&self) -> ExistingTables {
        let mut believed = ExistingTables::default();
        for table in Table::ALL {
            let jumps = fixed::jumps(&self.config).into_iter().filter(|jump| jump.table == table);
            let base_rules = jumps.map(|jump| format!("{} {}", jump.from, jump.rule)).collect();
            let left = self.left.iter().filter(|(of, _)| *of == table).map(|(_, name)| name.clone());
            let held = left.clone().map(|name| (name, String::new())).collect();
            let chains = self.wanted_chains(table).into_iter().chain(left).map(|name| (name, None)).collect();
            believed.set(table, Existing { chains, base_rules, held, prefix_length: None });
        }
        believed
    }
}

/// The rules of jumps by the chain in which they stand, in order.
fn by_chain(jumps: &[fixed::Jump]) -> impl Iterator<Item = (&str, Vec<&str>)> {
    BASE_CHAINS.into_iter().map(|chain| {
        let of_chain = jumps.iter().filter(|jump| jump.from == chain);
        (chain, of_chain.map(|jump| jump.rule.as_str()).collect())
    })
}

/// True when a service gets refused somewhere where it was not.
fn refuses_more(new: &[DispatchLine], old: &[(SharedChain, Selector)]) -> bool {
    let may_refuse = |chain: SharedChain| chain.table() == Table::Filter && !chain.is_hairpin();
    new.iter().any(|line| may_refuse(line.chain) && !old.contains(&(line.chain, line.selector)))
}

fn hash_of(value: &impl std::hash::Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
