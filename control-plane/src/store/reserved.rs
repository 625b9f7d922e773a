//! What no Service gets, except as its ClusterIP: the addresses and ports of replicas, of API
//! servers, and of the name servers that lead to them. If a Service took one of them, agents or
//! replicas could not hear of its correction.

use std::{collections::BTreeSet, net::SocketAddr};

use headgate_core::{Dirty, Family, Protocol, frontends::Frontend};
use headgate_proto::{reserved_to_wire, v1};

use super::Store;
use crate::metrics::level;

impl Store {
    /// Reserves ports, instead of those of the last call. If the address is among the first
    /// addresses of a Node, the NodePort of the same number is reserved too.
    pub(crate) fn reserve(&self, all: &BTreeSet<(Protocol, SocketAddr)>) {
        let inner = self.read();
        let frontends = |(by, at): &(Protocol, SocketAddr)| {
            let node_port = Frontend::NodePort(Family::of(at.ip()), *by, at.port());
            let at_address = Frontend::Address(at.ip(), *by, at.port());
            [Some(at_address), inner.nodes.have(at.ip().to_canonical()).then_some(node_port)].into_iter().flatten()
        };
        let reserved: BTreeSet<Frontend> = all.iter().flat_map(frontends).collect();
        let is_new = inner.reserved != reserved;
        drop(inner);
        if is_new {
            let mut inner = self.write();
            inner.state.reserve(&reserved, false, &mut Dirty::default());
            inner.reserved = reserved;
            self.metrics.conflicts.set(level(inner.state.frontends().losers().len()));
            let observers = inner.nodes.observers();
            drop(inner);
            observers.iter().for_each(|observer| observer.reserved_changed());
        }
    }

    /// What no Service gets.
    pub(crate) fn reserved(&self) -> Vec<v1::ReservedFrontend> {
        reserved_to_wire(&self.read().reserved)
    }
}
