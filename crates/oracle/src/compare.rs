//! The differences between the table of a kernel and a state.

use std::{collections::BTreeSet, fmt, sync::Arc};

use headgate_core::{
    Family, NodeFacts, Protocol, ServiceKey, State,
    explain::{Mode, NodeSettings},
    forwarding::{Entry, Fate, NodePortsAt, Origin, Problem, Table, expected, of_views, owner},
    frontends::Frontend,
};

use crate::kube_proxy::{IS_CONTESTED, as_kube_proxy};

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
    /// The mode of the kube-proxy whose rules were compared. `None` for rules of Headgate.
    pub of_kube_proxy: Option<Mode>,
    /// Where the rules of kube-proxy do something else by design, at most [`MAX_DIFFERENCES`], and
    /// their number. Not part of `total` and `differences`.
    pub by_design: Vec<Difference>,
    /// See `by_design`.
    pub by_design_total: u64,
    /// The parts of the kernel's rules that the decoder does not understand. Sentences.
    pub not_understood: Vec<String>,
}

/// A difference. [`fmt::Display`] writes it as a sentence that names the Service first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The Service that owns the frontend. `None` if no Service asks for the frontend, and for a
    /// difference that concerns all Services.
    pub service: Option<Arc<ServiceKey>>,
    /// The frontend. `None` for a difference that concerns all Services.
    frontend: Option<Frontend>,
    /// What the kernel does, and what the state asks for. Does not name the Service.
    pub sentence: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.service, self.frontend) {
            (Some(service), _) => write!(f, "Service {service}: {}", self.sentence),
            (None, Some(_)) => write!(f, "no Service: {}", self.sentence),
            (None, None) => f.write_str(&self.sentence),
        }
    }
}

impl Comparison {
    fn add(
        &mut self,
        service: Option<&Arc<ServiceKey>>,
        frontend: Option<Frontend>,
        sentence: impl FnOnce() -> String,
    ) {
        self.total += 1;
        if self.differences.len() < MAX_DIFFERENCES {
            self.differences.push(Difference { service: service.cloned(), frontend, sentence: sentence() });
        }
    }

    /// Moves what was found since `mark` to the differences by design, with the reason.
    fn is_by_design(&mut self, (total, count): (u64, usize), reason: &str) {
        self.by_design_total += self.total - total;
        self.total = total;
        for mut difference in self.differences.drain(count..) {
            difference.sentence += &format!(" ({reason})");
            if self.by_design.len() < MAX_DIFFERENCES {
                self.by_design.push(difference);
            }
        }
    }

    /// Keeps only the differences that another comparison found too.
    pub fn keep_common(&mut self, other: &Self) {
        self.differences.retain(|difference| other.differences.contains(difference));
        // Those that are not listed cannot be compared.
        let unlisted = self.total.min(other.total).saturating_sub(MAX_DIFFERENCES as u64);
        self.total = self.differences.len() as u64 + unlisted;
        self.not_understood.clone_from(&other.not_understood);
    }

    fn mark(&self) -> (u64, usize) {
        (self.total, self.differences.len())
    }

    /// Adds the result of the other family.
    pub fn merge(&mut self, other: Self) {
        self.frontends += other.frontends;
        self.total += other.total;
        self.differences.extend(other.differences);
        self.differences.truncate(MAX_DIFFERENCES);
        self.by_design.extend(other.by_design);
        self.by_design.truncate(MAX_DIFFERENCES);
        self.by_design_total += other.by_design_total;
        self.of_kube_proxy = self.of_kube_proxy.or(other.of_kube_proxy);
        self.not_understood.extend(other.not_understood);
    }

    /// The Services with differences.
    pub fn services(&self) -> BTreeSet<Arc<ServiceKey>> {
        self.differences.iter().filter_map(|difference| difference.service.clone()).collect()
    }
}

/// Compares `found`, the table of a kernel, with the table that the state asks for. Leaves out the
/// Services for which `is_verified` returns false: those that wait to be programmed, or whose rules
/// the kernel rejects. The cost grows with the number of Services.
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
    pub fn new(mut found: Table, settings: &NodeSettings) -> Self {
        let mut comparison = Comparison { of_kube_proxy: found.of_kube_proxy, ..Comparison::default() };
        let is_broken = found.is_broken();
        for problem in std::mem::take(&mut found.problems) {
            match problem {
                Problem::Broken(sentence) => comparison.add(None, None, || sentence),
                Problem::NotUnderstood(sentence) | Problem::GivenUp(sentence) => {
                    comparison.not_understood.push(sentence);
                }
            }
        }
        let expected = of_views([], found.family, settings).node_ports_at;
        let difference = node_ports_difference(found.family, &expected, &found.node_ports_at);
        let difference = difference.filter(|_| !is_broken);
        let is_nowhere = found.node_ports_at == NodePortsAt::Listed(BTreeSet::new());
        let has_node_ports = difference.is_none() && !is_nowhere;
        difference.into_iter().for_each(|sentence| comparison.add(None, None, || sentence));
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
        let mode = self.found.of_kube_proxy.unwrap_or(settings.mode);
        let settings = &NodeSettings { mode, ..settings.clone() };
        for key in keys.into_iter().filter(|key| is_verified(key)) {
            let wanted = expected(state, [key], self.found.family, facts, settings);
            for (frontend, entry) in &wanted.entries {
                let found = self.found.entries.remove(frontend).unwrap_or_default();
                if !wanted.unverified.contains(frontend) && self.is_compared(frontend) {
                    self.comparison.frontends += 1;
                    self.entry(state, key, *frontend, entry, &found);
                    self.node_port_addresses(state, key, *frontend, entry);
                }
            }
        }
    }

    fn entry(&mut self, state: &State, key: &Arc<ServiceKey>, frontend: Frontend, expected: &Entry, found: &Entry) {
        let (mark, all) = (self.comparison.mark(), &mut self.comparison);
        let Some(mode) = self.found.of_kube_proxy else {
            return all.add_entry(Some(key), frontend, expected, found);
        };
        if state.frontends().is_contested(&frontend) {
            all.add_entry(Some(key), frontend, expected, found);
            return all.is_by_design(mark, IS_CONTESTED);
        }
        let (theirs, reasons) = as_kube_proxy(state, key, frontend, mode, expected, found);
        all.add_entry(Some(key), frontend, &theirs, found);
        if all.mark() == mark && !reasons.is_empty() {
            all.add_entry(Some(key), frontend, expected, found);
            all.is_by_design(mark, &reasons.join("; "));
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
    pub fn finish(mut self, state: &State, is_verified: &dyn Fn(&ServiceKey) -> bool, is_settled: bool) -> Comparison {
        let left = std::mem::take(&mut self.found.entries);
        for (frontend, entry) in left.iter().filter(|_| !self.is_broken) {
            let key = owner(state.frontends(), frontend);
            if key.map_or(is_settled, is_verified) && self.is_compared(frontend) {
                let (key, mark) = (key.and_then(|key| state.key(key)), self.comparison.mark());
                self.comparison.add_entry(key, *frontend, &Entry::default(), entry);
                if self.found.of_kube_proxy.is_some() && state.frontends().is_contested(frontend) {
                    self.comparison.is_by_design(mark, IS_CONTESTED);
                }
            }
        }
        // The Services of a state have no order, and a list with an order is easier to read.
        self.comparison.differences.sort_by(|a, b| (&a.service, a.frontend).cmp(&(&b.service, b.frontend)));
        self.comparison
    }

    fn is_compared(&self, frontend: &Frontend) -> bool {
        let is_left_out = self.found.leaves_out_sctp && frontend.protocol() == Protocol::Sctp;
        !is_left_out && (self.has_node_ports || !matches!(frontend, Frontend::NodePort(..)))
    }
}

fn node_ports_difference(family: Family, expected: &NodePortsAt, found: &NodePortsAt) -> Option<String> {
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
    (!is_same).then(|| format!("{family} NodePorts answer on {found}, but should answer on {expected}"))
}

impl Comparison {
    fn add_entry(&mut self, service: Option<&Arc<ServiceKey>>, frontend: Frontend, expected: &Entry, found: &Entry) {
        if expected == found {
            return;
        }
        let from = |origin: Option<Origin>| origin.map_or_else(String::new, |origin| format!(" {origin}"));
        let pairs = Origin::ALL.map(|origin| (expected.fate(origin), found.fate(origin)));
        let is_same_everywhere = pairs.iter().all(|pair| *pair == pairs[0]);
        for (origin, (expected, found)) in Origin::ALL.into_iter().zip(pairs) {
            if expected == found || (is_same_everywhere && origin != Origin::ALL[0]) {
                continue;
            }
            let from = from((!is_same_everywhere).then_some(origin));
            self.add(service, Some(frontend), || {
                format!("connections{from} to {frontend} are {found}, but should be {expected}")
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
            let from = from((!is_wrong_everywhere).then_some(origin));
            let reaches_proxy = found.reaches_proxy[origin as usize];
            let what = if reaches_proxy { "reach the proxy, but should not" } else { "do not reach the proxy" };
            self.add(service, Some(frontend), || format!("connections{from} to {frontend} {what}"));
        }
        let is_served = |entry: &Entry| entry.fates.iter().any(|fate| *fate != Fate::NotServed);
        if expected.admitted != found.admitted && is_served(found) && is_served(expected) {
            let (expected, found) = (&expected.admitted, &found.admitted);
            self.add(service, Some(frontend), || format!("{found} can reach {frontend}, but {expected} should"));
        }
    }
}
