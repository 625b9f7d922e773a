//! The dataplanes. Each dataplane translates the views of a service to kernel objects, records the
//! programmed objects, and plans only the differences.
//!
//! [`iptables`] and [`ipvs`] do not import each other. Both use [`rules`] (text of iptables rules,
//! scripts, and the ledger of programmed rules) and [`ipsets`]. `shared` counts how many services
//! use an element of a set or an address of a device, lets full plans read the state, and keeps the
//! last good objects of rejected services. [`userspace`] has the endpoints of [`nftables`].

mod ipsets;
pub mod iptables;
pub mod ipvs;
pub mod nftables;
mod rules;
pub(crate) mod shared;
pub mod userspace;
