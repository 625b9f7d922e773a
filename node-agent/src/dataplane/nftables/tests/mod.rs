//! The rules and elements on the fake kernel.
#![allow(clippy::unwrap_used)]

mod addresses;
mod affinity;
mod decoding;
mod forwarding;
mod hashing;
mod misses;
mod rig;
