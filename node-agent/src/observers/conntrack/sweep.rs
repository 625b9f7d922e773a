//! One pass over the kernel's table: list by filters, delete what is stale.

use std::{
    collections::HashSet,
    io,
    net::{IpAddr, Ipv4Addr},
};

use headgate_core::{
    Family,
    conntrack::{Cleanup, Filter},
    iptables::NodePortAddresses,
};
use headgate_netlink::{BATCH_REQUESTS, Connection, Dumped, NetlinkError, Refusal, Request};

use super::wire::{self, Entry};
use crate::{node_inputs::interface_addresses, observers::NodePorts};

/// Filters of one family, above which its UDP entries are listed whole: with a million entries one
/// filter takes a quarter to a third of the time of a list of all (bench `conntrack`).
const FILTER_LIMIT: usize = 3;
/// Attempts at one list that the kernel interrupts; then what was read has to do.
const ATTEMPTS: u32 = 5;

/// Why a pass was not finished.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// The kernel cannot be asked.
    #[error("cannot read the connection tracking table: {0}")]
    List(#[source] NetlinkError),
    /// The kernel cannot be told.
    #[error("cannot delete stale UDP entries of the connection tracking table: {0}")]
    Delete(#[source] NetlinkError),
    /// Some entries stay.
    #[error("the kernel keeps {count} stale UDP entries of the connection tracking table: {last}")]
    Kept {
        /// How many.
        count: u64,
        /// Why the last of them.
        last: Refusal,
    },
    /// The node's own addresses, which NodePorts are judged by.
    #[error("cannot read the node's addresses: {0}")]
    Addresses(#[source] io::Error),
}

/// What a pass did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swept {
    /// Lists asked for.
    pub lists: u64,
    /// Entries that the kernel listed.
    pub listed: u64,
    /// Entries deleted.
    pub deleted: u64,
    /// Lists that stayed incomplete, since the table changed its shape at every attempt.
    pub incomplete: u64,
}

/// The node's own addresses, as far as they carry NodePorts.
#[derive(Debug, Default)]
pub struct NodeAddresses {
    own: HashSet<IpAddr>,
}

impl NodeAddresses {
    /// Resolves them, if the cleanup has to know.
    ///
    /// # Errors
    /// When the kernel does not list them.
    pub fn read(cleanup: &Cleanup, node_ports: &NodePorts) -> Result<Self, SweepError> {
        if !cleanup.needs_node_addresses() {
            return Ok(Self::default());
        }
        let mut own = HashSet::new();
        let mut interfaces = None;
        for family in Family::BOTH {
            match node_ports.of(family) {
                NodePortAddresses::Only(addresses) => own.extend(addresses),
                NodePortAddresses::All => {
                    let all = match interfaces.take() {
                        Some(all) => all,
                        None => interface_addresses().map_err(SweepError::Addresses)?,
                    };
                    own.extend(all.iter().filter(|address| Family::of(**address) == family));
                    if family == Family::V4 {
                        own.insert(LOCALHOST);
                    }
                    interfaces = Some(all);
                }
            }
        }
        Ok(Self { own })
    }

    fn contains(&self, address: IpAddr) -> bool {
        // All of 127.0.0.0/8 is local, though the interface has one address of it.
        let is_loopback = address.is_ipv4() && address.is_loopback();
        self.own.contains(&address) || (is_loopback && self.own.contains(&LOCALHOST))
    }
}

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Deletes the stale flows of a family.
///
/// # Errors
/// Some may be left; what was deleted is in `swept`. To be tried again.
pub fn sweep(
    cleanup: &Cleanup,
    family: Family,
    addresses: &NodeAddresses,
    swept: &mut Swept,
) -> Result<(), SweepError> {
    let of_family = |filter: &Filter| filter.family == family;
    let mut lists: Vec<Request> = Vec::new();
    for list in cleanup.filters(FILTER_LIMIT).iter().filter(|filter| of_family(filter)).map(wire::list) {
        // Without addresses several may be the same.
        if !lists.contains(&list) {
            lists.push(list);
        }
    }
    if lists.is_empty() {
        return Ok(());
    }
    let mut deletions = Deletions::open()?;
    for list in &lists {
        list_and_delete(cleanup, list, addresses, &mut deletions, swept)?;
    }
    deletions.flush(swept)?;
    deletions.finish()
}

/// Deletes while it lists, so that memory stays bounded however many are stale.
fn list_and_delete(
    cleanup: &Cleanup,
    list: &Request,
    addresses: &NodeAddresses,
    deletions: &mut Deletions,
    swept: &mut Swept,
) -> Result<(), SweepError> {
    for attempt in 1..=ATTEMPTS {
        let mut result = Ok(());
        swept.lists += 1;
        let dumped = Connection::open(libc::NETLINK_NETFILTER).and_then(|mut connection| {
            connection.dump(list.clone(), |kind, payload| {
                let Some(entry) = (kind == wire::MESSAGE_NEW).then(|| Entry::parse(payload)).flatten() else { return };
                swept.listed += 1;
                let (original, answered_by) = (entry.original_destination, entry.reply_source);
                // The kernel lists more than is stale, old ones everything.
                if result.is_ok() && cleanup.is_stale(original, answered_by, |address| addresses.contains(address)) {
                    result = deletions.push(entry.delete(), swept);
                }
            })
        });
        result?;
        match dumped {
            Ok(Dumped::Whole) => return Ok(()),
            Ok(Dumped::Interrupted) => {}
            Err(error) if error.is_transient() && attempt < ATTEMPTS => {}
            Err(error) => return Err(SweepError::List(error)),
        }
    }
    swept.incomplete += 1;
    Ok(())
}

/// Deletions on their way, sent in batches.
struct Deletions {
    connection: Connection,
    waiting: Vec<Request>,
    kept: Option<(u64, Refusal)>,
}

impl Deletions {
    fn open() -> Result<Self, SweepError> {
        let connection = Connection::open(libc::NETLINK_NETFILTER).map_err(SweepError::Delete)?;
        Ok(Self { connection, waiting: Vec::new(), kept: None })
    }

    fn push(&mut self, request: Request, swept: &mut Swept) -> Result<(), SweepError> {
        self.waiting.push(request);
        if self.waiting.len() < BATCH_REQUESTS { Ok(()) } else { self.flush(swept) }
    }

    fn flush(&mut self, swept: &mut Swept) -> Result<(), SweepError> {
        let requests = std::mem::take(&mut self.waiting);
        swept.deleted += requests.len() as u64;
        let kept = &mut self.kept;
        let result = self.connection.execute(requests, |_, refusal| {
            swept.deleted = swept.deleted.saturating_sub(1);
            // It ended by itself meanwhile, or another filter's list had it too.
            if refusal.code != libc::ENOENT {
                let count = kept.as_ref().map_or(0, |(count, _)| *count) + 1;
                *kept = Some((count, refusal));
            }
        });
        result.map_err(SweepError::Delete)
    }

    fn finish(self) -> Result<(), SweepError> {
        match self.kept {
            None => Ok(()),
            Some((count, last)) => Err(SweepError::Kept { count, last }),
        }
    }
}
