//! TLS for both sides of a Headgate connection, with PEM files ([`Files`]) that may change while a
//! program runs: [`Reloader`] then builds a new rustls configuration. [`Denied`] holds what a
//! server refuses although an authority has signed it. [`replica_verifier`] is how agents and
//! replicas verify replicas. Errors, and [`explain`] after a failed handshake, name the fault and
//! the remedy.

mod denied;
mod explain;
mod files;
mod reloader;
mod replica;
mod scheme;
mod validity;

pub use denied::Denied;
pub use explain::{Refusal, explain};
pub use files::{FileError, Files, Material, Side, replica_client};
pub use reloader::{Loaded, Reloader};
pub use replica::{REPLICA_URI_PREFIX, entries_of_replica, replica_verifier};
pub use scheme::{is_not_tls, speaks_tls};
pub use validity::{Validity, date};
