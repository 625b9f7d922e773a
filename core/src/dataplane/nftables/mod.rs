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
//! policy Cluster, or for policy Local. Three maps lead to an endpoint:
//!
//! 1. [`Element::Service`]: address, protocol and port → group. NodePorts have a map of their own.
//! 2. [`Element::Count`]: group → number of its endpoints. A small map leads from the number *n* to
//!    a chain that draws a slot between 0 and *n* - 1 ([`Pick`]).
//! 3. [`Element::Endpoint`]: group and slot → address and port.
//!
//! An endpoint that joins a group takes the slot after the last one. The last endpoint takes the
//! slot of an endpoint that leaves. So both replace the count and write at most two slots, however
//! many frontends lead to the group.
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
pub use element::{Element, ElementKey, Lookup, MasqueradeSources, Pick, Refusal, Shape};
pub use ledger::{Existing, Ledger, Plan};
