//! Packet cases, which every backend must pass. A case names a client, a service, the servers that
//! must answer, and the source address that they must see.
//!
//! - [`table`]: the services of the table and its cases, in groups. A [`Case`] is data and does not
//!   depend on the backend. Two groups of [`table::GROUPS`] have their own files: hints, and the
//!   reading of unusual objects.
//! - [`affinity`], [`payloads`]: cases that need more than one request.
//! - [`changes`]: Services, slices and Nodes that change. [`settings`]: settings of agents.
//! - [`health`]: active health checks.
//! - [`rules`]: rules that the agent writes and other programs change. [`raw`]: packets that
//!   well-behaved clients do not send.
//! - [`ipvs`], [`nftables`], [`unserved`], [`userspace`], [`datagrams`]: cases of one mode alone.
//! - [`takeover`]: switches of modes, and the choice of mode `auto`. [`forms`]: the two forms of
//!   mode userspace.
//! - [`explained`]: what agents say about the packets of the table.
//! - [`shared`]: scenarios that share a cluster.
//! - [`live`]: Services that change while connections run. [`lifecycle`]: programs that stop and
//!   crash, rules of other programs, and `--cleanup`.
//!
//! The cases expect the behaviour of kube-proxy in iptables mode where users rely on it. If a
//! backend differs on purpose, the case excludes this backend by name and gives a reason. The
//! reason is printed.

pub mod affinity;
pub mod case;
pub mod changes;
pub mod datagrams;
pub mod explained;
pub mod forms;
pub mod from_kube_proxy;
pub mod health;
mod hints;
mod intake;
pub mod ipvs;
pub mod lifecycle;
pub mod live;
pub mod nftables;
pub mod payloads;
pub mod raw;
mod recorded;
pub mod rollout;
pub mod rules;
mod run;
pub mod settings;
pub mod shared;
pub mod table;
pub mod takeover;
pub mod unserved;
pub mod userspace;
mod write_log;

pub use case::{Case, SourceAddress};
pub use run::run;
pub use write_log::WriteLog;
pub(crate) use write_log::wrap_restore;
