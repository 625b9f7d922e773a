//! The interface that the real kernel and the fake share.

use crate::{Chain, Element, Family, Generation, Listed, NftablesError, Rule, Set, Table, TableName, Transaction};

/// The nftables of a network namespace.
pub trait Kernel {
    /// The current generation. A changed number means that some program changed the rules.
    ///
    /// # Errors
    /// The kernel rejects the query or does not answer.
    fn generation(&mut self) -> Result<Generation, NftablesError>;

    /// Executes a transaction completely or not at all.
    ///
    /// # Errors
    /// [`NftablesError::Refused`] if the kernel rejects the transaction. In this case the kernel
    /// changed nothing. After other errors it is unknown whether the kernel executed the
    /// transaction.
    fn commit(&mut self, transaction: &Transaction) -> Result<(), NftablesError>;

    /// Lists the tables of one family or of all families.
    ///
    /// # Errors
    /// The kernel does not return the list. Retry if [`NftablesError::is_transient`]; this also
    /// holds for the other methods that list objects.
    fn tables(&mut self, family: Option<Family>) -> Result<Vec<Listed<Table>>, NftablesError>;

    /// Lists the chains of a table in the order of their creation. The list is empty if the table
    /// does not exist.
    ///
    /// # Errors
    /// The kernel does not return the list.
    fn chains(&mut self, table: &TableName) -> Result<Vec<Listed<Chain>>, NftablesError>;

    /// Lists the rules of a table, or of one of its chains, in order. The list is empty if the
    /// table or chain does not exist.
    ///
    /// # Errors
    /// The kernel does not return the list.
    fn rules(&mut self, table: &TableName, chain: Option<&str>) -> Result<Vec<Listed<Rule>>, NftablesError>;

    /// Lists the sets of a table without their elements.
    ///
    /// # Errors
    /// The kernel does not return the list: `ENOENT` if the table does not exist.
    fn sets(&mut self, table: &TableName) -> Result<Vec<Listed<Set>>, NftablesError>;

    /// Lists the elements of a set, in no particular order. The list may contain expired elements
    /// that the kernel has not removed yet.
    ///
    /// # Errors
    /// The kernel does not return the list: `ENOENT` if the set does not exist, `EINTR` if the set
    /// changed during every attempt. Changes of other tables do not prevent the list.
    fn elements(&mut self, table: &TableName, set: &str) -> Result<Vec<Element>, NftablesError>;
}
