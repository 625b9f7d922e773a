#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod accounts;
pub mod balance;
mod inbox;
mod proxy_header;
pub mod relay;
mod services;
mod stats;
pub mod tcp;
mod threads;
pub mod udp;
mod wheel;

pub use balance::Algorithm;
pub use proxy_header::ProxyVersion;
pub use services::{Protocol, Scope, ServiceId, ServiceSettings, Services};
pub use stats::ServiceStats;
pub use tcp::{
    ConnectionInfo, ConnectionList, ConnectionState, Destination, HowEnded, ListFilter, ListenerId, TcpProxy,
    TcpSettings, TcpStats,
};
pub use udp::{UdpListenerId, UdpProxy, UdpSessionInfo, UdpSettings, UdpStats};
