//! The Services that a node needs first.

use headgate_core::{Change, Dirty, NodeFacts, Protocol, Service, ServiceKey, State, StateSource};

const DNS_PORT: u16 = 53;

/// A source whose state contains only what other software needs first: the API server
/// (`default/kubernetes`), and DNS (a UDP port 53); no ServiceCIDRs, so that no rule drops packets
/// to others.
pub(super) struct FirstServices<'a>(pub(super) &'a dyn StateSource);

impl StateSource for FirstServices<'_> {
    fn look(&self, read: &mut dyn FnMut(&State, &NodeFacts, &Dirty)) {
        self.0.look(&mut |state, node, dirty| read(&first(state), node, dirty));
    }
}

fn is_first(key: &ServiceKey, service: &Service) -> bool {
    let is_dns = || service.ports.iter().any(|port| port.protocol == Protocol::Udp && port.port == DNS_PORT);
    (&*key.namespace, &*key.name) == ("default", "kubernetes") || is_dns()
}

fn first(state: &State) -> State {
    let (mut first, mut dirty) = (State::default(), Dirty::default());
    for (key, entry) in state.entries() {
        let Some(service) = entry.service().filter(|service| is_first(key, service)) else { continue };
        first.apply(Change::from(service.clone()), &mut dirty);
        for endpoint in entry.endpoints().values() {
            first.apply(Change::Endpoint(ServiceKey::clone(key), endpoint.clone()), &mut dirty);
        }
    }
    first
}
