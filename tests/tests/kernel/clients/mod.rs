//! The clients of kernel interfaces, against a kernel and the programs that everybody uses.

mod ipset;
mod nftables;
