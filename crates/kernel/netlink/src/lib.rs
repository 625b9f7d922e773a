//! A small netlink client. All calls are synchronous, because the kernel processes requests within
//! `send`. [`Connection`] sends [`Request`]s in the network namespace of the thread that opened it,
//! [`Listener`] receives notifications, [`generic`] looks up families, [`netfilter`] executes
//! transactions, and [`route`] manages links and addresses. Numbers in headers are in the machine's
//! byte order. The caller encodes the payloads.

mod connection;
mod family;
pub mod generic;
mod message;
pub mod netfilter;
pub mod route;

pub use connection::{BATCH_BYTES, BATCH_REQUESTS, Connection, Dumped, Refused};
pub use connection::{Heard, Listener};
pub use family::{Family, Protocol};
pub use message::{
    Fields, attributes, checked_attributes, read_be16, read_be32, read_be64, read_ip, read_text, read_u8, read_u16,
    read_u32,
};
pub use message::{Malformed, NetlinkError, Refusal};
pub use message::{Message, Request};
