//! IPVS mode: virtual servers of the kernel, IP sets, addresses of a dummy device, and iptables
//! rules.
//!
//! A service's ports become [`service::ServicePlan`]s: virtual servers with their destinations,
//! elements of [sets](super::ipsets), and addresses that the node must answer on. The [`Ledger`]
//! remembers what is programmed and gives [`Plan`]s with only what differs. iptables rules do what
//! virtual servers cannot; the ledger of [`super::rules`] programs them.
//!
//! # Differences from kube-proxy's IPVS mode
//!
//! - *Local policies.* kube-proxy falls back to remote endpoints if there are none here. Here a
//!   virtual server has the endpoints of its address's policy and no others. If there are none, its
//!   port is in [`Set::NoEndpoints`] (packets are rejected) or [`Set::NoLocalEndpoints`] (packets
//!   are dropped).
//! - *Short ways.* Local pods and the node itself reach all endpoints of a load balancer's address
//!   with Local policy. A virtual server does not distinguish them from other clients: a firewall
//!   mark could, but it compares the whole mark, and others use bits of it. So iptables translates
//!   their connections, of these services alone, before IPVS sees them.
//! - *Source ranges* apply to pods and the node as well: table filter checks packets from
//!   elsewhere, and mangle checks packets of the node, since IPVS translates those before filter.
//!
//! # Order
//!
//! An object is added before those that refer to it, and removed after them: first elements,
//! addresses, virtual servers, destinations; then rules; then removals in the opposite order. A
//! port without endpoints enters its set before its destinations are removed, and leaves it after
//! they are added.
//!
//! # Draining
//!
//! A TCP destination that is no longer wanted gets weight 0: its connections continue, it gets no
//! new ones, and it is removed when the kernel counts none. If it is wanted again, it gets its
//! weight back. UDP and SCTP destinations are removed at once, as in kube-proxy, and so are those
//! of scheduler `dh`, which chooses destinations of weight 0. A virtual server stays as long as it
//! has a destination, and so do its address and the elements that mark it as ours: an agent that
//! restarts finds a destination of weight 0 and continues.
//!
//! A destination that fails health checks has weight 0 as well, but stays until its endpoint is
//! removed.
//!
//! # Which virtual servers are ours
//!
//! A virtual server is ours if its address is on our device, or its port in one of our sets. Others
//! are never touched, and neither are those that `excludeCIDRs` names. kube-proxy uses the same
//! names, so its servers are taken over.

pub mod config;
mod deferred;
pub mod existing;
#[doc(hidden)]
pub mod fake_kernel;
pub mod ledger;
mod objects;
pub mod plan;
mod rules;
pub mod scheduler;
pub mod server;
pub mod service;
mod short_ways;

#[cfg(test)]
mod tests;

pub use super::ipsets::{Element, Set, SetKind};
pub use config::{IpvsConfig, Problem};
pub use existing::Existing;
pub use ledger::Ledger;
pub use objects::{Object, ServerKey, Settings};
pub use plan::{Op, Plan};
pub use scheduler::Scheduler;

/// The dummy device that has the services' addresses.
pub const DEVICE: &str = "kube-ipvs0";
