//! The connections to the kernel.

use std::{collections::HashSet, io, sync::Arc, time::Instant};

use headgate_core::Family;
use nftables_netlink::{Fault, Nftables, NftablesError, Table, Transaction, refusals};
use tracing::{info, warn};

use super::{
    super::{DataplaneError, ErrorKind, KernelHandle, WakeLoop, metrics::DataplaneMetrics},
    failure,
    layout::table_name,
    watch::{Syncs, Watch, foreign_change},
};

/// Two connections to the kernel. One writes, and owns the tables where the kernel supports owners.
/// The other one reads. An error of a read closes only the connection that reads, because the
/// tables lose their owner when its connection closes.
pub struct Connection {
    writer: Nftables,
    reader: Option<Nftables>,
    owns_tables: bool,
    /// True after an error that leaves it open whether the connection still works.
    is_writer_in_doubt: bool,
    /// Families whose tables this connection has created or adopted.
    adopted: HashSet<Family>,
    watch: Option<Watch>,
    wake: Option<WakeLoop>,
    pub(super) metrics: DataplaneMetrics,
}

impl Connection {
    /// Uses `writer` for changes. With `owns_tables`, the connection owns the tables that it
    /// writes.
    pub(super) fn new(writer: Nftables, owns_tables: bool) -> Self {
        Self {
            writer,
            reader: None,
            owns_tables,
            is_writer_in_doubt: false,
            adopted: HashSet::new(),
            watch: None,
            wake: None,
            metrics: DataplaneMetrics::default(),
        }
    }

    /// Whether this agent wants to own its tables.
    pub(super) fn owns_tables(&self) -> bool {
        self.owns_tables
    }

    /// Whether this connection has created or adopted the table of a family.
    pub(super) fn has_adopted(&self, family: Family) -> bool {
        self.adopted.contains(&family)
    }

    /// The table of a family, as this agent creates it.
    pub(super) fn table(&self, family: Family) -> Table {
        let table = Table::new(table_name(family));
        if self.owns_tables { table.owned_and_persistent() } else { table }
    }

    /// The connection that reads.
    pub(super) fn reader(&mut self) -> Result<&mut Nftables, DataplaneError> {
        match &mut self.reader {
            Some(reader) => Ok(reader),
            closed => Ok(closed.insert(Nftables::open().map_err(|error| failure("connecting to nftables", &error))?)),
        }
    }

    /// Executes a transaction that adopts or changes the table of a family.
    pub(super) fn commit(&mut self, family: Family, transaction: &Transaction) -> Result<(), NftablesError> {
        let started = Instant::now();
        let result = self.writer.commit(transaction);
        self.metrics.transaction_duration.observe(started.elapsed().as_secs_f64());
        match &result {
            Ok(()) => drop(self.adopted.insert(family)),
            Err(NftablesError::Netlink(error)) if error.is_transient() || error.refusal_code().is_some() => {}
            Err(NftablesError::Netlink(_)) => self.is_writer_in_doubt = true,
            Err(_) => {}
        }
        result
    }

    /// Lists what the kernel would reject in a transaction, and executes nothing.
    pub(super) fn refusals(&mut self, transaction: &Transaction) -> Result<Vec<Fault>, NftablesError> {
        refusals(&mut self.writer, transaction)
    }

    /// Replaces the connection that writes, if it no longer works, and adopts the tables at once.
    fn check_writer(&mut self) -> Result<(), NftablesError> {
        if self.writer.generation().is_ok() {
            return Ok(());
        }
        self.writer = Nftables::open()?;
        // The notifications that the watch receives must leave out the new connection's changes.
        self.watch = None;
        if let Err(error) = self.start_watch() {
            warn!(%error, "cannot follow the changes of other programs");
        }
        let adopted: Vec<Family> = self.adopted.drain().collect();
        for family in adopted {
            let mut transaction = Transaction::new();
            transaction.add_table(&self.table(family));
            self.commit(family, &transaction)?;
        }
        info!("opened another connection to nftables and adopted the tables");
        Ok(())
    }
}

impl Connection {
    /// What notifications say about the tables; `None` if the kernel sends none.
    pub(super) fn watch(&self) -> Option<&Watch> {
        self.watch.as_ref()
    }

    fn start_watch(&mut self) -> Result<(), io::Error> {
        if let Some(wake) = &self.wake {
            let (own_port, wake) = (Some(self.writer.port()), Arc::clone(wake));
            self.watch = Some(Watch::start(own_port, Syncs::default(), foreign_change, wake, self.metrics.clone())?);
        }
        Ok(())
    }
}

impl KernelHandle for Connection {
    fn follow(&mut self, wake: WakeLoop, metrics: &DataplaneMetrics) -> Result<(), DataplaneError> {
        self.metrics = metrics.clone();
        self.wake = Some(wake);
        self.start_watch()
            .map_err(|error| DataplaneError::new(ErrorKind::Retry, format!("subscribing to nftables: {error}")))
    }

    fn reset(&mut self) {
        self.reader = None;
        if self.is_writer_in_doubt {
            let checked = self.check_writer();
            self.is_writer_in_doubt = checked.is_err();
            if let Err(error) = checked {
                warn!(%error, "cannot replace the connection to nftables; the next write adopts the tables");
            }
        }
    }
}
