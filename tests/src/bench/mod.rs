//! Benches. Each bench measures Headgate and an anchor in one run. An anchor is a comparable
//! program or ruleset, such as rules of kube-proxy's shape. The bench prints both values with their
//! ratio, and writes them as JSON.
//!
//! Figures are medians of repeated runs. Benches check counts, bytes and ratios within one run, and
//! fail if a check fails. Benches do not check absolute times, because machines differ.

pub mod clock;
pub mod everywhere;
pub mod fleet;
pub mod iptables;
pub mod ipvs;
pub mod kube_proxy_nft_shape;
pub mod kube_proxy_shape;
pub mod memory;
pub mod nft_latency;
pub mod nft_memory;
pub mod nft_replace;
pub mod nftables;
pub mod report;
pub mod rollouts;
pub mod snapshots;
pub mod storm;
pub mod two_level_shape;
pub mod under_attack;
pub mod userspace;
pub mod wire;
pub mod workload;
