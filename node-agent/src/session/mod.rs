//! The agent's side of the delta stream. [`machine`] and `outbox` decide without I/O what a message
//! means and what to send. [`client`] connects, [`stream`] reads and writes one stream and decides
//! when to leave it, [`enrolment`] gets certificates, and [`tls`] loads them.

pub mod barriers;
pub mod client;
pub mod connect;
pub mod enrolment;
pub mod machine;
pub mod metrics;
pub(crate) mod outbox;
pub mod replicas;
pub mod stream;
pub mod tls;
