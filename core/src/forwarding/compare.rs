//! The differences between the table of a kernel and a state.

use std::{collections::BTreeSet, fmt, sync::Arc};

use super::{
    Admitted, Entry, Fate, NodePortsAt, Origin, Problem, Table, expected, expected::node_ports_at, table::owner,
};
use crate::{
    explain::NodeSettings,
    model::{Family, Protocol, ServiceKey},
    node_facts::NodeFacts,
    state::{State, frontends::Frontend},
};

/// The maximum number of differences that a comparison lists.
pub const MAX_DIFFERENCES: usize = 1000;

/// The result of a comparison.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Comparison {
    /// Number of frontends that the state asks for and that were compared.
    pub frontends: u64,
    /// Number of differences.
    pub total: u64,
    /// The differences, at most [`MAX_DIFFERENCES`].
    pub differences: Vec<Difference>,
    /// The parts of the kernel's rules that the decoder does not understand. Sentences.
    pub not_understood: Vec<String>,
}

/// A difference. [`fmt::Display`] writes it as a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    /// A packet for a frontend has another fate than the state asks for.
    Fate {
        /// The Service that owns the frontend. `None` if no Service asks for the frontend.
        service: Option<Arc<ServiceKey>>,
        /// The frontend.
        frontend: Frontend,
        /// Where the packet comes from. `None` for all origins.
        origin: Option<Origin>,
        /// What the state asks for.
        expected: Fate,
        /// What the kernel does.
        found: Fate,
    },
    /// Other clients than the state asks for reach a frontend.
    Clients {
        /// The Service that owns the frontend.
        service: Option<Arc<ServiceKey>>,
        /// The frontend.
        frontend: Frontend,
        /// What the state asks for.
        expected: Admitted,
        /// What the kernel does.
        found: Admitted,
    },
    /// Connections to a frontend do not reach the proxy of mode userspace, or reach it although the
    /// state does not ask for it.
    Proxy {
        /// The Service that owns the frontend.
        service: Option<Arc<ServiceKey>>,
        /// The frontend.
        frontend: Frontend,
        /// Where the connections come from. `None` for all origins.
        origin: Option<Origin>,
        /// What the kernel does.
        reaches_proxy: bool,
    },
    /// The difference concerns all Services. A sentence.
    Everything(String),
}

impl Difference {
    /// The Service that the difference concerns.
    #[must_use]
    pub fn service(&self) -> Option<&Arc<ServiceKey>> {
        match self {
            Self::Fate { service, .. } | Self::Clients { service, .. } | Self::Proxy { service, .. } => {
                service.as_ref()
            }
            Self::Everything(_) => None,
        }
    }

    fn place(&self) -> (Option<&Arc<ServiceKey>>, Option<Frontend>) {
        match self {
            Self::Fate { service, frontend, .. }
            | Self::Clients { service, frontend, .. }
            | Self::Proxy { service, frontend, .. } => (service.as_ref(), Some(*frontend)),
            Self::Everything(_) => (None, None),
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = |service: &Option<Arc<ServiceKey>>| match service {
            Some(service) => format!("Service {service}"),
            None => "no Service".to_owned(),
        };
        let from = |origin: &Option<Origin>| origin.map_or_else(String::new, |origin| format!(" {origin}"));
        match self {
            Self::Everything(sentence) => f.write_str(sentence),
            Self::Proxy { service, frontend, origin, reaches_proxy } => {
                let what = if *reaches_proxy { "reach the proxy, but should not" } else { "do not reach the proxy" };
                write!(f, "{}: connections{} to {frontend} {what}", owner(service), from(origin))
            }
            Self::Fate { service, frontend, origin, expected, found } => {
                let origin = from(origin);
                let owner = owner(service);
                write!(f, "{owner}: connections{origin} to {frontend} are {found}, but should be {expected}")
            }
            Self::Clients { service, frontend, expected, found } => {
                write!(f, "{}: {found} can reach {frontend}, but {expected} should", owner(service))
            }
        }
    }
}

impl Comparison {
    fn add(&mut self, difference: Difference) {
        self.total += 1;
        if self.differences.len() < MAX_DIFFERENCES {
            self.differences.push(difference);
        }
    }

    /// Adds the result of the other family.
    pub fn merge(&mut self, other: Self) {
        self.frontends += other.frontends;
        self.total += other.total;
        self.differences.extend(other.differences);
        self.differences.truncate(MAX_DIFFERENCES);
        self.not_understood.extend(other.not_understood);
    }

    /// The Services with differences.
    #[must_use]
    pub fn services(&self) -> BTreeSet<Arc<ServiceKey>> {
        self.differences.iter().filter_map(Difference::service).cloned().collect()
    }
}

/// Compares `found`, the table of a kernel, with the table that the state asks for. Leaves out the
/// Services for which `is_verified` returns false: those that wait to be programmed, or whose rules
/// the kernel rejects. The cost grows with the number of Services.
#[must_use]
pub fn compare(
    state: &State,
    facts: &NodeFacts,
    settings: &NodeSettings,
    found: Table,
    is_verified: &dyn Fn(&ServiceKey) -> bool,
) -> Comparison {
    let mut comparer = Comparer::new(found, settings);
    comparer.services(state, facts, settings, state.entries().map(|(key, _)| key), is_verified);
    comparer.finish(state, is_verified, true)
}

/// Compares a table part by part, so that the caller can release the lock of the state in between.
/// Computes the expected table one Service at a time.
#[derive(Debug)]
pub struct Comparer {
    found: Table,
    comparison: Comparison,
    is_broken: bool,
    has_node_ports: bool,
}

impl Comparer {
    /// Begins to compare `found`, the table of a kernel.
    #[must_use]
    pub fn new(mut found: Table, settings: &NodeSettings) -> Self {
        let mut comparison = Comparison::default();
        let is_broken = found.is_broken();
        for problem in std::mem::take(&mut found.problems) {
            match problem {
                Problem::Broken(sentence) => comparison.add(Difference::Everything(sentence)),
                Problem::NotUnderstood(sentence) | Problem::GivenUp(sentence) => {
                    comparison.not_understood.push(sentence);
                }
            }
        }
        let expected = node_ports_at(found.family, settings);
        let difference = node_ports_difference(found.family, &expected, &found.node_ports_at);
        let difference = difference.filter(|_| !is_broken);
        let is_nowhere = found.node_ports_at == NodePortsAt::Listed(BTreeSet::new());
        let has_node_ports = difference.is_none() && !is_nowhere;
        difference.into_iter().for_each(|difference| comparison.add(difference));
        Self { found, comparison, is_broken, has_node_ports }
    }

    /// Compares these Services, each at most once. See [`compare`].
    pub fn services<'a>(
        &mut self,
        state: &State,
        facts: &NodeFacts,
        settings: &NodeSettings,
        keys: impl IntoIterator<Item = &'a Arc<ServiceKey>>,
        is_verified: &dyn Fn(&ServiceKey) -> bool,
    ) {
        if self.is_broken {
            return;
        }
        for key in keys.into_iter().filter(|key| is_verified(key)) {
            let wanted = expected(state, [key], self.found.family, facts, settings);
            for (frontend, entry) in &wanted.entries {
                let found = self.found.entries.remove(frontend).unwrap_or_default();
                if !wanted.unverified.contains(frontend) && self.is_compared(frontend) {
                    self.comparison.frontends += 1;
                    self.comparison.add_entry(Some(key), *frontend, entry, &found);
                    self.node_port_addresses(state, key, *frontend, entry);
                }
            }
        }
    }

    /// Compares the addresses of the node that serve a NodePort otherwise than the others.
    fn node_port_addresses(&mut self, state: &State, key: &Arc<ServiceKey>, frontend: Frontend, expected: &Entry) {
        let (Frontend::NodePort(_, protocol, port), NodePortsAt::Only(addresses) | NodePortsAt::Listed(addresses)) =
            (frontend, &self.found.node_ports_at)
        else {
            return;
        };
        for address in addresses {
            let frontend = Frontend::Address(*address, protocol, port);
            // The address and port may belong to another Service.
            if state.frontends().owner(&frontend).is_none()
                && let Some(found) = self.found.entries.remove(&frontend)
            {
                self.comparison.add_entry(Some(key), frontend, expected, &found);
            }
        }
    }

    /// Ends the comparison: what is left in the table serves frontends that no Service asks for.
    /// `is_settled` is false while changes of the state wait to be programmed: such a frontend may
    /// then belong to a Service that was removed.
    #[must_use]
    pub fn finish(mut self, state: &State, is_verified: &dyn Fn(&ServiceKey) -> bool, is_settled: bool) -> Comparison {
        let left = std::mem::take(&mut self.found.entries);
        for (frontend, entry) in left.iter().filter(|_| !self.is_broken) {
            let key = owner(state.frontends(), frontend);
            if key.map_or(is_settled, is_verified) && self.is_compared(frontend) {
                let key = key.and_then(|key| state.key(key));
                self.comparison.add_entry(key, *frontend, &Entry::default(), entry);
            }
        }
        // The Services of a state have no order, and a list with an order is easier to read.
        self.comparison.differences.sort_by(|a, b| a.place().cmp(&b.place()));
        self.comparison
    }

    fn is_compared(&self, frontend: &Frontend) -> bool {
        let (Frontend::Address(_, protocol, _) | Frontend::NodePort(_, protocol, _)) = frontend;
        let is_left_out = self.found.leaves_out_sctp && *protocol == Protocol::Sctp;
        !is_left_out && (self.has_node_ports || !matches!(frontend, Frontend::NodePort(..)))
    }
}

fn node_ports_difference(family: Family, expected: &NodePortsAt, found: &NodePortsAt) -> Option<Difference> {
    use NodePortsAt::{AnyAddress, Listed, Only, Unknown};
    // Whether NodePorts answer on 127.0.0.0/8 is a setting of the dataplane.
    let without_loopback = |at: &NodePortsAt| match at {
        Unknown | AnyAddress => None,
        Only(addresses) | Listed(addresses) => {
            Some(addresses.iter().filter(|address| !address.is_loopback()).copied().collect::<BTreeSet<_>>())
        }
    };
    let at = [expected, found].map(without_loopback);
    let is_same = match (expected, found) {
        (Unknown, _) | (_, Unknown) | (AnyAddress, Listed(_)) => true,
        _ => at[0] == at[1],
    };
    let [expected, found] = at.map(|at| match at {
        None => "every address of the node".to_owned(),
        Some(addresses) if addresses.is_empty() => "no address".to_owned(),
        Some(addresses) => addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    });
    let sentence = || format!("{family} NodePorts answer on {found}, but should answer on {expected}");
    (!is_same).then(|| Difference::Everything(sentence()))
}

impl Comparison {
    fn add_entry(&mut self, service: Option<&Arc<ServiceKey>>, frontend: Frontend, expected: &Entry, found: &Entry) {
        if expected == found {
            return;
        }
        let pairs = Origin::ALL.map(|origin| (expected.fate(origin), found.fate(origin)));
        let is_same_everywhere = pairs.iter().all(|pair| *pair == pairs[0]);
        for (origin, (expected, found)) in Origin::ALL.into_iter().zip(pairs) {
            if expected == found || (is_same_everywhere && origin != Origin::ALL[0]) {
                continue;
            }
            self.add(Difference::Fate {
                service: service.cloned(),
                frontend,
                origin: (!is_same_everywhere).then_some(origin),
                expected: expected.clone(),
                found: found.clone(),
            });
        }
        // A rule without which the fate differs too is one difference.
        let is_wrong = |origin: &Origin| {
            let at = *origin as usize;
            expected.fates[at] == found.fates[at] && expected.reaches_proxy[at] != found.reaches_proxy[at]
        };
        let wrong: Vec<Origin> = Origin::ALL.into_iter().filter(is_wrong).collect();
        let is_wrong_everywhere = wrong == Origin::ALL && [[true; 3], [false; 3]].contains(&found.reaches_proxy);
        for origin in wrong.into_iter().take(if is_wrong_everywhere { 1 } else { Origin::ALL.len() }) {
            self.add(Difference::Proxy {
                service: service.cloned(),
                frontend,
                origin: (!is_wrong_everywhere).then_some(origin),
                reaches_proxy: found.reaches_proxy[origin as usize],
            });
        }
        let is_served = |entry: &Entry| entry.fates.iter().any(|fate| *fate != Fate::NotServed);
        if expected.admitted != found.admitted && is_served(found) && is_served(expected) {
            self.add(Difference::Clients {
                service: service.cloned(),
                frontend,
                expected: expected.admitted.clone(),
                found: found.admitted.clone(),
            });
        }
    }
}
