//! A fake of nftables in memory, for tests. It decodes the same bytes as the kernel, executes a
//! transaction completely or not at all, and rejects what Linux 6.18 rejects. The tests of this
//! repository run the same cases against the fake and against a real kernel.
//!
//! [`FakeKernel::walk`] sends a packet through the rules of a hook.
//! [`FakeKernel::miss_replaced_keys`] makes lookups miss keys that the last transaction replaced.
//! In kernels before 6.17, lookups for packets that are processed during the transaction may miss
//! such keys.
//!
//! The fake differs from the kernel as follows:
//!
//! - Objects have other handles.
//! - Elements are listed in another order.
//! - Overlapping ranges of a single type may go undetected.
//! - Limits of rules always match; limits of elements count packets, not bytes.
//! - Translation to a range of ports or addresses selects the first port or address.
//! - Expressions that this crate does not know are accepted and end a rule.
//! - Verdicts that this crate does not know, such as `NF_QUEUE`, have no effect.

mod apply;
mod elements;
mod evaluate;
mod expressions;
mod hash;
mod packet;
mod state;
mod validate;
mod walk;

use std::{
    collections::HashSet,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

pub use packet::{Action, Connection, Fate, Packet, Tuple, Walk};

use headgate_netlink::Refusal;
use state::State;

use crate::{
    Chain, Element, Family, Generation, Hook, Kernel, Listed, NftablesError, Rule, Set, Table, TableName, Transaction,
    client::fault,
};

/// How many lookups per packet miss a key that the last transaction replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Misses {
    /// No lookup, as in kernels since 6.17.
    #[default]
    Never,
    /// The first N lookups of each key miss the key, and later lookups find the key. N is the
    /// value.
    First(u32),
    /// All lookups.
    Always,
}

/// A fake kernel, shared by its connections.
#[derive(Debug, Clone, Default)]
pub struct FakeKernel(Arc<Mutex<State>>);

impl FakeKernel {
    /// Creates a fake kernel without tables.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a connection.
    #[must_use]
    pub fn connect(&self) -> FakeNftables {
        FakeNftables { kernel: self.clone(), port: self.state().new_port() }
    }

    /// Advances the clock, so that elements expire.
    pub fn advance_ms(&self, milliseconds: u64) {
        self.state().advance_ms(milliseconds);
    }

    /// Sets the addresses that `fib` reports as local.
    pub fn set_local_addresses(&self, addresses: impl IntoIterator<Item = IpAddr>) {
        self.state().local_addresses = addresses.into_iter().collect::<HashSet<_>>();
    }

    /// Sets the next results of random numbers (`numgen random`, `meta random`), each over all 32
    /// bits. When no number is left, the result is 0.
    pub fn set_random_numbers(&self, numbers: impl IntoIterator<Item = u32>) {
        self.state().random = numbers.into_iter().collect();
    }

    /// Sets how many lookups per packet miss keys that the last transaction deleted and added
    /// again.
    pub fn miss_replaced_keys(&self, misses: Misses) {
        self.state().misses = misses;
    }

    /// Sends a packet through the base chains of a hook, in the order of their priorities. Address
    /// translation modifies the packet and its connection.
    pub fn walk(&self, hook: Hook, packet: &mut Packet) -> Walk {
        walk::walk(&mut self.state(), hook, packet)
    }
}

/// A connection to a [`FakeKernel`]. When it closes, its owned tables are deleted, or become
/// orphans if they are persistent.
#[derive(Debug)]
pub struct FakeNftables {
    kernel: FakeKernel,
    port: u32,
}

impl FakeNftables {
    /// The port of the connection.
    #[must_use]
    pub fn port(&self) -> u32 {
        self.port
    }
}

impl Drop for FakeNftables {
    fn drop(&mut self) {
        self.kernel.state().release(self.port);
    }
}

fn no_such() -> NftablesError {
    Refusal::of_code(libc::ENOENT).into()
}

impl Kernel for FakeNftables {
    fn generation(&mut self) -> Result<Generation, NftablesError> {
        Ok(Generation { id: self.kernel.state().generation, thread_id: None, thread_name: None })
    }

    fn commit(&mut self, transaction: &Transaction) -> Result<(), NftablesError> {
        let refused = apply::commit(&mut self.kernel.state(), self.port, transaction.requests());
        let faults: Vec<_> =
            refused.into_iter().map(|(message, refusal)| fault(transaction, Some(message), refusal)).collect();
        if faults.is_empty() { Ok(()) } else { Err(NftablesError::Refused(faults)) }
    }

    fn tables(&mut self, family: Option<Family>) -> Result<Vec<Listed<Table>>, NftablesError> {
        let state = self.kernel.state();
        let tables = state.tables.iter().filter(|table| family.is_none_or(|family| table.table.name.family == family));
        Ok(tables.map(|table| Listed { handle: table.handle, object: table.table.clone() }).collect())
    }

    fn chains(&mut self, table: &TableName) -> Result<Vec<Listed<Chain>>, NftablesError> {
        let state = self.kernel.state();
        let chains = state.table(table).into_iter().flat_map(|table| &table.chains);
        Ok(chains.map(|chain| Listed { handle: chain.handle, object: chain.chain.clone() }).collect())
    }

    fn rules(&mut self, table: &TableName, chain: Option<&str>) -> Result<Vec<Listed<Rule>>, NftablesError> {
        let state = self.kernel.state();
        let chains = state.table(table).into_iter().flat_map(|table| &table.chains);
        let wanted = chains.filter(|of| chain.is_none_or(|chain| of.chain.name == chain));
        let rules = wanted.flat_map(|chain| &chain.rules);
        Ok(rules.map(|(handle, rule)| Listed { handle: *handle, object: Rule::clone(rule) }).collect())
    }

    fn sets(&mut self, table: &TableName) -> Result<Vec<Listed<Set>>, NftablesError> {
        let state = self.kernel.state();
        let sets = &state.table(table).ok_or_else(no_such)?.sets;
        Ok(sets.iter().map(|set| Listed { handle: set.handle, object: set.set.clone() }).collect())
    }

    fn elements(&mut self, table: &TableName, set: &str) -> Result<Vec<Element>, NftablesError> {
        let state = self.kernel.state();
        let set = state.table(table).and_then(|table| table.set(set)).ok_or_else(no_such)?;
        Ok(state.listed_elements(set))
    }
}
