//! What both ends of a Headgate connection need of TLS: certificates, keys and authorities from PEM files that change while a program runs,
//! and sentences for what goes wrong.
//!
//! [`Files`] names the three files, [`Reloader`] turns them into a configuration of rustls and into a new one when they have changed, and
//! [`explain`] says of a handshake that failed what is wrong and what to do about it; [`speaks_tls`] tells whether plaintext is spoken to somebody with TLS.

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
