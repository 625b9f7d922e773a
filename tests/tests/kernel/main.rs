//! Packets, rules and tables of the kernel in network namespaces. Tests of IPVS run inside
//! User-Mode Linux.

#![allow(clippy::unwrap_used, missing_docs)]

mod attacks;
mod beside_kube_proxy;
mod clients;
mod conntrack;
mod forwarding;
mod health_check;
mod interfaces;
mod mirrored;
mod modes_alike;
mod nftables;
mod node_addresses;
mod packets;
mod replacements;
mod rule_text;
mod shadow;
