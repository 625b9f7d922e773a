//! The rules of one service: its own chains, and its lines in the dispatch chains.

use std::{collections::BTreeSet, fmt::Display};

use super::{
    Table,
    config::RenderConfig,
    dispatch::{DispatchLine, Selector, SharedChain},
    fixed::{LOCALHOST_COUNTER, MARK_MASQ},
    line::Line,
    names::{ChainKind, ChainName},
};
use crate::{
    behaviours::endpoint_choice::Destination,
    behaviours::view::{NoLocalEndpoints, ServicePortView},
    model::{Protocol, Service},
};

/// A chain of a service's own, in nat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Name.
    pub name: ChainName,
    /// Complete rules, each a line `-A NAME …`.
    pub rules: String,
}

/// Everything that one service contributes in one family.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ServiceRules {
    /// Its chains; what is referred to comes first.
    pub chains: Vec<Chain>,
    /// Its dispatch lines.
    pub dispatch: Vec<DispatchLine>,
    /// Ports whose Local policies find no endpoint here.
    pub no_local: NoLocalEndpoints,
}

/// Renders a service from the views of its ports.
#[must_use]
pub fn render(config: &RenderConfig, is_compact: bool, service: &Service, views: &[ServicePortView]) -> ServiceRules {
    let mut rules = ServiceRules::default();
    let is_left_out = |view: &&ServicePortView| config.leaves_out_sctp && view.protocol == Protocol::Sctp;
    for view in views.iter().filter(|view| !is_left_out(view)) {
        rules.no_local.add(view.no_local_endpoints());
        Port::new(config, is_compact, view).render(&mut rules);
    }
    if service.health_check_node_port != 0 && !views.is_empty() && !config.beside_ipvs {
        rules.dispatch.push(health_check_line(service));
    }
    rules
}

/// The host's own firewall may not keep a load balancer's health checks out.
fn health_check_line(service: &Service) -> DispatchLine {
    let (protocol, port) = (Protocol::Tcp, service.health_check_node_port);
    let mut rule = String::new();
    Line::bare(&mut rule)
        .protocol(protocol)
        .comment(format_args!("{} health check node port", service.key))
        .port(protocol, port)
        .jump("ACCEPT");
    DispatchLine { chain: SharedChain::FilterNodePorts, selector: Selector::NodePort(protocol, port), rule }
}

/// What becomes of traffic that finds no endpoint of its policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    /// No endpoint anywhere.
    Reject,
    /// Endpoints, but none here, and the policy is Local.
    Drop,
}

struct Port<'a> {
    config: &'a RenderConfig,
    is_compact: bool,
    view: &'a ServicePortView,
    name: String,
    cluster_policy: ChainName,
    local_policy: ChainName,
    external: ChainName,
    firewall: ChainName,
    internal_refusal: Option<Refusal>,
    external_refusal: Option<Refusal>,
    uses_firewall: bool,
}

impl<'a> Port<'a> {
    fn new(config: &'a RenderConfig, is_compact: bool, view: &'a ServicePortView) -> Self {
        let cluster_policy = ChainName::of_port(ChainKind::ClusterPolicy, view);
        let refusal = |is_local: bool| match (view.has_any_endpoint, is_local && view.local_endpoints.is_empty()) {
            (false, _) => Some(Refusal::Reject),
            (true, true) => Some(Refusal::Drop),
            (true, false) => None,
        };
        Self {
            config,
            is_compact,
            view,
            name: view.display_name(),
            cluster_policy,
            local_policy: cluster_policy.sibling(ChainKind::LocalPolicy),
            external: cluster_policy.sibling(ChainKind::External),
            firewall: cluster_policy.sibling(ChainKind::Firewall),
            internal_refusal: refusal(view.internal_traffic_policy.is_local()),
            external_refusal: refusal(view.external_traffic_policy.is_local()),
            uses_firewall: view.has_any_endpoint && !view.load_balancer_ips.is_empty() && !view.source_ranges.is_open(),
        }
    }

    fn render(&self, rules: &mut ServiceRules) {
        if self.config.beside_ipvs {
            return self.render_short_ways(rules);
        }
        self.endpoint_rules(&self.view.reachable_endpoints(), rules);
        if !self.view.cluster_endpoints.is_empty() && self.view.uses_cluster_endpoints() {
            let is_internal = !self.view.internal_traffic_policy.is_local();
            rules.chains.push(self.policy_chain(self.cluster_policy, &self.view.cluster_endpoints, is_internal));
        }
        if !self.view.local_endpoints.is_empty() && self.view.uses_local_endpoints() {
            let is_internal = self.view.internal_traffic_policy.is_local();
            rules.chains.push(self.policy_chain(self.local_policy, &self.view.local_endpoints, is_internal));
        }
        if self.view.has_any_endpoint && self.view.is_externally_accessible() {
            rules.chains.push(self.external_chain());
        }
        if self.uses_firewall {
            rules.chains.push(self.firewall_chain());
        }
        self.dispatch_cluster_ip(rules);
        self.dispatch_external(rules);
    }

    /// Beside IPVS: a virtual server of an address with Local policy has this node's endpoints alone, so those who take the short way to all
    /// endpoints are translated before they come to it.
    fn render_short_ways(&self, rules: &mut ServiceRules) {
        let view = self.view;
        let has_short_ways = view.external_traffic_policy.is_local() && view.is_externally_accessible();
        if !has_short_ways || view.cluster_endpoints.is_empty() {
            return;
        }
        let endpoints = view.cluster_endpoints.iter().copied().collect();
        self.endpoint_rules(&endpoints, rules);
        rules.chains.push(self.policy_chain(self.cluster_policy, &view.cluster_endpoints, false));
        rules.chains.push(self.external_chain());
        if self.uses_firewall {
            rules.chains.push(self.firewall_chain());
        }
        self.dispatch_external(rules);
    }

    fn endpoint_rules(&self, endpoints: &BTreeSet<Destination>, rules: &mut ServiceRules) {
        if self.is_compact {
            self.hairpin_lines(endpoints, rules);
        } else {
            rules.chains.extend(endpoints.iter().map(|destination| self.endpoint_chain(destination)));
        }
    }

    /// Compact layout: an endpoint of this node that was sent to itself. Endpoints of other nodes are sent to themselves by their own node; those
    /// that no node is known of are taken for this node's, lest nobody does it.
    fn hairpin_lines(&self, endpoints: &BTreeSet<Destination>, rules: &mut ServiceRules) {
        for destination in endpoints.iter().filter(|destination| destination.may_be_here) {
            let address = destination.address;
            let line = |chain, target: &str| {
                let mut rule = String::new();
                Line::bare(&mut rule).source_host(address).destination_host(address).jump(target);
                DispatchLine { chain, selector: Selector::Hairpin(address), rule }
            };
            rules.dispatch.push(line(SharedChain::NatHairpin, "MASQUERADE --random-fully"));
            rules.dispatch.push(line(SharedChain::FilterHairpin, "ACCEPT"));
        }
    }

    fn endpoint_chain(&self, destination: &Destination) -> Chain {
        let chain = ChainName::of_endpoint(self.view, destination);
        let protocol = self.view.protocol;
        let mut rules = String::new();
        Line::append(&mut rules, chain).source_host(destination.address).comment(&self.name).jump(MARK_MASQ);
        let mut dnat = Line::append(&mut rules, chain).protocol(protocol).comment(&self.name);
        if self.view.affinity_timeout_seconds.is_some() {
            dnat = dnat.recent("--set", chain, self.view.family);
        }
        let to = destination.socket_address();
        dnat.add(format_args!("-m {}", protocol.as_lower_str())).jump(format_args!("DNAT --to-destination {to}"));
        Chain { name: chain, rules }
    }

    /// Spreads over endpoints: who has been here goes where he was, the others one in n, one in n − 1, …
    fn policy_chain(&self, chain: ChainName, endpoints: &[Destination], is_internal: bool) -> Chain {
        let mut rules = String::new();
        if is_internal && !self.is_compact {
            self.cluster_ip_masquerade(chain, &mut rules);
        }
        if self.is_compact {
            self.spread_compactly(chain, endpoints, &mut rules);
            return Chain { name: chain, rules };
        }
        let names = endpoints.iter().map(|destination| {
            let to = destination.socket_address();
            (ChainName::of_endpoint(self.view, destination), format!("{} -> {to}", self.name))
        });
        let names: Vec<_> = names.collect();
        if let Some(timeout_seconds) = self.view.affinity_timeout_seconds {
            for (endpoint, comment) in &names {
                Line::append(&mut rules, chain)
                    .comment(comment)
                    .recent(format_args!("--rcheck --seconds {timeout_seconds} --reap"), endpoint, self.view.family)
                    .jump(endpoint);
            }
        }
        for (i, (endpoint, comment)) in names.iter().enumerate() {
            let mut line = Line::append(&mut rules, chain).comment(comment);
            let remaining = names.len() - i;
            if remaining > 1 {
                line = line.one_in(remaining);
            }
            line.jump(endpoint);
        }
        Chain { name: chain, rules }
    }

    /// Compact layout: the DNAT rules themselves, checking and recording the client where there is affinity.
    fn spread_compactly(&self, chain: ChainName, endpoints: &[Destination], rules: &mut String) {
        let (protocol, family) = (self.view.protocol, self.view.family);
        let translate = |line: Line<'_>, destination: &Destination| {
            let line = match self.view.affinity_timeout_seconds {
                Some(_) => line.recent("--set", ChainName::of_endpoint(self.view, destination), family),
                None => line,
            };
            let to = destination.socket_address();
            line.jump(format_args!("DNAT --to-destination {to}"));
        };
        if let Some(timeout_seconds) = self.view.affinity_timeout_seconds {
            for destination in endpoints {
                let check = format_args!("--rcheck --seconds {timeout_seconds} --reap");
                let list = ChainName::of_endpoint(self.view, destination);
                let line = Line::append(rules, chain).protocol(protocol).recent(check, list, family);
                translate(line, destination);
            }
        }
        for (i, destination) in endpoints.iter().enumerate() {
            let mut line = Line::append(rules, chain).protocol(protocol);
            let remaining = endpoints.len() - i;
            if remaining > 1 {
                line = line.one_in(remaining);
            }
            translate(line, destination);
        }
    }

    /// Classic layout. The compact one does this once for each group of ClusterIPs, see [`super::fixed::group_masquerade`].
    fn cluster_ip_masquerade(&self, chain: ChainName, rules: &mut String) {
        let Some(cluster_ip) = self.view.cluster_ip else { return };
        let masquerade = &self.config.masquerade;
        if !masquerade.covers_cluster_ips(self.view.family) {
            return;
        }
        Line::append(rules, chain)
            .masqueraded_to_cluster_ips(masquerade, self.view.family)
            .destination_host(cluster_ip)
            .protocol(self.view.protocol)
            .comment(format_args!("{} cluster IP", self.name))
            .port(self.view.protocol, self.view.port)
            .jump(MARK_MASQ);
    }

    /// Traffic to external destinations. With Local policy, pods of this node and the node itself take the short way to all endpoints:
    /// their traffic has not passed a load balancer that chose this node.
    fn external_chain(&self) -> Chain {
        let (chain, name) = (self.external, &self.name);
        let mut rules = String::new();
        let reaches_cluster = !self.view.cluster_endpoints.is_empty();
        // Only NodePorts have such destinations. Here, and not where NodePorts are looked for, it costs other connections nothing.
        if self.config.counts_packets && self.config.localhost_node_ports && self.view.node_port != 0 {
            Line::append(&mut rules, chain).add("-d 127.0.0.0/8").counted_by(LOCALHOST_COUNTER).end();
        }
        if !self.view.external_traffic_policy.is_local() {
            self.comment(
                Line::append(&mut rules, chain),
                format_args!("masquerade traffic for {name} external destinations"),
            )
            .jump(MARK_MASQ);
        } else if reaches_cluster {
            if let Some(detector) = self.config.masquerade.detector(self.view.family) {
                let line = Line::append(&mut rules, chain).local(detector, true);
                self.comment(line, format_args!("pod traffic for {name} external destinations"))
                    .jump(self.cluster_policy);
            }
            let line = Line::append(&mut rules, chain);
            self.comment(line, format_args!("masquerade LOCAL traffic for {name} external destinations"))
                .source_is_node()
                .jump(MARK_MASQ);
            let line = Line::append(&mut rules, chain);
            self.comment(line, format_args!("route LOCAL traffic for {name} external destinations"))
                .source_is_node()
                .jump(self.cluster_policy);
        }
        if self.external_refusal.is_none() && !self.config.beside_ipvs {
            let is_local = self.view.external_traffic_policy.is_local();
            Line::append(&mut rules, chain).jump(if is_local { self.local_policy } else { self.cluster_policy });
        }
        Chain { name: chain, rules }
    }

    /// Who is not let in falls through untranslated and is dropped by filter KUBE-PROXY-FIREWALL.
    fn firewall_chain(&self) -> Chain {
        let (chain, name) = (self.firewall, &self.name);
        let comment = format!("{name} loadbalancer IP");
        let mut rules = String::new();
        for range in &self.view.source_ranges.ranges {
            self.comment(Line::append(&mut rules, chain).source(range), &comment).jump(self.external);
        }
        if self.view.source_ranges.admits_node {
            for address in &self.view.load_balancer_ips {
                self.comment(Line::append(&mut rules, chain).source_host(*address), &comment).jump(self.external);
            }
        }
        if !self.is_compact {
            Line::append(&mut rules, chain)
                .comment(format_args!("other traffic to {name} will be dropped by KUBE-PROXY-FIREWALL"))
                .end();
        }
        Chain { name: chain, rules }
    }

    fn dispatch_cluster_ip(&self, rules: &mut ServiceRules) {
        let Some(cluster_ip) = self.view.cluster_ip else { return };
        let selector = Selector::ClusterIp(cluster_ip);
        if let Some(refusal) = self.internal_refusal {
            return rules.dispatch.push(self.refuse(SharedChain::FilterServices, selector, refusal));
        }
        let is_local = self.view.internal_traffic_policy.is_local();
        let target = if is_local { self.local_policy } else { self.cluster_policy };
        rules.dispatch.push(self.lead(SharedChain::NatServices, selector, "cluster IP", target));
    }

    fn dispatch_external(&self, rules: &mut ServiceRules) {
        let view = self.view;
        let load_balancer_target = if self.uses_firewall { self.firewall } else { self.external };
        let external = view.external_ips.iter().map(|address| (*address, "external IP", self.external));
        let load_balancer =
            view.load_balancer_ips.iter().map(|address| (*address, "loadbalancer IP", load_balancer_target));
        for (address, what, target) in external.chain(load_balancer) {
            let selector = Selector::Address(address);
            if view.has_any_endpoint {
                rules.dispatch.push(self.lead(SharedChain::NatServices, selector, what, target));
            }
            if let Some(refusal) = self.refusal_by_rule() {
                rules.dispatch.push(self.refuse(SharedChain::FilterExternalServices, selector, refusal));
            }
        }
        if self.uses_firewall && !self.config.beside_ipvs {
            let addresses = view.load_balancer_ips.iter().map(|address| Selector::Address(*address));
            rules.dispatch.extend(addresses.map(|selector| self.drop_unadmitted(selector)));
        }
        if view.node_port != 0 {
            let selector = Selector::NodePort(view.protocol, view.node_port);
            if view.has_any_endpoint {
                rules.dispatch.push(self.lead(SharedChain::NatNodePorts, selector, "", self.external));
            }
            if let Some(refusal) = self.refusal_by_rule() {
                rules.dispatch.push(self.refuse(SharedChain::FilterExternalServices, selector, refusal));
            }
        }
    }

    /// In nat, only the classic layout has comments: each takes half a kilobyte of the kernel's memory, two thirds of a rule, which each change passes.
    fn comment<'t>(&self, line: Line<'t>, comment: impl Display) -> Line<'t> {
        if self.is_compact { line } else { line.comment(comment) }
    }

    /// Beside IPVS, whom to refuse or drop stands in sets.
    fn refusal_by_rule(&self) -> Option<Refusal> {
        self.external_refusal.filter(|_| !self.config.beside_ipvs)
    }

    /// A dispatch line up to its target: address, protocol, comment, port.
    fn dispatch_line<'t>(&self, text: &'t mut String, table: Table, selector: Selector, comment: &str) -> Line<'t> {
        let mut line = Line::bare(text);
        if let Selector::ClusterIp(address) | Selector::Address(address) = selector {
            line = line.destination_host(address);
        }
        line = line.protocol(self.view.protocol);
        let space = if comment.is_empty() { "" } else { " " };
        let comment = format_args!("{}{space}{comment}", self.name);
        line = if table == Table::Nat { self.comment(line, comment) } else { line.comment(comment) };
        match selector {
            Selector::ClusterIp(_) | Selector::Address(_) => line.port(self.view.protocol, self.view.port),
            Selector::NodePort(protocol, port) => line.port(protocol, port),
            Selector::Hairpin(_) => line,
        }
    }

    fn lead(&self, chain: SharedChain, selector: Selector, comment: &str, target: ChainName) -> DispatchLine {
        let mut rule = String::new();
        self.dispatch_line(&mut rule, chain.table(), selector, comment).jump(target);
        DispatchLine { chain, selector, rule }
    }

    fn refuse(&self, chain: SharedChain, selector: Selector, refusal: Refusal) -> DispatchLine {
        let comment = match refusal {
            Refusal::Reject => "has no endpoints",
            Refusal::Drop => "has no local endpoints",
        };
        let mut rule = String::new();
        let mut line = self.dispatch_line(&mut rule, chain.table(), selector, comment);
        if matches!(selector, Selector::NodePort(..)) {
            line = line.destination_is_node();
        }
        match refusal {
            Refusal::Reject => line.reject(self.view.family),
            Refusal::Drop => line.jump("DROP"),
        }
        DispatchLine { chain, selector, rule }
    }

    fn drop_unadmitted(&self, selector: Selector) -> DispatchLine {
        let comment = format!("traffic not accepted by {}", self.firewall);
        let mut rule = String::new();
        let chain = SharedChain::FilterProxyFirewall;
        self.dispatch_line(&mut rule, chain.table(), selector, &comment).jump("DROP");
        DispatchLine { chain, selector, rule }
    }
}
