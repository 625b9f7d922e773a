//! The connection to the kernel's nftables.

use std::{cell::Cell, cmp::Ordering, thread, time::Duration};

use headgate_netlink::{Connection, Dumped, Malformed, NetlinkError, Refusal, Request, netfilter};

use crate::{
    Chain, Element, ElementData, Family, Fault, Generation, Listed, NftablesError, Rule, Set, Table, TableName,
    Transaction, Value, describe,
    wire::{self, decode, message},
};

/// The maximum number of attempts to obtain a complete list.
const ATTEMPTS: u32 = 8;

/// A connection to nftables in the network namespace of the thread that opened it. The connection
/// owns the tables that it creates with [`Table::owned`].
#[derive(Debug)]
pub struct Nftables {
    connection: Connection,
    port: u32,
}

impl Nftables {
    /// Opens a connection.
    ///
    /// # Errors
    /// [`NftablesError::Missing`] if the kernel has no nftables.
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

    /// The port of the connection. Each [`crate::Event`] has the port of the connection that made
    /// the change.
    #[must_use]
    pub fn port(&self) -> u32 {
        self.port
    }

    /// The current generation. A changed number means that some program changed the rules.
    ///
    /// # Errors
    /// The kernel rejects the query or does not answer.
    pub fn generation(&mut self) -> Result<Generation, NftablesError> {
        let mut found = Err(Malformed("no answer has the generation"));
        self.connection.ask(wire::get_generation(), |_, payload| found = decode::new_generation(payload))?;
        Ok(found?)
    }

    /// Executes a transaction completely or not at all.
    ///
    /// # Errors
    /// [`NftablesError::Refused`] if the kernel rejects the transaction. In this case the kernel
    /// changed nothing. After other errors it is unknown whether the kernel executed the
    /// transaction.
    pub fn commit(&mut self, transaction: &Transaction) -> Result<(), NftablesError> {
        let mut faults = Vec::new();
        let requests = transaction.requests();
        let subsystem = libc::c_int::from(wire::SUBSYSTEM);
        let result = netfilter::transact(&mut self.connection, subsystem, requests, |message, refusal| {
            faults.push(fault(transaction, message, refusal));
        });
        // The kernel drops answers only if the receive buffer is full. Only many rejections can
        // fill the buffer, and the rejections that were received suffice.
        if faults.is_empty() { Ok(result?) } else { Err(NftablesError::Refused(faults)) }
    }

    /// Lists the tables of one family or of all families.
    ///
    /// # Errors
    /// The kernel does not return the list. Retry if [`NftablesError::is_transient`]; this also
    /// holds for the other methods that list objects.
    pub fn tables(&mut self, family: Option<Family>) -> Result<Vec<Listed<Table>>, NftablesError> {
        self.list(&wire::list(message::GET_TABLE, family, None, None), decode::new_table)
    }

    /// Lists the chains of a table in the order of their creation. The list is empty if the table
    /// does not exist.
    ///
    /// # Errors
    /// The kernel does not return the list.
    pub fn chains(&mut self, table: &TableName) -> Result<Vec<Listed<Chain>>, NftablesError> {
        // The kernel lists the chains of all tables in the family.
        self.list_some(&wire::list(message::GET_CHAIN, None, Some(table), None), |payload| {
            Ok(Some(decode::new_chain(payload)?).filter(|chain| chain.object.table == *table))
        })
    }

    /// Lists the rules of a table, or of one of its chains, in order. The list is empty if the
    /// table or chain does not exist.
    ///
    /// # Errors
    /// The kernel does not return the list.
    pub fn rules(&mut self, table: &TableName, chain: Option<&str>) -> Result<Vec<Listed<Rule>>, NftablesError> {
        self.list(&wire::list(message::GET_RULE, None, Some(table), chain), decode::new_rule)
    }

    /// Lists the sets of a table without their elements.
    ///
    /// # Errors
    /// The kernel does not return the list: `ENOENT` if the table does not exist.
    pub fn sets(&mut self, table: &TableName) -> Result<Vec<Listed<Set>>, NftablesError> {
        self.list(&wire::list(message::GET_SET, None, Some(table), None), decode::new_set)
    }

    /// Lists the elements of a set, in no particular order. The list may contain expired elements
    /// that the kernel has not removed yet.
    ///
    /// # Errors
    /// The kernel does not return the list: `ENOENT` if the set does not exist, `EINTR` if the set
    /// changed during every attempt. Changes of other tables do not prevent the list.
    pub fn elements(&mut self, table: &TableName, set: &str) -> Result<Vec<Element>, NftablesError> {
        Ok(self.elements_as(table, set, InSet)?.into_iter().map(|element| element.0).collect())
    }

    /// Lists the elements of a set like [`Self::elements`], and stores what `read` returns for
    /// each element. The list is sorted. A compact form saves memory: an element in the general
    /// form takes some 250 bytes. `read` must return different values for different elements.
    ///
    /// # Errors
    /// The errors of [`Self::elements`].
    pub fn elements_as<T: Ord>(
        &mut self,
        table: &TableName,
        set: &str,
        read: impl Fn(Element) -> T,
    ) -> Result<Vec<T>, NftablesError> {
        let request = wire::list_elements(table, set);
        let mut before: Option<Vec<T>> = None;
        for attempt in 0..ATTEMPTS {
            pause(attempt);
            let catch_all = Cell::new(0);
            let (mut found, dumped) = self.dump(&request, |all, payload| {
                for element in decode::elements(payload)?.list.unwrap_or_default() {
                    catch_all.set(catch_all.get() + usize::from(element.catch_all));
                    all.push(read(element));
                }
                Ok(())
            })?;
            found.sort_unstable();
            let is_unique = found.windows(2).all(|pair| pair[0] != pair[1]);
            // The kernel does not count the catch-all element.
            let counted = found.len() - catch_all.get();
            let is_as_before = before.as_ref() == Some(&found);
            // If changes of other tables interrupt every list, the list that repeats is complete.
            let is_settled = dumped == Dumped::Whole || is_as_before;
            match self.expected_count(table, set)? {
                Expected::Stable if is_settled => return Ok(found),
                Expected::Count(count) if is_settled && is_unique && count == counted => return Ok(found),
                Expected::Unknown if is_as_before && is_unique => return Ok(found),
                _ => before = Some(found),
            }
        }
        Err(Refusal::of_code(libc::EINTR).into())
    }
    /// Returns a table, or `None` if the table does not exist.
    ///
    /// # Errors
    /// The kernel rejects the query or does not answer.
    pub fn table(&mut self, name: &TableName) -> Result<Option<Listed<Table>>, NftablesError> {
        self.get(wire::get(message::GET_TABLE, name, None), decode::new_table)
    }

    /// Returns a set without its elements, or `None` if the set does not exist.
    ///
    /// # Errors
    /// The kernel rejects the query or does not answer.
    pub fn set(&mut self, table: &TableName, name: &str) -> Result<Option<Listed<Set>>, NftablesError> {
        self.get(wire::get_set(table, name), decode::new_set)
    }

    /// Passes each element of a set to `each` without storing the list. If the result is
    /// [`Dumped::Interrupted`], another transaction in the network namespace interfered, and
    /// elements may be missing or listed twice. After a transaction has added many elements to a
    /// set without a size, the kernel continues to grow the set's hash table. During this time, the
    /// list may be incomplete or contain an element twice even if the result is [`Dumped::Whole`].
    /// [`Self::elements`] detects both cases.
    ///
    /// # Errors
    /// The kernel does not list the elements: `ENOENT` if the set does not exist. The elements that
    /// were passed to `each` before the error are valid.
    pub fn each_element(
        &mut self,
        table: &TableName,
        set: &str,
        mut each: impl FnMut(Element),
    ) -> Result<Dumped, NftablesError> {
        let mut malformed = None;
        let dumped =
            self.connection.dump(wire::list_elements(table, set), |_, payload| match decode::elements(payload) {
                Ok(elements) => elements.list.into_iter().flatten().for_each(&mut each),
                Err(error) => malformed = Some(error),
            });
        malformed.map_or(Ok(()), Err)?;
        Ok(dumped?)
    }

    /// Determines how to check that a list of elements is complete.
    fn expected_count(&mut self, table: &TableName, set: &str) -> Result<Expected, NftablesError> {
        let read = |payload: &[u8]| Ok((decode::new_set(payload)?.object, decode::element_count(payload)?));
        let Some((set, count)) = self.get(wire::get_set(table, set), read)? else {
            return Err(Refusal::of_code(libc::ENOENT).into());
        };
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
        request: Request,
        read: impl Fn(&[u8]) -> Result<T, Malformed>,
    ) -> Result<Option<T>, NftablesError> {
        let mut found = None;
        match self.connection.ask(request, |_, payload| found = Some(read(payload))) {
            Err(error) if error.refusal_code() == Some(libc::ENOENT) => Ok(None),
            result => {
                result?;
                Ok(found.transpose()?)
            }
        }
    }

    fn list<T: PartialEq>(
        &mut self,
        request: &Request,
        read: impl Fn(&[u8]) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, NftablesError> {
        self.list_some(request, |payload| read(payload).map(Some))
    }

    /// Lists the objects that `read` returns. A change of any table in the network namespace
    /// interrupts the list. If the kernel interrupts every attempt, two successive lists that are
    /// the same are complete.
    fn list_some<T: PartialEq>(
        &mut self,
        request: &Request,
        read: impl Fn(&[u8]) -> Result<Option<T>, Malformed>,
    ) -> Result<Vec<T>, NftablesError> {
        let mut before = None;
        for attempt in 0..ATTEMPTS {
            pause(attempt);
            let (found, dumped) = self.dump(request, |found, payload| {
                found.extend(read(payload)?);
                Ok(())
            })?;
            if dumped == Dumped::Whole || before.as_ref() == Some(&found) {
                return Ok(found);
            }
            before = Some(found);
        }
        Err(Refusal::of_code(libc::EINTR).into())
    }

    fn dump<T>(
        &mut self,
        request: &Request,
        add: impl Fn(&mut Vec<T>, &[u8]) -> Result<(), Malformed>,
    ) -> Result<(Vec<T>, Dumped), NftablesError> {
        let (mut found, mut malformed) = (Vec::new(), None);
        let dumped = self.connection.dump(request.clone(), |_, payload| {
            if let Err(error) = add(&mut found, payload) {
                malformed = Some(error);
            }
        });
        malformed.map_or(Ok(()), Err)?;
        Ok((found, dumped?))
    }
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

/// An element with an order among the elements of its set.
struct InSet(Element);

impl InSet {
    fn place(&self) -> (bool, &Value, bool, &Option<ElementData>) {
        let Self(element) = self;
        (element.catch_all, &element.key, element.interval_end, &element.data)
    }
}

impl Ord for InSet {
    fn cmp(&self, other: &Self) -> Ordering {
        self.place().cmp(&other.place())
    }
}

impl PartialOrd for InSet {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for InSet {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for InSet {}

fn fault(transaction: &Transaction, message: Option<usize>, refusal: Refusal) -> Fault {
    let offset = refusal.offset_bytes;
    let request = message.and_then(|message| transaction.requests().get(message));
    let at = request.zip(offset.and_then(|offset| usize::try_from(offset).ok()));
    let element = at.and_then(|(request, offset)| decode::element_at(request.payload(), offset));
    Fault {
        message,
        element: element.map(|(index, _)| index),
        what: transaction.describe(message, offset),
        reason: describe::reason(&refusal),
        refusal,
    }
}

impl From<Refusal> for NftablesError {
    fn from(refusal: Refusal) -> Self {
        Self::Netlink(NetlinkError::Kernel(refusal))
    }
}
