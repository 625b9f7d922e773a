//! HTTP ports that pods and other hosts can reach.
//!
//! All ports of a program share one [`HttpConnections`], which bounds what their clients can take
//! from the program. [`MetricsPage`] bounds what the slowest page costs. [`listen`],
//! [`Network`] and [`open_files`] also serve other ports. [`name_servers`] is what names of other
//! hosts need.

mod connections;
mod listen;
mod metrics_page;
mod name_servers;
mod network;
pub mod open_files;

pub use self::{
    connections::{ACCEPT_RETRY, ClosedConnections, HttpConnections, accept},
    listen::{Families, listen},
    metrics_page::{MetricsPage, in_format},
    name_servers::name_servers,
    network::Network,
};
