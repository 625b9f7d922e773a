//! References: how a change says in 4 bytes what a state already holds, such as a service's name or an endpoint's node.
//!
//! A reference is the beginning of SHA-256 over the epoch of the replica that sends it and what it stands for, in the canonical form of
//! [`crate::digest`]. The epoch is random, so names cannot be chosen beforehand to collide. But every node is told the
//! epoch, and 4 bytes collide by chance as well: the sender never again uses a reference that two things of its state had
//! at once, and the receiver takes a reference for what it learned last.

use std::{collections::HashSet, sync::Arc};

use crate::{
    digest::Form,
    model::{EndpointPort, Placement, ServiceKey},
    state::State,
};

/// Computes references within one epoch. 0 stands for none and is never one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Referrer {
    epoch: u64,
}

impl Referrer {
    /// For a replica's epoch.
    #[must_use]
    pub fn new(epoch: u64) -> Self {
        Self { epoch }
    }

    /// Of a service's key.
    #[must_use]
    pub fn service(self, key: &ServiceKey) -> u32 {
        let mut form = self.form(b's');
        form.key(key);
        cut(form)
    }

    /// Of a placement.
    #[must_use]
    pub fn placement(self, placement: &Placement) -> u32 {
        let mut form = self.form(b'p');
        form.placement(placement);
        cut(form)
    }

    /// Of an endpoint's list of ports.
    #[must_use]
    pub fn ports(self, ports: &[EndpointPort]) -> u32 {
        let mut form = self.form(b'l');
        form.ports(ports);
        cut(form)
    }

    fn form(self, tag: u8) -> Form {
        let mut form = Form::new(tag);
        form.number(self.epoch);
        form
    }
}

fn cut(form: Form) -> u32 {
    let [a, b, c, d, ..] = form.finish().to_le_bytes();
    u32::from_le_bytes([a, b, c, d]).max(1)
}

/// What a state holds that changes may refer to. Services count while there is a Service; what is only an endpoint's key does not.
#[derive(Debug, Default)]
pub struct Referable {
    /// Keys of Services.
    pub services: Vec<Arc<ServiceKey>>,
    /// Placements of endpoints and of their ports.
    pub placements: HashSet<Arc<Placement>>,
    /// Port lists of endpoints.
    pub ports: HashSet<Arc<[EndpointPort]>>,
}

impl Referable {
    /// Collects it: a full pass, for the beginning of a stream.
    #[must_use]
    pub fn of(state: &State) -> Self {
        let mut found = Self::default();
        for (key, entry) in state.entries() {
            if entry.service().is_some() {
                found.services.push(Arc::clone(key));
            }
            for endpoint in entry.endpoints().values() {
                for placement in endpoint.placements() {
                    if !found.placements.contains(placement) {
                        found.placements.insert(Arc::clone(placement));
                    }
                }
                if !found.ports.contains(&endpoint.ports) {
                    found.ports.insert(Arc::clone(&endpoint.ports));
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Protocol;

    #[test]
    fn references_tell_epochs_kinds_and_values_apart() {
        let (one, other) = (Referrer::new(1), Referrer::new(2));
        let key = ServiceKey::new("prod", "web");
        assert_eq!(one.service(&key), one.service(&key.clone()));
        assert_ne!(one.service(&key), other.service(&key));
        assert_ne!(one.service(&key), one.service(&ServiceKey::new("pro", "dweb")));
        assert_ne!(one.placement(&Placement::on("a")), one.placement(&Placement::on("b")));
        assert_ne!(
            one.placement(&Placement::on("a")),
            one.placement(&Placement { zone: Some("a".into()), ..Placement::default() })
        );
        let port = |port| EndpointPort::new("http", Protocol::Tcp, port);
        assert_ne!(one.ports(&[port(80)]), one.ports(&[port(81)]));
        assert_ne!(one.ports(&[]), 0);
    }
}
