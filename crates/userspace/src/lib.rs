#![doc = include_str!("../README.md")]

mod accounts;
pub mod balance;
mod carried;
mod list;
mod proxy_header;
pub mod relay;
mod services;
mod stats;
pub mod tcp;
mod threads;
mod timers;
pub mod udp;
mod unsafe_calls;

pub use balance::Algorithm;
pub use list::{ConnectionInfo, ConnectionList, ConnectionState, HowEnded, ListFilter};
pub use proxy_header::ProxyVersion;
pub use services::{Protocol, Scope, ServiceId, ServiceSettings, Services};
pub use stats::{ServiceStats, TcpStats, UdpStats};
pub use tcp::{Destination, TcpProxy, TcpSettings};
pub use threads::ListenerId;
pub use udp::{UdpProxy, UdpSettings};
