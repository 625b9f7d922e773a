//! HTTP ports that pods and other hosts can reach.
//!
//! All ports of a program share one [`HttpConnections`], which bounds what their clients can take
//! from the program. [`MetricsPage`] bounds what the slowest page costs. [`Network`] and
//! [`open_files`] are also the base of the limits of other ports.

mod connections;
mod metrics_page;
mod network;
pub mod open_files;

pub use self::{
    connections::{ClosedConnections, HttpConnections, accept},
    metrics_page::{MetricsPage, in_format},
    network::Network,
};
