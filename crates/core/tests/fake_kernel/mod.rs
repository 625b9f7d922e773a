//! Kernels in memory. Unit tests of this crate and tests of other crates also include these files.

pub(crate) mod iptables;
pub(crate) mod ipvs;
