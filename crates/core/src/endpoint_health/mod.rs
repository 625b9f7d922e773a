//! Active health checks of endpoints, made by each node for itself.
//!
//! A Service requests checks with the annotation `headgate.io/health-check: tcp`. Each node then
//! checks the endpoints that it uses for this Service, because one node may reach an endpoint that
//! another node cannot reach. [`FairChecks`] decides when each endpoint is checked and how the
//! outcomes count; the caller opens the connections. [`FailingEndpoints`], a field of
//! [`crate::NodeFacts`], lists the endpoints that fail their checks. The view of a Service leaves
//! these endpoints out. The shared state, its digests and the state on disk do not contain results
//! of checks.

mod checks;
mod fair;

pub use self::{
    checks::{Check, CheckTiming, ServiceTargets},
    fair::{FairCheck, FairChecks},
};
pub use crate::model::FailingEndpoints;
