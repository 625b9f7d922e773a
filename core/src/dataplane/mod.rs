//! The dataplanes. Each one turns the views of a service into objects of the kernel, remembers what
//! it has programmed, and plans only what differs.
//!
//! [`iptables`] and [`ipvs`] do not import each other. They share [`rules`] (text of iptables
//! rules, scripts, and the ledger of programmed rules) and [`ipsets`]; `refcount` counts the users
//! of elements.

mod ipsets;
pub mod iptables;
pub mod ipvs;
mod refcount;
mod rules;
