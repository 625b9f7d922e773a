//! nftables mode: a fixed set of rules, and maps in which the rules look up the endpoint for a
//! frontend.
//!
//! The number of rules does not depend on the number of Services or endpoints. A Service adds
//! [`Element`]s to maps and sets, and a change adds and removes only a few elements. The
//! [`NftablesLedger`] records the elements and plans only the differences. The agent encodes
//! elements and the [`Shape`] as netlink messages.
//!
//! # From a frontend to an endpoint
//!
//! The endpoints of one Service port for policy Cluster form a *group* with a number, and so do its
//! endpoints for policy Local. The rules look up two maps:
//!
//! 1. [`Element::Service`]: address, protocol and port → [`Target`], the group with the number of
//!    its endpoints. NodePorts are in a separate map. A small map contains, for each number *n*,
//!    the chain that selects a slot between 0 and *n* - 1 at random ([`Pick`]). Groups whose slots
//!    the client's address selects have chains of their own.
//! 2. [`Element::Endpoint`]: group and slot → address and port. Groups with ClientIP affinity
//!    have a map of their own, [`Element::AffinityEndpoint`].
//!
//! A new endpoint of a group is stored in the slot after the last slot. If an endpoint is removed,
//! the endpoint of the last slot moves to the free slot. So the change of one endpoint writes at
//! most two slots, and the target of each frontend of the group. Ports of a Service with equal
//! endpoints share their groups, unless they have affinity.
//!
//! Numbers and slots are arbitrary. After a restart, [`NftablesLedger::full`] adopts the numbers
//! and slots in the kernel. Only the slots of a hashed group are not arbitrary: they depend on the
//! endpoints and on the number of ports of the Service alone.

mod element;
mod ledger;

#[cfg(test)]
mod tests;

pub(super) use element::port_plan;
pub use element::{Counted, Element, ElementKey, Lookup, NftablesConfig, Pick, Refusal, Selection, Shape, Target};
pub use ledger::{ExistingElements, NftablesLedger, NftablesPlan};
