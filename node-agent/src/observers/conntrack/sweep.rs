//! One pass over the connection tracking table: lists the UDP entries of a family and deletes the
//! stale ones.

use std::{
    collections::HashSet,
    net::{IpAddr, Ipv4Addr},
};

use headgate_core::{Family, conntrack::Cleanup, iptables::NodePortAddresses};
use headgate_netlink::{BATCH_REQUESTS, Connection, Dumped, NetlinkError, Refusal, Request};

use super::wire::{self, UdpEntry};
use crate::node_inputs::NodeInputs;

/// Maximum number of attempts to get one list that the kernel does not interrupt. After the last
/// attempt, the pass continues with the entries that it has read.
const ATTEMPTS: u32 = 5;

/// Why a pass was not finished.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// A netlink request for a list failed.
    #[error("cannot read the connection tracking table: {0}")]
    List(#[source] NetlinkError),
    /// A netlink batch of deletions failed as a whole.
    #[error("cannot delete stale UDP entries of the connection tracking table: {0}")]
    Delete(#[source] NetlinkError),
    /// The kernel rejected some deletions.
    #[error("the kernel did not delete {count} stale UDP entries of the connection tracking table: {last}")]
    Kept {
        /// Number of entries that stay.
        count: u64,
        /// The error of the last entry that stays.
        last: Refusal,
    },
    /// The addresses of the node's interfaces are not known yet. Cleanup rules for NodePorts need
    /// these addresses.
    #[error("the addresses of the node's interfaces are not known yet")]
    Addresses,
}

/// Counts of one pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swept {
    /// Lists that were requested.
    pub lists: u64,
    /// Entries that the kernel listed.
    pub listed: u64,
    /// Entries deleted.
    pub deleted: u64,
    /// Lists that stayed incomplete, because the kernel interrupted every attempt.
    pub incomplete: u64,
}

/// The node's own addresses that answer NodePorts.
#[derive(Debug, Default)]
pub struct NodeAddresses {
    own: HashSet<IpAddr>,
}

impl NodeAddresses {
    /// Selects the addresses if the cleanup has rules for NodePorts. Otherwise the result is empty.
    /// `interfaces` are the addresses of the node's interfaces, or `None` while they are not known.
    ///
    /// # Errors
    /// [`SweepError::Addresses`] if the addresses of the interfaces are needed but not known yet.
    pub fn of(cleanup: &Cleanup, inputs: &NodeInputs, interfaces: Option<&[IpAddr]>) -> Result<Self, SweepError> {
        if !cleanup.needs_node_addresses() {
            return Ok(Self::default());
        }
        let mut own = HashSet::new();
        for family in Family::BOTH {
            match inputs.node_ports(family) {
                NodePortAddresses::Only(addresses) => own.extend(addresses),
                NodePortAddresses::All => {
                    let all = interfaces.ok_or(SweepError::Addresses)?;
                    own.extend(all.iter().filter(|address| Family::of(**address) == family));
                    if family == Family::V4 {
                        own.insert(LOCALHOST);
                    }
                }
            }
        }
        Ok(Self { own })
    }

    fn contains(&self, address: IpAddr) -> bool {
        // All of 127.0.0.0/8 is local, although the loopback interface has only the address
        // 127.0.0.1.
        let is_loopback = address.is_ipv4() && address.is_loopback();
        self.own.contains(&address) || (is_loopback && self.own.contains(&LOCALHOST))
    }
}

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Deletes the stale flows of a family, and adds to the counts in `swept`.
///
/// # Errors
/// Stale flows may be left. `swept` counts the deleted flows. The caller should retry.
pub fn sweep(
    cleanup: &Cleanup,
    family: Family,
    addresses: &NodeAddresses,
    swept: &mut Swept,
) -> Result<(), SweepError> {
    if !cleanup.concerns(family) {
        return Ok(());
    }
    let mut deletions = Deletions::open()?;
    for attempt in 1..=ATTEMPTS {
        let mut result = Ok(());
        swept.lists += 1;
        let dumped = Connection::open(libc::NETLINK_NETFILTER).and_then(|mut connection| {
            connection.dump(wire::list(family), |kind, payload| {
                let Some(entry) = (kind == wire::MESSAGE_NEW).then(|| UdpEntry::parse(payload)).flatten() else {
                    return;
                };
                swept.listed += 1;
                let (original, answered_by) = (entry.original_destination, entry.reply_source);
                if result.is_ok() && cleanup.is_stale(original, answered_by, |address| addresses.contains(address)) {
                    // Batches are sent while the list is read, so that memory stays bounded.
                    result = deletions.push(entry.delete(), swept);
                }
            })
        });
        result?;
        match dumped {
            Ok(Dumped::Whole) => break,
            Ok(Dumped::Interrupted) => swept.incomplete += u64::from(attempt == ATTEMPTS),
            Err(error) if error.is_transient() && attempt < ATTEMPTS => {}
            Err(error) => return Err(SweepError::List(error)),
        }
    }
    deletions.flush(swept)?;
    deletions.kept.map_or(Ok(()), |(count, last)| Err(SweepError::Kept { count, last }))
}

/// Collects deletions and sends them in batches.
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
            // ENOENT: the entry expired meanwhile, or an interrupted list contained it, too.
            if refusal.code != libc::ENOENT {
                let count = kept.as_ref().map_or(0, |(count, _)| *count) + 1;
                *kept = Some((count, refusal));
            }
        });
        result.map_err(SweepError::Delete)
    }
}
