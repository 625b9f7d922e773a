//! Tests of what the kernel does with packets, rules and tables, in network namespaces. Cases of
//! mode ipvs run inside User-Mode Linux.

#![allow(clippy::unwrap_used, missing_docs)]

mod beside_kube_proxy;
mod clients;
mod conntrack;
mod health_check;
mod packets;
mod rule_text;
mod testbed;
