//! Shared parts of tests, benches and the demo: a cluster of namespaces, the packet cases, the
//! stand-in API server, the page of behaviours, test machines with their own kernel, the driver of
//! fuzz targets, counts of instructions, queries of metrics, and the fleet in simulated time.

pub mod apiserver;
pub mod behaviours;
pub mod bench;
pub mod cases;
pub mod count;
pub mod fleet;
pub mod fuzz;
#[path = "../../node-agent/tests/in_memory/mod.rs"]
pub mod in_memory;
pub mod monitoring;
pub mod simulate;
pub mod testbed;
pub mod uml;
