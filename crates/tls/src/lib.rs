//! TLS for both sides of a Headgate connection. Certificates, keys and authorities come from PEM
//! files that may change while a program runs. Errors name the fault and the remedy.
//!
//! [`Files`] names the files. [`Reloader`] builds a rustls configuration from the files, and builds
//! a new configuration after the files change. [`Denied`] holds what a server refuses although an
//! authority has signed it. [`replica_verifier`] is how agents verify replicas. [`explain`] returns
//! the reason for a failed handshake and the remedy. [`speaks_tls`] detects that a server at an
//! http:// URL uses TLS.

mod denied;
mod explain;
mod files;
mod reloader;
mod replica;
mod scheme;
mod validity;

pub use denied::Denied;
pub use explain::{Refusal, explain};
pub use files::{FileError, Files, Material, Side};
pub use reloader::{Loaded, Reloader};
pub use replica::{REPLICA_URI_PREFIX, replica_verifier};
pub use scheme::{is_not_tls, speaks_tls};
pub use validity::{Validity, date};
