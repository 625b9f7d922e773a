//! Decoders turn dumps of the kernel into forwarding tables ([`headgate_core::forwarding`]).
//!
//! The decoders share no code with what writes to the kernel, so that a mistake there does not hide
//! itself. They know the kernel's objects only through the crates that read them, and through
//! [`headgate_core::forwarding::iptables`], which reads the output of `iptables-save`.

pub mod nftables;
