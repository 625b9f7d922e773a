//! What tests, benches and the demo share: a cluster of namespaces, the packet cases, the stand-in API server, and the page of behaviours.

pub mod apiserver;
pub mod behaviours;
pub mod bench;
pub mod cases;
pub mod fleet;
pub mod testbed;
