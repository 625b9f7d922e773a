//! A small cluster made of network namespaces, with real sockets.
//!
//! ```text
//!   control 192.0.2.1      outside-1 192.0.2.100   outside-2 192.0.2.101
//!        │                      │ VIPs via node-a        │ VIPs via node-b
//!  ──────┴──────────┬───────────┴────────┬───────────────┴─── underlay; 192.0.2.254 drops the rest
//!             node-a 192.0.2.11    node-b 192.0.2.12    node-c 192.0.2.13
//!              zone-1               zone-1               zone-2
//!              a1 a2 a3             b1 b2 b3             c1 c2       one veth per pod
//! ```
//!
//! Every machine is a namespace with IPv4 and IPv6 (see [`plan`] for the addresses). A routed veth
//! pair, without a bridge, connects each pod to its node. Replies therefore always pass the node
//! that translated the request. Outside clients have no route to pods. They send packets for
//! cluster, external and load balancer addresses to one node. A packet that no node translates
//! reaches the underlay's default route, which drops it silently. A missing rule therefore causes a
//! time-out, never a refusal.
//!
//! Control plane and agents are the real programs, one process each, in the namespaces of their
//! machines. Namespaces are named `hg<process id>-<number>-<machine>` and are removed with the
//! [`Testbed`]. The next start removes namespaces that dead processes left behind. Several testbeds
//! can run in parallel: they use equal machine names and addresses, but separate namespaces.

pub mod backend;
mod bed;
pub mod client;
mod cluster;
mod container;
pub mod control_plane;
pub mod flow;
pub mod iptables;
pub mod kube_proxy;
pub mod machines;
pub mod manifests;
pub mod netns;
mod network;
pub mod page;
pub mod plan;
pub mod port;
pub mod process;
pub mod relay;
mod sctp;
mod server;
pub mod spawn;
pub mod turn;
mod wiring;
pub mod written;

pub use backend::Backend;
pub use bed::Testbed;
pub use client::{Answer, Outcome, Request, Transport};
pub use cluster::{AgentInfo, AgentSetup};
pub use machines::Machines;
pub use manifests::Manifests;
pub use netns::Namespace;
pub use network::Network;
pub use plan::Family;
