//! The agent's side of the delta stream.
//!
//! [`machine`] decides what a message means, and `outbox` what to send to the replica: both do no
//! I/O. [`client`] connects and reconnects, [`stream`] reads and writes one stream and decides when
//! to leave a replica, [`enrolment`] gets certificates, and [`tls`] loads certificates and keys.

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
