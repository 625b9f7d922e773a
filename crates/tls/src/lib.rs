//! TLS for both sides of a Headgate connection. Certificates, keys and authorities come from PEM
//! files that may change while a program runs. Errors name the fault and the remedy.
//!
//! [`Files`] names the three files. [`Reloader`] builds a rustls configuration from the files, and
//! builds a new configuration after the files change. [`explain`] returns the reason for a failed
//! handshake and the remedy. [`speaks_tls`] detects that a server at an http:// URL uses TLS.

mod explain;
mod files;
mod reloader;
mod scheme;
mod validity;

pub use explain::{Refusal, explain};
pub use files::{FileError, Files, Material, Side};
pub use reloader::{Loaded, Reloader};
pub use scheme::{is_not_tls, speaks_tls};
pub use validity::{Validity, date};
