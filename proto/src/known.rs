//! The targets of references on the receiver's side (discovery.proto, section 13).

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::Arc,
};

use headgate_core::{
    EndpointPort, Placement, ServiceKey,
    reference::{NumberedPort, Referable, Referrer},
};

/// A list of ports that this program cannot use, for example because it has a protocol that only
/// newer programs know.
#[derive(Debug, PartialEq)]
pub(crate) struct UnusablePorts {
    pub(crate) ports: Vec<NumberedPort>,
    pub(crate) reason: String,
}

/// A received list of ports.
pub(crate) type PortList = Result<Arc<[EndpointPort]>, Arc<UnusablePorts>>;

/// A [`Known::replace`] is due when the number of entries in the tables exceeds `LEARNED_MUCH` plus
/// twice the number of entries after the last [`Known::replace`].
const LEARNED_MUCH: usize = 4096;

/// A reference whose target this side does not hold, or that has several targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a change refers to a {what} by {reference:08x}, which {} in this agent's state", if *.is_ambiguous { "is not unique" } else { "is missing" })]
pub struct UnknownReference {
    what: &'static str,
    reference: u32,
    is_ambiguous: bool,
}

/// The maximum number of remembered parts of unusable resources.
const MAX_UNUSABLE: usize = 1024;

/// `None` for a reference that has two targets in one state.
type Table<T> = HashMap<u32, Option<T>>;

/// The known targets of references.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// `None` before the first [`Known::replace`]: messages must not contain references, and no
    /// targets are learned.
    referrer: Option<Referrer>,
    services: Table<Arc<ServiceKey>>,
    placements: Table<Arc<Placement>>,
    ports: Table<PortList>,
    /// Number of entries in all tables after the last [`Known::replace`].
    held: usize,
    /// Parts of unusable resources. The replica holds these resources, so it may refer to their
    /// parts.
    unusable: Unusable,
}

#[derive(Debug, Default)]
struct Unusable {
    services: Vec<ServiceKey>,
    endpoints: Vec<(Arc<Placement>, PortList)>,
}

impl Known {
    /// Replaces the known targets by the targets in a state and by parts of unusable resources.
    pub(crate) fn replace(&mut self, referrer: Referrer, referable: Referable) {
        let unusable = std::mem::take(&mut self.unusable);
        *self = Self { referrer: Some(referrer), ..Self::default() };
        // The contents of the state come last and take precedence, because the replica may no
        // longer hold unusable resources.
        for key in &unusable.services {
            self.learn_service(key);
        }
        for (placement, ports) in &unusable.endpoints {
            self.learn_placement(placement);
            self.learn_ports(ports);
        }
        let services = referable.services.into_iter().map(|key| (referrer.service(&key), key));
        hold(&mut self.services, services);
        let placements = referable.placements.into_iter().map(|placement| (referrer.placement(&placement), placement));
        hold(&mut self.placements, placements);
        hold(&mut self.ports, referable.ports.into_iter().map(|ports| (referrer.ports(&ports), Ok(ports))));
        self.unusable = unusable;
        self.held = self.len();
    }

    /// Forgets all targets except parts of unusable resources. Call this when a stream begins.
    pub(crate) fn clear(&mut self) {
        *self = Self { unusable: std::mem::take(&mut self.unusable), ..Self::default() };
    }

    /// Remembers the key of a Service that cannot be used.
    pub(crate) fn note_unusable_service(&mut self, key: &ServiceKey) {
        let noted = &mut self.unusable.services;
        if noted.len() < MAX_UNUSABLE && !noted.contains(key) {
            noted.push(key.clone());
        }
    }

    /// Remembers the parts of an endpoint that cannot be used completely.
    pub(crate) fn note_unusable_endpoint(&mut self, placement: Arc<Placement>, ports: PortList) {
        let (noted, endpoint) = (&mut self.unusable.endpoints, (placement, ports));
        if noted.len() < MAX_UNUSABLE && !noted.contains(&endpoint) {
            noted.push(endpoint);
        }
    }

    fn len(&self) -> usize {
        self.services.len() + self.placements.len() + self.ports.len()
    }

    /// Returns true if a [`Known::replace`] is due. Targets of removed resources stay in the tables
    /// until the next [`Known::replace`], and may outnumber the targets in the state.
    pub(crate) fn has_learned_much(&self) -> bool {
        self.len() > 2 * self.held + LEARNED_MUCH
    }

    pub(crate) fn learn_service(&mut self, key: &ServiceKey) {
        let Some(referrer) = self.referrer else { return };
        let known = self.services.entry(referrer.service(key)).or_default();
        if known.as_deref() != Some(key) {
            *known = Some(Arc::new(key.clone()));
        }
    }

    pub(crate) fn forget_service(&mut self, key: &ServiceKey) {
        let Some(referrer) = self.referrer else { return };
        if let Entry::Occupied(entry) = self.services.entry(referrer.service(key))
            && entry.get().as_deref() == Some(key)
        {
            entry.remove();
        }
    }

    pub(crate) fn learn_placement(&mut self, placement: &Arc<Placement>) {
        if let Some(referrer) = self.referrer {
            self.placements.insert(referrer.placement(placement), Some(Arc::clone(placement)));
        }
    }

    /// Learns a list of ports and the placements of its ports. Unusable lists are learned too,
    /// because the replica holds these lists and may refer to them.
    pub(crate) fn learn_ports(&mut self, list: &PortList) {
        let Some(referrer) = self.referrer else { return };
        let reference = match list {
            Ok(ports) => {
                ports
                    .iter()
                    .filter_map(|port| port.placement.as_ref())
                    .for_each(|of_port| self.learn_placement(of_port));
                referrer.ports(ports)
            }
            Err(list) => {
                let placements = list.ports.iter().filter_map(|port| port.placement.as_ref());
                placements.for_each(|of_port| self.learn_placement(of_port));
                referrer.numbered_ports(&list.ports)
            }
        };
        self.ports.insert(reference, Some(list.clone()));
    }

    pub(crate) fn service(&self, reference: u32) -> Result<ServiceKey, UnknownReference> {
        find(&self.services, reference, "service").map(|key| (**key).clone())
    }

    pub(crate) fn placement(&self, reference: u32) -> Result<Arc<Placement>, UnknownReference> {
        find(&self.placements, reference, "placement").cloned()
    }

    pub(crate) fn ports(&self, reference: u32) -> Result<PortList, UnknownReference> {
        find(&self.ports, reference, "list of ports").cloned()
    }
}

/// Adds the contents of a state, which override learned targets. If two values have the same
/// reference, the reference is ambiguous. A replica that holds both values never uses this
/// reference, and this side does not know whether the replica still holds both values.
fn hold<T>(table: &mut Table<T>, things: impl ExactSizeIterator<Item = (u32, T)>) {
    table.reserve(things.len());
    let mut held = HashSet::with_capacity(things.len());
    for (reference, thing) in things {
        table.insert(reference, held.insert(reference).then_some(thing));
    }
}

fn find<'a, T>(table: &'a Table<T>, reference: u32, what: &'static str) -> Result<&'a T, UnknownReference> {
    let found = table.get(&reference);
    let unknown = UnknownReference { what, reference, is_ambiguous: found.is_some() };
    found.and_then(Option::as_ref).ok_or(unknown)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::{decode::Decoder, v1};

    /// An endpoint from a newer replica is unusable. A later step can still refer to its list of
    /// ports.
    #[test]
    fn a_list_of_ports_with_an_unknown_protocol_or_condition_is_known_by_its_reference() {
        let known = v1::EndpointPort { name: "http".into(), port: 80, ..Default::default() };
        let newer = v1::EndpointPort { name: "next".into(), port: 81, ..Default::default() };
        rejected_in_full_and_by_reference(
            vec![known.clone(), v1::EndpointPort { protocol: 77, ..newer.clone() }],
            "77",
        );
        rejected_in_full_and_by_reference(
            vec![known, v1::EndpointPort { conditions: Some(64), placement: 1, ..newer }],
            "64",
        );
    }

    fn rejected_in_full_and_by_reference(ports: Vec<v1::EndpointPort>, reason: &str) {
        let placement = Arc::new(Placement::on("node-1"));
        let numbered = |port: &v1::EndpointPort| NumberedPort {
            name: port.name.clone(),
            protocol: port.protocol,
            port: port.port,
            conditions: port.conditions,
            placement: (port.placement > 0).then(|| Arc::clone(&placement)),
        };
        let numbered: Vec<NumberedPort> = ports.iter().map(numbered).collect();
        let [first, second] = [7, 8].map(|epoch| Referrer::new(epoch).numbered_ports(&numbered));
        let message = |port_lists: Vec<v1::PortList>, known_port_lists: Vec<u32>, host: u8| v1::Changes {
            strings: vec!["prod".into()],
            port_lists,
            known_port_lists,
            placements: vec![v1::Placement { node: "node-1".into(), ..Default::default() }],
            endpoints: vec![v1::ServiceEndpoints {
                namespace: 1,
                name: "web".into(),
                changed: vec![v1::Endpoint { address: vec![10, 1, 0, host].into(), ..Default::default() }],
                ..Default::default()
            }],
            ..Default::default()
        };
        let rejected = |decoder: &mut Decoder, message: v1::Changes| {
            let (changes, rejections) = decoder.changes(message).unwrap();
            assert_eq!((changes.len(), rejections.len()), (0, 1), "{changes:?}");
            assert!(rejections[0].field == "ports" && rejections[0].reason.contains(reason), "{rejections:?}");
            rejections[0].resource.clone()
        };
        let mut decoder = Decoder::default();
        decoder.refer_to(Referrer::new(7), Referable::default());
        let spelt_out = message(vec![v1::PortList { ports }], Vec::new(), 1);
        assert_eq!(rejected(&mut decoder, spelt_out), "Endpoint prod/web 10.1.0.1");
        assert_eq!(rejected(&mut decoder, message(Vec::new(), vec![first], 2)), "Endpoint prod/web 10.1.0.2");
        // The replica holds the list, although this side's state does not.
        decoder.refer_to(Referrer::new(8), Referable::default());
        assert_eq!(rejected(&mut decoder, message(Vec::new(), vec![second], 3)), "Endpoint prod/web 10.1.0.3");
        assert!(
            decoder.changes(message(Vec::new(), vec![first], 4)).is_err(),
            "the reference belongs to another epoch"
        );
    }

    #[test]
    fn a_port_and_its_numbers_on_the_wire_have_the_same_reference() {
        use headgate_core::{Conditions, Protocol};

        let placement = Arc::new(Placement::on("node-1"));
        for (protocol, number) in [(Protocol::Tcp, 0), (Protocol::Udp, 1), (Protocol::Sctp, 2)] {
            for bits in 0..8 {
                let conditions =
                    Conditions { ready: bits & 1 == 0, serving: bits & 2 == 0, terminating: bits & 4 != 0 };
                for placement in [None, Some(&placement)] {
                    let port = EndpointPort {
                        conditions: Some(conditions),
                        placement: placement.cloned(),
                        ..EndpointPort::new("http", protocol, 80)
                    };
                    let numbered = NumberedPort {
                        name: "http".into(),
                        protocol: number,
                        port: 80,
                        conditions: Some(bits),
                        placement: placement.cloned(),
                    };
                    assert_eq!(Referrer::new(7).ports(&[port]), Referrer::new(7).numbered_ports(&[numbered]));
                }
            }
        }
    }

    #[test]
    fn the_newest_target_of_a_reference_counts_unless_the_state_holds_two_targets() {
        let mut table = Table::default();
        assert!(!find(&table, 1, "service").unwrap_err().is_ambiguous);
        table.insert(1, Some("old"));
        hold(&mut table, [(1, "web"), (2, "mail")].into_iter());
        assert_eq!((find(&table, 1, "service"), find(&table, 2, "service")), (Ok(&"web"), Ok(&"mail")));
        hold(&mut table, [(1, "web"), (1, "db"), (1, "web")].into_iter());
        let error = find(&table, 1, "service").unwrap_err();
        assert_eq!(
            error.to_string(),
            "a change refers to a service by 00000001, which is not unique in this agent's state"
        );
        let mut known = Known { referrer: Some(Referrer::new(7)), ..Known::default() };
        let (key, reference) =
            (ServiceKey::new("prod", "web"), Referrer::new(7).service(&ServiceKey::new("prod", "web")));
        known.services.insert(reference, Some(Arc::new(ServiceKey::new("prod", "gone"))));
        known.learn_service(&key);
        assert_eq!(known.service(reference), Ok(key));
    }

    #[test]
    fn a_service_is_known_until_it_is_removed_and_learned_targets_are_bounded() {
        let mut known = Known::default();
        let (key, referrer) = (ServiceKey::new("prod", "web"), Referrer::new(7));
        known.learn_service(&key);
        assert!(known.service(referrer.service(&key)).is_err(), "without an epoch there are no references");
        known.replace(referrer, Referable { services: vec![Arc::new(key.clone())], ..Referable::default() });
        assert_eq!(known.service(referrer.service(&key)), Ok(key.clone()));
        known.forget_service(&key);
        assert!(known.service(referrer.service(&key)).is_err());
        for number in 0..=LEARNED_MUCH + 2 {
            assert!(!known.has_learned_much());
            known.learn_placement(&Placement::on(&format!("n{number}")).into());
        }
        assert!(known.has_learned_much());
    }
}
