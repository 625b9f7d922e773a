//! Notifications: the kernel informs every subscriber of each change.

use std::os::fd::{AsFd, BorrowedFd};

use headgate_netlink::{Heard, Listener, Malformed, Notification};

use crate::{
    Chain, Element, Generation, NftablesError, Set, Table, TableName,
    wire::{self, decode, message},
};

/// One change of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The port of the connection that made the change ([`crate::Nftables::port`]), or 0 if the
    /// kernel made the change. For example, the kernel deletes a table when its owner closes the
    /// connection.
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
    /// The transaction ended and this generation began. This event follows all other events of the
    /// transaction.
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
    /// Subscribes to changes in the calling thread's network namespace. Events that are not read
    /// yet fill the receive buffer.
    ///
    /// # Errors
    /// The kernel creates no socket, or `CAP_NET_ADMIN` is missing.
    pub fn open(receive_buffer_bytes: u32) -> Result<Self, NftablesError> {
        Ok(Self(Listener::open(libc::NETLINK_NETFILTER, &[wire::GROUP], receive_buffer_bytes)?))
    }

    /// Like [`Self::open`], without the changes of the connection with this port
    /// ([`crate::Nftables::port`]). The kernel drops these events, so they wake nobody.
    ///
    /// # Errors
    /// The same errors as [`Self::open`].
    pub fn open_without(own_port: u32, receive_buffer_bytes: u32) -> Result<Self, NftablesError> {
        let monitor = Self::open(receive_buffer_bytes)?;
        monitor.0.ignore_changes_of(own_port)?;
        Ok(monitor)
    }

    /// Reads once without blocking.
    ///
    /// # Errors
    /// The read fails, or a notification is malformed.
    pub fn read(&mut self) -> Result<Observed, NftablesError> {
        let mut events = Vec::new();
        let heard = self.0.receive(|notification| events.extend(event(&notification).transpose()))?;
        Ok(match heard {
            Heard::Nothing => Observed::Nothing,
            Heard::Lost => Observed::Lost,
            Heard::Notifications => Observed::Events(events.into_iter().collect::<Result<_, _>>()?),
        })
    }
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn event(notification: &Notification<'_>) -> Result<Option<Event>, Malformed> {
    let Some(command) = wire::command(notification.kind) else { return Ok(None) };
    Ok(Some(Event { port: notification.port, what: changed(command, notification.payload)? }))
}

/// Decodes a notification.
pub(crate) fn changed(command: u8, payload: &[u8]) -> Result<Changed, Malformed> {
    use Presence::{Absent, Present};
    Ok(match command {
        message::NEW_TABLE => Changed::Table(Present, decode::new_table(payload)?.object),
        message::DELETE_TABLE => Changed::Table(Absent, decode::new_table(payload)?.object),
        message::NEW_CHAIN => Changed::Chain(Present, decode::new_chain(payload)?.object),
        message::DELETE_CHAIN => Changed::Chain(Absent, decode::new_chain(payload)?.object),
        message::NEW_RULE | message::DELETE_RULE => {
            let rule = decode::new_rule(payload)?;
            let presence = if command == message::NEW_RULE { Present } else { Absent };
            Changed::Rule { presence, table: rule.object.table, chain: rule.object.chain, handle: rule.handle }
        }
        message::NEW_SET => Changed::Set(Present, decode::new_set(payload)?.object),
        message::DELETE_SET => Changed::Set(Absent, decode::new_set(payload)?.object),
        message::NEW_ELEMENTS | message::DELETE_ELEMENTS => {
            let presence = if command == message::NEW_ELEMENTS { Present } else { Absent };
            let found = decode::elements(payload)?;
            let elements = found.list.unwrap_or_default();
            Changed::Elements { presence, table: found.table, set: found.set, elements }
        }
        message::NEW_GENERATION => Changed::Generation(decode::new_generation(payload)?),
        command => Changed::Other { command },
    })
}
