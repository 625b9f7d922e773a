//! HTTP ports that pods and other hosts can reach, and connections of the other ports.
//!
//! All ports of a program share one [`HttpConnections`], which bounds what their clients can take
//! from the program. [`MetricsPage`] bounds what the slowest page costs. [`listen`],
//! [`Network`] and [`open_files`] also serve other ports, and the pages of all programs have the
//! [`ProcessMetrics`]. [`name_servers`] is what names of other
//! hosts need. A [`Carrier`] takes the place of TCP between the programs.

mod carrier;
mod connections;
mod listen;
mod metrics_page;
mod name_servers;
mod network;
pub mod open_files;
mod process_metrics;

pub use self::{
    carrier::{Accept, Carrier, Io, connector, resolve},
    connections::{ACCEPT_RETRY, ClosedConnections, HttpConnections, accept},
    listen::{Families, listen},
    metrics_page::{MetricsPage, in_format},
    name_servers::name_servers,
    network::Network,
    process_metrics::ProcessMetrics,
};
