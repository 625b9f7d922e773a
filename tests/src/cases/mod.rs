//! What every backend is held to, as packets: who asks what, who answers, and which source address
//! the server sees.
//!
//! - [`table`]: the services of the table and the cases on them, by group; a [`Case`] is data, and
//!   knows no backend.
//! - The groups of the table on [hints](table::GROUPS) and on how objects are read have files of
//!   their own.
//! - [`affinity`], [`payloads`]: what takes more than one question to see.
//! - [`changes`]: services, slices and nodes that become something else; [`settings`]: what agents'
//!   settings do.
//! - [`health`]: active health checks.
//! - [`rules`]: what is written to the kernel, and what others do to it; [`raw`]: packets that no
//!   well-behaved client sends.
//! - [`ipvs`]: what only mode ipvs has, in the kernel and for connections.
//! - [`live`]: changes of services while connections run; [`lifecycle`]: stops and crashes of
//!   programs, foreign rules, clean-up.
//!
//! Expected behaviour is that of kube-proxy in iptables mode where users rely on it. A backend that
//! differs on purpose is excluded from a case by name, with the reason, which is printed.

pub mod affinity;
pub mod case;
pub mod changes;
pub mod health;
mod hints;
mod intake;
pub mod ipvs;
pub mod lifecycle;
pub mod live;
pub mod payloads;
pub mod raw;
pub mod rules;
mod run;
pub mod settings;
pub mod table;
mod write_log;

pub use case::{Case, SourceAddress};
pub use run::run;
pub(crate) use write_log::WriteLog;
