//! Walks of packets through chains.

use std::{collections::HashMap, sync::Arc};

use super::{
    Connection, Fate, Hook, Misses, Packet, Walk,
    evaluate::{Flow, evaluate},
    packet::Action,
    state::{ElementKey, FakeSet, State, Stored},
};
use crate::{BaseChain, ChainType, Expression, Family, Policy, Reject, Rule, TableName, Value, Verdict};

/// The state of a walk.
pub(super) struct Walker<'a> {
    pub(super) state: &'a mut State,
    pub(super) packet: &'a mut Packet,
    pub(super) actions: Vec<Action>,
    pub(super) registers: [u8; 64],
    chains: Vec<String>,
    missed: HashMap<(u64, ElementKey), u32>,
}

/// How a chain ends.
enum End {
    Accept,
    Drop,
    Reject(Reject),
    Return,
}

pub(super) fn walk(state: &mut State, hook: Hook, packet: &mut Packet) -> Walk {
    let own = if packet.tuple.source.0.is_ipv4() { Family::Ip } else { Family::Ip6 };
    let mut bases: Vec<(BaseChain, TableName, String)> = Vec::new();
    let tables = state.tables.iter().filter(|table| {
        !table.table.dormant && (table.table.name.family == Family::Inet || table.table.name.family == own)
    });
    for chain in tables.flat_map(|table| &table.chains) {
        if let Some(base) = chain.chain.base.filter(|base| base.hook == hook) {
            bases.push((base, chain.chain.table.clone(), chain.chain.name.clone()));
        }
    }
    bases.sort_by_key(|(base, ..)| base.priority);
    let (actions, chains) = (Vec::new(), Vec::new());
    let mut walker = Walker { state, packet, actions, registers: [0; 64], chains, missed: HashMap::new() };
    let mut fate = Fate::Accepted;
    for (base, table, chain) in bases {
        if base.kind == ChainType::Nat && !walker.may_translate(hook) {
            continue;
        }
        fate = match walker.chain(&table, &chain) {
            End::Accept => Fate::Accepted,
            End::Drop => Fate::Dropped,
            End::Reject(how) => Fate::Rejected(how),
            End::Return if base.policy == Policy::Drop => Fate::Dropped,
            End::Return => Fate::Accepted,
        };
        if fate != Fate::Accepted {
            break;
        }
    }
    let Walker { actions, chains, .. } = walker;
    Walk { fate, actions, chains }
}

impl Walker<'_> {
    /// Whether NAT chains process the packet. NAT chains process the first packet of a connection
    /// until one chain has translated the address that this hook can translate.
    fn may_translate(&self, hook: Hook) -> bool {
        let done = match hook {
            Hook::Prerouting | Hook::Output => Connection::DESTINATION_TRANSLATED,
            _ => Connection::SOURCE_TRANSLATED,
        };
        let connection = self.packet.connection.as_ref();
        connection.is_some_and(|found| found.state & Connection::NEW != 0 && found.status & done == 0)
    }

    fn rules(&self, table: &TableName, chain: &str) -> Vec<(u64, Arc<Rule>)> {
        let found = self.state.table(table).and_then(|table| table.chain(chain));
        found.map(|chain| chain.rules.clone()).unwrap_or_default()
    }

    fn chain(&mut self, table: &TableName, name: &str) -> End {
        self.chains.push(name.to_owned());
        for (handle, rule) in self.rules(table, name) {
            match self.rule(table, handle, &rule) {
                Flow::Next | Flow::Break | Flow::Verdict(Verdict::Continue | Verdict::Other(_)) => {}
                Flow::Verdict(Verdict::Accept) => return End::Accept,
                Flow::Verdict(Verdict::Drop) => return End::Drop,
                Flow::Reject(how) => return End::Reject(how),
                Flow::Verdict(Verdict::Return) => return End::Return,
                Flow::Verdict(Verdict::Goto(next)) => return self.chain(table, &next),
                Flow::Verdict(Verdict::Jump(next)) => match self.chain(table, &next) {
                    End::Return => {}
                    end => return end,
                },
            }
        }
        End::Return
    }

    fn rule(&mut self, table: &TableName, handle: u64, rule: &Rule) -> Flow {
        self.registers = [0; 64];
        for (place, expression) in rule.expressions.iter().enumerate() {
            if let Expression::Counter { .. } = expression {
                self.count(table, handle, place);
                continue;
            }
            match evaluate(self, table, (handle, place), expression) {
                Flow::Next => {}
                end => return end,
            }
        }
        Flow::Next
    }

    fn count(&mut self, table: &TableName, handle: u64, place: usize) {
        let length = u64::from(self.packet.length);
        let Some(table) = self.state.table_mut(table) else { return };
        let mut rules = table.chains.iter_mut().flat_map(|chain| &mut chain.rules);
        if let Some((_, rule)) = rules.find(|(found, _)| *found == handle)
            && let Some(Expression::Counter { packets, bytes }) = Arc::make_mut(rule).expressions.get_mut(place)
        {
            *packets += 1;
            *bytes += length;
        }
    }

    /// Returns the element that matches a key. If no element matches, or if the lookup must miss
    /// the element, returns the catch-all element of the set, if any.
    pub(super) fn find(&mut self, set: &FakeSet, key: &Value) -> Option<Stored> {
        let contents = self.state.contents.get(&set.handle)?;
        let exact: ElementKey = (false, key.clone(), false, None);
        let found = if set.set.flags.concatenated_ranges {
            contents.values().find(|stored| holds(&set.set.field_lengths, stored, key))
        } else if set.set.flags.interval {
            let before = contents.range(..=(false, key.clone(), true, None)).next_back();
            let at_key = contents.get(&exact);
            at_key.or_else(|| before.map(|(_, stored)| stored).filter(|stored| !stored.element.interval_end))
        } else {
            contents.get(&exact)
        };
        let found = found.cloned().filter(|_| !self.misses((set.handle, exact)));
        let catch_all =
            || self.state.contents.get(&set.handle)?.values().find(|stored| stored.element.catch_all).cloned();
        let found = found.or_else(catch_all)?;
        self.count_element(set, &found);
        Some(found)
    }

    fn misses(&mut self, key: (u64, ElementKey)) -> bool {
        if !self.state.replaced.contains(&key) {
            return false;
        }
        let most = match self.state.misses {
            Misses::Never => 0,
            Misses::First(most) => most,
            Misses::Always => u32::MAX,
        };
        let missed = self.missed.entry(key).or_default();
        let misses = *missed < most;
        *missed += u32::from(misses);
        misses
    }

    /// Updates the counters of an element that a lookup has found.
    fn count_element(&mut self, set: &FakeSet, found: &Stored) {
        let length = u64::from(self.packet.length);
        let key = super::state::element_key(&found.element);
        let contents = self.state.contents.get_mut(&set.handle);
        for expression in
            contents.and_then(|all| all.get_mut(&key)).into_iter().flat_map(|stored| &mut stored.element.expressions)
        {
            if let Expression::Counter { packets, bytes } = expression {
                *packets += 1;
                *bytes += length;
            }
        }
    }
}

/// Whether each part of a key lies in the range of an element.
fn holds(lengths: &[u32], stored: &Stored, key: &Value) -> bool {
    let end = stored.element.key_end.as_ref().unwrap_or(&stored.element.key);
    let mut at = 0;
    lengths.iter().all(|length| {
        let length = usize::try_from(*length).unwrap_or_default();
        let part = |value: &Value| value.0.get(at..at + length).map(<[u8]>::to_vec);
        let inside = part(&stored.element.key) <= part(key) && part(key) <= part(end);
        at += length.next_multiple_of(4);
        inside && !stored.element.catch_all
    })
}
