//! What a kernel does, be it the real one or one in memory.

use crate::{Chain, Element, Family, Generation, Listed, NftablesError, Rule, Set, Table, TableName, Transaction};

/// The nftables of a network namespace.
pub trait Kernel {
    /// The current generation. A change of its number reveals that somebody changed something.
    ///
    /// # Errors
    /// When the kernel does not tell.
    fn generation(&mut self) -> Result<Generation, NftablesError>;

    /// Carries out a transaction: all of it, or nothing.
    ///
    /// # Errors [`NftablesError::Refused`] when the kernel refuses: nothing was done. With other
    /// errors it is not known whether the transaction was carried out.
    fn commit(&mut self, transaction: &Transaction) -> Result<(), NftablesError>;

    /// All tables, of one family or of all.
    ///
    /// # Errors When the kernel does not list them. Try again when [`NftablesError::is_transient`];
    /// likewise below.
    fn tables(&mut self, family: Option<Family>) -> Result<Vec<Listed<Table>>, NftablesError>;

    /// The chains of a table, in the order in which they were made. Of a table that does not exist,
    /// none.
    ///
    /// # Errors
    /// When the kernel does not list them.
    fn chains(&mut self, table: &TableName) -> Result<Vec<Listed<Chain>>, NftablesError>;

    /// The rules of a table, or of one of its chains, in their order. Of what does not exist, none.
    ///
    /// # Errors
    /// When the kernel does not list them.
    fn rules(&mut self, table: &TableName, chain: Option<&str>) -> Result<Vec<Listed<Rule>>, NftablesError>;

    /// The sets of a table without their elements.
    ///
    /// # Errors
    /// When the kernel does not list them: `ENOENT` if there is no such table.
    fn sets(&mut self, table: &TableName) -> Result<Vec<Listed<Set>>, NftablesError>;

    /// The elements of a set, in no particular order. Those that have expired may be among them
    /// until the kernel removes them.
    ///
    /// # Errors
    /// When the kernel does not list them: `ENOENT` if there is no such set.
    fn elements(&mut self, table: &TableName, set: &str) -> Result<Vec<Element>, NftablesError>;
}
