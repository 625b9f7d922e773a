//! Parts of the rules of one service port. The dataplanes compose the rules of a service from these
//! parts.

use std::{collections::BTreeSet, fmt::Display, net::IpAddr};

use super::{
    RulesTable,
    config::RenderConfig,
    line::Line,
    names::{ChainKind, ChainName, DispatchChain, GateChain, LOCALHOST_COUNTER, MARK_MASQ},
};
use crate::{
    behaviours::{
        view::Destination,
        view::{NoLocalEndpoints, ServicePortView},
    },
    model::{Protocol, Service},
};

/// Adds the rules of one service port.
pub(in crate::dataplane) type RenderPort = fn(&PortRules<'_>, &mut ServiceRules);

/// A chain in nat that belongs to one service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceChain {
    /// Name.
    pub name: ChainName,
    /// Complete rules, each a line `-A NAME …`.
    pub rules: String,
}

/// The destination that a dispatch line matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Selector {
    /// A destination address that is a ClusterIP.
    ClusterIp(IpAddr),
    /// A destination address that is an externalIP or a load balancer IP.
    Address(IpAddr),
    /// A NodePort.
    NodePort(Protocol, u16),
    /// An endpoint of this node that is both source and destination.
    Hairpin(IpAddr),
}

/// One rule of a dispatch chain.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DispatchLine {
    /// The chain.
    pub chain: DispatchChain,
    /// The destination that the rule matches. In the compact layout, the selector also determines
    /// the group of the rule.
    pub selector: Selector,
    /// The rule without `-A CHAIN`, with a leading space and a line end.
    pub rule: String,
}

/// All rules of one service in one family.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ServiceRules {
    /// The chains of the service. A chain comes before the chains that jump to it.
    pub chains: Vec<ServiceChain>,
    /// The dispatch lines of the service.
    pub dispatch: Vec<DispatchLine>,
    /// Ports with a Local policy that have no endpoint on this node.
    pub no_local: NoLocalEndpoints,
}

impl ServiceRules {
    /// Renders the ports of a service in order. Leaves out SCTP ports if
    /// [`RenderConfig::leaves_out_sctp`] is set.
    pub(super) fn of_ports(
        config: &RenderConfig,
        is_compact: bool,
        views: &[ServicePortView],
        render: RenderPort,
    ) -> Self {
        let mut rules = Self::default();
        let is_left_out = |view: &&ServicePortView| config.leaves_out_sctp && view.protocol == Protocol::Sctp;
        for view in views.iter().filter(|view| !is_left_out(view)) {
            rules.no_local.add(view.no_local_endpoints());
            render(&PortRules::new(config, is_compact, view), &mut rules);
        }
        rules
    }
}

/// Renders the rule that accepts health checks of a load balancer before the host's firewall can
/// drop them.
pub(super) fn health_check_line(service: &Service) -> DispatchLine {
    let (protocol, port) = (Protocol::Tcp, service.health_check_node_port);
    let mut rule = String::new();
    Line::bare(&mut rule)
        .protocol(protocol)
        .comment(format_args!("{} health check node port", service.key))
        .port(protocol, port)
        .jump("ACCEPT");
    DispatchLine { chain: DispatchChain::FilterNodePorts, selector: Selector::NodePort(protocol, port), rule }
}

/// Renders the rules of one service port.
pub(in crate::dataplane) struct PortRules<'a> {
    config: &'a RenderConfig,
    is_compact: bool,
    pub(in crate::dataplane) view: &'a ServicePortView,
    name: String,
    pub(in crate::dataplane) cluster_policy: ChainName,
    pub(in crate::dataplane) local_policy: ChainName,
    external: ChainName,
    pub(in crate::dataplane) firewall: ChainName,
    pub(in crate::dataplane) uses_firewall: bool,
}

impl<'a> PortRules<'a> {
    fn new(config: &'a RenderConfig, is_compact: bool, view: &'a ServicePortView) -> Self {
        let cluster_policy = ChainName::of_port(ChainKind::ClusterPolicy, view);
        Self {
            config,
            is_compact,
            view,
            name: view.display_name(),
            cluster_policy,
            local_policy: cluster_policy.sibling(ChainKind::LocalPolicy),
            external: cluster_policy.sibling(ChainKind::External),
            firewall: cluster_policy.sibling(ChainKind::Firewall),
            uses_firewall: view.has_any_endpoint && !view.load_balancer_ips.is_empty() && !view.source_ranges.is_open(),
        }
    }

    /// True if the rules refuse all connections to the port: a proxy cannot carry SCTP.
    pub(in crate::dataplane) fn is_refused(&self) -> bool {
        self.config.has_proxy() && self.view.protocol == Protocol::Sctp
    }

    /// True if only a proxy can carry connections to the endpoints.
    pub(in crate::dataplane) fn is_proxy_only(&self) -> bool {
        self.config.has_proxy() && self.view.proxy_protocol.is_some()
    }

    /// Adds the chains of single endpoints, or in the compact layout the lines for hairpin
    /// connections.
    pub(in crate::dataplane) fn endpoint_rules(&self, endpoints: &BTreeSet<Destination>, rules: &mut ServiceRules) {
        if self.is_proxy_only() {
            return;
        }
        if self.is_compact {
            self.hairpin_lines(endpoints, rules);
        } else {
            rules.chains.extend(endpoints.iter().map(|destination| self.endpoint_chain(destination)));
        }
    }

    /// Adds the dispatch lines of the compact layout for hairpin connections, in which an endpoint
    /// is its own client. The lines are needed only on the node of the endpoint. An endpoint
    /// without a known node gets the lines on every node.
    fn hairpin_lines(&self, endpoints: &BTreeSet<Destination>, rules: &mut ServiceRules) {
        for destination in endpoints.iter().filter(|destination| destination.may_be_local) {
            let address = destination.address;
            let line = |chain, target: &str| {
                let mut rule = String::new();
                Line::bare(&mut rule).source_host(address).destination_host(address).jump(target);
                DispatchLine { chain, selector: Selector::Hairpin(address), rule }
            };
            rules.dispatch.push(line(DispatchChain::NatHairpin, "MASQUERADE --random-fully"));
            rules.dispatch.push(line(DispatchChain::FilterHairpin, "ACCEPT"));
        }
    }

    fn endpoint_chain(&self, destination: &Destination) -> ServiceChain {
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
        ServiceChain { name: chain, rules }
    }

    /// Renders a chain that distributes connections over endpoints. With session affinity, known
    /// clients keep their endpoint. For other clients, the rule of an endpoint matches at random.
    /// The probability is the weight of this endpoint, divided by the sum of its weight and the
    /// weights of all later endpoints. With equal weights, the probabilities are 1/n, 1/(n − 1), ….
    pub(in crate::dataplane) fn policy_chain(
        &self,
        chain: ChainName,
        endpoints: &[Destination],
        is_internal: bool,
    ) -> ServiceChain {
        let mut rules = String::new();
        self.gate_jumps(chain, &mut rules);
        if is_internal && !self.is_compact {
            self.cluster_ip_masquerade(chain, &mut rules);
        }
        let endpoints: &[Destination] = if self.is_proxy_only() { &[] } else { endpoints };
        if let Some(timeout_seconds) = self.view.affinity_timeout_seconds {
            let check = format!("--rcheck --seconds {timeout_seconds} --reap");
            for destination in endpoints {
                let list = ChainName::of_endpoint(self.view, destination);
                let line = self.begin_policy_rule(&mut rules, chain, destination);
                self.end_policy_rule(line.recent(&check, list, self.view.family), destination);
            }
        }
        let mut remaining: u32 = endpoints.iter().map(|destination| destination.weight.get()).sum();
        for destination in endpoints {
            let line = self.begin_policy_rule(&mut rules, chain, destination);
            let weight = destination.weight.get();
            let line = if weight < remaining { line.part_of(weight, remaining) } else { line };
            self.end_policy_rule(line, destination);
            remaining -= weight;
        }
        ServiceChain { name: chain, rules }
    }

    /// Renders the rules that lead to the listeners of the proxy while the gate is closed. The
    /// proxy finds the endpoints of a NodePort by the port alone, because the address may be any
    /// address of the node, also one that is an address of another service.
    fn gate_jumps(&self, chain: ChainName, rules: &mut String) {
        let protocol = self.view.protocol;
        if !self.config.has_proxy() || protocol != Protocol::Tcp || self.view.bypasses_proxy {
            return;
        }
        let (service, node_port) = match chain.kind() {
            ChainKind::LocalPolicy => (GateChain::Local, GateChain::NodePortLocal),
            _ => (GateChain::Cluster, GateChain::NodePortCluster),
        };
        let ports = [(self.view.port, service), (self.view.node_port, node_port)];
        // If both ports are equal, all connections with this port count as those of the NodePort.
        let used = ports.into_iter().skip(usize::from(self.view.port == self.view.node_port));
        for (port, gate) in used.filter(|(port, _)| *port != 0) {
            Line::append(rules, chain).protocol(protocol).port(protocol, port).jump(gate.as_str());
        }
    }

    /// Begins a rule that selects an endpoint. Only the classic layout has comments.
    fn begin_policy_rule<'t>(&self, rules: &'t mut String, chain: ChainName, destination: &Destination) -> Line<'t> {
        let line = Line::append(rules, chain);
        if self.is_compact {
            return line.protocol(self.view.protocol);
        }
        line.comment(format_args!("{} -> {}", self.name, destination.socket_address()))
    }

    /// Ends a rule that selects an endpoint. In the classic layout the rule jumps to the chain of
    /// the endpoint. In the compact layout the rule itself records the client if the service has
    /// session affinity, and translates the destination.
    fn end_policy_rule(&self, line: Line<'_>, destination: &Destination) {
        let endpoint = || ChainName::of_endpoint(self.view, destination);
        if !self.is_compact {
            return line.jump(endpoint());
        }
        let line = match self.view.affinity_timeout_seconds {
            Some(_) => line.recent("--set", endpoint(), self.view.family),
            None => line,
        };
        line.jump(format_args!("DNAT --to-destination {}", destination.socket_address()));
    }

    /// Renders the rule of the classic layout that marks traffic to the ClusterIP for masquerading.
    /// The compact layout has rules for each group of ClusterIPs instead, see [`super::dispatch`].
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

    /// Renders the chain for external destinations without its last rule. The last rule jumps to
    /// the chain of the policy. With Local policy, traffic from pods of this node and from the node
    /// itself may use all endpoints, because no load balancer has chosen this node for this
    /// traffic.
    pub(in crate::dataplane) fn external_chain(&self) -> ServiceChain {
        let (chain, name) = (self.external, &self.name);
        let mut rules = String::new();
        let reaches_cluster = !self.view.cluster_endpoints.is_empty();
        // Only NodePorts have destinations in 127.0.0.0/8. The rule is in this chain, because in
        // KUBE-NODEPORTS it would also slow down connections to the NodePorts of other services.
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
        ServiceChain { name: chain, rules }
    }

    /// Renders the chain that checks source ranges. Packets that no range admits are not
    /// translated, and filter KUBE-PROXY-FIREWALL drops them.
    pub(in crate::dataplane) fn firewall_chain(&self) -> ServiceChain {
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
        ServiceChain { name: chain, rules }
    }

    /// Returns the externalIPs and load balancer IPs in order, each with the comment and the target
    /// of its dispatch line.
    fn external_addresses(&self) -> impl Iterator<Item = (Selector, &'static str, ChainName)> {
        let load_balancer_target = if self.uses_firewall { self.firewall } else { self.external };
        let external = self.view.external_ips.iter().map(|address| (*address, "external IP", self.external));
        let load_balancer =
            self.view.load_balancer_ips.iter().map(move |address| (*address, "loadbalancer IP", load_balancer_target));
        external.chain(load_balancer).map(|(address, what, target)| (Selector::Address(address), what, target))
    }

    /// Returns the selectors of externalIPs, load balancer IPs and the NodePort.
    pub(in crate::dataplane) fn external_selectors(&self) -> Vec<Selector> {
        let node_port = Selector::NodePort(self.view.protocol, self.view.node_port);
        let node_port = Some(node_port).filter(|_| self.view.node_port != 0);
        self.external_addresses().map(|(selector, ..)| selector).chain(node_port).collect()
    }

    /// Adds the dispatch lines that jump from external destinations to the chains of the service.
    pub(in crate::dataplane) fn external_jumps(&self, rules: &mut ServiceRules) {
        for (selector, what, target) in self.external_addresses() {
            rules.dispatch.push(self.dispatch_jump(DispatchChain::NatServices, selector, what, target));
        }
        if self.view.node_port != 0 {
            let selector = Selector::NodePort(self.view.protocol, self.view.node_port);
            rules.dispatch.push(self.dispatch_jump(DispatchChain::NatNodePorts, selector, "", self.external));
        }
    }

    /// Adds a comment to a rule in nat, only in the classic layout. A comment takes half a kilobyte
    /// of kernel memory, which is two thirds of the size of a rule, and the kernel copies the
    /// comment with each change of the table.
    fn comment<'t>(&self, line: Line<'t>, comment: impl Display) -> Line<'t> {
        if self.is_compact { line } else { line.comment(comment) }
    }

    /// Renders a dispatch line without its target: address, protocol, comment, port.
    pub(in crate::dataplane) fn dispatch_line<'t>(
        &self,
        text: &'t mut String,
        table: RulesTable,
        selector: Selector,
        comment: &str,
    ) -> Line<'t> {
        let mut line = Line::bare(text);
        if let Selector::ClusterIp(address) | Selector::Address(address) = selector {
            line = line.destination_host(address);
        }
        line = line.protocol(self.view.protocol);
        let space = if comment.is_empty() { "" } else { " " };
        let comment = format_args!("{}{space}{comment}", self.name);
        line = if table == RulesTable::Nat { self.comment(line, comment) } else { line.comment(comment) };
        match selector {
            Selector::ClusterIp(_) | Selector::Address(_) => line.port(self.view.protocol, self.view.port),
            Selector::NodePort(protocol, port) => line.port(protocol, port),
            Selector::Hairpin(_) => line,
        }
    }

    /// Renders a dispatch line that jumps to one of the chains of the service.
    pub(in crate::dataplane) fn dispatch_jump(
        &self,
        chain: DispatchChain,
        selector: Selector,
        comment: &str,
        target: ChainName,
    ) -> DispatchLine {
        let mut rule = String::new();
        self.dispatch_line(&mut rule, chain.table(), selector, comment).jump(target);
        DispatchLine { chain, selector, rule }
    }
}
