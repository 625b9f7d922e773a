//! The pure model of a Kubernetes service proxy.
//!
//! - `model` has the resources and their changes.
//! - `node_facts` has what one node adds to them.
//! - `state` applies changes and tells which services they affect ([`State::apply`]).
//! - `behaviours` computes from the state what one node does for each service port.
//! - [`endpoint_health`] decides which endpoints fail this node's health checks.
//! - `dataplane` turns that into objects of the kernel, and plans only what differs.
//! - `conventions` has what the programs must agree on.
//!
//! Nothing here opens a socket, reads a clock, starts a process or knows an async runtime. A test
//! over `cargo metadata` checks that.

mod behaviours;
mod conventions;
mod dataplane;
pub mod endpoint_health;
mod model;
mod node_facts;
mod state;

pub use behaviours::{conntrack, endpoint_choice, health_check_port, masquerade, source_ranges, topology, view};
pub use conventions::{dns_name, exposition, node_state, plaintext};
pub use dataplane::{iptables, ipvs};
pub use model::{
    Change, ClientIpAffinity, Conditions, Endpoint, EndpointPort, Family, Hints, Node, Placement, PortState, Protocol,
    Service, ServiceCidr, ServiceKey, ServicePort, TrafficPolicy, pool,
};
pub use node_facts::NodeFacts;
pub use state::{Demand, Dirty, FamilyDemand, ServiceEntry, State, digest, frontends, reference};
