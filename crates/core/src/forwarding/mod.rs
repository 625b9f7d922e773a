//! What a node forwards, as a table: for each frontend and each origin of a packet, the endpoints
//! that the packet can reach.
//!
//! The table exists twice. [`expected()`] computes it from a state and the settings of a node. The
//! crate `headgate-oracle` decodes it from a dump of the kernel, and compares the two.
//!
//! - [`Table`] is the table, and [`Table::hashes`] what the digests of its buckets sum up.
//! - [`expected()`] is the table that a state asks for.

mod expected;
mod table;

pub use self::{
    expected::{expected, of_views, unverified},
    table::{Admitted, Entry, Fate, NodePortsAt, Origin, Problem, Table, owner},
};
