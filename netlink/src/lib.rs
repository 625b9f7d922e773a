//! A small netlink client: encode requests, dump, and execute batches. Synchronous: the kernel works inside `send`.
//!
//! A connection belongs to the network namespace of the thread that opened it. Numbers in headers are in the machine's byte order; payloads
//! are the caller's.
//!
//! - [`Connection`] sends [`Request`]s: [`Connection::dump`] for lists, [`Connection::ask`] for one answer, [`Connection::execute`] for changes,
//!   many at once, of which each refusal is told with the request's index.
//! - [`generic`] finds the numbers of generic netlink families and encodes their requests.
//! - [`netfilter`] encodes requests of the netfilter subsystems, and carries out transactions.
//! - [`Listener`] receives the notifications of multicast groups.
//! - [`route`] has links, addresses and local routes.

mod attribute;
mod connection;
mod error;
pub mod generic;
mod listener;
mod message;
pub mod netfilter;
pub mod route;
mod socket;

pub use attribute::{
    Attributes, CheckedAttributes, NET_BYTE_ORDER, attributes, checked_attributes, read_be16, read_be32, read_i32,
    read_ip, read_text, read_u8, read_u16, read_u32, read_u64,
};
pub use connection::{BATCH_BYTES, BATCH_REQUESTS, Connection, Dumped, Options};
pub use error::{Malformed, NetlinkError, Refusal};
pub use listener::{Heard, Listener, Notification};
pub use message::Request;
