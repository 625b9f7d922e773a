//! Benches: each measures Headgate and an anchor in the same run, prints both with their ratio, and
//! writes them as JSON.
//!
//! Figures are medians of repeated runs. A bench fails when what it promises does not hold: counts,
//! bytes, and ratios within one run. Times alone fail nothing, for machines differ.

pub mod apiserver_load;
pub mod clock;
pub mod connect;
pub mod conntrack;
pub mod control_plane_memory;
pub mod delta;
pub mod failover;
pub mod fleet;
pub mod growth;
pub mod iptables;
pub mod ipvs;
pub mod kube_proxy_shape;
pub mod lagging;
pub mod memory;
pub mod profile;
pub mod report;
pub mod slow;
pub mod snapshots;
pub mod storm;
pub mod two_level_shape;
pub mod warm_restart;
pub mod wire;
pub mod workload;
