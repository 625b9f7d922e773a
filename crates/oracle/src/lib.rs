//! What a kernel does with packets, whoever wrote its rules.
//!
//! A decoder turns a dump of a kernel into a forwarding table ([`headgate_core::forwarding`]). The
//! decoders share no code with what renders and writes rules, so that a mistake there does not hide
//! itself: if the table equals the one that the state asks for, then the kernel does what the state
//! asks for, even if the ledger of a dataplane is wrong.
//!
//! - [`iptables`], [`ipvs`] and [`nftables`] decode what the kernel has in each mode. Mode
//!   userspace has rules of iptables or of nftables.
//! - [`compare`] finds the differences between a table of a kernel and a state, one Service at a
//!   time, so that the whole expected table is never in memory.
//!
//! This crate does no I/O: who reads the kernel passes a dump.

mod compare;
pub mod iptables;
pub mod ipvs;
pub mod nftables;
mod outcome;

pub use self::compare::{Comparer, Comparison, Difference, MAX_DIFFERENCES, compare};
