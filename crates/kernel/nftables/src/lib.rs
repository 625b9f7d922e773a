#![doc = include_str!("../README.md")]

mod client;
mod describe;
mod error;
mod model;
mod monitor;
mod probe;
mod transaction;
mod wire;

pub use client::Nftables;
pub use error::{Fault, NftablesError};
pub use headgate_netlink::{Dumped, Malformed, NetlinkError, Refusal};
pub use model::*;
pub use monitor::{Changed, Event, Monitor, Observed, Presence};
pub use probe::{Feature, Support, probe, refusals};
pub use transaction::Transaction;
