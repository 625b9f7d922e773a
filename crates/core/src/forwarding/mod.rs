//! What a node forwards, as a table: for each frontend and each origin of a packet, the endpoints
//! that the packet can reach.
//!
//! The table exists twice. [`expected()`] computes it from a state and the settings of a node. A
//! decoder computes it from a dump of the kernel. The decoders share no code with the renderers of
//! the rules: if both tables are equal, then the kernel does what the state asks for, even if the
//! ledger of the dataplane is wrong.
//!
//! - [`Table`] is the table, and [`Table::hashes`] what the digests of its buckets sum up.
//! - [`expected()`] is the table that a state asks for.
//! - [`compare`] finds the differences between a table of a kernel and a state, one Service at a
//!   time, so that the whole expected table is never in memory.

mod compare;
mod expected;
pub mod iptables;
pub mod ipvs;
mod table;

pub use self::{
    compare::{Comparer, Comparison, Difference, MAX_DIFFERENCES, compare},
    expected::{expected, of_views, unverified},
    table::{Admitted, Ending, Entry, Fate, NodePortsAt, Origin, Problem, Table},
};
