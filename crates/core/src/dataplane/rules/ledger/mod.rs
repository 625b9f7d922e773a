//! A record of the rules that are programmed in one family, which plans scripts that change them.
//!
//! The ledger keeps a hash of each chain instead of its text. It assumes that the kernel accepts
//! every script. After a script has failed, the record may differ from the kernel, and the caller
//! must use [`RulesLedger::full`] for the next script.

mod quarantine;

use std::{
    collections::{BTreeSet, HashMap, HashSet, hash_map::DefaultHasher},
    hash::Hasher as _,
    net::IpAddr,
    sync::Arc,
};

use self::quarantine::Before;
use super::{
    ExistingRules, ExistingTables, RulesHash, RulesTable,
    config::RenderConfig,
    dispatch::Dispatch,
    existing::BASE_CHAINS,
    names::{ChainName, DispatchChain, GATE_INPUT, GateChain, HAIRPIN},
    ruleset::{FixedChain, Jump, Ruleset},
    script::Script,
    service::{DispatchLine, Selector, ServiceRules, health_check_line},
    tally::Tally,
};
use crate::{
    behaviours::view::service_views,
    dataplane::shared::{self, FixedState, Quarantine, StateSource},
    model::{NodeFacts, ServiceKey},
    state::{Dirty, State},
};

/// The programmed rules of one family.
#[derive(Debug)]
pub struct RulesLedger {
    ruleset: Arc<Ruleset>,
    programmed: HashMap<Arc<ServiceKey>, ProgrammedRules>,
    dispatch: Dispatch,
    /// Number of services for which the dispatch groups were sized.
    groups_sized_for: usize,
    /// Unwanted chains that the kernel does not delete, because foreign rules jump to them.
    undeletable: BTreeSet<(RulesTable, String)>,
    quarantine: Quarantine<Before>,
    /// Counts for all services.
    tally: Tally,
    /// Counts for the rules that depend only on the configuration.
    fixed_tally: Tally,
}

/// The programmed rules of one service.
#[derive(Debug, Default, Clone)]
struct ProgrammedRules {
    chains: Box<[(ChainName, RulesHash)]>,
    dispatch: Box<[(DispatchChain, Selector)]>,
    dispatch_hash: u64,
    tally: Tally,
}

impl RulesLedger {
    /// Creates a ledger in which nothing is programmed.
    #[must_use]
    pub fn new(ruleset: Ruleset) -> Self {
        let ruleset = Arc::new(ruleset);
        let dispatch = Dispatch::new(Arc::clone(&ruleset), None, None);
        Self {
            ruleset,
            programmed: HashMap::new(),
            dispatch,
            groups_sized_for: 0,
            undeletable: BTreeSet::new(),
            quarantine: Quarantine::default(),
            tally: Tally::default(),
            fixed_tally: Tally::default(),
        }
    }

    /// Creates an empty ledger with this configuration and quarantine. Its [`Self::full`] plans
    /// what the full script of this ledger would write.
    #[must_use]
    pub fn fresh(&self) -> Self {
        Self {
            ruleset: Arc::clone(&self.ruleset),
            dispatch: Dispatch::new(Arc::clone(&self.ruleset), None, None),
            undeletable: self.undeletable.clone(),
            quarantine: self.quarantine.clone(),
            programmed: HashMap::new(),
            ..*self
        }
    }

    /// The configuration of the rules.
    #[must_use]
    pub fn config(&self) -> &RenderConfig {
        &self.ruleset.config
    }

    /// The jumps from the built-in chains, in their order at the head of these chains.
    #[must_use]
    pub fn jumps(&self) -> &[Jump] {
        &self.ruleset.jumps
    }

    /// Replaces the ruleset by another ruleset of the same family. Returns true if the
    /// configuration of the rules changed. In this case the caller must use [`Self::full`] for the
    /// next script; before that script, the kernel has the old rules.
    pub fn set_ruleset(&mut self, ruleset: Ruleset) -> bool {
        let is_new = ruleset.config != self.ruleset.config;
        if is_new {
            self.ruleset = Arc::new(ruleset);
        }
        is_new
    }

    /// Returns a script with the changes of the dirty services, and the number of services whose
    /// rules were computed. Quarantined services are skipped. The cost depends only on the dirty
    /// services, with one exception: if the size of the cluster has crossed a threshold of the
    /// layout or has outgrown the dispatch groups, the script writes all rules.
    pub fn changed(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> (Script, u32) {
        if self.layout_is_outgrown(state) {
            let expected = self.expected();
            return self.full(&FixedState(state, node), expected);
        }
        let mut script = Script::default();
        let mut planned = 0;
        let mut stale = Vec::new();
        for key in &dirty.services {
            if self.quarantine.contains(key) {
                continue;
            }
            let rules = self.render(state, node, key);
            planned += 1;
            let before = self.program(key, rules, &mut script, &mut stale);
            self.quarantine.changed(key, || before);
        }
        self.dispatch.write_changed(&mut script);
        for name in stale {
            script.delete_chain(RulesTable::Nat, &name);
        }
        (script, planned)
    }

    /// Returns a script that changes `existing`, the rules in the kernel, to the wanted rules. The
    /// script does not depend on what the ledger recorded before, except for quarantined services
    /// and undeletable chains. The script writes the chains that differ and deletes chains with
    /// names of Headgate that are not wanted. It does not touch foreign rules. The script is empty
    /// if the kernel already has the wanted rules. Also returns the number of services whose rules
    /// were computed.
    ///
    /// The state may change meanwhile. A service has the rules that it had when it was planned: the
    /// caller passes the changed services to [`Self::changed`].
    pub fn full(&mut self, source: &dyn StateSource, existing: ExistingTables) -> (Script, u32) {
        self.full_in_parts(source, existing, None)
    }

    /// Like [`Self::full`]. Passes the chains of a few services at a time to `write`, as soon as
    /// they are planned, so that the memory for their rules does not depend on the number of
    /// services. The returned script contains everything else, and its table nat consists of many
    /// steps. This changes nothing if a rule outside of Headgate's chains already jumps to a chain
    /// of Headgate in nat, because packets would pass unfinished rules: the script then contains
    /// everything.
    pub fn full_in_parts(
        &mut self,
        source: &dyn StateSource,
        existing: ExistingTables,
        write: Option<&mut dyn FnMut(&Script)>,
    ) -> (Script, u32) {
        let nat = existing.get(RulesTable::Nat);
        let mut write = write.filter(|_| !nat.leads_to_ours(RulesTable::Nat));
        self.begin_full();
        let mut is_compact = false;
        source.look(&mut |state, _, _| {
            is_compact = self.wants_compact(state, nat.chains.contains_key(HAIRPIN));
            let services = state.entries().filter_map(|(_, entry)| entry.service());
            let addresses = services.filter_map(|service| service.cluster_ip(self.ruleset.config.family));
            let addresses: Option<Vec<IpAddr>> = is_compact.then(|| addresses.collect());
            self.dispatch = Dispatch::new(Arc::clone(&self.ruleset), addresses.as_deref(), nat.prefix_length);
            self.groups_sized_for = state.service_count();
        });
        self.programmed.clear();
        self.tally = Tally::default();
        self.fixed_tally = self.tally_of_fixed(is_compact);

        let keys = shared::services(source);
        let (quarantined, keys): (Vec<_>, Vec<_>) = keys.into_iter().partition(|key| self.quarantine.contains(key));
        for key in &quarantined {
            self.keep_last_good(key, &existing);
        }
        let mut script = Script::comparing_with(existing, write.is_some());
        for chain in &self.ruleset.chains {
            script.write_chain(chain.table, &chain.name, &chain.rules);
        }
        for part in shared::parts(&keys) {
            source.look(&mut |state, node, _| {
                for key in part {
                    let rules = self.render(state, node, key);
                    self.program(key, rules, &mut script, &mut Vec::new());
                }
            });
            if let Some(write) = &mut write {
                script.pass_on(&mut **write);
            }
        }
        self.dispatch.write_changed(&mut script);
        for chain in self.ruleset.leading_to_dispatch(is_compact) {
            script.write_chain(chain.table, &chain.name, &chain.rules);
        }
        let undeletable = std::mem::take(&mut self.undeletable);
        let existing = script.take_existing();
        for table in RulesTable::ALL {
            self.write_jumps(table, existing.get(table), &mut script);
            self.delete_stale(table, existing.get(table), &undeletable, &mut script);
        }
        (script, u32::try_from(keys.len()).unwrap_or(u32::MAX))
    }

    /// The prefix length of address groups; `None` in the classic layout. If a full script chooses
    /// another one, it writes other chains although the kernel has the programmed ones.
    #[must_use]
    pub fn prefix_length(&self) -> Option<u8> {
        self.dispatch.prefix_length()
    }

    /// Returns a script that removes all rules and chains of Headgate, first the jumps to them.
    #[must_use]
    pub fn cleanup(existing: &ExistingTables) -> Script {
        let mut script = Script::default();
        for table in RulesTable::ALL {
            let existing = existing.get(table);
            for (chain, rule) in existing.jumps_to_ours(table) {
                script.delete_rule(table, chain, rule);
            }
            let names: BTreeSet<&String> = existing.chains.keys().collect();
            names.into_iter().for_each(|name| script.delete_chain(table, name));
        }
        script
    }

    /// Returns a script that removes the chains of mode userspace, to which no chain may jump.
    #[must_use]
    pub fn cleanup_of_gates(existing: &ExistingTables) -> Script {
        let mut script = Script::default();
        let jump = format!("-j {GATE_INPUT}");
        let jumps = existing.get(RulesTable::Filter).jumps_to_ours(RulesTable::Filter);
        for (chain, rule) in jumps.filter(|(_, rule)| rule.ends_with(&jump)) {
            script.delete_rule(RulesTable::Filter, chain, rule);
        }
        let chains = GateChain::ALL.map(|chain| (RulesTable::Nat, chain.as_str())).into_iter();
        let chains = chains.chain([(RulesTable::Filter, GATE_INPUT)]);
        for (table, name) in chains.filter(|(table, name)| existing.get(*table).chains.contains_key(*name)) {
            script.delete_chain(table, &name);
        }
        script
    }

    /// Returns counts of the programmed rules. The hairpin rules of an endpoint of several services
    /// count once for each service, although the kernel has them once.
    #[must_use]
    pub fn tally(&self) -> Tally {
        let mut tally = self.tally;
        tally.add(self.fixed_tally);
        for table in [RulesTable::Nat, RulesTable::Filter] {
            tally.add_count(table, u32::try_from(self.dispatch.group_overhead(table)).unwrap_or(u32::MAX));
        }
        tally
    }

    fn tally_of_fixed(&self, is_compact: bool) -> Tally {
        let mut tally = Tally::default();
        for chain in self.fixed_chains(is_compact) {
            tally.add_rules(chain.table, &chain.rules);
        }
        self.ruleset.jumps.iter().for_each(|jump| tally.add_count(jump.table, 1));
        tally.add_count(RulesTable::Nat, self.ruleset.last_service_rules.len().try_into().unwrap_or(u32::MAX));
        tally
    }

    /// Returns the chains that do not depend on services, in the order in which they are written.
    fn fixed_chains(&self, is_compact: bool) -> impl Iterator<Item = FixedChain> {
        self.ruleset.chains.iter().cloned().chain(self.ruleset.leading_to_dispatch(is_compact))
    }

    fn jumps_of(&self, table: RulesTable) -> impl Iterator<Item = &Jump> {
        self.ruleset.jumps.iter().filter(move |jump| jump.table == table)
    }

    fn layout_is_outgrown(&self, state: &State) -> bool {
        let is_compact = self.dispatch.is_compact();
        // If the number of services has quadrupled, groups are so long that a full script pays.
        let groups_are_outgrown = is_compact && state.service_count() > 4 * self.groups_sized_for.max(64);
        self.wants_compact(state, is_compact) != is_compact || groups_are_outgrown
    }

    /// Returns whether the layout should be compact. The ledger returns to the classic layout only
    /// at half of the threshold. Otherwise a single service that is added and removed repeatedly
    /// could rebuild all rules each time.
    fn wants_compact(&self, state: &State, is_compact: bool) -> bool {
        let factor = if is_compact { 2 } else { 1 };
        self.ruleset.config.is_compact(state.service_count() * factor, state.endpoint_count() * factor)
    }

    fn render(&self, state: &State, node: &NodeFacts, key: &Arc<ServiceKey>) -> ServiceRules {
        let Some(service) = state.entry(key).and_then(|entry| entry.service()) else { return ServiceRules::default() };
        let views = service_views(state, key, self.ruleset.config.family, node);
        let Ruleset { config, dispatch, render_port, .. } = &*self.ruleset;
        let mut rules = ServiceRules::of_ports(config, self.dispatch.is_compact(), &views, *render_port);
        let accepts_health_checks = dispatch.contains(&DispatchChain::FilterNodePorts);
        if accepts_health_checks && service.has_health_check_node_port() && !views.is_empty() {
            rules.dispatch.push(health_check_line(service));
        }
        rules
    }

    /// Writes a service to `script`: the chains that differ from the programmed chains, and the
    /// dispatch lines. Puts the chains that the service no longer needs into `stale`. Returns what
    /// was programmed before.
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
            old_lines = Some(self.dispatch.lines(key, &old.dispatch));
            if rejects_more(&rules.dispatch, &old.dispatch) {
                script.put_filter_first();
            }
            self.dispatch.remove(key, &old.dispatch);
            self.dispatch.insert(key, rules.dispatch);
        }
        if !chains.is_empty() || !dispatch.is_empty() {
            self.tally.add(tally);
            let programmed = ProgrammedRules { chains: chains.into(), dispatch, dispatch_hash, tally };
            self.programmed.insert(Arc::clone(key), programmed);
        }
        Before { programmed: old, lines: old_lines }
    }

    /// Inserts missing jumps at the head of the built-in chains, and deletes jumps to chains of
    /// Headgate that are not wanted. Existing jumps keep their position. If the jumps of a built-in
    /// chain are in the wrong order, all jumps of that chain are deleted and inserted again.
    fn write_jumps(&self, table: RulesTable, existing: &ExistingRules, script: &mut Script) {
        let wanted: Vec<_> = self.jumps_of(table).collect();
        let unwanted = existing.jumps_to_ours(table);
        for (chain, rule) in unwanted.filter(|(c, r)| !wanted.iter().any(|jump| jump.from == *c && jump.rule == *r)) {
            script.delete_rule(table, chain, rule);
        }
        for (chain, wanted) in by_chain(&wanted) {
            let present = existing.found_in(chain, &wanted);
            let missing = wanted.iter().copied().filter(|rule| !present.contains(rule));
            let missing: Vec<&str> = missing.collect();
            let is_in_order = [&missing[..], &present].concat() == wanted;
            if !is_in_order {
                present.iter().for_each(|rule| script.delete_rule(table, chain, rule));
            }
            let inserted = if is_in_order { missing } else { wanted };
            inserted.iter().rev().for_each(|rule| script.insert_first(table, chain, rule));
        }
    }

    /// Deletes the chains that are not wanted. A chain in `undeletable` is only emptied while
    /// foreign rules jump to it. The kernel would reject its deletion, and the agent would have to
    /// try again in smaller scripts.
    fn delete_stale(
        &mut self,
        table: RulesTable,
        existing: &ExistingRules,
        undeletable: &BTreeSet<(RulesTable, String)>,
        script: &mut Script,
    ) {
        let wanted = self.wanted_chains(table);
        let stale: BTreeSet<&String> = existing.chains.keys().filter(|name| !wanted.contains(*name)).collect();
        for name in stale {
            let known = (table, name.clone());
            if existing.referenced.contains_key(name) && undeletable.contains(&known) {
                if !existing.is_undeletable_and_empty(name) {
                    script.write_chain(table, name, "");
                }
                self.undeletable.insert(known);
            } else {
                script.delete_chain(table, name);
            }
        }
    }

    /// Records that the kernel refused to delete a chain, now empty. False if that was known.
    pub fn note_undeletable(&mut self, table: RulesTable, name: &str) -> bool {
        self.undeletable.insert((table, name.to_owned()))
    }

    /// Returns the names of all programmed chains of a table, in linear time.
    fn wanted_chains(&self, table: RulesTable) -> BTreeSet<String> {
        let fixed = self.fixed_chains(self.dispatch.is_compact()).filter(|chain| chain.table == table);
        let mut wanted: BTreeSet<String> = fixed.map(|chain| chain.name.to_owned()).collect();
        let dispatch = self.dispatch.chains().filter(|chain| chain.table() == table);
        wanted.extend(dispatch.map(|chain| chain.name().to_owned()));
        let groups = self.dispatch.group_chains().filter(|(of, _)| *of == table);
        wanted.extend(groups.map(|(_, name)| name.to_string()));
        if table == RulesTable::Nat {
            let own = self.programmed.values().flat_map(|programmed| programmed.chains.iter());
            wanted.extend(own.map(|(name, _)| name.to_string()));
        }
        wanted
    }

    /// Returns the chains and jumps, without rules, of a kernel that nobody else changed.
    fn expected(&self) -> ExistingTables {
        let mut expected = ExistingTables::default();
        for table in RulesTable::ALL {
            let base_rules = self.jumps_of(table).map(|jump| format!("{} {}", jump.from, jump.rule)).collect();
            let left = self.undeletable.iter().filter(|(of, _)| *of == table).map(|(_, name)| name.clone());
            let referenced = left.clone().map(|name| (name, String::new())).collect();
            let chains = self.wanted_chains(table).into_iter().chain(left).map(|name| (name, None)).collect();
            expected.set(table, ExistingRules { chains, base_rules, referenced, prefix_length: None });
        }
        expected
    }
}

/// Returns for each built-in chain the rules of its jumps, in order.
fn by_chain<'a>(jumps: &[&'a Jump]) -> impl Iterator<Item = (&'static str, Vec<&'a str>)> {
    BASE_CHAINS.into_iter().map(|chain| {
        let of_chain = jumps.iter().filter(|jump| jump.from == chain);
        (chain, of_chain.map(|jump| jump.rule.as_str()).collect())
    })
}

/// True if the new lines reject or drop packets that the old lines do not match.
fn rejects_more(new: &[DispatchLine], old: &[(DispatchChain, Selector)]) -> bool {
    let may_reject = |chain: DispatchChain| chain.table() == RulesTable::Filter && !chain.is_hairpin();
    new.iter().any(|line| may_reject(line.chain) && !old.contains(&(line.chain, line.selector)))
}

fn hash_of(value: &impl std::hash::Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
