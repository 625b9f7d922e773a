//! The agent's side of the delta stream.
//!
//! Three modules make decisions and do no I/O. [`machine`] decides what a message means.
//! [`failover`] decides when to leave a replica. `outbox` decides what to send to the replica.
//! [`client`] connects and reconnects, [`enrolment`] gets certificates, `stream` reads and writes
//! one stream, and [`tls`] loads certificates and keys.

pub(crate) mod answers;
pub mod barriers;
pub mod client;
pub mod connect;
mod context;
pub mod enrolment;
pub mod failover;
pub mod machine;
pub mod metrics;
mod outbox;
mod rejections;
mod renewal;
pub mod replicas;
mod standings;
mod stream;
mod stream_end;
pub mod tls;
pub(crate) mod verified;
