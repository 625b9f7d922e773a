//! References: how a change says in 4 bytes what a state already holds, such as a service's name or
//! an endpoint's node.
//!
//! A reference is the beginning of SHA-256 over the epoch of the replica that sends it and what it
//! stands for, in the canonical form of [`crate::state::digest`]. The epoch is random, so names
//! cannot be chosen beforehand to collide. But every node is told the epoch, and 4 bytes collide by
//! chance as well: the sender never again uses a reference that two things of its state had at
//! once, and the receiver takes a reference for what it learned last.

use std::{collections::HashSet, sync::Arc};

use crate::{
    model::{Conditions, EndpointPort, Placement, Protocol, ServiceKey},
    state::State,
    state::digest::Form,
};

/// Computes references within one epoch. 0 stands for none and is never one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Referrer {
    epoch: u64,
}

/// A port of an endpoint in the wire's numbers, which this program need not know: see
/// [`Referrer::numbered_ports`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumberedPort {
    /// As in [`EndpointPort`].
    pub name: String,
    /// Value of `headgate.v1.Protocol`.
    pub protocol: i32,
    /// Port on the endpoint's address.
    pub port: u32,
    /// Bits of `headgate.v1.Endpoint.Condition`, if the port has conditions of its own.
    pub conditions: Option<u32>,
    /// As in [`EndpointPort`].
    pub placement: Option<Arc<Placement>>,
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
        form.number(ports.len() as u64);
        for EndpointPort { name, protocol, port, conditions, placement } in ports {
            let protocol = match protocol {
                Protocol::Tcp => 0,
                Protocol::Udp => 1,
                Protocol::Sctp => 2,
            };
            let bits = |Conditions { ready, serving, terminating }: Conditions| {
                u32::from(!ready) | u32::from(!serving) << 1 | u32::from(terminating) << 2
            };
            numbered_port(&mut form, name, protocol, u32::from(*port), conditions.map(bits), placement.as_deref());
        }
        cut(form)
    }

    /// Of a list of ports, in the sender's order. It is that of [`Self::ports`] where this program
    /// knows all numbers, and also right for protocols and conditions that only a newer sender
    /// knows.
    #[must_use]
    pub fn numbered_ports(self, ports: &[NumberedPort]) -> u32 {
        let mut form = self.form(b'l');
        form.number(ports.len() as u64);
        for NumberedPort { name, protocol, port, conditions, placement } in ports {
            numbered_port(&mut form, name, *protocol, *port, *conditions, placement.as_deref());
        }
        cut(form)
    }

    fn form(self, tag: u8) -> Form {
        let mut form = Form::new(tag);
        form.number(self.epoch);
        form
    }
}

fn numbered_port(
    form: &mut Form,
    name: &str,
    protocol: i32,
    port: u32,
    conditions: Option<u32>,
    placement: Option<&Placement>,
) {
    form.text(name);
    form.number(u64::from(protocol.cast_unsigned()) << 32 | u64::from(port));
    // What a port carries itself is announced, and so are the hints of its placement.
    form.number(conditions.map_or(0, |bits| u64::from(bits) + 1));
    form.number(placement.map_or(0, |placement| 1 + u64::from(placement.hints.is_some())));
    if let Some(placement) = placement {
        form.placement(placement);
    }
}

fn cut(form: Form) -> u32 {
    let [a, b, c, d, ..] = form.finish().to_le_bytes();
    u32::from_le_bytes([a, b, c, d]).max(1)
}

/// What a state holds that changes may refer to. Services count while there is a Service; what is
/// only an endpoint's key does not.
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
