//! Tests of Headgate's clients of kernel interfaces. The kernel and the usual command line programs
//! are the reference.

mod ipset;
mod nftables;
