//! Notifications: the kernel tells every subscriber of each change.

use std::os::fd::{AsFd, BorrowedFd};

use headgate_netlink::{Heard, Listener, Malformed, Notification, Options};

use crate::{
    Chain, Element, Generation, NftablesError, Set, Table, TableName,
    wire::{self, decode, message},
};

/// A change that a transaction brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The connection that made it ([`crate::Nftables::port`]); 0 for the kernel itself, such as
    /// when a table vanishes with its owner.
    pub port: u32,
    /// What changed.
    pub what: Changed,
}

/// What changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changed {
    /// A table was added or changed, or deleted.
    Table(Presence, Table),
    /// A chain was added or changed, or deleted.
    Chain(Presence, Chain),
    /// A rule was added or deleted.
    Rule {
        /// Which of both.
        presence: Presence,
        /// The table.
        table: TableName,
        /// The chain.
        chain: String,
        /// The rule's number.
        handle: u64,
    },
    /// A set was added or deleted.
    Set(Presence, Set),
    /// Elements were added or deleted.
    Elements {
        /// Which of both.
        presence: Presence,
        /// The table.
        table: TableName,
        /// The set.
        set: String,
        /// The elements.
        elements: Vec<Element>,
    },
    /// The transaction ended, and this generation begins. Comes after all other events of the
    /// transaction.
    Generation(Generation),
    /// Something else, such as an object of a kind that this crate does not know.
    Other {
        /// The message's type: `NFT_MSG_…`.
        command: u8,
    },
}

/// Whether something is there since the event, or no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Presence {
    /// It is there, new or changed.
    Present,
    /// It is gone.
    Absent,
}

/// What a read of a [`Monitor`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observed {
    /// Nothing waits; wait until the descriptor is readable.
    Nothing,
    /// These events, in their order. More may wait.
    Events(Vec<Event>),
    /// Events were lost, because they came faster than they were read. Compare the state anew.
    Lost,
}

/// A subscription to the changes of a network namespace. Reading never blocks: wait for the
/// descriptor ([`AsFd`]) to become readable, by `poll` and the like.
#[derive(Debug)]
pub struct Monitor(Listener);

impl Monitor {
    /// Subscribes in the calling thread's network namespace.
    ///
    /// # Errors
    /// The system gives us no socket, or `CAP_NET_ADMIN` is missing.
    pub fn open(options: &Options) -> Result<Self, NftablesError> {
        Ok(Self(Listener::open(libc::NETLINK_NETFILTER, &[wire::GROUP], options)?))
    }

    /// Reads once, without waiting.
    ///
    /// # Errors
    /// Receiving fails, or a notification is malformed.
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

/// What a message tells.
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
            Changed::Elements { presence, table: found.table, set: found.set.name, elements }
        }
        message::NEW_GENERATION => Changed::Generation(decode::new_generation(payload)?),
        command => Changed::Other { command },
    })
}
