//! References: 4 bytes in a message that stand for a value which the receiver already has, such as
//! the key of a service or the placement of an endpoint.
//!
//! A reference is the first 4 bytes of SHA-256 over the replica's epoch and the value, in the
//! canonical form of [`crate::state::digest`]. The epoch is random, so nobody can choose names that
//! collide before the epoch begins. Collisions are still possible, because every node receives the
//! epoch, and because 4 bytes can collide by chance. If two values in the sender's state have the
//! same reference, the sender never uses that reference again. The receiver resolves a reference to
//! the value that it received last.

use std::{collections::HashSet, sync::Arc};

use crate::{
    model::{Conditions, EndpointPort, Placement, Protocol, ServiceKey},
    state::State,
    state::digest::Form,
};

/// Computes references within one epoch. The number 0 means "no reference" and is never returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Referrer {
    epoch: u64,
}

/// A port of an endpoint, with the numbers that the gRPC message contains. A newer program may send
/// a number whose meaning this program does not know, see [`Referrer::numbered_ports`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumberedPort {
    /// Name of the port, as in [`EndpointPort`].
    pub name: String,
    /// Value of `headgate.v1.Protocol`.
    pub protocol: i32,
    /// Port number on the endpoint's address.
    pub port: u32,
    /// Bits of `headgate.v1.Endpoint.Condition`, if the port carries conditions.
    pub conditions: Option<u32>,
    /// Placement of this port, as in [`EndpointPort`].
    pub placement: Option<Arc<Placement>>,
}

impl Referrer {
    /// Creates a referrer for the epoch of a replica.
    #[must_use]
    pub fn new(epoch: u64) -> Self {
        Self { epoch }
    }

    /// Returns the reference to a service's key.
    #[must_use]
    pub fn service(self, key: &ServiceKey) -> u32 {
        let mut form = self.form(b's');
        form.key(key);
        first_bytes(form)
    }

    /// Returns the reference to a placement.
    #[must_use]
    pub fn placement(self, placement: &Placement) -> u32 {
        let mut form = self.form(b'p');
        form.placement(placement);
        first_bytes(form)
    }

    /// Returns the reference to an endpoint's list of ports.
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
        first_bytes(form)
    }

    /// Returns the reference to a list of ports in the order in which the sender sent them. The
    /// result equals [`Self::ports`] if this program knows all numbers. The result is also correct
    /// if the list has protocols or conditions that only a newer sender knows.
    #[must_use]
    pub fn numbered_ports(self, ports: &[NumberedPort]) -> u32 {
        let mut form = self.form(b'l');
        form.number(ports.len() as u64);
        for NumberedPort { name, protocol, port, conditions, placement } in ports {
            numbered_port(&mut form, name, *protocol, *port, *conditions, placement.as_deref());
        }
        first_bytes(form)
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
    // The first number contains the conditions, or is 0 if the port carries no conditions. The
    // second number depends on whether the port carries a placement, and on whether the placement
    // has hints.
    form.number(conditions.map_or(0, |bits| u64::from(bits) + 1));
    form.number(placement.map_or(0, |placement| 1 + u64::from(placement.hints.is_some())));
    if let Some(placement) = placement {
        form.placement(placement);
    }
}

/// Returns the first 4 bytes of the hash, or 1 in place of 0.
fn first_bytes(form: Form) -> u32 {
    let [a, b, c, d, ..] = form.finish().to_le_bytes();
    u32::from_le_bytes([a, b, c, d]).max(1)
}

/// The values in a state that a message may refer to. The key of a Service belongs to these values
/// only if the Service itself is known. Endpoints without a Service are not enough.
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
    /// Collects the values, for the start of a stream. The cost is linear in the size of the state.
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
    fn references_differ_between_epochs_kinds_and_values() {
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
