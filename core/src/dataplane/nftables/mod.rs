//! nftables mode: a fixed set of rules, and maps that lead from a frontend to an endpoint.
//!
//! The number of rules does not depend on the number of Services or endpoints. A Service adds
//! [`Element`]s to maps and sets, and a change adds and removes a handful of them. The [`Ledger`]
//! remembers the elements, and plans only what differs. The agent turns elements and the [`Shape`]
//! into messages of the kernel.
//!
//! # From a frontend to an endpoint
//!
//! Endpoints that share traffic form a *group* with a number: the endpoints of one Service port for
//! policy Cluster, or for policy Local. Two maps lead to an endpoint:
//!
//! 1. [`Element::Service`]: address, protocol and port → [`Target`], the group with the number of
//!    its endpoints. NodePorts have a map of their own. A small map leads from the number *n* to a
//!    chain that draws a slot between 0 and *n* - 1 ([`Pick`]).
//! 2. [`Element::Endpoint`]: group and slot → address and port.
//!
//! An endpoint that joins a group takes the slot after the last one. The last endpoint takes the
//! slot of an endpoint that leaves. So a change writes at most two slots, and the target of each
//! frontend that leads to the group.
//!
//! Numbers and slots are arbitrary. After a restart, [`Ledger::full`] adopts those that the kernel
//! has.

mod config;
mod element;
mod group;
mod ledger;
mod service;

#[cfg(test)]
mod tests;

pub use config::NftablesConfig;
pub use element::{Element, ElementKey, Lookup, MasqueradeSources, Pick, Refusal, Shape, Target};
pub use ledger::{Existing, Ledger, Plan};
