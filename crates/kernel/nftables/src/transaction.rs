//! Transactions: changes that the kernel executes all together or not at all.

use headgate_netlink::Request;

use crate::{
    Chain, Element, Fault, Rule, Set, Table, TableName,
    wire::{self, about},
};

/// An ordered list of changes. The kernel executes either all changes or none, and packets see only
/// the state before or after the transaction. Each change sees the earlier changes of the
/// transaction: one transaction can create a set, fill it and use it in a rule.
///
/// Objects are encoded when they are added, so a transaction needs little more memory than its
/// bytes on the wire. A transaction is sent in one call, because the kernel requires all its
/// messages together.
#[derive(Debug, Clone, Default)]
pub struct Transaction {
    requests: Vec<Request>,
    sets: u32,
}

impl Transaction {
    /// An empty transaction.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether there are no changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// The number of messages: one per change, several for long lists of elements.
    #[must_use]
    pub fn message_count(&self) -> usize {
        self.requests.len()
    }

    /// The encoded size in bytes.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.requests.iter().map(Request::length).sum()
    }

    /// Adds a table. An existing table is kept. If it has no owner, a persistent table gets the
    /// connection as its owner.
    pub fn add_table(&mut self, table: &Table) {
        self.requests.push(wire::put_table(table));
    }

    /// Deletes a table with its contents. Fails with `ENOENT` if the table does not exist.
    pub fn delete_table(&mut self, table: &TableName) {
        self.requests.push(about(libc::NFT_MSG_DELTABLE, 0, table));
    }

    /// Adds a chain. If a base chain exists, its policy is changed.
    pub fn add_chain(&mut self, chain: &Chain) {
        self.requests.push(wire::put_chain(chain));
    }

    /// Deletes a chain with its rules. Fails with `EBUSY` if a rule or an element jumps to the
    /// chain.
    pub fn delete_chain(&mut self, table: &TableName, name: &str) {
        self.requests.push(about(libc::NFT_MSG_DELCHAIN, 0, table).text(wire::chain::NAME, name));
    }

    /// Adds a rule at the end of its chain.
    pub fn add_rule(&mut self, rule: &Rule) {
        self.requests.push(wire::put_rule(rule));
    }

    /// Deletes all rules of a chain.
    pub fn flush_chain(&mut self, table: &TableName, chain: &str) {
        self.requests.push(about(libc::NFT_MSG_DELRULE, 0, table).text(wire::rule::CHAIN, chain));
    }

    /// Adds a set or map. An existing set is kept, and must have the same properties.
    pub fn add_set(&mut self, set: &Set) {
        self.sets += 1;
        self.requests.push(wire::put_set(set, self.sets));
    }

    /// Deletes a set with its elements. Fails with `EBUSY` if a rule refers to the set.
    pub fn delete_set(&mut self, table: &TableName, name: &str) {
        self.requests.push(about(libc::NFT_MSG_DELSET, 0, table).text(wire::set::NAME, name));
    }

    /// Adds any number of elements to a set. Existing elements are kept. If a map has a key with
    /// other data, the kernel rejects the element with this key with `EEXIST`.
    pub fn add_elements(
        &mut self,
        table: &TableName,
        set: impl AsRef<str>,
        elements: impl IntoIterator<Item = Element>,
    ) {
        let (command, flags) = (libc::NFT_MSG_NEWSETELEM, libc::NLM_F_CREATE);
        self.requests.extend(wire::put_elements(command, flags, table, set.as_ref(), elements));
    }

    /// Deletes elements by their keys. Fails with `ENOENT` if an element does not exist.
    pub fn delete_elements(
        &mut self,
        table: &TableName,
        set: impl AsRef<str>,
        elements: impl IntoIterator<Item = Element>,
    ) {
        self.requests.extend(wire::put_elements(libc::NFT_MSG_DELSETELEM, 0, table, set.as_ref(), elements));
    }

    /// Deletes all elements of a set.
    pub fn flush_set(&mut self, table: &TableName, set: &str) {
        self.requests.push(about(libc::NFT_MSG_DELSETELEM, 0, table).text(wire::element::LIST_SET, set));
    }

    /// The element that the kernel refuses to add, with its table and the name of its set. `None`
    /// if the fault is not in an element that the transaction adds.
    #[must_use]
    pub fn added_element(&self, fault: &Fault) -> Option<(TableName, String, Element)> {
        let request = self.requests.get(fault.message?)?;
        if wire::command(request.kind()) != Some(libc::NFT_MSG_NEWSETELEM) {
            return None;
        }
        let elements = wire::read_elements(request.payload()).ok()?;
        let element = elements.list?.into_iter().nth(fault.element?)?;
        Some((elements.table, elements.set, element))
    }

    pub(crate) fn requests(&self) -> &[Request] {
        &self.requests
    }
}
