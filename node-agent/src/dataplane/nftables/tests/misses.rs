//! Before Linux 6.17, a lookup may miss a key while a transaction replaces it. The packet then
//! reaches a right endpoint or none, and is not refused.

use std::{collections::BTreeSet, net::IpAddr};

use headgate_core::{Change, Family, Service, ServiceKey, TrafficPolicy};
use nftables_netlink::{
    Hook,
    fake::{Action, FakeKernel, FakeNftables, Fate, Misses, Packet},
};

use super::rig::{CLIENTS, CLUSTER, NODES, PODS, PROTOCOLS, Rig, address, endpoint, key, shapes};

/// A Service with its endpoints: the last byte of the address, and whether it is on this node.
struct Case {
    key: ServiceKey,
    number: u8,
    service: Service,
    endpoints: BTreeSet<(u8, bool)>,
}

/// What became of the packets.
#[derive(Debug, Default)]
struct Seen {
    translated: usize,
    dropped: usize,
}

impl Case {
    fn add(&mut self, last: u8, is_here: bool, family: Family) -> Change {
        self.endpoints.insert((last, is_here));
        Change::Endpoint(self.key.clone(), endpoint(family, last, if is_here { "here" } else { "there" }))
    }

    fn remove(&mut self, last: u8, family: Family) -> Change {
        self.endpoints.retain(|(found, _)| *found != last);
        Change::RemoveEndpoint(self.key.clone(), address(family, PODS, last))
    }

    /// Sends a connection to each frontend from each kind of client.
    fn check(&self, family: Family, fake: &FakeKernel, misses: Misses, seen: &mut Seen) {
        fake.miss_replaced_keys(misses);
        let node = address(family, NODES, 1);
        let frontends = [
            (address(family, CLUSTER, self.number), 80),
            (address(family, CLIENTS, self.number), 80),
            (address(family, CLIENTS, 100 + self.number), 80),
            (node, 30_000 + u16::from(self.number)),
        ];
        let clients = [
            (address(family, PODS, 250), true, Hook::Prerouting),
            (address(family, CLIENTS, 200), false, Hook::Prerouting),
            (address(family, CLIENTS, 201), false, Hook::Prerouting),
            (node, true, Hook::Output),
        ];
        for (place, frontend) in frontends.into_iter().enumerate() {
            for (client, is_inside, hook) in clients {
                // Policy Local of external frontends does not concern clients of this node.
                let is_local =
                    self.service.external_traffic_policy == TrafficPolicy::Local && !(is_inside && place > 0);
                let right: BTreeSet<IpAddr> = self
                    .endpoints
                    .iter()
                    .filter(|(_, is_here)| !is_local || *is_here)
                    .map(|(last, _)| address(family, PODS, *last))
                    .collect();
                let (_, protocol) = PROTOCOLS[usize::from(self.number) % PROTOCOLS.len()];
                for random in [0, u32::MAX] {
                    fake.set_random_numbers([random; 8]);
                    let mut packet = Packet::new(protocol, (client, 999), frontend);
                    let context = format!("{frontend:?} from {client}, protocol {protocol}, {right:?}");
                    let walk = fake.walk(hook, &mut packet);
                    let mut fate = walk.fate;
                    match walk.actions.as_slice() {
                        [Action::DestinationTranslated(to, 8080)] => {
                            assert!(right.contains(to), "{context}: {walk:?}");
                            seen.translated += 1;
                            continue;
                        }
                        [] => {}
                        other => panic!("{context}: {other:?}"),
                    }
                    let next = match hook {
                        _ if frontend.0 == node => Some(Hook::Input),
                        Hook::Prerouting => Some(Hook::Forward),
                        _ => None,
                    };
                    if let Some(next) = next.filter(|_| fate == Fate::Accepted) {
                        fate = fake.walk(next, &mut packet).fate;
                    }
                    if right.is_empty() && self.endpoints.is_empty() {
                        // A client outside of the ranges of a load balancer gets no answer.
                        let has_ranges = place == 2 && !self.service.load_balancer_source_ranges.is_empty();
                        let is_right = matches!(fate, Fate::Rejected(_)) || has_ranges && fate == Fate::Dropped;
                        assert!(is_right, "{context}: {fate:?}, {walk:?}");
                    } else if misses == Misses::Always {
                        // The packet passes as if the frontend did not exist.
                        assert!(!matches!(fate, Fate::Rejected(_)), "{context}: {fate:?}, {walk:?}");
                    } else {
                        assert_eq!(fate, Fate::Dropped, "{context}: {walk:?}");
                        seen.dropped += 1;
                    }
                }
            }
        }
    }
}

/// Changes the endpoints of all Services step by step, and checks all of them after each step.
fn walk_with(family: Family, misses: Misses) -> Seen {
    let fake = FakeKernel::new();
    fake.set_local_addresses([address(family, NODES, 1)]);
    let mut rig: Rig<FakeNftables> = Rig::new(family, fake.connect());
    let mut cases = Vec::new();
    for (number, service) in (1..).zip(shapes(family)) {
        rig.apply([Change::from(service.clone())]);
        cases.push(Case { key: key(number), number, service, endpoints: BTreeSet::new() });
    }
    let mut seen = Seen::default();
    for case in &mut cases {
        let base = case.number * 8;
        let steps: [&[(bool, u8, bool)]; 8] = [
            &[],
            &[(true, base, true)],
            &[(true, base + 1, false)],
            &[(true, base + 2, true)],
            // One endpoint replaces another.
            &[(false, base, true), (true, base + 3, true)],
            // The last endpoint moves into a free slot.
            &[(false, base + 3, true)],
            &[(false, base + 1, false), (false, base + 2, true), (true, base + 4, true)],
            &[(false, base + 4, true)],
        ];
        for step in steps {
            // Clients are recorded before the change.
            case.check(family, &fake, Misses::Never, &mut Seen::default());
            let changes: Vec<Change> = step
                .iter()
                .map(|(is_added, last, is_here)| match is_added {
                    true => case.add(*last, *is_here, family),
                    false => case.remove(*last, family),
                })
                .collect();
            rig.apply(changes);
            case.check(family, &fake, misses, &mut seen);
        }
    }
    seen
}

#[test]
fn a_lookup_that_misses_refuses_nobody_and_leads_to_no_wrong_endpoint() {
    for family in Family::BOTH {
        let never = walk_with(family, Misses::Never);
        let once = walk_with(family, Misses::First(1));
        let twice = walk_with(family, Misses::First(2));
        assert!(once.translated > never.translated * 9 / 10, "the rules look twice: {once:?}, {never:?}");
        assert!(twice.translated < once.translated && twice.dropped > once.dropped, "{twice:?}, {once:?}");
    }
}

#[test]
fn lookups_that_always_miss_refuse_nobody() {
    for family in Family::BOTH {
        walk_with(family, Misses::Always);
    }
}
