//! Our clients of kernel interfaces, against the kernel and the usual command line programs.

mod ipset;
mod nftables;
