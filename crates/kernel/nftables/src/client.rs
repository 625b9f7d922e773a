//! The connection to the kernel's nftables.

use std::{cmp::Ordering, thread, time::Duration};

use headgate_netlink::{Connection, Dumped, Malformed, NetlinkError, Refusal, Request};
use libc::NLM_F_DUMP;

use crate::{
    Chain, Element, ElementData, Family, Generation, Listed, Rule, Set, Table, TableName, Value,
    wire::{self, Field, about},
};

const ATTEMPTS: u32 = 8;

/// A connection to nftables in the network namespace of the thread that opened it. The connection
/// owns the tables that it creates with [`Table::owned`].
#[derive(Debug)]
pub struct Nftables {
    connection: Connection,
    port: u32,
}

impl Nftables {
    /// Opens a connection. Errors: [`NftablesError::Missing`] if the kernel has no nftables.
    pub fn open() -> Result<Self, NftablesError> {
        let connection = Connection::open(libc::NETLINK_NETFILTER)?;
        let port = connection.port()?;
        let mut opened = Self { connection, port };
        match opened.generation() {
            // Netfilter answers with one of these codes if the subsystem does not exist.
            Err(error) if matches!(error.refusal_code(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => {
                Err(NftablesError::Missing)
            }
            Err(error) => Err(error),
            Ok(_) => Ok(opened),
        }
    }

    /// The port of the connection. A [`crate::Event`] has that of its author.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// The current generation. A changed number means that some program changed the rules.
    /// Errors: the kernel rejects the query or does not answer.
    pub fn generation(&mut self) -> Result<Generation, NftablesError> {
        Ok(self.connection.ask_one(&wire::request(libc::NFT_MSG_GETGEN, 0, None), wire::read_generation)?)
    }

    /// Executes a transaction completely or not at all. Errors: [`NftablesError::Refused`] if the
    /// kernel rejects the transaction. In this case the kernel changed nothing. After other errors
    /// it is unknown whether the kernel executed the transaction.
    pub fn commit(&mut self, transaction: &Transaction) -> Result<(), NftablesError> {
        let mut faults = Vec::new();
        let requests = transaction.requests();
        let subsystem = libc::NFNL_SUBSYS_NFTABLES;
        let result = self.connection.transact(subsystem, requests, |message, refusal| {
            faults.push(fault(transaction, message, refusal));
        });
        // The kernel drops answers only if the receive buffer is full. Only many rejections can
        // fill the buffer, and the rejections that were received suffice.
        if faults.is_empty() { Ok(result?) } else { Err(NftablesError::Refused(faults)) }
    }

    /// Lists the tables of one family or of all families.
    /// Errors: the kernel does not return the list. Retry if [`NftablesError::is_transient`]; this
    /// also holds for the other methods that list objects.
    pub fn tables(&mut self, family: Option<Family>) -> Result<Vec<Listed<Table>>, NftablesError> {
        self.list(&wire::request(libc::NFT_MSG_GETTABLE, NLM_F_DUMP, family), wire::read_table, |_| true)
    }

    /// Lists the chains of a table in the order of their creation. The list is empty if the table
    /// does not exist. Errors: the kernel does not return the list.
    pub fn chains(&mut self, table: &TableName) -> Result<Vec<Listed<Chain>>, NftablesError> {
        // The kernel lists the chains of all tables in the family.
        let request = about(libc::NFT_MSG_GETCHAIN, NLM_F_DUMP, table);
        self.list(&request, wire::read_chain, |chain| chain.object.table == *table)
    }

    /// Lists the rules of a table, or of one of its chains, in order. The list is empty if the
    /// table or chain does not exist. Errors: the kernel does not return the list.
    pub fn rules(&mut self, table: &TableName, chain: Option<&str>) -> Result<Vec<Listed<Rule>>, NftablesError> {
        let request = about(libc::NFT_MSG_GETRULE, NLM_F_DUMP, table);
        let request = chain.iter().fold(request, |request, chain| request.text(wire::rule::CHAIN, chain));
        self.list(&request, wire::read_rule, |_| true)
    }

    /// Lists the sets of a table without their elements.
    /// Errors: the kernel does not return the list: `ENOENT` if the table does not exist.
    pub fn sets(&mut self, table: &TableName) -> Result<Vec<Listed<Set>>, NftablesError> {
        self.list(&about(libc::NFT_MSG_GETSET, NLM_F_DUMP, table), wire::read_set, |_| true)
    }

    /// Lists the elements of a set, in no particular order. The list may contain expired elements
    /// that the kernel has not removed yet.
    /// Errors: the kernel does not return the list: `ENOENT` if the set does not exist, `EINTR` if
    /// the set changed during every attempt. Changes of other tables do not prevent the list.
    pub fn elements(&mut self, table: &TableName, set: &str) -> Result<Vec<Element>, NftablesError> {
        self.elements_in_order(table, set, |element| element, |one, other| place(one).cmp(&place(other)))
    }

    /// Like [`Self::elements`], sorted, and each stored as `read` returns it, because an element in
    /// the general form takes some 250 bytes. `read` must tell elements apart. Errors: those of
    /// [`Self::elements`].
    pub fn elements_as<T: Ord>(
        &mut self,
        table: &TableName,
        set: &str,
        read: impl Fn(Element) -> T,
    ) -> Result<Vec<T>, NftablesError> {
        self.elements_in_order(table, set, read, Ord::cmp)
    }

    /// Lists the elements of a set in an order in which different elements are not equal.
    fn elements_in_order<T>(
        &mut self,
        table: &TableName,
        set: &str,
        read: impl Fn(Element) -> T,
        order: impl Fn(&T, &T) -> Ordering,
    ) -> Result<Vec<T>, NftablesError> {
        let mut before: Option<Vec<T>> = None;
        let is_same = |(one, other): (&T, &T)| order(one, other).is_eq();
        for attempt in 0..ATTEMPTS {
            pause(attempt);
            let (mut found, mut catch_all) = (Vec::new(), 0);
            let dumped = self.each_element(table, set, |element| {
                catch_all += usize::from(element.catch_all);
                found.push(read(element));
            })?;
            found.sort_unstable_by(&order);
            let is_unique = !found.iter().zip(found.iter().skip(1)).any(is_same);
            // The kernel does not count the catch-all element.
            let counted = found.len() - catch_all;
            let is_as_before = before
                .as_ref()
                .is_some_and(|before| before.len() == found.len() && before.iter().zip(&found).all(is_same));
            // If changes of other tables interrupt every list, the list that repeats is complete.
            let is_settled = dumped == Dumped::Whole || is_as_before;
            match self.expected_count(table, set)? {
                Expected::Stable if is_settled => return Ok(found),
                Expected::Count(count) if is_settled && is_unique && count == counted => return Ok(found),
                Expected::Unknown if is_as_before && is_unique => return Ok(found),
                _ => before = Some(found),
            }
        }
        Err(interrupted())
    }

    /// Returns a table, or `None` if the table does not exist.
    /// Errors: the kernel rejects the query or does not answer.
    pub fn table(&mut self, name: &TableName) -> Result<Option<Listed<Table>>, NftablesError> {
        self.get(&about(libc::NFT_MSG_GETTABLE, 0, name), wire::read_table)
    }

    /// Returns a set without its elements, or `None` if the set does not exist.
    /// Errors: the kernel rejects the query or does not answer.
    pub fn set(&mut self, table: &TableName, name: &str) -> Result<Option<Listed<Set>>, NftablesError> {
        self.get(&get_set(table, name), wire::read_set)
    }

    /// Passes each element of a set to `each` without storing the list. Elements may be missing or
    /// listed twice if the result is [`Dumped::Interrupted`], and while the kernel grows the hash
    /// table of a set without a size; [`Self::elements`] detects both. Errors: the kernel does not
    /// list the elements: `ENOENT` if the set does not exist. Elements passed before are valid.
    pub fn each_element(
        &mut self,
        table: &TableName,
        set: &str,
        mut each: impl FnMut(Element),
    ) -> Result<Dumped, NftablesError> {
        let request = about(libc::NFT_MSG_GETSETELEM, NLM_F_DUMP, table).text(wire::element::LIST_SET, set);
        let ((), dumped) = self.connection.list_once(&request, |(), payload| {
            wire::read_elements(payload)?.list.into_iter().flatten().for_each(&mut each);
            Ok(())
        })?;
        Ok(dumped)
    }

    fn expected_count(&mut self, table: &TableName, set: &str) -> Result<Expected, NftablesError> {
        // Linux 6.16 reports the number of elements.
        let count = |payload: &[u8]| Option::<u32>::read(&wire::split(payload)?.1, wire::set::COUNT);
        let read = |payload: &[u8]| Ok((wire::read_set(payload)?.object, count(payload)?));
        let (set, count) = self.connection.ask_one(&get_set(table, set), read)?;
        // Only lists of hash tables that grow are unreliable. If elements expire, the kernel counts
        // some elements that it does not list.
        let may_grow = !set.flags.interval && (set.size.is_none() || set.flags.timeout || set.flags.dynamic);
        Ok(match count.and_then(|count| usize::try_from(count).ok()) {
            _ if !may_grow => Expected::Stable,
            Some(count) if !set.flags.timeout => Expected::Count(count),
            _ => Expected::Unknown,
        })
    }

    fn get<T>(
        &mut self,
        request: &Request,
        read: impl Fn(&[u8]) -> Result<T, Malformed>,
    ) -> Result<Option<T>, NftablesError> {
        match self.connection.ask_one(request, read) {
            Err(error) if error.refusal_code() == Some(libc::ENOENT) => Ok(None),
            result => Ok(Some(result?)),
        }
    }

    /// Lists the objects that `is_wanted`. If changes of any table interrupt every attempt, two
    /// equal lists are complete, compared without the objects of other programs.
    fn list<T: PartialEq>(
        &mut self,
        request: &Request,
        read: impl Fn(&[u8]) -> Result<T, Malformed>,
        is_wanted: impl Fn(&T) -> bool,
    ) -> Result<Vec<T>, NftablesError> {
        let mut before = None;
        for attempt in 0..ATTEMPTS {
            pause(attempt);
            let (found, dumped) = self.connection.list_once(request, |found: &mut Vec<T>, payload| {
                found.extend(Some(read(payload)?).filter(&is_wanted));
                Ok(())
            })?;
            if dumped == Dumped::Whole || before.as_ref() == Some(&found) {
                return Ok(found);
            }
            before = Some(found);
        }
        Err(interrupted())
    }
}

fn place(element: &Element) -> (bool, &Value, bool, &Option<ElementData>) {
    (element.catch_all, &element.key, element.interval_end, &element.data)
}

fn get_set(table: &TableName, name: &str) -> Request {
    about(libc::NFT_MSG_GETSET, 0, table).text(wire::set::NAME, name)
}

fn interrupted() -> NftablesError {
    NetlinkError::Kernel(Refusal::of_code(libc::EINTR)).into()
}

/// Pauses before another attempt to obtain a list, for 127 ms in all attempts together.
fn pause(attempt: u32) {
    if attempt > 0 {
        thread::sleep(Duration::from_millis(1 << (attempt - 1)));
    }
}

/// How to check that a list of elements is complete.
enum Expected {
    /// The kernel always lists sets of this kind completely.
    Stable,
    /// The list must have this number of elements.
    Count(usize),
    /// Two successive lists must have equal keys.
    Unknown,
}

// Transactions: changes that the kernel executes all together or not at all.

/// An ordered list of changes, which the kernel executes all or none of. Packets see only the state
/// before or after it; each change sees the earlier ones. Objects are encoded when they are added,
/// and sent in one call, because the kernel requires all messages together.
#[derive(Debug, Clone, Default)]
pub struct Transaction {
    requests: Vec<Request>,
    sets: u32,
}

impl Transaction {
    /// An empty transaction.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether there are no changes.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// The number of messages: one per change, several for long lists of elements.
    pub fn message_count(&self) -> usize {
        self.requests.len()
    }

    /// The encoded size in bytes.
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

    /// Deletes a chain with its rules. Fails with `EBUSY` if a rule or element jumps to it.
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

// Errors of nftables requests.

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum NftablesError {
    /// The kernel has no nf_tables and found no module for it.
    #[error("this kernel has no nftables: load the module nf_tables (modprobe nf_tables)")]
    Missing,
    /// The kernel rejected a transaction and executed none of it.
    #[error("{}", .0.first().map_or_else(String::new, ToString::to_string))]
    Refused(Vec<Fault>),
    /// The kernel cannot be reached, or rejects a query. If a transaction fails with this error, it
    /// is unknown whether the kernel executed the transaction.
    #[error("nftables: {0}")]
    Netlink(#[from] NetlinkError),
}

impl NftablesError {
    /// The kernel's first error number, if the kernel rejected the request.
    pub fn refusal_code(&self) -> Option<i32> {
        match self {
            Self::Refused(faults) => faults.first().map(|fault| fault.refusal.code),
            Self::Netlink(error) => error.refusal_code(),
            Self::Missing => None,
        }
    }

    /// Whether a retry may succeed at once: answers were lost, or another change interfered.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Netlink(error) if error.is_transient())
    }
}

/// A change that the kernel rejects.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {reason}")]
pub struct Fault {
    /// The index of the message in the transaction, from 0; none for the transaction as a whole.
    /// Long lists of elements span several messages. Errors that are detected at the end, such as a
    /// loop of jumps, are reported for the first message.
    pub message: Option<usize>,
    /// The index of the element in the message, if the kernel reports it.
    pub element: Option<usize>,
    /// A description of the change.
    pub what: String,
    /// The reason for the rejection.
    pub reason: String,
    /// The kernel's answer.
    pub refusal: Refusal,
}

// Descriptions of faulty changes and of the kernel's errors in words.

/// Describes a fault of a transaction. `message` is the index of the faulty request. If the kernel
/// reports a position within an element, the text names that element.
pub(crate) fn fault(transaction: &Transaction, message: Option<usize>, refusal: Refusal) -> Fault {
    let request = message.and_then(|message| transaction.requests().get(message));
    let offset = refusal.offset_bytes.and_then(|offset| usize::try_from(offset).ok());
    let element = request.zip(offset).and_then(|(request, offset)| wire::element_at(request.payload(), offset));
    let what = match request {
        // The payload can be decoded, because this crate encoded it.
        Some(request) => describe(request, element.as_ref().map(|(_, element)| element))
            .unwrap_or_else(|_| format!("message of type {}", request.kind())),
        None => "the transaction as a whole".into(),
    };
    Fault { message, element: element.map(|(index, _)| index), what, reason: reason(&refusal), refusal }
}

fn describe(request: &Request, element: Option<&Element>) -> Result<String, Malformed> {
    let payload = request.payload();
    let command = wire::command(request.kind()).unwrap_or_default();
    let verb = if wire::deletes(command) { "deleting" } else { "adding" };
    let (table, fields) = wire::split(payload)?;
    let name = |kind| String::read(&fields, kind);
    Ok(match command {
        libc::NFT_MSG_NEWTABLE | libc::NFT_MSG_DELTABLE => format!("{verb} table {table}"),
        libc::NFT_MSG_NEWCHAIN | libc::NFT_MSG_DELCHAIN => {
            format!("{verb} chain {} of table {table}", name(wire::chain::NAME)?)
        }
        libc::NFT_MSG_NEWRULE | libc::NFT_MSG_DELRULE => {
            let which = if command == libc::NFT_MSG_NEWRULE { "a rule" } else { "all rules" };
            let comment = crate::comment_of(fields.bytes(wire::rule::USER_DATA).unwrap_or_default());
            let comment = comment.map(|text| format!(" \"{text}\"")).unwrap_or_default();
            format!("{verb} {which}{comment} of chain {} of table {table}", name(wire::rule::CHAIN)?)
        }
        libc::NFT_MSG_NEWSET | libc::NFT_MSG_DELSET => {
            format!("{verb} set {} of table {table}", name(wire::set::NAME)?)
        }
        _ => {
            let wire::Elements { set, list, .. } = wire::read_elements(payload)?;
            let which = match (element, list.as_deref()) {
                (Some(one), _) | (None, Some([one])) => format!("element {}", key(one)),
                (None, Some(several)) => format!("{} elements", several.len()),
                (None, None) => "all elements".into(),
            };
            format!("{verb} {which} of set {set} of table {table}")
        }
    })
}

fn key(element: &Element) -> String {
    match &element.key_end {
        None if element.catch_all => "*".into(),
        None => format!("0x{}", element.key),
        Some(end) => format!("0x{} to 0x{end}", element.key),
    }
}

/// The reason for a rejection: the meaning of the error number, and the kernel's own text if any.
fn reason(refusal: &Refusal) -> String {
    let text = match refusal.code {
        libc::EMLINK | libc::ELOOP => "jumps form a loop, or are nested more than 16 chains deep".into(),
        libc::ENFILE => "the set is full".into(),
        libc::EBUSY => "it is in use, or exists with other properties".into(),
        libc::EEXIST => "it already exists".into(),
        libc::ENOENT => "it, or an object that it refers to, does not exist".into(),
        libc::EPERM => "another socket owns the table, or the capability CAP_NET_ADMIN is missing".into(),
        libc::EOPNOTSUPP => "the kernel does not support this at all, or not in this chain".into(),
        _ => refusal.to_io_error().to_string(),
    };
    match &refusal.message {
        Some(kernel_text) => format!("{text} ({kernel_text})"),
        None => text,
    }
}
