//! Execution of transactions. Messages are applied in order. If a message is rejected, all messages
//! are undone.

use std::{collections::HashSet, sync::Arc};

use headgate_netlink::{Malformed, Refusal, Request};

use super::{
    elements,
    expressions::check_rule,
    state::{Contents, ElementKey, FakeChain, FakeSet, FakeTable, State, Stored, next_generation},
    validate::validate,
};
use crate::{
    BaseChain, Chain, ChainType, Hook, Rule, RulePosition, Set, Table, TableName,
    wire::{self, APPEND, CREATE, EXCLUSIVE, REPLACE, decode, message},
};

/// Why a message is rejected: the error number and the index of the faulty element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rejection {
    pub(super) code: i32,
    pub(super) element: Option<usize>,
}

pub(super) type Applied = Result<(), Rejection>;

/// A rejection with an error number.
pub(super) fn reject<T>(code: i32) -> Result<T, Rejection> {
    Err(Rejection { code, element: None })
}

impl From<Malformed> for Rejection {
    fn from(_: Malformed) -> Self {
        Self { code: libc::EINVAL, element: None }
    }
}

/// The state of a running transaction.
pub(super) struct Running<'a> {
    pub(super) state: &'a mut State,
    pub(super) port: u32,
    undo: Vec<Undo>,
    deleted: HashSet<(u64, ElementKey)>,
    replaced: HashSet<(u64, ElementKey)>,
    pub(super) needs_validation: bool,
}

enum Undo {
    Element(Box<(u64, ElementKey, Option<Stored>)>),
    Contents(u64, Contents),
}

impl Running<'_> {
    pub(super) fn put_element(&mut self, set: u64, key: ElementKey, stored: Stored) {
        if self.deleted.contains(&(set, key.clone())) {
            self.replaced.insert((set, key.clone()));
        }
        let before = self.state.contents.entry(set).or_default().insert(key.clone(), stored);
        self.undo.push(Undo::Element(Box::new((set, key, before))));
    }

    pub(super) fn take_element(&mut self, set: u64, key: &ElementKey) -> bool {
        let Some(before) = self.state.contents.get_mut(&set).and_then(|contents| contents.remove(key)) else {
            return false;
        };
        self.deleted.insert((set, key.clone()));
        self.undo.push(Undo::Element(Box::new((set, key.clone(), Some(before)))));
        true
    }

    fn take_contents(&mut self, set: u64) {
        if let Some(contents) = self.state.contents.remove(&set) {
            self.undo.push(Undo::Contents(set, contents));
        }
    }
}

/// Executes the requests of a connection completely or not at all. On failure, returns the rejected
/// messages.
pub(super) fn commit(state: &mut State, port: u32, requests: &[Request]) -> Vec<(usize, Refusal)> {
    if requests.is_empty() {
        return Vec::new();
    }
    match attempt(state, port, requests, false) {
        // Like the kernel, repeat the transaction to find the faulty message.
        Err(refused) if refused.is_empty() => attempt(state, port, requests, true).err().unwrap_or_default(),
        result => result.err().unwrap_or_default(),
    }
}

/// Applies the requests. With `each`, jumps are validated after every message. Without `each`, they
/// are validated at the end. An error without rejected messages means that the validation at the
/// end failed.
fn attempt(state: &mut State, port: u32, requests: &[Request], each: bool) -> Result<(), Vec<(usize, Refusal)>> {
    let before = state.tables.clone();
    let mut running = Running {
        state,
        port,
        undo: Vec::new(),
        deleted: HashSet::new(),
        replaced: HashSet::new(),
        needs_validation: false,
    };
    let mut refused = Vec::new();
    for (index, request) in requests.iter().enumerate() {
        let mut applied = running.apply(request);
        if each && applied.is_ok() && running.needs_validation {
            applied = validate(running.state);
        }
        if let Err(Rejection { code, element }) = applied {
            let offset_bytes = element.and_then(|element| decode::offset_of_element(request.payload(), element));
            refused.push((index, Refusal { offset_bytes, ..Refusal::of_code(code) }));
        }
    }
    if refused.is_empty() {
        let is_unbound =
            |table: &FakeTable| table.sets.iter().any(|set| set.set.flags.anonymous && table.uses_of_set(set) == 0);
        if running.state.tables.iter().any(is_unbound) {
            // The kernel reports errors of the validation at the end for the first message.
            refused.push((0, Refusal::of_code(libc::EINVAL)));
        } else if !running.needs_validation || validate(running.state).is_ok() {
            running.finish();
            return Ok(());
        }
    }
    running.abort(before);
    Err(refused)
}

impl Running<'_> {
    fn finish(self) {
        let Self { state, replaced, .. } = self;
        state.replaced = replaced;
        for set in state.tables.iter_mut().flat_map(|table| &mut table.sets) {
            set.id = None;
        }
        state.forget_contents();
        state.generation = next_generation(state.generation);
    }

    fn abort(self, tables: Vec<FakeTable>) {
        let Self { state, undo, .. } = self;
        for step in undo.into_iter().rev() {
            match step {
                Undo::Element(step) => {
                    let (set, key, before) = *step;
                    let contents = state.contents.entry(set).or_default();
                    match before {
                        Some(before) => contents.insert(key, before),
                        None => contents.remove(&key),
                    };
                }
                Undo::Contents(set, contents) => {
                    state.contents.insert(set, contents);
                }
            }
        }
        state.tables = tables;
        state.forget_contents();
    }

    fn apply(&mut self, request: &Request) -> Applied {
        let (flags, payload) = (request.flags(), request.payload());
        match wire::command(request.kind()).unwrap_or(u8::MAX) {
            message::NEW_TABLE => self.new_table(flags, decode::new_table(payload)?.object),
            message::DELETE_TABLE => self.delete_table(&decode::new_table(payload)?.object.name),
            message::NEW_CHAIN => self.new_chain(flags, decode::new_chain(payload)?.object),
            message::DELETE_CHAIN => {
                let chain = decode::new_chain(payload)?.object;
                self.delete_chain(&chain.table, &chain.name)
            }
            message::NEW_RULE => self.new_rule(flags, decode::rule_part(payload)?, decode::rule_position(payload)?),
            message::DELETE_RULE => self.delete_rules(&decode::rule_part(payload)?),
            message::NEW_SET => self.new_set(flags, decode::new_set(payload)?.object, decode::set_id(payload)?),
            message::DELETE_SET => {
                let set = decode::new_set(payload)?.object;
                self.delete_set(&set.table, &set.name)
            }
            message::NEW_ELEMENTS => elements::add(self, flags, decode::elements(payload)?),
            message::DELETE_ELEMENTS => elements::delete(self, decode::elements(payload)?),
            _ => reject(libc::EINVAL),
        }
    }

    /// The table with a name, if the connection may change it.
    pub(super) fn table(&mut self, name: &TableName) -> Result<&mut FakeTable, Rejection> {
        let port = self.port;
        let Some(table) = self.state.table_mut(name) else { return reject(libc::ENOENT) };
        if table.table.owned && table.table.owner_port != Some(port) {
            return reject(libc::EPERM);
        }
        Ok(table)
    }

    fn new_table(&mut self, flags: u16, mut wanted: Table) -> Applied {
        let port = self.port;
        wanted.owner_port = wanted.owned.then_some(port);
        if let Some(found) = self.state.table_mut(&wanted.name) {
            let table = &mut found.table;
            let is_orphan = table.persistent && !table.owned;
            if table.owned && table.owner_port != Some(port) {
                return reject(libc::EPERM);
            }
            if flags & EXCLUSIVE != 0 {
                return reject(libc::EEXIST);
            }
            let keeps_owner = wanted.owned == table.owned || wanted.owned && is_orphan;
            if !keeps_owner || wanted.persistent != table.persistent {
                return reject(libc::EOPNOTSUPP);
            }
            table.owned = wanted.owned;
            table.owner_port = wanted.owner_port;
            table.dormant = wanted.dormant;
            return Ok(());
        }
        let handle = self.state.new_handle();
        self.state.tables.push(FakeTable { table: wanted, handle, chains: Vec::new(), sets: Vec::new() });
        Ok(())
    }

    fn delete_table(&mut self, name: &TableName) -> Applied {
        let sets: Vec<u64> = self.table(name)?.sets.iter().map(|set| set.handle).collect();
        sets.into_iter().for_each(|set| self.take_contents(set));
        self.state.tables.retain(|table| table.table.name != *name);
        Ok(())
    }

    fn new_chain(&mut self, flags: u16, wanted: Chain) -> Applied {
        let table = self.table(&wanted.table)?;
        if let Some(found) = table.chains.iter_mut().find(|chain| chain.chain.name == wanted.name) {
            if flags & EXCLUSIVE != 0 {
                return reject(libc::EEXIST);
            }
            return match (&mut found.chain.base, wanted.base) {
                (_, None) => Ok(()),
                (None, Some(_)) => reject(libc::EOPNOTSUPP),
                (Some(base), Some(wanted)) => {
                    require((wanted.hook, wanted.priority) == (base.hook, base.priority), libc::EOPNOTSUPP)?;
                    require(wanted.kind == base.kind, libc::EEXIST)?;
                    base.policy = wanted.policy;
                    Ok(())
                }
            };
        }
        if let Some(base) = wanted.base {
            check_base(&base)?;
            self.needs_validation = true;
        }
        let handle = self.state.new_handle();
        let chain = FakeChain { chain: wanted, handle, rules: Vec::new() };
        let name = chain.chain.table.clone();
        self.table(&name)?.chains.push(chain);
        Ok(())
    }

    fn delete_chain(&mut self, table: &TableName, name: &str) -> Applied {
        require(self.table(table)?.chain(name).is_some(), libc::ENOENT)?;
        // Rules of the chain itself also count if they jump to it.
        let jumps = self.state.table(table).map_or(0, |found| self.state.jumps_to(found, name));
        require(jumps == 0, libc::EBUSY)?;
        self.table(table)?.chains.retain(|chain| chain.chain.name != name);
        self.delete_unbound_sets(table);
        Ok(())
    }

    fn new_rule(&mut self, flags: u16, part: decode::RulePart, position: Option<u64>) -> Applied {
        let place = match (part.handle, position) {
            (Some(handle), _) if flags & REPLACE != 0 => RulePosition::InsteadOf(handle),
            _ if flags & CREATE == 0 => return reject(libc::EINVAL),
            (_, Some(position)) if flags & APPEND != 0 => RulePosition::Behind(position),
            (_, Some(position)) => RulePosition::Before(position),
            (_, None) if flags & APPEND != 0 => RulePosition::Last,
            (_, None) => RulePosition::First,
        };
        let table = self.table(&part.table)?;
        let Some(chain) = part.chain.filter(|name| table.chain(name).is_some()) else { return reject(libc::ENOENT) };
        let find = |handle: u64| {
            let rules = table.chain(&chain).map(|chain| chain.rules.as_slice()).unwrap_or_default();
            rules.iter().position(|(found, _)| *found == handle)
        };
        let at = match place {
            RulePosition::Last => table.chain(&chain).map(|chain| chain.rules.len()),
            RulePosition::First => Some(0),
            RulePosition::Behind(handle) => find(handle).map(|at| at + 1),
            RulePosition::Before(handle) | RulePosition::InsteadOf(handle) => find(handle),
        };
        let Some(at) = at else { return reject(libc::ENOENT) };
        let mut rule = Rule {
            table: part.table.clone(),
            chain: chain.clone(),
            expressions: part.expressions,
            user_data: part.user_data,
        };
        check_rule(table, &mut rule)?;
        let handle = self.state.new_handle();
        let table = self.table(&part.table)?;
        if let Some(found) = table.chains.iter_mut().find(|found| found.chain.name == chain) {
            if matches!(place, RulePosition::InsteadOf(_)) {
                found.rules.remove(at);
            }
            found.rules.insert(at, (handle, Arc::new(rule)));
        }
        self.needs_validation = true;
        self.delete_unbound_sets(&part.table);
        Ok(())
    }

    fn delete_rules(&mut self, part: &decode::RulePart) -> Applied {
        let table = self.table(&part.table)?;
        let is_missing = |name: &String| table.chain(name).is_none();
        if part.chain.as_ref().is_some_and(is_missing) {
            return reject(libc::ENOENT);
        }
        let is_wanted = |chain: &&mut FakeChain| part.chain.as_ref().is_none_or(|name| chain.chain.name == *name);
        let mut deleted = false;
        for chain in table.chains.iter_mut().filter(is_wanted) {
            let count = chain.rules.len();
            chain.rules.retain(|(handle, _)| part.handle.is_some_and(|wanted| wanted != *handle));
            deleted |= chain.rules.len() < count;
        }
        if part.handle.is_some() && !deleted {
            return reject(libc::ENOENT);
        }
        self.delete_unbound_sets(&part.table);
        Ok(())
    }

    /// Deletes anonymous sets that no rule uses any more. Sets that this transaction created are
    /// kept, because a later rule may use them.
    fn delete_unbound_sets(&mut self, name: &TableName) {
        let Some(table) = self.state.table_mut(name) else { return };
        let is_unused = |table: &FakeTable, set: &FakeSet| {
            set.set.flags.anonymous && set.id.is_none() && table.uses_of_set(set) == 0
        };
        let all: Vec<u64> = table.sets.iter().filter(|set| is_unused(table, set)).map(|set| set.handle).collect();
        table.sets.retain(|set| !all.contains(&set.handle));
        all.into_iter().for_each(|set| self.take_contents(set));
    }

    fn new_set(&mut self, flags: u16, mut wanted: Set, id: Option<u32>) -> Applied {
        let table = self.table(&wanted.table)?;
        let is_wanted = |set: &&mut FakeSet| set.set.name == wanted.name && !wanted.flags.anonymous;
        if let Some(FakeSet { set, .. }) = table.sets.iter_mut().find(is_wanted) {
            // Since Linux 6.5, size, timeout and interval of removal can change. All other
            // properties must be equal.
            let (size, timeout_ms) = (wanted.size.or(set.size), wanted.timeout_ms.or(set.timeout_ms));
            let gc_interval_ms = wanted.gc_interval_ms.or(set.gc_interval_ms);
            let changed = Set { size, timeout_ms, gc_interval_ms, ..set.clone() };
            let is_same =
                Set { size, timeout_ms, gc_interval_ms, user_data: set.user_data.clone(), ..wanted } == changed;
            require(flags & EXCLUSIVE == 0 && is_same, libc::EEXIST)?;
            *set = changed;
            return Ok(());
        }
        elements::check_set(&wanted)?;
        require(flags & CREATE != 0, libc::ENOENT)?;
        if wanted.flags.anonymous {
            let names = (0..).map(|number: u32| wanted.name.replace("%d", &number.to_string()));
            let free = names.into_iter().find(|name| table.set(name).is_none());
            wanted.name = free.unwrap_or_default();
        }
        let handle = self.state.new_handle();
        let name = wanted.table.clone();
        self.table(&name)?.sets.push(FakeSet { set: wanted, handle, id });
        Ok(())
    }

    fn delete_set(&mut self, table: &TableName, name: &str) -> Applied {
        let found = self.table(table)?;
        let Some(set) = found.set(name) else { return reject(libc::ENOENT) };
        require(found.uses_of_set(set) == 0, libc::EBUSY)?;
        let handle = set.handle;
        found.sets.retain(|set| set.handle != handle);
        self.take_contents(handle);
        Ok(())
    }
}

pub(super) fn require(holds: bool, code: i32) -> Applied {
    if holds { Ok(()) } else { reject(code) }
}

/// Checks whether a base chain of this type may use its hook.
fn check_base(base: &BaseChain) -> Applied {
    /// `NF_IP_PRI_CONNTRACK`: address translation needs connection tracking.
    const CONNTRACK: i32 = -200;
    let fits = match base.kind {
        ChainType::Filter => true,
        ChainType::Nat => !matches!(base.hook, Hook::Forward | Hook::Other(_)) && base.priority > CONNTRACK,
        ChainType::Route => base.hook == Hook::Output,
    };
    require(fits, libc::EOPNOTSUPP)
}
