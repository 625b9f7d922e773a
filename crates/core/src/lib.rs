//! The pure model of a Kubernetes service proxy.
//!
//! - `model` defines the resources, their changes, and the facts about one node.
//! - `state` applies changes and returns the Services that they affect ([`State::apply`]).
//! - `behaviours` computes from the state what one node does for each service port.
//! - [`endpoint_health`] decides which endpoints fail this node's health checks.
//! - `dataplane` translates the result to kernel objects and plans the differences.
//! - [`explain`] describes what a node does with one packet.
//! - [`forwarding`] is what a node forwards, as a table that the state asks for.
//! - `conventions` defines formats and rules that all programs share.
//!
//! This crate opens no sockets, reads no clock, starts no processes and uses no async runtime. A
//! test checks its dependencies with `cargo metadata`.

// First, because the other modules use its macro.
#[macro_use]
mod model;

mod behaviours;
mod conventions;
mod dataplane;
pub mod endpoint_health;
pub mod explain;
pub mod forwarding;
mod state;

pub use behaviours::{conntrack, view};
pub use conventions::{addresses, errors, exposition, node_state, printable, turns};
pub use dataplane::{
    iptables, ipvs, nftables,
    shared::{FixedState, StateSource},
    userspace,
};
pub use model::{
    Change, ClientIpAffinity, Conditions, Endpoint, EndpointPort, Family, Hints, LoadBalancing, Node, NodeFacts,
    Placement, Pool, PortState, Protocol, ProxyProtocol, Service, ServiceCidr, ServiceKey, ServicePort, TrafficPolicy,
    Weight, address_from_bytes, check_subdomain,
};
pub use state::{Demand, Dirty, Endpoints, FamilyDemand, ServiceEntry, State, frontends};

/// Content hashes, and digests of buckets.
pub mod digest {
    pub use crate::state::{
        BUCKETS, BucketDigest, Digests, endpoint_hash, service_bucket, service_cidr_bucket, service_cidr_hash,
        service_hash,
    };
}

/// References of batches to what an agent holds.
pub mod reference {
    pub use crate::state::{Referable, Reference, placement, service};
}

// The kernels in memory, which tests of other crates also use, know this crate by its name.
#[cfg(test)]
extern crate self as headgate_core;
#[cfg(test)]
#[path = "../tests/fake_kernel/mod.rs"]
mod fake_kernel;
