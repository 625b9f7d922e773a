//! The table that a state asks for.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use super::{Admitted, Entry, Fate, NodePortsAt, Table, table::fate_of};
use crate::{
    behaviours::view::{Outcome, ServicePortView, service_views},
    dataplane::iptables::NodePortAddresses,
    explain::{Mode, NodeSettings},
    model::{Family, NodeFacts, Protocol, ServiceKey, TrafficPolicy},
    state::{ServiceEntry, State, frontends::Frontend},
};

/// Returns the table that a node with these facts and settings should have for some Services. The
/// cost depends only on these Services.
///
/// A caller outside of the agent does not know the results of the agent's health checks
/// ([`NodeFacts::failing`]). It can compare its table with that of the agent only for Services
/// without failing endpoints.
#[must_use]
pub fn expected<'a>(
    state: &State,
    keys: impl IntoIterator<Item = &'a Arc<ServiceKey>>,
    family: Family,
    facts: &NodeFacts,
    settings: &NodeSettings,
) -> Table {
    let views = keys.into_iter().flat_map(|key| service_views(state, key, family, facts));
    of_views(views, family, settings)
}

/// Returns the table of these views of Services.
#[must_use]
pub fn of_views(views: impl IntoIterator<Item = ServicePortView>, family: Family, settings: &NodeSettings) -> Table {
    let mut table = Table { node_ports_at: node_ports_at(family, settings), ..Table::new(family) };
    views.into_iter().for_each(|view| add(&mut table, &view, settings));
    table
}

/// Returns the frontends that no expected table verifies; see [`Table::unverified`]. A caller sets
/// them in a table of a kernel before it computes digests. The cost grows with the number of
/// Services, but is small for each.
#[must_use]
pub fn unverified(state: &State, facts: &NodeFacts, settings: &NodeSettings, family: Family) -> BTreeSet<Frontend> {
    let may_be_unverified = |entry: &ServiceEntry| {
        entry.service().is_some_and(|service| {
            let is_elsewhere =
                |address: &IpAddr| service.external_ips.contains(address) || service.cluster_ips.contains(address);
            !service.load_balancer_source_ranges.is_empty() && service.load_balancer_ips.iter().any(is_elsewhere)
        })
    };
    let keys = state.entries().filter(|(_, entry)| may_be_unverified(entry)).map(|(key, _)| key);
    expected(state, keys, family, facts, settings).unverified
}

/// The addresses at which NodePorts answer, if the settings name them.
fn node_ports_at(family: Family, settings: &NodeSettings) -> NodePortsAt {
    match settings.node_ports(family) {
        NodePortAddresses::All => NodePortsAt::AnyAddress,
        NodePortAddresses::Only(addresses) => {
            NodePortsAt::Only(addresses.iter().filter(|address| Family::of(**address) == family).copied().collect())
        }
    }
}

/// Adds the frontends of a port. A Service may list an address or a port twice: the first counts.
fn add(table: &mut Table, view: &ServicePortView, settings: &NodeSettings) {
    let at = |address: IpAddr| Frontend::Address(address, view.protocol, view.port);
    if let Some(address) = view.cluster_ip {
        let policy = view.internal_traffic_policy;
        let fate = direct(view, settings, || fate_of(view, policy));
        let reaches_proxy = [reaches_proxy(view, settings, policy); 3];
        table.entries.entry(at(address)).or_insert_with(|| Entry { reaches_proxy, ..Entry::always(&fate) });
    }
    if !view.is_externally_accessible() {
        return;
    }
    let of = |is_from_inside| {
        let policy = view.external_policy(is_from_inside);
        (direct(view, settings, || fate_of(view, policy)), reaches_proxy(view, settings, policy))
    };
    let (outside, mut inside) = (of(false), of(true));
    if is_over_iptables(settings) && outside.0 == Fate::Dropped {
        // Without the proxy, one rule refuses the packets of all clients.
        inside.0 = dropped_instead(inside.0);
    }
    let pod = if settings.masquerade.detector(view.family).is_some() { &inside } else { &outside };
    let of_origins = [&outside, pod, &inside];
    let entry = Entry {
        fates: of_origins.map(|(fate, _)| fate.clone()),
        reaches_proxy: of_origins.map(|(_, reaches_proxy)| *reaches_proxy),
        admitted: Admitted::All,
    };
    for address in &view.external_ips {
        table.entries.entry(at(*address)).or_insert_with(|| entry.clone());
    }
    for address in &view.load_balancer_ips {
        let admitted = admitted(view, *address, settings);
        let is_listed_twice = view.external_ips.contains(address) || view.cluster_ip == Some(*address);
        if is_listed_twice && admitted != Admitted::All {
            table.unverified.insert(at(*address));
        }
        let mut entry = Entry { admitted, ..entry.clone() };
        if is_over_iptables(settings) && entry.admitted != Admitted::All {
            // Without the proxy, the rule that drops the packets of other clients comes first.
            entry.fates = entry.fates.map(dropped_instead);
        }
        table.entries.entry(at(*address)).or_insert(entry);
    }
    if view.node_port != 0 && *settings.node_ports(view.family) != NodePortAddresses::Only(Vec::new()) {
        let frontend = Frontend::NodePort(view.family, view.protocol, view.node_port);
        table.entries.entry(frontend).or_insert(entry);
    }
}

fn is_over_iptables(settings: &NodeSettings) -> bool {
    settings.mode == Mode::UserspaceIptables
}

fn dropped_instead(fate: Fate) -> Fate {
    if fate == Fate::Rejected { Fate::Dropped } else { fate }
}

/// The fate while no proxy accepts connections: only it sends headers, and it refuses SCTP.
fn direct(view: &ServicePortView, settings: &NodeSettings, fate: impl FnOnce() -> Fate) -> Fate {
    let is_userspace = matches!(settings.mode, Mode::Userspace | Mode::UserspaceIptables);
    if is_userspace && view.protocol == Protocol::Sctp {
        return Fate::Rejected;
    }
    match fate() {
        Fate::Forwarded(_) if is_userspace && view.proxy_protocol.is_some() => Fate::Rejected,
        fate => fate,
    }
}

/// Whether rules of iptables lead connections to the proxy while it accepts connections.
fn reaches_proxy(view: &ServicePortView, settings: &NodeSettings, policy: TrafficPolicy) -> bool {
    is_over_iptables(settings)
        && view.protocol == Protocol::Tcp
        && !view.bypasses_proxy
        && matches!(view.outcome(policy), Outcome::Forwarded(_))
}

/// The clients of a load balancer IP. Without endpoints, some modes reject the packets of all
/// clients. So do the rules of iptables in front of the proxy with SCTP.
fn admitted(view: &ServicePortView, address: IpAddr, settings: &NodeSettings) -> Admitted {
    let ranges = &view.source_ranges;
    let is_refused = is_over_iptables(settings) && view.protocol == Protocol::Sctp;
    let is_checked = view.has_any_endpoint || settings.mode.guards_without_endpoints();
    if ranges.is_open() || !is_checked || is_refused {
        return Admitted::All;
    }
    Admitted::only(ranges.ranges.iter().copied().chain(ranges.admits_node.then(|| address.into())))
}
