#![doc = include_str!("../README.md")]

mod client;
mod model;
mod monitor;
mod probe;
mod wire;

pub use client::Nftables;
pub use client::Transaction;
pub use client::{Fault, NftablesError};
pub use headgate_netlink::{Dumped, Malformed, NetlinkError, Refusal};
pub use model::*;
pub use monitor::{Changed, Event, Monitor, Observed, Presence};
pub use probe::{Feature, Support, probe, refusals};
