//! Active health checks of endpoints, an overlay over what all nodes share.
//!
//! A Service asks for checks by the annotation `headgate.io/health-check: tcp`. Each node then
//! checks the endpoints that it uses for this Service itself, since one node may reach what another
//! does not. [`Checks`] decides when each endpoint is checked and what outcomes mean; the caller
//! connects. [`FailingEndpoints`] holds the result, as a field of [`crate::NodeFacts`]: views leave
//! out the endpoints that fail. The shared state, its digests and the state on disk have nothing of
//! it.

mod checks;
mod failing;

pub use self::{
    checks::{Check, CheckTiming, Checks, ServiceTargets},
    failing::FailingEndpoints,
};
