//! IPVS mode: virtual servers, IP sets, addresses of a dummy device, and iptables rules.
//!
//! A [`service::ServicePlan`] contains the kernel objects of a service: virtual servers with their
//! destinations, elements of [sets](super::ipsets), and addresses for the dummy device. The
//! [`IpvsLedger`] records the programmed objects and returns [`IpvsPlan`]s with only the
//! differences. iptables rules masquerade, reject and drop packets, which virtual servers cannot
//! do. The ledger of [`super::rules`] programs these rules.
//!
//! # Differences from kube-proxy's IPVS mode
//!
//! - *Local policies.* If a node has no endpoint for a Local policy, kube-proxy uses endpoints on
//!   other nodes. In Headgate a virtual server has only the endpoints for the policy of its
//!   address. If the policy has no endpoints, the address and port of the server are in
//!   [`Set::NoEndpoints`] (packets are rejected) or [`Set::NoLocalEndpoints`] (packets are
//!   dropped).
//! - *Short circuit.* With external Local policy, pods on the node and the node itself may use all
//!   endpoints. A virtual server cannot distinguish these clients from other clients. IPVS could
//!   select a virtual server by firewall mark, but IPVS compares the complete mark, and other
//!   programs use some bits of the mark. So iptables translates the connections of these clients
//!   before IPVS sees them. Only services with external Local policy have such rules.
//! - *Source ranges* also apply to pods and to the node itself. Table filter checks packets that
//!   the node receives. Mangle checks packets from the node, because IPVS translates these packets
//!   before filter.
//!
//! # Order
//!
//! An object is added before the objects that refer to it and removed after them. The order of a
//! plan is: add elements, addresses, virtual servers and destinations; change rules; remove objects
//! in the opposite order. When a port loses its last endpoint, its addresses are added to
//! [`Set::NoEndpoints`] or [`Set::NoLocalEndpoints`] before its destinations are removed. When the
//! port gets an endpoint again, its addresses are removed from the set after the destination is
//! added.
//!
//! # Draining
//!
//! A TCP destination that is no longer wanted gets weight 0. Its connections continue, but it gets
//! no new connections. The destination is removed when the kernel counts no connections. If the
//! destination is wanted again before its removal, its weight is restored. UDP and SCTP
//! destinations are removed at once, as in kube-proxy. Destinations of the scheduler `dh` are also
//! removed at once, because `dh` selects destinations of weight 0. A virtual server exists as long
//! as it has a destination. As long as the server exists, the kernel also keeps its address and the
//! element that marks it as a server of Headgate. So after a restart, the agent finds destinations
//! of weight 0 and continues to drain them.
//!
//! A destination that fails health checks also has weight 0, but it is kept until its endpoint is
//! removed.
//!
//! # Ownership of virtual servers
//!
//! A virtual server belongs to Headgate if a Service wants it, if its address is on Headgate's
//! device, or if its address and port are in one of Headgate's sets. A virtual server that no
//! Service wants does not belong to Headgate if `excludeCIDRs` contains its address. Headgate never
//! changes other virtual servers. kube-proxy uses the same names for its device and its sets, so
//! Headgate takes over the virtual servers of kube-proxy.

pub mod config;
mod deferred;
pub mod existing;
pub mod ledger;
mod objects;
pub mod plan;
mod rules;
pub mod scheduler;
pub mod server;
pub mod service;
mod short_circuit;

#[cfg(test)]
mod tests;

pub use super::ipsets::{IpSetElement, Set, SetKind};
pub use config::{IpvsConfig, SchedulerProblem};
pub use existing::ExistingObjects;
pub use ledger::IpvsLedger;
pub use objects::{Object, ServerKey, Settings};
pub use plan::{IpvsPlan, Op};
pub use scheduler::Scheduler;

/// The dummy device that has the addresses of services.
pub const DEVICE: &str = "kube-ipvs0";
/// The dummy device that tests the kernel, and that replaces [`DEVICE`] for a moment.
pub const PROBE_DEVICE: &str = "kube-ipvs-probe";
