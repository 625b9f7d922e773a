//! Where kube-proxy does something else than Headgate by design. Such differences are named, and do
//! not count as differences of the kernel.

use std::{collections::BTreeSet, net::IpAddr};

use headgate_core::{
    Endpoint, Family, ServiceKey, State,
    explain::Mode,
    forwarding::{Admitted, Entry, Fate, Origin},
    frontends::Frontend,
};
use ipnet::IpNet;

/// Several Services specify a frontend.
pub(crate) const IS_CONTESTED: &str = "several Services specify it, or it is reserved: Headgate gives it to one Service or to none, and kube-proxy to any of them";

/// See `docs/behaviours.md`: a connection of the node itself to an external address.
const IS_NOT_REFUSED_TO_THE_NODE: &str = "without endpoints, Headgate rejects connections of the node itself, and kube-proxy in mode iptables has no rule for them, so they wait for a time-out";

const ADMITS_ADDRESSES: &str = "the node may be its own client: Headgate then admits this address as the source, and kube-proxy each load balancer address of the Service";

const IGNORES_WEIGHTS: &str = "kube-proxy ignores weights, also the weight 0";

/// What kube-proxy does with a frontend of a Service for which Headgate does `expected`. `found` is
/// what it really does. Also returns the reasons if both differ.
pub(crate) fn as_kube_proxy(
    state: &State,
    key: &ServiceKey,
    frontend: Frontend,
    mode: Mode,
    expected: &Entry,
    found: &Entry,
) -> (Entry, Vec<&'static str>) {
    let (mut entry, mut reasons) = (expected.clone(), Vec::new());
    let of_service = state.entry(key).and_then(|entry| Some((entry.service()?, entry.endpoints())));
    let Some((service, endpoints)) = of_service else { return (entry, reasons) };
    let has_weight = |ip: IpAddr| {
        let is_used = |endpoint: &Endpoint| {
            endpoint.port_states().any(|one| one.conditions.ready || one.conditions.is_serving_terminating())
        };
        endpoints.get(&ip).is_some_and(|endpoint| endpoint.is_weighted() && is_used(endpoint))
    };
    for origin in Origin::ALL.into_iter().filter(|_| endpoints.are_weighted()) {
        if let (Fate::Forwarded(ours), Fate::Forwarded(theirs)) = (expected.fate(origin), found.fate(origin))
            && ours.iter().all(|endpoint| theirs.contains(endpoint))
            && ours != theirs
            && theirs.iter().all(|endpoint| ours.contains(endpoint) || has_weight(endpoint.ip()))
        {
            entry.set(origin, found.fate(origin).clone());
            reasons = vec![IGNORES_WEIGHTS];
        }
    }
    let Frontend::Address(address, ..) = frontend else { return (entry, reasons) };
    let is_external = !service.cluster_ips.contains(&address);
    if is_external && mode == Mode::Iptables && *expected.fate(Origin::Node) == Fate::Rejected {
        entry.set(Origin::Node, Fate::NotServed);
        reasons.push(IS_NOT_REFUSED_TO_THE_NODE);
    }
    if let (Admitted::Only(ours), Admitted::Only(theirs)) = (&expected.admitted, &found.admitted) {
        let family = Family::of(address);
        let of_service: BTreeSet<IpAddr> =
            service.load_balancer_ips.iter().copied().filter(|ip| Family::of(*ip) == family).collect();
        let all = |ranges: &[IpNet]| joined(ranges.iter().copied().chain(of_service.iter().copied().map(IpNet::from)));
        if all(ours) == all(theirs) {
            entry.admitted = found.admitted.clone();
            if joined(ours.iter().copied()) != joined(theirs.iter().copied()) {
                reasons.push(ADMITS_ADDRESSES);
            }
        }
    }
    (entry, reasons)
}

/// The same addresses in as few ranges as possible: `nft` joins ranges.
fn joined(ranges: impl Iterator<Item = IpNet>) -> Vec<IpNet> {
    let mut joined = IpNet::aggregate(&ranges.collect());
    joined.sort_unstable();
    joined
}
