//! Rules that restrict NodePorts to other addresses than the settings select are a difference.
#![allow(clippy::unwrap_used)]

use headgate_core::{
    Family, NodeFacts, State,
    explain::{Mode, NodeSettings},
    iptables::NodePortAddresses,
    view::MasqueradeConfig,
};
use headgate_oracle::{compare, iptables};

/// Rules of iptables without Services. Packets that meet `conditions` reach the chain of NodePorts.
fn rules(conditions: &str) -> iptables::Rules {
    let saved = format!(
        "*nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n:KUBE-NODEPORTS - [0:0]\n\
         -A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n\
         -A KUBE-SERVICES {conditions} -j KUBE-NODEPORTS\nCOMMIT\n\
         *filter\n:INPUT ACCEPT [0:0]\n:FORWARD ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n\
         :KUBE-PROXY-FIREWALL - [0:0]\n:KUBE-EXTERNAL-SERVICES - [0:0]\n\
         -A INPUT -j KUBE-PROXY-FIREWALL\n-A INPUT -j KUBE-EXTERNAL-SERVICES\n\
         -A FORWARD -j KUBE-PROXY-FIREWALL\n-A FORWARD -j KUBE-SERVICES\n-A FORWARD -j KUBE-EXTERNAL-SERVICES\n\
         -A OUTPUT -j KUBE-PROXY-FIREWALL\n-A OUTPUT -j KUBE-SERVICES\n-A OUTPUT -j KUBE-EXTERNAL-SERVICES\n\
         COMMIT\n"
    );
    let mut rules = iptables::Rules::default();
    saved.lines().for_each(|line| rules.line(line));
    rules
}

#[test]
fn node_ports_restricted_to_one_address_are_found() {
    let one = NodePortAddresses::Only(vec!["192.0.2.1".parse().unwrap()]);
    let (every, listed) = ("every address of the node", "192.0.2.1");
    for (conditions, node_ports, found) in [
        ("-m addrtype --dst-type LOCAL", &NodePortAddresses::All, None),
        ("-d 192.0.2.1/32 -m addrtype --dst-type LOCAL", &NodePortAddresses::All, Some((listed, every))),
        ("-d 192.0.2.1/32", &NodePortAddresses::All, Some((listed, every))),
        ("-d 192.0.2.1/32", &one, None),
        ("-m addrtype --dst-type LOCAL", &one, Some((every, listed))),
    ] {
        let settings = NodeSettings {
            mode: Mode::Iptables,
            masquerade: MasqueradeConfig::default(),
            node_ports_v4: node_ports.clone(),
            node_ports_v6: node_ports.clone(),
            localhost_node_ports: true,
        };
        let table = iptables::decode(&rules(conditions), Family::V4, None, &[].into());
        let comparison = compare(&State::default(), &NodeFacts::named("n1"), &settings, table, &|_| true);
        let sentences: Vec<String> = comparison.differences.iter().map(ToString::to_string).collect();
        let wanted =
            found.map(|(found, wanted)| format!("IPv4 NodePorts answer on {found}, but should answer on {wanted}"));
        assert_eq!(sentences, Vec::from_iter(wanted), "{conditions}");
        assert_eq!(comparison.not_understood, Vec::<String>::new(), "{conditions}");
    }
}
