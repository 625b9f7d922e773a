//! The interface between the proxy and its gate. `nftables::Gate` implements it for rules of
//! nftables, and `set_gate` for rules of iptables.

use headgate_core::{Family, Protocol};

use super::super::nftables;

/// A connection that changes only the gate. The connection belongs to one network namespace.
pub(super) trait ProxyGate {
    /// The protocols that the rules send to the proxy while the gate is closed.
    fn protocols(&self) -> &'static [Protocol];

    /// Closes the gate for some protocols, or keeps it closed.
    /// Errors: the kernel has no gate, or does not answer. Try again after the next full sync.
    fn close(&mut self, family: Family, protocols: &[Protocol]) -> Result<(), String>;

    /// Opens the gate: new connections and all datagrams go to endpoints.
    /// Errors: the kernel does not answer. The gate opens by itself.
    fn open(&mut self, family: Family) -> Result<(), String>;
}

impl ProxyGate for nftables::Gate {
    fn protocols(&self) -> &'static [Protocol] {
        &[Protocol::Tcp, Protocol::Udp]
    }

    fn close(&mut self, family: Family, protocols: &[Protocol]) -> Result<(), String> {
        self.close(family, protocols).map_err(|error| error.to_string())
    }

    fn open(&mut self, family: Family) -> Result<(), String> {
        self.open(family).map_err(|error| error.to_string())
    }
}

/// Connects to the gate in the network namespace of the calling thread.
pub(super) type Connect = fn() -> Result<Box<dyn ProxyGate>, String>;

pub(super) fn connect_to_nftables() -> Result<Box<dyn ProxyGate>, String> {
    let gate = nftables::Gate::connect().map_err(|error| error.to_string())?;
    Ok(Box::new(gate))
}
