//! Where kube-proxy does something else than Headgate by design. Such differences are named, and do
//! not count as differences of the kernel.

use std::{collections::BTreeSet, net::IpAddr};

use headgate_core::{
    Family, ServiceKey, State,
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
    let (Frontend::Address(address, ..), Some(service)) =
        (frontend, state.entry(key).and_then(|entry| entry.service()))
    else {
        return (entry, reasons);
    };
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
