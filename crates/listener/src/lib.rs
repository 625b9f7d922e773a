//! HTTP ports that pods and other hosts can reach. All of a program share one [`HttpConnections`],
//! which bounds what clients can take; [`MetricsPage`] bounds what the slowest page costs, and all
//! pages have the [`ProcessMetrics`]. The rest also serves other ports. A [`Carrier`] takes the
//! place of TCP between the programs. [`blocking`] does work
//! that blocks.

mod blocking;
mod carrier;
mod connections;
mod listen;
mod metrics_page;
mod name_servers;
mod network;
pub mod open_files;
mod process_metrics;

pub use self::{
    blocking::blocking,
    carrier::{Accept, Carrier, Io, connector, resolve},
    connections::{ACCEPT_RETRY, ClosedConnections, HttpConnections, accept},
    listen::{Families, listen},
    metrics_page::{MetricsPage, in_format},
    name_servers::name_servers,
    network::Network,
    process_metrics::ProcessMetrics,
};
