//! What a kernel does with packets, whoever wrote its rules. A decoder of each mode ([`iptables`],
//! [`ipvs`], [`nftables`]) turns a dump into a forwarding table ([`headgate_core::forwarding`]),
//! and [`compare`] finds its differences from a state, one Service at a time. The decoders share no
//! code with what renders and writes rules, so that a mistake there does not hide itself. No I/O.

mod compare;
pub mod iptables;
pub mod ipvs;
mod kube_proxy;
pub mod nftables;
mod outcome;

pub use self::compare::{Comparer, Comparison, Difference, MAX_DIFFERENCES, compare};
