//! A ruleset of kube-proxy's shape for the workload: the chain `KUBE-SERVICES` with a rule for each
//! Service, one chain for each Service, and one chain for each endpoint. Endpoint rules have no
//! comments, because kube-proxy writes no comments above 1,000 endpoints. A partial sync rewrites
//! the chains that all Services share, and the chains of the changed Service.

use std::fmt::Write as _;

use headgate_core::{
    EndpointPort, Protocol,
    iptables::names::{ChainKind, ChainName},
};

use super::workload;

/// The script of the first sync.
#[must_use]
pub fn full(services: u32, endpoints: u32) -> String {
    let all: Vec<u32> = (0..services).collect();
    script(services, &all, endpoints)
}

/// The script of a partial sync after a change of one Service's endpoints.
#[must_use]
pub fn partial(services: u32, endpoints: u32, changed: u32) -> String {
    script(services, &[changed], endpoints)
}

/// The jumps from the built-in chains, which kube-proxy inserts with separate commands.
pub const JUMPS: &str = "*nat\n-I PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
    -I OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
    -I POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING\nCOMMIT\n";

fn script(services: u32, with_chains: &[u32], endpoints: u32) -> String {
    let mut head = String::from(FILTER);
    head.push_str(
        "*nat\n:KUBE-NODEPORTS - [0:0]\n:KUBE-SERVICES - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n:KUBE-POSTROUTING - [0:0]\n",
    );
    let mut rules = String::from(MASQUERADE);
    let EndpointPort { port, .. } = workload::endpoint(0, 0).ports[0].clone();
    for service in 0..services {
        let (name, ip) = (format!("{}:http", workload::key(service)), workload::cluster_ip(service));
        let chain = ChainName::of(ChainKind::ClusterPolicy, &format!("{name}{}", Protocol::Tcp.as_lower_str()));
        // Writing to a String cannot fail.
        let _ = writeln!(
            rules,
            "-A KUBE-SERVICES -m comment --comment \"{name} cluster IP\" -m tcp -p tcp -d {ip} --dport 80 -j {chain}"
        );
    }
    rules.push_str("-A KUBE-SERVICES -m comment --comment \"kubernetes service nodeports; NOTE: this must be the last rule in this chain\" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\n");
    for service in with_chains.iter().copied() {
        let (name, ip) = (format!("{}:http", workload::key(service)), workload::cluster_ip(service));
        let chain = ChainName::of(ChainKind::ClusterPolicy, &format!("{name}tcp"));
        let _ = writeln!(head, ":{chain} - [0:0]");
        let _ = writeln!(
            rules,
            "-A {chain} -m comment --comment \"{name} cluster IP\" -m tcp -p tcp -d {ip} --dport 80 ! -s 11.0.0.0/8 -j KUBE-MARK-MASQ"
        );
        for endpoint in 0..endpoints {
            let to = format!("{}:{port}", workload::endpoint_ip(service, endpoint));
            let endpoint_chain = ChainName::of(ChainKind::Endpoint, &format!("{name}tcp{to}"));
            let remaining = endpoints - endpoint;
            if remaining > 1 {
                let probability = 1.0 / f64::from(remaining);
                let _ = writeln!(
                    rules,
                    "-A {chain} -m statistic --mode random --probability {probability:.10} -j {endpoint_chain}"
                );
            } else {
                let _ = writeln!(rules, "-A {chain} -j {endpoint_chain}");
            }
            let _ = writeln!(head, ":{endpoint_chain} - [0:0]");
            let source = workload::endpoint_ip(service, endpoint);
            let _ = writeln!(rules, "-A {endpoint_chain} -s {source} -j KUBE-MARK-MASQ");
            let _ = writeln!(rules, "-A {endpoint_chain} -m tcp -p tcp -j DNAT --to-destination {to}");
        }
    }
    head + &rules + "COMMIT\n"
}

const FILTER: &str = "*filter\n:KUBE-NODEPORTS - [0:0]\n:KUBE-SERVICES - [0:0]\n:KUBE-EXTERNAL-SERVICES - [0:0]\n\
    :KUBE-FORWARD - [0:0]\n:KUBE-PROXY-FIREWALL - [0:0]\n-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP\nCOMMIT\n";

const MASQUERADE: &str = "-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n\
    -A KUBE-POSTROUTING -j MARK --xor-mark 0x4000\n-A KUBE-POSTROUTING -j MASQUERADE --random-fully\n\
    -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n";
