//! A small netlink client: it encodes requests, lists objects and executes batches. All calls are
//! synchronous, because the kernel processes requests within `send`.
//!
//! A connection belongs to the network namespace of the thread that opened it. Numbers in headers
//! are in the machine's byte order. The caller encodes the payloads.
//!
//! - [`Connection`] sends [`Request`]s: [`Connection::dump`] for lists, [`Connection::ask`] for a
//!   single answer, and [`Connection::execute`] for batches of changes. [`Connection::execute`]
//!   reports the index of each rejected request.
//! - [`generic`] looks up generic netlink families.
//! - [`Request::netfilter`] begins a request to a netfilter subsystem, and
//!   [`Connection::transact`] executes several as one transaction.
//! - [`Listener`] receives the notifications of multicast groups.
//! - [`route`] manages links and addresses, and decodes notifications of their changes.

mod connection;
mod family;
pub mod generic;
mod message;
pub mod route;

pub use connection::{BATCH_BYTES, BATCH_REQUESTS, Connection, Dumped, Heard, Listener, Refused};
pub use family::{Family, Protocol};
pub use message::{
    Fields, Malformed, Message, NetlinkError, Refusal, Request, attributes, checked_attributes, netfilter_attributes,
    read_be16, read_be32, read_be64, read_ip, read_text, read_u8, read_u16, read_u32,
};
