//! Notifications: the kernel informs every subscriber of each change.

use std::os::fd::{AsFd, BorrowedFd};

use headgate_netlink::{Heard, Listener, Malformed, Message, NetlinkError};
use libc::c_int;

use crate::{Chain, Element, Generation, NftablesError, Set, Table, TableName, wire};

/// One change of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The port of the connection that made the change ([`crate::Nftables::port`]), or 0 for the
    /// kernel, which deletes a table when its owner closes the connection.
    pub port: u32,
    /// The change.
    pub what: Changed,
}

/// The kind of a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changed {
    /// A table was added, changed or deleted.
    Table(Presence, Table),
    /// A chain was added, changed or deleted.
    Chain(Presence, Chain),
    /// A rule was added or deleted.
    Rule {
        /// Whether the rule was added or deleted.
        presence: Presence,
        /// The table.
        table: TableName,
        /// The chain.
        chain: String,
        /// The handle of the rule.
        handle: u64,
    },
    /// A set was added or deleted.
    Set(Presence, Set),
    /// Elements were added or deleted.
    Elements {
        /// Whether the elements were added or deleted.
        presence: Presence,
        /// The table.
        table: TableName,
        /// The set.
        set: String,
        /// The elements.
        elements: Vec<Element>,
    },
    /// The transaction ended and this generation began. Follows all its other events.
    Generation(Generation),
    /// Another change, such as a change of an object type that this crate does not know.
    Other {
        /// The message type: `NFT_MSG_…`.
        command: u8,
    },
}

/// Whether an object exists after the event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Presence {
    /// The object exists. It is new or changed.
    Present,
    /// The object was deleted.
    Absent,
}

/// The result of one read of a [`Monitor`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observed {
    /// No event was available. Wait until the descriptor is readable.
    Nothing,
    /// The events in order. More may be available.
    Events(Vec<Event>),
    /// Events were lost because they arrived faster than they were read. List the state again.
    Lost,
}

/// A subscription to the changes of a network namespace. Reads never block: wait for the descriptor
/// ([`AsFd`]) to become readable, for example with `poll`.
#[derive(Debug)]
pub struct Monitor(Listener);

impl Monitor {
    /// Subscribes to changes in the calling thread's network namespace. Unread events fill the
    /// buffer. Errors: the kernel creates no socket, or `CAP_NET_ADMIN` is missing.
    pub fn open(receive_buffer_bytes: u32) -> Result<Self, NftablesError> {
        Ok(Self(Listener::open(libc::NETLINK_NETFILTER, &[wire::GROUP], receive_buffer_bytes)?))
    }

    /// Like [`Self::open`], without the changes of the connection with this port
    /// ([`crate::Nftables::port`]), which the kernel drops.
    pub fn open_without(own_port: u32, receive_buffer_bytes: u32) -> Result<Self, NftablesError> {
        let monitor = Self::open(receive_buffer_bytes)?;
        monitor.0.ignore_changes_of(own_port)?;
        Ok(monitor)
    }

    /// Reads once without blocking. Errors: the read fails, or a notification is malformed.
    pub fn read(&mut self) -> Result<Observed, NftablesError> {
        let mut events = Vec::new();
        let heard = self.0.receive(|message| events.extend(event(&message).transpose()))?;
        Ok(match heard {
            Heard::Nothing => Observed::Nothing,
            Heard::Lost => Observed::Lost,
            Heard::Notifications => {
                Observed::Events(events.into_iter().collect::<Result<_, _>>().map_err(NetlinkError::from)?)
            }
        })
    }
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn event(message: &Message<'_>) -> Result<Option<Event>, Malformed> {
    let Some(command) = wire::command(message.kind) else { return Ok(None) };
    Ok(Some(Event { port: message.port, what: changed(command, message.payload)? }))
}

pub(crate) fn changed(command: c_int, payload: &[u8]) -> Result<Changed, Malformed> {
    let presence = if wire::deletes(command) { Presence::Absent } else { Presence::Present };
    Ok(match command {
        libc::NFT_MSG_NEWTABLE | libc::NFT_MSG_DELTABLE => Changed::Table(presence, wire::read_table(payload)?.object),
        libc::NFT_MSG_NEWCHAIN | libc::NFT_MSG_DELCHAIN => Changed::Chain(presence, wire::read_chain(payload)?.object),
        libc::NFT_MSG_NEWRULE | libc::NFT_MSG_DELRULE => {
            let rule = wire::read_rule(payload)?;
            Changed::Rule { presence, table: rule.object.table, chain: rule.object.chain, handle: rule.handle }
        }
        libc::NFT_MSG_NEWSET | libc::NFT_MSG_DELSET => Changed::Set(presence, wire::read_set(payload)?.object),
        libc::NFT_MSG_NEWSETELEM | libc::NFT_MSG_DELSETELEM => {
            let wire::Elements { table, set, list } = wire::read_elements(payload)?;
            Changed::Elements { presence, table, set, elements: list.unwrap_or_default() }
        }
        libc::NFT_MSG_NEWGEN => Changed::Generation(wire::read_generation(payload)?),
        command => Changed::Other { command: command as u8 },
    })
}
