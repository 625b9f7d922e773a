//! The pure model of a Kubernetes service proxy.
//!
//! State and a change give the dirty keys ([`State::apply`]); state and a node give what that node must do
//! ([`view`]); a view gives each backend's desired rules ([`iptables`], [`ipvs`]); desired and applied rules give a plan. Nothing here
//! opens a socket, reads a clock, starts a process or knows an async runtime, and a test over `cargo metadata` keeps it so.
//!
//! Each Kubernetes behaviour has one file, used by every backend: [`topology`], [`endpoint_choice`], [`masquerade`],
//! [`source_ranges`], [`claims`], [`conntrack`], [`health_check_port`], [`endpoint_health`].

pub mod claims;
pub mod conntrack;
pub mod demand;
pub mod digest;
pub mod dns_name;
pub mod endpoint_choice;
pub mod endpoint_health;
pub mod exposition;
pub mod health_check_port;
pub mod iptables;
pub mod ipvs;
pub mod masquerade;
pub mod model;
pub mod node_state;
pub mod plaintext;
pub mod pool;
pub mod reference;
pub mod source_ranges;
pub mod state;
pub mod topology;
pub mod view;

pub use demand::Demand;
pub use model::{
    Change, ClientIpAffinity, Conditions, Endpoint, EndpointPort, Family, Hints, Node, Placement, Protocol, Service,
    ServiceCidr, ServiceKey, ServicePort, TrafficPolicy,
};
pub use state::{Dirty, State};
