//! What IPVS mode must have in a kernel, and the steps that bring a kernel to it.
//!
//! A service's ports become [`service::ServicePlan`]s: virtual servers with their destinations, elements of [sets](super::ipsets), and addresses that the
//! node must answer on. The [`Ledger`] remembers what is programmed and gives [`Plan`]s with only what differs. What virtual servers
//! cannot do stands in iptables rules, rendered by [`crate::dataplane::rules`] and programmed by its ledger inside this one.
//!
//! # Where kube-proxy's IPVS mode departs from the contract, and what is done here
//!
//! - *Local policies.* kube-proxy falls back to remote endpoints when there are none here. Here a virtual server has the endpoints of its
//!   address's policy and no others; without any, its port stands in [`Set::NoEndpoints`] (refused) or
//!   [`Set::NoLocalEndpoints`] (dropped).
//! - *Short ways.* Local pods and the node itself reach all endpoints of a load balancer's address with Local policy. A virtual
//!   server cannot tell them from others: one by firewall mark could, but compares the whole mark, which belongs to others as well.
//!   So their connections are translated by iptables rules, of these services alone, before IPVS sees them.
//! - *Source ranges* are checked for pods and the node as well: in table filter for what comes in, and in mangle for what the node sends, since
//!   IPVS translates that before filter.
//!
//! # Order
//!
//! What is referred to comes first and goes last: elements, addresses, virtual servers, destinations; then rules; then removals in the opposite
//! order. A port that begins to be refused is in its set before its destinations go, and leaves it when they are there.
//!
//! # Draining
//!
//! A TCP destination that is not wanted any more gets weight 0, so that connections go on and no new ones come, and is removed when the kernel
//! counts none. One that comes back gets its weight back. UDP and SCTP destinations are removed at once, as kube-proxy does, and those of scheduler
//! `dh`, which does not pass over weight 0. A virtual
//! server stays as long as it has a destination, and so do its address and what marks it as ours in sets: an agent that
//! starts anew finds a destination of weight 0 and goes on.
//!
//! A destination that fails health checks has weight 0 as well, but stays until its endpoint goes.
//!
//! # What the kernel refuses
//!
//! See [`refused`].
//!
//! # Whose a virtual server is
//!
//! It is ours if its address is on our device, or its port in one of our sets; what is not is never touched, and neither is what
//! `excludeCIDRs` names. kube-proxy has the same names, so that its servers are taken over.

pub mod config;
pub mod existing;
#[doc(hidden)]
pub mod fake_kernel;
pub mod ledger;
pub mod plan;
pub mod refused;
pub mod scheduler;
pub mod server;
pub mod service;

#[cfg(test)]
mod tests;

pub use super::ipsets::{Element, Set, SetKind};
pub use config::{IpvsConfig, Problem};
pub use existing::Existing;
pub use ledger::Ledger;
pub use plan::{Op, Plan};
pub use refused::Object;
pub use scheduler::Scheduler;
pub use server::{ServerKey, Settings};

/// The dummy device that has the services' addresses.
pub const DEVICE: &str = "kube-ipvs0";
