//! The state of the fake kernel.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    net::IpAddr,
    sync::Arc,
};

use super::Misses;
use crate::{Bytes, Chain, Element, ElementData, Expression, Rule, Set, SetName, Table, TableName, Value};

/// The key of a stored element. It distinguishes kinds of elements that may have the same key
/// bytes.
pub(super) type ElementKey = (bool, Value, bool, Option<Value>);

pub(super) fn element_key(element: &Element) -> ElementKey {
    (element.catch_all, element.key.clone(), element.interval_end, element.key_end.clone())
}

/// Elements of a set.
pub(super) type Contents = BTreeMap<ElementKey, Stored>;

/// An element and the time of its expiry.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub(super) element: Element,
    pub(super) expires_at_ms: Option<u64>,
    /// The tokens of the element's limit in nanoseconds, and the time at which they were counted in
    /// milliseconds. `None` before the first use.
    pub(super) tokens: Option<(u64, u64)>,
}

impl Stored {
    pub(super) fn new(element: Element, expires_at_ms: Option<u64>) -> Self {
        Self { element, expires_at_ms, tokens: None }
    }

    /// Whether the limit of the element admits a packet. Like `net/netfilter/nft_limit.c`, a packet
    /// costs the time in which one more is admitted. Limits of bytes admit all packets.
    pub(super) fn is_within_limit(&mut self, now_ms: u64) -> bool {
        let limit = self.element.expressions.iter().find(|found| matches!(found, Expression::Limit { .. }));
        let Some(Expression::Limit { rate, seconds, burst, bytes: Bytes::Ignored, inverted }) = limit else {
            return true;
        };
        let cost_ns = seconds.saturating_mul(1_000_000_000) / rate;
        let most_ns = cost_ns.saturating_mul(u64::from(*burst));
        let (tokens_ns, at_ms) = self.tokens.unwrap_or((most_ns, now_ms));
        let tokens_ns = tokens_ns.saturating_add((now_ms - at_ms).saturating_mul(1_000_000)).min(most_ns);
        let left_ns = tokens_ns.checked_sub(cost_ns);
        self.tokens = Some((left_ns.unwrap_or(tokens_ns), now_ms));
        left_ns.is_some() != *inverted
    }
}

#[derive(Debug, Clone)]
pub(super) struct FakeTable {
    pub(super) table: Table,
    pub(super) handle: u64,
    pub(super) chains: Vec<FakeChain>,
    pub(super) sets: Vec<FakeSet>,
}

#[derive(Debug, Clone)]
pub(super) struct FakeChain {
    pub(super) chain: Chain,
    pub(super) handle: u64,
    pub(super) rules: Vec<(u64, Arc<Rule>)>,
}

#[derive(Debug, Clone)]
pub(super) struct FakeSet {
    pub(super) set: Set,
    /// The handle, which is also the key of the set's contents.
    pub(super) handle: u64,
    /// The ID in the transaction that creates the set.
    pub(super) id: Option<u32>,
}

impl FakeTable {
    pub(super) fn chain(&self, name: &str) -> Option<&FakeChain> {
        self.chains.iter().find(|chain| chain.chain.name == name)
    }

    pub(super) fn set(&self, name: &str) -> Option<&FakeSet> {
        self.sets.iter().find(|set| set.set.name == name)
    }

    /// Returns the set with this name, or else the set with this ID in the same transaction.
    pub(super) fn set_of(&self, name: &SetName) -> Option<&FakeSet> {
        let by_id = |id| self.sets.iter().find(|set| set.id == Some(id));
        self.set(&name.name).or_else(|| name.id.and_then(by_id))
    }

    /// The number of rules that refer to a set.
    pub(super) fn uses_of_set(&self, set: &FakeSet) -> usize {
        let expressions = self.chains.iter().flat_map(|chain| &chain.rules).flat_map(|(_, rule)| &rule.expressions);
        let named = expressions.filter_map(set_name);
        named.filter(|name| self.set_of(name).is_some_and(|found| found.handle == set.handle)).count()
    }
}

/// The set that an expression refers to.
pub(super) fn set_name(expression: &Expression) -> Option<&SetName> {
    match expression {
        Expression::Lookup { set, .. } => Some(set),
        Expression::DynamicSet(change) => Some(&change.set),
        _ => None,
    }
}

/// The chain to which a verdict expression jumps. `None` for all other expressions.
pub(super) fn jump(expression: &Expression) -> Option<&str> {
    match expression {
        Expression::Verdict(verdict) => verdict.chain(),
        _ => None,
    }
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) tables: Vec<FakeTable>,
    pub(super) contents: HashMap<u64, Contents>,
    pub(super) generation: u32,
    pub(super) now_ms: u64,
    pub(super) local_addresses: HashSet<IpAddr>,
    pub(super) random: VecDeque<u32>,
    pub(super) misses: Misses,
    /// Keys that the last transaction deleted and added again, by the handle of the set.
    pub(super) replaced: HashSet<(u64, ElementKey)>,
    /// The state of `numgen inc`, by the handle of the rule and the position of the expression in
    /// the rule.
    pub(super) counters: HashMap<(u64, usize), u32>,
    handles: u64,
    ports: u32,
}

impl State {
    pub(super) fn new_port(&mut self) -> u32 {
        self.ports += 1;
        self.ports
    }

    pub(super) fn new_handle(&mut self) -> u64 {
        self.handles += 1;
        self.handles
    }

    pub(super) fn table(&self, name: &TableName) -> Option<&FakeTable> {
        self.tables.iter().find(|table| table.table.name == *name)
    }

    pub(super) fn table_mut(&mut self, name: &TableName) -> Option<&mut FakeTable> {
        self.tables.iter_mut().find(|table| table.table.name == *name)
    }

    /// Deletes or orphans the tables of a connection that closes.
    pub(super) fn release(&mut self, port: u32) {
        let owned = |table: &FakeTable| table.table.owner_port == Some(port);
        if self.tables.iter().any(|table| owned(table) && !table.table.persistent) {
            self.generation = next_generation(self.generation);
        }
        self.tables.retain(|table| !owned(table) || table.table.persistent);
        for table in self.tables.iter_mut().filter(|table| owned(table)) {
            table.table.owner_port = None;
            table.table.owned = false;
        }
        self.forget_contents();
    }

    /// Drops the contents of deleted sets.
    pub(super) fn forget_contents(&mut self) {
        let kept: HashSet<u64> = self.tables.iter().flat_map(|table| &table.sets).map(|set| set.handle).collect();
        self.contents.retain(|handle, _| kept.contains(handle));
    }

    pub(super) fn advance_ms(&mut self, milliseconds: u64) {
        self.now_ms += milliseconds;
        let now = self.now_ms;
        for contents in self.contents.values_mut() {
            contents.retain(|_, stored| stored.expires_at_ms.is_none_or(|at| at > now));
        }
    }

    pub(super) fn contents_of(&self, set: &FakeSet) -> impl Iterator<Item = &Stored> {
        self.contents.get(&set.handle).into_iter().flat_map(BTreeMap::values)
    }

    pub(super) fn listed_elements(&self, set: &FakeSet) -> Vec<Element> {
        let listed = self.contents_of(set).map(|stored| {
            let expires_in_ms = stored.expires_at_ms.map(|at| at.saturating_sub(self.now_ms));
            // The kernel omits a timeout that equals the timeout of the set.
            let timeout_ms = stored.element.timeout_ms.filter(|timeout| set.set.timeout_ms != Some(*timeout));
            Element { expires_in_ms, timeout_ms, ..stored.element.clone() }
        });
        listed.collect()
    }

    /// The number of rules and elements that jump to a chain.
    pub(super) fn jumps_to(&self, table: &FakeTable, chain: &str) -> usize {
        let rules = table.chains.iter().flat_map(|chain| &chain.rules);
        let direct = rules.flat_map(|(_, rule)| &rule.expressions).filter(|found| jump(found) == Some(chain)).count();
        let elements = table.sets.iter().filter(|set| set.set.data == Some(crate::SetData::Verdicts));
        let jumps = |stored: &&Stored| match &stored.element.data {
            Some(ElementData::Verdict(verdict)) => verdict.chain() == Some(chain),
            _ => false,
        };
        direct + elements.flat_map(|set| self.contents_of(set)).filter(jumps).count()
    }
}

/// Returns the generation after `generation`. Generation 0 does not exist.
pub(super) fn next_generation(generation: u32) -> u32 {
    generation.checked_add(1).unwrap_or(1)
}
