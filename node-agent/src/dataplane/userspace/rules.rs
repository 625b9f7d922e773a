//! The rules behind the gate: those of mode nftables, or those of mode iptables.

use std::{collections::BTreeMap, net::SocketAddr};

use headgate_core::{
    iptables::names::GateChain,
    nftables::Lookup,
    userspace::{Listening, listener_of},
};

use super::{
    super::{
        Dataplane, DataplaneError,
        iptables::IptablesFamily,
        nftables::{self, Connection, NftablesFamily, Redirect},
    },
    set_gate,
};

/// Rules that lead to the proxy while the gate is closed, and else straight to endpoints.
pub trait GatedRules: Dataplane {
    /// How the rules choose the listener of a connection.
    const LISTENING: Listening;

    fn set_listeners(&mut self, listeners: BTreeMap<Lookup, SocketAddr>);

    /// Creates the gate, which is open, if the rules refer to a gate that must exist before them.
    /// Errors: the kernel refuses the gate. The error says what the caller must do.
    fn prepare_gate(&self) -> Result<(), DataplaneError>;

    /// Removes and adds redirects of datagrams. With `replaces_all`, the kernel then has only the
    /// added redirects.
    /// Errors: the kernel refuses the changes. The error says what the caller must do.
    fn change_redirects(
        &self,
        kernel: &mut Self::Kernel,
        replaces_all: bool,
        removed: &[Redirect],
        added: &[Redirect],
    ) -> Result<(), DataplaneError>;
}

impl GatedRules for NftablesFamily {
    const LISTENING: Listening = Listening::PerMap;

    fn set_listeners(&mut self, listeners: BTreeMap<Lookup, SocketAddr>) {
        self.set_listeners(listeners);
    }

    /// The gate is part of the table that the rules are in.
    fn prepare_gate(&self) -> Result<(), DataplaneError> {
        Ok(())
    }

    fn change_redirects(
        &self,
        kernel: &mut Connection,
        replaces_all: bool,
        removed: &[Redirect],
        added: &[Redirect],
    ) -> Result<(), DataplaneError> {
        nftables::change_redirects(kernel, self.family(), replaces_all, removed, added)
    }
}

impl GatedRules for IptablesFamily {
    const LISTENING: Listening = Listening::PerPolicy;

    fn set_listeners(&mut self, listeners: BTreeMap<Lookup, SocketAddr>) {
        let chains = GateChain::ALL.into_iter();
        let led = chains.filter_map(|chain| Some((chain, *listeners.get(&listener_of(chain))?)));
        self.set_listeners(led.collect());
    }

    fn prepare_gate(&self) -> Result<(), DataplaneError> {
        set_gate::create(self.family())
    }

    /// The rules redirect no datagrams.
    fn change_redirects(
        &self,
        _kernel: &mut Self::Kernel,
        _replaces_all: bool,
        _removed: &[Redirect],
        _added: &[Redirect],
    ) -> Result<(), DataplaneError> {
        Ok(())
    }
}
